"""Make the tables and pictures of docs/reproduction.md from the records in results/: `make reproduction-docs`.

Whole runs are in results/paper/ and have tables and pictures of their own; files in results/ itself are of short runs.
The page is written by hand but for what stands between `<!-- generated: NAME -->` and `<!-- end -->`. `--check` writes
nothing and exits with 1 if the page or a picture is not what the records give.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import paper_queue
import whole_run_findings
import whole_run_pictures
import whole_runs
from whole_runs import RANK_HEADER, WholeRuns, rank_cells, seeds_text
from write_docs import NO_RECORDS, markdown_table, rewritten

from sigsoftmax.records import Environment, read
from sigsoftmax.records.published.paper import RANKS
from sigsoftmax.records.published.references import ReferenceCurve, reference_curves
from sigsoftmax.records.schemas.model_spectra import ModelSpectrum
from sigsoftmax.records.schemas.training import DynamicEvaluationRecord, EpochRecord, EvaluationRecord
from sigsoftmax.records.statistics import LEAST_SEEDS, PairedDifference, student_quantile

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reproduction.md"
RESULTS = ROOT / "results"
IMAGES = PAGE.parent / "images"

GATE_FROM, GATE = 8, 0.04
DEFECT_FROM = 10
"""the epoch from which a curve so far above the reference shows a defect"""
"""epoch from which a curve must be within this fraction of the reference"""
EQUAL_EPOCHS, EQUAL = range(15, 23), 0.01
"""epochs whose mean perplexity must agree between precisions, and how closely"""

REFERENCE_RECIPES = {"softmax": "ptb-softmax", "mos(K=15)": "ptb-mos"}
"""our names of the heads of the reference curves"""
CONTROLS = {
    "ptb-softmax": "softmax",
    "ptb-softmax-1.5": "softmax(alpha=1.5): the scale alone",
    "ptb-sigsoftmax": "sigsoftmax",
    "ptb-gss-0": "gss(k=0)",
}
"""recipes that are compared with softmax under equal conditions, in the order of the table"""
CONTROL_SEEDS, CONTROL_EPOCH = (141, 142, 143), 22
CONTROL_ARITHMETICS = {"bf16": "torch's", "bf16, persistent": "persistent"}
"""heads are compared within one of these, which the table names by the kernels of the LSTM layers"""
NO_RUN = "no run"

Epochs = dict[int, EpochRecord]


class Records:
    """All that results/ holds, by run: short runs, and the whole ones for themselves."""

    def __init__(self, folder: Path) -> None:
        self.curves: dict[tuple[str, str, int], Epochs] = defaultdict(dict)
        """(recipe, arithmetic, seed) -> epoch -> record, of training"""
        self.epochs: list[tuple[EpochRecord, Environment]] = []
        self.evaluations: list[EvaluationRecord] = []
        self.dynamic: list[tuple[DynamicEvaluationRecord, Environment]] = []
        self.spectra: list[ModelSpectrum] = []
        self.whole = WholeRuns(folder / paper_queue.FOLDER.name)
        self.whole_folder = folder / paper_queue.FOLDER.name
        for path in sorted(folder.glob("*.jsonl")):
            for record in read(path):
                if record.kind == EpochRecord.KIND:
                    epoch = record.payload_as(EpochRecord)
                    self.epochs.append((epoch, record.environment))
                    if epoch.run.phase == "train" and "timing" not in path.stem:
                        self.curves[epoch.run.recipe, arithmetic(epoch), epoch.run.seed][epoch.epoch] = epoch
                elif record.kind == EvaluationRecord.KIND:
                    self.evaluations.append(record.payload_as(EvaluationRecord))
                elif record.kind == ModelSpectrum.KIND:
                    self.spectra.append(record.payload_as(ModelSpectrum))
                elif record.kind == DynamicEvaluationRecord.KIND:
                    self.dynamic.append((record.payload_as(DynamicEvaluationRecord), record.environment))

    def of(self, recipe: str) -> Iterator[tuple[str, int, Epochs]]:
        for (name, precision, seed), epochs in sorted(self.curves.items()):
            if name == recipe:
                yield precision, seed, epochs


def arithmetic(epoch: EpochRecord) -> str:
    """The precision, and whether the persistent recurrence computed the LSTM layers; if not, it was torch's own."""
    return f"{epoch.run.precision}, persistent" if epoch.is_persistent else epoch.run.precision


def perplexity(record: EpochRecord) -> float:
    """As the reference reports it."""
    return math.exp(record.valid_loss_over_rows)


