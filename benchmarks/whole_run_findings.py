"""Sentences on the paper's claims, made from the records of the whole runs.

A claim about losses holds, or does not, where the interval over at least three seeds leaves out zero. Until then it is
open, and the sentence says what the seeds on record show.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paper_queue import QUEUE
from whole_runs import HEADS, NOT_RUN, WholeRuns, finetuning_end, last_epoch, line_heads, seeds_text, spectra_of

from sigsoftmax.records.published import paper
from sigsoftmax.records.published.paper import Split, Stage
from sigsoftmax.records.schemas.spectra import Spectrum
from sigsoftmax.records.statistics import LEAST_SEEDS, PairedDifference
from sigsoftmax.report.material import corpus_label
from sigsoftmax.report.number_text import range_text, sample_text, sentence
from sigsoftmax.report.sections.gaps import SCALED, Judged, percent_text
from sigsoftmax.report.sections.perplexities import Variant, published_text
from sigsoftmax.report.theme import head_label, same_head

Verdict = Literal["holds", "does not hold", "open"]
TITLES: dict[Verdict, str] = {
    "holds": "What holds",
    "does not hold": "What does not hold",
    "open": "What is open",
}
EARLY = 22
"""the epoch after which heads were compared before there were whole runs"""
WIDTH = 400
"""hidden units of the paper's models with a single output function"""


