"""Tensor shapes, named once.

| name | shape | dtype and range |
|---|---|---|
| Images | (B, C, S, S) | float32 in [0, 1], 0 = background |
| Labels | (B,) | int64 in [0, num_classes) |
| Scores | (B,) | float32, any real number |
| Latents | (B, latent_dim) | float32, bits or normal draws |
| PerSampleGrads | (n, B, C, k, k) | float32; client, fake, gradient in its basis |

A leading client axis n may stand before each of the first four ("stacked").
"""

from torch import Tensor

Images = Tensor
Labels = Tensor
Scores = Tensor
Latents = Tensor
PerSampleGrads = Tensor
TensorDict = dict[str, Tensor]
