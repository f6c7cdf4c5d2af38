"""Calls that a GPU repeats: run once as they are, then captured in a CUDA graph and replayed.

A call that is captured must read and write tensors that stay where they are, draw random numbers from the generator
given here alone, and not look at a value on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["RepeatedCalls", "new_stream", "on_stream"]


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream of its own on a GPU; None on other devices, which have none."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Give work to that stream; None: as it is. (A ``torch.cuda.stream(None)`` would initialise CUDA for a CPU run.)"""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class RepeatedCalls:
    """One graph per key, captured the second time the key is met: the first run warms up what is allocated lazily.

    All graphs share one pool of memory, since only one of them runs at a time. On other devices, or with
    ``capture=False``, a call is a call.
    """

    def __init__(self, device: torch.device, generator: torch.Generator | None = None, *, capture: bool = True) -> None:
        self._captures = capture and device.type == "cuda"
        self._generator = generator
        self._met: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None

    def __call__(self, key: Hashable, function: Callable[[], None]) -> None:
        if not self._captures or key not in self._met:
            self._met.add(key)
            function()
            return
        if key not in self._graphs:
            self._graphs[key] = self._captured(function)
        self._graphs[key].replay()

    def _captured(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if self._generator is not None:
            graph.register_generator_state(self._generator)
        # Not torch.cuda.graph: each time it collects garbage, empties the allocator's cache, and waits for all that the
        # device has to do, where other runs can go on meanwhile.
        torch.cuda.current_stream().synchronize()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            function()
        finally:
            graph.capture_end()
        return graph

    def forget(self) -> None:
        """Drop all graphs: the calls have changed."""
        self._met.clear()
        self._graphs.clear()
        # The pool goes with its last graph, and its handle cannot be used again.
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
