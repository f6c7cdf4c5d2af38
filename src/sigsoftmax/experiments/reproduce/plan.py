"""The plan of a reproduction before it starts: runs, hours, disk, and the seeds that the paper's gaps take."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sigsoftmax.experiments.reproduce.run_times import RunTimes
from sigsoftmax.experiments.runs import evaluate
from sigsoftmax.experiments.runs.dynamic import known_runs
from sigsoftmax.experiments.runs.ranks import known_spectrum
from sigsoftmax.experiments.runs.run import Run, epoch_records
from sigsoftmax.lm.dynamic.search import grid
from sigsoftmax.lm.training.nt_asgd import NonMonotonicTrigger
from sigsoftmax.records.durations import duration_text
from sigsoftmax.records.published import paper
from sigsoftmax.records.published.paper import PublishedTable, Stage
from sigsoftmax.report.number_text import counted

__all__ = ["Left", "Step", "describe_plan", "power_lines", "steps_of"]

Step = Literal["train", "finetune", "dynamic evaluation", "ranks"]
STEPS: tuple[Step, ...] = ("train", "finetune", "dynamic evaluation", "ranks")
PAIRS = (("softmax", "sigsoftmax"), ("mos(K=15)", "moss(K=15)"))
"""heads that the paper compares: the first is its baseline"""
WEIGHTS_ON_DISK = 4
"""copies of the weights that a phase keeps: the best alone, and in the checkpoint the current, the best, the average"""


def steps_of(table: PublishedTable) -> tuple[Step, ...]:
    """The table of ranks is of finetuned models; all others end with dynamic evaluation."""
    return STEPS if table.stages else ("train", "finetune", "ranks")


@dataclass(frozen=True, kw_only=True)
class Left:
    """The work that a run still needs, in seconds where nothing else is said: what is on record is done."""

    train_epochs: int
    train_epoch: float
    finetune_least: float
    """epochs before which the rule that ends finetuning cannot fire, or all of them without that rule"""
    finetune_most: float
    finetune_epoch: float
    evaluation: float
    """evaluations of the trained and of the finetuned weights"""
    points: int
    """points of the grid of dynamic evaluation"""
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

    @property
    def fixed(self) -> float:
        """All but finetuning, whose length is not known beforehand."""
        return self.train + self.evaluation + self.dynamic + self.rank

    @classmethod
    def of(cls, run: Run, times: RunTimes, steps: Sequence[Step]) -> Left:
        finetuned = run.finetuning()
        least = finetuned.config.patience + 2 if finetuned.config.stop_when_stale else finetuned.epochs
        (trained_epochs, _), (finetuned_epochs, has_ended) = _epochs(run), _epochs(finetuned)
        is_finetuned = has_ended and (finetuned.path / evaluate.FILE).is_file()
        all_points = len(grid(run.recipe.dynamic_evaluation))
        known = len(known_runs(finetuned.best)) if is_finetuned else 0
        # The winner is recorded once more as chosen, and test after it.
        is_searched = "dynamic evaluation" not in steps or known > all_points
        has_rank = is_finetuned and known_spectrum(finetuned.best) is not None
        to_finetune = 0.0 if is_finetuned else times.finetune_epoch
        return cls(
            train_epochs=max(run.epochs - trained_epochs, 0),
            train_epoch=times.train_epoch,
            finetune_least=to_finetune * max(min(least, finetuned.epochs) - finetuned_epochs, 0),
            finetune_most=to_finetune * max(finetuned.epochs - finetuned_epochs, 0),
            finetune_epoch=times.finetune_epoch,
            evaluation=times.evaluation * (2 - (run.path / evaluate.FILE).is_file() - is_finetuned),
            points=0 if is_searched else max(all_points - known, 0),
            dynamic_point=times.dynamic_point,
            dynamic_besides=0.0 if is_searched else times.dynamic_statistics + times.dynamic_test,
            rank=times.rank if "ranks" in steps and not has_rank else 0.0,
        )


def _epochs(run: Run) -> tuple[int, bool]:
    """The number of epochs of a phase on record, and whether it has ended: all are done, or the last was stale."""
    trigger = NonMonotonicTrigger(run.config.patience)
    stale = [trigger.fires(epoch.valid_loss_over_rows) for epoch in epoch_records(run)]
    ended = bool(stale) and (len(stale) >= run.epochs or (run.config.stop_when_stale and stale[-1]))
    return len(stale), ended


def describe_plan(
    title: str, runs: Sequence[Run], times: Mapping[str, RunTimes], steps: Sequence[Step], out: Path, device: str
) -> str:
    """The plan as text. ``times`` are by the recipe's name."""
    recipes: dict[str, list[Left]] = {}
    for run in runs:
        recipes.setdefault(run.recipe.name, []).append(Left.of(run, times[run.recipe.name], steps))
    left = [one for seeds in recipes.values() for one in seeds]
    total = _range(left, sum(one.fixed for one in left))
    lines = [
        f"{title}: {len(recipes)} heads x {len(runs) // len(recipes)} seeds, each: {', '.join(steps)}.",
        f"In all {total} on this machine ({device}), as a few updates of each recipe tell.",
        "Finetuning ends by itself, somewhere between its least and its most.",
    ]
    epochs = {run.recipe.name: run.epochs for run in runs}
    width = max(map(len, recipes))
    for name, seeds in recipes.items():
        own = times[name]
        training = duration_text(sum(one.train for one in seeds))
        parts = [f"training {training} ({epochs[name]} epochs of {duration_text(own.train_epoch)})"]
        parts.append(f"finetuning {_range(seeds)}")
        if "dynamic evaluation" in steps:
            dynamic = duration_text(sum(one.dynamic for one in seeds))
            parts.append(f"dynamic evaluation {dynamic} ({counted(own.dynamic_points, 'point')})")
        if "ranks" in steps:
            parts.append(f"ranks {duration_text(sum(one.rank for one in seeds))}")
        lines.append(f"  {name:{width}}  {', '.join(parts)}")
    return "\n".join([*lines, _disk(runs, times, out)])


