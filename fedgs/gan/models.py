"""The generators, the discriminator, their spectral norm, the EMA and the latents.

Shapes in comments: B images, C channels, side S, d = the width of the network.

    generator(z, labels) -> images (B, C, S, S) in [0, 1], 0 = background
    discriminator(images, labels) -> scores (B,)

At 28x28x1, 10 classes, latent 10 and width 64 the ResNet generator (3,826,177 weights,
biases included) and the discriminator (1,071,105) are exactly the paper's.

Spectral norm divides a weight matrix W by sigma = u^T W v, where one power iteration
v <- W^T u / |W^T u|, u <- W v / |W v| per training step keeps u and v close to the
leading singular vectors. A forward only reads u and v, in any mode: sampling and
answering a query change no bit of state, and a forward is a pure function of its
tensors (`torch.func.functional_call`, `torch.func.vmap`).

Differs from the reference: one power iteration per training step, not one per forward,
because a query must leave no trace in the state; one at initialisation, because sigma
must be positive before the first step.

Source:
    Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, appendix; reference
    source/models.py and source/ops.py, https://github.com/DingfanChen/GS-WGAN.
    Miyato et al., "Spectral normalization for GANs", ICLR 2018, Algorithm 1.
    Miyato, Koyama, "cGANs with projection discriminator", ICLR 2018, Eq. 3.
    Karras et al., "Progressive growing of GANs", ICLR 2018, section 4.2 (pixel norm).
"""

import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgs.config.run_config import NetworkConfig, ResolvedConfig
from fedgs.shapes import Images, Labels, Latents, Scores, TensorDict

NORM_EPSILON = 1e-10  # GS-WGAN source/ops.py, pixel_norm and l2_norm
LEAKY_SLOPE = 0.2
ADAM_BETAS = (0.5, 0.9)  # of both networks; GS-WGAN source/main.py
CODE_DIM = 10  # of the coded generator

LayerT = TypeVar("LayerT", bound=nn.Conv2d | nn.Linear | nn.Embedding)

# Layers draw their initial weights from torch's one process-wide generator.
_initialisation_lock = threading.Lock()


def advance_spectral_vectors(params: TensorDict, buffers: TensorDict) -> TensorDict:
    """Returns the buffers after one power iteration on every normalised layer.

    A pure function of one module's tensors: map it with `torch.func.vmap` over a
    leading client axis. No gradient flows through it.

    Privacy: reads private data (through a discriminator's weights); output private.

    Args:
        params: name -> tensor; "<layer>.weight" of shape (out, ...).
        buffers: name -> tensor; "<layer>.u" of shape (out,), "<layer>.v" of shape
            (in,): unit vectors. Empty without spectral norm.

    Source: Miyato et al., ICLR 2018, Algorithm 1, lines 1 to 2.
    """
    advanced = {}
    for name, u in buffers.items():
        if not name.endswith(".u"):
            continue
        layer = name.removesuffix(".u")
        weight = params[f"{layer}.weight"].detach()
        weight = weight.flatten(1)  # (out, in)
        v = _unit(weight.mT @ u)
        advanced[name] = _unit(weight @ v)
        advanced[f"{layer}.v"] = v
    return advanced


def advance_in_place(module: nn.Module) -> None:
    """Takes one power iteration on a whole module; once before a training forward.

    Privacy: of a discriminator, reads private data; output private.
    """
    buffers = dict(module.named_buffers())
    advanced = advance_spectral_vectors(dict(module.named_parameters()), buffers)
    for name, value in advanced.items():
        buffers[name].copy_(value)


def _normalise(layer: LayerT) -> LayerT:
    """Gives a layer random unit vectors u and v: its weight is now normalised."""
    out, size = layer.weight.flatten(1).shape
    layer.register_buffer("u", _unit(torch.randn(out)))
    layer.register_buffer("v", _unit(torch.randn(size)))
    return layer


def _weight(layer: nn.Conv2d | nn.Linear | nn.Embedding) -> Tensor:
    """The weight that a forward uses: W / (u^T W v) where the layer has u and v."""
    vectors = dict(layer.named_buffers(recurse=False))
    if not vectors:
        return layer.weight
    weight = layer.weight.flatten(1)
    sigma = vectors["u"] @ (weight @ vectors["v"])  # has a gradient to W
    return layer.weight / sigma


