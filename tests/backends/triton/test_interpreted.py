"""The tests of the kernels in Triton's interpreter, each file in a process of its own; ``conftest`` says why."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
UNHEARD = ("invalid value", "overflow", "divide by zero", "All-NaN slice")
"""numpy warns of what a GPU does without a word, in lanes that are masked afterwards and in rows of NaN."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs these tests itself")
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="this process interprets kernels itself")
@pytest.mark.parametrize("name", ["test_rows.py", "test_losses.py"])
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
