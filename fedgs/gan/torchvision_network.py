"""A classifier of torchvision as features, for users who have its weights.

It stands in the place of the packaged ImageNet network, and gives as many features:
four stages of the network, each with its channels added up to as many as the packaged
network's stage has, by weights that are drawn once for all runs. Distances between
means of features stay about the same (Johnson and Lindenstrauss 1984), and neither a
message nor an epsilon depends on which network was chosen.

Nothing is downloaded, and no pickle is executed. The weights are a file in the cache
of torchvision, `torch.hub.get_dir()/checkpoints` (environment variable TORCH_HOME):

    NAME.safetensors, NAME.pth         of one's own, such as vgg19.safetensors
    what torchvision calls its own     such as vgg19-dcbb9e9d.pth

Privacy: public. The SHA-256 of the file is a setting of the run. Each client has the
file from elsewhere, and refuses a run with another one: no server chooses what a
feature is.

torchvision is imported where a network was chosen, and not with this module: it takes
as long as all that every run, node and worker imports at its start.

Source: docs/privacy.md, "Embedding releases"; https://docs.pytorch.org/vision/models.
"""

import difflib
import hashlib
import io
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlparse

import torch
import torch.nn.functional as F
from safetensors.torch import load
from torch import Tensor, nn

from fedgs.config.feature_settings import PretrainedSettings
from fedgs.config.fields import shortened
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.errors import UserError, wrap_error
from fedgs.randomness import stream
from fedgs.shapes import Images, TensorDict

# Mean and standard deviation of ImageNet's images, by channel.
RGB_MEAN = (0.485, 0.456, 0.406)
RGB_STD = (0.229, 0.224, 0.225)
# Of each stage: channels, and fields to a side, as of `lite0_layers`.
STAGES = ((24, 7), (24, 4), (40, 4), (40, 2))
# Images are enlarged to the first side, no smaller than their own, at which a network
# has all stages; a larger one would only cost time.
SIDES = (32, 64, 128, 224)
TRANSFORMERS = ("vit_", "swin_")  # how their names begin
SMALLEST_STAGE = 2  # fields to a side of what a stage returns
# What torchvision calls a file ends with the first digits of its SHA-256.
DIGITS = re.compile(r"-([0-9a-f]{8,64})\.[a-z]+")
# Files of torchvision's DenseNets have names of before 2018, with one more point.
OLD_NAME = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")
ConfigT = TypeVar("ConfigT", bound=RunConfig)


class Weights(NamedTuple):
    """A file with the weights of a network.

    Attributes:
        path: where it lies.
        content: all of its bytes.
        digest: their SHA-256, 64 hexadecimal digits.
    """

    path: Path
    content: bytes
    digest: str


class NetworkStage(NamedTuple):
    """A node of a network's graph whose output is one stage of it.

    Attributes:
        node: its name.
        channels: number of channels of its output.
    """

    node: str
    channels: int


class TorchvisionNetwork:
    """The stages of a classifier, as layers of features; it may be differentiated."""

    def __init__(self, model: nn.Module, side: int, stages: list[NetworkStage]) -> None:
        """Cuts a network off behind its last stage.

        Args:
            model: with its weights, on the device of the images.
            side: to which images are enlarged.
            stages: as many as `STAGES`, in the order in which images pass them.
        """
        from torchvision.models.feature_extraction import create_feature_extractor

        self._side = side
        nodes = {stage.node: str(index) for index, stage in enumerate(stages)}
        self._extractor = create_feature_extractor(model, nodes)
        device = next(model.parameters()).device
        self._mixing: list[Tensor] = []
        for index, stage in enumerate(stages):
            channels, _ = STAGES[index]
            rng = stream(0, "torchvision-stage", index)
            values = rng.standard_normal((channels, stage.channels, 1, 1))
            # So that the squares of lengths stay as they are on average.
            weight = torch.from_numpy(values / channels**0.5)
            self._mixing.append(weight.float().to(device))

    def layers(self, images: Images) -> list[Tensor]:
        """Returns means over fields of each stage, shapes (n, c, f, f) as of `STAGES`.

        Privacy: as private as the images.

        Args:
            images: shape (n, 1 or 3, S, S) in [0, 1].
        """
        mean = images.new_tensor(RGB_MEAN)[:, None, None]
        std = images.new_tensor(RGB_STD)[:, None, None]
        rgb = (images.expand(-1, 3, -1, -1) - mean) / std
        enlarged = F.interpolate(rgb, size=self._side, mode="bilinear")
        found = self._extractor(enlarged)
        layers: list[Tensor] = []
        for index, weight in enumerate(self._mixing):
            _, fields = STAGES[index]
            mixed = F.conv2d(found[str(index)], weight)
            layers.append(F.adaptive_avg_pool2d(mixed, fields))
        return layers


