"""The two ways in which processes talk here, and what is said when one of them does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class LostRankError(RuntimeError):
    """An exchange between processes failed: another one died, raised, or is stuck."""


# torch 2.13 renamed it and warns about the old name.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Exchange:
    """Gathering from and summing over the processes of a group (None: all processes)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "torch.distributed is not initialised; start the program with torchrun and call "
                "torch.distributed.init_process_group, or use sigsoftmax.distributed.processes"
            )
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is no member of the group; call this on the ranks of the group alone")

    def gather(self, own: Tensor) -> Tensor:
        """(P, ...): the tensor of every process, in the order of their ranks."""
        flat = own.detach().contiguous().view(-1)
        every = flat.new_empty(self.size * flat.numel())
        if flat.numel():
            with explained("gathering from"):
                _gather_into(every, flat, group=self.group)
        return every.view(self.size, *own.shape)

    def sum(self, own: Tensor) -> Tensor:
        """The sum over all processes, as a new tensor."""
        total = own.detach().clone(memory_format=torch.contiguous_format)
        if total.numel():
            with explained("summing over"):
                dist.all_reduce(total, group=self.group)
        return total


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Failures of torch.distributed as a :class:`LostRankError` that says what was going on."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LostRankError) or not is_failed_exchange(error):
            raise
        raise LostRankError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} stops: {doing} the other ranks failed, because one of "
            "them has died, has raised an error, or did not come to the same exchange within the timeout of the "
            f"process group; look for the first error among their messages (torch.distributed said: {error})"
        ) from error


def is_failed_exchange(error: BaseException) -> bool:
    """True if an error comes from the transport, not from what was sent."""
    if isinstance(error, LostRankError | dist.DistBackendError | dist.DistNetworkError):
        return True
    # Gloo raises plain RuntimeErrors; these words are those of its TCP transport.
    words = ("gloo/transport", "Connection closed", "Connection reset", "Timed out waiting", "Application timeout")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


class _SumGradients(torch.autograd.Function):
    """The identity; backward sums the gradients over the processes."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *(None if g is None else ctx.exchange.sum(g) for g in gradients))


def sum_gradients(exchange: Exchange, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that all processes hold alike, each using them in a part of the result; one backward sums all of them."""
    wanted = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad and torch.is_grad_enabled()}
    if not wanted:
        return tensors
    marked = _SumGradients.apply(exchange, *wanted.values())
    return tensors | dict(zip(wanted, marked, strict=True))
