"""Networks of torchvision with random weights, in files as their users have them."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from torchvision import models

SMALL = "shufflenet_v2_x0_5"  # of 1.4 million weights


def random_weights(name: str = SMALL, seed: int = 0) -> dict[str, torch.Tensor]:
    """The weights that a network begins with; the random state stays as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return models.get_model(name, weights=None).state_dict()


def write_network(
    cache: Path, name: str = SMALL, seed: int = 0, ending: str = ".safetensors"
) -> str:
    """Writes random weights into a cache of torchvision; returns the SHA-256."""
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"{name}{ending}"
    if ending == ".safetensors":
        save_file(random_weights(name, seed), path)
    else:
        torch.save(random_weights(name, seed), path)
    return hashlib.sha256(path.read_bytes()).hexdigest()
