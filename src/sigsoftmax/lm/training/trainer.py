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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sigsoftmax.lm.config import LARGEST, Precision, Recipe, TrainingConfig
from sigsoftmax.lm.data.corpus import Corpus, WindowLengths, batchify
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.model.memory import check_model_fits
from sigsoftmax.lm.parallel.single_process import Kind, parallel_strategy
from sigsoftmax.lm.recurrence import RecurrenceFailed
from sigsoftmax.lm.training import checkpoints
from sigsoftmax.lm.training.evaluation import Evaluation, Evaluator
from sigsoftmax.lm.training.interruption import OutOfTime, SoftStop
from sigsoftmax.lm.training.nt_asgd import AveragedSgd, NonMonotonicTrigger
from sigsoftmax.lm.training.precision import arithmetic, check_precision, lstm_dtype, resolve_evaluation_precision
from sigsoftmax.lm.training.saved_models import check_same_corpus, first_not_finite, load_model, saved_meta, typed_meta
from sigsoftmax.lm.training.saved_runs import SavedRun, check_run_tensors, prefixed, unprefixed
from sigsoftmax.lm.training.updates import Updater
from sigsoftmax.records import Environment, Record, append
from sigsoftmax.records.envelope import to_plain
from sigsoftmax.records.schemas.training import EpochRecord, RunIdentity

__all__ = ["Diverged", "Phase", "Progress", "Trainer", "resolve_device", "run_together"]

Phase = Literal["train", "finetune"]

PART = 200
"""updates whose losses are averaged for a look at training"""
IN_FLIGHT = 8
"""updates given to a GPU before the host waits for it: enough to hide the host, few enough to stay in step"""


class Diverged(ArithmeticError):
    """The loss, or what the run would save, is no longer finite; other runs of the process can go on."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands, for whoever watches."""

    epoch: int
    epochs: int
    update: int
    """of the epoch"""
    row: int
    rows: int
    tokens_per_second: float
    """of the epoch so far"""
    seconds_left: float | None
    """until the end of the epoch"""
    loss: float | None
    """mean of the last full part of the epoch"""
    record: EpochRecord | None = None
    """when an epoch has ended"""
    note: str | None = None
    """what a run says once, before it begins"""


def resolve_device(device: str | torch.device) -> torch.device:
    """The device of that name; refused if this machine has none."""
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be as 'cpu', 'cuda' or 'cuda:1', got {device!r}") from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"the device {str(device)!r} was asked for, but torch sees no CUDA device here; use cpu")
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return resolved


