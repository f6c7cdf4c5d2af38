"""Vocabulary-parallel embedding: its rows are sharded over processes.

Shapes: T time steps, B columns, D embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sigsoftmax.contract.shard import classes_of
from sigsoftmax.distributed.classes import even_sizes
from sigsoftmax.distributed.exchange import Exchange

__all__ = ["embedding_of_ranks"]


def embedding_of_ranks(tokens_TB: Tensor, weight: Any) -> Tensor:
    """(T, B, D), the same on every rank, from a DTensor that is sharded by rows; all ranks pass the same tokens."""
    exchange = Exchange(weight.device_mesh.get_group())
    own = classes_of(even_sizes(weight.shape[0], exchange.size), exchange.rank)
    rows = weight.to_local()
    if not rows.shape[0]:
        # A rank without rows has nothing to add, but a place in the graph.
        own_TBD = rows.sum() + rows.new_zeros(*tokens_TB.shape, weight.shape[1])
    else:
        is_own = (tokens_TB >= own.start) & (tokens_TB < own.stop)
        looked_up = F.embedding((tokens_TB - own.start).clamp(0, rows.shape[0] - 1), rows)
        own_TBD = torch.where(is_own.unsqueeze(-1), looked_up, 0.0)
    summed: Tensor = _SumOverRanks.apply(exchange, own_TBD)
    return summed


class _SumOverRanks(torch.autograd.Function):
    """Backward is the identity: every rank has the whole gradient of what all of them use alike."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, own: Tensor) -> Tensor:
        return exchange.sum(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient
