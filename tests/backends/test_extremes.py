"""Numbers near the ends of a dtype, and rows that do not count, on the backends of a CPU.

``triton/test_extremes.py`` runs the same on the kernels.
"""

from __future__ import annotations

import pytest
import torch
from tests.backends.extremes import KINDS, assert_ignored_rows_reach_nothing, assert_sound, random_call
from tests.tables import every_backend


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("part", range(4))
def test_what_fits_is_finite_and_right(part: int, dtype: torch.dtype, backend: str) -> None:
    for seed in range(60 * part, 60 * (part + 1)):
        assert_sound(random_call(seed, dtype), backend)


@every_backend
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_ignored_rows_reach_nothing_whatever_they_hold(kind: str, smoothing: float, backend: str) -> None:
    assert_ignored_rows_reach_nothing(kind, smoothing, backend)
