"""How tensors become bytes, by `message_precision`, the same on both sides.

    exact     tensors of requests and releases in safetensors; nothing is rounded
    compact   fakes      x = u / L with L = 255 at most; then int64 labels
              releases   whole multiples of `fedgs.mechanism.quantization.release_step`
              both       compressed by zlib; every size is known before decoding
              other requests   as they are, in safetensors

Rounding is part of the algorithm, not of the encoding: the run rounds fakes before
anybody sees them (`rounded`), and the sanitizer rounds a release after the noise. So
every engine computes with the same values, and encoding loses nothing.

L is the largest of 255, 127, 63, 31, 15, 7, 3 and 2 with which a round's fakes take at
most FAKE_BYTES per pixel: 255 where most of the background is black, 3 or 2 for the
noise of an untrained generator. One byte in front tells it.

A release v is sent as the integers q = round(v / step). Each is written as the unsigned
2q or -2q - 1 of 16 bits; all low bytes come first, then all high bytes.

With secure aggregation a masked sum is sent, of integers modulo 2^32: four bytes each,
little-endian, in either precision; they are uniform, so nothing compresses them.

The paper's round (5 batches of 32 fakes of 28 x 28 down, 32 gradients up) takes at most
50,000 bytes: 33,000 down, 16,500 up with the other fields of both.

Privacy: compression is a function of what is already sanitized, so it changes no
guarantee. The size of a compact release depends on that release, which the `release`
and `secagg` adversaries do not see: what is published of sizes counts every release as
`stated_release_bytes`. Fakes are public, and so is the size of a request. Effect of
rounding fakes: discriminators see, and answer at, images that lie within 1 / 2L of the
generator's; the server applies the answer at its own images.
"""

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from fedgs.config.run_config import ResolvedConfig
from fedgs.config.terms import Terms
from fedgs.errors import malformed
from fedgs.mechanism.quantization import release_step, to_grid
from fedgs.methods.base import Declared, Request
from fedgs.shapes import Images, Release, TensorDict

PIXEL_LEVELS = (255, 127, 63, 31, 15, 7, 3, 2)  # L: the values are 0, 1/L, ..., 1
FAKE_BYTES = 0.26  # per pixel after compression; three values always fit
HEADER_BYTES = 1024  # at most, of a safetensors file with two tensors
TENSOR_BYTES = 200  # at most, of one more tensor in the header
FAKES_TENSORS = {"images", "labels"}  # of a request that is compressed
LABEL_BYTES = 8


# ------------------------------------------------------------------ requests


def rounded(request: Request, config: ResolvedConfig) -> Request:
    """Returns a request as it is sent: fakes rounded to multiples of 1 / L, or not.

    Args:
        request: its fakes, if it has some, on the CPU, in [0, 1].
        config: its `message_precision`.
    """
    if not _is_compact(request.tensors, config):
        return request
    images = request.tensors["images"]
    levels = _levels_that_fit(images)
    pixels = _pixels(images, levels)
    tensors = dict(request.tensors)
    tensors["images"] = _images(pixels, levels)
    return replace(request, tensors=tensors)


def _levels_that_fit(images: Images) -> int:
    """Returns the largest L with which the images take few enough bytes."""
    most = FAKE_BYTES * images.numel()
    for levels in PIXEL_LEVELS[:-1]:
        packed = _deflate(_pixels(images, levels))
        if len(packed) <= most:
            return levels
    return PIXEL_LEVELS[-1]  # so few values fit always


def _is_compact(names: Iterable[str], config: ResolvedConfig) -> bool:
    return {*names} == FAKES_TENSORS and config.message_precision == "compact"


def _pixels(images: Images, levels: int) -> Tensor:
    return (images * levels).round().to(torch.uint8)


def _images(pixels: Tensor, levels: int) -> Images:
    return pixels.float() / levels


