"""Many discriminators at once equal one at a time, and share nothing."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedgs.config.run_config import RunConfig
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.losses import discriminator_loss
from fedgs.gan.models import ADAM_BETAS, build_discriminator
from fedgs.randomness import derived_seed
from tiny import client_digest, digest, tiny_config

STEPS = 4
BATCH = 4
LEARNING_RATE = 1e-3
# Adam divides a gradient by its own size, so rounding of a gradient near 0 may move a
# weight by a share of the learning rate; a wrong step moves most by about one.
TOLERANCE = {"rtol": 0.0, "atol": 0.02 * LEARNING_RATE}
EVERYONE = tuple(range(6))

# Training and queries leave the random states of the process alone.
pytestmark = pytest.mark.usefixtures("global_state_is_kept")
both_ways = pytest.mark.parametrize("stacking", ["stacked", "loop"])


def _config(**overrides: object) -> RunConfig:
    overrides.setdefault("discriminator_learning_rate", LEARNING_RATE)
    return tiny_config(**overrides)


def _draw(step: int) -> list[Tensor]:
    """One batch for each of 6 clients: real, labels, fake, labels and mix weights."""
    rng = torch.Generator().manual_seed(step)
    shape = (6, BATCH)
    return [
        torch.rand(*shape, 1, 16, 16, generator=rng),
        torch.randint(3, shape, generator=rng),
        torch.rand(*shape, 1, 16, 16, generator=rng),
        torch.randint(3, shape, generator=rng),
        torch.rand(shape, generator=rng),
    ]


def _trained(subset: tuple[int, ...] = EVERYONE, **overrides: object) -> Discriminators:
    stack = Discriminators(_config(**overrides), range(6))
    indices, device = torch.tensor(subset), stack.config.device
    for step in range(STEPS):
        batch = (part[indices].to(device) for part in _draw(step))
        stack.train(indices.to(device), *batch)
    return stack


def _question(count: int = BATCH) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(99)
    return torch.rand(count, 1, 16, 16, generator=rng), torch.arange(count) % 3


# --------------------------------------------------------------------- equivalence


def _plain_steps(config: RunConfig, client: int) -> nn.Module:
    """The same steps in plain PyTorch: modules, autograd and torch.optim.Adam."""
    seed = derived_seed(config.seed, "discriminator", client)
    module = build_discriminator(config, seed)
    rate = config.discriminator_learning_rate
    optimizer = torch.optim.Adam(module.parameters(), rate, ADAM_BETAS)
    for step in range(STEPS):
        batch = [part[client] for part in _draw(step)]
        real, real_labels, fake, fake_labels, mix_weight = batch
        for layer in module.modules():
            if hasattr(layer, "u"):
                weight = layer.weight.detach().flatten(1)
                layer.v.copy_(normalize(weight.T @ layer.u, dim=0))
                layer.u.copy_(normalize(weight @ layer.v, dim=0))
        weight = mix_weight.view(-1, 1, 1, 1)
        mix = (weight * real + (1 - weight) * fake).requires_grad_()
        scores = module(mix, real_labels)
        grads = torch.autograd.grad(scores.sum(), mix, create_graph=True)[0]
        penalty = ((grads.flatten(1).norm(dim=1) - 1) ** 2).mean()
        real_scores = module(real, real_labels)
        loss = module(fake, fake_labels).mean() - real_scores.mean()
        loss = loss + 10.0 * penalty  # WGAN-GP, Algorithm 1
        loss = loss + 1e-3 * (real_scores**2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return module


@pytest.mark.parametrize(
    ("stacking", "spectral_norm", "subset"),
    [
        ("stacked", True, (1, 2, 3)),
        ("stacked", False, EVERYONE),
        ("loop", True, (0, 2, 5)),
    ],
)
def test_training_equals_plain_torch(stacking, spectral_norm, subset):
    config = _config(spectral_norm=spectral_norm)
    before = Discriminators(config, range(6))
    stack = _trained(subset, spectral_norm=spectral_norm)
    for client in range(6):
        if client not in subset:
            assert client_digest(stack, client) == client_digest(before, client)
            continue
        assert stack.steps[client] == STEPS
        plain = _plain_steps(config, client)
        for name, value in plain.named_parameters():
            ours = stack.params[name][client]
            torch.testing.assert_close(ours, value.data, **TOLERANCE, msg=name)
            if ours.dim() > 1 and "embedding" not in name:
                # What makes the tolerance mean something.
                moved = (ours - before.params[name][client]).abs().median()
                assert moved > 0.5 * LEARNING_RATE, name
        for name, value in plain.named_buffers():
            ours = stack.buffers[name][client]
            torch.testing.assert_close(ours, value, rtol=0, atol=1e-4, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("spectral_norm", [True, False])
@both_ways
def test_a_gpu_trains_as_the_cpu(stacking, spectral_norm, cuda):
    settings = {"spectral_norm": spectral_norm}
    there, here = (_trained(device=device, **settings) for device in (cuda, "cpu"))
    moved = {name: value.cpu() for name, value in there.state().items()}
    torch.testing.assert_close(moved, here.state(), **TOLERANCE)


@both_ways
def test_answers_are_the_gradients_of_minus_the_score(stacking):
    stack = _trained()
    for clients in (EVERYONE, (0, 3), (4,)):
        answers = stack.query(torch.tensor(clients), *_question())
        assert answers.shape == (len(clients), BATCH, 1, 16, 16)
        assert answers.flatten(2).norm(dim=2).min() > 1e-3
        for row, client in enumerate(clients):
            module = build_discriminator(stack.config, 0)
            tensors = {**stack.params, **stack.buffers}
            module.load_state_dict({name: v[client] for name, v in tensors.items()})
            images, labels = _question()
            images.requires_grad_()
            (-module(images, labels)).sum().backward()
            expected = images.grad
            torch.testing.assert_close(answers[row], expected, rtol=1e-4, atol=1e-6)


@both_ways
def test_bfloat16_rounds_the_operands_of_convolutions_and_nothing_else(stacking):
    exact, rounded = (_trained(precision=kind) for kind in ("float32", "bfloat16"))
    rounded.load_state(exact.state())  # Adam makes much of gradients near 0
    answers = [s.query(torch.arange(6), *_question()) for s in (exact, rounded)]
    error = (answers[1] - answers[0]).norm() / answers[0].norm()
    # 8 digits. In so narrow a network one unit near 0 is a share of the gradient.
    assert 2**-10 < error < 0.2


def test_a_zero_image_gradient_has_a_finite_penalty_gradient():
    scale, (images, labels) = torch.zeros((), requires_grad=True), _question()
    half = torch.full((BATCH,), 0.5)
    batch = torch.ones_like(images), labels, 0 * images, labels, half
    loss = discriminator_loss(lambda x, _: scale * x.flatten(1).sum(1), *batch, 0.0)
    # d/ds (0 - 256 s); the penalty's own gradient is smoothed to 0 at s = 0.
    assert float(torch.autograd.grad(loss, scale)[0]) == pytest.approx(-256.0)


# ---------------------------------------------------------------------- separation


def test_no_layer_of_the_discriminator_normalises_over_the_batch():
    # Such a layer would let one fake's gradient depend on the other fakes.
    images, labels = _question(8)
    stack = _trained()
    together = stack.query(torch.arange(6), images, labels)
    for fake in (0, 7):
        alone = stack.query(torch.arange(6), images[[fake]], labels[[fake]])
        torch.testing.assert_close(alone[:, 0], together[:, fake], rtol=1e-4, atol=1e-6)


# --------------------------------------------------------------------------- state


@pytest.mark.parametrize(
    ("overrides", "num_clients"),
    [({"discriminator_dim": 2}, 6), ({"spectral_norm": False}, 6), ({}, 5)],
)
def test_the_state_of_another_architecture_is_refused(overrides, num_clients):
    other = Discriminators(_config(**overrides), range(num_clients)).state()
    stack = Discriminators(_config(), range(6))
    before = digest(stack.state())
    with pytest.raises(ValueError, match="another architecture"):
        stack.load_state(other)
    assert digest(stack.state()) == before


@both_ways
@pytest.mark.parametrize("chunk_size", [2])
def test_chunks_cover_the_clients_in_order(stacking, chunk_size):
    stack = Discriminators(_config(), range(6))
    assert list(stack.chunks([])) == []
    chunks = [chunk.tolist() for chunk in stack.chunks([0, 2, 3, 5, 1])]
    expected = {"stacked": [[0, 2], [3, 5], [1]], "loop": [[0], [2], [3], [5], [1]]}
    assert chunks == expected[stacking]