def chosen_network(config: ResolvedConfig) -> TorchvisionNetwork | None:
    """Returns the network that a run or a phase has chosen; None without one.

    Raises:
        UserError: the network or its weights are not there, or not what was agreed.
    """
    if not isinstance(config, PretrainedSettings) or config.features is None:
        return None
    return loaded_network(
        name=config.features,
        agreed=config.features_sha256,
        folder=cache_folder(),
        least_side=config.image_size,
        device=config.device,
    )


def with_weights(config: ConfigT) -> ConfigT:
    """Returns settings with the SHA-256 of the chosen network's weights, if any.

    Privacy: public.

    Raises:
        UserError: no such network, or its weights are not there, or not what was given.
    """
    if not isinstance(config, PretrainedSettings) or config.features is None:
        return config
    name = config.features
    check_name(name)
    folder = cache_folder()
    weights = found_weights(name, config.features_sha256, folder)
    # Whether they are this network's, and whether it has stages: before any work.
    loaded_network(name, weights.digest, folder, least_side=SIDES[0], device="cpu")
    return replace(config, features_sha256=weights.digest)


def check_name(name: str) -> None:
    """Refuses a network that torchvision does not have, or that is a transformer.

    Raises:
        UserError: with the nearest name, or with names of convolutions.
    """
    from torchvision import models

    # Before anybody fetches hundreds of megabytes for it.
    if name.startswith(TRANSFORMERS):
        raise _no_stages(name)
    known = models.list_models(module=models)  # no detection, segmentation or video
    if name in known:
        return
    nearest = difflib.get_close_matches(shortened(name), known, 1, 0.0)
    raise UserError(
        f"features = {shortened(name)!r}: torchvision has no such classifier; the "
        f"nearest is {nearest[0]}; give --features a name of torchvision.models"
    )


def _no_stages(name: str) -> UserError:
    """Returns the error of a network that is no row of convolutions."""
    return UserError(
        f"features = {shortened(name)!r}: it has not {len(STAGES)} stages of "
        "convolutions; give --features vgg19, resnet18 or another of convolutions"
    )


def cache_folder() -> Path:
    """Returns where torchvision keeps weights that it has downloaded."""
    return Path(torch.hub.get_dir()) / "checkpoints"


def found_weights(name: str, agreed: str | None, folder: Path) -> Weights:
    """Returns the file of a network's weights.

    Args:
        name: the network's name.
        agreed: the file's SHA-256; None: the first file that is there.
        folder: where to look.

    Raises:
        UserError: there is no such file, or none with this hash.
    """
    others: list[str] = []
    for path in candidates(name, folder):
        if not path.is_file():
            continue
        with wrap_error(OSError, f"features = {name!r}: {path}", "make it readable"):
            content = path.read_bytes()
        weights = Weights(path, content, hashlib.sha256(content).hexdigest())
        if agreed in (None, weights.digest):
            return weights
        others.append(f"{path} has {weights.digest}")
    if others:
        raise UserError(
            f"features_sha256 = {agreed}: the weights of features = {name!r} are "
            f"others here, {', '.join(others)}; put the agreed file there"
        )
    names = " or ".join(path.name for path in candidates(name, folder))
    raise UserError(
        f"features = {name!r}: its weights are not in {folder}; put a file of them "
        f"there, {names}, or set TORCH_HOME to the folder whose hub/checkpoints has it"
    )


def candidates(name: str, folder: Path) -> Iterator[Path]:
    """Yields the files that may have a network's weights, one's own first."""
    from torchvision import models

    yield folder / f"{name}.safetensors"
    yield folder / f"{name}.pth"
    all_weights = models.get_model_weights(name)
    # The same file may have several entries, of which the last is the newest.
    names: list[str] = []
    for weights in all_weights:
        # Without classes it is a file of features alone, with no classifier to load.
        if weights.meta["categories"] is not None:
            names.append(Path(urlparse(weights.url).path).name)
    for file in dict.fromkeys(reversed(names)):
        yield folder / file


@lru_cache(maxsize=1)  # the weights of one take hundreds of megabytes
def loaded_network(
    name: str,
    agreed: str | None,
    folder: Path,
    least_side: int,
    device: str,
) -> TorchvisionNetwork:
    """Returns a network with weights of this machine, the same object again.

    Args:
        name: the network's name.
        agreed: as of `found_weights`.
        folder: likewise.
        least_side: the smallest side of images that it takes.
        device: where they are.

    Raises:
        UserError: no such network, or its weights are not there, or not what was given.
    """
    check_name(name)
    model = model_of(name, found_weights(name, agreed, folder)).to(device)
    for side in SIDES:
        if side < least_side:
            continue
        stages = stages_of(model, side, device)
        if len(stages) == len(STAGES):
            return TorchvisionNetwork(model, side, stages)
    raise _no_stages(name)