def stage_gate(records: Records) -> str:
    """Our curves beside the reference's, and the verdict."""
    blocks = []
    for curve in reference_curves():
        recipe = REFERENCE_RECIPES[curve.head]
        runs = [*records.of(recipe), *_whole(records, curve.head)]
        if runs:
            blocks.append(_gate_table(curve, recipe, runs))
    return "\n".join(blocks) or NO_RECORDS


def _whole(records: Records, head: str) -> Iterator[tuple[str, int, Epochs]]:
    """The curves of whole runs, of which the gate sees the first epochs."""
    for variant in records.whole.variants("ptb", head):
        for seed in sorted(variant.epochs):
            yield "whole run", seed, records.whole.curve(variant, "train", seed)


def _gate_table(curve: ReferenceCurve, recipe: str, runs: Sequence[tuple[str, int, Epochs]]) -> str:
    header = ["epoch", "reference", *(f"{precision}, seed {seed}" for precision, seed, _ in runs)]
    rows = []
    worst, highest = [0.0] * len(runs), [-math.inf] * len(runs)
    for epoch, reference in curve.perplexities.items():
        cells = []
        for index, (_, _, epochs) in enumerate(runs):
            if epoch not in epochs:
                cells.append("")
                continue
            off = perplexity(epochs[epoch]) / reference - 1.0
            cells.append(f"{perplexity(epochs[epoch]):.1f} ({off:+.1%})")
            if epoch >= GATE_FROM:
                worst[index] = max(worst[index], off, key=abs)
            if epoch >= DEFECT_FROM:
                highest[index] = max(highest[index], off)
        rows.append([str(epoch), f"{reference:.1f}", *cells])
    verdicts = [f"{off:+.1%}: {'within' if abs(off) <= GATE else 'outside'} {GATE:.0%}" for off in worst]
    rows.append([f"largest from epoch {GATE_FROM}", "", *verdicts])
    defects = [f"{off:+.1%}: {'a defect' if off > GATE else 'no defect'}" for off in highest]
    rows.append([f"highest from epoch {DEFECT_FROM}", "", *defects])
    shown = markdown_table(header, "l" + "r" * (len(header) - 1), rows)
    return f"Validation perplexity of `{recipe}` (batch 10, over rows). Reference: {curve.source}.\n\n{shown}\n"


def first_epoch(records: Records) -> str:
    """Training loss inside the first epoch, which shows regularisation that is off."""
    rows = [
        [f"reference of {REFERENCE_RECIPES[curve.head]}", curve.precision, str(curve.seed)]
        + [f"{part:.2f}" for part in curve.first_train_losses]
        for curve in reference_curves()
    ]
    rows += [
        [recipe, precision, str(seed), *(f"{part:.2f}" for part in epochs[1].train_loss_parts)]
        for (recipe, precision, seed), epochs in sorted(records.curves.items())
        if 1 in epochs
    ]
    if not rows:
        return NO_RECORDS
    most = max(map(len, rows)) - 3
    header = ["recipe", "precision", "seed", *(f"updates {200 * i + 1} to {200 * i + 200}" for i in range(most))]
    return markdown_table(header, "ll" + "r" * (most + 1), [row + [""] * (most + 3 - len(row)) for row in rows]) + "\n"


def precisions(records: Records) -> str:
    """Mean perplexity of epochs 15 to 22 in each precision, over seeds."""
    means: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for (recipe, precision, seed), epochs in records.curves.items():
        if all(epoch in epochs for epoch in EQUAL_EPOCHS):
            values = [math.exp(epochs[epoch].valid_loss) for epoch in EQUAL_EPOCHS]
            means[recipe, precision][seed] = statistics.fmean(values)
    rows = []
    for (recipe, precision), by_seed in sorted(means.items()):
        exact = means.get((recipe, "float32"), {})
        shared = sorted(exact.keys() & by_seed.keys())
        verdict = ""
        if precision != "float32" and shared:  # torch's own LSTM in IEEE float32 is what the others are held against
            ratio = statistics.fmean(by_seed[s] for s in shared) / statistics.fmean(exact[s] for s in shared)
            within = "within" if abs(ratio - 1.0) <= EQUAL else "NOT within"
            verdict = f"{ratio - 1.0:+.2%} over {len(shared)} seeds: {within} {EQUAL:.0%}"
        seeds = ", ".join(f"{seed}: {mean:.2f}" for seed, mean in sorted(by_seed.items()))
        rows.append([recipe, precision, f"{statistics.fmean(by_seed.values()):.2f}", seeds, verdict])
    if not rows:
        return NO_RECORDS
    header = ("recipe", "precision", "mean of epochs 15 to 22", "by seed", "against float32")
    return markdown_table(header, "llrll", rows) + "\n"


