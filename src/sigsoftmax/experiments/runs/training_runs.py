"""Several runs: in turns on one device, or on a CPU in processes of one thread each, which small models use better.

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
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from sigsoftmax._version import install_extra
from sigsoftmax.experiments.runs.distributed_launch import started_processes
from sigsoftmax.experiments.runs.folder_locks import FolderLock
from sigsoftmax.experiments.runs.run import Resources, Run
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.training.interruption import OutOfTime, SoftStop
from sigsoftmax.lm.training.trainer import PART, Diverged, Progress, Trainer, run_together
from sigsoftmax.terminal import escape_output

__all__ = ["After", "Watch", "train_runs"]

T = TypeVar("T")
After = Callable[[Run, Corpus, Resources], T]
"""What is done with a run that has ended; a function of a module, since it may run in another process"""
Watch = Callable[[Run, Progress], None]

TELL_SECONDS = 0.2
"""between two words of a process about its updates"""
LOOK_SECONDS = 0.1


def train_runs(
    runs: Sequence[Run],
    resources: Resources,
    after: After[T],
    watch: Watch = lambda *_: None,
    *,
    until: float = math.inf,
) -> Iterator[tuple[Run, T]]:
    """Train all runs, each from where it was left, and yield each with what ``after`` makes of it.

    Asked to stop, all save and KeyboardInterrupt is raised, with what is to be said of runs that have diverged; at
    ``until``, a time of the monotonic clock, all save and OutOfTime is raised. A run that diverges stops alone; that is
    raised when the others have ended.

    The folder of each run is held while it is worked on: one that another process holds raises
    :class:`~sigsoftmax.experiments.runs.folder_locks.Busy`.
    """
    if find_spec("safetensors") is None:
        raise ValueError(f"runs are kept with safetensors: {install_extra('lm')}")
    if resources.parallel is None and (started_processes() or 1) > 1:
        raise ValueError(
            "several processes of torchrun would all write the same runs; start this with python alone, and use "
            "torchrun with 'train' and 'finetune', whose processes share a run"
        )
    if resources.parallel is not None:
        after = _by_the_first(after)
    if resources.at_once > 1 and len(runs) > 1 and torch.device(resources.device).type == "cpu":
        yield from _in_processes(runs, resources, after, watch, until)
    else:
        yield from _in_turns(runs, resources, after, watch, until)


# --- one process ------------------------------------------------------------------------------------------------------


def _in_turns(
    runs: Sequence[Run], resources: Resources, after: After[T], watch: Watch, until: float
) -> Iterator[tuple[Run, T]]:
    corpora = _Corpora(resources)
    waiting, errors = deque(runs), list[Diverged]()
    while waiting:
        together: dict[Trainer, Run] = {}
        with ExitStack() as held:
            while waiting and len(together) < resources.at_once:
                run = waiting.popleft()
                held.enter_context(_held(run, resources))
                trainer = run.trainer(corpora[run], resources)
                if trainer.finished:
                    yield run, after(run, corpora[run], resources)
                else:
                    together[trainer] = run
            left = dict(together)
            try:
                for trainer in run_together(
                    list(together),
                    lambda trainer, progress, together=together: watch(together[trainer], progress),  # type: ignore[misc]
                    until=until,
                ):
                    run = left.pop(trainer)
                    yield run, after(run, corpora[run], resources)
            except Diverged as error:
                errors.append(Diverged(f"{' and '.join(run.name for run in left.values())}: {error}"))
            except OutOfTime:
                # A run that broke is told first: whoever gave the time knows by the clock that it is over.
                if errors:
                    break
                raise
            except KeyboardInterrupt as stop:
                raise KeyboardInterrupt(*map(str, errors), *stop.args) from None
    if errors:
        raise errors[0]


@contextmanager
def _held(run: Run, resources: Resources) -> Iterator[None]:
    """Hold the folder of a run. For the processes that share the run their first one takes it, and tells the others."""
    with ExitStack() as stack:
        if resources.parallel is None:
            stack.enter_context(FolderLock(run.folder))
            yield
            return
        from sigsoftmax.lm.parallel.strategies import broadcast_from_first

        def take() -> OSError | None:
            try:
                stack.enter_context(FolderLock(run.folder))
            except OSError as error:
                return error
            return None

        refusal = broadcast_from_first(take)
        if refusal is not None:
            raise refusal
        yield


def _by_the_first(after: After[T]) -> After[T]:
    from sigsoftmax.lm.parallel.strategies import broadcast_from_first

    return lambda run, corpus, resources: broadcast_from_first(lambda: after(run, corpus, resources))


class _Corpora:
    """Each text read once."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._known: dict[str, Corpus] = {}

    def __getitem__(self, run: Run) -> Corpus:
        name = run.recipe.corpus
        if name not in self._known:
            self._known[name] = self._resources.corpus(name)
        return self._known[name]


