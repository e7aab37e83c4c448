"""WGAN-GP with a drift term, and the generator's loss per sample.

    L_D = mean D(fake) - mean D(real) + lambda * mean (||grad D(mix)|| - 1)^2
          + drift * mean D(real)^2,     mix = a * real + (1 - a) * fake
    L_G = -D(fake)                      (per sample: no mean, no 1/B)

The functions take the discriminator as a callable of (images, labels), so that one
definition serves a module, a functional call and a call batched over clients.

Source:
    Gulrajani et al., "Improved training of Wasserstein GANs", NeurIPS 2017, Eq. 3.
    Karras et al., "Progressive growing of GANs", ICLR 2018, appendix A.1 (drift).
    Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020; reference source/main.py.
"""

from collections.abc import Callable

from torch import Tensor
from torch.func import grad

from fedgs.shapes import ImageGrads, Images, Labels, MixWeights, Scores

PENALTY_WEIGHT = 10.0  # lambda; WGAN-GP, Algorithm 1, and GS-WGAN, appendix C.1
DRIFT_WEIGHT = 1e-3  # Karras et al., appendix A.1

Score = Callable[[Images, Labels], Scores]


def discriminator_loss(
    score: Score,
    real: Images,
    real_labels: Labels,
    fake: Images,
    fake_labels: Labels,
    mix_weight: MixWeights,
    drift_weight: float = DRIFT_WEIGHT,
) -> Tensor:
    """Returns the WGAN-GP loss with drift of one discriminator, a scalar.

    Privacy: reads private data; output private.

    Args:
        score: the discriminator.
        real: private images, shape (B, C, S, S) in [0, 1].
        real_labels: shape (B,).
        fake: generated images, same shape as `real`.
        fake_labels: shape (B,); drawn by whoever made the fakes.
        mix_weight: a ~ U(0, 1) per sample, shape (B,).
        drift_weight: weight of mean D(real)^2, at least 0.

    Differs from the reference: fakes carry labels of their own, because a server does
    not have the real batch's labels; the penalty is taken at the real labels.
    """
    real_scores = score(real, real_labels)
    fake_scores = score(fake, fake_labels)
    loss = fake_scores.mean() - real_scores.mean()
    drift = real_scores.square().mean()
    loss = loss + drift_weight * drift
    weight = mix_weight.view(-1, 1, 1, 1)
    mix = weight * real + (1 - weight) * fake

    def total(images: Images) -> Tensor:
        return score(images, real_labels).sum()

    image_grads = grad(total)(mix)
    # The small constant keeps the square root differentiable at a zero gradient.
    squared_norms = image_grads.flatten(1).square().sum(1)
    norms = (squared_norms + 1e-12).sqrt()
    penalty = (norms - 1).square().mean()
    return loss + PENALTY_WEIGHT * penalty


def generator_image_grads(score: Score, fake: Images, labels: Labels) -> ImageGrads:
    """Returns d L_G / d image for every fake image by itself, L_G = -D(x, y).

    A discriminator without batch statistics scores each image alone, so the gradient
    of the sum holds each image's own gradient.

    Privacy: reads private data (through the discriminator); output private.

    Args:
        score: the discriminator.
        fake: shape (B, C, S, S).
        labels: shape (B,).

    Returns:
        Shape (B, C, S, S), without a factor 1/B.

    Source: GS-WGAN, Eq. 5 and 6 (upstream gradient of the image).
    """
    return grad(lambda images: -score(images, labels).sum())(fake)
