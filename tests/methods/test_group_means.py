"""Group means: the release is that of a run of each group, and moves as promised."""

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgs.cohorts.client_groups import CohortOfClient
from fedgs.config.feature_settings import MASS
from fedgs.config.run_config import GroupMeansConfig, ResolvedConfig, RunConfig
from fedgs.data.cohort import keep_cohort
from fedgs.data.federated import FederatedImages, to_float
from fedgs.diagnosis import conclusion
from fedgs.diagnosis.conclusion import conclude, groups_in, samples_of
from fedgs.files import read_tensors
from fedgs.gan.features import embedding, frequency_weights
from fedgs.gan.moments import in_pixels
from fedgs.mechanism.sanitizer import SanitizedGradients
from fedgs.methods import group_means, new_state, phase_at
from fedgs.methods.base import Hosted
from fedgs.methods.group_means import TARGET, Group, groups_released
from fedgs.privacy.accountant import statements
from fedgs.privacy.plan import Plan
from fedgs.privacy_label import privacy_label
from fedgs.round.answer import answer_of, summed
from fedgs.round.local import LocalNodes
from fedgs.round.node import Node
from fedgs.round.preparation import with_noise
from fedgs.round.run import new_event
from fedgs.runs import epsilons
from fedgs.runs.run_folder import RunFolder
from groups import (
    CLIENTS,
    ONCE,
    finished,
    made,
    members,
    of_cohorts,
    of_nodes,
    only,
    people,
    phase_of,
    write_cohorts,
    write_people,
)
from refusals import assert_refused
from runs import events, train
from simulated_grid import FakeGrid, product, start
from tests.support.ledgers import statements_from_ledger
from tiny import changed, next_request, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore:.*have no line")

QUIET = {"noise_multiplier": 0.0}
MODES = ("nodes", "cohorts")
DELTA = 1e-5


def releases(config: ResolvedConfig, data: FederatedImages) -> list:
    """What the nodes of a run release, each made anew for it."""
    request = next_request(config, new_state(config))
    with tempfile.TemporaryDirectory() as place:
        return [
            Node(config, node, data, Path(place)).answer(request)
            for node in range(config.num_nodes)
        ]


# ------------------------------------------------------------------ runs of each group


@pytest.mark.parametrize("more", [{}, {"image_channels": 3}, {"clip_bound": 0.02}])
@pytest.mark.parametrize("mode", MODES)
def test_every_groups_pictures_are_those_of_its_clients_alone(tmp_path, mode, more):
    config, data = made(mode, tmp_path, **QUIET | more)
    own = phase_of(config)
    samples = samples_of(groups_in(finished(config, data), own))
    of_groups = members(config, data)
    assert sum(map(len, samples.values())) == len(of_groups) == 8
    for (title, part), clients in of_groups.items():
        images, labels = samples[title][part]
        assert labels.tolist() == [0, 1, 2]
        assert images.std() > 0.01
        expected = mean_pictures(own, data, clients)
        np.testing.assert_allclose(images, expected, atol=2e-6)


@pytest.mark.parametrize("more", [{}, {"image_channels": 3}, {"clip_bound": 0.02}])
@pytest.mark.parametrize("mode", MODES)
def test_every_groups_pictures_are_those_of_a_run_on_its_clients_alone(
    tmp_path, mode, more, monkeypatch
):
    """The runs of `means` that this one release is in place of.

    Their frequencies have no weights, which change what clipping leaves of a client: so
    these are 1 here, and all else has to be the same.
    """
    config, data = made(mode, tmp_path, **QUIET | more)
    unweighted = torch.ones(phase_of(config).num_features)
    monkeypatch.setattr(group_means, "frequency_weights", lambda config: unweighted)
    samples = samples_of(groups_in(finished(config, data), phase_of(config)))
    of_groups = members(config, data)
    assert sum(map(len, samples.values())) == len(of_groups) == 8
    means = ONCE | QUIET | more | {"phases": "means"}
    for (title, part), clients in of_groups.items():
        sizes = {"num_clients": len(clients), "clients_per_node": len(clients)}
        path = tmp_path / f"{title}-{part}"
        finished(tiny_config(**means | sizes, output=str(path)), only(data, clients))
        tensors, _ = read_tensors(path / "generator.safetensors")
        images, labels = samples[title][part]
        assert labels.tolist() == [0, 1, 2]
        assert images.std() > 0.01
        # The generator's means are in pixels, and not cut off either.
        np.testing.assert_allclose(images, tensors["mean"].numpy(), atol=2e-6)


