"""A table of the paper, from training to the printed table; every stage goes on where it was stopped.

With a given wall time (``minutes``) a plan says first which stages fit and what gives way; the stages are planned anew
as the time goes by, and what does not fit is left to the next command.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sigsoftmax.analysis.progress import Progress
from sigsoftmax.contract.spec import check_positive
from sigsoftmax.experiments.display import Display, Pace, Say, make_display
from sigsoftmax.experiments.reproduce.plan import Left, Step, describe_plan, power_lines, steps_of
from sigsoftmax.experiments.reproduce.run_times import RunTimes, measure_times
from sigsoftmax.experiments.reproduce.time_budget import TimePlan, check_long_enough, narrowed, usable_seconds
from sigsoftmax.experiments.runs.dynamic import search_grid
from sigsoftmax.experiments.runs.evaluate import evaluate_best
from sigsoftmax.experiments.runs.ranks import measure_rank
from sigsoftmax.experiments.runs.run import Resources, Run, check_setting, planned_runs
from sigsoftmax.experiments.runs.train import result_lines, train_and_evaluate
from sigsoftmax.family.notation import did_you_mean
from sigsoftmax.lm.config import Recipe
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.recipes import recipe, with_overrides
from sigsoftmax.lm.training.interruption import OutOfTime
from sigsoftmax.lm.training.progress import Diverged
from sigsoftmax.lm.training.progress import Progress as TrainingProgress
from sigsoftmax.records.durations import duration_text
from sigsoftmax.records.published import paper
from sigsoftmax.records.published.paper import PublishedTable
from sigsoftmax.report import paper_tables

__all__ = ["TABLES", "ReproduceConfig", "run"]

TABLES = {f"table{table.number}": table for table in paper.TABLES}
SETTING_OF_CORPUS = {"ptb": "ptb", "wikitext-2": "wt2"}
NOTE_SECONDS = 10.0
"""between two lines about the time that is left"""


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    table: str
    """``table1`` to ``table5``"""
    seeds: int = 1
    """number of seeds: the first one and those that follow it"""
    first_seed: int | None = None
    """the first of these seeds; None: the published one"""
    heads: tuple[str, ...] = ()
    """heads as recipes name them; none: all of the table"""
    setting: str | None = None
    """setting of the recipes; None: that of the table, as published"""
    changes: tuple[str, ...] = ()
    """changes to every recipe alike, as ``training.epochs=22``"""
    out: Path = Path("runs")
    """folder for runs"""
    resources: Resources = field(default_factory=Resources)
    dry_run: bool = False
    """print the plan alone"""
    minutes: float | None = None
    """wall time in which as much is done as fits, by a plan that is printed first; None: as long as it takes"""

    def __post_init__(self) -> None:
        if self.minutes is not None and not (math.isfinite(self.minutes) and self.minutes > 0.0):
            raise ValueError(f"--minutes must be a positive number, got {self.minutes:g}")
        if self.table not in TABLES:
            raise ValueError(
                f"the tables are {', '.join(TABLES)}, got {self.table!r}{did_you_mean(self.table, TABLES)}"
            )
        check_positive(seeds=self.seeds)
        if self.first_seed is not None and self.first_seed < 0:
            raise ValueError(f"--first-seed must be at least 0, got {self.first_seed}")
        check_setting(self.setting)
        self.runs()

    @property
    def published(self) -> PublishedTable:
        return TABLES[self.table]

    def recipes(self) -> list[Recipe]:
        corpora = [self.published.corpus] if self.published.corpus else list(paper.CORPORA)
        settings = [self.setting] if self.setting else [SETTING_OF_CORPUS[corpus] for corpus in corpora]
        heads = self.heads or tuple(head.partition("(")[0] for head in paper.HEADS)
        return [with_overrides(recipe(f"{setting}-{head}"), self.changes) for setting in settings for head in heads]

    def runs(self) -> list[Run]:
        runs = []
        for chosen in self.recipes():
            first = chosen.seed if self.first_seed is None else self.first_seed
            runs += planned_runs([chosen], range(first, first + self.seeds), self.out)
        return runs


def run(config: ReproduceConfig, say: Say, progress: Say = lambda _: None, display: Display | None = None) -> None:
    """Plan, then train, finetune, evaluate dynamically, measure ranks, and print the tables."""
    began = time.monotonic()
    until = math.inf if config.minutes is None else began + usable_seconds(config.minutes)
    runs = config.runs()
    corpora = {name: config.resources.corpus(name) for name in {one.recipe.corpus for one in runs}}
    times: dict[str, RunTimes] = {}
    for chosen in config.recipes():
        progress(f"measuring a few updates of {chosen.name}")
        times[chosen.name] = measure_times(chosen, corpora[chosen.corpus], config.resources)
    progress("")
    _say_plan(config, runs, corpora, times, say)
    stages = _Stages(
        resources=config.resources,
        steps=steps_of(config.published),
        corpora=corpora,
        times=times,
        until=until,
        say=say,
        progress=progress,
    )
    if config.minutes is not None:
        left = stages.left(runs)
        check_long_enough(left, until - time.monotonic())
        say("\n".join(TimePlan.of(list(left.values()), until - time.monotonic()).lines()))
    if config.dry_run:
        return
    try:
        stages.run(runs, display)
    except OutOfTime:
        say(
            f"The {config.minutes:g} minutes are over after {duration_text(time.monotonic() - began)}; all that was "
            "done is on disk, and the same command goes on from there."
        )
    records = tuple(dict.fromkeys(file for one in runs for file in sorted(one.folder.rglob("*.jsonl"))))
    if records:
        say(paper_tables(records))
    if stages.failures:
        raise Diverged("; ".join(stages.failures))


def _say_plan(
    config: ReproduceConfig,
    runs: Sequence[Run],
    corpora: Mapping[str, Corpus],
    times: Mapping[str, RunTimes],
    say: Say,
) -> None:
    title = f"Table {config.published.number}, {config.published.title}"
    steps = steps_of(config.published)
    say(describe_plan(title, runs, times, steps, config.out, config.resources.device))
    heads = [chosen.model.head for chosen in config.recipes()]
    for corpus in corpora.values():
        # The spreads of the paper are those of its own recipes and texts.
        if config.setting is None and corpus.name in paper.CORPORA:
            say("\n".join(power_lines(config.published, corpus.name, heads, config.seeds)))


class _TimeLeft:
    """Says after an epoch, now and then, how many epochs of a stage are left, and how much time.

    The first epoch is told at once, so that whoever started hours of work knows early what to expect.
    """

    def __init__(self, stage: str, epochs: int, until: float, note: Say) -> None:
        self._stage, self._epochs, self._until, self._note = stage, epochs, until, note
        self._began, self._done, self._pace = time.monotonic(), 0, Pace(NOTE_SECONDS)

    def watch(self, run: Run, progress: TrainingProgress) -> None:
        if progress.record is None:
            return
        self._done += 1
        if not self._pace.is_due():
            return
        now = time.monotonic()
        left = (now - self._began) / self._done * max(self._epochs - self._done, 0)
        given = "" if math.isinf(self._until) else f"; {duration_text(self._until - now)} of the time given are left"
        self._note(
            f"{self._stage}: {self._done:,} of at most {self._epochs:,} epochs of all runs, "
            f"{duration_text(left)} left at most{given}"
        )


@dataclass(kw_only=True)
class _Stages:
    """The stages of all runs, one after the other; a run that diverges is left behind, and the others go on."""

    resources: Resources
    steps: tuple[Step, ...]
    corpora: Mapping[str, Corpus]
    times: Mapping[str, RunTimes]
    until: float
    say: Say
    progress: Say
    failures: list[str] = field(default_factory=list)

    def left(self, runs: Sequence[Run]) -> dict[Run, Left]:
        return {one: Left.of(one, self.times[one.recipe.name], self.steps) for one in runs}

    def run(self, runs: Sequence[Run], display: Display | None) -> None:
        """All stages; OutOfTime is raised where the time ends."""
        trained = list(self._train("training", runs, display, self.until))
        finetuned = self._finetune(trained, display)
        plan = self._plan(trained)
        if "dynamic evaluation" in self.steps:
            self._evaluate_dynamically(finetuned, plan)
        if "ranks" in self.steps:
            if plan is not None and plan.ranks_left and not plan.ranks:
                raise OutOfTime
            self._measure_ranks(finetuned)
        if plan is not None and plan.dropped:
            raise OutOfTime

    def _plan(self, runs: Sequence[Run]) -> TimePlan | None:
        """The plan for the rest of the time; None without an end."""
        if math.isinf(self.until):
            return None
        return TimePlan.of(list(self.left(runs).values()), self.until - time.monotonic())

    def _show(self, text: str) -> None:
        """Show a line of progress, unless the time is over."""
        # An empty line comes when a point has ended and is not on record yet.
        if text and time.monotonic() >= self.until:
            raise OutOfTime
        self.progress(text)

    def _train(self, stage: str, runs: Sequence[Run], display: Display | None, until: float) -> Iterator[Run]:
        left = self.left([replace(one, phase="train") for one in runs]).values()
        epochs = sum(
            one.train_epochs if stage == "training" else round(one.finetune_most / one.finetune_epoch) for one in left
        )
        with display or make_display() as shown:
            watcher = _TimeLeft(stage, epochs, self.until, shown.note)
            try:
                for one, _ in train_and_evaluate(runs, self.resources, shown, self.say, watcher, until=until):
                    yield one
            except Diverged as error:
                self._fail(str(error))

    def _finetune(self, trained: Sequence[Run], display: Display | None) -> list[Run]:
        """The runs that have finetuned weights: of those whose share of the time ended first, the best so far."""
        finetuned: list[Run] = []
        waiting = [one.finetuning() for one in trained]
        while waiting:
            plan = self._plan([replace(one, phase="train") for one in waiting])
            together, until = waiting, self.until
            if plan is not None:
                if "finetuning" in plan.dropped:
                    raise OutOfTime
                together = waiting[: self.resources.at_once]
                if "epochs of finetuning" in plan.dropped:
                    until = time.monotonic() + plan.finetune_seconds * len(together) / len(waiting)
            waiting = waiting[len(together) :]
            try:
                finetuned.extend(self._train("finetuning", together, display, until))
            except OutOfTime:
                for one in together:
                    if one not in finetuned and one.best.is_file():
                        evaluations = evaluate_best(one, self.corpora[one.recipe.corpus], self.resources)
                        self.say(f"Ended by its share of the time: {result_lines(one, evaluations)}")
                        finetuned.append(one)
        return finetuned

    def _evaluate_dynamically(self, runs: Sequence[Run], plan: TimePlan | None) -> None:
        if plan is not None and plan.points_left and not plan.points:
            raise OutOfTime
        for one in runs:
            settings = one.recipe.dynamic_evaluation
            if plan is not None and 0 < plan.points < plan.points_left:
                settings = narrowed(settings, plan.points)
            corpus = self.corpora[one.recipe.corpus]
            try:
                search_grid(one.best, corpus, self.resources, settings=settings, say=self.say, progress=self._show)
            except Diverged as error:
                self._fail(f"{one.name}, dynamic evaluation: {error}")

    def _measure_ranks(self, runs: Sequence[Run]) -> None:
        pace = Pace()
        for one in runs:

            def show(at: Progress, name: str = one.name) -> None:
                if pace.is_due():
                    self._show(f"rank of {name}: {at}")

            found = measure_rank(one.best, self.corpora[one.recipe.corpus], self.resources, progress=show)
            self.progress("")
            spectrum = found.spectrum
            count = spectrum.count("press32")
            self.say(
                f"Rank of the log-output matrix of {one.name}: {count.text} of {spectrum.words:,} x "
                f"{spectrum.contexts:,} ({duration_text(spectrum.seconds or 0.0)})."
            )

    def _fail(self, text: str) -> None:
        self.failures.append(text)
        self.say(f"Left behind: {text}")
