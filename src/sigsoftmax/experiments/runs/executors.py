"""Executors train several runs: in turns on one device, or on a CPU in processes of one thread each, which small models
use better; :mod:`~sigsoftmax.experiments.runs.ray_executor` has the one for a cluster.

What is done with a run that has ended (evaluating it, measuring it) is done where it was trained. Where the processes
of torchrun have made it together, the first one does it and tells the others.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import torch

from sigsoftmax._version import install_extra
from sigsoftmax.experiments.runs.distributed_launch import launched_processes
from sigsoftmax.experiments.runs.folder_locks import FolderLock
from sigsoftmax.experiments.runs.run import Resources, Run
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.training.interruption import OutOfTime, SoftStop
from sigsoftmax.lm.training.progress import Diverged, Progress
from sigsoftmax.lm.training.trainer import PART, Trainer, run_together
from sigsoftmax.terminal import escape_output

__all__ = ["After", "Executor", "Failed", "InProcesses", "InTurns", "Watch", "train_alone", "train_runs"]

R = TypeVar("R", bound=Run)
T = TypeVar("T")
After = Callable[[R, Corpus, Resources], T]
"""a function that is called with a run that has ended: one of a module, since it may run in another process"""
Watch = Callable[[Run, Progress], None]

TELL_SECONDS = 0.2
"""least time between two messages of a process about its updates"""
LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Failed:
    """The reason why a run did not come through."""

    reason: str


class Executor(Protocol):
    """Trains all runs, each from where it was left, and yields each with what ``after`` makes of it, or why it failed.

    Asked to stop, all save and KeyboardInterrupt is raised. The folder of each run is held while it is worked on.
    """

    def run(self, runs: Sequence[R], after: After[R, T]) -> Iterator[tuple[R, T | Failed]]: ...


def train_runs(
    runs: Sequence[R],
    resources: Resources,
    after: After[R, T],
    watch: Watch = lambda *_: None,
    *,
    until: float = math.inf,
) -> Iterator[tuple[R, T]]:
    """Train all runs on this machine, each from where it was left, and yield each with what ``after`` makes of it.

    Asked to stop, all save and KeyboardInterrupt is raised, with what is to be said of runs that have diverged; at
    ``until``, a time of the monotonic clock, all save and OutOfTime is raised. A run that diverges stops alone; that is
    raised when the others have ended.

    The folder of each run is held while it is worked on: one that another process holds raises
    :class:`~sigsoftmax.experiments.runs.folder_locks.Busy`.
    """
    if find_spec("safetensors") is None:
        raise ValueError(f"runs are kept with safetensors: {install_extra('lm')}")
    if resources.parallel is None and (launched_processes() or 1) > 1:
        raise ValueError(
            "several processes of torchrun would all write the same runs; start this with python alone, and use "
            "torchrun with 'train' and 'finetune', whose processes share a run"
        )
    is_divided = resources.at_once > 1 and len(runs) > 1 and torch.device(resources.device).type == "cpu"
    executor: Executor = (InProcesses if is_divided else InTurns)(resources, watch, until)
    failures: list[str] = []
    try:
        for run, outcome in executor.run(runs, after):
            if isinstance(outcome, Failed):
                failures.append(outcome.reason)
            else:
                yield run, outcome
    except OutOfTime:
        # A run that broke is told first: whoever gave the time knows by the clock that it is over.
        if not failures:
            raise
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(*failures, *stop.args) from None
    if failures:
        raise Diverged(failures[0])


def train_alone(
    run: Run, corpus: Corpus, resources: Resources, watch: Callable[[Trainer, Progress], None] = lambda *_: None
) -> None:
    """Train one run to its end, from where it was left."""
    for _ in run_together([run.trainer(corpus, resources)], watch):
        pass


@dataclass(frozen=True)
class _Local:
    """An executor on this machine."""

    resources: Resources
    watch: Watch
    until: float
    """time of the monotonic clock at which all save and OutOfTime is raised"""


# --- one process ------------------------------------------------------------------------------------------------------


class InTurns(_Local):
    """Runs that share one device in this process: as many together as the resources say."""

    def run(self, runs: Sequence[R], after: After[R, T]) -> Iterator[tuple[R, T | Failed]]:
        waiting, corpus_of = deque(runs), cache(self.resources.corpus)
        together: dict[Trainer, R] = {}

        def watch(trainer: Trainer, progress: Progress) -> None:
            self.watch(together[trainer], progress)

        def ended(run: R) -> tuple[R, T]:
            return run, self._by_first(lambda: after(run, corpus_of(run.recipe.corpus), self.resources))

        while waiting:
            with ExitStack() as held:
                while waiting and len(together) < self.resources.at_once:
                    run = waiting.popleft()
                    held.enter_context(self._held(run))
                    trainer = run.trainer(corpus_of(run.recipe.corpus), self.resources)
                    if trainer.finished:
                        yield ended(run)
                    else:
                        together[trainer] = run
                try:
                    for trainer in run_together(list(together), watch, until=self.until):
                        yield ended(together.pop(trainer))
                except Diverged as error:
                    failed = Failed(f"{' and '.join(run.name for run in together.values())}: {error}")
                    while together:
                        yield together.popitem()[1], failed

    def _by_first(self, act: Callable[[], T]) -> T:
        """The result of an act that, where processes share the run, the first one does and tells the others."""
        if self.resources.parallel is None:
            return act()
        from sigsoftmax.lm.parallel.strategies import broadcast_from_first

        return broadcast_from_first(act)

    @contextmanager
    def _held(self, run: Run) -> Iterator[None]:
        """Hold the folder of a run; processes that share it all raise what refuses their first one."""
        with ExitStack() as stack:

            def take() -> OSError | None:
                try:
                    stack.enter_context(FolderLock(run.folder))
                except OSError as error:
                    return error
                return None

            refusal = self._by_first(take)
            if refusal is not None:
                raise refusal
            yield


# --- several processes ------------------------------------------------------------------------------------------------


class InProcesses(_Local):
    """Runs on a CPU, each in a process of one thread."""

    def run(self, runs: Sequence[R], after: After[R, T]) -> Iterator[tuple[R, T | Failed]]:
        for name in {run.recipe.corpus for run in runs}:
            # A corpus that is missing is told before processes are started.
            self.resources.corpus(name)
        context = multiprocessing.get_context("spawn")
        stop, told = context.Event(), context.SimpleQueue()
        workers = min(self.resources.at_once, len(runs))
        with (
            SoftStop() as asked,
            ProcessPoolExecutor(workers, context, _begin_worker, (self.resources, stop, told)) as pool,
        ):
            futures: dict[Future[T], R] = {pool.submit(_work, run, after): run for run in runs}
            try:
                while futures:
                    done, _ = wait(futures, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED)
                    while not told.empty():
                        self.watch(*told.get())
                    if asked.asked:
                        raise KeyboardInterrupt
                    if futures.keys() - done and time.monotonic() >= self.until:
                        raise OutOfTime
                    for future in done:
                        run = futures.pop(future)
                        try:
                            yield run, future.result()
                        except Diverged as error:
                            yield run, Failed(f"{run.name}: {error}")
            except BrokenProcessPool:
                raise OSError(
                    "a process that trained ended by itself, perhaps for want of memory; the same command goes on from "
                    "the last checkpoints"
                ) from None
            except BaseException as error:
                # They save, and take no further run.
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                diverged = _diverged_at_end(list(futures), told)
                if isinstance(error, KeyboardInterrupt):
                    raise KeyboardInterrupt(*diverged) from None
                raise


def _diverged_at_end(futures: Sequence[Future[Any]], told: Any) -> list[str]:
    """Wait for processes that were asked to stop; returns the errors of runs that could not be saved any more."""
    while any(future.running() for future in futures):
        while not told.empty():
            told.get()
        time.sleep(LOOK_SECONDS)
    errors = [future.exception() for future in futures if future.done() and not future.cancelled()]
    return [str(error) for error in errors if isinstance(error, Diverged)]


_worker: tuple[Resources, Any, Any, Callable[[str], Corpus]] | None = None


def _begin_worker(resources: Resources, stop: Any, told: Any) -> None:
    global _worker
    # What it prints, as warnings about records, is not printed by the command that started it.
    escape_output()
    # Ctrl-C reaches every process of a terminal; the first one decides, and tells the others by `stop`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _worker = resources, stop, told, cache(resources.corpus)


def _end_with_parent() -> None:
    """End this process with the one that started it: it must not go on writing where the next attempt writes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _work(run: R, after: After[R, T]) -> T:
    assert _worker is not None
    resources, stop, told, corpus_of = _worker
    last = 0.0

    def watch(trainer: Trainer, progress: Progress) -> None:
        nonlocal last
        is_news = progress.record is not None or progress.update % PART == 0
        if is_news or time.monotonic() - last >= TELL_SECONDS:
            last = time.monotonic()
            told.put((run, progress))
        if stop.is_set():
            trainer.save()
            raise KeyboardInterrupt

    if stop.is_set():
        raise KeyboardInterrupt
    with FolderLock(run.folder):
        corpus = corpus_of(run.recipe.corpus)
        train_alone(run, corpus, resources, watch)
        return after(run, corpus, resources)