def mean_pictures(config: GroupMeansConfig, data: FederatedImages, clients: list[int]):
    """The mean picture of every class, of clients whose weighted features are clipped.

    Args:
        config: without noise.
        data: of all clients.
        clients: of one group.
    """
    weights = frequency_weights(config)
    centre = torch.zeros(config.num_classes, len(weights))
    total = torch.zeros(config.num_classes, 1 + len(weights), dtype=torch.float64)
    for client in clients:
        own = data.of(client)
        images = torch.tensor(to_float(own.images))
        labels = torch.tensor(own.labels)
        answer = embedding("group-means", {"weights": weights}, centre, images, labels)
        total += answer * min(1.0, config.clip_bound / float(answer.norm()))
    frequencies = MASS * total[:, 1:] / total[:, :1] / weights
    return in_pixels(config, frequencies).numpy()


def test_a_class_that_a_group_hardly_has_is_not_drawn_from_noise(tmp_path):
    config, data = made("nodes", tmp_path, **QUIET)
    lacking = members(config, data)["0", 0]
    labels = data.labels.copy()
    for client in lacking:
        records = data.client_records[client]
        labels[records] = np.where(labels[records] == 2, 1, labels[records])
    data = dataclasses.replace(data, labels=labels)
    samples = samples_of(groups_in(finished(config, data), phase_of(config)))
    assert samples["0"][0].labels.tolist() == [0, 1]
    assert samples["0"][1].labels.tolist() == [0, 1, 2]


def test_groups_come_with_their_cohort_and_their_part_once_released(tmp_path):
    config, data = made("cohorts", tmp_path, **QUIET)
    own = phase_of(config)
    server = new_state(config)
    assert groups_released(own, server.released) == []
    method, _ = phase_at(config, 1)
    method.finish(own, server, None, summed(config, 1, releases(config, data)))
    found = groups_released(own, server.released)
    assert all(isinstance(group, Group) for group in found)
    titles = [(group.cohort, group.part) for group in found]
    assert titles == [(title, part) for title in ("v1", "v2") for part in range(4)]
    assert {tuple(group.images.shape) for group in found} == {(3, 1, 16, 16)}


def test_one_client_answers_in_the_block_of_its_group_and_nowhere_else(tmp_path):
    config, data = made("cohorts", tmp_path, clients_per_node=1, **QUIET)
    of_client = {
        client: part + 4 * (title == "v2")
        for (title, part), clients in members(config, data).items()
        for client in clients
    }
    assert 0 < len(of_client) < CLIENTS
    for client, release in enumerate(releases(config, data)):
        norms = release.values[0].flatten(1).norm(dim=1)
        expected = torch.zeros(8)
        if client in of_client:
            expected[of_client[client]] = config.clip_bound
        assert torch.allclose(norms, expected, atol=1e-6)


# ------------------------------------------------------------------ noise


@pytest.mark.parametrize("mode", MODES)
def test_the_noise_of_every_block_is_that_of_the_terms(tmp_path, mode):
    config, data = made(mode, tmp_path, noise_multiplier=0.5)
    quiet = dataclasses.replace(config, noise_multiplier=0.0)
    method, own = phase_at(config, 1)
    terms = method.terms(own, 1)
    exact = summed(quiet, 1, releases(quiet, data)).total
    draws: list[Tensor] = []
    for seed in range(20):
        seeded = dataclasses.replace(config, noise_seed=seed)
        released = summed(seeded, 1, releases(seeded, data))
        draws.append(released.total - exact)
        assert released.noise_std == pytest.approx(terms.noise_std * 2**0.5)
    noise = torch.stack(draws)[:, 0]  # (draws, blocks, classes, 1 + features)
    assert noise.shape == (20, *terms.shape[1:])
    # Of n numbers the estimate of the deviation has a relative error of 1/sqrt(2 n).
    by_block = noise.transpose(0, 1).flatten(1)
    error = 5 / math.sqrt(2 * by_block.shape[1])
    assert (by_block.std(1) / released.noise_std - 1).abs().max() < error
    blocks = torch.corrcoef(by_block)
    limit = 5 / math.sqrt(by_block.shape[1])
    assert (blocks - torch.eye(len(blocks))).abs().max() < limit


