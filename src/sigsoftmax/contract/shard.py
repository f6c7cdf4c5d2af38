"""Classes that are spread over processes: who holds which, and the way to those who hold the others.

Shapes: N tokens, V classes of all processes, P processes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The classes that this process holds, and the way to those who hold the others.

    A process that holds none computes with one masked class in their place, since tensors without classes are refused
    nearly everywhere; nothing of it reaches a result.
    """

    sizes: tuple[int, ...]
    """number of classes that each process holds"""
    rank: int
    gather: Callable[[Tensor], Tensor]
    """(P, ...) of tensors that have the same shape in every process"""

    @property
    def facts(self) -> tuple[tuple[int, ...], int]:
        """The facts that decisions may depend on."""
        return self.sizes, self.rank

    @property
    def num_classes(self) -> int:
        return sum(self.sizes)

    @property
    def classes(self) -> slice:
        return classes_of(self.sizes, self.rank)

    @property
    def is_empty(self) -> bool:
        return self.sizes[self.rank] == 0

    @property
    def largest(self) -> int:
        """Chunks are cut to it, so that all processes cut alike and meet at every exchange."""
        return max(1, *self.sizes)

    def own(self, whole_V: Tensor) -> Tensor:
        """The part of this process; 0 for the class that stands in for none."""
        return whole_V.new_zeros(1) if self.is_empty else whole_V[self.classes]

    def owner(self, index_N: Tensor) -> Tensor:
        """The process that holds each class."""
        return torch.bucketize(index_N, _boundaries(self.sizes, index_N.device)[1:-1], right=True)

    def sum(self, own: Tensor) -> Tensor:
        return self.gather(own).sum(0)

    def first_of(self, rank: Tensor) -> Tensor:
        """The first class of each process that is asked for."""
        return _boundaries(self.sizes, rank.device)[rank]


def classes_of(sizes: tuple[int, ...], rank: int) -> slice:
    """The classes of a process among all."""
    first = sum(sizes[:rank])
    return slice(first, first + sizes[rank])


@functools.lru_cache(maxsize=64)
def _boundaries(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """The first class of every process, and the number of all. Kept, since a copy to a GPU has to be waited for."""
    return torch.tensor([0, *itertools.accumulate(sizes)], device=device)
