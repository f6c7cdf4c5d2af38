"""Joining the processes that torchrun started, and leaving them with a word if one is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from sigsoftmax.distributed.exchange import explained

TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class World:
    """The rank and the device of this process, and the number of all processes."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """The one that prints and writes files."""
        return self.rank == 0


@contextmanager
def processes(*, timeout_s: float = TIMEOUT_S, backend: str | None = None) -> Iterator[World]:
    """Join the processes of torchrun as ``with processes() as world:``; without torchrun it is a world of one.

    ``backend`` None is NCCL with GPUs (and gloo for tensors on the CPU), else gloo. A rank that waits longer than
    ``timeout_s`` for the others raises :class:`LostRankError`, and one whose connection to another breaks does so at
    once; under NCCL torch's watchdog ends the process after that time. Make it longer than anything that a rank does
    alone, such as an evaluation on rank 0.
    """
    if not 0.0 < timeout_s < float("inf"):
        raise ValueError(f"timeout_s must be a finite number of seconds greater than 0, got {timeout_s}")
    if dist.is_initialized():
        raise ValueError("torch.distributed is initialised already; use its process group as it is")
    has_gpus = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if has_gpus else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    try:
        with explained("an exchange with"):
            yield world
    except BaseException:
        # With a rank lost, taking leave of it could wait for it once more; alone there is nobody to wait for.
        if world.size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
