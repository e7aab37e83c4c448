"""Attack B on twelve clients of a few images each."""

import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from fedgs.audit.canaries import Canaries, CanaryDiscriminators, CanaryNodes
from fedgs.audit.finding import HOLDS, REFUTED, Finding
from fedgs.audit.one_run import audit_run, best_guesses
from fedgs.config.run_config import RunConfig
from fedgs.data.federated import FederatedImages
from fedgs.gan.discriminators import Discriminators
from fedgs.mechanism.noise import NoiseStream
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.ledger import Ledger
from fedgs.privacy.plan import Plan
from fedgs.round.local import train_nodes
from fedgs.runs.run_folder import RunFolder
from tiny import FULL_PARTICIPATION, tiny_config, tiny_data

CLIENTS = 12
DELTA = 1e-5
SELECTED = {"client_selection": "uniform", "discriminator_training": "selected"}
SELECTED |= {"clients_per_round": 1, "clients_per_node": 1}
FULL = {**FULL_PARTICIPATION, "clients_per_node": 3}


def config_of(**settings: object) -> RunConfig:
    defaults = {"num_clients": CLIENTS, "engine": "flower", "num_rounds": 2, **FULL}
    return tiny_config(**defaults | settings)


def twelve_clients(config: RunConfig) -> FederatedImages:
    few = tiny_data(dataclasses.replace(config, num_clients=6))
    records = np.array_split(np.arange(len(few.images)), CLIENTS)
    names = tuple(map(str, range(CLIENTS)))
    return dataclasses.replace(few, client_records=tuple(records), client_names=names)


def canaries_of(config: RunConfig, relation: str = "replace-one") -> Canaries:
    return Canaries.draw(config, 10, relation, np.random.default_rng(3))


def audited(
    tmp_path: Path, config: RunConfig, relation: str = "replace-one"
) -> dict[str, Finding]:
    config = dataclasses.replace(config, output=str(tmp_path / "again"))
    known = Plan.from_config(config), twelve_clients(config)
    canaries, stop = canaries_of(config, relation), threading.Event()
    findings = audit_run(config, *known, canaries, DELTA, lambda metrics: None, stop)
    return {finding.attack: finding for finding in findings}


@pytest.mark.parametrize("secure_aggregation", [False, True])
def test_scores_hold_the_canaries_and_noise_only(tmp_path, secure_aggregation):
    own = {"engine": "local", "secure_aggregation": secure_aggregation}
    config = config_of(noise_multiplier=0.0, output=str(tmp_path / "again"), **own)
    canaries = canaries_of(config)
    with CanaryNodes(config, twelve_clients(config), canaries) as nodes:
        train_nodes(RunFolder.create(config), nodes, lambda m: None, threading.Event())
    signs = np.where(canaries.is_in, 1.0, -1.0)
    expected = signs * config.num_rounds * config.batch_size  # all other clients' gone
    assert nodes.releases == pytest.approx(expected, abs=1e-3)
    assert nodes.sums == pytest.approx(expected, abs=1e-3)


def test_coins_show_where_noise_is_small(tmp_path):
    config = config_of(noise_multiplier=0.05, generator_learning_rate=0.01)
    found = audited(tmp_path, config)
    assert list(found) == ["B node releases", "B sums", "B generator"]
    adversaries = [finding.adversary for finding in found.values()]
    assert adversaries == ["server", "secagg", "release"]
    ratio = Plan.from_config(config).ratio("server", "replace-one", 0)
    first = found["B node releases"]
    assert first.rounds == first.details["most_participations"] == 2
    assert first.epsilon == pytest.approx(epsilon_from_mu(2**0.5 / ratio, DELTA))
    for attack in ("B node releases", "B sums"):
        assert found[attack].details["correct_of_all"] == 10
        assert found[attack].lower_bound > 0.3
    assert {finding.verdict for finding in found.values()} == {HOLDS}


def test_masked_rounds_in_much_noise_tell_nothing(tmp_path):
    masked = {"secure_aggregation": True, "noise_multiplier": 1000.0, "num_rounds": 1}
    found = audited(tmp_path, config_of(**masked), "zero-out")
    adversaries = [finding.adversary for finding in found.values()]
    assert adversaries == ["unmasked", "secagg", "release"]  # as if masking failed
    assert found["B node releases"].epsilon > found["B sums"].epsilon
    assert all(finding.lower_bound < 0.5 for finding in found.values())


def test_selected_clients_of_a_local_run_are_audited_by_their_count(tmp_path):
    settings = {"num_rounds": 12, "noise_multiplier": 0.05, "warm_start_rounds": 0}
    config = config_of(**SELECTED, **settings, discriminator_steps=1, engine="local")
    found = audited(tmp_path, config)
    assert [finding.adversary for finding in found.values()] == ["release"] * 2
    sums = found["B sums"]
    assert 0 < sums.details["canaries_asked"] < 10
    assert sums.details["correct_of_all"] == sums.details["canaries_asked"]
    assert 1 <= sums.details["most_participations"] < 12
    assert sums.verdict == HOLDS


def test_missing_noise_is_caught_whatever_seed_and_budget_the_run_had(
    tmp_path, monkeypatch
):
    def none(self, shape, noise_std):
        return np.zeros(shape)

    monkeypatch.setattr(NoiseStream, "normal", none)
    settings = {"target_epsilon": 0.001, "noise_multiplier": 100.0, "noise_seed": 3}
    found = audited(tmp_path, config_of(**settings, min_answers=1))
    assert found["B node releases"].verdict == REFUTED
    assert found["B sums"].verdict == REFUTED
    again = RunFolder.open(tmp_path / "again")
    events = Ledger.read(again.path / "ledger.jsonl").events
    assert again.config.noise_seed is None
    assert [event.noise_source for event in events] == ["os", "os"]
    assert list(again.private.iterdir()) == []  # no client's state or count is written


# ------------------------------------------------------------------ canaries


def test_gradients_follow_the_coins():
    config = config_of(clip_bound=2.0)
    for relation, out in (("replace-one", -1.0), ("zero-out", 0.0)):
        canaries = canaries_of(config, relation)
        assert 0 < canaries.is_in.sum() < 10
        each = (canaries.clients, canaries.is_in, canaries.images(config))
        for client, is_in, e in zip(*each, strict=True):
            expected = (1.0 if is_in else out) * 20 * e
            assert torch.allclose(canaries.gradients(config)[client], expected.float())


def test_clients_that_are_asked_come_first():
    counts = canaries_of(config_of(**SELECTED, num_rounds=4)).counts
    assert counts.sum() == 4
    assert sorted(counts > 0, reverse=True) == (counts > 0).tolist()


def test_other_clients_answer_as_without_canaries():
    config = config_of()
    fixed = {4: torch.full((1, 16, 16), 3.0)}
    with_canary = CanaryDiscriminators(config, range(3, 6), fixed)
    plain = Discriminators(config, range(3, 6))
    query = (torch.arange(3), torch.rand(4, 1, 16, 16), torch.zeros(4).long())
    found, expected = with_canary.query(*query), plain.query(*query)
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert torch.equal(found[1], torch.full((4, 1, 16, 16), 3.0))


def test_surest_guesses_are_made_first():
    scores = np.array([5.0, -4.0, 3.0, -2.0, 0.1, 0.1, 0.1, 0.1] * 10)
    is_in = np.array([True, False, True, False, False, False, True, True] * 10)
    bound, guesses, correct = best_guesses(scores, is_in, 80, DELTA, 0.05)
    assert (guesses, correct) == (40, 40)
    assert 1 < bound < best_guesses(scores, scores > 0, 80, DELTA, 0.05)[0]
