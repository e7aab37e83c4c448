"""Networks that know images and no private data: trunks, and where a refiner begins.

Layers of trunks are features whose means a phase releases; a refiner is the network
behind the Gaussians of the generator `refined`. Those of `pretrained-features` come
with the package (`python -m experiments.pretraining`): a trunk and a refiner trained
on digits that are drawn from fonts, and the first blocks of EfficientNet-Lite0, trained
on ImageNet by its authors. Else the trunk's weights are random numbers of a fixed seed,
and the refiner begins as the identity.

Privacy: public. A client has the trunks from its own copy of the package, by its hash:
no server chooses what a feature is.

Source: docs/privacy.md, "Embedding releases"; Tan and Le, "EfficientNet", ICML 2019;
its Lite0's weights (Apache License 2.0) by https://github.com/tensorflow/tpu.
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

from fedgs.config.feature_settings import OF_TRUNKS
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError
from fedgs.gan.torchvision_network import RGB_MEAN, RGB_STD, TorchvisionNetwork
from fedgs.randomness import stream
from fedgs.shapes import Images, TensorDict

# Base64 in JSON, since Flower bundles no binary files, and Flower Hub none above 1 MB.
PATHS = [Path(__file__).with_name(f"public-{part}.json") for part in (1, 2, 3, 4)]
SHA256 = "8b1825e14bcfd841e45bb84a685698d646f81ff379375d621459a3073bdfcb02"
REFINER_DIM = 16
# Three convolutions and a linear layer, shape of each weight, for C channels:
# S -> S / 2 -> S / 2 -> S / 4, from there 7 x 7 fields.
WEIGHTS = {
    "conv1": (32, 0, 5, 5),
    "conv2": (48, 32, 3, 3),
    "conv3": (64, 48, 3, 3),
    "linear": (128, 64 * 7**2),
}
BLOCKS = (1, 2, 1, 2, 1)  # strides of Lite0's first: S / 2 before, S / 8 after them


def trunk_features(
    kind: str,
    images: Images,
    chosen: TorchvisionNetwork | None = None,
) -> Tensor:
    """Returns the features of images, shape (B, sum(layers_of(kind))).

    Args:
        kind: the kind of features, one of `OF_TRUNKS`.
        images: shape (B, C, S, S) in [0, 1].
        chosen: stands in the place of the packaged ImageNet network.

    Raises:
        UserError: the package's files are damaged.
    """
    found: list[Tensor] = []
    for name in OF_TRUNKS[kind]:
        if name == "imagenet" and chosen is not None:
            found += chosen.layers(images)
        else:
            found += _layers_of(name, images)
    flat = [layer.flatten(1) for layer in found]
    return torch.cat(flat, dim=1)


def _layers_of(name: str, images: Images) -> list[Tensor]:
    """Returns the layers of a trunk: "random", or one that comes with the package."""
    if name == "random":
        trunk = random_trunk(images.shape[1])
    else:
        trunk = packaged(name)
    there = {key: value.to(images.device) for key, value in trunk.items()}
    if name == "imagenet":
        return lite0_layers(there, images)
    return layers(there, images)


def layers(trunk: TensorDict, images: Images) -> list[Tensor]:
    """Returns layers of a trunk of digits, shape (B, features) or of fields.

    They are means of the first and the last convolution over fields of the image, means
    of the first one's squares, and the linear layer.

    Args:
        trunk: tensors of `random_trunk`, or of the fonts'.
        images: shape (B, C, S, S) in [0, 1].
    """
    if trunk["conv1.weight"].shape[1] == 1:  # fonts are grey
        images = images.mean(1, keepdim=True)

    def convolved(inputs: Tensor, name: str, stride: int) -> Tensor:
        weight = trunk[f"{name}.weight"]
        bias = trunk[f"{name}.bias"]
        padding = weight.shape[-1] // 2
        outputs = F.conv2d(inputs, weight, bias, stride=stride, padding=padding)
        return F.relu(outputs)

    first = convolved(images, "conv1", 2)
    second = convolved(first, "conv2", 1)
    last = convolved(second, "conv3", 2)
    fields = F.adaptive_avg_pool2d(last, 7).flatten(1)
    deep = F.linear(fields, trunk["linear.weight"], trunk["linear.bias"])
    return [
        F.adaptive_avg_pool2d(first, 7),
        F.adaptive_avg_pool2d(first.square(), 4),
        F.adaptive_avg_pool2d(last, 4),
        deep,
    ]


def lite0_layers(trunk: TensorDict, images: Images) -> list[Tensor]:
    """Returns layers of EfficientNet-Lite0, means over fields, shapes (B, c, n, n).

    Inverted residual blocks (Sandler et al. 2018) of a convolution to more channels,
    one of each channel by itself, and one to fewer.

    Args:
        trunk: its weights; batch normalisation is part of them.
        images: shape (B, 1 or 3, S, S) in [0, 1].
    """

    def convolved(inputs: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = trunk[f"{name}.weight"]
        bias = trunk[f"{name}.bias"]
        size = inputs.shape[-1]
        kernel = weight.shape[-1]
        # As TensorFlow pads: where it is uneven, one more behind than before.
        outputs = -(-size // stride)  # rounded up
        needed = (outputs - 1) * stride + kernel
        pad = max(needed - size, 0)
        before = pad // 2
        behind = pad - before
        padded = F.pad(inputs, (before, behind, before, behind))
        groups = inputs.shape[1] // weight.shape[1]
        return F.conv2d(padded, weight, bias, stride, groups=groups)

    mean = images.new_tensor(RGB_MEAN)[:, None, None]
    std = images.new_tensor(RGB_STD)[:, None, None]
    normalised = (images - mean) / std
    # Twice as fast on a CPU as with the channels first.
    x = normalised.contiguous(memory_format=torch.channels_last)
    x = F.relu6(convolved(x, "stem", 2))
    found: list[Tensor] = []
    for block, stride in enumerate(BLOCKS):
        inputs = x
        if f"{block}.expand.weight" in trunk:
            x = F.relu6(convolved(x, f"{block}.expand"))
        x = F.relu6(convolved(x, f"{block}.depthwise", stride))
        x = convolved(x, f"{block}.project")
        if x.shape == inputs.shape:
            x = x + inputs
        found.append(x)
    _, _, middle, third, last = found
    return [
        F.adaptive_avg_pool2d(middle, 7),
        F.adaptive_avg_pool2d(middle.square(), 4),
        F.adaptive_avg_pool2d(third, 4),
        F.adaptive_avg_pool2d(last, 2),
    ]


@lru_cache(maxsize=2)
def random_trunk(channels: int) -> TensorDict:
    """Returns random weights, the same for every run, that keep variances (He 2015)."""
    tensors: TensorDict = {}
    for name, (outputs, inputs, *kernel) in WEIGHTS.items():
        shape = (outputs, inputs or channels, *kernel)
        rng = stream(0, f"trunk-{name}")
        values = rng.standard_normal(shape)
        num_inputs = values[0].size  # of one output
        scale = (2 / num_inputs) ** 0.5
        weight = torch.from_numpy(values * scale)
        tensors[f"{name}.weight"] = weight.float()
        tensors[f"{name}.bias"] = torch.zeros(outputs)
    return tensors


def refiner_of_fonts(config: ResolvedConfig) -> TensorDict:
    """Returns the weights that a refiner begins with: none where it has another shape.

    Of other classes than ten, the classes' embedding is left out.

    Raises:
        UserError: the package's files are damaged.
    """
    if config.generator_dim != REFINER_DIM or config.image_channels != 1:
        return {}
    tensors = dict(packaged("refiner"))
    if config.num_classes != len(tensors["embedding.weight"]):
        del tensors["embedding.weight"]
    return tensors


@lru_cache(maxsize=3)
def packaged(name: str) -> TensorDict:
    """Returns the weights of a network that comes with the package.

    Args:
        name: "fonts" or "imagenet", of a trunk; "refiner".

    Raises:
        UserError: the package's files are damaged.
    """
    parts = [path.read_bytes() for path in PATHS]
    digest = hashlib.sha256(b"".join(parts)).hexdigest()
    if digest != SHA256:
        names = ", ".join(map(str, PATHS))
        raise UserError(f"{names}: are not those of this version; install it again")
    text = "".join(map(json.loads, parts))
    tensors = load(base64.b64decode(text))
    prefix = f"{name}."
    return {
        key.removeprefix(prefix): value.float()
        for key, value in tensors.items()
        if key.startswith(prefix)
    }
