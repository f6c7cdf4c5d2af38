"""Numbers near the ends of a dtype, and rows that do not count, in the kernels; see ``backends/test_extremes``."""

from __future__ import annotations

import pytest
import torch
from tests.backends.extremes import KINDS, assert_ignored_rows_reach_nothing, assert_sound, random_call
from tests.backends.triton.device import DEVICE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_fits_is_finite_and_right(dtype: torch.dtype) -> None:
    for seed in range(20):
        assert_sound(random_call(seed, dtype), "triton", DEVICE)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_ignored_rows_reach_nothing_whatever_they_hold(kind: str, smoothing: float) -> None:
    assert_ignored_rows_reach_nothing(kind, smoothing, "triton", DEVICE)
