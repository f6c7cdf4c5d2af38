"""The benchmark of two checkouts, run alternately on one machine, which shows if a change made losses slower.

    python benchmarks/compare_checkouts.py OLD NEW --suite gpu --repeats 2 -- --only linear --only logits

Each checkout runs its own benchmark on its own sources, so that a change of names between them does no harm. A row is
an implementation of ours in a case that both have; its time is taken relative to the baseline of the same case in the
same run, and medians over the repeats are compared. Everything after ``--`` goes to the benchmark. A checkout is a
folder: ``git worktree add OLD COMMIT`` makes one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from measuring import mib_text

from sigsoftmax.records import read_payloads
from sigsoftmax.records.schemas.speed import Measurement

Row = tuple[str, str]
"""case, implementation"""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a row: medians over the repeats of one checkout."""

    ratio: float
    """time relative to the baseline of the case"""
    peak_mib: float | None


@dataclass(frozen=True, kw_only=True)
class Change:
    """A row of both checkouts."""

    row: Row
    old: Cost
    new: Cost

    @property
    def factor(self) -> float:
        """time of the new checkout relative to the old one"""
        return self.new.ratio / self.old.ratio


def run(checkout: Path, suite: str, arguments: Sequence[str]) -> list[Measurement]:
    """The measurements of one run of a checkout's benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.jsonl"
        command = [sys.executable, f"benchmarks/{suite}.py", "--out", str(out), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
        done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.DEVNULL, check=False)
        if done.returncode or not out.is_file():
            raise SystemExit(f"the benchmark of {checkout} ended with status {done.returncode} and wrote no records")
        return list(read_payloads(out, Measurement))


def costs(runs: Iterable[Iterable[Measurement]]) -> dict[Row, Cost]:
    """Our implementations that are compared by time; one that is its case's baseline is not."""
    found: dict[Row, list[Measurement]] = defaultdict(list)
    for measured in runs:
        for m in measured:
            if m.implementation.startswith("ours") and m.baseline != m.implementation:
                found[m.case, m.implementation].append(m)
    return {
        row: Cost(
            ratio=statistics.median(m.ratio for m in repeats),
            peak_mib=max((m.peak_mib for m in repeats if m.peak_mib is not None), default=None),
        )
        for row, repeats in found.items()
    }


def changes(old: Mapping[Row, Cost], new: Mapping[Row, Cost]) -> list[Change]:
    """Rows of both, the one that became slowest first."""
    both = [Change(row=row, old=old[row], new=new[row]) for row in old if row in new]
    return sorted(both, key=lambda change: -change.factor)


def text(found: Sequence[Change], left_out: int) -> str:
    """A line for each row, and the median over them."""
    lines = [
        f"{change.factor:.3f}x  {mib_text(change.old.peak_mib) or '?'} -> {mib_text(change.new.peak_mib) or '?'} MiB  "
        f"{change.row[0]}: {change.row[1]}"
        for change in found
    ]
    median = statistics.median(change.factor for change in found)
    lines.append(
        f"\n{len(found)} rows: median {median:.3f}x, most {found[0].factor:.3f}x, least {found[-1].factor:.3f}x"
    )
    if left_out:
        lines.append(f"{left_out} rows are in one checkout only, and are left out")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a folder that holds the checkout to compare with")
    parser.add_argument("new", type=Path, help="a folder that holds the changed checkout")
    parser.add_argument("--suite", choices=("cpu", "gpu"), required=True, help="which benchmark")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each checkout (default: %(default)s)")
    parser.epilog = "What follows -- is handed to the benchmark."
    # argparse takes positional arguments behind -- only where they are the first ones.
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, further = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    checkouts = [options.old.resolve(), options.new.resolve()]
    for checkout in checkouts:
        if not (checkout / "benchmarks" / f"{options.suite}.py").is_file():
            parser.error(f"{checkout} is no checkout: it has no benchmarks/{options.suite}.py")
    runs: list[list[list[Measurement]]] = [[], []]
    for repeat in range(options.repeats):
        # The order changes from repeat to repeat: a machine that grows warm or busy favours neither.
        for which in (0, 1) if repeat % 2 == 0 else (1, 0):
            print(f"repeat {repeat + 1} of {options.repeats}: {checkouts[which]}", flush=True)
            runs[which].append(run(checkouts[which], options.suite, further))
    old, new = (costs(which) for which in runs)
    found = changes(old, new)
    if not found:
        raise SystemExit("the checkouts have no row in common")
    print(text(found, left_out=len(old.keys() ^ new.keys())))


if __name__ == "__main__":
    main()
