"""The device of kernels in this process: a GPU, or the CPU in Triton's interpreter.

A test module that imports this one is skipped where they cannot run; ``conftest`` says what happens then.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if importlib.util.find_spec("triton") is None:
    pytest.skip("the package triton is not installed", allow_module_level=True)
if not IS_INTERPRETED and not torch.cuda.is_available():
    pytest.skip("no GPU here: test_interpreted runs these tests in Triton's interpreter", allow_module_level=True)

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
