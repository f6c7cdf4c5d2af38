"""Runs test files in Triton's interpreter, in processes of their own: it is chosen for a whole process."""

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

ROOT = Path(__file__).parents[1]
UNHEARD = ("invalid value", "overflow", "divide by zero", "All-NaN slice")
"""numpy warns of what a GPU does without a word, in lanes that are masked afterwards and in rows of NaN."""


def _is_broken() -> bool:
    """Interpreters before Triton 3.7 call numpy in a way that numpy 2.4 refuses."""
    if importlib.util.find_spec("triton") is None:
        return False
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    return triton < (3, 7) and numpy >= (2, 4)


def skip_where_it_cannot_run() -> None:
    """Skip a test that would run kernels in the interpreter."""
    reasons = {
        "triton < 3.7 does not interpret with numpy >= 2.4": _is_broken(),
        "the package triton is not installed": importlib.util.find_spec("triton") is None,
        "a GPU runs these tests itself": torch.cuda.is_available(),
        "this process interprets kernels itself": "TRITON_INTERPRET" in os.environ,
    }
    for reason, holds in reasons.items():
        if holds:
            pytest.skip(reason)


def run_interpreted(*paths: Path) -> None:
    """Fail unless the tests of these files pass in the interpreter; they share a process, whose start takes seconds."""
    skip_where_it_cannot_run()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    ignored = [f"-Wignore:{message} encountered:RuntimeWarning" for message in UNHEARD]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--no-header", "-pno:cacheprovider", "-pno:xdist"]
    result = subprocess.run(
        [*command, *ignored, *map(str, paths)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    if result.returncode or not re.search(r"\d+ passed", result.stdout):
        pytest.fail(
            f"{', '.join(path.name for path in paths)} in the interpreter:\n{result.stdout}{result.stderr}",
            pytrace=False,
        )
