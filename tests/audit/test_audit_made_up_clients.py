"""A method is asked for made-up clients: what one of them may do to the others."""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path

import pytest

import planted
from command_line import flags, printed
from fedgs.audit import noise_check, worst_case
from fedgs.audit.crafted_releases import audited
from fedgs.audit.finding import HOLDS, REFUTED, Check
from fedgs.audit.worst_case import check_method, made_up
from fedgs.errors import UserError
from fedgs.methods.gs_wgan import GsWgan
from fedgs.round import answer as rounds
from fedgs.runs.run_folder import RunFolder
from planted import of_method
from tiny import FULL_PARTICIPATION, MOMENTS, REFINED, WITH_RELEASES, tiny_config

INTEGERS = FULL_PARTICIPATION | {"secure_aggregation": True}
SELECTION = {"method": "cohort-classifier*2,cohort-counts*1:1", "below": 0.5}
SELECTION |= {"client_selection": "all", "num_rounds": 3}
COMPACT = {"message_precision": "compact"}


@pytest.fixture
def given(monkeypatch):
    """Makes an object of a class the method of a run."""
    return partial(planted.given, monkeypatch)


def refuted(checks: list[Check]) -> set[str]:
    return {check.check for check in checks if check.verdict == REFUTED}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        FULL_PARTICIPATION,
        INTEGERS,
        FULL_PARTICIPATION | COMPACT,
        FULL_PARTICIPATION | {"discriminator_training": "frozen"},
        {"num_clients": 2, "clients_per_round": 1},
        WITH_RELEASES,
        MOMENTS | {"secure_aggregation": True},
        REFINED,
    ],
    ids=str,
)
def test_every_method_with_discriminators_or_mean_features_holds(settings):
    _check_holds(tiny_config(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "fedavg-gan"},
        {"method": "dp-merf", "secure_aggregation": True},
        {"method": "cohort-classifier"},
        SELECTION,
        SELECTION | {"secure_aggregation": True},
    ],
    ids=str,
)
def test_every_other_method_of_fedgs_holds(settings):
    _check_holds(of_method(**settings))


def _check_holds(config):
    found = check_method(audited(config))
    assert [check.verdict for check in found] == [HOLDS] * 4, found
    names = [check.check.removeprefix("method, ") for check in found]
    assert names == ["one part", "asked alone", "one replaced", "one left out"]
    # Of each phase, the first round.
    last = ", ".join(str(first) for first in config.first_rounds[:-1])
    assert all(f"made-up clients in round {last}: " in check.tested for check in found)


@pytest.mark.parametrize("num_clients", [2, 3, 40])
def test_made_up_clients_are_as_odd_as_clients_can_be(num_clients):
    config = dataclasses.replace(tiny_config(), num_clients=num_clients)
    data = made_up(config)
    assert data.num_clients == min(num_clients, 5) + 1
    own = [data.of(client) for client in range(data.num_clients)]
    assert 1 in {len(one.labels) for one in own}
    assert own[-1].images.min() == 255
    assert len({len(one.labels) for one in (own[0], own[-1])}) == 2
    if num_clients > 3:
        assert own[2].images.max() == 0
        assert len(set(own[2].labels.tolist())) == 1


@pytest.mark.parametrize(
    "settings",
    [{}, {"secure_aggregation": True}, {"num_clients": 1, "clients_per_round": 1}],
    ids=str,
)
def test_an_honest_method_of_others_holds_exactly(given, settings):
    found = check_method(audited(given(planted.Honest, **settings)))
    assert [check.verdict for check in found] == [HOLDS] * 4, found
    alone = {check.check: check for check in found}["method, asked alone"]
    assert alone.found < alone.allowed < 1e-4


@pytest.mark.parametrize("clients", [2, 6])
@pytest.mark.parametrize(
    "kind",
    [
        *[
            planted.DividesByAll,
            planted.DividesByTheRound,
            planted.SubtractsTheOneBefore,
        ],
        *[planted.LearnsInTraining, planted.Rare, planted.InALaterRound],
    ],
)
def test_a_method_that_remembers_one_client_for_another_is_refuted(
    given, kind, clients
):
    config = given(kind, num_clients=clients, clients_per_round=1)
    found = {check.check: check for check in check_method(audited(config))}
    check = found["method, asked alone"]
    assert check.verdict == REFUTED
    assert check.found > 1e-4
    rounds = "1, 3" if kind is planted.InALaterRound else "1"
    assert check.tested.startswith(f"made-up clients in round {rounds}: ")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (planted.WrongShape, "TypeError: .*the terms promise"),
        (planted.Whole, "TypeError: .*no tensor of real numbers"),
        (planted.Fails, "IndexError: too few images"),
        (planted.FailsInItsSecondKind, "ZeroDivisionError: in a later round"),
    ],
)
def test_an_answer_that_fails_is_refuted_and_says_how(given, kind, text):
    (check,) = check_method(audited(given(kind)))
    assert (check.check, check.verdict) == ("method, answers", REFUTED)
    assert re.search(text, check.tested)


