"""The tests of the kernels in Triton's interpreter, each file in a process of its own; ``conftest`` says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.interpreted import run_interpreted


@pytest.mark.parametrize(
    "name",
    [
        "test_logits_kernels.py",
        "test_losses.py",
        "test_fused_loss.py",
        "test_smoothed_row.py",
        "test_pipelined_row.py",
        "test_per_class_gradients.py",
        "test_sharded.py",
        "test_statistics.py",
        "test_mixture_log_probs.py",
        "test_extremes.py",
        "test_tokens.py",
        "test_intrinsics.py",
    ],
)
def test_kernels_in_the_interpreter(name: str) -> None:
    run_interpreted(Path(__file__).parent / name)
