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
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load
from torch import Tensor

from fedgs.config.run_config import ResolvedConfig
from fedgs.config.stages import FONT_FEATURES, IMAGENET_FEATURES
from fedgs.errors import UserError
from fedgs.randomness import stream
from fedgs.shapes import Images, TensorDict

# Base64 in JSON, since Flower bundles no binary files, and Flower Hub none above 1 MB.
FONTS = [Path(__file__).with_name(f"fonts-{part}.json") for part in (1, 2, 3, 4)]
FONTS_SHA256 = "1073201053eccb740ef679d8f8b90f4a74262ed6bd0f416e066718eece580cbc"
TRUNK, REFINER, REFINER_DIM = "trunk.", "refiner.", 16
# Three convolutions and a linear layer, shape of each weight, for C channels:
# S -> S / 2 -> S / 2 -> S / 4, from there 7 x 7 fields.
IMAGENET_SIDE = 64  # to which its images are scaled, of any side
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
    parts = map(F.adaptive_avg_pool2d, (first, first.square(), last), (7, 4, 4))
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


def trunk_of(kind: str, channels: int) -> Callable[[Images], Tensor]:
    """Returns the network whose layers are features of a kind, of `OF_TRUNKS`.

    It takes images (B, C, S, S) in [0, 1] to (B, sum(LAYER_FEATURES)).

    Raises:
        UserError: its file is not here, or another.
    """
    if kind == IMAGENET_FEATURES:
        return imagenet_trunk()
    trunk = fonts_trunk() if kind == FONT_FEATURES else random_trunk(channels)
    return partial(trunk_features, trunk)


@lru_cache(maxsize=1)
def imagenet_trunk() -> Callable[[Images], Tensor]:
    """Returns layers of torchvision's ResNet-18, in shapes as of `trunk_features`.

    For these shapes neighbouring channels are averaged.

    Raises:
        UserError: its weights are not in torch hub's folder, or others are.
    """
    from torchvision.models import ResNet18_Weights, resnet18
    from torchvision.models.feature_extraction import create_feature_extractor

    weights = ResNet18_Weights.IMAGENET1K_V1
    name = weights.url.rsplit("/", 1)[1]  # resnet18-SHA256.pth, the hash's beginning
    if hub_weights(name, name[len("resnet18-") : -len(".pth")], weights.url) is None:
        raise UserError(
            f"stages: {IMAGENET_FEATURES} need {name} in {torch.hub.get_dir()}"
            f"/checkpoints; download it from {weights.url}"
        )
    network = resnet18()
    network.load_state_dict(weights.get_state_dict(weights_only=True))
    # As in training it would normalise over a batch, and mix its images.
    network.eval().requires_grad_(False)
    network = create_feature_extractor(network, ["layer1", "layer2", "layer4"])
    scaled = weights.transforms(crop_size=IMAGENET_SIDE, resize_size=IMAGENET_SIDE)

    def features(images: Images) -> Tensor:
        rgb = scaled(images.expand(-1, 3, -1, -1))
        layers = network.to(images.device)(rgb).values()
        first, middle, last = (layer.unsqueeze(1) for layer in layers)
        parts = first, first.square(), middle, last
        sizes = (32, 7, 7), (32, 4, 4), (64, 4, 4), (128, 1, 1)
        pooled = map(F.adaptive_avg_pool3d, parts, sizes)
        return torch.cat([part.flatten(1) for part in pooled], dim=1)

    return features


def hub_weights(name: str, sha256: str, source: str) -> Path | None:
    """Returns the user's download of weights in torch hub's folder, if it is there.

    Args:
        name: of the file, a pickle: none is loaded but of this hash.
        sha256: of its content, or the beginning.
        source: where it can be downloaded.

    Raises:
        UserError: the file is another.
    """
    weights = Path(torch.hub.get_dir()) / "checkpoints" / name
    if not weights.is_file():
        return None
    content = hashlib.sha256(weights.read_bytes()).hexdigest()
    if not content.startswith(sha256):
        raise UserError(
            f"{weights}: is not {name} (SHA-256 {content[:8]}..., not "
            f"{sha256[:8]}...); download it from {source}, or remove it"
        )
    return weights


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