def test_a_nodes_own_release_is_kept_only_where_nodes_are_compared(tmp_path):
    for mode, count in (("nodes", 2), ("cohorts", 0)):
        config, data = made(mode, tmp_path)
        answers = releases(config, data)
        released = summed(config, 1, answers)
        assert len(released.by_node) == count
        for answer in answers[:count]:
            own = released.by_node[answer.node_id]
            assert torch.equal(own, answer.values.double())


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_of_a_cohort_of_which_the_release_shows_no_client_nothing_is_said(
    tmp_path, noise
):
    """As of a deployment whose clients' files have no such value: noise is no bug.

    The epsilon is spent by then, so the run ends as any other.
    """
    more = {"healthy": "absent", "noise_multiplier": noise}
    folder = finished(*made("cohorts", tmp_path, **more))
    (found,) = conclude(folder)["comparisons"]
    assert found["verdict"] == "undecided"
    assert (
        "the release shows no client of 'absent' above its noise" in found["sentence"]
    )
    assert (folder.path / "diagnosis.json").exists()


def test_a_node_that_the_noise_hides_is_undecided_and_the_others_are_compared(
    tmp_path, monkeypatch
):
    folder = finished(*made("nodes", tmp_path))
    config = folder.config.at_phase(0)
    groups = groups_in(folder, config)
    hidden = groups[0].cohort
    for_noise = [
        group._replace(seen=0.0 if group.cohort == hidden else 99.0) for group in groups
    ]
    monkeypatch.setattr(conclusion, "groups_in", lambda *_: for_noise)
    found = {row["suspicious"]: row for row in conclude(folder)["comparisons"]}
    assert found[hidden]["verdict"] == "undecided"
    assert found[hidden]["is_accused"] is False
    assert f"no client of {hidden!r} above" in found[hidden]["sentence"]
    for name in found.keys() - {hidden}:
        assert "above its noise" not in found[name]["sentence"]


def test_groups_of_few_clients_and_of_many_have_the_same_noise(tmp_path):
    """Else the noise of a small cohort would look like a bug of its images."""
    values = {f"p{i:02}": ("v1" if i < 20 else "v2", i % 4) for i in range(CLIENTS)}
    file = write_cohorts(tmp_path / "own.csv", values)

    def targets(noise_multiplier: float, noise_seed: int) -> Tensor:
        noise = {"noise_multiplier": noise_multiplier, "noise_seed": noise_seed}
        config = of_cohorts(file, **noise, seed=noise_seed)
        data = keep_cohort(config, people())
        server = new_state(config)
        method, _ = phase_at(config, 1)
        method.finish(
            phase_of(config), server, None, summed(config, 1, releases(config, data))
        )
        ((_, kept),) = server.released
        return kept[TARGET]

    exact = targets(0.0, 1)
    noise = torch.stack([targets(0.02, seed) - exact for seed in range(20)])
    of_many, of_few = noise[:, :4].std(), noise[:, 4:].std()
    assert float(of_many) == pytest.approx(float(of_few), rel=0.15)


# ------------------------------------------------------------------ sensitivity

WORST = ("random", "black", "white", "one pixel", "stripes")


