"""What a reproduction of a table comes to, before it starts: runs, hours, disk, and the seeds that its gap takes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sigsoftmax.experiments.reproduce.run_times import RunTimes
from sigsoftmax.experiments.runs.dynamic import known_runs
from sigsoftmax.experiments.runs.ranks import known_spectrum
from sigsoftmax.experiments.runs.run import Run
from sigsoftmax.lm.dynamic.search import grid
from sigsoftmax.lm.training.nt_asgd import NonMonotonicTrigger
from sigsoftmax.records import read
from sigsoftmax.records.durations import duration_text
from sigsoftmax.records.published import paper
from sigsoftmax.records.published.paper import PublishedTable, Stage
from sigsoftmax.records.schemas.training import EpochRecord
from sigsoftmax.records.statistics import Gap, Sample

__all__ = ["Left", "Step", "describe_plan", "power_lines", "steps_of"]

Step = Literal["train", "finetune", "dynamic evaluation", "ranks"]
STEPS: tuple[Step, ...] = ("train", "finetune", "dynamic evaluation", "ranks")
PAIRS = (("softmax", "sigsoftmax"), ("mos(K=15)", "moss(K=15)"))
"""what the paper compares: the first is its baseline"""
WEIGHTS_ON_DISK = 4
"""times the weights that a phase keeps: the best alone, and in the checkpoint the current, the best and the average"""


def steps_of(table: PublishedTable) -> tuple[Step, ...]:
    """The table of ranks is of finetuned models; all others end with dynamic evaluation."""
    return STEPS if table.stages else ("train", "finetune", "ranks")


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a run still needs, in seconds where nothing else is said: what is on record is done."""

    train_epochs: int
    train_epoch: float
    finetune_least: float
    """epochs before which the rule that ends finetuning cannot fire, or all of them without that rule"""
    finetune_most: float
    finetune_epoch: float
    evaluation: float
    """of the trained and of the finetuned weights"""
    points: int
    """of the grid of dynamic evaluation"""
    dynamic_point: float
    dynamic_besides: float
    """the statistics before the grid and the test text after it"""
    rank: float

    @property
    def train(self) -> float:
        return self.train_epochs * self.train_epoch

    @property
    def dynamic(self) -> float:
        return self.dynamic_besides + self.points * self.dynamic_point

    @classmethod
    def of(cls, run: Run, times: RunTimes, steps: Sequence[Step]) -> Left:
        finetuned = run.finetuning()
        least = run.recipe.finetuning.patience + 2 if run.recipe.finetuning.stop_when_stale else finetuned.epochs
        training, finetuning = _Epochs.of(run), _Epochs.of(finetuned)
        has_evaluations = (finetuned.path / "evaluations.jsonl").is_file()
        is_finetuned = finetuning.ended and has_evaluations
        all_points = len(grid(run.recipe.dynamic_evaluation))
        known = len(known_runs(finetuned.best)) if is_finetuned else 0
        # The winner is recorded once more as chosen, and test after it.
        is_searched = "dynamic evaluation" not in steps or known > all_points
        has_rank = is_finetuned and known_spectrum(finetuned.best) is not None
        epochs_least = 0 if is_finetuned else max(min(least, finetuned.epochs) - finetuning.done, 0)
        epochs_most = 0 if is_finetuned else max(finetuned.epochs - finetuning.done, 0)
        return cls(
            train_epochs=max(run.epochs - training.done, 0),
            train_epoch=times.train_epoch,
            finetune_least=epochs_least * times.finetune_epoch,
            finetune_most=epochs_most * times.finetune_epoch,
            finetune_epoch=times.finetune_epoch,
            evaluation=times.evaluation * (2 - (run.path / "evaluations.jsonl").is_file() - is_finetuned),
            points=0 if is_searched else all_points - min(known, all_points),
            dynamic_point=times.dynamic_point,
            dynamic_besides=0.0 if is_searched else times.dynamic_statistics + times.dynamic_test,
            rank=times.rank if "ranks" in steps and not has_rank else 0.0,
        )


@dataclass(frozen=True)
class _Epochs:
    """The epochs of one phase that are on record."""

    done: int
    ended: bool
    """whether the phase has come to its end, by the number of its epochs or because it was stale"""

    @classmethod
    def of(cls, run: Run) -> _Epochs:
        path = run.path / "records.jsonl"
        if not path.is_file():
            return cls(0, False)
        config = run.recipe.training if run.phase == "train" else run.recipe.finetuning
        trigger, stale, done = NonMonotonicTrigger(config.patience), False, 0
        for record in read(path, malformed="skip"):
            if record.kind == EpochRecord.KIND:
                done += 1
                stale = trigger.fires(record.payload_as(EpochRecord).valid_loss_over_rows)
        return cls(done, done >= run.epochs or (config.stop_when_stale and stale))


def describe_plan(
    title: str, runs: Sequence[Run], times: Mapping[str, RunTimes], steps: Sequence[Step], out: Path, device: str
) -> str:
    """``times`` by the recipe's name."""
    left = {run: Left.of(run, times[run.recipe.name], steps) for run in runs}
    recipes = {run.recipe.name: [other for other in runs if other.recipe.name == run.recipe.name] for run in runs}
    fixed = sum(one.train + one.evaluation + one.dynamic + one.rank for one in left.values())
    least = fixed + sum(one.finetune_least for one in left.values())
    most = fixed + sum(one.finetune_most for one in left.values())
    total = _range(least, most)
    lines = [f"{title}: {len(recipes)} heads x {len(runs) // len(recipes)} seeds, each: {', '.join(steps)}."]
    lines.append(f"In all {total} on this machine ({device}), as a few updates of each recipe tell.")
    lines.append("Finetuning ends by itself, somewhere between its least and its most.")
    width = max(map(len, recipes))
    for name, its_runs in recipes.items():
        parts = _parts(its_runs, [left[run] for run in its_runs], times[name], steps)
        lines.append(f"  {name:{width}}  {', '.join(parts)}")
    lines.append(_disk(runs, times, out))
    return "\n".join(lines)


def _parts(runs: Sequence[Run], left: Sequence[Left], times: RunTimes, steps: Sequence[Step]) -> list[str]:
    """How long each stage of a recipe takes, over its seeds."""
    training = duration_text(sum(one.train for one in left))
    least, most = sum(one.finetune_least for one in left), sum(one.finetune_most for one in left)
    parts = [f"training {training} ({runs[0].epochs} epochs of {duration_text(times.train_epoch)})"]
    parts.append(f"finetuning {_range(least, most)}")
    if "dynamic evaluation" in steps:
        points = f"{times.dynamic_points} point{'s' if times.dynamic_points > 1 else ''}"
        parts.append(f"dynamic evaluation {duration_text(sum(one.dynamic for one in left))} ({points})")
    if "ranks" in steps:
        parts.append(f"ranks {duration_text(sum(one.rank for one in left))}")
    return parts


def _range(least: float, most: float) -> str:
    low, high = duration_text(least), duration_text(most)
    return low if low == high else f"{low} to {high}"


def _disk(runs: Sequence[Run], times: Mapping[str, RunTimes], out: Path) -> str:
    weights = sum(4.0 * times[run.recipe.name].parameters for run in runs)
    needed = 2 * WEIGHTS_ON_DISK * weights / 2**30
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free / 2**30
    warning = "; that may not be enough" if needed > free else ""
    return f"Checkpoints take up to {needed:.1f} GiB; {free:.1f} GiB are free at {existing}{warning}."


def power_lines(table: PublishedTable, corpus: str, heads: Sequence[str], seeds: int) -> list[str]:
    """For each gap of the paper on test text: the seeds that would find it, at the paper's spread."""
    stages: tuple[Stage, ...] = table.stages or ("finetuned",)
    lines = []
    for first, second in PAIRS:
        if first not in heads or second not in heads:
            continue
        for stage in stages:
            gap = Gap(*(_published(corpus, head, stage) for head in (first, second)))
            needed = gap.seeds_needed()
            spreads = f"{gap.first.deviation:g} and {gap.second.deviation:g}"
            text = f"  {corpus}, {stage}: {first} minus {second} is {gap.size:+.2f} in the paper, spreads {spreads}: "
            if needed is None:
                text += "no number of seeds in reason resolves it"
            else:
                text += f"{needed} seeds of each" + (
                    "" if seeds >= needed else f"; with {seeds} a gap of this size will be missed more often"
                )
            lines.append(text)
    if lines:
        lines.insert(0, "Seeds that resolve the paper's gaps in test perplexity (5 %, in four cases of five):")
    return lines


def _published(corpus: str, head: str, stage: Stage) -> Sample:
    [result] = paper.results(corpus=corpus, head=head, stage=stage, split="test")
    return Sample(result.perplexity, result.deviation, result.seeds or 0)
