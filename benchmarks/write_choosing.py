"""Make the tables of docs/choosing.md from records: `make choosing-docs`.

Capacity and perplexities come from results/, times from benchmarks/records. The page is written by hand but for what
stands between `<!-- generated: NAME -->` and `<!-- end -->`. `--check` writes nothing and exits with 1 if the page is
not what the records give.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from measuring import RECORDS, Measurement, mib_text
from write_docs import NO_RECORDS, rewritten
from write_reproduction import RESULTS, ROOT, Records, heads, table

from sigsoftmax import records
from sigsoftmax.analysis.capacity import softmax_width_of_equal_kl
from sigsoftmax.records.capacity import CapacityResult

PAGE = ROOT / "docs" / "choosing.md"
WIDTH = 8
"""of the fits that the page shows; the records have more"""
TIMED = "cross-entropy of logits, N=2048 V=32000"
"""the case of the CPU benchmark that has every member"""


def fits(folder: Path) -> dict[str, list[CapacityResult]]:
    """The fits on every language, by its description."""
    by_language: dict[str, list[CapacityResult]] = {}
    for path in sorted(folder.glob("**/*.jsonl")):
        for record in records.read(path):
            if record.kind == CapacityResult.KIND:
                result = record.payload_as(CapacityResult)
                by_language.setdefault(result.language, []).append(result)
    return by_language


def capacity() -> str:
    """The least KL at one width on every language, and its distance from softmax's."""
    by_language = fits(RESULTS / "capacity")
    if not by_language:
        return NO_RECORDS
    found: dict[str, dict[str, CapacityResult]] = {}
    curves: dict[str, dict[int, float]] = {}
    for language, results in by_language.items():
        curves[language] = {result.width: result.kl for result in results if result.head == "softmax"}
        for result in results:
            if result.width == WIDTH:
                found.setdefault(result.head, {})[language] = result
    size = next(iter(by_language.values()))[0]
    note = (
        f"{size.contexts} contexts, {size.words} words, width {WIDTH}. KL in nats ± the spread over starts; below it "
        "the change against\nsoftmax, and the width at which softmax reaches the same KL. The last column has the "
        "numerical ranks of the fits\n(`press32`), in the order of the languages.\n\n"
    )

    def change(head: str) -> float:
        return sum(result.kl / curves[language][WIDTH] for language, result in found[head].items())

    rows = [
        [
            f"`{head}`",
            *(_kl_text(found[head][language], curves[language]) for language in by_language),
            ", ".join(str(found[head][language].rank) for language in by_language),
        ]
        for head in sorted(found, key=lambda head: (head != "softmax", -change(head)))
    ]
    return note + table(["head", *by_language, "ranks"], rows)


def _kl_text(result: CapacityResult, curve: Mapping[int, float]) -> str:
    text = f"{result.kl:.3f} ± {result.spread:.3f}"
    if result.head == "softmax":
        return text
    percent = round(100.0 * (result.kl / curve[result.width] - 1.0))
    width = softmax_width_of_equal_kl(result.kl, curve)
    shown = f"{width:.1f}" if 0.0 < width < math.inf else f"> {max(curve)}" if width else f"< {min(curve)}"
    return f"{text}<br>{percent:+d}%, {shown}" if percent else f"{text}<br>0%"


def perplexities() -> str:
    return heads(Records(RESULTS))


def times() -> str:
    """Time of a loss of logits, forward and backward, relative to the baseline of its case."""
    found = [record.payload_as(Measurement) for record in records.read(RECORDS / "cpu.jsonl")]
    shown = [m for m in found if m.case == TIMED]
    if not shown:
        return NO_RECORDS
    header = ["implementation", f"time relative to {shown[0].baseline}", "memory MiB"]
    rows = [[m.implementation, f"{m.ratio:.2f}", mib_text(m.peak_mib)] for m in shown]
    return table(header, rows)


PARTS: Mapping[str, Callable[[], str]] = {"capacity": capacity, "perplexities": perplexities, "times": times}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    given = parser.parse_args(arguments)
    return rewritten(PAGE, lambda name: PARTS[name](), check=given.check, advice="run make choosing-docs")


if __name__ == "__main__":
    sys.exit(main())
