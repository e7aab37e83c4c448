"""The engines against the algorithm on one page.

In a loop over clients the engine's arithmetic is the page's, but for the order in which
its own Adam multiplies and divides. With that order in the page's Adam, the bits agree.
Stacked calls round otherwise: tests/gan/test_discriminators.py. That all engines give
the same bytes is in tests/round/test_same_bytes.py.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.optim import Adam

from fedgs import gs_wgan
from fedgs.config.run_config import RunConfig
from fedgs.files import read_tensors
from fedgs.runs.run_folder import RunFolder
from runs import train
from tests.support.ledgers import statements_from_ledger
from tiny import FULL_PARTICIPATION, WITH_RELEASES, tiny_config, tiny_data

CONFIGURATIONS = {
    "paper": {"clients_per_round": 1, "warm_start_rounds": 3},
    "every client trains, some answer": {
        "discriminator_training": "every_round",
        "clients_per_node": 3,
    },
    "silos that differ": FULL_PARTICIPATION | {"node_sizes": "1,4,1"},
    "the paper's networks in colour": {
        "generator": "resnet",
        "image_channels": 3,
        "batch_size": 10,  # more than the discriminators train on
    },
    "without noise": {
        "generator": "dcgan",
        "spectral_norm": False,
        "latent": "normal",
        "noise_multiplier": 0.0,
        "clip_bound": 1e-7,  # of Adam's epsilon: Adam then sees how large gradients are
        "batch_size": 3,
    },
}


class AdamOfTheStack(Adam):
    """Adam in the order of operations of `ModuleStack`, for one module."""

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        beta1, beta2 = group["betas"]
        for param in group["params"]:
            state = self.state[param]
            if not state:
                state |= {"step": torch.zeros(1, dtype=torch.float64)}
                state |= {name: torch.zeros_like(param) for name in ("first", "second")}
            state["step"] += 1
            step_size = (group["lr"] / (1 - beta1 ** state["step"])).float()
            correction = (1 - beta2 ** state["step"]).sqrt().float()
            state["first"].lerp_(param.grad, 1 - beta1)
            state["second"].mul_(beta2).addcmul_(
                param.grad, param.grad, value=1 - beta2
            )
            root = state["second"].sqrt().div_(correction).add_(group["eps"])
            param.sub_(state["first"].div(root).mul_(step_size))


@pytest.fixture
def with_adam_of_the_stack(monkeypatch) -> Callable[[RunConfig], None]:
    """Gives it to what clients train; the server's Adam, made last, is torch's."""

    def prepare(config: RunConfig) -> None:
        per_client = 1 if config.is_warm_start_public else 2
        kinds = iter([AdamOfTheStack] * (per_client * config.num_clients) + [Adam])
        monkeypatch.setattr(gs_wgan, "Adam", lambda *args: next(kinds)(*args))

    return prepare


def trained_by_engine(config: RunConfig) -> RunFolder:
    folder = RunFolder.create(config)
    train(folder, data=tiny_data(config))
    return folder


def product(folder: RunFolder) -> list[dict[str, Tensor]]:
    names = ("generator", "generator_ema")
    return [read_tensors(folder.path / f"{name}.safetensors")[0] for name in names]


def product_of_page(config: RunConfig) -> list[dict[str, Tensor]]:
    trained = gs_wgan.train(config, tiny_data(config))
    return [dict(each.state_dict()) for each in (trained.generator, trained.average)]


@pytest.mark.parametrize("stacking", ["loop"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_engine_in_a_loop_has_the_bits_of_the_page(
    name, stacking, tmp_path, with_adam_of_the_stack
):
    short = {"num_rounds": 2, "warm_start_rounds": 1, "output": str(tmp_path / "run")}
    config = tiny_config(**short | CONFIGURATIONS[name])
    found = product(trained_by_engine(config))
    with_adam_of_the_stack(config)
    torch.testing.assert_close(found, product_of_page(config), rtol=0, atol=0)


def test_cost_of_the_page_is_that_of_the_engines_ledger(tmp_path):
    settings = {**FULL_PARTICIPATION, "output": str(tmp_path / "run")}
    config = tiny_config(num_rounds=1, warm_start_rounds=0, **settings)
    events = trained_by_engine(config).read_ledger().events
    stated = statements_from_ledger(events, config.delta, engine="local")
    planned = gs_wgan.train(config, tiny_data(config)).cost
    found = [(row.adversary, row.relation, row.epsilon) for row in stated]
    assert found == [(row.adversary, row.relation, row.epsilon) for row in planned]


@pytest.mark.parametrize(
    "settings",
    [{"client_selection": "balanced"}, {"message_precision": "compact"}, WITH_RELEASES],
)
def test_page_refuses_what_it_leaves_out(settings):
    config = tiny_config(**settings)
    with pytest.raises(ValueError, match="left out"):
        gs_wgan.train(config, tiny_data(config))
