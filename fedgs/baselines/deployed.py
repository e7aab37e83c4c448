"""A baseline in a deployment: how it is submitted, told to clients, and answered.

A server sees no data, so the run is planned from numbers that are given. The method and
its settings are flat scalars beside the run's, "method.name" and "method.<setting>": a
client gets them when it joins, and makes of them what it agrees to (`read_config`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedgs.baselines.contract import Facts
from fedgs.baselines.fedavg_gan import (
    METHOD,
    OF_METHOD,
    UpdateConfig,
    asked_clients,
    node_update,
    run_config,
)
from fedgs.baselines.fedavg_messages import UpdateRequest, decode_request
from fedgs.baselines.run import NOT_GS_WGAN, check_run, folder_content, made_settings
from fedgs.baselines.target import Asked, Target
from fedgs.config.fields import Scalar, shortened
from fedgs.config.recipes import overridden
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.errors import UserError
from fedgs.federation.messages import Request
from fedgs.federation.node import Node
from fedgs.federation.preparation import check_answer, resolve_deployed
from fedgs.mechanism.integers import IntegerSum
from fedgs.mechanism.sanitizer import SanitizedGradients

INSTEAD = (
    f"deployed clients answer {METHOD.name} (`fedgs deploy baseline {METHOD.name}`) "
    "and GS-WGAN (`fedgs deploy submit`; one release: --recipe moments)"
)
# A cap on images would be of data that the server does not see.
ASKED = tuple(spec.name for spec in dataclasses.fields(Target))


def check_name(name: str) -> None:
    """Refuses a method that clients of a deployment do not answer.

    Raises:
        UserError: with the reason and what to use instead.
    """
    if name != METHOD.name:
        raise UserError(
            f"NAME = {name!r}: has no deployment; {INSTEAD}; other methods train by "
            "`fedgs baseline`, where the data are in one place"
        )


def submitted(given: Mapping[str, Any], settings: Mapping[str, Any]) -> RunConfig:
    """Returns the settings of a run that is to be submitted, over the method's recipe.

    Args:
        given: settings of the method.
        settings: of the run, with the names of its nodes.
    """
    steps = made_settings(METHOD, dict(given)).steps
    own: dict[str, Any] = {**METHOD.recipe, "clients_per_node": 1, **settings}
    own |= NOT_GS_WGAN
    return overridden(RunConfig(), own | {"engine": "flower", "num_rounds": steps})


def planned(
    config: RunConfig, told: Mapping[str, Any]
) -> tuple[ResolvedConfig, dict[str, Any]]:
    """Returns the settings of a run that can start, and what its folder says of it.

    Args:
        config: of `submitted`.
        told: of the method, under "name" and the names of its settings and of `ASKED`.

    Raises:
        UserError: bad input, or a guarantee that the method cannot give.
    """
    own = dict(told)
    check_name(str(own.pop("name", "")))
    if not config.node_names:
        raise UserError("nodes is unset: a baseline is submitted by `fedgs deploy`")
    asked = Asked(**{name: own.pop(name) for name in ASKED if name in own})
    settings = made_settings(METHOD, own)
    check_run(METHOD, settings, config)
    resolved = resolve_deployed(config)
    # Every client computes the schedule, and with it its share of the noise.
    resolved = dataclasses.replace(resolved, selection_seed=None)
    shape = (resolved.image_channels, resolved.image_size, resolved.image_size)
    facts = Facts(resolved.num_clients, 0, None, resolved.num_classes, shape)
    if asked.target_epsilon is not None:
        target = (asked.target_epsilon, resolved.delta)
        settings = METHOD.calibrated(settings, facts, *target)
    check_answer(run_config(settings, resolved))
    resolved = dataclasses.replace(resolved, num_rounds=settings.steps)
    known = (METHOD.name, METHOD, settings, facts, asked.target_epsilon)
    return resolved, folder_content(*known)


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a run's flat settings, and those of its method without their prefix."""
    own = {n: v for n, v in values.items() if n.startswith(OF_METHOD)}
    others = {n: v for n, v in values.items() if n not in own}
    return others, {n.removeprefix(OF_METHOD): v for n, v in own.items()}


def joined(told: Mapping[str, Any]) -> dict[str, Scalar]:
    """Returns what is told of a method as flat settings beside a run's."""
    return {f"{OF_METHOD}{name}": value for name, value in told.items()}


def read_config(values: Mapping[str, Any]) -> ResolvedConfig:
    """Returns a run's settings as its nodes compute with them, whatever trains it.

    Args:
        values: flat, of a server that may be hostile.

    Raises:
        UserError: an unknown setting, a value outside its range, or a method that no
            node answers.
    """
    others, own = split(values)
    config = ResolvedConfig.from_flat(others)
    if not own:
        return config
    if (name := own.pop("name", None)) != METHOD.name:
        known = f"this client answers GS-WGAN and {METHOD.name}"
        raise UserError(f"method.name = {shortened(repr(name))}: {known}")
    given = {name: value for name, value in own.items() if value != ""}
    return run_config(made_settings(METHOD, given), config)


class UpdateNode(Node):
    """A node of Fed-Avg GAN: it releases the noisy sum of its clients' updates.

    Limits, count and the stored answer are those of every node.
    """

    config: UpdateConfig

    def decode(self, payload: Mapping[str, object]) -> UpdateRequest:
        """Decodes a request and checks it against the run's settings.

        Raises:
            UserError: as `fedgs.baselines.fedavg_messages.decode_request`.
        """
        return decode_request(payload, self.config)

    def _check(self, request: Request) -> None:
        super()._check(request)
        asked_clients(self.config, _update(request), self.node_id)

    def _release(
        self, request: Request, is_again: bool
    ) -> SanitizedGradients | IntegerSum | None:
        return node_update(self.config, self.data, _update(request), self.node_id)


def _update(request: Request) -> UpdateRequest:
    if not isinstance(request, UpdateRequest):
        raise UserError(f"round {request.round}: no request of {METHOD.name}: refused")
    return request
