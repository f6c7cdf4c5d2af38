"""A stack of LSTM layers with weight drop, on the persistent recurrence where it serves and on torch's own elsewhere.

The masked matrix is an argument of torch's LSTM operation, never an attribute of a module: a module may go on using
weights that it has packed before, and then weight drop does nothing.

Shapes: T time steps, B columns, I input features, H hidden features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sigsoftmax.lm.model.regularization import WeightDrop
from sigsoftmax.lm.recurrence import LayerKernels, Recurrence, persistent_lstm

__all__ = ["LayerState", "LstmLayer", "LstmStack", "carry_over"]


class LayerState(NamedTuple):
    """Hidden and cell state of one layer, (1, B, H) each."""

    hidden: Tensor
    cell: Tensor


@torch.no_grad()
def carry_over(states: Sequence[LayerState], new: Sequence[LayerState]) -> None:
    """Write the state after a window where the next window finds it, in one launch."""
    torch._foreach_copy_([t for state in states for t in state], [t for state in new for t in state])


class LstmLayer(nn.Module):
    """The parameters of one layer: gates in the order i, f, g, o, two biases, all U(-1/sqrt(H), 1/sqrt(H))."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias_ih = nn.Parameter(torch.empty(4 * hidden))
        self.bias_hh = nn.Parameter(torch.empty(4 * hidden))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        bound = 1.0 / math.sqrt(self.hidden)
        for parameter in self.parameters():
            parameter.uniform_(-bound, bound, generator=generator)

    def forward(
        self,
        input_TBI: Tensor,
        state: LayerState,
        weight_drop: WeightDrop | None,
        recurrence: Recurrence,
        *,
        input_mask_1BI: Tensor | None = None,
    ) -> tuple[Tensor, LayerState]:
        """Outputs and the state after the window; the input is multiplied by its mask."""
        kernels = recurrence.choose(
            self.hidden, input_TBI.shape[1], input_TBI.dtype, input_TBI.device, backward=torch.is_grad_enabled()
        )
        if isinstance(kernels, LayerKernels) and self.weight_hh.dtype == torch.float32:
            output, hidden, cell = persistent_lstm(
                kernels,
                input_TBI,
                state.hidden,
                state.cell,
                (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh),
                error_flag=recurrence.error_flag(input_TBI.device),
                input_mask_1BI=input_mask_1BI,
                kept_4HH=None if weight_drop is None else weight_drop.kept_4HH,
                scale=1.0 if weight_drop is None else weight_drop.scale,
            )
            return output, LayerState(hidden, cell)
        if input_mask_1BI is not None:
            input_TBI = input_TBI * input_mask_1BI.to(input_TBI.dtype)
        return _lstm(input_TBI, state, self.packed(weight_drop, input_TBI.dtype))

    def packed(self, weight_drop: WeightDrop | None, dtype: torch.dtype) -> list[Tensor]:
        """The four tensors as views of one buffer, as cuDNN wants them, with the hidden-to-hidden matrix masked."""
        weight_hh = self.weight_hh if weight_drop is None else weight_drop.applied_to(self.weight_hh)
        tensors = [self.weight_ih, weight_hh, self.bias_ih, self.bias_hh]
        if not self.weight_ih.is_cuda:
            return [tensor.to(dtype) for tensor in tensors]
        flat = torch.cat([tensor.flatten() for tensor in tensors]).to(dtype)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _lstm(input_TBI: Tensor, state: LayerState, packed: list[Tensor]) -> tuple[Tensor, LayerState]:
    # cuDNN has a backward pass in training mode alone, and no dropout is left to it: the flag asks for gradients.
    output, hidden, cell = torch._VF.lstm(
        input_TBI, (state.hidden, state.cell), packed, True, 1, 0.0, torch.is_grad_enabled(), False, False
    )
    return output, LayerState(hidden, cell)


class LstmStack(nn.Module):
    """Layers one after the other, with a locked mask after each but the last."""

    def __init__(self, inputs: int, hidden: Sequence[int]) -> None:
        super().__init__()
        widths = [inputs, *hidden]
        self.layers = nn.ModuleList(LstmLayer(i, h) for i, h in pairwise(widths))
        self.recurrence = Recurrence()

    def in_order(self) -> list[LstmLayer]:
        return [layer for layer in self.layers if isinstance(layer, LstmLayer)]

    def zero_state(self, batch: int, dtype: torch.dtype) -> list[LayerState]:
        device = next(self.parameters()).device
        shapes = [(1, batch, layer.hidden) for layer in self.in_order()]
        return [LayerState(*(torch.zeros(s, dtype=dtype, device=device) for _ in range(2))) for s in shapes]

    def forward(
        self,
        input_TBI: Tensor,
        states: Sequence[LayerState],
        *,
        hidden_masks: Sequence[Tensor | None],
        weight_masks: Sequence[WeightDrop | None],
    ) -> tuple[Tensor, list[LayerState]]:
        """The outputs of the last layer before their dropout, and the states of all."""
        new_states: list[LayerState] = []
        output = input_TBI
        # The mask after a layer is that of the next one's input, where the persistent recurrence has it for nothing.
        input_masks = (None, *hidden_masks)
        for layer, state, drop, mask in zip(self.layers, states, weight_masks, input_masks, strict=True):
            output, new_state = layer(output, state, drop, self.recurrence, input_mask_1BI=mask)
            new_states.append(new_state)
        return output, new_states
