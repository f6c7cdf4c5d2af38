"""A trial, from the first update to its record, in whatever process it runs; and what its folder tells about it.

The folder is all the state there is. A trial has ended when ``trial.jsonl`` is there, which is written whole or not at
all; until then it goes on from the checkpoints of its phases.
"""

from __future__ import annotations

import os
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from sigsoftmax.experiments.compare import measure
from sigsoftmax.experiments.runs.evaluate import evaluate_best
from sigsoftmax.experiments.runs.folder_locks import FolderLock
from sigsoftmax.experiments.runs.run import Resources, Run
from sigsoftmax.experiments.sweep.manifest import PLAN_FILE
from sigsoftmax.experiments.sweep.plan import Trial
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.data.corpus_files import DATA_VARIABLE
from sigsoftmax.lm.training.trainer import Progress, Trainer, resolve_device, run_together
from sigsoftmax.records import Environment, Payload, Record, read, store
from sigsoftmax.records.schemas.sweeps import TrialRecord
from sigsoftmax.records.schemas.training import EpochRecord, EvaluationRecord

__all__ = [
    "Failed",
    "Place",
    "epoch_records",
    "finished_record",
    "gathered",
    "run_trial",
]

TRIAL_FILE = "trial.jsonl"
RECORDS_FILE = "records.jsonl"
ERROR_FILE = "error.txt"
CHECKPOINT_SECONDS = 30.0
"""after which the end of an epoch is saved: a worker may be lost at any moment, and loses no more than this"""
LOCK_PATIENCE = 120.0
"""seconds that a worker of a command that was killed may need to notice that it is alone"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a trial may use, on whatever machine it runs."""

    out: Path
    """of the sweep, absolute"""
    folder: Path
    """in which the command was given"""
    arguments: tuple[str, ...]
    """of the command, for records"""
    data: Path | None
    data_variable: str | None
    """the environment's word about where corpora are"""
    device: str
    precision: str
    threads: int
    at_once: int
    """trials that share a device or machine, for records"""

    @classmethod
    def here(cls, *, out: Path, data: Path | None, device: str, precision: str, threads: int, at_once: int) -> Place:
        return cls(
            out=out.absolute(),
            folder=Path.cwd(),
            arguments=tuple(sys.argv),
            data=None if data is None else data.absolute(),
            data_variable=os.environ.get(DATA_VARIABLE),
            device=device,
            precision=precision,
            threads=threads,
            at_once=at_once,
        )

    def settle(self) -> Resources:
        """Make this process work as the command's own would."""
        # A recipe may name its text by a path from there; on another machine that folder need not exist.
        with suppress(OSError):
            os.chdir(self.folder)
        if self.data_variable is not None:
            os.environ[DATA_VARIABLE] = self.data_variable
        sys.argv = list(self.arguments)
        torch.set_num_threads(self.threads)
        return Resources(data=self.data, device=self.device, precision=self.precision, at_once=self.at_once)


@dataclass(frozen=True)
class Failed:
    """Why a trial did not come through."""

    reason: str


# --- running ----------------------------------------------------------------------------------------------------------


def run_trial(trial: Trial, place: Place) -> TrialRecord | Failed:
    """Train, evaluate, record; from where it was left. Asked to stop, it saves and raises KeyboardInterrupt."""
    try:
        resources = place.settle()
        if not (place.out / PLAN_FILE).is_file():
            raise ValueError(
                f"{platform.node()} does not see {place.out}; on a cluster --out must be a folder that all nodes share"
            )
        with FolderLock(trial.folder, patience=LOCK_PATIENCE):
            return finished_record(trial, place.precision) or _ended(trial, resources)
    except Exception as error:  # noqa: BLE001 - whatever one trial raises, the others go on
        return _failed(trial, error)


