"""The processes of torchrun, which make one run together; without torchrun there is one process and nothing to join."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from sigsoftmax.experiments.runs.run import Resources

__all__ = ["launched_processes", "process_group"]


def launched_processes() -> int | None:
    """The number of processes that torchrun has started; None if it was not torchrun that started this one."""
    if "RANK" not in os.environ:
        return None
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def process_group(resources: Resources) -> Iterator[tuple[Resources, bool]]:
    """The resources of this process among those of torchrun, and whether it is the one that prints.

    A process that is lost makes the others raise ConnectionError.
    """
    if launched_processes() is None:
        if resources.parallel is not None:
            raise ValueError(
                f"parallel {resources.parallel!r} divides a run over processes, and there is one; start them with "
                "torchrun --standalone --nproc-per-node 2 -m sigsoftmax train ..."
            )
        yield resources, True
        return
    if resources.at_once > 1:
        raise ValueError(f"the processes of torchrun make one run at a time, got at_once {resources.at_once}")
    device = torch.device(resources.device)
    if device.type == "cuda" and device.index is not None:
        raise ValueError(
            f"each process of torchrun takes a GPU of its own, and {resources.device!r} was asked for; leave the "
            "device out, and choose GPUs with CUDA_VISIBLE_DEVICES"
        )
    # The communication libraries take their time to be imported.
    from sigsoftmax.distributed import LostRankError, processes

    try:
        with processes() as world:
            own = world.device if device.type == "cuda" else device
            yield replace(resources, parallel=resources.parallel or "ddp", device=str(own)), world.is_first
            # A model that waits to be collected holds on to the processes, and with them to threads that must have
            # ended before the interpreter does.
            gc.collect()
    except LostRankError as error:
        raise ConnectionError(f"{error}. The same command goes on from the last checkpoint") from error
