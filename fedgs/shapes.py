"""Tensor shapes, named once; the tests check them at every call.

| name | shape | dtype and range |
|---|---|---|
| Images | (B, C, S, S) | float in [0, 1], 0 = background |
| ImageGrads | (B, C, S, S) | float, d loss / d image |
| Labels | (B,) | int64 in [0, num_classes) |
| Scores | (B,) | float, any real number |
| MixWeights | (B,) | float in [0, 1), of the gradient penalty |
| Latents | (B, latent_dim) | float32, bits or normal draws |
| PerSampleGrads | (n, B, C, k, k) | float; client, fake, its gradient |
| Release | (B, C, k, k) | float32; sanitized, fake, gradient in its basis |
| Positions | (n,) | int64, of clients in a node's stack |

"float" is float32, or float64 where sums are taken and in tests of formulas. A leading
client axis n may stand before each of the first six ("stacked"). Axes of the same name
have the same length within one call. In a phase of mean features, PerSampleGrads and
Release hold embeddings: B = 1, and (1, classes, features) in the place of (C, k, k).
"""

from jaxtyping import Float, Float32, Int64
from torch import Tensor

Images = Float[Tensor, "*stack batch channels side side"]
ImageGrads = Float[Tensor, "*stack batch channels side side"]
Labels = Int64[Tensor, "*stack batch"]
Scores = Float[Tensor, "*stack batch"]
MixWeights = Float[Tensor, "*stack batch"]
Latents = Float32[Tensor, "*stack batch latent_dim"]
PerSampleGrads = Float[Tensor, "clients batch channels rows columns"]
Release = Float32[Tensor, "batch channels rows columns"]
Positions = Int64[Tensor, "clients"]
TensorDict = dict[str, Tensor]
