"""Layers for a few consecutive tokens, by several models at once that have weights of their own.

With a few tokens a product reads a matrix and does next to nothing with it: what counts is how often the weights are
read. Forward and backward are spelled out, so that the gradient of a matrix stays a pair of thin factors, of which
whoever changes the matrix makes what it needs: for y = x W^T it is dy^T x.

Every function has plain torch for all devices and dtypes; the kernels of ``kernels.few_tokens`` do the same in float32
on a GPU.

Shapes: P models, T tokens, I and O features, S parts of a sum, H hidden features, G = 4 H gates in the order i, f, g,
o.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sigsoftmax.lm import kernels

__all__ = ["LstmSteps", "linear", "linear_input_gradient", "lstm", "lstm_gate_gradients"]


class LstmSteps(NamedTuple):
    """The steps of an LSTM layer over the tokens; its first hidden and cell are the state before them.

    Steps come first in both, so that the state of a step is contiguous.
    """

    hidden: Tensor
    """(T + 1, P, H)"""
    cell: Tensor
    """(T + 1, P, H)"""
    gates_PTG: Tensor
    """after their nonlinearities"""


def linear(input_PTI: Tensor, weight_POI: Tensor, *biases_PO: Tensor) -> Tensor:
    """(P, T, O), with up to two biases."""
    if kernels.run_on(weight_POI):
        from sigsoftmax.lm.kernels import few_tokens

        return few_tokens.linear(input_PTI, weight_POI, *biases_PO)
    output_PTO = input_PTI @ weight_POI.mT
    for bias_PO in biases_PO:
        output_PTO = output_PTO + bias_PO.unsqueeze(1)
    return output_PTO


def linear_input_gradient(gradient_PTO: Tensor, weight_POI: Tensor) -> Tensor:
    """(P, S, T, I): the gradient of the input of :func:`linear`, in parts that are still to be summed."""
    if kernels.run_on(weight_POI):
        from sigsoftmax.lm.kernels import few_tokens

        return few_tokens.linear_input_gradient(gradient_PTO, weight_POI)
    return (gradient_PTO @ weight_POI).unsqueeze(1)


def lstm(inputs_PTG: Tensor, weight_PGH: Tensor, hidden_PH: Tensor, cell_PH: Tensor) -> LstmSteps:
    """The recurrence, given the input's share in the gates."""
    if kernels.run_on(weight_PGH):
        from sigsoftmax.lm.kernels import few_tokens

        return LstmSteps(*few_tokens.lstm(inputs_PTG, weight_PGH, hidden_PH, cell_PH))
    hidden, cell, gates = [hidden_PH], [cell_PH], []
    for inputs_PG in inputs_PTG.unbind(1):
        before_PG = inputs_PG + (weight_PGH @ hidden[-1].unsqueeze(-1)).squeeze(-1)
        i, f, g, o = before_PG.chunk(4, dim=-1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        cell.append(f * cell[-1] + i * g)
        hidden.append(o * cell[-1].tanh())
        gates.append(torch.cat([i, f, g, o], dim=-1))
    return LstmSteps(torch.stack(hidden), torch.stack(cell), torch.stack(gates, dim=1))


def lstm_gate_gradients(gradient_PSTH: Tensor, weight_PGH: Tensor, steps: LstmSteps) -> Tensor:
    """(P, T, G): the gradient of the gates before their nonlinearities, from that of the outputs, in parts.

    With it the gradient of the hidden-to-hidden matrix is the product with the hidden states before each token.
    """
    if kernels.run_on(weight_PGH):
        from sigsoftmax.lm.kernels import few_tokens

        return few_tokens.lstm_gate_gradients(gradient_PSTH, weight_PGH, steps.cell, steps.gates_PTG)
    gradient_PTH = gradient_PSTH.sum(dim=1)
    later = torch.zeros_like(gradient_PTH[:, 0])
    cell_gradient = torch.zeros_like(later)
    found: list[Tensor] = []
    for t in reversed(range(gradient_PTH.shape[1])):
        i, f, g, o = steps.gates_PTG[:, t].chunk(4, dim=-1)
        hidden_gradient, bounded = gradient_PTH[:, t] + later, steps.cell[t + 1].tanh()
        cell_gradient = cell_gradient + hidden_gradient * o * (1.0 - bounded * bounded)
        of_gates = [
            cell_gradient * g * i * (1.0 - i),
            cell_gradient * steps.cell[t] * f * (1.0 - f),
            cell_gradient * i * (1.0 - g * g),
            hidden_gradient * bounded * o * (1.0 - o),
        ]
        found.append(torch.cat(of_gates, dim=-1))
        later = (found[-1].unsqueeze(1) @ weight_PGH).squeeze(1)
        cell_gradient = cell_gradient * f
    return torch.stack(found[::-1], dim=1)
