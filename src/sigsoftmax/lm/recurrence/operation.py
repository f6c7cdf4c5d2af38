"""One LSTM layer over a window as an autograd function on the persistent recurrence.

The products with the input, and those of the weights' gradients, are cuBLAS calls over the whole window; only what
cannot be done for all time steps at once is in the recurrent kernels.

Shapes: T time steps, B columns, N = T B rows, I inputs, H hidden units, P and J the padded H and I, W the width of
padded rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigsoftmax.lm.recurrence.loading import LayerKernels
from sigsoftmax.lm.recurrence.plans import KernelPlan

__all__ = ["PATIENCE_NS", "persistent_lstm"]

PATIENCE_NS = 4_000_000_000
"""wait for what takes microseconds: other processes of a GPU may pause a grid, but not for this long"""
TILE = 64
"""rows and columns of the recurrent matrix that one block packs, as the kernel has it"""


def persistent_lstm(
    kernels: LayerKernels,
    input_TBI: Tensor,
    hidden_1BH: Tensor,
    cell_1BH: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    error_flag: Tensor,
    input_mask_1BI: Tensor | None = None,
    kept_4HH: Tensor | None = None,
    scale: float = 1.0,
    patience_ns: int = PATIENCE_NS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs (T, B, H), last hidden and last cell state (1, B, H).

    ``parameters`` are weight_ih, weight_hh, bias_ih and bias_hh in float32. The input is multiplied by
    ``input_mask_1BI``, the recurrent matrix by ``kept_4HH * scale``. Where a wait outlasts ``patience_ns``, results are
    NaN and ``error_flag``, one int32, is not 0 any more.
    """
    differentiable = (input_TBI, hidden_1BH, cell_1BH, *parameters)
    _check(kernels.plan.forward, *differentiable, kept_4HH)
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in differentiable)
    kernels.load(backward=keep)
    call = _Call(kernels, error_flag, patience_ns, scale, input_TBI.shape[2], keep)
    outputs: tuple[Tensor, Tensor, Tensor] = _PersistentLstm.apply(*differentiable, input_mask_1BI, kept_4HH, call)
    return outputs


def _check(plan: KernelPlan, input_TBI: Tensor, *others: Tensor | None) -> None:
    """Refuse what the kernels would read as something else."""
    steps, batch, inputs = input_TBI.shape
    if steps < 1 or batch != plan.batch:
        raise ValueError(f"this plan is for windows of {plan.batch} columns, got an input of {tuple(input_TBI.shape)}")
    dtype = torch.bfloat16 if plan.precision == "bf16" else torch.float32
    state, rows = (1, batch, plan.hidden), 4 * plan.hidden
    expected = {
        "the input": (tuple(input_TBI.shape), dtype),
        "the hidden state": (state, dtype),
        "the cell state": (state, dtype),
        "weight_ih": ((rows, inputs), torch.float32),
        "weight_hh": ((rows, plan.hidden), torch.float32),
        "bias_ih": ((rows,), torch.float32),
        "bias_hh": ((rows,), torch.float32),
        "kept": ((rows, plan.hidden), torch.bool),
    }
    for tensor, (name, (shape, kind)) in zip((input_TBI, *others), expected.items(), strict=True):
        if tensor is None:
            continue
        # The input and the states may have any strides.
        is_laid_out = len(shape) == 3 or tensor.is_contiguous()
        if tensor.shape != shape or tensor.dtype != kind or not is_laid_out:
            layout = "" if is_laid_out else " that is contiguous"
            raise ValueError(f"{name} must be {kind} of {shape}{layout}, got {tensor.dtype} of {tuple(tensor.shape)}")


class _Call(NamedTuple):
    """Arguments of both passes besides tensors that autograd knows."""

    kernels: LayerKernels
    error_flag: Tensor
    patience_ns: int
    scale: float
    inputs: int
    keep: bool
    """True if there will be a backward pass"""


