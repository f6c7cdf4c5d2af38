"""The tests of the kernels in Triton's interpreter, each file in a process of its own; ``conftest`` says why."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
UNHEARD = ("invalid value", "overflow", "divide by zero", "All-NaN slice")
"""numpy warns of what a GPU does without a word, in lanes that are masked afterwards and in rows of NaN."""


def interpreter_is_broken() -> bool:
    """Interpreters before Triton 3.7 call numpy in a way that numpy 2.4 refuses."""
    if importlib.util.find_spec("triton") is None:
        return False
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    return triton < (3, 7) and numpy >= (2, 4)


@pytest.mark.skipif(interpreter_is_broken(), reason="triton < 3.7 does not interpret with numpy >= 2.4")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs these tests itself")
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="this process interprets kernels itself")
@pytest.mark.parametrize(
    "name",
    [
        "test_rows.py",
        "test_losses.py",
        "test_plans.py",
        "test_smoothing.py",
        "test_stream.py",
        "test_columns.py",
        "test_sharded.py",
    ],
)
def test_kernels_in_the_interpreter(name: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    ignored = [f"-Wignore:{message} encountered:RuntimeWarning" for message in UNHEARD]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--no-header", "-pno:cacheprovider", "-pno:xdist"]
    result = subprocess.run(
        [*command, *ignored, str(HERE / name)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    if result.returncode or not re.search(r"\d+ passed", result.stdout):
        pytest.fail(f"{name} in the interpreter:\n{result.stdout}{result.stderr}", pytrace=False)
