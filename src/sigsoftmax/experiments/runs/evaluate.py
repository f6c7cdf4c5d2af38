"""Static evaluation of checkpoints, recorded beside them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from sigsoftmax.contract.spec import check_positive
from sigsoftmax.experiments.display import Say, perplexity_text
from sigsoftmax.experiments.runs.folder_locks import FolderLock
from sigsoftmax.experiments.runs.run import Resources, Run, checkpoint_file, measured_on, run_folder, text_of
from sigsoftmax.lm.config import Precision
from sigsoftmax.lm.data.corpus import Corpus, Split
from sigsoftmax.lm.data.windows import batchify
from sigsoftmax.lm.saving.saved_models import LoadedModel, load_model
from sigsoftmax.lm.training.evaluation import evaluate
from sigsoftmax.lm.training.precision import resolve_evaluation_precision
from sigsoftmax.lm.training.trainer import resolve_device
from sigsoftmax.records import Environment, Record, append
from sigsoftmax.records.schemas.training import EvaluationRecord
from sigsoftmax.report.number_text import counted

__all__ = ["EvaluateConfig", "evaluate_best", "evaluation_line", "run"]

FILE = "evaluations.jsonl"
"""beside the checkpoint; a run's own records are cut back when it is resumed"""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    checkpoint: Path
    """``best.safetensors``, or the folder of a run"""
    splits: tuple[Split, ...] = ("valid", "test")
    """texts that are evaluated"""
    batch: int | None = None
    """columns of text; None: validation in those of the recipe and in one, test in one"""
    resources: Resources = field(default_factory=Resources)

    def __post_init__(self) -> None:
        if self.batch is not None:
            check_positive(batch=self.batch)


def run(config: EvaluateConfig, say: Say) -> list[EvaluationRecord]:
    """Evaluate, print and record.

    Nothing is recorded on another text than the model's own, nor in a folder that another process is at work in, or
    that cannot be written to: a model can be looked at while it is trained.
    """
    path = checkpoint_file(config.checkpoint)
    refusal = None
    with ExitStack() as held:
        try:
            held.enter_context(FolderLock(run_folder(path), patience=0.0))
        except OSError as error:
            refusal = f"Not recorded: {error.strerror or error}."
        loaded = load_model(path, device=resolve_device(config.resources.device))
        corpus = text_of(loaded, config.resources)
        if corpus.checksum != loaded.run.corpus_checksum:
            other = f"{corpus.name!r} is another text than {loaded.run.corpus!r}"
            refusal = f"{other}, which {path} was trained on: not recorded."
        if refusal is not None:
            say(refusal)
        kinds = _kinds(loaded, config.splits) if config.batch is None else [(s, config.batch) for s in config.splits]
        records = []
        for split, batch in kinds:
            records.append(_evaluated(loaded, corpus, split, batch, config.resources))
            if refusal is None:
                _keep(path.parent / FILE, records[-1], config.resources)
            say(evaluation_line(records[-1]))
    return records


def evaluate_best(run: Run, corpus: Corpus, resources: Resources) -> list[EvaluationRecord]:
    """The evaluations of a finished run; what is on record already is taken from there."""
    loaded = load_model(run.best, device=resolve_device(resources.device))
    path, precision = run.path / FILE, _precision(loaded, resources)
    known = {
        (record.split, record.batch): record
        for record in measured_on(run.best, FILE, EvaluationRecord)
        if record.precision == precision
    }
    found = []
    for split, batch in _kinds(loaded, ("valid", "test")):
        if (split, batch) not in known:
            known[split, batch] = _evaluated(loaded, corpus, split, batch, resources)
            _keep(path, known[split, batch], resources)
        found.append(known[split, batch])
    return found


def _keep(path: Path, record: EvaluationRecord, resources: Resources) -> None:
    append(path, Record.of(record, Environment.here(resolve_device(resources.device))))


def evaluation_line(record: EvaluationRecord) -> str:
    text = f"{record.tokens:,} tokens in {counted(record.batch, 'column')}, {record.precision}"
    return (
        f"{record.split:5}  perplexity {perplexity_text(record.loss):>9}  loss {record.loss:.4f}  "
        f"({text}; over rows, as published scripts report it: {perplexity_text(record.loss_over_rows)})"
    )


def _kinds(loaded: LoadedModel, splits: Iterable[Split]) -> list[tuple[Split, int]]:
    batches = {"valid": (loaded.recipe.training.evaluation_batch, 1)}
    return [(split, batch) for split in splits for batch in dict.fromkeys(batches.get(split, (1,)))]


def _precision(loaded: LoadedModel, resources: Resources) -> Precision:
    return resolve_evaluation_precision(resources.evaluation_precision, loaded.model.embedding.device)


def _evaluated(loaded: LoadedModel, corpus: Corpus, split: Split, batch: int, resources: Resources) -> EvaluationRecord:
    began, precision = time.monotonic(), _precision(loaded, resources)
    result = evaluate(loaded.model, batchify(corpus.split(split), batch), precision=precision)
    return EvaluationRecord(
        run=loaded.run,
        split=split,
        batch=batch,
        loss=result.loss,
        loss_over_rows=result.loss_over_rows,
        tokens=result.scored,
        precision=precision,
        epoch=loaded.epoch,
        seconds=time.monotonic() - began,
    )
