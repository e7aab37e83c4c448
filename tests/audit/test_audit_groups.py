"""The audit of methods that compare groups: every group is attacked, in its block."""

import numpy as np
import pytest

import planted
from fedgs.audit import noise_check
from fedgs.audit.crafted_releases import audited, directions
from fedgs.audit.finding import HOLDS, OF_NOISE, REFUTED
from fedgs.audit.mechanism import audit_rounds
from fedgs.audit.noise_check import check_noise
from fedgs.audit.worst_case import MEASURED, OF_GROUPS, check_clipping, check_method
from fedgs.cohorts import client_groups
from fedgs.config.rounds import terms_at
from fedgs.mechanism.noise import NoiseStream
from fedgs.methods.group_means import GroupMeans
from fedgs.round import answer as rounds
from fedgs.round.run import new_event
from tiny import BY_COHORT, BY_NODE, FULL_PARTICIPATION, tiny_config

MODES = {"nodes": BY_NODE, "cohorts": BY_COHORT}
MODES |= {"masked": BY_COHORT | {"secure_aggregation": True}}
each_mode = pytest.mark.parametrize("mode", MODES)


def config_of(mode, **others):
    return tiny_config(**MODES[mode] | {"noise_seed": None} | others)


def verdicts_of(config) -> dict[str, str]:
    found = check_method(audited(config))
    return {check.check.removeprefix("method, "): check.verdict for check in found}


def event_of(config):
    return new_event(config, 1, "all", 1)


@each_mode
def test_group_means_hold(mode):
    config = config_of(mode)
    assert verdicts_of(config) == dict.fromkeys([*MEASURED, *OF_GROUPS], HOLDS)
    assert check_clipping(audited(config), event_of(config)).verdict == HOLDS


def test_where_no_groups_are_compared_nothing_is_asked_of_them():
    assert list(verdicts_of(tiny_config(**FULL_PARTICIPATION))) == [*MEASURED]


@each_mode
def test_made_up_clients_are_tried_in_every_group(mode, monkeypatch):
    config = config_of(mode)
    tried = {number: set() for number in range(5)}
    original = GroupMeans.answer

    def watched(self, config, client, request):
        tried[client.number].add(client.group)
        return original(self, config, client, request)

    monkeypatch.setattr(GroupMeans, "answer", watched)
    verdicts_of(config)
    blocks = {*range(terms_at(config, 1).num_groups)}
    assert all(blocks <= groups for groups in tried.values())


def test_directions_lie_in_one_block_or_in_all_of_them():
    shape = terms_at(config_of("cohorts"), 1).shape
    whole, *others = directions(shape[1:])
    assert whole.flatten(1).norm(dim=1).count_nonzero() == shape[1]
    for direction in others:
        assert direction.flatten(1).norm(dim=1).count_nonzero() == 1


# ------------------------------------------------------------------ planted faults


def test_small_groups_that_are_left_out_as_a_whole_are_refuted(monkeypatch):
    """One client would decide whether the answers of the others are told."""

    def left_out(size, least):
        return float(size >= least)

    monkeypatch.setattr(client_groups, "weight_of", left_out)
    found = verdicts_of(config_of("cohorts"))
    refuted = {name for name, verdict in found.items() if verdict == REFUTED}
    assert refuted == {"one replaced", "one left out"}


@each_mode
@pytest.mark.parametrize("how", ["all", "next"])
def test_a_client_that_answers_in_other_blocks_is_refuted(mode, how, monkeypatch):
    original = GroupMeans.answer

    def everywhere(self, config, client, request):
        answered = original(self, config, client, request)
        if how == "all":
            return answered.sum(1, keepdim=True).expand_as(answered).clone()
        return answered + 0.1 * answered.roll(1, dims=1)

    monkeypatch.setattr(GroupMeans, "answer", everywhere)
    found = verdicts_of(config_of(mode))
    assert found["outside its group"] == REFUTED
    # Clipped as a whole it is no longer than any other.
    assert found["one part"] == HOLDS


@pytest.mark.parametrize("mode", ["nodes", "cohorts"])
def test_a_clip_of_each_block_by_itself_is_refuted(mode, monkeypatch):
    """In a method that answers in two blocks, and by worst-case clients in any."""
    original = GroupMeans.answer

    def in_two(self, config, client, request):
        answered = original(self, config, client, request)
        return answered + answered.roll(1, dims=1)

    config = config_of(mode)
    monkeypatch.setattr(rounds, "clip", planted.by(planted.CLIPS["channel"]))
    assert check_clipping(audited(config), event_of(config)).verdict == REFUTED
    assert verdicts_of(config)["one part"] == HOLDS
    monkeypatch.setattr(GroupMeans, "answer", in_two)
    assert verdicts_of(config)["one part"] == REFUTED
    monkeypatch.setattr(rounds, "clip", planted.by(planted.CLIPS["everything"]))
    assert verdicts_of(config)["one part"] == HOLDS


def test_the_attack_refutes_a_clip_of_each_block_too(monkeypatch):
    config = config_of("nodes", engine="flower")
    monkeypatch.setattr(rounds, "clip", planted.by(planted.CLIPS["channel"]))
    found = audit_rounds(config, [], trials=2000, max_draws=4e7)
    assert {finding.verdict for finding in found} == {REFUTED}


@each_mode
def test_noise_that_is_missing_in_one_block_is_refuted(mode, monkeypatch):
    config = config_of(mode)
    monkeypatch.setattr(noise_check, "NUM_DRAWS", 60_000)
    assert check_noise(audited(config), event_of(config), OF_NOISE).verdict == HOLDS
    name = "discrete" if mode == "masked" else "normal"
    original = getattr(NoiseStream, name)

    def faulty(self, shape, std):
        noise = np.array(original(self, shape, std))
        noise[:, 1] = 0
        return noise

    monkeypatch.setattr(NoiseStream, name, faulty)
    assert check_noise(audited(config), event_of(config), OF_NOISE).verdict == REFUTED
