"""Tables of the whole runs of the paper: training, finetuning, dynamic evaluation and ranks, from results/paper/.

The runs are those of benchmarks/paper_queue.py. What the report shows of them is taken from the report, so that page
and report cannot disagree. Runs of other lengths stand in results/ itself and are never mixed with these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from paper_queue import FOLDER, Line, recipes
from write_docs import NO_RECORDS, markdown_table

from sigsoftmax.lm.dynamic.search import grid
from sigsoftmax.lm.recipes import recipe, with_overrides
from sigsoftmax.lm.training.nt_asgd import NonMonotonicTrigger
from sigsoftmax.records.published import paper
from sigsoftmax.records.published.paper import Split, Stage
from sigsoftmax.records.schemas.model_spectra import ModelSpectrum
from sigsoftmax.records.schemas.spectra import Spectrum
from sigsoftmax.records.schemas.training import DynamicEvaluationRecord, EpochRecord, RunIdentity
from sigsoftmax.report.loading import Loaded, load
from sigsoftmax.report.material import Material, corpus_label
from sigsoftmax.report.number_text import NO_BREAK, sample_text, seconds_text
from sigsoftmax.report.sections import spectra
from sigsoftmax.report.sections.gaps import Judged, gap_tables, judged_gaps, percent_text
from sigsoftmax.report.sections.perplexities import (
    Place,
    Variant,
    collect,
    grid_edges,
    perplexity_table,
    published_text,
)
from sigsoftmax.report.tables import Table, plain_text
from sigsoftmax.report.theme import head_label, same_head

NOT_RUN = "not run yet"
HEADS = {
    "softmax": "",
    "softmax(alpha=1.5)": "scale only",
    "sigsoftmax": "",
    "sigmoid": "",
    "gss(k=0)": "another shape",
    "relu": "",
    "mos(K=15)": "",
    "moss(K=15)": "",
}
"""the rows of the first table, with what a control is for"""
RANK_RULES = ("press32", "numpy32", "numpy64", "noise")
"""described in docs/analysis.md; ``noise`` counts what stands above the noise floor"""


ONE_LINE = 15
"""characters of a cell of the first table that is kept on one line"""


class WholeRuns:
    """All records of the queue, as the report sees them."""

    def __init__(self, folder: Path = FOLDER) -> None:
        files = sorted(folder.glob("*.jsonl"))
        loaded = load(files) if files else Loaded(files=[], records=[], warnings=[], repeated=0)
        self.material = Material.of(loaded)
        self.corpora: dict[str, list[Variant]] = collect(self.material)
        self.looks = self.material.looks(*HEADS)

    def variants(self, corpus: str, head: str) -> list[Variant]:
        """One for each schedule that a head was run with, the shorter ones first."""
        found = [v for v in self.corpora.get(corpus, ()) if same_head(v.run.head) == head]
        return sorted(found, key=last_epoch)

    def gaps(self, corpus: str) -> list[Judged]:
        return judged_gaps(corpus, self.corpora.get(corpus, []))

    def curve(self, variant: Variant, phase: str, seed: int) -> dict[int, EpochRecord]:
        return {e.epoch: e for e in variant.epochs.get(seed, ()) if e.run.phase == phase}


def last_epoch(variant: Variant) -> int:
    """Epochs of training of the longest run."""
    return max((e.epoch for own in variant.epochs.values() for e in own if e.run.phase == "train"), default=0)


def model_name(corpus: str, variant: Variant, seed: int) -> str:
    return f"{head_label(variant.run.head)}, {corpus_label(corpus)}, seed {seed}, {variant.epochs_text(seed)} epochs"


def seeds_text(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


# --- the first table ------------------------------------------------------------------------------------------------


def first_table(runs: WholeRuns, *, is_short: bool = False) -> str:
    """Test perplexity of every head, static and dynamic, beside the paper's.

    All heads on Penn Treebank have a row, whether they were run or not; longer runs and WikiText-2 have rows where they
    were run. The short form is without longer runs and WikiText-2, and names what was not run below the table.
    """
    rows, not_run = [], []
    for head, purpose in HEADS.items():
        label = head_label(head) + (f", {purpose}" if purpose else "")
        first, *longer = runs.variants("ptb", head) or [None]
        if is_short and first is None:
            not_run.append(label)
            continue
        rows.append(_first_row(label, first, "ptb", head))
        rows += [] if is_short else [_first_row(f"{label}, longer", variant, "ptb", head) for variant in longer]
    for head in () if is_short else HEADS:
        others = runs.variants("wikitext-2", head)
        rows += [_first_row(f"{head_label(head)}, WikiText-2", variant, "wikitext-2", head) for variant in others]
    header = ("output function", "epochs", "seeds", "static, ours", "paper", "dynamic, ours", "paper")
    # Short cells stay on one line, so that the table is low; the few long ones would make it too wide for a page.
    kept = [
        [cell.replace(" ", NO_BREAK) if place and len(cell) <= ONE_LINE else cell for place, cell in enumerate(row)]
        for row in rows
    ]
    below = f"\n{NOT_RUN.capitalize()}: {'; '.join(not_run)}.\n" if not_run else ""
    return f"{markdown_table(header, 'lrrrrrr', kept)}\n{below}"


def _first_row(label: str, variant: Variant | None, corpus: str, head: str) -> list[str]:
    places: tuple[Place, ...] = (("finetuned", "test"), ("dynamic evaluation", "test"))
    cells = []
    for place in places:
        sample = None if variant is None else variant.sample(place)
        published = paper.results(corpus=corpus, head=head, stage=place[0], split=place[1])
        cells += [NOT_RUN if sample is None else sample_text(sample), published_text(published[0]) if published else ""]
    lengths = ["", ""] if variant is None else [variant.epochs_text(), str(len(variant.epochs))]
    return [label, *lengths, *cells]


def line_heads(line: Line, corpus: str) -> set[str]:
    """The heads of a line of the queue, if it is on that corpus."""
    made = [recipe(name) for name in recipes(line)]
    return {same_head(one.model.head) for one in made if one.corpus == corpus}


# --- the paper's tables, and differences ----------------------------------------------------------------------------


def paper_tables(runs: WholeRuns) -> str:
    """Tables 1 to 5 with every cell of the paper and ours under it; a note of several tables stands under the first."""
    blocks: list[str] = []
    told: set[str] = set()
    for table in paper.TABLES:
        title = f"Table {table.number}. {table.title}"
        if table.stages:
            own = runs.corpora.get(table.corpus, [])
            made = perplexity_table(table, table.corpus, title, own, runs.looks, missing=NOT_RUN)
        else:
            (made,) = spectra.tables(runs.material, runs.looks, missing=NOT_RUN)
        new = [text for text in map(plain_text, made.notes) if text not in told]
        told |= set(new)
        blocks.append(
            "\n".join([f"### {title}\n\n{markdown_of(made, has_notes=False)}", *(f"{text}\n" for text in new)])
        )
    return "\n".join(blocks)


def markdown_of(table: Table, *, has_notes: bool = True) -> str:
    """A table of the report and its notes; a heading over columns stands before their titles, one over rows in bold."""
    titles = [f"{c.group}: {c.title.lower()}" if c.group else c.title for c in table.columns]
    lines = [titles, ["---:" if column.is_number else "---" for column in table.columns]]
    for row in table.rows:
        texts = [text.replace("|", "\\|") for text in row.texts]
        lines.append([f"**{texts[0]}**", *[""] * (len(titles) - 1)] if row.is_heading else texts)
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return "\n".join([text, *(f"{plain_text(note)}\n" for note in table.notes if has_notes)])


def differences(runs: WholeRuns) -> str:
    """Every comparison that has runs, paired by seed."""
    blocks = []
    for corpus in runs.corpora:
        for table in gap_tables(corpus_label(corpus), runs.gaps(corpus)):
            title = table.caption.removesuffix(": are the seeds enough?")
            blocks.append(f"**{title}**\n\n{markdown_of(table)}")
    return "\n".join(blocks) or NO_RECORDS


def static_and_dynamic(runs: WholeRuns) -> str:
    """Every model by itself: what dynamic evaluation makes of it, at which point of the grid."""
    rows = []
    for corpus, variant, seed in _models(runs):
        for split in paper.SPLITS:
            stages: tuple[Stage, Stage] = ("finetuned", "dynamic evaluation")
            values = [variant.perplexities.get((stage, split), {}).get(seed) for stage in stages]
            if values[0] is None or values[1] is None:
                continue
            point, tried = _chosen(runs, variant.run, seed, split)
            name = model_name(corpus, variant, seed)
            change = percent_text(values[1] / values[0] - 1.0)
            rows.append([name, split, f"{values[0]:.2f}", f"{values[1]:.2f}", change, point, tried])
    if not rows:
        return NO_RECORDS
    header = ("model", "split", "static", "dynamic", "change", "point of the grid", "points tried")
    return markdown_table(header, "llrrrlr", rows) + "\n"


def _models(runs: WholeRuns) -> Iterator[tuple[str, Variant, int]]:
    for corpus in runs.corpora:
        for head in HEADS:
            for variant in runs.variants(corpus, head):
                for seed in sorted(variant.epochs):
                    yield corpus, variant, seed


def grid_points(runs: WholeRuns, run: RunIdentity, seed: int) -> list[DynamicEvaluationRecord]:
    """All dynamic evaluations of a finetuned model."""
    own = [e.payload for e in runs.material.dynamic_evaluations]
    return [p for p in own if _same(p.run, run) and p.run.seed == seed and p.run.phase == "finetune" and p.complete]


def _chosen(runs: WholeRuns, run: RunIdentity, seed: int, split: Split) -> tuple[str, str]:
    """The point that won on validation, and how many of the recipe's grid were tried."""
    points = grid_points(runs, run, seed)
    tried = [p for p in points if p.split == "valid"]
    count = f"{len({(p.learning_rate, p.decay) for p in tried})} of {len(grid(recipe(run.recipe).dynamic_evaluation))}"
    chosen = next((p for p in reversed(points) if p.chosen and p.split == split), None)
    if chosen is None:
        return "", count
    edges = grid_edges(chosen, tried)
    words = f" ({' and '.join(edges)} on the edge)" if edges else ""
    return f"η = {chosen.learning_rate:.3g}, λ = {chosen.decay:.3g}{words}", count


