"""Networks that know images and no private data: the trunk, and where a refiner begins.

Layers of the trunk are the features of the last stage; a refiner is the network
behind the Gaussians of the generator `refined`. Of the stage `font-features` both come
with the package, trained on digits that are drawn from fonts
(`python -m experiments.pretraining`). Else the trunk's weights are random numbers
of a fixed seed, and the refiner begins as the identity.

Privacy: public. A client has the trunk from its own copy of the package, by its hash:
no server chooses what a feature is.

Source: docs/privacy.md, "Embedding releases".
"""

import base64
import hashlib
import json
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load
from torch import Tensor

from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError
from fedgs.randomness import stream
from fedgs.shapes import Images, TensorDict

# Base64 in JSON, since Flower bundles no binary files, and Flower Hub none above 1 MB.
FONTS = [Path(__file__).with_name(f"fonts-{part}.json") for part in (1, 2, 3, 4)]
FONTS_SHA256 = "1073201053eccb740ef679d8f8b90f4a74262ed6bd0f416e066718eece580cbc"
TRUNK, REFINER, REFINER_DIM = "trunk.", "refiner.", 16
# Three convolutions and a linear layer, shape of each weight, for C channels:
# S -> S / 2 -> S / 2 -> S / 4, from there 7 x 7 fields.
LAYERS = {
    "conv1": (32, 0, 5, 5),
    "conv2": (48, 32, 3, 3),
    "conv3": (64, 48, 3, 3),
    "linear": (128, 64 * 7**2),
}


def trunk_features(trunk: TensorDict, images: Images) -> Tensor:
    """Returns the features of images, shape (B, sum(LAYER_FEATURES)).

    They are means of the first and the last convolution over fields of the image, means
    of the first one's squares, and the linear layer.

    Args:
        trunk: tensors of `random_trunk` or `fonts_trunk`.
        images: shape (B, C, S, S) in [0, 1].
    """
    trunk = {name: value.to(images.device) for name, value in trunk.items()}

    def convolved(inputs: Tensor, name: str, stride: int) -> Tensor:
        weight, bias = trunk[f"{name}.weight"], trunk[f"{name}.bias"]
        padding = weight.shape[-1] // 2
        return F.relu(F.conv2d(inputs, weight, bias, stride=stride, padding=padding))

    first = convolved(images, "conv1", 2)
    last = convolved(convolved(first, "conv2", 1), "conv3", 2)
    fields = F.adaptive_avg_pool2d(last, 7).flatten(1)
    parts = (
        F.adaptive_avg_pool2d(first, 7),
        F.adaptive_avg_pool2d(first.square(), 4),
        F.adaptive_avg_pool2d(last, 4),
    )
    deep = F.linear(fields, trunk["linear.weight"], trunk["linear.bias"])
    return torch.cat([*(part.flatten(1) for part in parts), deep], dim=1)


@lru_cache(maxsize=2)
def random_trunk(channels: int) -> TensorDict:
    """Returns random weights, the same for every run, that keep variances (He 2015)."""
    tensors: TensorDict = {}
    for name, (outputs, inputs, *kernel) in LAYERS.items():
        shape = (outputs, inputs or channels, *kernel)
        values = stream(0, f"trunk-{name}").standard_normal(shape)
        scale = (2 / (values[0].size)) ** 0.5
        tensors[f"{name}.weight"] = torch.from_numpy(values * scale).float()
        tensors[f"{name}.bias"] = torch.zeros(outputs)
    return tensors


def fonts_trunk() -> TensorDict:
    """Returns the weights of the trunk that knows fonts.

    Raises:
        UserError: the package's files are damaged.
    """
    return _of_fonts(TRUNK)


def refiner_of_fonts(config: ResolvedConfig) -> TensorDict:
    """Returns the weights that a refiner begins with: none where it has another width.

    Of other classes than ten, the classes' embedding is left out.

    Raises:
        UserError: the package's files are damaged.
    """
    if config.generator_dim != REFINER_DIM:
        return {}
    tensors = dict(_of_fonts(REFINER))
    if config.num_classes != len(tensors["embedding.weight"]):
        del tensors["embedding.weight"]
    return tensors


@lru_cache(maxsize=2)
def _of_fonts(prefix: str) -> TensorDict:
    parts = [path.read_bytes() for path in FONTS]
    if hashlib.sha256(b"".join(parts)).hexdigest() != FONTS_SHA256:
        names = ", ".join(map(str, FONTS))
        raise UserError(f"{names}: are not those of this version; install it again")
    tensors = load(base64.b64decode("".join(map(json.loads, parts))))
    return {
        name.removeprefix(prefix): value.float()
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
