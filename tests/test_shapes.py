"""The tests check shapes: a wrong one is refused where a function is called."""

import pytest
import torch
from jaxtyping import TypeCheckError

from fedgs.gan.discriminators import Discriminators
from fedgs.mechanism.answer_bounds import check_norms
from fedgs.mechanism.sanitizer import PerSampleGradients, from_dct
from tiny import tiny_config

IMAGES, LABELS = torch.zeros(4, 1, 16, 16), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (IMAGES[0], LABELS),  # one image without its axis of a batch
        (IMAGES, LABELS[:3]),  # a label short
        (IMAGES, LABELS.float()),
        (IMAGES[..., :8], LABELS),  # not square
    ],
)
def test_a_wrong_shape_is_refused_where_it_is_passed(images, labels):
    discriminators = Discriminators(tiny_config(), range(2))
    assert discriminators.query(torch.arange(2), IMAGES, LABELS).shape[:2] == (2, 4)
    with pytest.raises(TypeCheckError, match="query"):
        discriminators.query(torch.arange(2), images, labels)


def test_gradients_have_their_shapes():
    with pytest.raises(TypeCheckError, match="PerSampleGradients"):
        PerSampleGradients(IMAGES)
    with pytest.raises(TypeCheckError, match="check_norms"):
        check_norms(IMAGES.double(), tiny_config(), 1)
    with pytest.raises(TypeCheckError, match="from_dct"):
        from_dct(torch.zeros(10, 10), 16)
