"""What a client's discriminator trains on: its own records and the round's fakes.

Every client draws from a stream of its own, so what one client does changes nothing
for another, and nothing depends on how clients are batched.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from fedgs.config.run_config import NetworkConfig
from fedgs.data.federated import ClientImages
from fedgs.gan.discriminators import Discriminators
from fedgs.randomness import stream
from fedgs.shapes import Images, Labels, Positions

Indices = npt.NDArray[np.int64]


class Draws:
    """What some clients draw for the n_dis steps of a round, each from its stream.

    Real records are drawn with replacement, so that one record is enough. The fakes of
    step t are the t-th fresh batch (`fake_labels` is None), or are drawn from the
    round's one set, each with the label of the real image beside it: a client never
    learns to tell real from fake by the labels that it happens to lack.

    Privacy: reads private data; output private.

    Args:
        config: the resolved configuration.
        clients: the clients with their own images, in order.
        purpose: name of the stream; the warm start and the rounds draw differently.
        round: the round, or the round of the warm start.
        fake_labels: labels (F,) of the one set of fakes, or None for fresh batches.

    Attributes:
        round: as given.
        records: (n, n_dis, b) positions among the client's own images.
        real_labels: (n, n_dis, b) labels of these images.
        fakes: (n, n_dis, b) positions in the set of fakes.
        mix: (n, n_dis, b) weights of the gradient penalty, float32 in [0, 1).

    Differs from the reference: it draws fakes with the real batch's labels, which a
    server does not have; here the client picks fakes of these labels itself.
    """

    def __init__(
        self,
        config: NetworkConfig,
        clients: Sequence[ClientImages],
        purpose: str,
        round: int,
        fake_labels: Indices | None,
    ) -> None:
        """Draws everything at once."""
        self.clients = clients
        self.round = round
        shape = (config.discriminator_steps, config.discriminator_batch_size)
        records = []
        real_labels = []
        fakes = []
        mix = []
        in_turn = np.arange(shape[0] * shape[1]).reshape(shape)
        for client in clients:
            rng = stream(config.seed, purpose, client.number, round)
            # Another order of these draws would move every trajectory.
            own = rng.integers(len(client.labels), size=shape)
            wanted = client.labels[own]
            records.append(own)
            real_labels.append(wanted)
            mix.append(rng.random(shape, dtype=np.float32))
            chosen = in_turn
            if fake_labels is not None:
                chosen = draw_matching(rng, wanted, fake_labels)
            fakes.append(chosen)
        self.records = np.stack(records)
        self.real_labels = np.stack(real_labels)
        self.fakes = np.stack(fakes)
        self.mix = np.stack(mix)

    def real(self, step: int) -> tuple[npt.NDArray[np.uint8], Indices]:
        """Returns the private images (n, b, C, S, S) and labels (n, b) of a step.

        Privacy: reads private data; output private.
        """
        images = []
        for client, records in zip(self.clients, self.records[:, step], strict=True):
            images.append(client.images[records])
        return np.stack(images), self.real_labels[:, step]


def draw_matching(
    rng: np.random.Generator,
    wanted: Indices,
    labels: Indices,
) -> Indices:
    """Draws for every wanted label a position in `labels` that has it.

    A label that does not occur gets any position.

    Privacy: reads private data; output private.

    Args:
        rng: the client's stream.
        wanted: labels, any shape.
        labels: shape (F,), not empty.

    Returns:
        Positions in [0, F), of the shape of `wanted`.

    >>> draw_matching(np.random.default_rng(0), np.array([7, 7]), np.array([1, 7, 2]))
    array([1, 1])
    """
    order = np.argsort(labels, kind="stable")
    first = np.searchsorted(labels[order], wanted, side="left")
    last = np.searchsorted(labels[order], wanted, side="right")
    count = last - first
    is_there = count > 0
    start = np.where(is_there, first, 0)
    length = np.where(is_there, count, len(labels))
    chosen = rng.random(wanted.shape) * length
    places = start + chosen.astype(np.int64)
    return order[places]


def train_discriminators(
    config: NetworkConfig,
    discriminators: Discriminators,
    chunk: Positions,
    draws: Draws,
    fakes: Images,
    labels: Labels,
) -> None:
    """Takes n_dis steps with each client of a chunk.

    Privacy: reads private data; output private.

    Args:
        config: the resolved configuration.
        discriminators: trained in place.
        chunk: (n,) positions of the clients in `discriminators`.
        draws: what these clients draw.
        fakes: (F, C, S, S) for all clients, or (n, F, C, S, S) one's own.
        labels: (F,) or (n, F).
    """
    device = config.device
    num_clients = len(chunk)
    if fakes.dim() == 4:
        fakes = fakes.expand(num_clients, *fakes.shape)
        labels = labels.expand(num_clients, *labels.shape)
    rows = torch.arange(num_clients, device=device).unsqueeze(1)
    for step in range(config.discriminator_steps):
        images, real_labels = draws.real(step)
        pixels = torch.from_numpy(images).to(device)
        index = torch.from_numpy(draws.fakes[:, step]).to(device)
        mix = torch.from_numpy(draws.mix[:, step].copy())
        discriminators.train(
            chunk,
            pixels.float().div_(255.0),
            torch.from_numpy(real_labels).to(device),
            fakes[rows, index],
            labels[rows, index],
            mix.to(device),
        )
