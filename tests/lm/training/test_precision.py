"""The arithmetic that evaluations take, and what is refused."""

import pytest
import torch

from sigsoftmax.lm.training.precision import resolve_evaluation_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_evaluations_take_tf32_products_on_a_gpu_unless_told_otherwise():
    assert resolve_evaluation_precision(None, CUDA) == "tf32"
    assert resolve_evaluation_precision("float32", CUDA) == "float32"
    assert resolve_evaluation_precision(None, CPU) == "float32"
    assert resolve_evaluation_precision("float32", CPU) == "float32"


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"evaluation_precision must be one of float32, tf32, got .bf16."):
        resolve_evaluation_precision("bf16", CUDA)
    with pytest.raises(ValueError, match="'tf32' is for CUDA devices"):
        resolve_evaluation_precision("tf32", CPU)
