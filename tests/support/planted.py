"""Planted faults, for audits to find: other clips, and methods of others."""

import dataclasses
import sys

import torch

from fedgs.config.run_config import ResolvedConfig
from fedgs.config.terms import Terms
from fedgs.mechanism import sanitizer
from fedgs.methods.base import Method, Request, State
from tiny import SIDE, tiny_config


def of_method(method: str, **settings) -> ResolvedConfig:
    """The tiny problem of another method, by its recipe's kind of discriminator."""
    defaults = {"spectral_norm": False}
    return tiny_config(defaults=defaults, phases=method, **settings)


# ------------------------------------------------------------------ clips


def by(norms_of):
    """A clip with another idea of what a norm is."""

    def clip(grads, clip_bound):
        values = grads.values.double()
        norms = norms_of(values)
        scale = clip_bound / norms.clamp_min(clip_bound)
        is_finite = norms.isfinite()
        clipped = torch.where(is_finite, values * scale, torch.zeros_like(values))
        made_by = sanitizer._MADE_BY_SANITIZER
        return sanitizer.ClippedGradients(clipped, clip_bound, made_by)

    return clip


def norm(*axes, root=1.0):
    def norms_of(values):
        return torch.linalg.vector_norm(values, dim=axes, keepdim=True) * root

    return norms_of


def rms(values):
    return norm(2, 3, 4)(values) / values[0, 0].numel() ** 0.5


def largest_number(values):
    return values.abs().amax((2, 3, 4), keepdim=True)


def sum_of_numbers(values):
    return values.abs().sum((2, 3, 4), keepdim=True)


def first_sample_only(values):
    norms = norm(2, 3, 4)(values)
    norms[:, 1:] = 0
    return norms


def first_client_only(values):
    norms = norm(2, 3, 4)(values)
    norms[1:] = 0
    return norms


CLIPS = {
    "row": norm(4),
    "column": norm(3),
    "channel": norm(3, 4),
    "coordinate": norm(2),
    "batch": norm(1, 2, 3, 4),
    "clients": norm(0, 2, 3, 4),
    "everything": norm(0, 1, 2, 3, 4),
    "RMS": rms,
    "largest number": largest_number,
    "sum of numbers": sum_of_numbers,
    "twice as long": norm(2, 3, 4, root=0.5),
    "first sample": first_sample_only,
    "first client": first_client_only,
    "nothing": lambda values: norm(2, 3, 4)(values) * 0,
}


# ------------------------------------------------------------------ methods


def given(monkeypatch, kind: type[Method], **settings) -> ResolvedConfig:
    """Makes an object of a class the method of a run, as a user does."""
    MEMORY.clear()
    name = f"own_{kind.__name__}"
    monkeypatch.setattr(sys.modules[__name__], name, kind(), raising=False)
    monkeypatch.setenv("FEDGS_METHODS", f"{__name__}:{name}")
    return of_method(f"{__name__}:{name}", **settings)


MEMORY = {}  # what a method keeps beside itself


class Honest(Method):
    """Answers with the mean image; what a method of others is like."""

    def terms(self, config, round):
        shape = (1, 1, SIDE, SIDE)
        return Terms("update", config.noise_multiplier, config.clip_bound, shape)

    def state(self, config):
        return State({})

    def declared(self, config, round):
        return {}

    def begin(self, config, state):
        return Request(state.round + 1, {}), None

    def finish(self, config, state, pending, released):
        state.round += 1

    def answer(self, config, client, request):
        images, _ = client.tensors("cpu")
        return images.mean(0, keepdim=True)


class DividesByAll(Honest):
    """By what it has seen of all clients so far."""

    def answer(self, config, client, request):
        own = super().answer(config, client, request)
        MEMORY["total"] = MEMORY.get("total", 0.0) + own
        return own / MEMORY["total"].norm()


class KeepsInItself(Honest):
    """Divides by what this object has seen."""

    total = 0.0

    def answer(self, config, client, request):
        own = super().answer(config, client, request)
        self.total = self.total + own
        return own / self.total.norm()


class DividesByTheRound(Honest):
    """By what it has seen of all clients in this round, each once."""

    def answer(self, config, client, request):
        own = super().answer(config, client, request)
        seen = MEMORY.setdefault(request.round, {})
        if client.number in seen:  # a repeated request
            seen.clear()
        seen[client.number] = own
        return own / sum(seen.values()).norm()


class SubtractsTheOneBefore(Honest):
    """Moments: the change from the client before."""

    def answer(self, config, client, request):
        own = super().answer(config, client, request)
        before = MEMORY.get("before", torch.zeros_like(own))
        MEMORY["before"] = own
        return own - before


class LearnsInTraining(Honest):
    """Centres by a mean of what it trained on."""

    def train(self, config, clients, request):
        (client,) = clients
        MEMORY[client.number] = super().answer(config, client, request)

    def answer(self, config, client, request):
        mean = torch.stack([*MEMORY.values()]).mean(0)
        return super().answer(config, client, request) - mean


class Rare(Honest):
    """Adds a little of another client where a client is all white."""

    def answer(self, config, client, request):
        own = super().answer(config, client, request)
        added = MEMORY.get("other", 0.0) if own.min() > 0.99 else 0.0
        MEMORY["other"] = 1e-3 * own
        return 1e-2 * own + added


class InALaterRound(DividesByAll):
    """Is honest at first."""

    def terms(self, config, round):
        terms = super().terms(config, round)
        kind = "update" if round < 3 else "embedding"
        return dataclasses.replace(terms, release=kind)

    def answer(self, config, client, request):
        cheats = request.round > 2
        return (super() if cheats else Honest()).answer(config, client, request)


class WrongShape(Honest):
    def answer(self, config, client, request):
        return super().answer(config, client, request)[0]


class Whole(Honest):
    def answer(self, config, client, request):
        return super().answer(config, client, request).to(torch.int64)


class Fails(Honest):
    def answer(self, config, client, request):
        if len(client.labels) == 1:
            raise IndexError("too few images")
        return super().answer(config, client, request)


class FailsInItsSecondKind(InALaterRound):
    def answer(self, config, client, request):
        if request.round > 2:
            raise ZeroDivisionError("in a later round")
        return super().answer(config, client, request)


class Alternates(Honest):
    def terms(self, config, round):
        MEMORY["asked"] = MEMORY.get("asked", 0) + 1
        terms = super().terms(config, round)
        return dataclasses.replace(terms, clip_bound=1.0 + MEMORY["asked"] % 2)


class ChangesItsMind(Honest):
    """Once, after the run."""

    def terms(self, config, round):
        MEMORY["asked"] = MEMORY.get("asked", 0) + 1
        terms = super().terms(config, round)
        return dataclasses.replace(terms, clip_bound=1.0 + (MEMORY["asked"] > 4))


class Falls(Honest):
    def terms(self, config, round):
        terms = super().terms(config, round)
        return dataclasses.replace(
            terms, noise_multiplier=terms.noise_multiplier / round
        )
