"""The opening of the page: heads ranked, and those of them that the records speak for."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from sigsoftmax.records.grouping import grouped
from sigsoftmax.records.published import paper
from sigsoftmax.records.schemas.sweeps import TrialRecord
from sigsoftmax.records.schemas.training import RunIdentity
from sigsoftmax.records.statistics import LEAST_SEEDS
from sigsoftmax.report.findings.comparisons import comparisons
from sigsoftmax.report.findings.rankings import RankedHead, Ranking
from sigsoftmax.report.findings.verdicts import QUESTION, longer_runs, verdict
from sigsoftmax.report.markup import join, tag
from sigsoftmax.report.material import Material, corpus_label, differing
from sigsoftmax.report.number_text import counted, listed, sentence
from sigsoftmax.report.sections.perplexities import SPLIT_TITLES, STAGE_TITLES, Place, Variant, collect
from sigsoftmax.report.sections.section import Absent, Block, Section
from sigsoftmax.report.theme import Looks, same_head

__all__ = ["rankings", "section"]

SHOWN = 3
"""Rankings that are open at most; further ones are folded, and those that can resolve nothing, but for the first."""
COMMAND = "sigsoftmax compare --seeds 1,2,3"
NO_TWO = f"These records do not say: no two heads were trained on one text under one budget. `{COMMAND}` trains some."


def section(material: Material, looks: Looks) -> Section | Absent:
    found = rankings(material)
    if not found:
        return Absent(QUESTION, COMMAND)
    ranked = [ranking for ranking in found if len(ranking.heads) > 1]
    alone = [ranking for ranking in found if len(ranking.heads) == 1]
    findings: list[str] = []
    blocks: list[Block] = []
    if len(ranked) > 1:
        blocks = _several(ranked, looks)
    elif ranked:
        findings, blocks = verdict(ranked[0]), [ranked[0].table(looks)]
    else:
        findings = [NO_TWO]
    if alone:
        names = listed([", ".join((ranking.heads[0].label, *ranking.subject)) for ranking in alone])
        blocks.append(tag("p", f"Not ranked, for want of a second head: {names}.", class_="note"))
    return Section(
        id="verdict",
        title=QUESTION,
        short="Verdict",
        lead="Heads that were trained on one text under one budget, the best first. The answer is computed from the "
        "records and ends where they do.",
        findings=findings,
        blocks=blocks,
        key_findings=0,
    )


def _sentences(ranking: Ranking, found: Sequence[Ranking]) -> list[str]:
    """The verdict, and after its answer what longer runs say."""
    answer, *bounds = verdict(ranking)
    longer = longer_runs(ranking, found)
    return [answer, *([longer] if longer else []), *bounds]


def _several(found: Sequence[Ranking], looks: Looks) -> list[Block]:
    """Each ranking for itself, under what tells it from the others; then why they are apart."""
    names = [
        ", ".join(parts) or ranking.extent
        for parts, ranking in zip(differing([r.subject for r in found]), found, strict=True)
    ]
    shown = [
        join(
            # A field of a recipe keeps its spelling.
            tag("h3", name if "=" in name.partition(",")[0] else sentence(name)),
            tag("ul", [tag("li", text) for text in _sentences(ranking, found)], class_="findings"),
            ranking.table(looks).to_html(),
        )
        for name, ranking in zip(names, found, strict=True)
    ]
    count = max(sum(ranking.can_resolve for ranking in found[:SHOWN]), 1)
    if folded := shown[count:]:
        more = counted(len(folded), "more ranking")
        if not any(ranking.can_resolve for ranking in found[count:]):
            more += f", with fewer than {LEAST_SEEDS} seeds in common"
        shown = [*shown[:count], tag("details", tag("summary", sentence(more)), folded)]
    texts = len({ranking.subject[0] for ranking in found})
    if texts > 1:
        reason = "a loss on one text says nothing about a loss on another."
        shown.append(tag("p", f"The records are of {texts} texts, each ranked for itself: {reason}", class_="note"))
    if len(found) > texts:
        reason = "part of a difference between them would be the length or the setting."
        text = f"Runs of different lengths or settings are ranked for themselves: {reason}"
        shown.append(tag("p", text, class_="note"))
    return list(shown)


# --- rankings ---------------------------------------------------------------------------------------------------------


def rankings(material: Material) -> list[Ranking]:
    """The rankings of all runs on record; those first that can resolve something, then those of more heads."""
    found = [comparison.ranking for comparison in comparisons(entry.payload for entry in material.comparisons)]
    compared = {_identity(entry.payload.run) for entry in material.comparisons}
    trials = [entry.payload for entry in material.trials if _identity(entry.payload.run) not in compared]
    found += _of_trials(trials)
    compared |= {_identity(trial.run) for trial in trials}
    found += _of_training(material, compared)
    return sorted(found, key=lambda ranking: (not ranking.can_resolve, -len(ranking.heads)))


def _identity(run: RunIdentity) -> Hashable:
    """A run in all its phases."""
    return run.recipe, run.overrides, same_head(run.head), run.corpus_checksum, run.precision, run.seed


def _subject(run: RunIdentity, changes: Sequence[str] = ()) -> tuple[str, ...]:
    """The text and all settings but the head: two heads must share them to be compared."""
    changed = sorted({change for change in (*run.overrides, *changes) if not change.startswith("model.head")})
    precision = () if run.precision == "float32" else (run.precision,)
    return corpus_label(run.corpus), f"{run.recipe.partition('-')[0]} recipes", *changed, *precision


def _of_trials(trials: Sequence[TrialRecord]) -> list[Ranking]:
    """Trials of sweeps, those at one point of the grid together."""
    found = []
    for same in grouped(trials, lambda t: (_subject(t.run, t.point), t.run.corpus_checksum, t.run.phase)).values():
        heads = grouped(same, lambda trial: same_head(trial.run.head))
        found.append(Ranking.of_tests(heads, subject=_subject(same[0].run, same[0].point)))
    return found


def _of_training(material: Material, compared: set[Hashable]) -> list[Ranking]:
    """Trained models at the last stage that most heads have reached, but for runs that a comparison has ranked."""
    kept = []
    for variant in (one for variants in collect(material).values() for one in variants):
        seeds = {seed for values in variant.perplexities.values() for seed in values}
        if any(_identity(replace(variant.run, seed=seed)) not in compared for seed in seeds):
            kept.append(variant)
    groups = grouped(kept, lambda variant: (_subject(variant.run), variant.run.corpus_checksum))
    by_head = [grouped(variants, lambda variant: same_head(variant.run.head)) for variants in groups.values()]
    return [_ranked_training({head: found[0] for head, found in heads.items()}) for heads in by_head]


def _ranked_training(heads: Mapping[str, Variant]) -> Ranking:
    places: list[Place] = [(stage, split) for stage in paper.STAGES for split in paper.SPLITS]
    stage, split = place = max(reversed(places), key=lambda place: _reached(heads, place))
    shown = {head: variant for head, variant in heads.items() if place in variant.perplexities}
    notes = []
    if any(variant.mark(place) == "†" for variant in shown.values()):
        notes.append("The perplexity is the least of the epochs on record where there is no evaluation of the run.")
    if missing := [head for head in heads if head not in shown]:
        notes.append(f"Without a perplexity at this stage: {', '.join(missing)}.")
    recorded = {one for variant in heads.values() for one, _ in variant.perplexities}
    if later := [STAGE_TITLES[one] for one in paper.STAGES[paper.STAGES.index(stage) + 1 :] if one in recorded]:
        notes.append(f"On record for fewer heads or seeds, and so not ranked by: {', '.join(later)}.")
    return Ranking.of(
        [_ranked_variant(head, variant, place) for head, variant in shown.items()],
        quantity=f"{SPLIT_TITLES[split].lower()} loss",
        perplexity_of=SPLIT_TITLES[split].lower(),
        subject=(*_subject(next(iter(shown.values())).run), STAGE_TITLES[stage]),
        notes=tuple(notes),
    )


def _reached(heads: Mapping[str, Variant], place: Place) -> tuple[int, bool]:
    """The number of heads that have come there, and whether with seeds enough: the last such stage is ranked by."""
    counts = [len(variant.perplexities[place]) for variant in heads.values() if place in variant.perplexities]
    return len(counts), sum(count >= LEAST_SEEDS for count in counts) > 1


def _ranked_variant(head: str, variant: Variant, place: Place) -> RankedHead:
    # The losses in nats again.
    perplexities = variant.perplexities[place]
    losses = {seed: math.log(value) if value > 0.0 else -math.inf for seed, value in perplexities.items()}
    phases = ("train",) if place[0] == "trained" else ("train", "finetune")
    every = {seed: [e for e in variant.epochs.get(seed, ()) if e.run.phase in phases] for seed in losses}
    epochs = {seed: own for seed, own in every.items() if own}
    return RankedHead(
        head=head,
        values=losses,
        losses=losses,
        seconds={seed: sum(e.seconds for e in own) for seed, own in epochs.items()},
        epochs={seed: len(own) for seed, own in epochs.items()},
        parameters=frozenset({variant.run.parameters}),
    )