def heads(records: Records) -> str:
    """The last epoch that all seeds of a recipe have."""
    by_recipe: dict[tuple[str, str], list[Epochs]] = defaultdict(list)
    for (recipe, precision, _), epochs in records.curves.items():
        by_recipe[recipe, precision].append(epochs)
    rows = []
    for (recipe, precision), runs in sorted(by_recipe.items()):
        last = min(max(epochs) for epochs in runs)
        values = [math.exp(epochs[last].valid_loss) for epochs in runs]
        train = [math.exp(epochs[last].train_loss) for epochs in runs]
        rows.append([recipe, precision, str(last), _spread(values), _spread(train), str(len(runs))])
    if not rows:
        return NO_RECORDS
    header = ("recipe", "precision", "epoch", "valid perplexity", "train perplexity", "seeds")
    return markdown_table(header, "llrrrr", rows) + "\n"


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def times(records: Records) -> str:
    """Seconds of an epoch, by how many runs shared the device, without the first epochs, which capture graphs."""
    groups: dict[tuple[str, str, str, int], list[EpochRecord]] = defaultdict(list)
    for epoch, where in records.epochs:
        if epoch.epoch > 2:
            groups[epoch.run.recipe, arithmetic(epoch), where.device, epoch.concurrent_runs].append(epoch)
    rows = []
    for (recipe, precision, device, at_once), epochs in sorted(groups.items()):
        seconds = statistics.median(e.seconds for e in epochs)
        memory = max((e.peak_mib or 0.0) for e in epochs) / at_once
        rows.append(
            [recipe, precision, device, str(at_once), f"{seconds:.2f}", f"{seconds / at_once:.2f}", f"{memory:.0f}"]
        )
    if not rows:
        return NO_RECORDS
    header = ["recipe", "arithmetic", "device", "runs at once", "s per epoch", "s per epoch and model", "MiB per model"]
    return markdown_table(header, "lllrrrr", rows) + "\n"


def dynamic(records: Records) -> str:
    rows = [
        [
            r.run.recipe,
            str(r.run.seed),
            r.split,
            f"{r.learning_rate:.2g}",
            f"{r.decay:.2g}",
            f"{r.tokens:,}{'' if r.complete else ' (part)'}",
            f"{r.perplexity:.2f}",
            f"{r.seconds:.0f}",
            where.device,
        ]
        for r, where in records.dynamic
    ]
    if not rows:
        return NO_RECORDS
    header = ("recipe", "seed", "split", "η", "λ", "tokens", "perplexity", "s", "device")
    return markdown_table(header, "lrlrrrrrl", rows) + "\n"


def control_losses(records: Records, how: str, *, has_whole_runs: bool = False) -> dict[str, dict[int, float]]:
    """recipe -> seed -> validation loss after equally many epochs, in one arithmetic.

    The first epochs of a whole run stand in for a short run that is not on record: neither the learning rate nor
    anything else in these epochs depends on how many will follow.
    """
    found = {
        recipe: {
            seed: epochs[CONTROL_EPOCH].valid_loss
            for name, seed, epochs in records.of(recipe)
            if name == how and seed in CONTROL_SEEDS and CONTROL_EPOCH in epochs
        }
        for recipe in CONTROLS
    }
    for variant in records.whole.corpora.get("ptb", ()) if has_whole_runs else ():
        for seed in set(CONTROL_SEEDS) & variant.epochs.keys():
            last = records.whole.curve(variant, "train", seed).get(CONTROL_EPOCH)
            if variant.run.recipe in found and last is not None and arithmetic(last) == how:
                found[variant.run.recipe].setdefault(seed, last.valid_loss)
    return found


def controls(records: Records) -> str:
    """Heads under equal conditions after equally many epochs, with paired differences from softmax."""
    rows = []
    for how, kernels in CONTROL_ARITHMETICS.items():
        values = control_losses(records, how, has_whole_runs=True)
        if not any(values.values()):
            continue
        for recipe, words in CONTROLS.items():
            found = values[recipe]
            cells = [f"{math.exp(found[seed]):.2f}" if seed in found else NO_RUN for seed in CONTROL_SEEDS]
            mean = f"{statistics.fmean(math.exp(loss) for loss in found.values()):.2f}" if found else ""
            mean += f" ({seeds_text(len(found))})" if 0 < len(found) < len(CONTROL_SEEDS) else ""
            difference = _paired(found, values["ptb-softmax"]) if recipe != "ptb-softmax" else ""
            rows.append([words, kernels, *cells, mean, difference])
    if not rows:
        return NO_RECORDS
    seeds = [f"seed {seed}" for seed in CONTROL_SEEDS]
    header = ["head", "LSTM kernels", *seeds, "mean", "difference from softmax, nats (95 %)"]
    return markdown_table(header, "ll" + "r" * (len(header) - 2), rows) + "\n"