@dataclass(frozen=True)
class Claim:
    verdict: Verdict
    text: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question if the second head has a lower perplexity than the first."""

    title: str
    first: str
    second: str
    corpus: str = "ptb"


QUESTIONS = (
    Question(title="sigsoftmax is lower than softmax", first="softmax", second="sigsoftmax"),
    Question(title="sigsoftmax is lower than softmax of scaled logits", first=SCALED, second="sigsoftmax"),
    Question(title="sigmoid is lower than sigsoftmax", first="sigsoftmax", second="sigmoid"),
    Question(title="MoSS is lower than MoS", first="mos(K=15)", second="moss(K=15)"),
    Question(title="sigsoftmax is lower than softmax", first="softmax", second="sigsoftmax", corpus="wikitext-2"),
)


def findings(runs: WholeRuns, early_lead: float | None) -> str:
    """All claims by their verdict. ``early_lead``: what the short runs gave, relative to softmax."""
    made = list(claims(runs, early_lead))
    blocks = []
    for verdict, title in TITLES.items():
        texts = [claim.text for claim in made if claim.verdict == verdict]
        lines = "".join(f"- {text}\n" for text in texts) or "- Nothing that the records on hand can say.\n"
        blocks.append(f"**{title}**\n\n{lines}")
    return "\n".join(blocks)


def claims(runs: WholeRuns, early_lead: float | None) -> Iterator[Claim]:
    for question in QUESTIONS:
        asked = list(_of_question(runs, question))
        yield from asked or [Claim("open", _not_run(runs, question))]
        if question is QUESTIONS[0]:
            yield from _leads(runs, early_lead)
            yield from _finetuning(runs)
            yield from _dynamic(runs)
    yield from _levels(runs)
    yield from _ranks(runs)


# --- losses ---------------------------------------------------------------------------------------------------------


def _of_question(runs: WholeRuns, question: Question) -> Iterator[Claim]:
    """One claim for each schedule that both heads were run with."""
    gaps = [g for g in runs.gaps(question.corpus) if (g.first, g.second) == (question.first, question.second)]
    for setting in dict.fromkeys(gap.setting for gap in gaps):
        here = {gap.stage: gap for gap in gaps if gap.setting == setting and gap.split == "test"}
        if not here:
            continue
        last = here[max(here, key=paper.STAGES.index)]
        parts = [f"{_stage_words(stage)} {percent_text(gap.relative)}{_paper_gap(gap)}" for stage, gap in here.items()]
        text = (
            f"*{question.title}* ({corpus_label(question.corpus)}, {setting}): its test perplexity relative to that of "
            f"{head_label(question.first)} is {'; '.join(parts)}. {_resolution(last)}"
        )
        yield Claim(_verdict(last), text)


def _verdict(gap: Judged) -> Verdict:
    if not gap.paired.is_resolved:
        return "open"
    return "holds" if gap.size > 0.0 else "does not hold"


def _stage_words(stage: Stage) -> str:
    return {"trained": "after training", "finetuned": "finetuned", "dynamic evaluation": "under dynamic evaluation"}[
        stage
    ]


def _paper_gap(gap: Judged) -> str:
    if gap.published is None:
        return ""
    return f" (paper {percent_text(gap.published.second.mean / gap.published.first.mean - 1.0)})"


def _resolution(gap: Judged) -> str:
    count = len(gap.paired.seeds)
    if gap.paired.is_resolved is None:
        return f"With {seeds_text(count)} nothing is resolved; {LEAST_SEEDS} are the least."
    resolved = "resolved" if gap.paired.is_resolved else "not resolved"
    return f"At the last of these stages the gap is {resolved} by {count} seeds ({gap.interval()} in perplexity)."


def _not_run(runs: WholeRuns, question: Question) -> str:
    """A sentence on the lines of the queue that are waited for."""
    lacking = {head for head in (question.first, question.second) if not runs.variants(question.corpus, head)}
    wanted = [line.number for line in QUEUE if lacking & line_heads(line, question.corpus)]
    lines = f" (line{'s' if len(wanted) > 1 else ''} {', '.join(map(str, wanted))} of the queue)" if wanted else ""
    return f"*{question.title}* ({corpus_label(question.corpus)}): {NOT_RUN}{lines}."


def _pairs(runs: WholeRuns) -> Iterator[tuple[Variant, Variant, list[int]]]:
    """softmax and sigsoftmax under one schedule, with the seeds that both have."""
    for softmax in runs.variants("ptb", "softmax"):
        for other in runs.variants("ptb", "sigsoftmax"):
            seeds = sorted(softmax.epochs.keys() & other.epochs.keys())
            if softmax.setting == other.setting and seeds:
                yield softmax, other, seeds


def _leads(runs: WholeRuns, early_lead: float | None) -> Iterator[Claim]:
    """The later course of the lead that sigsoftmax has in the first epochs."""
    for softmax, other, seeds in _pairs(runs):
        ends = (EARLY, min(last_epoch(softmax), last_epoch(other)))
        leads = [lead_at(runs, softmax, other, seeds, epoch) for epoch in ends]
        if leads[0] is None or leads[1] is None or ends[1] <= EARLY:
            continue
        before = "" if early_lead is None else f", as in the runs of {EARLY} epochs ({percent_text(early_lead)})"
        kept = "is still there" if leads[1].mean < 0.0 else "is gone"
        verdict: Verdict = "open"
        if leads[0].is_resolved and leads[1].is_resolved:
            verdict = "holds" if leads[1].mean < 0.0 else "does not hold"
        starts = ", ".join(f"{head_label(v.run.head)} at epoch {averaging_text(v)}" for v in (softmax, other))
        yield Claim(
            verdict,
            f"*The lead of the first epochs remains.* Relative to softmax the validation perplexity of sigsoftmax is "
            f"{percent_text(leads[0].perplexity_change)} after {EARLY} epochs{before}, and "
            f"{percent_text(leads[1].perplexity_change)} after {ends[1]}: the lead {kept} ({seeds_text(len(seeds))}). "
            f"Averaging of the weights begins where validation stalls: {starts}.",
        )


def _finetuning(runs: WholeRuns) -> Iterator[Claim]:
    """The part of different lengths of finetuning in the gap after it; said where the lengths differ."""
    for softmax, other, seeds in _pairs(runs):
        parts, differ = [], False
        for seed in seeds:
            curves = [runs.curve(variant, "finetune", seed) for variant in (softmax, other)]
            common = min(max(curve, default=0) for curve in curves)
            lead = lead_at(runs, softmax, other, [seed], common, phase="finetune")
            if lead is None:
                continue
            differ |= len({len(curve) for curve in curves}) > 1
            lengths = " and ".join(
                f"{len(curve)} epochs of {head_label(variant.run.head)} (ended {finetuning_end(list(curve.values()))})"
                for variant, curve in zip((softmax, other), curves, strict=True)
            )
            parts.append(
                f"With seed {seed} finetuning took {lengths}; after {common} epochs of both the validation perplexity "
                f"of sigsoftmax relative to softmax was {percent_text(lead.perplexity_change)}."
            )
        if differ:
            yield Claim(
                "open",
                f"*The gap after finetuning does not come from its length.* {' '.join(parts)} The rule ends finetuning "
                "where validation is worse than the best of all but the last five epochs before.",
            )


def lead_at(
    runs: WholeRuns, softmax: Variant, other: Variant, seeds: Sequence[int], epoch: int, phase: str = "train"
) -> PairedDifference | None:
    """The other head's validation loss less softmax's after so many epochs, over the seeds that have come so far."""

    def losses(variant: Variant) -> Mapping[int, float]:
        curves = {seed: runs.curve(variant, phase, seed) for seed in seeds}
        return {seed: curve[epoch].valid_loss for seed, curve in curves.items() if epoch in curve}

    return PairedDifference.of(losses(other), losses(softmax))


def averaging_text(variant: Variant) -> str:
    """The first epoch of training with averaged weights; least to most over seeds."""
    starts = [
        min((e.epoch for e in own if e.run.phase == "train" and e.optimizer == "asgd"), default=None)
        for own in variant.epochs.values()
    ]
    return range_text(starts)


def _dynamic(runs: WholeRuns) -> Iterator[Claim]:
    """A sentence that tells if dynamic evaluation lowers the perplexity of sigsoftmax by more than that of softmax."""
    for softmax, other, _ in _pairs(runs):
        gains = [_gains(variant, "test") for variant in (softmax, other)]
        difference = PairedDifference.of(gains[1], gains[0])
        if difference is None:
            continue
        texts = [
            percent_text(math.exp(sum(own[seed] for seed in difference.seeds) / len(difference.seeds)) - 1.0)
            for own in gains
        ]
        published = [_published_gain(same_head(variant.run.head), "test") for variant in (softmax, other)]
        verdict: Verdict = "open"
        if difference.is_resolved:
            verdict = "holds" if difference.mean < 0.0 else "does not hold"
        favoured = "sigsoftmax" if difference.mean < 0.0 else "softmax"
        resolved = (
            f"with {seeds_text(len(difference.seeds))} nothing is resolved"
            if difference.interval is None
            else f"{'resolved' if difference.is_resolved else 'not resolved'} by {len(difference.seeds)} seeds"
        )
        yield Claim(
            verdict,
            f"*Dynamic evaluation favours sigsoftmax.* It changes the test perplexity of softmax by {texts[0]} and "
            f"that of sigsoftmax by {texts[1]} (paper {published[0]} and {published[1]}), so that it favours "
            f"{favoured} here; {resolved}.",
        )


def _gains(variant: Variant, split: Split) -> dict[int, float]:
    """By seed: the logarithm of the dynamic perplexity over the static one."""
    static = variant.perplexities.get(("finetuned", split), {})
    dynamic = variant.perplexities.get(("dynamic evaluation", split), {})
    return {seed: math.log(dynamic[seed] / static[seed]) for seed in sorted(static.keys() & dynamic.keys())}


def _published_gain(head: str, split: Split) -> str:
    gap = [paper.results(corpus="ptb", head=head, stage=s, split=split)[0].perplexity for s in paper.STAGES[1:]]
    return percent_text(gap[1] / gap[0] - 1.0)


def _levels(runs: WholeRuns) -> Iterator[Claim]:
    """A sentence that tells if shorter runs come to the paper's perplexities."""
    parts, beyond = [], False
    for head in HEADS:
        for variant in runs.variants("ptb", head):
            values = []
            for stage in paper.STAGES[1:]:
                sample = variant.sample((stage, "test"))
                published = paper.results(corpus="ptb", head=head, stage=stage, split="test")
                if sample is None or not published or published[0].deviation is None:
                    continue
                beyond |= abs(sample.mean - published[0].perplexity) > 2.0 * published[0].deviation
                text = f"{_stage_words(stage)} {sample_text(sample)} (paper {published_text(published[0])})"
                values.append(text)
            if values:
                parts.append(f"{head_label(head)} after {variant.epochs_text()} epochs: {', '.join(values)}")
    if parts:
        verdict: Verdict = "does not hold" if beyond else "holds"
        yield Claim(
            verdict,
            "*The level of the paper is reached in fewer epochs, within two of its standard deviations.* Test "
            f"perplexity on Penn Treebank, {'; '.join(parts)}.",
        )


