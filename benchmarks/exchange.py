"""Time of a vocabulary-parallel loss and the bytes that it exchanges, on two processes of this machine over gloo.

    python benchmarks/exchange.py

Beside it stand the same loss in one process, and what one would first write: each process computes the logits of its
classes, all logits are gathered, and torch's loss is taken of them. Each process has one thread. Writes records to
benchmarks/records/distributed, from which `make bench-docs` makes the table of docs/distributed.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring import RECORDS, Case, Measurement, Step, cpu_peak_mib, environment, table, take_turns
from torch import Tensor
from torch.nn import functional as F

import sigsoftmax
from sigsoftmax import distributed, records
from sigsoftmax.distributed import exchange

SUITE = "distributed"
OUT = RECORDS / SUITE / "cpu.jsonl"
PROCESSES = 2


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of every tensor that this process hands to a gather or a reduction."""
    sizes: list[int] = []
    # Ours gathers by a function of its own, which stands for the one that torch recommends in each version.
    gather, reduce, gather_list = exchange._gather_into, dist.all_reduce, dist.all_gather

    def count(tensor: Tensor) -> None:
        sizes.append(tensor.numel() * tensor.element_size())

    def counting_gather(every: Tensor, own: Tensor, **keywords: Any) -> Any:
        count(own)
        return gather(every, own, **keywords)

    def counting_reduce(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
        count(tensor)
        return reduce(tensor, *arguments, **keywords)

    def counting_list(every: list[Tensor], own: Tensor, **keywords: Any) -> Any:
        count(own)
        return gather_list(every, own, **keywords)

    with (
        mock.patch.object(exchange, "_gather_into", counting_gather),
        mock.patch.object(dist, "all_reduce", counting_reduce),
        mock.patch.object(dist, "all_gather", counting_list),
    ):
        yield sizes


class GatheredLogits(torch.autograd.Function):
    """The logits of all classes on every process; backward each takes the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, own_NV: Tensor) -> Tensor:
        every = [torch.empty_like(own_NV) for _ in range(PROCESSES)]
        dist.all_gather(every, own_NV.contiguous())
        return torch.cat(every, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].chunk(PROCESSES, dim=-1)[dist.get_rank()]


class SummedGradient(torch.autograd.Function):
    """The same hidden vectors; backward the parts of their gradient are added over the processes."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous()
        dist.all_reduce(total)
        return total


class Elsewhere(Step):
    """A step that another process takes."""

    def __call__(self) -> None:
        return


def steps(tokens: int, features: int, classes: int, components: int) -> dict[str, Step]:
    """The implementations, on the ranks that take part in them."""
    shards = distributed.ClassShards.even(classes)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, components, features, generator=generator)
    prior = torch.randn(tokens, components, generator=generator)
    weight = torch.randn(classes, features, generator=generator) / features**0.5
    target = torch.randint(classes, (tokens,), generator=generator)
    is_mixture = components > 1
    hidden = hidden if is_mixture else hidden[:, 0]
    leaves = [hidden.requires_grad_(), *([prior.requires_grad_()] if is_mixture else [])]
    whole, own = weight.clone().requires_grad_(), weight[shards.own].clone().requires_grad_()
    name = "MoSS" if is_mixture else "sigsoftmax"

    def ours(module: Any, part: Tensor, **options: Any) -> Tensor:
        if is_mixture:
            return module.mixture_cross_entropy(hidden, prior, part, target, function="sigsoftmax", **options)
        return module.linear_cross_entropy(hidden, part, target, function="sigsoftmax", **options)

    def gathered() -> Tensor:
        z = GatheredLogits.apply(SummedGradient.apply(hidden) @ own.t())
        return F.cross_entropy(z + F.logsigmoid(z), target)

    found: dict[str, Step] = {
        f"ours {name}, one process": Step(lambda: ours(sigsoftmax, whole), [*leaves, whole]),
        f"ours {name}, {PROCESSES} processes": Step(lambda: ours(distributed, own, shards=shards), [*leaves, own]),
    }
    if dist.get_rank():
        found[f"ours {name}, one process"] = Elsewhere(whole.sum, [])
    if not is_mixture and classes % PROCESSES == 0:
        found[f"torch, logits gathered, {PROCESSES} processes"] = Step(gathered, [*leaves, own])
    return found


def milliseconds(run: Callable[[], object]) -> float:
    """Until all processes have ended the step."""
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return 1e3 * (time.perf_counter() - start)


def measured(shape: tuple[int, int, int, int], rounds: int) -> list[Measurement]:
    tokens, features, classes, components = shape
    kind, mixture = ("mixture", f" K={components}") if components > 1 else ("linear", "")
    implementations = steps(tokens, features, classes, components)
    exchanged: dict[str, int] = {}
    peaks: dict[str, float | None] = {}
    for name, step in implementations.items():
        with counted() as sizes:
            step()
        exchanged[name] = sum(sizes)
        peaks[name] = None if isinstance(step, Elsewhere) else cpu_peak_mib(step)
        dist.barrier()
    case = Case(
        suite=SUITE,
        name=f"{kind} cross-entropy over gloo, N={tokens}{mixture} d={features} V={classes}",
        baseline=next(iter(implementations)),
        implementations=implementations,
        targets={},
    )
    results = take_turns(case, rounds=rounds, milliseconds_of=milliseconds, peak_mib=peaks)
    return [dataclasses.replace(m, exchanged_bytes=exchanged[m.implementation]) for m in results]


def worker(rank: int, folder: str, shapes: Sequence[tuple[int, int, int, int]], rounds: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    try:
        for shape in shapes:
            found = measured(shape, rounds)
            if rank == 0:
                print(f"\n{found[0].case}\n{table(found)}", flush=True)
                if out:
                    where = environment()
                    records.append(Path(out), [records.Record.of(m, where) for m in found])
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default: 9)")
    parser.add_argument("--smoke", action="store_true", help="tiny cases, to see that it works; writes no records")
    parser.add_argument("--out", type=Path, default=OUT, help="file of the records, written anew")
    options = parser.parse_args(arguments)
    full: Mapping[bool, list[tuple[int, int, int, int]]] = {
        True: [(8, 4, 50, 1), (8, 4, 50, 3)],
        False: [(512, 256, 32_000, 1), (512, 256, 128_000, 1), (256, 256, 32_000, 4)],
    }
    out = "" if options.smoke else str(options.out)
    if out:
        options.out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder, full[options.smoke], options.rounds, out), nprocs=PROCESSES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
