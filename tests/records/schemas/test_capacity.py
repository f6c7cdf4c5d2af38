"""The width at which softmax reaches a KL."""

import math

import pytest

from sigsoftmax.records.schemas.capacity import softmax_width_of_equal_kl


def test_softmax_width_of_equal_kl():
    curve = {2: 1.0, 4: 0.25, 8: 0.01}
    assert softmax_width_of_equal_kl(1.0, curve) == 2.0
    assert softmax_width_of_equal_kl(0.5, curve) == pytest.approx(3.0)
    assert softmax_width_of_equal_kl(0.05, curve) == pytest.approx(6.0)
    assert softmax_width_of_equal_kl(0.01, curve) == 8.0
    assert softmax_width_of_equal_kl(2.0, curve) == 0.0
    assert math.isinf(softmax_width_of_equal_kl(0.001, curve))
    with pytest.raises(ValueError, match=r"not negative, with at least one width"):
        softmax_width_of_equal_kl(0.1, {})