# --- ranks ----------------------------------------------------------------------------------------------------------


def _ranks(runs: WholeRuns) -> Iterator[Claim]:
    found = {head: list(_spectra(runs, head)) for head in HEADS}
    found = {head: spectra for head, spectra in found.items() if spectra}
    ours = {head: _counts(spectra, "press32") for head, spectra in found.items()}
    if "softmax" in ours:
        sure = range_text(_counts(found["softmax"], "noise"))
        yield Claim(
            "holds" if max(ours["softmax"]) <= WIDTH + 2 else "does not hold",
            f"*The rank of softmax is at most d + 2 = {WIDTH + 2}.* By the paper's threshold it is "
            f"{range_text(ours['softmax'])}; {sure} singular values stand above the noise floor.",
        )
    published = {rank.head: rank.rank for rank in paper.RANKS if rank.corpus == "ptb"}
    both = [head for head in ours if head in published]
    if len(both) > 1:
        order = sorted(both, key=lambda head: published[head])
        same = all(max(ours[a]) < min(ours[b]) for a, b in itertools.pairwise(order))
        listed = ", ".join(f"{head_label(head)} {range_text(ours[head])} (paper {published[head]:,})" for head in order)
        yield Claim(
            "holds" if same else "does not hold",
            f"*By the paper's threshold the heads order by rank as in its table 3:* {listed}.{_losses_beside(found)}",
        )
        named = ", ".join(f"{head_label(head)} {range_text(_counts(own, 'numpy32'))}" for head, own in found.items())
        yield Claim(
            "does not hold",
            "*A rank can be stated without its threshold.* By the threshold of `numpy.linalg.matrix_rank` in float32 "
            f"the same matrices have the ranks {named}.",
        )
    yield from _rank_and_loss(found, ours)