def test_a_frame_that_asks_one_client_twice_and_another_never_is_refuted(
    given, monkeypatch
):
    def first_twice(config, hosted, request):
        *all_but_last, last = raw(config, hosted, request)
        return [*all_but_last, all_but_last[0] if all_but_last else last]

    raw = rounds.raw_answers
    config = given(planted.Honest)
    monkeypatch.setattr(worst_case, "raw_answers", first_twice)
    assert "method, asked alone" in refuted(check_method(audited(config)))


def test_a_frame_that_gives_every_client_the_same_object_is_refuted(given, monkeypatch):
    """What a method keeps in itself, a fresh copy of it has not."""
    config = given(planted.KeepsInItself)
    assert refuted(check_method(audited(config))) == set()
    monkeypatch.setattr(rounds.copy, "deepcopy", lambda method: method)
    assert "method, asked alone" in refuted(check_method(audited(config)))


def test_a_method_of_fedgs_that_mixes_its_stack_is_refuted(monkeypatch):
    """Rows that are normalised over the call, or given to another client."""
    config = tiny_config(**FULL_PARTICIPATION)
    original = GsWgan.answer_stacked

    def normalised(self, config, clients, request):
        rows = original(self, config, clients, request)
        return rows / rows.norm()

    def first_twice(self, config, clients, request):
        rows = original(self, config, clients, request).clone()
        rows[-1] = rows[0]
        return rows

    for answer in (normalised, first_twice):
        monkeypatch.setattr(GsWgan, "answer_stacked", answer)
        assert "method, asked alone" in refuted(check_method(audited(config)))


def test_a_frame_that_does_not_clip_is_refuted_by_the_methods_answers(
    given, monkeypatch
):
    class Long(planted.Honest):
        def answer(self, config, client, request):
            return 1000 * super().answer(config, client, request)

    config = given(Long)
    assert refuted(check_method(audited(config))) == set()
    monkeypatch.setattr(rounds, "clip", planted.by(planted.CLIPS["nothing"]))
    expected = {"method, one part", "method, one replaced", "method, one left out"}
    assert refuted(check_method(audited(config))) >= expected


# ------------------------------------------------------------------ fedgs audit

FORGETFUL = "return (sums / counts[:, None]).view(shape)"
REMEMBERS = """mean = (sums / counts[:, None]).view(shape)
        SEEN.append(mean.norm())
        return mean / sum(SEEN)
"""


def test_the_command_refutes_a_method_of_others_by_made_up_clients(
    fedgs, tmp_path, monkeypatch
):
    """The page's own method holds; with a memory of its module it does not."""
    page = (Path(__file__).parents[2] / "docs" / "baselines.md").read_text()
    code = page.partition("<!-- class_means.py -->\n```python\n")[2].partition("```")[0]
    remembering = code.replace(FORGETFUL, REMEMBERS) + "\nSEEN = []\n"
    assert "SEEN.append" in remembering
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(noise_check, "NUM_DRAWS", 60_000)
    own = {"data": "digits", "num_clients": 12, "clients_per_node": 4, "seed": 1}
    own |= {"target_epsilon": 8}
    for name, text in (("honest", code), ("remembering", remembering)):
        (tmp_path / f"audited_{name}.py").write_text(text)
        method = f"audited_{name}:METHOD"
        monkeypatch.setenv("FEDGS_METHODS", method)
        run = tmp_path / name
        printed(fedgs("train", *flags(recipe=method, **own, output=run)))
        code, out, err = fedgs("audit", run, "--trials", 2000)
        assert code == (name == "remembering"), err
        report = json.loads((run / "audit" / "report.json").read_text())
        verdicts = {check["check"]: check["verdict"] for check in report["checks"]}
        assert report["holds"] == (code == 0)
        assert list(verdicts) == [
            *("terms", "clipping, embedding", "noise, embedding"),
            *[f"method, {what}" for what in worst_case.MEASURED],
        ]
        broken = {name for name, verdict in verdicts.items() if verdict == REFUTED}
        assert broken == ({"method, asked alone"} if code else set())
        assert all(finding["verdict"] == HOLDS for finding in report["findings"])
        assert "every claim rests on" in out
        assert ("REFUTED: method, asked alone: " in err) == bool(code)


def test_public_data_that_are_gone_leave_the_other_checks(
    fedgs, tmp_path, exit_code, monkeypatch
):
    def gone(config):
        raise UserError("public_data = 'npz:gone.npz': cannot be read")

    config = tiny_config(
        **FULL_PARTICIPATION, noise_seed=None, output=str(tmp_path / "run")
    )
    folder = RunFolder.create(config)
    monkeypatch.setattr(worst_case, "new_state", gone)
    monkeypatch.setattr(noise_check, "NUM_DRAWS", 60_000)
    code, out, err = fedgs("audit", folder.path, "--trials", 1000)
    assert code == 0, err
    assert "made-up clients: not run: public_data = 'npz:gone.npz'" in out
    assert "noise, gradient" in out