def pack_request(tensors: TensorDict, config: ResolvedConfig) -> bytes:
    """Encodes the tensors of a request that `rounded` has seen; the same for all."""
    if not _is_compact(tensors, config):
        whole = {name: value.contiguous() for name, value in tensors.items()}
        return save(whole)
    images = tensors["images"]
    # The values tell an L that loses nothing, so that no request has to carry it.
    for levels in PIXEL_LEVELS:
        pixels = _pixels(images, levels)
        if torch.equal(_images(pixels, levels), images):
            in_front = torch.tensor([levels], dtype=torch.uint8)
            return _deflate(in_front, pixels, tensors["labels"])
    raise ValueError("fakes that `rounded` has not seen")


def unpack_request(
    content: object,
    declared: Mapping[str, Declared],
    config: ResolvedConfig,
) -> TensorDict:
    """Decodes the tensors of a request: names, shapes and types are those declared.

    Raises:
        UserError: too large, malformed, of other names, shapes or types, or not finite.
    """
    if _is_compact(declared, config):
        return _unpack_fakes(content, declared["images"].shape)
    size = TENSOR_BYTES * len(declared)
    for each in declared.values():
        size += each.dtype.itemsize * math.prod(each.shape)
    tensors = _load(content, size, {*declared})
    for name, (shape, dtype) in declared.items():
        _check(tensors[name], f"a request's {name}", shape, dtype)
        if not bool(tensors[name].isfinite().all()):
            raise malformed("a tensor of the request has values that are not finite")
    return tensors


def _unpack_fakes(content: object, shape: tuple[int, ...]) -> TensorDict:
    pixels = math.prod(shape)
    num_images = shape[0]
    size = 1 + pixels + LABEL_BYTES * num_images
    data = _inflate(content, size)
    levels = data[0]
    if levels not in PIXEL_LEVELS:
        raise malformed(f"the fakes have another number of levels than {PIXEL_LEVELS}")
    values = torch.frombuffer(data, dtype=torch.uint8, count=pixels, offset=1)
    # A copy: these bytes need not lie where numbers of eight bytes may.
    rest = data[1 + pixels :]
    labels = torch.frombuffer(rest, dtype=torch.int64)
    images = _images(values.view(shape), levels)
    return {"images": images, "labels": labels}


# ------------------------------------------------------------------ releases


def pack_release(
    values: Release,
    config: ResolvedConfig,
    terms: Terms | None = None,
) -> bytes:
    """Encodes the values of a release, which are multiples of `release_step`.

    Privacy: post-processing of DP output.

    Args:
        values: the values of the release.
        config: the run's.
        terms: the terms of the round; None means those of the run's last round.
    """
    step = release_step(config, terms)
    if step is None:
        return save({"gradients": values.contiguous()})
    whole = (values.double() / step).round().long().flatten()
    # Small numbers of either sign stay small: their high bytes are 0 and compress well.
    even = 2 * whole
    odd = -2 * whole - 1
    unsigned = torch.where(whole >= 0, even, odd)
    low = unsigned % 256
    high = unsigned // 256
    planes = torch.stack([low, high])
    return _deflate(planes.to(torch.uint8))


@lru_cache(maxsize=16)
def stated_release_bytes(config: ResolvedConfig, terms: Terms | None = None) -> int:
    """Returns what a release is said to weigh, whatever it holds: the same for all.

    Exact releases weigh that. A compact one weighs about that where it is mostly noise:
    this is one of noise and gradients at the clip bound, drawn from a fixed seed.

    Privacy: public; a function of the run's settings.

    Args:
        config: the run's.
        terms: the terms of the round; None means those of the run's last round.
    """
    terms = terms or config.terms(config.num_rounds)
    if config.is_masked:
        return 4 * math.prod(terms.shape)
    size = math.prod(terms.shape[1:])
    share = terms.clip_bound / math.sqrt(size)
    deviation = math.hypot(terms.noise_std, share)
    # No draw of the run: all runs with these settings are to state the same size.
    rng = np.random.default_rng(0)
    draws = rng.normal(0, deviation, terms.shape)
    values = torch.from_numpy(draws)
    step = release_step(config, terms)
    if step is not None:
        values = to_grid(values, step)
    return len(pack_release(values.float(), config, terms))