def _ended(trial: Trial, resources: Resources) -> TrialRecord:
    corpus = _corpus(trial.run.recipe.corpus, resources.data)
    for run in trial.runs():
        _train(run.trainer(corpus, resources))
    evaluations = evaluate_best(trial.last, corpus, resources)
    payloads: list[Payload] = []
    kl = None
    if corpus.language is not None:
        measured = measure(trial.last, corpus, resources)
        payloads = [measured.record, measured.spectrum]
        kl = measured.record.kl
    epochs = list(epoch_records(trial))
    record = TrialRecord(
        run=evaluations[0].run,
        point=trial.point,
        epochs=len(epochs),
        updates=sum(epoch.updates for epoch in epochs),
        valid_loss=_loss(evaluations, "valid"),
        test_loss=_loss(evaluations, "test"),
        kl=kl,
        entropy_rate=None if corpus.language is None else corpus.language.entropy_rate,
        seconds=sum(epoch.seconds_training + epoch.seconds_validation for epoch in epochs),
    )
    environment = Environment.here(resolve_device(resources.device))
    store(trial.folder / TRIAL_FILE, [Record.of(payload, environment) for payload in [record, *payloads]])
    (trial.folder / ERROR_FILE).unlink(missing_ok=True)
    return record


def _train(trainer: Trainer) -> None:
    saved = time.monotonic()

    def watch(_: Trainer, progress: Progress) -> None:
        nonlocal saved
        if progress.record is not None and time.monotonic() - saved >= CHECKPOINT_SECONDS:
            trainer.save()
            saved = time.monotonic()

    if not trainer.finished:
        for _ in run_together([trainer], watch):
            pass


@lru_cache(maxsize=1)
def _corpus(name: str, data: Path | None) -> Corpus:
    """Read once for the trials that one process runs."""
    return Corpus.load(name, data)


def _loss(evaluations: Sequence[EvaluationRecord], split: str) -> float:
    return next(evaluation.loss for evaluation in evaluations if evaluation.split == split)


def _failed(trial: Trial, error: Exception) -> Failed:
    reason = str(error) or type(error).__name__
    if type(error).__name__ == "OutOfMemoryError":
        reason = f"the GPU has too little memory; give each trial a larger share (--gpus-per-trial). {reason}"
    elif not isinstance(error, ValueError | OSError | ArithmeticError):
        path = trial.folder / ERROR_FILE
        reason = f"{type(error).__name__}: {reason}"
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            reason += f" (all of it in {path})"
    return Failed(reason)


# --- what the folder tells --------------------------------------------------------------------------------------------


def finished_record(trial: Trial, precision: str) -> TrialRecord | None:
    """What the trial came to, if it has ended and is still there."""
    path = trial.folder / TRIAL_FILE
    if not (path.is_file() and trial.last.best.is_file()):
        return None
    try:
        # A line that was damaged from outside stays; the phases have ended, so that another is made from them soon.
        with warnings.catch_warnings(action="ignore"):
            records = list(read(path, malformed="skip"))
        found = [record.payload_as(TrialRecord) for record in records if record.kind == TrialRecord.KIND]
    except ValueError:
        return None
    recipe = trial.run.recipe
    planned = (recipe.name, set(recipe.overrides), trial.phases[-1], trial.run.seed, precision)
    for record in found:
        run = record.run
        if (run.recipe, set(run.overrides), run.phase, run.seed, run.precision) == planned:
            return record
    return None


def epoch_records(trial: Trial) -> Iterator[EpochRecord]:
    """Those of all phases so far."""
    for run in trial.runs():
        for record in _read_if_there(run.path / RECORDS_FILE):
            if record.kind == EpochRecord.KIND:
                yield record.payload_as(EpochRecord)


def gathered(trials: Iterable[Trial]) -> list[Record]:
    """All that trials have on record: epochs, evaluations, comparisons with the truth, results."""
    return [record for trial in trials for path in _record_files(trial) for record in _read_if_there(path)]


def _record_files(trial: Trial) -> list[Path]:
    phases: list[Run] = trial.runs()
    files = [run.path / name for run in phases for name in (RECORDS_FILE, "evaluations.jsonl")]
    return [*files, trial.folder / TRIAL_FILE]


def _read_if_there(path: Path) -> Iterator[Record]:
    if path.is_file():
        yield from read(path, malformed="skip")