def _range(left: Sequence[Left], besides: float = 0.0) -> str:
    """The least and the most time that finetuning and something besides may take."""
    low = duration_text(besides + sum(one.finetune_least for one in left))
    high = duration_text(besides + sum(one.finetune_most for one in left))
    return low if low == high else f"{low} to {high}"


def _disk(runs: Sequence[Run], times: Mapping[str, RunTimes], out: Path) -> str:
    weights = sum(4.0 * times[run.recipe.name].parameters for run in runs)
    needed = 2 * WEIGHTS_ON_DISK * weights / 2**30
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free / 2**30
    warning = "; that may not be enough" if needed > free else ""
    return f"Checkpoints take up to {needed:.1f} GiB; {free:.1f} GiB are free at {existing}{warning}."


def power_lines(table: PublishedTable, corpus: str, heads: Sequence[str], seeds: int) -> list[str]:
    """A line for each gap of the paper on test text: the seeds that would find it, at the paper's spread."""
    stages: tuple[Stage, ...] = table.stages or ("finetuned",)
    lines = []
    for first, second in [pair for pair in PAIRS if set(pair) <= set(heads)]:
        for stage in stages:
            gap = paper.published_gap(corpus, first, second, stage, "test")
            if gap is None:
                continue
            needed = gap.seeds_needed()
            text = "no number of seeds in reason resolves it"
            if needed is not None:
                text = f"{needed} seeds of each"
                text += f"; with {seeds} a gap of this size will be missed more often" if seeds < needed else ""
            lines.append(
                f"  {corpus}, {stage}: {first} minus {second} is {gap.size:+.2f} in the paper, spreads "
                f"{gap.first.deviation:g} and {gap.second.deviation:g}: {text}"
            )
    title = "Seeds that resolve the paper's gaps in test perplexity (5 %, in four cases of five):"
    return [title, *lines] if lines else []