def _paired(own: Mapping[int, float], base: Mapping[int, float]) -> str:
    """Mean difference of the losses over common seeds, with Student's interval where there are enough of them."""
    pairs = [own[seed] - base[seed] for seed in sorted(own.keys() & base.keys())]
    if not pairs:
        return ""
    mean = statistics.fmean(pairs)
    if len(pairs) < LEAST_SEEDS:
        return f"{mean:+.4f} ({seeds_text(len(pairs))}: no interval)"
    half = student_quantile(0.975, len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return f"{mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f})"


def ranks(records: Records) -> str:
    """Ranks by every rule, with the noise floor and a loss beside them."""
    published = {(rank.corpus, rank.head): rank.rank for rank in RANKS}
    rows = []
    for m in records.spectra:
        # A spectrum does not tell its recurrence; those on record are older than the persistent one.
        hows = (m.run.precision, f"{m.run.precision}, persistent")
        curves = (records.curves.get((m.run.recipe, how, m.run.seed)) for how in hows)
        epochs = next((curve for curve in curves if curve), {})
        last = epochs[max(epochs)] if epochs else None
        loss = "" if last is None else f"{last.valid_loss:.3f} ({math.exp(last.valid_loss):.1f})"
        paper = published.get((m.run.corpus, m.run.head))
        rows.append(
            [
                f"{m.run.recipe}, seed {m.run.seed}, {'' if last is None else last.epoch} epochs",
                loss,
                *rank_cells(m.spectrum),
                "" if paper is None else f"{paper:,}",
            ]
        )
    if not rows:
        return NO_RECORDS
    header = ["model", "valid loss in nats (perplexity)", *RANK_HEADER, "press32 in the paper, finetuned"]
    return markdown_table(header, "l" + "r" * (len(header) - 1), rows) + "\n"


def findings(records: Records) -> str:
    """The findings of the whole runs, with the lead of the short ones beside them."""
    short = [control_losses(records, how) for how in CONTROL_ARITHMETICS]
    losses = max(short, key=lambda found: sum(map(len, found.values())))
    early = PairedDifference.of(losses["ptb-sigsoftmax"], losses["ptb-softmax"])
    return whole_run_findings.findings(records.whole, None if early is None else early.perplexity_change)


def commands(records: Records) -> str:
    """The commands of whole runs, as their records hold them."""
    made = paper_queue.commands(records.whole_folder)
    return f"<!-- parsed, not run: half an hour of one H200 each -->\n```sh\n{made}```\n" if made else NO_RECORDS


PARTS: Mapping[str, Callable[[Records], str]] = {
    "whole-runs": lambda records: whole_runs.first_table(records.whole),
    "whole-runs-picture": lambda records: whole_run_pictures.picture_text(records.whole),
    "findings": findings,
    "paper-tables": lambda records: whole_runs.paper_tables(records.whole),
    "differences": lambda records: whole_runs.differences(records.whole),
    "static-dynamic": lambda records: whole_runs.static_and_dynamic(records.whole),
    "whole-runs-ranks": lambda records: whole_runs.ranks(records.whole),
    "spectra-picture": lambda records: whole_run_pictures.spectra_text(records.whole),
    "whole-runs-times": lambda records: whole_runs.times(records.whole),
    "whole-runs-commands": commands,
    "queue": lambda records: paper_queue.table(records.whole_folder),
    "stage-gate": stage_gate,
    "first-epoch": first_epoch,
    "precisions": precisions,
    "heads": heads,
    "controls": controls,
    "times": times,
    "dynamic-evaluation": dynamic,
    "ranks": ranks,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    arguments = parser.parse_args()
    records = Records(RESULTS)
    parts = {name: partial(part, records) for name, part in PARTS.items()}
    stale = rewritten(PAGE, parts, check=arguments.check, advice="run make reproduction-docs")
    drawn = whole_run_pictures.pictures(records.whole, IMAGES, check=arguments.check)
    if drawn and arguments.check:
        print(f"{', '.join(drawn)}: not what the records give; run make reproduction-docs")
        return 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