def model_of(name: str, weights: Weights) -> nn.Module:
    """Returns a network with its weights, as it classifies.

    Raises:
        UserError: the file is damaged, or of another network.
    """
    from torchvision import models

    tensors = read_tensors(name, weights)
    # It begins with random weights, which must not move anybody's random state.
    with torch.random.fork_rng(devices=[]):
        model = models.get_model(name, weights=None)
    try:
        model.load_state_dict(tensors, assign=True)
    except Exception as error:  # whose text names every layer
        raise UserError(
            f"features = {name!r}: {weights.path} has the weights of another network; "
            f"give those of {name}"
        ) from error
    if hasattr(model, "transform_input"):
        # GoogLeNet and Inception saw other colours: see torchvision.
        setattr(model, "transform_input", True)  # noqa: B010 - no tensor
    return model.eval().requires_grad_(False)


def read_tensors(name: str, weights: Weights) -> TensorDict:
    """Reads the tensors of a network's file, and nothing that is executed.

    Raises:
        UserError: the file is damaged, or holds something else.
    """
    where = f"features = {name!r}: {weights.path}"
    remedy = "give a file of tensors, .safetensors or as torch.save writes a state_dict"
    digits = DIGITS.search(weights.path.name)
    if digits is not None and not weights.digest.startswith(digits[1]):
        raise UserError(
            f"{where} is damaged: its SHA-256 begins with {weights.digest[:8]}, and "
            "its name says otherwise; download it again"
        )
    try:
        tensors = _loaded(weights)
        is_of_tensors = all(_is_weight(key, value) for key, value in tensors.items())
    # A damaged file raises anything. The reason is left out: torch's own advises
    # people to load the file in a way that executes it.
    except Exception as error:
        raise UserError(f"{where} cannot be read as tensors; {remedy}") from error
    if not is_of_tensors:
        raise UserError(f"{where} holds something else than tensors; {remedy}")
    # In place, because torch.save keeps versions of layers beside the tensors.
    for key in list(tensors):
        value = tensors.pop(key)
        if value.is_floating_point():
            value = value.float()
            if not value.isfinite().all():
                raise UserError(
                    f"{where}: {key} has values that are not finite; {remedy}"
                )
        tensors[OLD_NAME.sub(r"\1\2.", key)] = value
    return tensors


def _is_weight(name: object, value: object) -> bool:
    """Tells whether an entry of a file is a name and numbers that are there."""
    if not isinstance(name, str) or not isinstance(value, Tensor):
        return False
    is_dense = value.layout is torch.strided and value.device.type == "cpu"
    return is_dense and not value.is_complex()


def _loaded(weights: Weights) -> TensorDict:
    if weights.path.suffix == ".safetensors":
        return load(weights.content)
    file = io.BytesIO(weights.content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are of files that are refused anyway
        # With `weights_only` it is no pickle that could run code.
        return torch.load(file, map_location="cpu", weights_only=True)


@torch.no_grad()
def stages_of(model: nn.Module, side: int, device: str) -> list[NetworkStage]:
    """Returns the last stages of a network, up to four: where its fields grow larger.

    A stage ends where the next convolution or pooling makes fewer fields of it. What
    has less than `SMALLEST_STAGE` of them, and the classifier behind, are none.

    Args:
        model: see `model_of`.
        side: pixels on each side of its images.
        device: where the model computes.
    """
    from torchvision.models.feature_extraction import (
        create_feature_extractor,
        get_graph_node_names,
    )

    # Of each number of fields the last node that has as many.
    last: dict[int, NetworkStage] = {}
    _, nodes = get_graph_node_names(model)
    extractor = create_feature_extractor(model, {node: node for node in nodes})
    try:
        outputs = extractor(torch.zeros(1, 3, side, side, device=device))
    except (RuntimeError, AssertionError):
        return []  # its images have to be larger
    fewest = side
    for node, output in outputs.items():
        if not isinstance(output, Tensor) or output.dim() != 4:
            continue
        if node.startswith("classifier"):
            break  # in some networks it is of convolutions, too
        _, channels, height, width = output.shape
        if height > fewest or height != width or height < SMALLEST_STAGE:
            continue  # of the classifier, or not of an image
        if height < side:
            last[height] = NetworkStage(node, channels)
        fewest = height
    return list(last.values())[-len(STAGES) :]