def adversarial(kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Six images and labels of an owner that nobody expects."""
    rng = np.random.default_rng(seed)
    images = np.zeros((6, 1, 16, 16), np.uint8)
    if kind == "random":
        images = rng.integers(0, 256, images.shape).astype(np.uint8)
    elif kind == "white":
        images[:] = 255
    elif kind == "one pixel":
        images[:, :, rng.integers(16), rng.integers(16)] = 255
    elif kind == "stripes":
        images[:, :, :: int(rng.integers(1, 5))] = 255
    labels = rng.integers(0, 3, 6)
    if seed % 2:
        labels[:] = seed % 3
    return images, labels


owners = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(WORST),
        "seed": st.integers(0, 10_000),
        "value": st.sampled_from([None, "v1", "v2", "other", ""]),
        "part": st.sampled_from([None, 0, 3, 17]),
        "images": st.integers(0, 6),
    }
)


def given_owners(data: FederatedImages, changes: dict[int, dict]) -> FederatedImages:
    """Returns data in which some clients have other images and another cohort."""
    images, labels = data.images.copy(), data.labels.copy()
    records = list(data.client_records)
    cohorts = list(data.client_cohorts)
    for client, own in changes.items():
        rows = records[client]
        images[rows], labels[rows] = adversarial(own["kind"], own["seed"])
        records[client] = rows[: own["images"]]
        if cohorts and own["value"] is None:
            cohorts[client] = None
        elif cohorts:
            cohorts[client] = CohortOfClient(own["value"], own["part"])
    return dataclasses.replace(
        data,
        images=images,
        labels=labels,
        client_records=tuple(records),
        client_cohorts=tuple(cohorts),
    )


def of_first_node(config: ResolvedConfig, data: FederatedImages, least: int) -> Tensor:
    """What the first node, which hosts 12 clients, releases without noise."""
    hosted = range(12)
    method, own = phase_at(config, 1)
    names = [data.client_names[client] for client in hosted]
    cohorts = [data.client_cohorts[client] for client in hosted if data.client_cohorts]
    groups = method.groups(own, names, cohorts, least)
    request = next_request(config, new_state(config))
    release = answer_of(config, Hosted(data, hosted, 0, groups=groups), request)
    assert isinstance(release, SanitizedGradients)
    return release.values.double()


@pytest.fixture(scope="module", params=MODES)
def attacked(request, tmp_path_factory):
    """A run without noise, whose first node hosts 12 clients, and its data."""
    return made(request.param, tmp_path_factory.mktemp("attacked"), **QUIET)


@settings(max_examples=30)
@given(
    others=st.dictionaries(st.integers(0, 11), owners, max_size=12),
    client=st.integers(0, 11),
    before=owners,
    after=owners,
    gone=st.sampled_from([("images",), ("value",), ("images", "value")]),
    least=st.integers(1, 4),
)
def test_one_owner_moves_the_release_of_its_node_as_far_as_its_noise_hides(
    attacked, others, client, before, after, gone, least
):
    """Whatever all owners have, and whatever one of them has instead."""
    config, data = attacked
    nothing = {"images": 0, "value": None}
    bounds = [
        # Replace-one: anything, another cohort and no images among it.
        (after, 2.0),
        # Zero-out: the same owner has no images, or is in no cohort, or both.
        (before | {name: nothing[name] for name in gone}, 1.0),
        # Another group alone: what was in one block is now in another one.
        (before | {name: after[name] for name in ("value", "part")}, 2**0.5),
    ]
    one = of_first_node(config, given_owners(data, others | {client: before}), least)
    for own, bound in bounds:
        changed = given_owners(data, others | {client: own})
        other = of_first_node(config, changed, least)
        assert float((one - other).norm()) <= bound * config.clip_bound + 1e-6


def test_an_owner_that_changes_its_cohort_moves_the_release_by_exactly_sqrt_2(tmp_path):
    """So that the bound above is one of what happens, and not of an empty release."""
    config, data = made("cohorts", tmp_path, **QUIET)
    (client, *_) = members(config, data)["v1", 0]
    assert client < 12
    own = {"kind": "random", "seed": 2, "images": 6, "part": None}
    one, *others = (
        releases(config, given_owners(data, {client: own | {"value": value}}))[0]
        for value in ("v1", "v1", "v2", None)
    )
    distances = [float((one.values - other.values).norm()) for other in others]
    assert distances == pytest.approx([0, 2**0.5, 1], abs=1e-6)


# ------------------------------------------------------------------ epsilons


def stated(rows) -> dict[tuple[str, str], float]:
    return {(row.adversary, row.relation): row.epsilon for row in rows}


def test_where_nodes_are_compared_one_nodes_noise_counts_for_every_adversary(tmp_path):
    """In the plan and in the ledger, and so in all that is stated of either."""
    found = {}
    for mode in MODES:
        config, _ = made(mode, tmp_path, engine="flower", noise_seed=None)
        plan = Plan.from_config(config)
        event = new_event(config, 1, "all", 1)
        assert (
            event.counted_nodes == plan.counted_nodes == (1 if mode == "nodes" else 2)
        )
        found[mode] = stated(statements(plan, DELTA))
        of_ledger = stated(statements_from_ledger([event], DELTA))
        assert of_ledger == pytest.approx(found[mode])
    of_nodes, of_cohorts = found["nodes"], found["cohorts"]
    assert {adversary for adversary, _ in of_nodes} == {"release", "server", "secagg"}
    for (adversary, relation), epsilon in of_nodes.items():
        assert epsilon == of_nodes["server", relation], adversary
    for relation in ("replace-one", "zero-out"):
        # The same noise where what is published is the sum over two nodes.
        assert of_cohorts["server", relation] == of_nodes["server", relation]
        assert of_cohorts["release", relation] < of_nodes["release", relation]


def test_a_finished_run_and_its_label_say_the_same_epsilon_as_its_plan(tmp_path):
    for mode in MODES:
        own = tmp_path / mode
        own.mkdir()
        config, data = made(mode, own, noise_seed=None, engine="local")
        folder = finished(config, data)
        (event,) = events(folder)
        assert event.release == "embedding"
        assert event.batch_size == 1
        planned = stated(statements(Plan.from_config(config), config.delta))
        assert stated(epsilons.of_run(folder.path)) == pytest.approx(planned)
        (entry,) = privacy_label(folder.path)["who_sees_what"]
        labelled = {relation: eps for (_, relation), eps in planned.items()}
        assert entry["epsilon"] == pytest.approx(labelled)


@pytest.mark.parametrize("adversary", ["release", "server"])
def test_calibrated_noise_of_compared_nodes_is_that_of_one_node(tmp_path, adversary):
    noise = {}
    for mode in MODES:
        config, _ = made(mode, tmp_path, engine="flower", noise_seed=None)
        asked = {"adversary": adversary, "target_epsilon": 8.0, "noise_multiplier": ""}
        planned = RunConfig.from_flat(asked, config)
        noise[mode] = with_noise(planned).noise_multiplier
    ratio = noise["nodes"] / noise["cohorts"]
    assert ratio == pytest.approx(2**0.5 if adversary == "release" else 1.0, rel=1e-3)


# ------------------------------------------------------------------ engines, resuming


@pytest.fixture
def own_run(tmp_path):
    """Makes the run folder of a mode on data in a file, in a folder of its own."""

    def own_run(mode: str, name: str, **settings: object) -> RunFolder:
        place = tmp_path / name
        place.mkdir()
        given = {"data": write_people(place / "people.npz")} | settings
        config, _ = made(mode, place, **given)
        return RunFolder.create(config)

    return own_run


def what_is_left(folder: RunFolder) -> list[Any]:
    """Generators, groups and the ledger of a finished run."""
    content = conclude(folder)
    assert content is not None
    groups = sorted((folder.path / "groups").iterdir())
    images = [np.load(path)["images"].tobytes() for path in groups]
    return [product(folder), images, content["comparisons"], events(folder)]


@pytest.mark.usefixtures("server_process", "clock")
@pytest.mark.parametrize("mode", MODES)
def test_both_engines_give_the_same_bytes_and_the_same_verdict(own_run, mode):
    local = own_run(mode, "local", num_workers=3)
    train(local)
    flower = own_run(mode, "flower", engine="flower")
    start(flower, FakeGrid(flower.config.num_nodes))
    assert what_is_left(flower) == what_is_left(local)


class Killed(KeyboardInterrupt):
    """Stands for a process that is killed."""


def killed(*arguments: object) -> None:
    raise Killed


# By what was not done any more: nothing was asked, or an answer was not kept.
FAULTS = {
    "before the release": (LocalNodes, "answers"),
    "after the answers": (RunFolder, "save_checkpoint"),
    "after the checkpoint": (RunFolder, "append_metrics"),
}


@pytest.mark.usefixtures("server_process")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_run_resumes_to_the_same_bytes(own_run, mode, fault):
    whole = own_run(mode, "whole")
    train(whole)
    broken = own_run(mode, "broken")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*FAULTS[fault], killed)
        with pytest.raises(Killed):
            train(broken)
    assert conclude(broken) is None
    train(RunFolder.open(broken.path))
    assert what_is_left(broken)[:3] == what_is_left(whole)[:3]
    # What a release may have told counts, whether it was kept or not.
    assert 1 <= len(events(broken)) <= 2


# ------------------------------------------------------------------ bad input


def test_a_request_to_some_clients_is_refused(tmp_path):
    config, _ = made("nodes", tmp_path)
    request = changed(next_request(config, new_state(config)), participants=(0, 1))
    method, own = phase_at(config, 1)
    assert_refused("not to all", method.check, own, request)


REFUSED = [
    ({"phases": "group-means,means", "num_rounds": 2}, "phases = .*give it alone"),
    ({"secure_aggregation": True, "engine": "flower"}, "secure_aggregation"),
    ({"min_answers": 2}, "min_answers"),
    ({"clients_per_node": CLIENTS}, "give a smaller --clients-per-node"),
    ({"clients_per_node": 23}, "the smallest node has 1 clients for 4 groups"),
    ({"clients_per_node": 1}, "the smallest node has 1 clients for 4 groups"),
    ({"clients_per_group": 4}, "clients_per_group = 4"),
    ({"groups": 3}, "groups = 3"),
    ({"groups": 7}, "groups = 7"),
    ({"suspicious": "7"}, "suspicious = '7'.*0, 1"),
    ({"healthy": "v1", "cohorts": "own.csv"}, "give --suspicious too"),
    ({"healthy": "v1", "suspicious": "v2"}, "give --cohorts"),
    (
        {"healthy": "v1", "suspicious": "v1", "cohorts": "own.csv"},
        "suspicious = .*another --suspicious",
    ),
    ({"cohort_value": "v1"}, "cohort_value = 'v1'.*--cohorts"),
    ({"moment_size": 17}, "moment_size = 17.*16"),
    ({"client_selection": "uniform"}, "client_selection"),
]


@pytest.mark.parametrize(("more", "words"), REFUSED)
def test_settings_that_compare_nothing_are_refused(more, words):
    assert_refused(words, of_nodes, **more)
