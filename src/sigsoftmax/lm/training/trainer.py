"""Training: epochs of updates, validation, the switch to averaging, the best weights, checkpoints, records.

There is one loop. Finetuning is another :class:`TrainingConfig` that starts from the best weights of training.

A run lives in a folder of its own: ``last.safetensors`` is all it needs to go on, ``best.safetensors`` the model it has
found, ``records.jsonl`` what it measured. A run that is killed goes on from its last checkpoint; on a CPU it ends in
the same bits as if nothing had happened.

A run is advanced step by step from outside, so that several can share one GPU. Or it is divided over processes
(``parallel``): then each of them has a trainer, all do the same at the same time, and the first one writes the files,
which hold the whole run, for any number of processes to go on with.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sigsoftmax.lm.config import LARGEST, Recipe
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.data.windows import batchify
from sigsoftmax.lm.recurrence import RecurrenceFailed
from sigsoftmax.lm.saving import checkpoints
from sigsoftmax.lm.saving.saved_models import first_not_finite
from sigsoftmax.lm.training.capture import new_stream, on_stream
from sigsoftmax.lm.training.evaluation import Evaluation, Evaluator
from sigsoftmax.lm.training.interruption import OutOfTime, SoftStop
from sigsoftmax.lm.training.options import Phase, TrainerOptions, resolve_device
from sigsoftmax.lm.training.precision import resolve_evaluation_precision
from sigsoftmax.lm.training.progress import Diverged, Progress
from sigsoftmax.lm.training.run_state import RunState
from sigsoftmax.records import Environment, Record, append
from sigsoftmax.records.schemas.training import EpochRecord

__all__ = ["Diverged", "Phase", "Progress", "Trainer", "TrainerOptions", "resolve_device", "run_together"]

PART = 200
"""updates whose losses are averaged for a look at training"""
IN_FLIGHT = 8
"""updates given to a GPU before the host waits for it: enough to hide the host, few enough to stay in step"""


class Trainer:
    """One phase of one run, new or as its folder has it."""

    def __init__(
        self, recipe: Recipe, corpus: Corpus, folder: str | Path, options: TrainerOptions | None = None
    ) -> None:
        self.options = options = TrainerOptions() if options is None else options
        self.last_path, self.best_path, self.records_path = (
            Path(folder) / name for name in ("last.safetensors", "best.safetensors", "records.jsonl")
        )
        device = resolve_device(options.device)
        self._evaluation_precision = resolve_evaluation_precision(options.evaluation_precision, device)
        self._stream = new_stream(device)
        self._saved_position: str | None = None
        """position in ``last.safetensors``; None where there is none"""
        self._saved_best: int | None = None
        """the epoch of ``best.safetensors``"""
        self._divergence: Diverged | None = None
        self._began = self._saved = time.monotonic()
        with on_stream(self._stream):
            self.state = state = RunState(recipe, corpus, options)
            self.model, self.identity = state.model, state.identity
            self._evaluator = Evaluator(
                state.model,
                batchify(corpus.valid, state.config.evaluation_batch),
                precision=self._evaluation_precision,
                parallel=state.parallel,
            )
            is_begun = self.last_path.exists()
            # All or none: going on takes exchanges between processes.
            state.parallel.check_same([int(is_begun)], str(self.last_path))
            if is_begun:
                self._resume()
            elif state.parallel.is_first:
                # A run that died before its first checkpoint begins anew, and its epochs would be recorded twice.
                self.records_path.unlink(missing_ok=True)
            state.parallel.check_same([state.epoch, state.row, state.update], str(self.last_path))
        self._events = self._run()

    def _resume(self) -> None:
        saved = self.state.restore(checkpoints.load(self.last_path), self.last_path)
        self._note_saved()
        # Epochs after the checkpoint are trained again, and would be recorded twice.
        if self.state.parallel.is_first and self._records_bytes() > saved.records_bytes:
            with self.records_path.open("rb+") as file:
                file.truncate(saved.records_bytes)

    @property
    def finished(self) -> bool:
        return self.state.stale or self.state.epoch > self.state.config.epochs

    def advance(self) -> Progress | None:
        """Do a little: give an update to the device, or look whether it is ready (None). StopIteration at the end."""
        with on_stream(self._stream):
            return next(self._events)

    def run(self, watch: Callable[[Progress], None] = lambda _: None) -> None:
        """Train to the end. Asked to stop, it saves a checkpoint and raises KeyboardInterrupt."""
        for _ in run_together([self], lambda _, progress: watch(progress)):
            pass

    def save(self) -> None:
        """Write checkpoints of where the run stands. Refused once it has diverged: what is saved is finite."""
        if self._divergence is not None:
            raise self._divergence
        state = self.state
        with on_stream(self._stream):
            self._check_losses()
            best = state.parallel.whole(state.best)
            tensors = state.tensors(best)
            self._check_finite(tensors)
            self._save_best(best)
            if state.parallel.is_first:
                running = time.monotonic() - self._began if state.update else 0.0
                seconds = state.seconds + running
                checkpoints.save(
                    self.last_path, tensors, state.meta(seconds=seconds, records_bytes=self._records_bytes())
                )
            state.parallel.wait_for_first()
        self._note_saved()
        self._saved = time.monotonic()

    def _save_best(self, best: Mapping[str, Tensor]) -> None:
        if best and self.state.parallel.is_first:
            checkpoints.save(self.best_path, best, self.state.model_meta())

    def _note_saved(self) -> None:
        self._saved_position = self.state.position
        self._saved_best = self.state.best_epoch if self.state.best else None

    def _records_bytes(self) -> int:
        return self.records_path.stat().st_size if self.records_path.exists() else 0

    def _run(self) -> Generator[Progress | None, None, None]:
        state = self.state
        if not self.finished:
            yield dataclasses.replace(self._progress(state.row, None), note=state.describe_recurrence())
        if state.phase == "finetune" and not state.best:
            evaluation = yield from self._validated()
            state.keep_best(evaluation.loss_over_rows, epoch=0)
        while not self.finished:
            if state.update == 0:
                state.updater.begin_epoch()
                state.seconds = 0.0
            yield from self._updates()
            yield from self._validate(state.seconds + time.monotonic() - self._began)
            if self.finished or self._save_is_due():
                self.save()
        if not self.last_path.exists():
            self.save()

    def _updates(self) -> Generator[Progress | None, None, None]:
        self._began = time.monotonic()
        state = self.state
        first_row, in_flight, loss = state.row, deque[torch.cuda.Event](), None
        for window in state.lengths.epoch(state.rows, start=state.row):
            self._check_step_size(window.drawn)
            state.updater.run(drawn=window.drawn, length=window.length)
            state.row, state.update = state.row + window.drawn, state.update + 1
            if self._stream is not None:
                in_flight.append(self._stream.record_event())
                if len(in_flight) > IN_FLIGHT:
                    yield from _until_done(in_flight.popleft())
            if state.update % PART == 0:
                loss = self._check_losses()
            if self._save_is_due():
                self.save()
            yield self._progress(first_row, loss)
        if in_flight:
            yield from _until_done(in_flight[-1])
        self._check_losses()
        # The last update has changed them since the last loss; the best weights are taken from among these.
        self._check_finite(state.parallel.parts | state.optimizer.state())

    def _validate(self, seconds_training: float) -> Generator[Progress | None, None, None]:
        began = time.monotonic()
        state = self.state
        optimizer = state.optimizer.mode
        state.optimizer.swap_averages()
        evaluation = yield from self._validated()
        # The published scripts compare losses over rows; a constant factor changes no comparison.
        is_best = state.valid_loss is None or evaluation.loss_over_rows < state.valid_loss
        if is_best:
            state.keep_best(evaluation.loss_over_rows, epoch=state.epoch)
        state.optimizer.swap_averages()
        losses = state.updater.losses(0, state.update)
        record = EpochRecord(
            run=self.identity,
            epoch=state.epoch,
            optimizer=optimizer,
            updates=state.update,
            train_loss=math.fsum(losses) / len(losses),
            train_loss_parts=_part_means(losses),
            valid_loss=evaluation.loss,
            valid_loss_over_rows=evaluation.loss_over_rows,
            evaluation_precision=self._evaluation_precision,
            recurrence=state.describe_recurrence(),
            is_best=is_best,
            seconds_training=seconds_training,
            seconds_validation=time.monotonic() - began,
            concurrent_runs=self.options.concurrent_runs,
            peak_mib=torch.cuda.max_memory_allocated(state.device) / 2**20 if self._stream is not None else None,
        )
        if state.parallel.is_first:
            append(self.records_path, Record.of(record, Environment.here(state.device)))
        if state.trigger.fires(evaluation.loss_over_rows):
            if state.config.stop_when_stale:
                state.stale = True
            else:
                state.optimizer.begin_averaging()
        progress = dataclasses.replace(self._progress(0, record.train_loss), record=record)
        # Before control is given away: whoever gets it may save.
        state.epoch, state.row, state.update = state.epoch + 1, 0, 0
        yield progress

    def _validated(self) -> Generator[None, None, Evaluation]:
        for _ in self._evaluator.launch():
            yield None
        if self._stream is not None:
            yield from _until_done(self._stream.record_event())
        try:
            evaluation = self._evaluator.result()
        except RecurrenceFailed as error:
            raise self._diverged(f"{error.problem}, in the validation {self.state.position}", error.ADVICE) from None
        if not math.isfinite(evaluation.total):
            raise self._diverged(f"the validation loss is {evaluation.loss} {self.state.position}")
        return evaluation

    def _check_losses(self) -> float | None:
        """The mean loss of the last full part. Raises before anything is saved if a loss is not finite."""
        state = self.state
        try:
            state.recurrence.raise_if_failed()
        except RecurrenceFailed as error:
            raise self._diverged(f"{error.problem}, {state.position}", error.ADVICE) from None
        losses = state.updater.losses(0, state.update)
        for index, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise self._diverged(f"the loss became {loss} at update {index + 1} of epoch {state.epoch}")
        means = _part_means(losses)
        return means[-1] if means else None

    def _check_finite(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise unless all tensors are finite, on every process that shares the run."""
        name = first_not_finite(tensors)
        if self.state.parallel.any(name is not None):
            where = f"{name!r}" if name is not None else "held by another process"
            raise self._diverged(f"the state of the run ({where}) is no longer finite {self.state.position}")

    def _check_step_size(self, drawn: int) -> None:
        step_size = self.state.config.step_size(drawn)
        if step_size > LARGEST:
            raise self._diverged(
                f"a window of {drawn} steps would take a step of size {step_size:g}, more than float32 can hold, "
                f"{self.state.position}"
            )

    def _diverged(self, problem: str, advice: str | None = None) -> Diverged:
        """The error to raise, which tells what is kept. The best weights, which are finite, are kept first."""
        parallel, best_epoch = self.state.parallel, self.state.best_epoch
        best = parallel.whole(self.state.best)
        if best and self._saved_best != best_epoch:
            self._save_best(best)
            parallel.wait_for_first()
            self._saved_best = best_epoch
        kept = []
        if self._saved_position is not None:
            kept.append(f"{self.last_path} holds the run {self._saved_position}: the same command goes on from there")
        if best:
            kept.append(f"{self.best_path} holds the best weights, of epoch {best_epoch}")
        self._divergence = Diverged(
            f"{problem}; nothing was saved since. Kept: {'; '.join(kept) or 'nothing, since no epoch had ended'}. "
            + (advice or f"Try a lower learning_rate than {self.state.config.learning_rate:g}, in another folder")
        )
        return self._divergence

    def _save_is_due(self) -> bool:
        # Clocks differ: the processes of a run agree on it.
        return self.state.parallel.any(time.monotonic() - self._saved >= self.options.checkpoint_seconds)

    def _progress(self, first_row: int, loss: float | None) -> Progress:
        state = self.state
        elapsed, rows_done = time.monotonic() - self._began, state.row - first_row
        return Progress(
            epoch=state.epoch,
            epochs=state.config.epochs,
            update=state.update,
            row=min(state.row, state.rows),
            rows=state.rows,
            tokens_per_second=rows_done * state.config.batch / max(elapsed, 1e-9),
            seconds_left=elapsed * max(state.rows - state.row, 0) / rows_done if rows_done > 0 else None,
            loss=loss,
        )


