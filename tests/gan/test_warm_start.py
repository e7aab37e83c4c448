"""The warm start: a plain WGAN-GP of fixed length whose generators vanish."""

import dataclasses
import gc
from collections.abc import Sequence

import pytest
import torch

import tiny
from fedgs.config.run_config import RunConfig
from fedgs.federation.messages import EVERYONE
from fedgs.federation.round import draw_fakes, new_server, public_fakes
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.models import ADAM_BETAS, build_generator
from fedgs.gan.warm_start import LocalGenerators, warm_start
from fedgs.randomness import derived_seed
from oracles import PLAIN, PLAIN_TOLERANCE, PlainGan, adam, latents

ALL = range(len(tiny.SIZES))


def _warm(config: RunConfig, hosted: Sequence[int] = ALL) -> Discriminators:
    discriminators = Discriminators(config, hosted)
    public = None
    if config.is_warm_start_public:
        request = public_fakes(config)
        public = request.images, request.labels
    warm_start(config, discriminators, tiny.tiny_data(config), hosted, public)
    return discriminators


def test_the_local_warm_start_is_a_plain_wgan_gp_of_each_client():
    config = tiny.tiny_config(warm_start_rounds=3, **PLAIN)
    data, discriminators = tiny.tiny_data(config), _warm(config)
    for client in (1, tiny.SINGLE_IMAGE_CLIENT):
        plain = PlainGan(config, data, client)
        seed = derived_seed(config.seed, "warm-start-generator", client)
        generator = build_generator(config, seed)
        optimizer = adam(generator, config.generator_learning_rate, ADAM_BETAS)
        for round in (1, 2, 3):
            z, labels = latents(config, 8, "warm-start-latent", client, round)
            fakes = generator(z, labels).detach()
            plain.discriminator_steps("warm-start-data", round, fakes, labels)
            step = latents(config, 4, "warm-start-step", client, round)
            plain.generator_step(generator, optimizer, step)
        for name, value in plain.discriminator.named_parameters():
            ours = discriminators.params[name][client]
            torch.testing.assert_close(ours, value.data, **PLAIN_TOLERANCE, msg=name)


@pytest.mark.parametrize("fakes", [None, 8])
def test_the_warm_start_of_a_client_does_not_depend_on_its_node(fakes):
    config = tiny.tiny_config(fakes_per_round=fakes, discriminator_learning_rate=1e-3)
    together, alone = _warm(config), _warm(config, hosted=[4])
    for name, value in together.params.items():
        # 4 steps of 1e-3; see test_discriminators for the tolerance.
        torch.testing.assert_close(value[4], alone.params[name][0], rtol=0, atol=2e-5)
    # T_w = 2 rounds of n_dis = 2 steps, whatever a client owns; or none.
    assert together.steps.tolist() == [4] * 6
    none = dataclasses.replace(config, warm_start_rounds=0)
    assert _warm(none).steps.tolist() == [0] * 6


def test_the_public_warm_start_uses_the_servers_fakes_only(monkeypatch):
    config = tiny.tiny_config(fakes_per_round=5)
    public = public_fakes(config)
    assert public.round == 0
    assert public.participants == ()
    assert public.trainees == EVERYONE
    assert public.digest() != draw_fakes(config, new_server(config))[0].digest()
    trained = tiny.record_calls(monkeypatch, Discriminators, "train")
    made = tiny.record_calls(monkeypatch, LocalGenerators, "__init__")
    fakes = public.images, public.labels
    warm_start(config, Discriminators(config, ALL), tiny.tiny_data(config), ALL, fakes)
    assert not made
    assert len(trained) == 2 * 2
    sent = {image.numpy().tobytes() for image in public.images}
    used = [image for args in trained for image in args[4].flatten(0, 1)]
    assert {image.numpy().tobytes() for image in used} <= sent


def test_public_fakes_come_from_the_untrained_generator():
    settings = {"generator": "resnet", "generator_dim": 2}
    assert not public_fakes(tiny.tiny_config(**settings)).images.any()
    config = tiny.tiny_config(**settings, fakes_per_round=8)
    public = public_fakes(config)
    z, labels = latents(config, 8, "latent", 0)
    with torch.no_grad():
        expected = new_server(config).generator(z, labels)
    assert torch.equal(public.images, expected)
    assert torch.equal(public.labels, labels)


def test_local_generators_vanish_with_the_warm_start():
    config = tiny.tiny_config()
    discriminators = _warm(config)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is LocalGenerators]
    fresh = Discriminators(config, ALL).state()
    shapes = {name: value.shape for name, value in discriminators.state().items()}
    assert shapes == {name: value.shape for name, value in fresh.items()}
