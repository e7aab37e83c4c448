"""What a server may learn of the cohort of one owner, whatever it knows of all others.

It asks for a comparison of two cohorts, and gets the sum of all groups' blocks. Its own
knowledge is everything else: the other owners' images, cohorts and names.
"""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
import torch

from fedgs.cohorts import client_groups
from fedgs.cohorts.client_groups import CohortOfClient, groups_of, weight_of, weighted
from fedgs.errors import UserError
from fedgs.mechanism.sanitizer import SanitizedGradients
from fedgs.methods import new_state, phase_at
from fedgs.methods.base import Hosted, Request
from fedgs.methods.group_means import GroupMeans
from fedgs.privacy.client_limits import ALLOW_ALL
from fedgs.round.answer import release, weights_of
from fedgs.round.node import Node
from tiny import BY_COHORT, tiny_config, tiny_data

LEAST = 3
FEW = BY_COHORT | {"num_clients": 6, "clients_per_node": 6, "noise_multiplier": 0.0}


def left_out_if_small(size: int, least: int) -> float:
    """The rule that this one replaced: all of a group, or nothing."""
    return float(size >= least)


def phase(settings=FEW):
    return phase_at(tiny_config(**settings), 1)[1]


def moved(before: np.ndarray, after: np.ndarray) -> float:
    return float(np.linalg.norm(before - after))


# ------------------------------------------------------------------ by brute force

FAR = 10.0  # the length of an answer, in clip bounds
A = CohortOfClient("v1", 0)
B = CohortOfClient("v2", 0)
COHORTS = [A, B, None]


@functools.cache
def setting():
    """Of all sums: a run without noise, and its data, which are not looked at."""
    config = tiny_config(**FEW)
    return config, tiny_data(config)


def sum_of(cohorts, answers, least: int) -> np.ndarray:
    """What the frame makes of answers along one line, in clip bounds, by block.

    All are as long as clipping allows, or longer: the worst there are.
    """
    config, data = setting()
    own = config.at_phase(0)
    owners = range(len(cohorts))
    groups = groups_of(own, [str(n) for n in owners], cohorts)
    in_groups = weighted(own, groups, least)
    terms = own.phase_terms(1)
    given = torch.zeros(len(cohorts), *terms.shape)
    for owner, (group, answer) in enumerate(zip(groups, answers, strict=True)):
        if group is not None:
            given[owner, 0, group, 0, 0] = FAR * answer * terms.clip_bound
    hosted = Hosted(data, owners, 0, groups=in_groups)
    weights = weights_of(hosted, Request(1, {}))
    sent = release(config, terms, [given], 1, 0, len(cohorts), weights)
    assert isinstance(sent, SanitizedGradients)
    return sent.values.double().numpy()[0, :, 0, 0] / terms.clip_bound


def most_moved(least: int, may_move: bool) -> dict[str, float]:
    """How far the first owner moves the sum, over all that five others may be."""
    most = {"replaced": 0.0, "left out": 0.0, "zeroed": 0.0}
    for others in itertools.combinations_with_replacement(COHORTS, 5):
        for first, second in itertools.product(COHORTS, repeat=2):
            if first != second and not may_move:
                continue
            before = sum_of([first, *others], [1, 1, 1, 1, 1, 1], least)
            again = sum_of([second, *others], [1, 1, 1, 1, 1, 1], least)
            other = sum_of([second, *others], [-1, 1, 1, 1, 1, 1], least)
            gone = sum_of([None, *others], [1, 1, 1, 1, 1, 1], least)
            zero = sum_of([first, *others], [0, 1, 1, 1, 1, 1], least)
            replaced = max(moved(before, again), moved(before, other))
            most["replaced"] = max(most["replaced"], replaced)
            most["left out"] = max(most["left out"], moved(before, gone))
            most["zeroed"] = max(most["zeroed"], moved(before, zero))
    return most


@pytest.mark.parametrize("least", [1, 2, LEAST, 5, 6])
def test_no_owner_moves_the_sum_further_than_its_noise_is_made_for(least):
    """With another cohort and other images, in clip bounds."""
    found = most_moved(least, may_move=True)
    rounding = 1e-6  # of float32
    assert found["replaced"] <= 2 + rounding
    assert found["left out"] <= 1 + rounding
    assert found["zeroed"] <= 1 + rounding
    # It is no bound that nobody comes near to.
    assert found["left out"] == pytest.approx(1, abs=rounding)


def test_a_change_of_the_cohort_alone_moves_less_than_one_of_the_images():
    most = 0.0
    for others in itertools.combinations_with_replacement(COHORTS, 5):
        for first, second in itertools.product(COHORTS, repeat=2):
            sums = [sum_of([own, *others], [1] * 6, LEAST) for own in (first, second)]
            most = max(most, moved(*sums))
    assert most == pytest.approx(math.sqrt(2))


def test_groups_left_out_as_a_whole_would_tell_the_cohort_of_one_owner(monkeypatch):
    """The attack: all others are known, so that one owner decides about many."""
    monkeypatch.setattr(client_groups, "weight_of", left_out_if_small)
    found = most_moved(LEAST, may_move=True)
    assert found["left out"] == pytest.approx(LEAST)
    assert found["replaced"] == pytest.approx(math.sqrt(2) * LEAST)
    # Of images alone it was a bound.
    assert most_moved(LEAST, may_move=False)["replaced"] <= 2 + 1e-6


