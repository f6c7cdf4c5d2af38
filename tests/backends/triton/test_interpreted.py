"""The tests of the kernels in Triton's interpreter, some files per process; ``conftest`` says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.interpreted import run_interpreted

PROCESSES = (
    ("logits_kernels", "tokens", "intrinsics"),
    ("losses", "per_class_gradients"),
    ("fused_loss", "extremes"),
    ("pipelined_row", "mixture_log_probs"),
    ("smoothed_row", "sharded", "statistics"),
)
"""test files that share a process: about as long each, so that few processes are started and no core waits"""


@pytest.mark.parametrize("names", PROCESSES, ids=", ".join)
def test_kernels_in_the_interpreter(names: tuple[str, ...]) -> None:
    run_interpreted(*(Path(__file__).parent / f"test_{name}.py" for name in names))
