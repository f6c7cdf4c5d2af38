"""The runs behind the tables of the paper, in an order and with schedules that were fixed before the first of them.

    python benchmarks/paper_queue.py                          # the queue, as docs/reproduction.md shows it
    python benchmarks/paper_queue.py 1 --data FOLDER          # one line of it: about 27 minutes of one H200

A line is one command of `sigsoftmax reproduce`, which is printed, so that it can be run without this script. Records of
all its runs are added to results/, also of runs that diverge and of a line that is stopped; weights are not kept.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sigsoftmax.records import Record, read
from sigsoftmax.records.schemas.model_spectra import ModelSpectrum
from sigsoftmax.records.schemas.training import DynamicEvaluationRecord, EpochRecord, EvaluationRecord

MINUTES = 27.0
SINGLE_EPOCHS, FINETUNING_EPOCHS = 440, 120
"""epochs of two heads side by side that fit beside the grid of dynamic evaluation, if that takes 150 s for each head"""
RUNS = Path("runs/paper")
FOLDER = Path(__file__).parents[1] / "results" / "paper"
STAGES = ("training", "finetuning", "dynamic evaluation", "ranks")


@dataclass(frozen=True, kw_only=True)
class Line:
    """Heads that are trained side by side, from the first update to the ranks."""

    number: int
    setting: str
    heads: tuple[str, ...]
    seed: int
    epochs: int
    finetuning_epochs: int = FINETUNING_EPOCHS

    @property
    def name(self) -> str:
        return f"{self.setting}-{'-'.join(self.heads)}-{self.seed}" + ("" if self.epochs < 1000 else f"-{self.epochs}")

    @property
    def table(self) -> str:
        """With all stages."""
        return "table4" if self.setting == "ptb" else "table5"

    def command(self, data: Path | None, minutes: float) -> list[str]:
        """Arguments of the package's command line, without the interpreter."""
        changes = [f"training.epochs={self.epochs}", f"finetuning.epochs={self.finetuning_epochs}"]
        return [
            *("reproduce", self.table, "--heads", ",".join(self.heads), "--first-seed", str(self.seed)),
            *("--minutes", f"{minutes:g}", "--device", "cuda", "--precision", "bf16"),
            *("--at-once", str(len(self.heads)), "--set", *changes, "--out", str(RUNS / self.name)),
            *(() if data is None else ("--data", str(data))),
        ]


QUEUE = (
    Line(number=1, setting="ptb", heads=("softmax", "sigsoftmax"), seed=141, epochs=SINGLE_EPOCHS),
    Line(number=2, setting="ptb", heads=("softmax", "sigsoftmax"), seed=142, epochs=SINGLE_EPOCHS),
    Line(number=3, setting="ptb", heads=("softmax", "sigsoftmax"), seed=143, epochs=SINGLE_EPOCHS),
    Line(number=4, setting="ptb", heads=("softmax-1.5", "sigmoid"), seed=141, epochs=SINGLE_EPOCHS),
    Line(number=5, setting="ptb", heads=("gss-0", "relu"), seed=141, epochs=SINGLE_EPOCHS),
    Line(number=6, setting="ptb", heads=("mos",), seed=28, epochs=400, finetuning_epochs=1000),
    Line(number=7, setting="ptb", heads=("moss",), seed=28, epochs=400, finetuning_epochs=1000),
    Line(number=8, setting="wt2", heads=("softmax",), seed=1882, epochs=330),
    Line(number=9, setting="wt2", heads=("sigsoftmax",), seed=1882, epochs=330),
    Line(number=10, setting="ptb", heads=("softmax",), seed=141, epochs=1000),
    Line(number=11, setting="ptb", heads=("sigsoftmax",), seed=141, epochs=1000),
)


def table(folder: Path = FOLDER) -> str:
    """The queue as a table for a page, with what the records in ``folder`` say of each line."""
    lines = [
        "| line | recipes, side by side | seed | epochs | of finetuning, at most | state |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for line in QUEUE:
        cells = (line.number, ", ".join(recipes(line)), line.seed, line.epochs, line.finetuning_epochs)
        lines.append(f"| {' | '.join(map(str, cells))} | {state(line, records_of(line, folder))} |")
    return "".join(f"{text}\n" for text in lines)


def recipes(line: Line) -> list[str]:
    return [f"{line.setting}-{head}" for head in line.heads]


def records_of(line: Line, folder: Path = FOLDER) -> list[Record]:
    path = folder / f"{line.name}.jsonl"
    return list(read(path)) if path.is_file() else []


def state(line: Line, records: Sequence[Record]) -> str:
    """The state of a line: if and when it was run, on which revision, and the stages that some head of it lacks."""
    if not records:
        return "not run yet"
    lacking = [stage for stage in STAGES if not all(_has(stage, line, recipe, records) for recipe in recipes(line))]
    where = records[-1].environment
    words = f"{where.time_utc[:10]}, {where.device}, {where.revision_text}"
    return f"stopped without all of: {', '.join(lacking)} ({words})" if lacking else f"done ({words})"


def _has(stage: str, line: Line, recipe: str, records: Sequence[Record]) -> bool:
    def payloads(kind: Any) -> list[Any]:
        found = [record.payload_as(kind) for record in records if record.kind == kind.KIND]
        return [payload for payload in found if payload.run.recipe == recipe]

    if stage == "training":
        return any(e.run.phase == "train" and e.epoch == line.epochs for e in payloads(EpochRecord))
    if stage == "finetuning":
        return any(e.run.phase == "finetune" and e.split == "test" for e in payloads(EvaluationRecord))
    if stage == "dynamic evaluation":
        return any(e.chosen and e.complete and e.split == "test" for e in payloads(DynamicEvaluationRecord))
    return bool(payloads(ModelSpectrum))


def commands(folder: Path = FOLDER) -> str:
    """The commands of the lines that were run, as their records hold them, without the interpreter."""
    lines = []
    for line in QUEUE:
        made = dict.fromkeys(r.environment.command.removeprefix("python -m ") for r in records_of(line, folder))
        lines += [f"# line {line.number}", *made] if made else []
    return "".join(f"{text}\n" for text in lines)


def gather(line: Line, results: Path) -> int:
    """Copy the records of all runs of a line into one file; returns how many there are."""
    lines = [text for path in sorted((RUNS / line.name).glob("**/*.jsonl")) for text in path.read_text().splitlines()]
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{line.name}.jsonl").write_text("".join(f"{text}\n" for text in lines))
    return len(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("line", nargs="?", type=int, choices=[line.number for line in QUEUE], help="of the queue")
    parser.add_argument("--data", type=Path, help="folder of the corpora (default: where fetch puts them)")
    parser.add_argument("--results", type=Path, default=Path("results/paper"), help="folder for the records")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of wall time (default: %(default)g)")
    options = parser.parse_args()
    if options.line is None:
        print(table(), end="")
        return 0
    line = QUEUE[options.line - 1]
    command = line.command(options.data, options.minutes)
    print("sigsoftmax", shlex.join(command), flush=True)
    try:
        return subprocess.run([sys.executable, "-m", "sigsoftmax", *command], check=False).returncode
    finally:
        print(f"{gather(line, options.results)} records of line {line.number} are in {options.results}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
