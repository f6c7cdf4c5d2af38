"""The tests of the kernels in Triton's interpreter, each file in a process of its own; ``conftest`` says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.interpreted import run_interpreted


@pytest.mark.parametrize(
    "name",
    [
        "test_rows.py",
        "test_losses.py",
        "test_fused.py",
        "test_smoothing.py",
        "test_stream.py",
        "test_columns.py",
        "test_sharded.py",
        "test_tokens.py",
        "test_intrinsics.py",
    ],
)
def test_kernels_in_the_interpreter(name: str) -> None:
    run_interpreted(Path(__file__).parent / name)