class _Conv2d(nn.Conv2d):
    """A convolution by `_weight`, of operands in `config.precision`; float32 again."""

    precision = torch.float32

    def forward(self, input: Tensor) -> Tensor:
        """Returns features of shape (B, channels, rows, columns)."""
        operands = self.rounded(input, _weight(self), self.bias)
        return self._conv_forward(*operands).float()

    def rounded(self, *operands: Any) -> list[Any]:
        """Returns tensors in the precision of their products."""
        return [operand.to(self.precision) for operand in operands]


def _unit(vector: Tensor) -> Tensor:
    return vector / (vector.norm() + NORM_EPSILON)


def _pixel_norm(features: Tensor) -> Tensor:
    """Divides each position's channel vector by its root mean square."""
    mean_square = features.square().mean(dim=1, keepdim=True)
    inverse_root = torch.rsqrt(mean_square + NORM_EPSILON)
    return features * inverse_root


class Generator(nn.Module):
    """What the generators share; each defines `_logits` on the joined input."""

    def __init__(self, config: ResolvedConfig) -> None:
        """Reads the sizes of the input and the output from the configuration."""
        super().__init__()
        self.side = config.image_size
        self.num_labels = config.num_classes
        self.input_dim = config.latent_dim + self.num_labels

    def forward(self, z: Latents, labels: Labels) -> Images:
        """Makes images (B, C, S, S) in [0, 1], 0 = background. Changes no state.

        Privacy: post-processing of DP output.

        Args:
            z: shape (B, latent_dim), float32, from `sample_latents`.
            labels: shape (B,), int64.
        """
        inputs = self._inputs(z, labels)
        return torch.sigmoid(self._logits(inputs))

    def _inputs(self, z: Latents, labels: Labels) -> Tensor:
        one_hot = torch.eye(self.num_labels, device=z.device)[labels]
        return torch.cat([z, one_hot], dim=1)  # (B, latent_dim + num_classes)

    def _logits(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError


class _ResidualBlock(nn.Module):
    """The paper's upsampling block: (B, n, s, s) -> (B, n, 2s, 2s)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = _normalise(_Conv2d(channels, channels, 3, padding=1))
        self.conv2 = _normalise(_Conv2d(channels, channels, 3, padding=1))
        self.conv_skip = _normalise(_Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = _pixel_norm(x)
        h = _upsampled_conv(h, self.conv1, _weight(self.conv1))  # (B, n, 2s, 2s)
        h = F.relu(_pixel_norm(h))
        h = self.conv2(h)
        # A 1x1 convolution first, on a quarter of the pixels.
        skip = self.conv_skip(x)
        return h + F.interpolate(skip, scale_factor=2.0)


def _upsampled_conv(x: Tensor, conv: _Conv2d, weight: Tensor) -> Tensor:
    """A padded 3x3 convolution of `x` after nearest upsampling, (B, n, 2s, 2s).

    Each of the four pixels made from one sees 2x2 pixels of `x` only: a transposed
    convolution with a 4x4 kernel of sums, in 4/9 of the products.
    """
    # A convolution is the transposed one of the kernel turned by a half.
    kernel = weight.flip(2, 3).transpose(0, 1)
    # Sums of neighbouring columns, then of neighbouring rows: 3x3 to 4x4.
    kernel = F.pad(kernel, (1, 1, 1, 1))
    kernel = kernel[..., :-1] + kernel[..., 1:]
    kernel = kernel[..., :-1, :] + kernel[..., 1:, :]  # (in, out, 4, 4)
    operands = conv.rounded(x, kernel, conv.bias)
    upsampled = F.conv_transpose2d(*operands, stride=2, padding=1)
    return upsampled.float()


def _joined_conv(x: Tensor, beside: Tensor, conv: _Conv2d) -> Tensor:
    """A padded 3x3 convolution of `x` after nearest upsampling, joined to `beside`.

    It is linear, so it is the sum of one for each input's channels: the upsampled
    features, of which four neighbours are equal, are never made.
    """
    weight = _weight(conv)
    of_x, of_beside = weight.split([x.shape[1], beside.shape[1]], dim=1)
    operands = conv.rounded(beside, of_beside)
    direct = F.conv2d(*operands, padding=1)
    return direct.float() + _upsampled_conv(x, conv, of_x)


class GeneratorResNet(Generator):
    """The paper's default: residual blocks of 4d channels from 4x4, spectral norm.

    28 as in the paper: three blocks to 32, an unpadded 3x3 convolution to 30, cropped.
    16, 32, 64: two to four blocks reach the side; the last convolution is padded by 1.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        """Makes as many blocks as it takes to double 4 up to the side or beyond."""
        super().__init__(config)
        channels = 4 * config.generator_dim
        num_blocks = math.ceil(math.log2(self.side / 4))
        padding = 0
        if 4 * 2**num_blocks == self.side:
            padding = 1
        linear = nn.Linear(self.input_dim, channels * 4 * 4)
        self.linear = _normalise(linear)
        self.blocks = nn.ModuleList()
        for _ in range(num_blocks):
            self.blocks.append(_ResidualBlock(channels))
        last = _Conv2d(
            in_channels=channels,
            out_channels=config.image_channels,
            kernel_size=3,
            padding=padding,
        )
        self.conv = _normalise(last)

    def _logits(self, inputs: Tensor) -> Tensor:
        h = F.linear(inputs, _weight(self.linear), self.linear.bias)
        h = h.unflatten(1, (-1, 4, 4))  # (B, 4d, 4, 4)
        h = _pixel_norm(F.relu(h))
        # The channels of a pixel lie together from here on, which is faster. (vmap
        # knows no `memory_format`.)
        channels_last = h.permute(0, 2, 3, 1).contiguous()
        h = channels_last.permute(0, 3, 1, 2)
        for block in self.blocks:
            h = block(h)  # 4 -> 8 -> 16 -> 32
        h = self.conv(h)
        cropped = h[:, :, : self.side, : self.side]  # 30 -> 28
        return cropped.contiguous()


class GeneratorDCGAN(Generator):
    """The paper's option: three transposed convolutions 4d -> 2d -> d -> C.

    28 as in the paper: 4 -> 8, cropped to 7 -> 11 -> 28 (kernels 5, 5, 8; strides 1,
    1, 2). 16, 32 and 64: three doublings from S/8 by kernels of 4, stride 2, padding 1.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        """Makes the layers; the paper's kernels at side 28."""
        super().__init__(config)
        d = config.generator_dim
        # Each layer's kernel, stride and padding.
        if self.side == 28:
            self.start = 4
            self.crop = 7
            kernels = ((5, 1, 0), (5, 1, 0), (8, 2, 0))
        else:
            self.start = self.side // 8
            self.crop = self.side // 4
            kernels = ((4, 2, 1),) * 3
        self.linear = nn.Linear(self.input_dim, 4 * d * self.start**2)
        self.deconvs = nn.ModuleList()
        inputs = 4 * d
        widths = (2 * d, d, config.image_channels)
        for outputs, (kernel, stride, padding) in zip(widths, kernels, strict=True):
            layer = nn.ConvTranspose2d(inputs, outputs, kernel, stride, padding)
            self.deconvs.append(layer)
            inputs = outputs

    def _logits(self, inputs: Tensor) -> Tensor:
        first, second, last = self.deconvs
        h = self.linear(inputs)
        h = h.unflatten(1, (-1, self.start, self.start))
        h = _pixel_norm(F.relu(h))  # (B, 4d, 4, 4)
        h = first(h)
        h = h[:, :, : self.crop, : self.crop]  # (B, 2d, 7, 7)
        h = _pixel_norm(F.relu(h))
        h = second(h)  # (B, d, 11, 11)
        h = _pixel_norm(F.relu(h))
        return last(h)  # (B, C, 28, 28)


class GeneratorUpsample(Generator):
    """A light generator: two nearest upsamplings, 3x3 convolutions 4d -> 2d -> d -> C.

    Widths d of 16 to 32 do for 28x28 digits (at 10 classes and latent 10, d = 16 has
    89,089 weights and d = 32 has 224,257). Leaky ReLU 0.2 and pixel norm after each
    layer; the output is sigmoid(x - 2), so untrained images are near the background.

    Differs from the reference: not in the paper, because its generators are too slow
    for hundreds of rounds on a CPU.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        """Makes a linear layer to (S/4, S/4) and three convolutions."""
        super().__init__(config)
        d = config.generator_dim
        self.start = self.side // 4
        self.linear = nn.Linear(self.input_dim, 4 * d * self.start**2)
        self.conv1 = _Conv2d(4 * d, 2 * d, 3, padding=1)
        self.conv2 = _Conv2d(2 * d, d, 3, padding=1)
        self.conv3 = _Conv2d(d, config.image_channels, 3, padding=1)

    def _logits(self, inputs: Tensor) -> Tensor:
        h = self.linear(inputs)
        h = h.unflatten(1, (-1, self.start, self.start))
        h = _pixel_norm(F.leaky_relu(h, LEAKY_SLOPE))  # (B, 4d, S/4, S/4)
        for conv in (self.conv1, self.conv2):  # (B, 2d, S/2, S/2), (B, d, S, S)
            h = F.interpolate(h, scale_factor=2.0)
            h = F.leaky_relu(conv(h), LEAKY_SLOPE)
            h = _pixel_norm(h)
        return self.conv3(h) - 2  # (B, C, S, S)


class GeneratorCoded(Generator):
    """Linear layers to a short code of the image, and on to the image: d, d, 10, d.

    `decoder` may come from an autoencoder. Leaky ReLU 0.2 after each hidden layer, and
    pixel norm before the code.

    Differs from the reference: pixel norm stands for DP-MERF's batch norm, so that a
    sample is a function of its own latent alone.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        """Makes three linear layers to the code and two from it."""
        super().__init__(config)
        d = config.generator_dim
        self.channels = config.image_channels
        self.coder1 = nn.Linear(self.input_dim, d)
        self.coder2 = nn.Linear(d, d)
        self.coder3 = nn.Linear(d, CODE_DIM)
        self.decoder = coded_decoder(config)

    def codes(self, z: Latents, labels: Labels) -> Tensor:
        """Returns the codes of the images that `forward` makes, (B, CODE_DIM)."""
        return self._codes(self._inputs(z, labels))

    def _codes(self, inputs: Tensor) -> Tensor:
        h = inputs
        for layer in (self.coder1, self.coder2):
            h = F.leaky_relu(layer(h), LEAKY_SLOPE)  # (B, d)
            h = _pixel_norm(h)
        return self.coder3(h)

    def _logits(self, inputs: Tensor) -> Tensor:
        codes = self._codes(inputs)
        logits = self.decoder(codes)
        return logits.unflatten(1, (self.channels, self.side, self.side))


def coded_decoder(config: ResolvedConfig) -> nn.Sequential:
    """Makes the layers from a code to an image's logits, (B, C * S * S)."""
    d = config.generator_dim
    pixels = config.image_channels * config.image_size**2
    return nn.Sequential(
        nn.Linear(CODE_DIM, d),
        nn.LeakyReLU(LEAKY_SLOPE),
        nn.Linear(d, pixels),
    )


class GeneratorGaussian(Generator):
    """One Gaussian for each class, or some, cut off at black and white.

        image = min(1, max(0, mean[y] + sum_i z_i factor[y, i]))

    Where a class has parts, y is the part, drawn by its share of the class: z_0 chooses
    it and does nothing else.

    Differs from the reference: not in the paper. `fedgs.gan.moments` determines it from
    released means and covariances; before, it is the background with faint noise.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        """Makes mean (L, C, S, S) and factor (L, latent_dim, C, S, S), L parts."""
        super().__init__(config)
        image = (config.image_channels, self.side, self.side)
        classes = max(self.num_labels, 1)
        parts = config.num_parts
        count = classes * parts
        mean = torch.zeros(count, *image)
        self.mean = nn.Parameter(mean)
        noise = torch.randn(count, config.latent_dim, *image)
        self.factor = nn.Parameter(0.05 * noise)
        self.shares = None
        if parts > 1:
            shares = torch.full((classes, parts), 1 / parts)
            self.shares = nn.Parameter(shares)

    def forward(self, z: Latents, labels: Labels) -> Images:
        """Makes images; see `Generator.forward`."""
        rows = labels
        if not self.num_labels:  # there is one row for all images
            rows = torch.zeros_like(labels)
        if self.shares is not None:
            # A uniform number is below one of the sums of the parts' shares so far.
            uniform = torch.special.ndtr(z[:, :1])
            upto = self.shares.cumsum(1)[rows, :-1]
            part = (uniform > upto).sum(1)
            num_parts = self.shares.shape[1]
            rows = rows * num_parts + part
        # One product for each class that occurs, not one factor for each image.
        images = self.mean[rows]
        for row in rows.unique():
            at = (rows == row).nonzero()[:, 0]
            deviations = torch.tensordot(z[at], self.factor[row], dims=1)
            images = images.index_add(0, at, deviations)
        return images.clamp(0, 1)


class GeneratorRefined(GeneratorGaussian):
    """A Gaussian for each class, and a refiner behind it, which alone is trained.

    Differs from the reference: not in the paper. `fedgs.gan.refinement` fits it.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        """Makes the Gaussians, which no gradient moves, and the refiner."""
        super().__init__(config)
        self.requires_grad_(False)
        self.refiner = Refiner(config)
        # A fifth less time for a step on a CPU.
        self.refiner.to(memory_format=torch.channels_last)

    def forward(self, z: Latents, labels: Labels) -> Images:
        """Makes images; see `Generator.forward`."""
        return self.refiner(self.gaussian(z, labels), labels)

    def gaussian(self, z: Latents, labels: Labels) -> Images:
        """Makes the images that the refiner is given."""
        return super().forward(z, labels)


class Refiner(nn.Module):
    """A U-net that sharpens a Gaussian's images, of any side and channels.

        logits = logits of the image + net(image, label)

    It works at the image's side, a half and a quarter of it, with d, 3d and 4d
    channels, and begins as the identity.

    Source: Ronneberger et al., "U-net", MICCAI 2015, with additive class embeddings.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        """Makes the layers; the last one and the embedding are 0."""
        super().__init__()
        d = config.generator_dim
        channels = config.image_channels
        widths = self.widths = (d, 3 * d, 4 * d)

        def convolution(inputs: int, outputs: int, stride: int = 1) -> _Conv2d:
            return _Conv2d(inputs, outputs, 3, stride=stride, padding=1)

        self.down = nn.ModuleList(
            [
                convolution(channels, d),
                convolution(d, 3 * d, stride=2),
                convolution(3 * d, 4 * d, stride=2),
            ]
        )
        self.same = nn.ModuleList(convolution(width, width) for width in widths)
        self.up = nn.ModuleList([convolution(7 * d, 3 * d), convolution(4 * d, d)])
        self.last = convolution(d, channels)
        self.embedding = nn.Embedding(config.num_classes, sum(widths))
        for layer in (self.last, self.embedding):
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)

    def forward(self, images: Images, labels: Labels) -> Images:
        """Returns images in [0, 1]; changes no state.

        Args:
            images: what the Gaussian drew, shape (B, C, S, S) in [0, 1].
            labels: shape (B,).
        """
        embedded = self.embedding(labels)[:, :, None, None]
        of_class = embedded.split(self.widths, dim=1)
        h = 2 * images - 1
        passed = []
        for down, same, added in zip(self.down, self.same, of_class, strict=True):
            h = F.silu(down(h) + added)
            h = F.silu(same(h))
            passed.append(h)  # S -> S / 2 -> S / 4
        passed.pop()  # the smallest is h itself
        ups: Any = self.up  # a list of modules does not say that they are convolutions
        for layer in ups:
            beside = passed.pop()
            h = _joined_conv(h, beside, layer)
            h = F.silu(h)
        # Black and white have no logit.
        grey = images.clamp(0.01, 0.99)
        logits = self.last(h) + torch.logit(grey)
        return torch.sigmoid(logits)


class Discriminator(nn.Module):
    """The paper's projection discriminator: three 5x5 convolutions of stride 2.

        score = linear(h) + <embedding(y), h>,    h = features (B, 4d * s * s)

    with s = 4 at side 28 (28 -> 14 -> 7 -> 4). Nothing normalises over the batch, so
    the gradient of one image's score is a function of that image alone.
    """

    convolution: type[nn.Conv2d] = _Conv2d

    def __init__(self, config: NetworkConfig) -> None:
        """Makes the layers, normalised if `config.spectral_norm`."""
        super().__init__()
        d = config.discriminator_dim
        convolution = self.convolution
        self.slope = 0.0 if config.spectral_norm else LEAKY_SLOPE
        self.conv1 = convolution(config.image_channels, d, 5, stride=2, padding=2)
        self.conv2 = convolution(d, 2 * d, 5, stride=2, padding=2)
        self.conv3 = convolution(2 * d, 4 * d, 5, stride=2, padding=2)
        size = 4 * d * math.ceil(config.image_size / 8) ** 2
        self.linear = nn.Linear(size, 1)
        self.embedding = nn.Embedding(config.num_classes, size)
        if config.spectral_norm:
            for conv in (self.conv1, self.conv2, self.conv3):
                _normalise(conv)
            _normalise(self.linear)
            _normalise(self.embedding)
        else:  # nothing would scale N(0, 1) entries down
            nn.init.zeros_(self.embedding.weight)

    def forward(self, images: Images, labels: Labels) -> Scores:
        """Returns scores (B,), any real; higher is more real. Changes no state.

        Privacy: reads private data (through trained weights); output private.

        Args:
            images: shape (B, C, S, S) in [0, 1], 0 = background.
            labels: shape (B,), int64.
        """
        h = images
        for conv in (self.conv1, self.conv2, self.conv3):  # 28 -> 14 -> 7 -> 4
            h = conv(h)
            # As leaky_relu, bit for bit; but a factor that has no derivative of its own
            # spares the second derivative of the penalty two passes over zeros.
            slopes = torch.full_like(h, self.slope)
            slopes = slopes.masked_fill(h > 0, 1.0)
            h = h * slopes
        h = h.flatten(1)  # (B, 4d * s * s)
        scores = F.linear(h, _weight(self.linear), self.linear.bias)
        of_labels = F.embedding(labels, _weight(self.embedding))
        projection = (of_labels * h).sum(1)  # <embedding(y), h>
        return scores.squeeze(1) + projection


ModelT = TypeVar("ModelT", bound=nn.Module)
ConfigT = TypeVar("ConfigT", bound=ResolvedConfig)
GENERATORS: dict[str, type[Generator]] = {
    "resnet": GeneratorResNet,
    "dcgan": GeneratorDCGAN,
    "upsample": GeneratorUpsample,
    "gaussian": GeneratorGaussian,
    "refined": GeneratorRefined,
    "coded": GeneratorCoded,
}


def build_generator(config: ResolvedConfig, rng_seed: int) -> Generator:
    """Builds `config.generator` on the CPU with PyTorch's default initialisation.

    The weights are a function of `rng_seed`, an integer in [0, 2**63). torch's global
    random state is the same before and after.
    """
    return build(GENERATORS[config.generator], config, rng_seed)


def build_discriminator(config: NetworkConfig, rng_seed: int) -> Discriminator:
    """Builds the discriminator on the CPU; see `build_generator`."""
    return build(Discriminator, config, rng_seed)


def build(kind: Callable[[ConfigT], ModelT], config: ConfigT, rng_seed: int) -> ModelT:
    """Builds a network on the CPU from the seed alone; see `build_generator`."""
    # default_generator: torch.manual_seed would reseed every GPU as well.
    with _initialisation_lock, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(rng_seed)
        module = kind(config)
    for layer in module.modules():
        if isinstance(layer, _Conv2d):
            layer.precision = getattr(torch, config.precision)
    advance_in_place(module)
    return module


def update_ema(
    average: nn.Module,
    generator: nn.Module,
    step: int,
    decay: float,
) -> None:
    """Moves the averaged generator in place: a * average + (1 - a) * generator.

    Here a = ema_weight(step, decay), and `step` counts the updates before this one.
    Samples are drawn from the average. It may start as any generator of the same
    architecture, for step 0 copies. Buffers are always copied.

    Privacy: post-processing of DP output.

    Differs from the reference: the spectral vectors are copied, not averaged, because
    averages of unit vectors are not unit vectors.
    """
    weight = ema_weight(step, decay)
    params = zip(average.parameters(), generator.parameters(), strict=True)
    with torch.no_grad():
        for mean, param in params:
            mean.mul_(weight).add_(param, alpha=1 - weight)
        for mean, buffer in zip(average.buffers(), generator.buffers(), strict=True):
            mean.copy_(buffer)


def ema_weight(step: int, decay: float) -> float:
    """Returns the weight of the past, min(1 - 1 / (step + 1), decay): 0 at step 0.

    >>> [ema_weight(step, 0.6) for step in range(4)]
    [0.0, 0.5, 0.6, 0.6]
    """
    return min(1 - 1 / (step + 1), decay)


def sample_latents(
    config: ResolvedConfig,
    rng: np.random.Generator,
    count: int,
) -> Latents:
    """Draws z: fair bits {0, 1} (bernoulli, the paper), N(0, 1) or U[0, 1).

    The shape is (count, latent_dim), float32. A generator has no other source of
    variety: 10 bits and 10 labels make at most 10,240 distinct images in all.
    """
    shape = (count, config.latent_dim)
    if config.latent == "bernoulli":
        z = rng.integers(0, 2, shape).astype(np.float32)
    elif config.latent == "uniform":
        z = rng.random(shape, dtype=np.float32)
    else:
        z = rng.standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(z)


def sample_labels(
    config: ResolvedConfig,
    rng: np.random.Generator,
    count: int,
) -> Labels:
    """Draws labels uniformly from [0, num_classes): shape (count,), int64.

    Privacy: public; the class frequencies of private data are not used.
    """
    labels = rng.integers(0, config.num_classes, count)
    return torch.from_numpy(labels)
