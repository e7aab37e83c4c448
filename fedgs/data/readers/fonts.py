"""Digits drawn from fonts by pseudo-writers: public, and handwriting of no client.

The fonts are 43 that imitate handwriting, of npm's packages @fontsource, under the SIL
Open Font License or Apache 2.0; `experiments.pretraining` draws them. A pseudo-writer
has one font for each digit, and its own rotation, slant, width and stroke; every image
varies them a little, bends the strokes, and is centred by its mass, as MNIST's are.

Source: our own.
"""

import base64
import io
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedgs.data.records import Records
from fedgs.randomness import stream

SEED = 0  # fixed: the source is one data set, whatever the run's seed is
WRITERS = {"train": 539, "test": 100}
IMAGES_OF_WRITER = {"train": 111, "test": 60}
_AT_ONCE = 1000  # images that are drawn at a time
# Names of the fonts, and a PNG of their digits, a row each. A digit fills 28 of the 40
# pixels of a glyph's side: 20 of an image's, as in MNIST.
GLYPHS = Path(__file__).with_name("glyphs.json")
FONT_SIDE = 28
GLYPH_SIDE = 40

# Mean and spread of a writer's habits: rotation (rad), slant, log width, stroke.
HABITS = np.array([[0.0, 0.2, 0.0, 0.0], [0.08, 0.15, 0.12, 0.6]])
# Spread of an image around them: the same four, log height.
VARIETY = np.array([0.08, 0.06, 0.08, 0.3, 0.05])
BEND = 0.07  # of half a side, at each of 4 x 4 points


@lru_cache(maxsize=2)
def read(split: str) -> Records:
    """Returns the pseudo-writers of a split, always the same ones.

    Privacy: public; its fonts are published.

    Args:
        split: train or test; no writer is in both, all fonts are.

    Returns:
        Images of 28x28 pixels, read-only: the process keeps them.
    """
    glyphs = _glyphs()
    count = WRITERS[split]
    size = IMAGES_OF_WRITER[split]
    drawn: list[tuple[NDArray[np.generic], ...]] = []
    for writer in range(count):
        of_writer = _drawn(len(glyphs), size, split, writer)
        drawn.append(of_writer)
    # Of all writers: from a list of their draws to one array of each kind of draw.
    font, labels, style, bend = map(np.concatenate, zip(*drawn, strict=True))
    num_images = count * size
    images = np.empty((num_images, 1, FONT_SIDE, FONT_SIDE), np.uint8)
    for start in range(0, num_images, _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        ink = glyphs[font[part], labels[part]]
        images[part] = _written(ink, style[part], bend[part])
    # The process keeps them for all who ask.
    images.flags.writeable = False
    labels.flags.writeable = False
    return Records(
        images=images,
        labels=labels,
        num_classes=10,
        clients=np.repeat(np.arange(count), size),
    )


def _drawn(
    num_fonts: int,
    size: int,
    split: str,
    writer: int,
) -> tuple[NDArray[np.generic], ...]:
    """Draws font (n,), digit (n,), style (n, 5) and bend (n, 2, 4, 4) of n images."""
    rng = stream(SEED, f"fonts-{split}", writer)
    digits = rng.integers(10, size=size)
    # One font for each digit: with one for all, 43 fonts would be 43 writers.
    font_of_digit = rng.integers(num_fonts, size=10)
    font = font_of_digit[digits]
    style = rng.normal(0, VARIETY, (size, len(VARIETY)))
    mean, spread = HABITS
    style[:, :4] += rng.normal(mean, spread)
    style = style.astype(np.float32)
    bend = rng.normal(0, BEND, (size, 2, 4, 4))
    bend = bend.astype(np.float32)
    return font, digits, style, bend


def _glyphs() -> Tensor:
    """Returns every font's digits, thin, as they are and thick, float32 in [0, 1].

    Shape (fonts, 10, 3, 40, 40).
    """
    stored = json.loads(GLYPHS.read_text())
    content = base64.b64decode(stored["png"])
    picture = Image.open(io.BytesIO(content))
    sheet = np.asarray(picture, np.float32) / 255
    # A row of the sheet has the ten digits of a font beside each other.
    rows = sheet.reshape(-1, GLYPH_SIDE, 10, GLYPH_SIDE)
    cells = rows.transpose(0, 2, 1, 3)
    ink = torch.from_numpy(cells.copy())
    thin = -F.max_pool2d(-ink, kernel_size=3, stride=1, padding=1)
    thick = F.max_pool2d(ink, kernel_size=3, stride=1, padding=1)
    return torch.stack([thin, ink, thick], dim=2)


def _written(
    glyphs: Tensor,
    style: NDArray[np.float32],
    bend: NDArray[np.float32],
) -> NDArray[np.uint8]:
    """Returns glyphs (n, 3, 40, 40) as they are written, (n, 1, 28, 28)."""
    rotation, slant, width, stroke, height = torch.from_numpy(style).unbind(1)
    # By their logarithms, so that twice as wide is as likely as half as wide.
    wide = width.exp()
    high = height.exp()
    cos = rotation.cos()
    sin = rotation.sin()
    still = torch.zeros_like(wide)
    # Where in the glyph each pixel of the image comes from: the inverse of what is
    # done to the glyph.
    across = torch.stack([cos / wide, (slant - sin) / wide, still], dim=1)
    down = torch.stack([sin / high, cos / high, still], dim=1)
    inverse = torch.stack([across, down], dim=1)
    size = [len(glyphs), 1, FONT_SIDE, FONT_SIDE]
    grid = F.affine_grid(inverse, size, align_corners=False)
    bent = _smooth(torch.from_numpy(bend))
    ink = _with_stroke(glyphs, stroke.view(-1, 1, 1, 1))
    images = F.grid_sample(ink, grid + bent, align_corners=False)
    pixels = _centred(images) * 255
    return pixels.round().clamp(0, 255).byte().numpy()


def _smooth(bend: Tensor) -> Tensor:
    """Returns shifts between 4 x 4 points, (n, 28, 28, 2)."""
    size = (FONT_SIDE, FONT_SIDE)
    between = F.interpolate(bend, size, mode="bicubic", align_corners=True)
    return between.permute(0, 2, 3, 1)


def _with_stroke(glyphs: Tensor, stroke: Tensor) -> Tensor:
    """Makes strokes thicker, by up to a pixel on each side, or half as much thinner."""
    thin, ink, thick = glyphs.split(1, dim=1)
    more = stroke.clamp(0, 1)
    less = stroke.clamp(-1, 0)
    thicker = ink + (thick - ink) * more
    return thicker + (ink - thin) * less / 2


def _centred(images: Tensor) -> Tensor:
    """Moves the centre of mass of images (n, 1, S, S) to the middle."""
    middle = (FONT_SIDE - 1) / 2
    at = torch.arange(FONT_SIDE) - middle
    mass = images.sum((1, 2, 3)).clamp_min(1e-6)
    columns = images.sum((1, 2))
    rows = images.sum((1, 3))
    right = (columns @ at) / mass
    down = (rows @ at) / mass
    move = torch.eye(2, 3).repeat(len(images), 1, 1)
    # The grid's unit is half a side.
    move[:, :, 2] = torch.stack([right, down], dim=1) * (2 / FONT_SIDE)
    grid = F.affine_grid(move, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)