def _until_done(event: torch.cuda.Event) -> Iterator[None]:
    while not event.query():
        yield None


def _part_means(losses: list[float]) -> tuple[float, ...]:
    full = range(0, len(losses) - PART + 1, PART)
    return tuple(math.fsum(losses[first : first + PART]) / PART for first in full)


def run_together(
    trainers: Sequence[Trainer], watch: Callable[[Trainer, Progress], None], *, until: float = math.inf
) -> Iterator[Trainer]:
    """Advance several runs in turns, which share one device; yields each as it ends.

    Asked to stop, each goes on to where its state is whole and saves; then KeyboardInterrupt is raised, with what is to
    be said of those that had diverged. ``until`` is a time of the monotonic clock at which they stop in the same way,
    and OutOfTime is raised. One that diverges stops alone; the error is raised when the others have ended.
    """
    running, diverged, stopped = list(trainers), list[Diverged](), False
    with SoftStop() as stop:
        while running:
            idle = True
            for trainer in list(running):
                try:
                    progress = trainer.advance()
                except StopIteration:
                    running.remove(trainer)
                    yield trainer
                    continue
                except Diverged as error:
                    running.remove(trainer)
                    diverged.append(error)
                    continue
                if progress is None:
                    continue
                idle = False
                watch(trainer, progress)
                # With its note a run has only said something: it stops where there is something to save.
                # The processes that share it stop if one of them is asked to.
                if progress.note is None and trainer.state.parallel.any(stop.asked or time.monotonic() >= until):
                    running.remove(trainer)
                    stopped = True
                    try:
                        trainer.save()
                    except Diverged as error:
                        diverged.append(error)
            if idle:
                time.sleep(1e-4)
    if trainers and trainers[0].state.parallel.any(stop.asked):
        raise KeyboardInterrupt(*map(str, diverged))
    if diverged:
        raise diverged[0]
    if stopped:
        raise OutOfTime
