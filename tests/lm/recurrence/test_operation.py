"""Arguments that the persistent recurrence refuses before anything is launched."""

import pytest
import torch
from tests.lm.recurrence.layers import H200

from sigsoftmax.lm.recurrence import LayerKernels, persistent_lstm, plan_layer

HIDDEN, BATCH, INPUTS = 8, 3, 5
ROWS = 4 * HIDDEN
SHAPES = {
    "input": (4, BATCH, INPUTS),
    "hidden": (1, BATCH, HIDDEN),
    "cell": (1, BATCH, HIDDEN),
    "weight_ih": (ROWS, INPUTS),
    "weight_hh": (ROWS, HIDDEN),
    "bias_ih": (ROWS,),
    "bias_hh": (ROWS,),
    "kept": (ROWS, HIDDEN),
}


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("input", torch.zeros(4, 2, INPUTS), r"windows of 3 columns, got an input of \(4, 2, 5\)"),
        ("input", torch.zeros(4, BATCH, INPUTS).double(), "the input must be torch.float32 of .*, got torch.float64"),
        (
            "hidden",
            torch.zeros(1, BATCH, 9),
            r"the hidden state must be torch.float32 of \(1, 3, 8\), got .*\(1, 3, 9\)",
        ),
        (
            "cell",
            torch.zeros(1, BATCH, HIDDEN).bfloat16(),
            "the cell state must be torch.float32 .*, got torch.bfloat16",
        ),
        ("weight_ih", torch.zeros(ROWS, 6), r"weight_ih must be torch.float32 of \(32, 5\), got .*\(32, 6\)"),
        (
            "weight_hh",
            torch.zeros(HIDDEN, ROWS).t(),
            r"weight_hh must be torch.float32 of \(32, 8\) that is contiguous",
        ),
        ("bias_hh", torch.zeros(HIDDEN), r"bias_hh must be torch.float32 of \(32,\), got .*\(8,\)"),
        ("kept", torch.zeros(ROWS, HIDDEN), "kept must be torch.bool of .*, got torch.float32"),
    ],
)
def test_what_the_kernels_would_read_as_something_else_is_refused(name, tensor, message):
    tensors = {other: torch.zeros(shape) for other, shape in SHAPES.items()}
    tensors["kept"] = tensors["kept"].bool()
    tensors[name] = tensor
    kernels = LayerKernels(plan_layer(HIDDEN, BATCH, "tf32", H200), torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        persistent_lstm(
            kernels,
            *(tensors[part] for part in ("input", "hidden", "cell")),
            tuple(tensors[part] for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")),
            error_flag=torch.zeros(1, dtype=torch.int32),
            kept_4HH=tensors["kept"],
        )
