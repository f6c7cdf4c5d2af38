"""Training and finetuning of recipes with one or several seeds, and the evaluation of what comes out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sigsoftmax.experiments.display import Display, Say, Watcher, make_display, watching
from sigsoftmax.experiments.runs.distributed_launch import process_group
from sigsoftmax.experiments.runs.evaluate import evaluate_best, evaluation_line
from sigsoftmax.experiments.runs.executors import train_runs
from sigsoftmax.experiments.runs.run import Resources, Run, planned_runs, run_in
from sigsoftmax.experiments.runs.tensorboard import TensorBoard
from sigsoftmax.lm.config import Recipe
from sigsoftmax.records.schemas.training import EvaluationRecord
from sigsoftmax.records.statistics import Sample
from sigsoftmax.report.number_text import sample_text

__all__ = ["FinetuneConfig", "TrainConfig", "Trained", "finetune", "result_lines", "run", "train_and_evaluate"]

Trained = dict[Run, list[EvaluationRecord]]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    recipes: tuple[Recipe, ...]
    seeds: tuple[int, ...] = ()
    """seeds of each recipe; none: the published one"""
    out: Path = Path("runs")
    """folder for runs"""
    resources: Resources = field(default_factory=Resources)
    tensorboard: bool = False
    """write curves for TensorBoard into the folder of each run"""

    def runs(self) -> list[Run]:
        return planned_runs(self.recipes, self.seeds, self.out)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    runs: tuple[Path, ...]
    """folders of trained runs, as ``runs/ptb-softmax/141``"""
    resources: Resources = field(default_factory=Resources)
    tensorboard: bool = False
    """write curves for TensorBoard into the folder of each run"""


def run(config: TrainConfig, say: Say, display: Display | None = None) -> Trained:
    """Train, evaluate, print. Started by torchrun on every process, they share each run, and the first one prints."""
    return _shown(config.runs(), config.resources, say, display, tensorboard=config.tensorboard)


def finetune(config: FinetuneConfig, say: Say, display: Display | None = None) -> Trained:
    """Finetune from the best weights of training."""
    runs = [run_in(folder, config.resources).finetuning() for folder in config.runs]
    return _shown(runs, config.resources, say, display, tensorboard=config.tensorboard)


def _shown(
    runs: Sequence[Run], resources: Resources, say: Say, display: Display | None, *, tensorboard: bool
) -> Trained:
    with process_group(resources) as (own_resources, prints):
        watchers = [TensorBoard()] if tensorboard and prints else []
        if not prints:
            display, say = Display(), lambda _: None
        with display or make_display() as shown:
            trained = dict(train_and_evaluate(runs, own_resources, shown, say, *watchers))
        if len(runs) > 1:
            say(seeds_table({run: trained[run] for run in runs}))
    return trained


def train_and_evaluate(
    runs: Sequence[Run],
    resources: Resources,
    display: Display,
    say: Say,
    *watchers: Watcher,
    until: float = math.inf,
) -> Iterator[tuple[Run, list[EvaluationRecord]]]:
    """Every run with its evaluations, said as each ends. ``until``: see :func:`train_runs`."""
    watch = watching(display, *watchers)
    for run, evaluations in train_runs(runs, resources, evaluate_best, watch, until=until):
        display.ended(run)
        say(result_lines(run, evaluations))
        yield run, evaluations


def result_lines(run: Run, evaluations: Sequence[EvaluationRecord]) -> str:
    """The best epoch of a run, and the evaluations of its weights."""
    epoch = evaluations[0].epoch
    best = f"epoch {epoch} was the best" if epoch else "no epoch was better than the start"
    lines = "".join(f"\n  {evaluation_line(evaluation)}" for evaluation in evaluations)
    return f"{run.name}: {best}; {run.best}{lines}"


def seeds_table(trained: Trained) -> str:
    """Perplexities of each recipe: mean and standard deviation over seeds."""
    recipes: dict[str, list[list[EvaluationRecord]]] = {}
    for run, evaluations in trained.items():
        recipes.setdefault(run.recipe.name, []).append(evaluations)
    width = max(map(len, recipes))
    lines = ["Perplexity, mean ± standard deviation over seeds:"]
    for name, seeds in recipes.items():
        cells = [f"  {name:{width}}", f"n = {len(seeds)}"]
        for kinds in zip(*seeds, strict=True):
            sample = Sample.of([evaluation.perplexity for evaluation in kinds])
            cells.append(f"{kinds[0].split} (batch {kinds[0].batch}) {sample_text(sample)}")
        lines.append("  ".join(cells))
    return "\n".join(lines)