def _same(one: RunIdentity, other: RunIdentity) -> bool:
    """Whether two runs are of one variant: all but seed and phase."""
    return (one.recipe, one.overrides, one.precision) == (other.recipe, other.overrides, other.precision)


# --- ranks and times ------------------------------------------------------------------------------------------------


def rank_cells(spectrum: Spectrum) -> list[str]:
    """The ranks by every rule, the noise floor and the effective rank."""
    counts = [spectrum.count(rule).rank for rule in RANK_RULES]
    ranks = ["below noise" if count is None else f"{count:,}" for count in counts]
    return [*ranks, f"{spectrum.noise_floor / spectrum.largest:.1e}", f"{spectrum.effective_rank:.0f}"]


RANK_HEADER = (*RANK_RULES, "noise floor / largest", "effective rank")


def ranks(runs: WholeRuns) -> str:
    """Ranks by every rule, with the noise floor and the loss of the same model beside them."""
    published = {(rank.corpus, rank.head): f"{rank.rank:,}" for rank in paper.RANKS}
    rows = []
    for corpus, variant, seed in _models(runs):
        for m in spectra_of(runs, variant.run, seed):
            stage: Stage = "finetuned" if m.run.phase == "finetune" else "trained"
            value = variant.perplexities.get((stage, "test"), {}).get(seed)
            loss = "" if value is None else f"{math.log(value):.3f} ({value:.2f})"
            # Short, since the table is wide: the table of times has the epochs.
            where = "" if corpus == "ptb" else f"{corpus_label(corpus)}, "
            name = f"{head_label(variant.run.head)}, {where}seed {seed}, {stage}"
            paper_rank = published.get((corpus, same_head(m.run.head)), "")
            rows.append([name, loss, *rank_cells(m.spectrum), paper_rank])
    if not rows:
        return NO_RECORDS
    header = ("model", "test loss in nats (perplexity)", *RANK_HEADER, "press32 in the paper")
    return markdown_table(header, "lr" + "r" * (len(RANK_HEADER) + 1), rows) + "\n"