class Trainer:
    """One phase of one run. ``start`` is the checkpoint that finetuning begins with."""

    def __init__(
        self,
        recipe: Recipe,
        corpus: Corpus,
        folder: str | Path,
        *,
        phase: Phase = "train",
        start: str | Path | None = None,
        seed: int | None = None,
        device: str | torch.device = "cpu",
        precision: str = "float32",
        evaluation_precision: str | None = None,
        checkpoint_seconds: float = 300.0,
        checkpoint_updates: int | None = None,
        capture: bool = True,
        concurrent_runs: int = 1,
        parallel: Kind | None = None,
    ) -> None:
        if (phase == "finetune") != (start is not None):
            raise ValueError(
                "finetuning starts from a checkpoint, and training does not: give start with phase finetune"
            )
        self.recipe, self.corpus, self.folder, self.phase = recipe, corpus, Path(folder), phase
        self.seed = recipe.seed if seed is None else seed
        self.device = resolve_device(device)
        self.precision: Precision = check_precision(precision, self.device)
        self.evaluation_precision = resolve_evaluation_precision(evaluation_precision, self.device)
        self.config: TrainingConfig = recipe.training if phase == "train" else recipe.finetuning
        self._checkpoint_seconds, self._checkpoint_updates = checkpoint_seconds, checkpoint_updates
        self._concurrent_runs = concurrent_runs
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        with self._on_stream():
            # Exchanges between processes are not captured.
            self._build(None if start is None else Path(start), capture and parallel is None, parallel)
            is_begun = self.last_path.exists()
            # All or none: going on takes exchanges between processes.
            self._parallel.check_same([int(is_begun)], str(self.last_path))
            if is_begun:
                self._resume()
            elif self._parallel.is_first:
                # A run that died before its first checkpoint begins anew, and its epochs would be recorded twice.
                self.records_path.unlink(missing_ok=True)
            self._parallel.check_same([self._epoch, self._row, self._update], str(self.last_path))
        self._events = self._run()

    def _build(self, start: Path | None, capture: bool, parallel: Kind | None) -> None:
        config, words = self.config, len(self.corpus.vocabulary)
        if start is None:
            check_model_fits(self.recipe.model, words, self.device, is_trained=True)
            self.model = LanguageModel(self.recipe.model, words, seed=self.seed).to(self.device)
        else:
            loaded = load_model(start, device=self.device)
            check_same_corpus(loaded.meta, self.corpus, start)
            self.model = loaded.model
        count = sum(parameter.numel() for parameter in self.model.parameters())
        self._recurrence = self.model.stack.recurrence
        self._recurrence.concurrent_runs = self._concurrent_runs
        self._parallel = parallel_strategy(self.model, parallel)
        text_RB = batchify(self.corpus.train, config.batch)
        valid_RB = batchify(self.corpus.valid, config.evaluation_batch)
        self._rows = text_RB.shape[0]
        self._lengths = WindowLengths(
            self.seed if config.window_seed is None else config.window_seed, config.bptt, config.longest_window
        )
        self._optimizer = AveragedSgd(
            list(self._parallel.parts.values()),
            clip=config.clip,
            weight_decay=config.weight_decay,
            squares_of=self._parallel.squares,
        )
        if config.optimizer == "asgd":
            self._optimizer.begin_averaging()
        self._updater = Updater(
            self.model,
            self._optimizer,
            text_RB,
            config,
            generator=torch.Generator(self.device).manual_seed(self.seed),
            precision=self.precision,
            capture=capture,
            parallel=self._parallel,
            skip=self._recurrence.error_flag(self.device) if self._stream is not None else None,
        )
        self._evaluator = Evaluator(
            self.model,
            valid_RB,
            precision=self.evaluation_precision,
            capture=capture,
            parallel=self._parallel,
        )
        self._trigger = NonMonotonicTrigger(config.patience)
        self._best: dict[str, Tensor] = {}
        """what this process holds of them"""
        self._best_loss, self._best_epoch = math.inf, 0
        self._epoch, self._row, self._update = 1, 0, 0
        self._saved_place: str | None = None
        """that ``last.safetensors`` is of; None where there is none"""
        self._saved_best: int | None = None
        """the epoch of ``best.safetensors``"""
        self._divergence: Diverged | None = None
        self._seconds = 0.0
        """spent on the current epoch before a resumption"""
        self._stale = False
        self._recurrence_change: str | None = None
        self.identity = RunIdentity(
            recipe=self.recipe.name,
            overrides=self.recipe.overrides,
            phase=self.phase,
            head=self.recipe.model.head,
            corpus=self.corpus.name,
            corpus_checksum=self.corpus.checksum,
            seed=self.seed,
            precision=self.precision,
            parameters=count,
        )

    @property
    def last_path(self) -> Path:
        return self.folder / "last.safetensors"

    @property
    def best_path(self) -> Path:
        return self.folder / "best.safetensors"

    @property
    def records_path(self) -> Path:
        return self.folder / "records.jsonl"

    @property
    def best_loss(self) -> float:
        return self._best_loss

    @property
    def finished(self) -> bool:
        return self._stale or self._epoch > self.config.epochs

    # --- from outside ---------------------------------------------------------------------------------------------

    def advance(self) -> Progress | None:
        """Do a little: give an update to the device, or look whether it is ready (None). StopIteration at the end."""
        with self._on_stream():
            return next(self._events)

    def run(self, watch: Callable[[Progress], None] = lambda _: None) -> None:
        """Train to the end. Asked to stop, it saves a checkpoint and raises KeyboardInterrupt."""
        for _ in run_together([self], lambda _, progress: watch(progress)):
            pass

    def save(self) -> None:
        """Write checkpoints of where the run stands. Refused once it has diverged: what is saved is finite."""
        if self._divergence is not None:
            raise self._divergence
        with self._on_stream():
            self._check_losses()
            best = self._parallel.whole(self._best)
            tensors = self._tensors(best)
            self._check_state(tensors)
            if self._parallel.is_first:
                if best:
                    checkpoints.save(self.best_path, best, self._model_meta())
                checkpoints.save(self.last_path, tensors, self._meta())
            self._parallel.wait_for_first()
        self._saved_place, self._saved_best = self._place(), self._best_epoch if best else None
        self._saved = time.monotonic()
        self._updates_since_save = 0

    def agreed(self, stop: bool) -> bool:
        """Whether any of the processes that share the run wants to stop; all of them must ask."""
        return self._parallel.any(stop)

    # --- the loop -------------------------------------------------------------------------------------------------

    def _run(self) -> Generator[Progress | None, None, None]:
        self._began = self._saved = time.monotonic()
        self._updates_since_save = 0
        if not self.finished:
            yield dataclasses.replace(self._progress(self._row, None), note=self._recurrence_sentence())
        if self.phase == "finetune" and not self._best:
            evaluation = yield from self._validated()
            self._check_validated(evaluation)
            self._keep_best(evaluation.loss_over_rows, epoch=0)
        while not self.finished:
            if self._update == 0:
                self._updater.begin_epoch()
                self._seconds = 0.0
            yield from self._updates()
            seconds_training = self._seconds + time.monotonic() - self._began
            yield from self._validate(seconds_training)
            if self.finished or self._save_is_due():
                self.save()
        if not self.last_path.exists():
            self.save()

    def _updates(self) -> Generator[Progress | None, None, None]:
        self._began = time.monotonic()
        first_row, in_flight, loss = self._row, deque[torch.cuda.Event](), None
        for window in self._lengths.epoch(self._rows, start=self._row):
            self._check_step_size(window.drawn)
            self._updater.run(drawn=window.drawn, length=window.length)
            self._row, self._update = self._row + window.drawn, self._update + 1
            self._updates_since_save += 1
            if self._stream is not None:
                in_flight.append(self._stream.record_event())
                while len(in_flight) > IN_FLIGHT:
                    if in_flight[0].query():
                        in_flight.popleft()
                    else:
                        yield None
            if self._update % PART == 0:
                loss = self._check_losses()
            if self._save_is_due():
                self.save()
            yield self._progress(first_row, loss)
        while in_flight and not in_flight[-1].query():
            yield None
        self._check_losses()
        # The last update has changed them since the last loss; the best weights are taken from among these.
        self._check_state(self._parallel.parts | self._optimizer.state())

    def _validate(self, seconds_training: float) -> Generator[Progress | None, None, None]:
        began = time.monotonic()
        optimizer = self._optimizer.mode
        self._optimizer.exchange()
        evaluation = yield from self._validated()
        self._check_validated(evaluation)
        # The published scripts compare losses over rows; a constant factor changes no comparison.
        is_best = evaluation.loss_over_rows < self._best_loss
        if is_best:
            self._keep_best(evaluation.loss_over_rows, epoch=self._epoch)
        self._optimizer.exchange()
        losses = self._updater.losses(0, self._update)
        record = EpochRecord(
            run=self.identity,
            epoch=self._epoch,
            optimizer=optimizer,
            updates=self._update,
            train_loss=math.fsum(losses) / len(losses),
            train_loss_parts=_part_means(losses),
            valid_loss=evaluation.loss,
            valid_loss_over_rows=evaluation.loss_over_rows,
            evaluation_precision=self.evaluation_precision,
            recurrence=self._recurrence_sentence(),
            is_best=is_best,
            seconds_training=seconds_training,
            seconds_validation=time.monotonic() - began,
            concurrent_runs=self._concurrent_runs,
            peak_mib=torch.cuda.max_memory_allocated(self.device) / 2**20 if self._stream is not None else None,
        )
        if self._parallel.is_first:
            append(self.records_path, Record.of(record, Environment.here(self.device)))
        if self._trigger.fires(evaluation.loss_over_rows):
            if self.config.stop_when_stale:
                self._stale = True
            else:
                self._optimizer.begin_averaging()
        progress = dataclasses.replace(self._progress(0, record.train_loss), record=record)
        # Before control is given away: whoever gets it may save.
        self._epoch, self._row, self._update = self._epoch + 1, 0, 0
        yield progress

    def _validated(self) -> Generator[None, None, Evaluation]:
        for _ in self._evaluator.launch():
            yield None
        if self._stream is not None:
            done = self._stream.record_event()
            while not done.query():
                yield None
        try:
            return self._evaluator.result()
        except RecurrenceFailed as error:
            raise self._diverged(f"{error.problem}, in the validation {self._place()}", error.ADVICE) from None

    def _keep_best(self, loss: float, *, epoch: int) -> None:
        self._best = {name: tensor.detach().clone() for name, tensor in self._parallel.parts.items()}
        self._best_loss, self._best_epoch = loss, epoch

    def _recurrence_sentence(self) -> str:
        """What computes the LSTM layers, and why."""
        with arithmetic(self.precision, self.device):
            sentence = self.model.describe_recurrence(self._updater.columns_at_once, lstm_dtype(self.precision))
        return sentence if self._recurrence_change is None else f"{sentence}; {self._recurrence_change}"

    # --- what diverges ----------------------------------------------------------------------------------------------

    def _check_losses(self) -> float | None:
        """The mean loss of the last full part. Raises before anything is saved if a loss is not finite."""
        try:
            self._recurrence.raise_if_failed()
        except RecurrenceFailed as error:
            raise self._diverged(f"{error.problem}, {self._place()}", error.ADVICE) from None
        losses = self._updater.losses(0, self._update)
        for index, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise self._diverged(f"the loss became {loss} at update {index + 1} of epoch {self._epoch}")
        means = _part_means(losses)
        return means[-1] if means else None

    def _check_state(self, tensors: dict[str, Tensor]) -> None:
        """Raise unless all of them are finite, on every process that shares the run."""
        name = first_not_finite(tensors)
        if self._parallel.any(name is not None):
            where = f"{name!r}" if name is not None else "held by another process"
            raise self._diverged(f"the state of the run ({where}) is no longer finite {self._place()}")

    def _check_validated(self, evaluation: Evaluation) -> None:
        if not math.isfinite(evaluation.total):
            raise self._diverged(f"the validation loss is {evaluation.loss} {self._place()}")

    def _check_step_size(self, drawn: int) -> None:
        step_size = self.config.learning_rate * drawn / self.config.bptt
        if step_size > LARGEST:
            raise self._diverged(
                f"a window of {drawn} steps would take a step of size {step_size:g}, more than float32 can hold, "
                f"{self._place()}"
            )

    def _place(self) -> str:
        """Where the run stands, in words."""
        if self._update:
            return f"after update {self._update} of epoch {self._epoch}"
        return f"after epoch {self._epoch - 1}" if self._epoch > 1 else "before the first update"

    def _diverged(self, problem: str, advice: str | None = None) -> Diverged:
        """The error to raise, which tells what is kept. The best weights, which are finite, are kept first."""
        best = self._parallel.whole(self._best)
        if best and self._saved_best != self._best_epoch:
            if self._parallel.is_first:
                checkpoints.save(self.best_path, best, self._model_meta())
            self._parallel.wait_for_first()
            self._saved_best = self._best_epoch
        kept = []
        if self._saved_place is not None:
            kept.append(f"{self.last_path} holds the run {self._saved_place}: the same command goes on from there")
        if best:
            kept.append(f"{self.best_path} holds the best weights, of epoch {self._best_epoch}")
        self._divergence = Diverged(
            f"{problem}; nothing was saved since. Kept: {'; '.join(kept) or 'nothing, since no epoch had ended'}. "
            + (advice or f"Try a lower learning_rate than {self.config.learning_rate:g}, in another folder")
        )
        return self._divergence

    def _save_is_due(self) -> bool:
        if self._checkpoint_updates is not None:
            return self._updates_since_save >= self._checkpoint_updates
        # Clocks differ: the processes of a run agree on it.
        return self._parallel.any(time.monotonic() - self._saved >= self._checkpoint_seconds)

    def _progress(self, first_row: int, loss: float | None) -> Progress:
        elapsed = time.monotonic() - self._began
        rows_done = self._row - first_row
        return Progress(
            epoch=self._epoch,
            epochs=self.config.epochs,
            update=self._update,
            row=min(self._row, self._rows),
            rows=self._rows,
            tokens_per_second=rows_done * self.config.batch / max(elapsed, 1e-9),
            seconds_left=elapsed * max(self._rows - self._row, 0) / rows_done if rows_done > 0 else None,
            loss=loss,
        )

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _tensors(self, best: dict[str, Tensor]) -> dict[str, Tensor]:
        """All that the run needs, whole."""
        whole = self._parallel.whole
        return {
            **prefixed("model", whole(self._parallel.parts)),
            **prefixed("best", best),
            **prefixed("optimizer", self._with_averages(self._optimizer.state(), whole)),
            **prefixed("updater", self._updater.state()),
        }

    def _with_averages(
        self, optimizer: dict[str, Tensor], changed: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """The optimiser's state with its averages, which are like the parameters, made whole or cut."""
        names = {f"average.{index}": name for index, name in enumerate(self._parallel.parts)}
        averages = changed({names[key]: tensor for key, tensor in optimizer.items() if key in names})
        return optimizer | {key: averages[name] for key, name in names.items() if name in averages}

    def _model_meta(self) -> dict[str, Any]:
        """What tells a model: enough to build it again and to know its text."""
        return saved_meta(self.recipe, self.identity, self.corpus, epoch=self._best_epoch, valid_loss=self._best_loss)

    def _meta(self) -> dict[str, Any]:
        running = self._update > 0
        return self._model_meta() | {
            "epoch": self._epoch,
            "row": self._row,
            "update": self._update,
            "seconds": self._seconds + (time.monotonic() - self._began if running else 0.0),
            "stale": self._stale,
            "losses": self._trigger.losses,
            "window_lengths": self._lengths.state(),
            "recurrence": to_plain(self._recurrence.plans_in_use()),
            "records_bytes": self.records_path.stat().st_size if self.records_path.exists() else 0,
        }

    def _binding(self, value: Any) -> Any:
        """All of a recipe or an identity that may not change when a run goes on: it may go on for longer."""
        loose = ("epochs", "overrides", "dynamic_evaluation", "finetuning" if self.phase == "train" else "training")
        if isinstance(value, dict):
            return {key: self._binding(item) for key, item in value.items() if key not in loose}
        return value

    def _resume(self) -> None:
        """Go on where the checkpoint was. All of it is checked before any of it is used."""
        checkpoint, path = checkpoints.load(self.last_path), self.last_path
        meta = typed_meta(SavedRun, checkpoint.meta, path)
        check_same_corpus(meta, self.corpus, path)
        ours = self._model_meta()
        for name in ("recipe", "run"):
            theirs, mine = (self._binding(value[name]) for value in (checkpoint.meta, ours))
            if theirs != mine:
                raise ValueError(
                    f"{path} belongs to another run: {_difference(theirs, mine)}; choose another folder, or run it as "
                    "it was begun (only the number of epochs may change)"
                )
        tensors, own = checkpoint.tensors, self._parallel.own
        check_run_tensors(meta, tensors, self._tensors({}), path)
        try:
            self._updater.restore(unprefixed("updater", tensors))
        except RuntimeError as error:
            raise ValueError(
                f"{path} is no {SavedRun.WHAT}: its random state is none ({error}); {SavedRun.REMEDY}"
            ) from None
        with torch.no_grad():
            for name, tensor in own(unprefixed("model", tensors)).items():
                self._parallel.parts[name].copy_(tensor)
        self._best = {name: tensor.to(self.device) for name, tensor in own(unprefixed("best", tensors)).items()}
        self._optimizer.restore(self._with_averages(unprefixed("optimizer", tensors), own))
        self._lengths.restore(dataclasses.asdict(meta.window_lengths))
        self._trigger = NonMonotonicTrigger(self.config.patience, meta.losses)
        self._best_loss = math.inf if meta.valid_loss is None else meta.valid_loss
        self._best_epoch = meta.best_epoch
        self._epoch, self._row, self._update = meta.epoch, meta.row, meta.update
        self._seconds, self._stale = meta.seconds, meta.stale
        self._saved_place, self._saved_best = self._place(), meta.best_epoch if self._best else None
        with arithmetic(self.precision, self.device):
            self._recurrence_change = self._recurrence.restore(
                meta.recurrence,
                self.recipe.model.hidden,
                self._updater.columns_at_once,
                lstm_dtype(self.precision),
                self.device,
            )
        # Epochs after the checkpoint are trained again, and would be recorded twice.
        if (
            self._parallel.is_first
            and self.records_path.exists()
            and self.records_path.stat().st_size > meta.records_bytes
        ):
            with self.records_path.open("rb+") as file:
                file.truncate(meta.records_bytes)


def _part_means(losses: list[float]) -> tuple[float, ...]:
    full = range(0, len(losses) - PART + 1, PART)
    return tuple(math.fsum(losses[first : first + PART]) / PART for first in full)


def _difference(theirs: Any, ours: Any, where: str = "") -> str:
    """The first field in which two nested values differ, in words."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in sorted(theirs.keys() | ours.keys()):
            if theirs.get(key) != ours.get(key):
                return _difference(theirs.get(key), ours.get(key), f"{where}.{key}" if where else str(key))
    return f"{where or 'it'} is {theirs!r} there and {ours!r} here"


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
                if progress is not None:
                    idle = False
                    watch(trainer, progress)
                    # With its note a run has only said something: it stops where there is something to save.
                    if progress.note is None and trainer.agreed(stop.asked or time.monotonic() >= until):
                        running.remove(trainer)
                        stopped = True
                        try:
                            trainer.save()
                        except Diverged as error:
                            diverged.append(error)
            if idle:
                time.sleep(1e-4)
    if trainers and trainers[0].agreed(stop.asked):
        raise KeyboardInterrupt(*map(str, diverged))
    if diverged:
        raise diverged[0]
    if stopped:
        raise OutOfTime
