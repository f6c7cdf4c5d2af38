"""Times, memory and captured graphs of the machine under the GPU benchmark; and a CPU that stands in for it.

With ``--smoke`` all cases run on tiny inputs on the CPU, so that their code has run before it meets a device. Nothing
is measured then: a graph is the step itself, and torch.compile traces without compiling.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from measuring import (
    Case,
    Measurement,
    Products,
    Step,
    cpu_milliseconds,
    cpu_peak_mib,
    gpu_milliseconds,
    gpu_peak_mib,
    take_turns,
)
from torch import Tensor

SUITE = "gpu"


def gpu_case(name: str, baseline: str, implementations: Mapping[str, Step], targets: Mapping[str, str]) -> Case:
    return Case(suite=SUITE, name=name, baseline=baseline, implementations=implementations, targets=targets)


class Replay(Products):
    """A step captured in a CUDA graph; its memory is the graph's own, and its gradients stay there."""


@dataclass(frozen=True)
class Machine:
    """A CUDA device, or the CPU in its place."""

    device: str

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        if self.is_cuda:
            torch.cuda.empty_cache()

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        # For its shapes alone: a second one would otherwise be compiled, and judged, for any shape.
        return torch.compile(function, dynamic=False, backend="inductor" if self.is_cuda else "eager")

    def captured(self, step: Step) -> Replay:
        """The step as a graph: the device's time without the host's."""
        if not self.is_cuda:
            return Replay(lambda: step() or torch.empty(0), [])
        step()  # compiles kernels, which cannot be done while a stream is captured
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        # The graph writes to memory that belongs to the step.
        return Replay(lambda step=step: graph.replay() or torch.empty(0), [])

    def graphs(self, steps: Mapping[str, Step]) -> dict[str, Step]:
        """Steps as graphs, under names that say so."""
        return {f"{name} in a CUDA graph": self.captured(step) for name, step in steps.items()}

    def milliseconds_of(self, run: Callable[[], object]) -> float:
        return gpu_milliseconds(run) if self.is_cuda else cpu_milliseconds(run)

    def peak_mib(self, step: Step) -> float | None:
        if isinstance(step, Replay):
            return None
        return gpu_peak_mib(step) if self.is_cuda else cpu_peak_mib(step)

    def host_microseconds(self, run: Callable[[], object], calls: int = 30) -> float:
        """Median time until a call returns, with nothing before it in the queue of the device."""
        times = []
        for _ in range(calls if self.is_cuda else 2):
            self.synchronize()
            start = time.perf_counter()
            run()
            times.append(1e6 * (time.perf_counter() - start))
        self.synchronize()
        return statistics.median(times)

    def measured(
        self,
        case: Case,
        rounds: int,
        *,
        errors: Mapping[str, Mapping[str, float]] | None = None,
        not_counted_mib: float = 0.0,
        without_peak: tuple[str, ...] = (),
        has_host_times: bool = False,
    ) -> list[Measurement]:
        """Times of a case taken in turns; ``not_counted_mib`` of memory are known and not of interest."""
        peaks = {
            name: None if name in without_peak else self.peak_mib(step) for name, step in case.implementations.items()
        }
        host = {}
        if has_host_times:
            host = {name: self.host_microseconds(step) for name, step in case.implementations.items()}
        return take_turns(
            case,
            rounds=rounds if self.is_cuda else 2,
            milliseconds_of=self.milliseconds_of,
            peak_mib={name: None if peak is None else max(0.0, peak - not_counted_mib) for name, peak in peaks.items()},
            gradient_errors=errors,
            host_microseconds=host,
        )


@contextlib.contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """The arithmetic of products of float32 matrices: `highest` (float32) or `high` (TF32)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
