"""What the bench of training steps compares is the same computation."""

import pytest
import torch

from experiments.bench import steps
from fedgs.gan import models
from fedgs.gan.discriminators import Discriminators

CLIENTS, SIZE = 3, 4
every_way = pytest.mark.parametrize("is_fused", [False, True])
every_product = pytest.mark.parametrize("product", steps.PRODUCTS)


@every_way
@every_product
def test_every_product_has_the_gradients_that_clients_train_with(product, is_fused):
    config = steps.bench_config(discriminator_dim=3)
    stack = Discriminators(config, range(CLIENTS))
    batch = steps.random_batch(CLIENTS, SIZE, "cpu")
    chosen = steps.PRODUCTS[product], steps.leaves(stack.params)
    grads = steps.critic_grads(*chosen, batch, is_fused)
    stack.train(torch.arange(CLIENTS), *batch)
    for name, moment in stack.moments[0].items():  # (1 - beta1) times the gradient
        expected = moment / (1 - config.discriminator_beta1)
        torch.testing.assert_close(grads[name], expected, rtol=1e-3, atol=1e-5)


def test_the_published_order_computes_the_same_images_and_scores():
    config = steps.paper_config(2, "cpu")
    ours = models.build_generator(config, 0), models.build_discriminator(config, 0)
    theirs = steps.PublishedGenerator(config), steps.PublishedCritic(config)
    for own, published in zip(ours, theirs, strict=True):
        published.load_state_dict(own.state_dict())
    z, labels = torch.eye(10)[:SIZE], torch.arange(SIZE)
    with torch.no_grad():
        images = ours[0](z, labels)
        torch.testing.assert_close(theirs[0](z, labels), images, rtol=0, atol=1e-5)
        assert torch.equal(theirs[1](images, labels), ours[1](images, labels))


def test_a_round_needs_as_many_operations_as_counted_by_hand():
    # Width 8, multiply-adds. Generator at 8x8 + 16x16 + 32x32 = 1344 pixels of 32
    # channels, two 3x3 and one 1x1 convolution; the linear layer; 900 pixels at last.
    first, last = 20 * 512, 900 * 9 * 32
    plain = 1344 * (2 * 9 + 1) * 32**2 + first + last
    # Here: 336 pixels with 16 taps, 1344 with 9, 336 with 1.
    ours = (336 * 17 + 1344 * 9) * 32**2 + first + last
    # Backward: the gradients of weights and inputs, but for the first layer's input.
    critics = 5 * steps.critic_flops(8, 32)
    found = steps.paper_flops(steps.paper_config(8, "cpu"))
    assert found["published"] == 64 * (5 * plain + 3 * plain - first) + critics
    assert found["fedgs"] == 64 * (4 * ours + 3 * ours - first) + critics
    # Width 64: ten passes over 23.4 million, of which two without the first layer.
    assert steps.critic_flops(64, 32) == 64 * (10 * 23_456_000 - 2 * 313_600)


def test_bf16_has_the_weights_of_now_and_not_those_of_its_first_step():
    weight = torch.ones(2, 2, requires_grad=True)
    with steps.precision("bf16", "cpu"):
        first = weight @ torch.ones(2, 2)
        weight.data.zero_()
        second = weight @ torch.ones(2, 2)
    assert first.dtype == torch.bfloat16
    assert first.any()
    assert not second.any()


# ------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@every_way
@every_product
def test_a_graph_of_a_whole_step_does_what_the_step_does(product, is_fused, cuda):
    config = steps.bench_config(discriminator_dim=8, device=cuda)
    params = Discriminators(config, range(CLIENTS)).params
    batch = steps.random_batch(CLIENTS, SIZE, cuda)
    eager, captured = steps.leaves(params), steps.leaves(params)
    chosen = steps.PRODUCTS[product]
    step = steps.product_step(chosen, eager, batch, is_fused)
    replay = steps.graphed(steps.product_step(chosen, captured, batch, is_fused))
    replay()
    for _ in range(4):  # three before the capture, which takes none, and the replay
        step()
    torch.testing.assert_close(captured, eager, rtol=0, atol=1e-3)


@pytest.mark.gpu
@every_product
def test_a_gpu_computes_the_gradients_of_the_cpu(product, cuda):
    config = steps.bench_config(discriminator_dim=8)
    params = Discriminators(config, range(CLIENTS)).params
    found: list[dict[str, torch.Tensor]] = []
    for device in ("cpu", cuda):
        batch = steps.random_batch(CLIENTS, SIZE, device)
        chosen = steps.PRODUCTS[product], steps.leaves(params, device)
        grads = steps.critic_grads(*chosen, batch)
        found.append({name: value.cpu() for name, value in grads.items()})
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-4)
