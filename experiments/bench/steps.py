"""What a training step costs against what this machine can do at best.

    python -m experiments.bench.steps [--device cuda] [--tables critics --tables paper]

`peaks`: the machine. `critics`: critic steps by width, each with the bound that holds
it. `paper`: one round of Algorithm 1 at full width, and as the published code computes
it. `products`: four ways to compute many critics at once, on a GPU in three precisions.

On a CPU one thread works and its CPU seconds count, in turn with what it is compared
with, so that other work on the machine disturbs little. Medians of five.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from click import Choice
from torch import Tensor
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from typer import Option

from experiments.bench.measuring import median_seconds, medians_in_turn
from experiments.flags import run_command
from experiments.tables import Table
from fedgs.config.recipes import algorithm_1, full_participation
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.data.federated import FederatedImages
from fedgs.federation.round import draw_fakes, jacobian_step, new_server
from fedgs.gan import losses, models
from fedgs.gan.client_training import Draws, train_discriminators
from fedgs.gan.discriminators import Discriminators
from fedgs.process import keep_freed_memory
from fedgs.shapes import TensorDict

WIDTHS = (8, 16, 32, 64)
TABLES = ("peaks", "critics", "paper", "products")
BATCH, PENALTY = 32, 10.0  # the paper's
Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # as `Discriminators.train`
Product = Callable[[Tensor, Tensor], Tensor]


def main(
    device: str = "cpu",
    tables: Annotated[list[str] | None, Option(click_type=Choice(TABLES))] = None,
) -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a training process does
    show = {"peaks": peaks_table, "critics": critics_table}
    show |= {"paper": paper_table, "products": products_table}
    for name in tables or TABLES:
        show[name](device)


# ------------------------------------------------------------------------- inputs


def bench_config(
    recipe: RunConfig | None = None, **overrides: object
) -> ResolvedConfig:
    """Returns settings for a benchmark: full participation unless another is given."""
    settings = {"num_classes": 10, "seed": 0, "noise_multiplier": 1.0}
    settings |= {"target_epsilon": None, "num_clients": 1, "clients_per_round": 1}
    base = recipe or full_participation()
    return ResolvedConfig.from_flat(settings | overrides, base)


def bench_data(num_clients: int, size: int) -> FederatedImages:
    """Returns random images, `size` of each client."""
    rng = np.random.default_rng(0)
    count = num_clients * size
    return FederatedImages(
        rng.integers(0, 256, (count, 1, 28, 28), dtype=np.uint8),
        rng.integers(0, 10, count),
        tuple(np.arange(count).reshape(num_clients, size)),
        tuple(str(client) for client in range(num_clients)),
        10,
        "random",
    )


def random_batch(clients: int, size: int, device: str) -> Batch:
    """Returns random images, labels and mix weights for every client."""
    rng = torch.Generator().manual_seed(0)
    shape = clients, size
    images = torch.rand(2, *shape, 1, 28, 28, generator=rng).to(device)
    labels = torch.randint(10, (2, *shape), generator=rng).to(device)
    mix = torch.rand(shape, generator=rng).to(device)
    return images[0], labels[0], images[1], labels[1], mix


def training_step(config: ResolvedConfig, state: Discriminators) -> Callable[[], None]:
    """Returns a function that takes one step with every client's discriminator.

    All clients train on the same random images: their memory is not what is measured.
    """
    batch = random_batch(1, config.discriminator_batch_size, config.device)
    real, real_labels, fake, fake_labels, mix = (
        part.expand(len(state), *part.shape[1:]) for part in batch
    )

    def step() -> None:
        for chunk in state.chunks(range(len(state))):
            on_real, on_fake = (real, real_labels), (fake, fake_labels)
            on_real, on_fake = ((x[chunk], y[chunk]) for x, y in (on_real, on_fake))
            state.train(chunk, *on_real, *on_fake, mix[chunk])

    return step


# ---------------------------------------------------------------- what is possible


def peaks_table(device: str) -> None:
    """Prints what the machine can do at best."""
    peak = flop_peaks(device)
    cells = [f"{rate / 1e9:.0f}" for rate in (*peak.values(), bandwidth(device))]
    Table("peaks, GFLOP/s and GB/s", [*peak, "copying memory"], [cells]).show()


def flop_peaks(device: str) -> dict[str, float]:
    """Returns floating-point operations a second of products that suit the machine."""
    side = 2048 if device == "cpu" else 8192
    a = torch.randn(side, side, device=device)
    x = torch.randn(32, 256, 16, 16, device=device)
    w = torch.randn(256, 256, 3, 3, device=device)
    x, w = (part.to(memory_format=torch.channels_last) for part in (x, w))
    found: dict[str, float] = {}
    for name in precisions(device):
        with precision(name, device):
            seconds = median_seconds(lambda: a @ a, device)
            found[f"matrix, {name}"] = 2 * side**3 / seconds
            seconds = median_seconds(partial(F.conv2d, x, w, padding=1), device)
            found[f"convolution, {name}"] = 2 * 32 * 256**2 * 9 * 16**2 / seconds
    return found


def bandwidth(device: str) -> float:
    """Returns bytes a second of a copy that no cache holds, read and written."""
    source = torch.randn(2**26, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)


def precisions(device: str) -> tuple[str, ...]:
    """Returns the names that `precision` takes here."""
    return ("float32", "bf16") if device == "cpu" else ("float32", "tf32", "bf16")


@contextmanager
def precision(name: str, device: str) -> Iterator[None]:
    """Computes products in float32, tf32 (a GPU's) or bf16; float32 is exact there."""
    matmul: Any = torch.backends.cuda.matmul
    conv: Any = torch.backends.cudnn
    before = matmul.allow_tf32, conv.allow_tf32
    matmul.allow_tf32 = conv.allow_tf32 = name == "tf32"
    is_half = name == "bf16"
    kind = torch.device(device).type
    try:
        # No cache: it would keep weights of before Adam's step, in graphs for good.
        with torch.autocast(kind, torch.bfloat16, is_half, cache_enabled=False):
            yield
    finally:
        matmul.allow_tf32, conv.allow_tf32 = before


class Counted(TorchDispatchMode):
    """Counts calls of kernels, and the bytes of the tensors that they get and make."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Counts one call; a view is none."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.calls += 1
            seen = tree_leaves((args, kwargs, result))
            self.bytes += sum(part.nbytes for part in seen if isinstance(part, Tensor))
        return result


def critic_flops(width: int, batch: int) -> float:
    """Returns the operations that a critic step needs at 28x28, of its convolutions.

    Real and fake: forward, gradients of weights and of all inputs but the images.
    Penalty: forward, the image's gradient, that gradient's change along a direction,
    and the gradient of the weights.
    """
    first = 14**2 * 25 * width
    macs = first + 7**2 * 25 * 2 * width**2 + 4**2 * 25 * 8 * width**2
    return 2.0 * batch * (2 * (3 * macs - first) + 4 * macs)


def num_critics(width: int, device: str) -> int:
    """Returns how many critics are trained at once; few on a CPU, for it takes long."""
    return 256 // width if device == "cpu" else 64


def critics_table(device: str) -> None:
    """Prints critic steps a second by width, and the bound that holds each."""
    peak = max(v for k, v in flop_peaks(device).items() if k.endswith("float32"))
    speed = bandwidth(device)
    per_call = _seconds_per_call(device)
    rows: list[list[str]] = []
    for width in WIDTHS:
        clients = num_critics(width, device)
        steps: dict[str, Callable[[], None]] = {}
        for stacking in ("stacked", "loop"):
            config = bench_config(
                discriminator_dim=width, stacking=stacking, device=device
            )
            steps[stacking] = training_step(
                config, Discriminators(config, range(clients))
            )
        seconds = medians_in_turn(steps, device)
        needed = critic_flops(width, 16) * clients
        for stacking, step in steps.items():
            with Counted() as count:
                step()
            bounds = {
                "FLOP": needed / peak,
                "memory": count.bytes / speed,
                "dispatch": count.calls * per_call,
            }
            took = seconds[stacking]
            holds = max(bounds, key=lambda name: bounds[name])
            shares = [f"{bound / took:.0%}" for bound in bounds.values()]
            rows.append(
                [
                    f"{width}",
                    f"{clients}",
                    stacking,
                    f"{clients / took:.0f}",
                    *shares,
                    holds,
                ]
            )
    head = [
        "width",
        "critics",
        "stacking",
        "steps/s",
        "FLOP",
        "memory",
        "dispatch",
        "held by",
    ]
    caption = "critic steps, 16 + 16 images: bounds as shares of the time"
    Table(caption, head, rows).show()


def _seconds_per_call(device: str) -> float:
    """Returns the time of one call of a kernel that has next to nothing to do."""
    config = bench_config(
        discriminator_dim=1,
        discriminator_batch_size=1,
        stacking="loop",
        device=device,
    )
    step = training_step(config, Discriminators(config, range(1)))
    step()
    with Counted() as count:
        step()
    return median_seconds(step, device) / count.calls


# ----------------------------------------------------------------- the paper's step


class PublishedGenerator(models.GeneratorResNet):
    """Computes the same images as the published code does: upsample, then convolve."""

    def _logits(self, inputs: Tensor) -> Tensor:
        h = F.linear(inputs, models._weight(self.linear), self.linear.bias)
        h = models._pixel_norm(F.relu(h.unflatten(1, (-1, 4, 4))))
        for block in self.blocks:
            inner = F.interpolate(models._pixel_norm(h), scale_factor=2.0)
            inner = F.relu(models._pixel_norm(_convolved(inner, block.conv1, 1)))
            skip = F.interpolate(h, scale_factor=2.0)
            h = _convolved(inner, block.conv2, 1) + _convolved(skip, block.conv_skip)
        h = _convolved(h, self.conv, self.padding)
        return h[:, :, : self.side, : self.side]


def _convolved(x: Tensor, conv: Any, padding: int = 0) -> Tensor:
    return F.conv2d(x, models._weight(conv), conv.bias, padding=padding)


class PublishedCritic(models.Discriminator):
    """Computes the same scores with a ReLU whose second derivative is carried along."""

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Returns scores (B,)."""
        h, table = images, self.embedding
        assert table is not None
        for conv in (self.conv1, self.conv2, self.conv3):
            h = F.relu(F.conv2d(h, models._weight(conv), conv.bias, 2, 2))
        h = h.flatten(1)
        scores = F.linear(h, models._weight(self.linear), self.linear.bias).squeeze(1)
        return scores + (F.embedding(labels, models._weight(table)) * h).sum(1)


def paper_table(device: str, width: int = 64) -> None:
    """Prints the seconds of one round of Algorithm 1, and of the published code."""
    config = paper_config(width, device)
    peak = max(v for k, v in flop_peaks(device).items() if k.endswith("float32"))
    rounds = {"published": published_round(config), "fedgs": paper_round(config)}
    rows: list[list[str]] = []
    seconds = medians_in_turn(rounds, device)
    for name, flops in paper_flops(config).items():
        took = seconds[name]
        row = [name, f"{flops / 1e9:.0f}", f"{flops / peak:.2f}", f"{took:.2f}"]
        rows.append([*row, f"{flops / peak / took:.0%}"])
    head = [
        "computed as",
        "GFLOP",
        "at the peak, s",
        "measured, s",
        "share of the peak",
    ]
    caption = f"one round of Algorithm 1, width {width}, 5 critic steps, batch 32"
    Table(caption, head, rows).show()


def paper_config(width: int, device: str) -> ResolvedConfig:
    """Returns the paper's settings with one client."""
    changes = {"generator_dim": width, "discriminator_dim": width, "device": device}
    return bench_config(algorithm_1(), clients_per_round=1, **changes)


def paper_round(config: ResolvedConfig) -> Callable[[], None]:
    """Returns a function that takes a round of Algorithm 1, as the engines do."""
    data, server = bench_data(1, 60), new_server(config)
    state, chunk = Discriminators(config, [0]), torch.tensor([0])

    def step() -> None:
        request, answered = draw_fakes(config, server)
        draws = Draws(config, data, [0], "data", 1, None)
        fakes, labels = request.images, request.labels
        there = fakes.to(config.device), labels.to(config.device)
        train_discriminators(config, state, chunk, draws, *there)
        grads = state.query(chunk, answered.detach(), there[1][-len(answered) :])[0]
        jacobian_step(server.optimizer, answered, grads / len(answered))

    return step


def published_round(config: ResolvedConfig) -> Callable[[], None]:
    """Returns the same work in the order of the published code, in plain PyTorch.

    Each critic step draws its own fakes; the answered fakes are drawn anew.
    """
    generator, critic = PublishedGenerator(config), PublishedCritic(config)
    optimizers: list[torch.optim.Optimizer] = []
    for module in (generator, critic):
        module.to(config.device)
        optimizers.append(torch.optim.Adam(module.parameters(), 1e-4, (0.5, 0.9)))
    data, rng = bench_data(1, 60), np.random.default_rng(0)
    real = torch.from_numpy(data.images[:BATCH]).to(config.device) / 255
    labels = torch.from_numpy(data.labels[:BATCH]).to(config.device)

    def draw() -> Tensor:
        models.advance_in_place(generator)
        z = models.sample_latents(config, rng, BATCH).to(config.device)
        return generator(z, labels)

    def step() -> None:
        for _ in range(config.discriminator_steps):
            fake, mix = draw().detach(), torch.rand(BATCH, device=config.device)
            models.advance_in_place(critic)
            batch = real, labels, fake, labels, mix
            optimizers[1].zero_grad()
            losses.discriminator_loss(critic, *batch, PENALTY, 1e-3).backward()
            optimizers[1].step()
        images = draw()
        grads = losses.generator_image_grads(critic, images.detach(), labels)
        jacobian_step(optimizers[0], images, grads / BATCH)

    return step


def paper_flops(config: ResolvedConfig) -> dict[str, float]:
    """Returns the needed operations of a round: of the published code, and of ours."""
    found: dict[str, float] = {}
    critic = config.discriminator_steps * critic_flops(config.discriminator_dim, BATCH)
    for name, kind in (("published", PublishedGenerator), ("fedgs", None)):
        generator = (kind or models.GeneratorResNet)(config).to(config.device)
        z = torch.zeros(BATCH, config.latent_dim, device=config.device)
        labels = torch.zeros(BATCH, dtype=torch.int64, device=config.device)
        with FlopCounterMode(display=False) as count:
            generator(z, labels)
        forward = count.get_total_flops()
        with FlopCounterMode(display=False) as count:
            generator(z, labels).sum().backward()
        draws = config.discriminator_steps - (name == "fedgs")  # it answers the last
        found[name] = draws * forward + count.get_total_flops() + critic
    return found


# ------------------------------------------------------ many critics in one product


def by_vmap(x: Tensor, weight: Tensor) -> Tensor:
    """Convolves (n, b, C, S, S) by (n, O, C, 5, 5), stride 2, as `ModuleStack` does."""
    return vmap(partial(F.conv2d, stride=2, padding=2))(x, weight)


def by_groups(x: Tensor, weight: Tensor) -> Tensor:
    """One convolution with a group for each client."""
    count = len(weight)
    joined = x.transpose(0, 1).flatten(1, 2)  # (b, n C, S, S)
    joined = F.conv2d(joined, weight.flatten(0, 1), None, 2, 2, 1, count)
    return joined.unflatten(1, (count, -1)).transpose(0, 1)


def by_products(x: Tensor, weight: Tensor) -> Tensor:
    """Unfolds the patches and multiplies matrices, one for each client."""
    count, batch = x.shape[:2]
    patches = F.unfold(x.flatten(0, 1), 5, padding=2, stride=2)  # (n b, 25 C, L)
    patches = patches.unflatten(0, (count, batch)).transpose(1, 2).flatten(2)
    sides = (batch, *(math.ceil(side / 2) for side in x.shape[-2:]))
    return (weight.flatten(2) @ patches).unflatten(2, sides).transpose(1, 2)


PRODUCTS: Mapping[str, Product] = {
    "vmap": by_vmap,
    "groups": by_groups,
    "unfold + bmm": by_products,
}


def critic_grads(
    product: Product, params: TensorDict, batch: Batch, is_fused: bool = False
) -> TensorDict:
    """Returns the gradients of many critics' losses, by a product of one's choice.

    Args:
        product: of images and weights.
        params: of `Discriminators` without spectral norm, each with a client axis.
        batch: as `Discriminators.train` gets it: real and labels, fake and labels, mix.
        is_fused: without double backward: between the kinks of its activations a
            critic is linear, so the penalty's gradient is that of the scores' change
            along one direction, a first derivative.

    Returns:
        Gradients like `params`.
    """
    count = len(batch[0])
    real, real_labels, fake, fake_labels, mix_weight = (p.flatten(0, 1) for p in batch)

    def changes(h: Tensor, labels: Tensor, slopes: list[Tensor]) -> Tensor:
        """Scores (n b,), or with the slopes of other images the change along `h`."""
        h, is_new = h.unflatten(0, (count, -1)), not slopes
        for at in range(3):
            h = product(h, params[f"conv{at + 1}.weight"])
            if is_new:
                h = h + params[f"conv{at + 1}.bias"][:, None, :, None, None]
                slope = torch.full_like(h, models.LEAKY_SLOPE)
                slopes.append(slope.masked_fill(h > 0, 1.0))
            h = h * slopes[at]
        table = params["embedding.weight"]
        one_hot = F.one_hot(labels, table.shape[1]).to(h).unflatten(0, (count, -1))
        found = ((params["linear.weight"] + one_hot @ table) * h.flatten(2)).sum(2)
        return (found + params["linear.bias"] if is_new else found).flatten()

    def score(images: Tensor, labels: Tensor) -> Tensor:
        return changes(images, labels, [])

    weight = 0.0 if is_fused else PENALTY
    images = real, real_labels, fake, fake_labels, mix_weight
    loss = losses.discriminator_loss(score, *images, weight, 1e-3)  # the clients' mean
    if is_fused:
        share, slopes = mix_weight.view(-1, 1, 1, 1), []
        mix = (share * real + (1 - share) * fake).requires_grad_()
        scores = changes(mix, real_labels, slopes)
        (along,) = torch.autograd.grad(scores.sum(), mix)
        norms = along.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        along = 2 * PENALTY / len(mix) * (1 - 1 / norms) * along  # d penalty / d along
        loss = loss + changes(along, real_labels, slopes).sum()
    grads = torch.autograd.grad(count * loss, list(params.values()))
    return dict(zip(params, grads, strict=True))


def products_table(device: str) -> None:
    """Prints critic steps a second by each product; on a GPU as a graph as well."""
    rows: list[list[str]] = []
    peaks = flop_peaks(device)
    for name in precisions(device):
        if device == "cpu" and name != "float32":
            continue  # other samples, see docs/experiments.md
        peak = peaks[f"matrix, {name}"]
        for width in WIDTHS:
            clients = num_critics(width, device)
            with precision(name, device):
                steps = _product_steps(width, clients, device)
                seconds = medians_in_turn(steps, device)
            flops = clients * critic_flops(width, 16)
            for way, took in seconds.items():
                cells = [f"{clients / took:.0f}", f"{flops / took / peak:.0%}"]
                rows.append([name, f"{width}", way, *cells])
    head = ["precision", "width", "by", "steps/s", "share of the matrix peak"]
    Table("many critics in one product, 16 + 16 images", head, rows).show()


def _product_steps(
    width: int, clients: int, device: str
) -> dict[str, Callable[[], None]]:
    config = bench_config(discriminator_dim=width, device=device)
    params = Discriminators(config, range(clients)).params
    batch = random_batch(clients, 16, device)
    steps: dict[str, Callable[[], None]] = {}
    for way, product in PRODUCTS.items():
        for is_fused in (False, True):
            name = f"{way}, fused" if is_fused else way
            steps[name] = product_step(product, leaves(params), batch, is_fused)
    if device != "cpu":
        for way in list(steps):
            steps[f"{way}, CUDA graph"] = graphed(steps[way])
    return steps


def leaves(params: TensorDict, device: str | None = None) -> TensorDict:
    """Returns copies that can be trained."""
    copies = {n: v.detach().to(device, copy=True) for n, v in params.items()}
    return {name: value.requires_grad_() for name, value in copies.items()}


def product_step(
    product: Product, params: TensorDict, batch: Batch, is_fused: bool = False
) -> Callable[[], None]:
    """Returns a function that takes a whole step, Adam's too, with leaf parameters."""
    is_capturable = batch[0].is_cuda
    optimizer = torch.optim.Adam(params.values(), 2e-3, capturable=is_capturable)

    def step() -> None:
        for name, grad in critic_grads(product, params, batch, is_fused).items():
            params[name].grad = grad
        optimizer.step()

    return step


def graphed(step: Callable[[], None]) -> Callable[[], None]:
    """Captures a step as a CUDA graph, double backward and Adam included."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


if __name__ == "__main__":
    sys.exit(run_command(main))