# --- several processes ------------------------------------------------------------------------------------------------


def _in_processes(
    runs: Sequence[Run], resources: Resources, after: After[T], watch: Watch, until: float
) -> Iterator[tuple[Run, T]]:
    for name in {run.recipe.corpus for run in runs}:
        # A corpus that is missing is told before processes are started.
        resources.corpus(name)
    context = multiprocessing.get_context("spawn")
    stop, told = context.Event(), context.SimpleQueue()
    errors: list[Diverged] = []
    workers = min(resources.at_once, len(runs))
    with (
        SoftStop() as asked,
        ProcessPoolExecutor(workers, context, _begin_worker, (resources, stop, told)) as pool,
    ):
        futures: dict[Future[T], Run] = {pool.submit(_work, run, after): run for run in runs}
        try:
            while futures:
                done, _ = wait(futures, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED)
                while not told.empty():
                    watch(*told.get())
                if asked.asked:
                    raise KeyboardInterrupt
                if futures.keys() - done and time.monotonic() >= until:
                    raise errors[0] if errors else OutOfTime
                for future in done:
                    run = futures.pop(future)
                    try:
                        yield run, future.result()
                    except Diverged as error:
                        errors.append(Diverged(f"{run.name}: {error}"))
        except BrokenProcessPool:
            raise OSError(
                "a process that trained ended by itself, perhaps for want of memory; the same command goes on from the "
                "last checkpoints"
            ) from None
        except BaseException as error:
            # They save, and take no further run.
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            while any(future.running() for future in futures):
                while not told.empty():
                    told.get()
                time.sleep(LOOK_SECONDS)
            if isinstance(error, KeyboardInterrupt):
                errors += [diverged for future in futures if (diverged := _divergence(future)) is not None]
                raise KeyboardInterrupt(*map(str, errors)) from None
            raise
    if errors:
        raise errors[0]


def _divergence(future: Future[Any]) -> Diverged | None:
    """The error of a run that could not be saved any more when it was asked to stop."""
    error = future.exception() if future.done() and not future.cancelled() else None
    return error if isinstance(error, Diverged) else None


_worker: tuple[Resources, Any, Any, _Corpora] | None = None


def _begin_worker(resources: Resources, stop: Any, told: Any) -> None:
    global _worker
    # What it prints, as warnings about records, is not printed by the command that started it.
    escape_output()
    # Ctrl-C reaches every process of a terminal; the first one decides, and tells the others by `stop`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _worker = resources, stop, told, _Corpora(resources)


def _end_with_parent() -> None:
    """A process whose first one was killed must not go on writing where the next attempt writes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _work(run: Run, after: After[T]) -> T:
    assert _worker is not None
    resources, stop, told, corpora = _worker
    if stop.is_set():
        raise KeyboardInterrupt
    with FolderLock(run.folder):
        return _trained(run, after, resources, stop, told, corpora[run])


def _trained(run: Run, after: After[T], resources: Resources, stop: Any, told: Any, corpus: Corpus) -> T:
    trainer = run.trainer(corpus, resources)
    last = 0.0

    def watch(_: Trainer, progress: Progress) -> None:
        nonlocal last
        is_news = progress.record is not None or progress.update % PART == 0
        if is_news or time.monotonic() - last >= TELL_SECONDS:
            last = time.monotonic()
            told.put((run, progress))
        if stop.is_set():
            trainer.save()
            raise KeyboardInterrupt

    for _ in run_together([trainer], watch):
        pass
    return after(run, corpus, resources)
