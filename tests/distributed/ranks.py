"""Processes for tests: forked from a server that has imported torch once, joined by gloo over a file.

A worker is a function of a module of the tests; it runs on every rank, asserts, and returns plain values.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 60.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "torch._dynamo",
        "sigsoftmax.distributed",
        "sigsoftmax.lm.parallel.strategies",
        "tests.tables",
    ]
)


def start(entry: Callable[..., None], size: int, *arguments: Any) -> list[Any]:
    """Processes that run ``entry(rank, size, *arguments)``."""
    processes = [_context.Process(target=entry, args=(rank, size, *arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    return processes


def end(processes: list[Any], within_s: float) -> list[int | None]:
    """Their exit codes; None for one that had to be killed because it was still running."""
    deadline = time.monotonic() + within_s
    codes = []
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        codes.append(process.exitcode)
        if process.exitcode is None:
            process.kill()
            process.join()
    return codes


def _rank(
    rank: int, size: int, worker: Callable[..., Any], meeting: str, connections: list[Connection], arguments: Any
) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S)
        )
        result = worker(*arguments)
        dist.barrier()
        dist.destroy_process_group()
        connections[rank].send((result, None))
    except BaseException:
        connections[rank].send((None, traceback.format_exc()))
        raise
    finally:
        connections[rank].close()


def on_ranks(folder: Path, size: int, worker: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of ``worker(*arguments)`` on every rank of a group; fails with the first rank's traceback."""
    pipes = [_context.Pipe(duplex=False) for _ in range(size)]
    meeting = f"file://{folder / f'meeting-{os.getpid()}-{time.monotonic_ns()}'}"
    processes = start(_rank, size, worker, meeting, [sending for _, sending in pipes], arguments)
    deadline = time.monotonic() + 2 * TIMEOUT_S
    results, failures = [], []
    for rank, (receiving, sending) in enumerate(pipes):
        sending.close()
        result, failure = None, "no answer"
        if receiving.poll(max(0.0, deadline - time.monotonic())):
            try:
                result, failure = receiving.recv()
            except EOFError:
                failure = "it ended without a word"
        results.append(result)
        if failure:
            failures.append(f"rank {rank} of {size}:\n{failure}")
    end(processes, 10.0)
    # A rank that lost another tells less than the one that failed.
    failures.sort(key=lambda text: "LostRankError" in text)
    assert not failures, "\n".join(failures)
    return results
