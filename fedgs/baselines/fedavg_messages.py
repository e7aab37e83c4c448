"""Messages of Fed-Avg GAN: both networks down, one sanitized update up.

A reply is `fedgs.federation.messages.encode_answer`'s, with the terms of an update: one
sample (B = 1) of as many values as the discriminator has parameters. A request has the
weights of both networks, which are released output or public.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from fedgs.config.run_config import ResolvedConfig
from fedgs.config.stages import Terms
from fedgs.errors import UserError
from fedgs.federation.checkpoint import tensors_of, under
from fedgs.federation.codec import unpack_named
from fedgs.federation.messages import Request, decode_asked
from fedgs.gan.models import build_discriminator, build_generator
from fedgs.shapes import TensorDict


@dataclass(frozen=True)
class UpdateRequest(Request):
    """The request of a round of Fed-Avg GAN.

    Attributes:
        generator: its tensors.
        discriminator: its tensors.
    """

    generator: TensorDict
    discriminator: TensorDict

    def content(self) -> Iterable[Tensor]:
        """Returns the tensors of both networks, by name."""
        return (value for _, value in sorted(self.named_tensors().items()))

    def named_tensors(self) -> TensorDict:
        """Returns the tensors of both networks under "<network>.<name>"."""
        networks = {"generator": self.generator, "discriminator": self.discriminator}
        return {f"{k}.{n}": v for k, net in networks.items() for n, v in net.items()}


def update_terms(size: int, clip_bound: float, noise_std: float) -> Terms:
    """Returns what an update of so many values is agreed to be.

    Args:
        size: parameters of the discriminator.
        clip_bound: C > 0.
        noise_std: of one node's noise, at least 0.
    """
    return Terms("update", noise_std / (2 * clip_bound), clip_bound, (1, 1, 1, size))


def new_networks(config: ResolvedConfig) -> dict[str, nn.Module]:
    """Returns both networks as they are before the first round."""
    return {
        "generator": build_generator(config, config.seed),
        "discriminator": build_discriminator(config, config.seed),
    }


def weights_of(module: nn.Module) -> Tensor:
    """Returns all parameters in one vector, detached."""
    return parameters_to_vector(module.parameters()).detach()


def pack_networks(request: UpdateRequest) -> bytes:
    """Returns the tensors of a request as bytes; the same for every node."""
    named = request.named_tensors().items()
    return save({name: value.cpu().contiguous() for name, value in named})


def decode_request(
    payload: Mapping[str, object], config: ResolvedConfig
) -> UpdateRequest:
    """Decodes a request and checks it against the run's configuration.

    Raises:
        UserError: wrong keys, sizes, shapes, types or values; nothing of the request
            is used, and the text quotes nothing of it.
    """
    round, participants, trainees, keep_round = decode_asked(payload, config)
    if round < 1 or trainees != participants:
        raise UserError("request that is no round of Fed-Avg GAN: refused")
    networks = new_networks(config)
    known = tensors_of(networks).items()
    shapes = {name: tuple(value.shape) for name, value in known}
    tensors = unpack_named(payload["tensors"], shapes, "round")
    return UpdateRequest(
        round,
        under("generator.", tensors),
        under("discriminator.", tensors),
        participants=participants,
        trainees=trainees,
        keep_round=keep_round,
    )