def _spectra(runs: WholeRuns, head: str) -> Iterator[tuple[Spectrum, float | None]]:
    """The spectra of every seed, with the test loss of the finetuned model."""
    for variant in runs.variants("ptb", head):
        for seed in variant.epochs:
            loss = variant.perplexities.get(("finetuned", "test"), {}).get(seed)
            yield from ((m.spectrum, loss) for m in spectra_of(runs, variant.run, seed))


def _counts(spectra: Sequence[tuple[Spectrum, float | None]], rule: str) -> list[int]:
    return [spectrum.count(rule).rank or 0 for spectrum, _ in spectra]


def _losses_beside(found: Mapping[str, Sequence[tuple[Spectrum, float | None]]]) -> str:
    """A sentence with the test losses of the models whose ranks were told."""
    losses = {head: [math.log(value) for _, value in spectra if value is not None] for head, spectra in found.items()}
    texts = [f"{head_label(head)} {_nats_text(values)}" for head, values in losses.items() if values]
    return f" Their test losses in nats: {', '.join(texts)}." if texts else ""


def _nats_text(losses: Sequence[float]) -> str:
    low, high = f"{min(losses):.3f}", f"{max(losses):.3f}"
    return low if low == high else f"{low} to {high}"


def _rank_and_loss(
    found: Mapping[str, Sequence[tuple[Spectrum, float | None]]], ours: Mapping[str, Sequence[int]]
) -> Iterator[Claim]:
    """Said where a head of higher rank has the higher perplexity."""
    if not {"softmax", "sigsoftmax"} <= found.keys():
        return
    means = {}
    for head in ("softmax", "sigsoftmax"):
        values = [loss for _, loss in found[head] if loss is not None]
        if not values:
            return
        means[head] = sum(values) / len(values)
    if min(ours["sigsoftmax"]) > max(ours["softmax"]) and means["sigsoftmax"] > means["softmax"]:
        yield Claim(
            "does not hold",
            f"*A higher rank lowers the loss.* The finetuned sigsoftmax has the rank {range_text(ours['sigsoftmax'])} "
            f"and the test perplexity {means['sigsoftmax']:.2f}, softmax {range_text(ours['softmax'])} and "
            f"{means['softmax']:.2f} ({seeds_text(len(found['softmax']))}).",
        )


# --- the README -----------------------------------------------------------------------------------------------------


def summary(runs: WholeRuns) -> str:
    """A line on the losses of sigsoftmax and softmax, and one on their ranks."""
    gaps = [g for g in runs.gaps("ptb") if (g.first, g.second, g.split) == ("softmax", "sigsoftmax", "test")]
    gaps = [g for g in gaps if g.stage != "trained" and g.setting == gaps[0].setting]
    if not gaps:
        return f"- [Whole runs](docs/reproduction.md) of the paper's recipes: {NOT_RUN}.\n"
    ways = {"finetuned": "after finetuning (static)", "dynamic evaluation": "under dynamic evaluation"}
    shown = " and ".join(f"{percent_text(g.relative)} {ways[g.stage]}" for g in gaps)
    lengths = {v.epochs_text() for head in ("softmax", "sigsoftmax") for v in runs.variants("ptb", head)[:1]}
    unequal = ", after unequal numbers of epochs" if len(lengths) > 1 else ""
    control = "" if runs.variants("ptb", SCALED) else f" The control for scale, {SCALED}, is {NOT_RUN}."
    title = "- In [whole runs](docs/reproduction.md) the test perplexity of sigsoftmax relative to that of softmax"
    lines = [f"{title} is {shown}{unequal}. {_resolution(gaps[-1])}{control}"]
    found = {head: list(_spectra(runs, head)) for head in ("softmax", "sigsoftmax")}
    if all(found.values()):
        floor = max(s.noise_floor / s.largest for own in found.values() for s, _ in own)
        parts = []
        for head, own in found.items():
            ranks = [range_text(_counts(own, rule)) for rule in ("press32", "numpy32", "noise")]
            losses = [math.log(value) for _, value in own if value is not None]
            named = (
                f"rank {ranks[0]} by the paper's threshold, {ranks[1]} by numpy's in float32 and {ranks[2]} above the "
                "noise floor"
                if not parts
                else f"{ranks[0]}, {ranks[1]} and {ranks[2]}"
            )
            parts.append(f"{head} has {named}" + (f", at a test loss of {_nats_text(losses)} nats" if losses else ""))
        lines.append(f"- {sentence('; '.join(parts))} (noise floor: {floor:.0e} of the largest singular value).")
    return "".join(f"{line}\n" for line in lines)