class _PersistentLstm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_TBI: Tensor,
        hidden_1BH: Tensor,
        cell_1BH: Tensor,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias_ih: Tensor,
        bias_hh: Tensor,
        input_mask_1BI: Tensor | None,
        kept_4HH: Tensor | None,
        call: _Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernels, keep = call.kernels, call.keep
        plan = kernels.plan.forward
        steps, batch, inputs = input_TBI.shape
        hidden, padded, like = plan.hidden, plan.padded, input_TBI
        # One more input is that of the biases; cuBLAS is fast with rows of 16-byte multiples.
        multiple = 16 // plan.element_bytes
        padded_inputs = -(-(inputs + 1) // multiple) * multiple
        hidden_1BH, cell_1BH = hidden_1BH.contiguous(), cell_1BH.contiguous()

        rows_NJ = _masked_rows(kernels, input_TBI, input_mask_1BI, padded_inputs)
        recurrent_4PP, packed_4PJ = like.new_empty(4 * padded, padded), like.new_empty(4 * padded, padded_inputs)
        transpose_P4P = like.new_empty(padded, 4 * padded) if keep else None
        counters = torch.empty(plan.counters + kernels.plan.backward.counters, dtype=torch.int32, device=like.device)
        kernels.launch(
            "pack_weights",
            -(-padded // TILE) * -(-4 * padded // TILE) + 4 * padded,
            *(weight_hh, kept_4HH, call.scale, weight_ih, bias_ih, bias_hh),
            *(recurrent_4PP, transpose_P4P, packed_4PJ, inputs, padded_inputs, counters, counters.numel()),
        )
        gates_N4P = torch.mm(rows_NJ, packed_4PJ.t())
        states_TBP = like.new_empty(steps + 1, batch, padded)
        cells_TBP = like.new_empty((steps, batch, padded), dtype=torch.float32) if keep else None
        last_cell_1BH = torch.empty_like(cell_1BH)
        kernels.launch(
            "lstm_forward",
            plan.ctas,
            recurrent_4PP,
            hidden_1BH,
            cell_1BH,
            gates_N4P,
            states_TBP,
            cells_TBP,
            last_cell_1BH,
            counters,
            call.error_flag,
            call.patience_ns,
            steps,
            int(keep),
        )
        ctx.call, ctx.passes = call, 0
        ctx.set_materialize_grads(False)
        if keep:
            ctx.save_for_backward(
                rows_NJ,
                packed_4PJ,
                recurrent_4PP if ctx.needs_input_grad[1] else None,
                transpose_P4P,
                gates_N4P,
                states_TBP,
                cells_TBP,
                cell_1BH,
                input_mask_1BI,
                kept_4HH,
                counters,
            )
        return states_TBP[1:, :, :hidden], states_TBP[steps:, :, :hidden], last_cell_1BH

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, output_gradient: Tensor | None, hidden_gradient: Tensor | None, cell_gradient: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        rows_NJ, packed_4PJ, recurrent_4PP, transpose_P4P, gates_N4P, states_TBP, cells_TBP, *rest = ctx.saved_tensors
        cell_1BH, mask, kept, counters = rest
        call: _Call = ctx.call
        kernels = call.kernels
        plan = kernels.plan.backward
        own_counters = counters[kernels.plan.forward.counters :]
        if ctx.passes:
            own_counters.zero_()
        ctx.passes += 1
        steps, batch, padded, hidden = states_TBP.shape[0] - 1, plan.batch, plan.padded, plan.hidden
        gradient_TBH = _output_gradient(output_gradient, hidden_gradient, states_TBP, hidden)
        gate_gradients_N4P = torch.empty_like(gates_N4P)
        cell_gradient_1BH = torch.empty_like(cell_1BH) if ctx.needs_input_grad[2] else None
        kernels.launch(
            "lstm_backward",
            plan.ctas,
            transpose_P4P,
            gates_N4P,
            cells_TBP,
            cell_1BH,
            gradient_TBH,
            None if cell_gradient is None else cell_gradient.contiguous(),
            gate_gradients_N4P,
            cell_gradient_1BH,
            own_counters,
            call.error_flag,
            call.patience_ns,
            gradient_TBH.stride(0),
            gradient_TBH.stride(1),
            steps,
        )
        input_gradient = hidden_gradient_1BH = None
        if ctx.needs_input_grad[0]:
            rows = torch.mm(gate_gradients_N4P, packed_4PJ).view(steps, batch, -1)[:, :, : call.inputs]
            input_gradient = rows if mask is None else _masked_rows(kernels, rows, mask, call.inputs).view(rows.shape)
        if ctx.needs_input_grad[1]:
            hidden_gradient_1BH = torch.mm(gate_gradients_N4P[:batch], recurrent_4PP)[None, :, :hidden]
        parameter_gradients: tuple[Tensor | None, ...] = (None,) * 4
        if any(ctx.needs_input_grad[3:7]):
            parameter_gradients = _parameter_gradients(
                call, gate_gradients_N4P, states_TBP[:steps].view(steps * batch, padded), rows_NJ, kept
            )
        return input_gradient, hidden_gradient_1BH, cell_gradient_1BH, *parameter_gradients, *(None,) * 3


def _parameter_gradients(
    call: _Call, gradients_N4P: Tensor, states_NP: Tensor, rows_NJ: Tensor, kept_4HH: Tensor | None
) -> tuple[Tensor, ...]:
    hidden, inputs = call.kernels.plan.forward.hidden, call.inputs
    recurrent_4PP, packed_4PJ = _product(gradients_N4P.t(), states_NP), _product(gradients_N4P.t(), rows_NJ)
    shapes = ((4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,))
    weight_ih, weight_hh, bias_ih, bias_hh = (recurrent_4PP.new_empty(shape) for shape in shapes)
    call.kernels.launch(
        "unpack_gradients",
        4 * hidden,
        *(recurrent_4PP, packed_4PJ, kept_4HH, call.scale),
        *(weight_hh, weight_ih, bias_ih, bias_hh, inputs, packed_4PJ.shape[1]),
    )
    return weight_ih, weight_hh, bias_ih, bias_hh


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The product in float32, whatever the factors are."""
    if left.dtype == torch.float32:
        return torch.mm(left, right)
    return torch.mm(left, right, out_dtype=torch.float32)


def _masked_rows(kernels: LayerKernels, source_TBI: Tensor, mask_1BI: Tensor | None, width: int) -> Tensor:
    """(T B, width): the rows of a tensor times a mask that all time steps share, and behind them a 1 and zeros."""
    steps, batch, columns = source_TBI.shape
    row_stride = source_TBI.stride(1)
    if source_TBI.stride(2) != 1 or source_TBI.stride(0) != batch * row_stride:
        source_TBI = source_TBI.contiguous()
        row_stride = columns
    target_NW = source_TBI.new_empty(steps * batch, width)
    mask = None if mask_1BI is None else mask_1BI.to(source_TBI.dtype).contiguous()
    kernels.launch("mask_rows", steps * batch, source_TBI, mask, target_NW, columns, row_stride, width)
    return target_NW


def _output_gradient(
    output_gradient: Tensor | None, hidden_gradient: Tensor | None, states_TBP: Tensor, hidden: int
) -> Tensor:
    """The gradient of the outputs, units next to each other; the last hidden state is the last output too."""
    if output_gradient is None:
        output_gradient = torch.zeros_like(states_TBP[1:, :, :hidden])
    if hidden_gradient is not None:
        output_gradient = torch.cat([output_gradient[:-1], output_gradient[-1:] + hidden_gradient])
    return output_gradient if output_gradient.stride(2) == 1 else output_gradient.contiguous()
