"""The kernels of the language models in Triton's interpreter."""

from pathlib import Path

import pytest
from tests.interpreted import run_interpreted


@pytest.mark.parametrize("name", ["test_window_kernels.py", "test_dynamic_kernels.py"])
def test_kernels_in_the_interpreter(name):
    run_interpreted(Path(__file__).parent / name)