def test_nothing_is_told_of_a_small_group_and_most_of_a_large_one():
    for size in range(1, 10):
        assert weight_of(size, 10) == 0
    weights = [weight_of(size, 10) for size in range(10, 1000)]
    assert weights == sorted(weights)
    assert weights[0] == 0.1
    assert weights[-1] > 0.99
    assert {weight_of(size, 1) for size in range(1, 20)} == {1.0}
    grown = [size * weight_of(size, 10) for size in range(1, 100)]
    assert max(np.diff(grown)) <= 1 + 1e-9


# ------------------------------------------------------------------ through the frame


def answer_to(request, cohorts, tmp_path, images=None) -> np.ndarray:
    """What a node sends without noise, where its owners have these cohorts."""
    config = tiny_config(**FEW)
    data = dataclasses.replace(tiny_data(config), client_cohorts=tuple(cohorts))
    if images is not None:
        data.images[data.client_records[0]] = images
    limits = dataclasses.replace(ALLOW_ALL, min_clients_per_group=LEAST)
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    node = Node(config, 0, data, folder, limits)
    answer = node.answer(request)
    return answer.values.numpy().astype(np.float64)


KNOWN = [A, A, B, B, B]  # of all owners but the first: one more makes a group of A


@pytest.mark.parametrize("is_attacked", [False, True], ids=["as it is", "left out"])
def test_a_server_that_knows_all_others_sees_no_more_of_a_cohort(
    is_attacked, tmp_path, monkeypatch
):
    if is_attacked:
        monkeypatch.setattr(client_groups, "weight_of", left_out_if_small)
    config = tiny_config(**FEW)
    method, own = phase_at(config, 1)
    request, _ = method.begin(own, new_state(config))
    bound = config.clip_bound
    of_a = answer_to(request, [A, *KNOWN], tmp_path)
    of_b = answer_to(request, [B, *KNOWN], tmp_path)
    of_none = answer_to(request, [None, *KNOWN], tmp_path)
    others = answer_to(request, [A, *KNOWN], tmp_path, images=255)
    assert of_a.shape == (1, *own.phase_terms(1).shape[1:])
    assert 0 < moved(of_a, others) <= 2 * bound  # the same cohort and other images
    largest = max(moved(of_a, of_b), moved(of_a, of_none), moved(of_b, of_none))
    if is_attacked:
        # The two others of A show or do not show, as the first owner decides.
        assert largest > 2 * bound
    else:
        assert largest <= math.sqrt(2) * bound
    # A group that is too small is not in the release at all.
    assert not of_none[0, 0].any()
    assert of_a[0, 0].any()


def test_a_method_has_no_part_in_the_weights(tmp_path, monkeypatch):
    """One that answers in all blocks, as loudly as it can, whatever group it is told.

    Its blocks are not apart, so another cohort moves what other images do: 2 C.
    """

    def loud(self, config, client, request):
        sign = 1.0 if client.images.min() < 255 else -1.0
        return torch.full(config.phase_terms(1).shape, 1e3 * sign)

    monkeypatch.setattr(GroupMeans, "answer", loud)
    config = tiny_config(**FEW)
    request = Request(1, {})
    sums = {}
    for name, first in {"a": A, "b": B, "none": None}.items():
        sums[name] = answer_to(request, [first, *KNOWN], tmp_path)
        white = answer_to(request, [first, *KNOWN], tmp_path, images=255)
        assert moved(sums[name], white) <= 2 * config.clip_bound + 1e-6
    assert moved(sums["a"], sums["none"]) == pytest.approx(config.clip_bound, rel=1e-5)
    assert moved(sums["b"], sums["none"]) == pytest.approx(config.clip_bound, rel=1e-5)
    # Who is in no group, or in one that is too small, is not heard.
    assert not answer_to(request, [A, A, B, B, None, None], tmp_path).any()


# ------------------------------------------------------------------ under masks


MANY = {"num_clients": 60_000, "clients_per_node": 30_000}


def test_integers_are_fine_enough_for_weights_that_change():
    """The others' vectors are rounded anew: what it moves is within replace-one."""
    masked = FEW | {"secure_aggregation": True, "engine": "local"}
    own = {"clients_per_node": 500, "noise_multiplier": 1.0, "num_classes": 10}
    config = tiny_config(**masked | own | {"num_clients": 5000})
    terms = phase_at(config, 1)[1].phase_terms(1)
    changed = 500 * math.sqrt(math.prod(terms.shape[2:])) / config.units(terms)
    assert math.sqrt(2) + changed <= 2
    with pytest.raises(UserError, match="secure_aggregation = True: "):
        tiny_config(**masked | own | MANY)
    # Where no weights change, nothing is rounded anew.
    means = {"phases": "means:1", "healthy": None, "suspicious": None}
    kept = {name: value for name, value in masked.items() if name not in means}
    tiny_config(**kept | own | MANY | {"phases": "means:1", "cohorts": None})
