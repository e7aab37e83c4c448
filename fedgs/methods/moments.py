"""Moments: a round releases the mean features of every class, once, and sets G by them.

The first rounds of a run, one for each of its `stages`. What all discriminators say
that are linear over fixed features stands in the means of those features: so one
release replaces all their rounds. The last stage may be one of a trunk's features,
which a refiner behind the Gaussians is fitted to (`settle`).

Source: docs/privacy.md, "Embedding releases".
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from fedgs.config.run_config import GsWganConfig
from fedgs.config.stages import Terms
from fedgs.errors import UserError
from fedgs.gan import refinement
from fedgs.gan.features import KINDS, embedding
from fedgs.gan.models import GeneratorRefined
from fedgs.gan.moments import model_of, set_generator
from fedgs.gan.stages import make_stage
from fedgs.gan.stages import released as stage_release
from fedgs.methods.base import Declared, Method, OneClient, Released, Request, State
from fedgs.methods.schedule import EVERYONE
from fedgs.shapes import TensorDict

CENTRE = "centre"


class Moments(Method[GsWganConfig]):
    """Clients answer with the mean features of their images, once a stage."""

    commits_every_round = True
    hides_duration = True

    def terms(self, config: GsWganConfig, round: int) -> Terms:
        """Returns one embedding, clipped to C, by network, group and feature."""
        return config.terms(round)

    def state(self, config: GsWganConfig) -> State:
        """Is never asked for: stages begin the run of a method with a generator."""
        raise NotImplementedError

    def declared(self, config: GsWganConfig, round: int) -> Mapping[str, Declared]:
        """Returns the tensors of the feature networks, and what clients subtract."""
        kind = KINDS[config.stage_list[round - 1].kind]
        count, groups, columns = config.terms(round).shape[1:]
        networks = {
            f"{index}.{name}": Declared(shape)
            for index in range(count)
            for name, shape in kind.shapes(config).items()
        }
        return networks | {CENTRE: Declared((count, groups, columns - 1))}  # no mass

    def begin(self, config: GsWganConfig, state: State) -> tuple[Request, Request]:
        """Makes the stage's feature networks and what clients subtract.

        Privacy: post-processing of DP output.
        """
        round = state.round + 1
        if round == config.num_stages and config.has_features:
            network, centre = refinement.reference(config, state.ema)
            networks = (network,)
        else:
            networks, centre = make_stage(config, state.stages, round, state.start)
        named = {
            f"{index}.{name}": value
            for index, net in enumerate(networks)
            for name, value in net.items()
        }
        request = Request(round, named | {CENTRE: centre})
        return request, request

    def check(self, config: GsWganConfig, request: Request) -> None:
        """Refuses a stage that is not to everyone."""
        if (request.participants, request.trainees) != (EVERYONE, EVERYONE):
            raise UserError("request for a stage that is not to everyone: refused")

    def answer(
        self, config: GsWganConfig, client: OneClient, request: Request
    ) -> Tensor:
        """Returns the client's embedding: one sample, which is clipped as a whole.

        Privacy: reads private data; output private.
        """
        kind, device = config.stage_list[request.round - 1].kind, config.device
        networks = [
            {n: v.to(device) for n, v in net.items()} for net in networks_of(request)
        ]
        centre = request.tensors[CENTRE].to(device)
        images, labels = client.tensors(device)
        return embedding(kind, networks, centre, images, labels)[None]

    def finish(
        self, config: GsWganConfig, state: State, pending: Request, released: Released
    ) -> None:
        """Sets the generator to what the stages have released, with a new one.

        Privacy: post-processing of DP output.
        """
        asked = (pending.round, networks_of(pending), pending.tensors[CENTRE])
        own = released.total[0], released.noise_std
        state.stages.append(stage_release(config, *asked, *own))
        model = model_of(config, state.stages, state.start)
        set_generator(config, model, state.generator, state.ema)
        state.round += 1

    def settle(
        self, config: GsWganConfig, state: State, check: Callable[[int, int], None]
    ) -> bool:
        """Fits the refiner to the release of the last stage, if it is one of features.

        Privacy: post-processing of DP output.
        """
        if not config.has_features or state.round != config.num_stages:
            return False
        generator, average = state.generator, state.ema
        if not (
            isinstance(generator, GeneratorRefined)
            and isinstance(average, GeneratorRefined)
        ):
            raise TypeError("no other generator is fitted to features")
        refinement.refine(config, state.stages[-1], generator, average, check)
        return True


MOMENTS = Moments()


def networks_of(request: Request) -> tuple[TensorDict, ...]:
    """Returns the tensors of each feature network of a stage's request."""
    found: dict[int, TensorDict] = {}
    for key, value in request.tensors.items():
        index, _, name = key.partition(".")
        if name:
            found.setdefault(int(index), {})[name] = value
    return tuple(found[index] for index in sorted(found))