def spectra_of(runs: WholeRuns, run: RunIdentity, seed: int) -> list[ModelSpectrum]:
    own = [e.payload for e in runs.material.model_spectra]
    return [m for m in own if _same(m.run, run) and m.run.seed == seed and m.split == "test"]


def times(runs: WholeRuns) -> str:
    """How long each stage of a run took."""
    rows = []
    for corpus, variant, seed in _models(runs):
        cells = []
        at_once = 1
        for phase in ("train", "finetune"):
            epochs = list(runs.curve(variant, phase, seed).values())
            seconds = sum(e.seconds for e in epochs)
            at_once = max([at_once, *(e.concurrent_runs for e in epochs)])
            ended = f", ended {finetuning_end(epochs)}" if phase == "finetune" and epochs else ""
            cells.append(f"{len(epochs)} epochs, {seconds_text(seconds)}{ended}" if epochs else "")
        points = grid_points(runs, variant.run, seed)
        spent = [m.spectrum.seconds for m in spectra_of(runs, variant.run, seed)]
        rows.append(
            [
                f"{head_label(variant.run.head)}, {corpus_label(corpus)}, seed {seed}",
                str(at_once),
                *cells,
                f"{sum(p.split == 'valid' for p in points)} points and test, {grid_seconds(points):.0f} s"
                if points
                else "",
                seconds_text(sum(s for s in spent if s is not None)) if spent else "",
            ]
        )
    if not rows:
        return NO_RECORDS
    header = ("run", "runs at once", "training", "finetuning", "dynamic evaluation", "spectrum")
    return markdown_table(header, "lrrrrr", rows) + "\n"


def finetuning_end(epochs: Sequence[EpochRecord]) -> str:
    """What ended it: the published rule, its limit, or the time budget of the run."""
    run = epochs[0].run
    settings = with_overrides(recipe(run.recipe), run.overrides).finetuning
    trigger = NonMonotonicTrigger(settings.patience)
    fired = [trigger.fires(e.valid_loss_over_rows) for e in sorted(epochs, key=lambda e: e.epoch)]
    if fired[-1]:
        return "by its rule"
    return "at its limit" if len(epochs) >= settings.epochs else "by the time budget"


def grid_seconds(points: Sequence[DynamicEvaluationRecord]) -> float:
    """Of wall time: points that were evaluated together have one time, and the winner stands there a second time."""
    return sum({p.seconds for p in points})