def unpack_release(
    content: object,
    config: ResolvedConfig,
    terms: Terms | None = None,
) -> Release:
    """Decodes the values of a release, float32 of the round's shape.

    Privacy: post-processing of DP output.

    Raises:
        UserError: too large, malformed, of another shape or type, or not finite.
    """
    terms = terms or config.terms(config.num_rounds)
    size = math.prod(terms.shape)
    step = release_step(config, terms)
    if step is None:
        tensors = _load(content, 4 * size, {"gradients"})
        values = tensors["gradients"]
        _check(values, "gradients", terms.shape, torch.float32)
        if not bool(values.isfinite().all()):
            raise malformed("a value of the answer is not finite")
        return values
    data = _inflate(content, 2 * size)
    planes = torch.frombuffer(data, dtype=torch.uint8).long()
    low, high = planes.view(2, size)
    unsigned = (low + 256 * high).view(terms.shape)
    # The inverse of `pack_release`: even numbers were not negative.
    is_even = unsigned % 2 == 0
    not_negative = unsigned // 2
    negative = -(unsigned + 1) // 2
    whole = torch.where(is_even, not_negative, negative)
    values = whole.double() * step
    # Finite, whatever was sent.
    return values.float()


def pack_masked(values: Tensor) -> bytes:
    """Encodes a masked sum: four bytes a number, as many as float32 takes.

    Privacy: of masked values only, which nothing compresses.
    """
    return values.numpy().astype("<i4").tobytes()


def unpack_masked(content: object, terms: Terms) -> Tensor:
    """Decodes a masked sum of the round's shape, int32.

    Raises:
        UserError: of another type or size.
    """
    size = math.prod(terms.shape)
    data = _bytes(content, 4 * size)
    if len(data) != 4 * size:
        raise malformed(f"the message does not hold exactly {4 * size} bytes")
    values = np.frombuffer(data, "<i4").astype(np.int32)
    return torch.from_numpy(values).view(terms.shape)


# ------------------------------------------------------------------ bytes


def _deflate(*tensors: Tensor) -> bytes:
    """Compresses the tensors' bytes in the way that suits them best."""
    parts = [tensor.numpy().tobytes() for tensor in tensors]
    content = b"".join(parts)
    packed: list[bytes] = []
    # Noise has no repetitions to search for, and pictures have long runs of one value.
    for strategy in (zlib.Z_DEFAULT_STRATEGY, zlib.Z_RLE, zlib.Z_HUFFMAN_ONLY):
        deflate = zlib.compressobj(9, strategy=strategy)
        compressed = deflate.compress(content)
        packed.append(compressed + deflate.flush())
    return min(packed, key=len)


def _bytes(content: object, most: int) -> bytes:
    """Returns the content after a look at its type and size, before any decoding."""
    if not isinstance(content, bytes):
        raise malformed("the message has no tensors")
    if len(content) > most:
        raise malformed(f"the message has {len(content)} bytes and may have {most}")
    return content


def _load(content: object, size: int, names: set[str]) -> TensorDict:
    data = _bytes(content, size + HEADER_BYTES)
    try:
        tensors = load(data)
    except Exception:  # an unknown dtype, a size beyond 64 bits, and what else there is
        # Without the cause: its text quotes the sender's bytes.
        raise malformed("the message cannot be decoded") from None
    if set(tensors) != names:
        raise malformed("the message has other tensors than the round asks for")
    return tensors


def _inflate(content: object, size: int) -> bytearray:
    """Returns exactly `size` bytes; never holds more than one byte above that."""
    most = size + size // 8 + 64  # zlib makes no more of what cannot be compressed
    compressed = _bytes(content, most)
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(compressed, size + 1)
    except zlib.error:
        raise malformed("the message cannot be decoded") from None
    # The checksum is at the end of the stream; nothing may stand behind it.
    is_whole = inflater.eof and not inflater.unused_data
    if len(data) != size or not is_whole:
        raise malformed(f"the message does not hold exactly {size} bytes")
    return bytearray(data)  # of its own: torch wants memory that may be written


def _check(
    tensor: Tensor,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    found = tuple(tensor.shape)
    if found != shape or tensor.dtype != dtype:
        raise malformed(
            f"{name}: the shape is {found} of {tensor.dtype}, and the round has "
            f"{shape} of {dtype}"
        )
