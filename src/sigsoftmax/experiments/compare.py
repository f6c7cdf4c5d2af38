"""Heads trained under equal budgets on one text, where possible on text whose truth is known.

One recipe and the same seeds for all; what differs is the head. Where the recipe's finetuning has a fixed length it
follows training: it averages the weights, and when averaging begins must not depend on the head. Everything that is
printed is made from the records (:mod:`sigsoftmax.report.findings.comparisons`), as the page is: tables and sentences
of the heads and seeds that the folder has under this budget, whichever command trained them.

Shapes: L positions of the test text, T of a block, V vocabulary.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO, TypeVar

import torch
from torch import Tensor

from sigsoftmax.analysis.spectrum.streaming import streamed_spectrum
from sigsoftmax.experiments.display import RunPlan, Say, WholeLine
from sigsoftmax.experiments.reproduce.run_times import EpochTimes, measure_epochs
from sigsoftmax.experiments.runs.executors import After, train_runs
from sigsoftmax.experiments.runs.folder_locks import FolderLock
from sigsoftmax.experiments.runs.ranks import log_output_blocks
from sigsoftmax.experiments.runs.run import (
    Resources,
    Run,
    check_setting,
    epoch_records,
    folder_name,
    payloads,
    planned_runs,
)
from sigsoftmax.lm.config import Recipe
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.data.windows import batchify
from sigsoftmax.lm.recipes import recipe, with_overrides, written_changes
from sigsoftmax.lm.saving.saved_models import load_model
from sigsoftmax.lm.training.evaluation import evaluate
from sigsoftmax.lm.training.progress import Diverged
from sigsoftmax.lm.training.trainer import resolve_device
from sigsoftmax.records import Environment, Record, store
from sigsoftmax.records.durations import duration_text
from sigsoftmax.records.schemas.model_spectra import ModelSpectrum
from sigsoftmax.records.schemas.training import Budget, ComparisonRecord
from sigsoftmax.report import ReportConfig, recorded_comparisons, write_report
from sigsoftmax.report.findings.comparisons import Comparison
from sigsoftmax.report.findings.verdicts import QUESTION, verdict
from sigsoftmax.report.number_text import counted, wrapped
from sigsoftmax.synthetic import batch_means

__all__ = ["HEADS", "CompareConfig", "ComparedRun", "run"]

T = TypeVar("T")

HEADS = ("softmax", "softmax-1.5", "sigsoftmax", "gss-0.2", "gss-0", "mos", "moss")
"""softmax with its logits scaled is the control for sigsoftmax, whose slope is between 1 and 2"""
QUICK_HEADS = ("softmax", "softmax-1.5", "sigsoftmax", "mos")
QUICK_EPOCHS = {"training.epochs": 4, "finetuning.epochs": 2}
PROCESS_SECONDS = 5.0
"""until the processes of a phase have imported torch, on a CPU; a guess, and little beside most comparisons"""
RANK_POSITIONS = 4096
"""positions of the test text, evenly spread, in the matrix whose rank is measured"""


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """Test perplexity, KL to the truth and rank of a trained run, and the spectrum behind the rank."""

    record: ComparisonRecord
    spectrum: ModelSpectrum


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    heads: tuple[str, ...] = ()
    """heads as recipes name them, as softmax,gss-0.2,mos; none: a choice of seven"""
    setting: str | None = None
    """setting of the recipes; None: ``language``, or ``tiny`` where a text is given"""
    changes: tuple[str, ...] = ()
    """changes to every recipe alike, as ``training.epochs=20``"""
    seeds: tuple[int, ...] = (1,)
    """seeds of each head"""
    out: Path = Path("runs/compare")
    """folder for runs, records and the page"""
    quick: bool = False
    """fewer heads and epochs"""
    resources: Resources = field(default_factory=lambda: Resources(at_once=os.cpu_count() or 1))

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ValueError("a comparison needs at least one seed")
        check_setting(self.setting)
        if any(change.strip().startswith(("model.head", "corpus")) for change in self.changes):
            raise ValueError("heads are chosen with --heads and the text with --data; leave them out of the changes")
        self.recipes()

    @property
    def chosen_setting(self) -> str:
        return self.setting or ("language" if self.resources.data is None else "tiny")

    @property
    def all_changes(self) -> tuple[str, ...]:
        """The changes that were given, and those that a quick comparison makes."""
        given = {change.partition("=")[0].strip() for change in self.changes}
        quick = QUICK_EPOCHS if self.quick else {}
        return (*self.changes, *(f"{path}={epochs}" for path, epochs in quick.items() if path not in given))

    def budget(self) -> Budget:
        """The budget of every head, as the records say it; the same whichever heads are chosen."""
        changes = written_changes(self.all_changes)
        # In some settings mixtures have other numbers of epochs, which follow from the setting.
        of_softmax = with_overrides(
            recipe(f"{self.chosen_setting}-softmax"),
            [change for change in changes if change.startswith(("training.", "finetuning."))],
        )
        epochs = of_softmax.training.epochs + of_softmax.finetuning.epochs * _is_finetuned(of_softmax)
        return Budget(setting=self.chosen_setting, changes=changes, epochs=epochs)

    def recipes(self) -> list[Recipe]:
        names = self.heads or (QUICK_HEADS if self.quick else HEADS)
        recipes = [with_overrides(recipe(f"{self.chosen_setting}-{name}"), self.all_changes) for name in names]
        heads = [chosen.model.head for chosen in recipes]
        if len(set(heads)) != len(heads):
            raise ValueError(f"each head is compared once, got {', '.join(heads)}")
        return recipes

    def runs(self) -> list[Run]:
        return planned_runs(self.recipes(), self.seeds, self.out)


def run(config: CompareConfig, say: Say, stream: TextIO | None = None) -> list[ComparedRun]:
    """Say how long it takes, train, measure, print, record, report. What an earlier attempt trained stays as it is.

    A head that diverges is left out; that is raised when the others have been compared. ``stream`` gets the line about
    the progress of all runs; None: the error stream.
    """
    with FolderLock(config.out):
        runs = config.runs()
        corpus = config.resources.corpus(runs[0].recipe.corpus)
        say(_introduction(config, runs, corpus))
        plans = _plans(runs, corpus, config.resources)
        seconds = _seconds_of_all(plans, config.resources)
        say(_foretold(plans, seconds, config.resources))
        with WholeLine(plans, seconds, stream or sys.stderr) as shown:
            results, errors = _trained(runs, config.resources, shown)
        budget = config.budget()
        results = [replace(compared, record=replace(compared.record, budget=budget)) for compared in results]
        for error in errors:
            say(f"Left out: {error}")
        if results:
            _write(config, results, say)
    if errors:
        raise errors[0]
    return results


def _trained(runs: list[Run], resources: Resources, shown: WholeLine) -> tuple[list[ComparedRun], list[Diverged]]:
    """The results of the heads whose seeds all came through, and what became of the others."""
    errors: list[Diverged] = []

    def trained(chosen: list[Run], after: After[Run, T]) -> dict[Run, T]:
        results: dict[Run, T] = {}
        try:
            for ended, result in train_runs(chosen, resources, after, shown.watch):
                shown.ended(ended)
                results[ended] = result
        except Diverged as error:
            errors.append(error)
        lost = {one.recipe.name for one in chosen if one not in results}
        for one in chosen:
            if one.recipe.name in lost:
                shown.left_out(one)
                shown.left_out(one.finetuning())
        return {one: results[one] for one in chosen if one.recipe.name not in lost}

    if _is_finetuned(runs[0].recipe):
        runs = [one.finetuning() for one in trained(runs, _nothing)]
    return list(trained(runs, measure).values()) if runs else [], errors


def _write(config: CompareConfig, results: list[ComparedRun], say: Say) -> None:
    """Record what was measured; say and show what the records now hold."""
    records = config.out / "comparison.jsonl"
    environment = Environment.here(resolve_device(config.resources.device))
    store(records, [Record.of(payload, environment) for found in results for payload in (found.record, found.spectrum)])
    own = [found.record for found in results]
    for comparison in recorded_comparisons((records,)):
        # Others in the same folder, of another text or budget, are on the page alone.
        if any(record in comparison.records for record in own):
            _say(comparison, own, say)
    written = write_report(
        ReportConfig(
            paths=(records, *_epochs_of_all(config.out, records)),
            out=config.out / "report.html",
            title="Output heads under equal budgets",
        )
    )
    warnings = "".join(f"\n{warning}" for warning in written.warnings)
    say(f"Written:\n  {records}\n  {written.path}{warnings}")


def _say(comparison: Comparison, own: list[ComparisonRecord], say: Say) -> None:
    earlier = sum(record not in own for record in comparison.records)
    if earlier:
        say(f"With {counted(earlier, 'run')} of earlier comparisons in this folder under the same budget.")
    say(comparison.ranking.table().to_text())
    say(comparison.details().to_text())
    said = [*verdict(comparison.ranking), *comparison.findings()]
    say("\n".join([QUESTION, *(wrapped(f"- {text}") for text in said)]))


def _epochs_of_all(out: Path, records: Path) -> list[Path]:
    """The epochs of all runs that the records hold; a run that diverged is not among them."""
    compared = {record.run for record in payloads(records, ComparisonRecord)}
    folders = {out / folder_name(run.recipe) / str(run.seed) for run in compared}
    return sorted(path for folder in folders for path in folder.glob("*/records.jsonl"))


def _introduction(config: CompareConfig, runs: list[Run], corpus: Corpus) -> str:
    recipes = config.recipes()
    language = corpus.language
    text = f"{corpus.name}: {len(corpus.vocabulary):,} words, {corpus.train.numel():,} tokens to train on"
    if language is not None:
        text = (
            f"{corpus.train.numel():,} words sampled from a language of known truth ({language.description}; "
            f"{language.num_contexts} contexts, {language.vocabulary} words, log P of rank {language.log_rank})"
        )
    width = recipes[0].model.embedding
    epochs = counted(runs[0].epochs, "epoch")
    if _is_finetuned(recipes[0]):
        epochs += f" and {runs[0].finetuning().epochs} with averaged weights"
    return (
        f"{len(recipes)} heads, {counted(len(config.seeds), 'seed')}, {epochs} each, width {width}; {text}.\n"
        f"Runs are kept in {config.out}: the same command goes on where it was stopped."
    )


# --- how long it takes ------------------------------------------------------------------------------------------------


def _plans(runs: Sequence[Run], corpus: Corpus, resources: Resources) -> dict[Run, RunPlan]:
    """The time that every phase of every run is expected to take, by a few updates of each head."""
    phases = [*runs, *(run.finetuning() for run in runs if _is_finetuned(run.recipe))]
    left = {run: run.epochs - max((epoch.epoch for epoch in epoch_records(run)), default=0) for run in phases}
    recipes = dict.fromkeys(run.recipe for run in phases if left[run] > 0)
    times = {recipe: measure_epochs(recipe, corpus, resources) for recipe in recipes}
    nothing = EpochTimes(train=0.0, finetune=0.0)
    return {
        run: RunPlan(epoch_seconds=times.get(run.recipe, nothing).of(run.phase), epochs_left=max(left[run], 0))
        for run in phases
    }


def _seconds_of_all(plans: Mapping[Run, RunPlan], resources: Resources) -> float:
    """Phase by phase: finetuning begins when all runs are trained."""
    total = 0.0
    for phase in ("train", "finetune"):
        seconds = [plan.seconds for run, plan in plans.items() if run.phase == phase]
        if any(seconds):
            # No sooner than the longest run, and no sooner than all of them at so many at once.
            total += max(*seconds, sum(seconds) / resources.at_once)
            total += PROCESS_SECONDS if resources.at_once > 1 and resources.device == "cpu" else 0.0
    return total


def _foretold(plans: Mapping[Run, RunPlan], seconds: float, resources: Resources) -> str:
    if not seconds:
        return "All runs are trained already; what is left is to measure them."
    left = sum(plan.epochs_left for plan in plans.values())
    company = f", {resources.at_once} runs at once" if resources.at_once > 1 else ""
    return (
        f"In all about {duration_text(seconds)} on this machine ({resources.device}{company}; {left:,} epochs are "
        "left), as a few updates of each head tell; longer where other programs share it."
    )


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(run: Run, corpus: Corpus, resources: Resources) -> ComparedRun:
    """Test perplexity, KL to the truth and rank of a trained run, on the test text."""
    device = resolve_device(resources.device)
    loaded = load_model(run.best, device=device)
    valid = evaluate(loaded.model, batchify(corpus.valid, run.recipe.training.evaluation_batch))
    targets_L = corpus.test[1:]
    contexts = corpus.contexts("test")
    losses, kls, chosen = list[Tensor](), list[Tensor](), list[Tensor]()
    stride = -(-targets_L.numel() // RANK_POSITIONS)
    start = 0
    for log_probs_TV in log_output_blocks(loaded.model, corpus.test):
        log_probs_TV = log_probs_TV.cpu()
        end = start + log_probs_TV.shape[0]
        losses.append(-log_probs_TV.gather(1, targets_L[start:end].unsqueeze(1))[:, 0].double())
        if corpus.language is not None and contexts is not None:
            kls.append(corpus.language.position_kl(contexts[start + 1 : end + 1], log_probs_TV))
        chosen.append(log_probs_TV[-start % stride :: stride].clone())
        start = end
    kl = batch_means(torch.cat(kls)) if kls else None
    spectrum = streamed_spectrum(chosen)
    spectrum = replace(spectrum, source=f"log P of {run.name} at {spectrum.contexts:,} positions of {corpus.name} test")
    epochs = epoch_records(*dict.fromkeys([replace(run, phase="train"), run]))
    head = run.recipe.model.parsed_head
    return ComparedRun(
        record=ComparisonRecord(
            run=loaded.run,
            epochs=len(epochs),
            updates=sum(epoch.updates for epoch in epochs),
            valid_loss=valid.loss,
            test_loss=float(torch.cat(losses).mean()),
            entropy_rate=None if corpus.language is None else corpus.language.entropy_rate,
            kl=None if kl is None else kl.mean,
            kl_standard_error=None if kl is None else kl.standard_error,
            rank=spectrum.count("press32").rank,
            rank_bound=head.rank_bound(spectrum.words, spectrum.contexts, run.recipe.model.embedding),
            words=spectrum.words,
            contexts=spectrum.contexts,
            seconds=sum(epoch.seconds for epoch in epochs),
        ),
        spectrum=ModelSpectrum(run=loaded.run, split="test", spectrum=spectrum, epoch=loaded.epoch),
    )


def _is_finetuned(recipe: Recipe) -> bool:
    return not recipe.finetuning.stop_when_stale


def _nothing(run: Run, corpus: Corpus, resources: Resources) -> None:
    """Do nothing with a run that is finetuned next."""
