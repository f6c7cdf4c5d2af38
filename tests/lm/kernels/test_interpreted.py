"""The kernels of the language models in Triton's interpreter."""

from pathlib import Path

from tests.interpreted import run_interpreted


def test_kernels_in_the_interpreter():
    run_interpreted(*(Path(__file__).parent / name for name in ("test_window_kernels.py", "test_dynamic_kernels.py")))
