"""A table of the paper, from training to the printed table; every stage goes on where it was stopped."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sigsoftmax.analysis.progress import Progress
from sigsoftmax.experiments.display import Display, duration_text, make_display
from sigsoftmax.experiments.dynamic import search_grid
from sigsoftmax.experiments.ranks import measure_rank
from sigsoftmax.experiments.reproduction_plan import describe_plan, power_lines, steps_of
from sigsoftmax.experiments.run_times import measure_times
from sigsoftmax.experiments.runs import Resources, Run, folder_name
from sigsoftmax.experiments.train import train_and_evaluate
from sigsoftmax.lm.config import Recipe
from sigsoftmax.lm.data import Corpus
from sigsoftmax.lm.recipes import recipe, with_overrides
from sigsoftmax.lm.settings import SETTINGS
from sigsoftmax.lm.training import Diverged
from sigsoftmax.records import paper
from sigsoftmax.records.paper import PublishedTable
from sigsoftmax.report import paper_tables

__all__ = ["TABLES", "ReproduceConfig", "run"]

Say = Callable[[str], None]

TABLES = {f"table{table.number}": table for table in paper.TABLES}
SETTING_OF_CORPUS = {"ptb": "ptb", "wikitext-2": "wt2"}
SHOW_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    table: str
    """``table1`` to ``table5``"""
    seeds: int = 1
    """how many: the published one and those that follow it"""
    heads: tuple[str, ...] = ()
    """as recipes name them; none: all of the table"""
    setting: str | None = None
    """of the recipes; None: that of the table, as published"""
    changes: tuple[str, ...] = ()
    """to every recipe alike, as ``training.epochs=22``"""
    out: Path = Path("runs")
    resources: Resources = field(default_factory=Resources)
    dry_run: bool = False
    """print the plan alone"""

    def __post_init__(self) -> None:
        if self.table not in TABLES:
            near = difflib.get_close_matches(self.table, TABLES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"the tables are {', '.join(TABLES)}, got {self.table!r}{hint}")
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")
        if self.setting is not None and self.setting not in SETTINGS:
            raise ValueError(f"setting must be one of {', '.join(SETTINGS)}, got {self.setting!r}")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"the output folder {self.out} is a file; choose another with --out")
        self.recipes()

    @property
    def published(self) -> PublishedTable:
        return TABLES[self.table]

    def recipes(self) -> list[Recipe]:
        corpora = [self.published.corpus] if self.published.corpus else list(paper.CORPORA)
        settings = [self.setting] if self.setting else [SETTING_OF_CORPUS[corpus] for corpus in corpora]
        heads = self.heads or tuple(head.partition("(")[0] for head in paper.HEADS)
        return [with_overrides(recipe(f"{setting}-{head}"), self.changes) for setting in settings for head in heads]

    def runs(self) -> list[Run]:
        return [
            Run(recipe=chosen, seed=seed, folder=self.out / folder_name(chosen.name) / str(seed))
            for chosen in self.recipes()
            for seed in range(chosen.seed, chosen.seed + self.seeds)
        ]


def run(config: ReproduceConfig, say: Say, progress: Say = lambda _: None, display: Display | None = None) -> None:
    """Plan, then train, finetune, evaluate dynamically, measure ranks, and print the tables."""
    runs = config.runs()
    corpora = {name: config.resources.corpus(name) for name in {one.recipe.corpus for one in runs}}
    _say_plan(config, runs, corpora, say, progress)
    if config.dry_run:
        return
    chain = _Chain(config.resources, corpora, say, progress)
    steps = steps_of(config.published)
    trained = chain.train(runs, display)
    finetuned = chain.train([one.finetuning() for one in trained], display)
    if "dynamic evaluation" in steps:
        chain.evaluate_dynamically(finetuned)
    if "ranks" in steps:
        chain.measure_ranks(finetuned)
    records = tuple(dict.fromkeys(file for one in runs for file in sorted(one.folder.rglob("*.jsonl"))))
    if records:
        say(paper_tables(records))
    if chain.failures:
        raise Diverged("; ".join(chain.failures))


def _say_plan(
    config: ReproduceConfig, runs: Sequence[Run], corpora: dict[str, Corpus], say: Say, progress: Say
) -> None:
    times = {}
    for chosen in config.recipes():
        progress(f"measuring a few updates of {chosen.name}")
        times[chosen.name] = measure_times(chosen, corpora[chosen.corpus], config.resources)
    progress("")
    title = f"Table {config.published.number}, {config.published.title}"
    steps = steps_of(config.published)
    say(describe_plan(title, runs, times, steps, config.out, config.resources.device))
    heads = [chosen.model.head for chosen in config.recipes()]
    for corpus in corpora.values():
        # The spreads of the paper are those of its own recipes and texts.
        if config.setting is None and corpus.name in paper.CORPORA:
            say("\n".join(power_lines(config.published, corpus.name, heads, config.seeds)))


class _Chain:
    """The stages; a run that diverges is left behind, and the others go on."""

    def __init__(self, resources: Resources, corpora: dict[str, Corpus], say: Say, progress: Say) -> None:
        self._resources, self._corpora, self._say, self._progress = resources, corpora, say, progress
        self.failures: list[str] = []

    def train(self, runs: Sequence[Run], display: Display | None) -> list[Run]:
        ended: set[Run] = set()
        with display or make_display() as shown:
            try:
                for one, _ in train_and_evaluate(runs, self._resources, shown, self._say):
                    ended.add(one)
            except Diverged as error:
                self._fail(str(error))
        return [one for one in runs if one in ended]

    def evaluate_dynamically(self, runs: Sequence[Run]) -> None:
        for one in runs:
            try:
                search_grid(
                    one.best,
                    self._corpora[one.recipe.corpus],
                    self._resources,
                    say=self._say,
                    progress=self._progress,
                )
            except Diverged as error:
                self._fail(f"{one.name}, dynamic evaluation: {error}")

    def measure_ranks(self, runs: Sequence[Run]) -> None:
        for one in runs:
            shown = 0.0

            def show(at: Progress) -> None:
                nonlocal shown
                if time.monotonic() - shown >= SHOW_SECONDS:
                    shown = time.monotonic()
                    self._progress(f"rank of {one.name}: {at}")  # noqa: B023

            found = measure_rank(one.best, self._corpora[one.recipe.corpus], self._resources, progress=show)
            self._progress("")
            spectrum = found.spectrum
            count = spectrum.count("press32")
            self._say(
                f"Rank of the log-output matrix of {one.name}: {count.text} of {spectrum.words:,} x "
                f"{spectrum.contexts:,} ({duration_text(spectrum.seconds or 0.0)})."
            )

    def _fail(self, text: str) -> None:
        self.failures.append(text)
        self._say(f"Left behind: {text}")
