"""The record of a trial, and what its folder tells about it.

The folder is all the state there is. A trial has ended when ``trial.jsonl`` is there, which is written whole or not at
all; until then it goes on from the checkpoints of its phases.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from sigsoftmax.experiments.compare import measure
from sigsoftmax.experiments.runs import evaluate
from sigsoftmax.experiments.runs.executors import train_alone
from sigsoftmax.experiments.runs.run import Resources, epoch_records, payloads
from sigsoftmax.experiments.sweep.plan import Trial
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.training.trainer import resolve_device
from sigsoftmax.records import Environment, Payload, Record, read, store
from sigsoftmax.records.schemas.sweeps import TrialRecord

__all__ = ["finish_trial", "finished_record", "gathered"]

TRIAL_FILE = "trial.jsonl"


def finish_trial(trial: Trial, corpus: Corpus, resources: Resources) -> TrialRecord:
    """Go on with a trial after its first phase: train the other phases, evaluate and record."""
    found = finished_record(trial, resources.precision)
    if found is not None:
        return found
    for run in trial.runs()[1:]:
        train_alone(run, corpus, resources)
    evaluations = evaluate.evaluate_best(trial.last, corpus, resources)
    losses = {evaluation.split: evaluation.loss for evaluation in reversed(evaluations)}
    measured = None if corpus.language is None else measure(trial.last, corpus, resources)
    epochs = epoch_records(*trial.runs())
    record = TrialRecord(
        run=evaluations[0].run,
        point=trial.point,
        epochs=len(epochs),
        updates=sum(epoch.updates for epoch in epochs),
        valid_loss=losses["valid"],
        test_loss=losses["test"],
        kl=None if measured is None else measured.record.kl,
        entropy_rate=None if corpus.language is None else corpus.language.entropy_rate,
        seconds=sum(epoch.seconds for epoch in epochs),
    )
    stored: list[Payload] = [record] if measured is None else [record, measured.record, measured.spectrum]
    environment = Environment.here(resolve_device(resources.device))
    store(trial.folder / TRIAL_FILE, [Record.of(payload, environment) for payload in stored])
    return record


def finished_record(trial: Trial, precision: str) -> TrialRecord | None:
    """The result of the trial, if it has ended and its weights are still there."""
    if not trial.last.best.is_file():
        return None
    try:
        # A line that was damaged from outside stays; the phases have ended, so that another is made from them soon.
        with warnings.catch_warnings(action="ignore"):
            found = payloads(trial.folder / TRIAL_FILE, TrialRecord)
    except ValueError:
        return None
    recipe = trial.recipe
    planned = (recipe.name, set(recipe.overrides), trial.phases[-1], trial.seed, precision)
    for record in found:
        run = record.run
        if (run.recipe, set(run.overrides), run.phase, run.seed, run.precision) == planned:
            return record
    return None


def gathered(trials: Iterable[Trial]) -> list[Record]:
    """All that trials have on record: epochs, evaluations, comparisons with the truth, results."""
    files = []
    for trial in trials:
        files += [path for run in trial.runs() for path in (run.records, run.path / evaluate.FILE)]
        files.append(trial.folder / TRIAL_FILE)
    return [record for path in files if path.is_file() for record in read(path, malformed="skip")]
