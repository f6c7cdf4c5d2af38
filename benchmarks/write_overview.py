"""Make the tables and the picture of README.md, docs/benchmarks.md and docs/distributed.md: part of `make bench-docs`.

The pages are written by hand but for what stands between `<!-- generated: NAME -->` and `<!-- end -->`. `--check`
writes nothing and exits with 1 if a page or the picture is not what the records give.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import overview
import time_memory
import whole_run_findings
import whole_runs
from bars import drawn_from
from overview import Suites
from whole_runs import WholeRuns
from write_docs import NO_RECORDS, markdown_table, rewritten
from write_reproduction import RESULTS, Records

from sigsoftmax import family

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "distributed.md")
PICTURE = ROOT / "docs" / "images" / "time-memory.png"
NOTES = {
    "softmax": "`alpha` is the control for a change of scale",
    "sigsoftmax": "Kanai et al. 2018",
    "shifted_sigsoftmax": "`b` one number or one per class, fixed or learned",
    "sigmoid": "a baseline of the paper",
    "relu": "a baseline of the paper",
    "gss": "Parthiban et al. 2021; `k = 2` is sigsoftmax",
    "softcap": "bounded logits, as in Gemma 2",
}


def members(suites: Suites) -> str:
    """The family with its formulas, and what each member costs relative to our softmax."""
    columns = overview.price_columns(suites)
    shown = {device: _longest_rows(columns, device) for device in ("GPU", "CPU")}
    rows = []
    for member in family.table():
        if member.form.is_builtin:
            prices = [_price(member.name, shown[device]) for device in ("GPU", "CPU")]
            rows.append([f"`{member.name}`", f"`{member.formula}`", NOTES[member.name], *prices])
    # Records of an older version are marked where there is no room for a sentence.
    heads = [
        f"{device}, older version" if overview.is_older(cases) else device
        for device, cases in (("GPU", suites.gpu), ("CPU", suites.cpu))
    ]
    return markdown_table(("`function=`", "phi(z)", "", *heads), "lllrr", rows) + "\n"


def _longest_rows(columns: Mapping[str, Mapping[str, float]], device: str) -> Mapping[str, float]:
    """The prices in a loss of given logits with the most classes, where no matrix product hides them."""
    found = {title: ratios for title, ratios in columns.items() if title.startswith(f"{device}: loss of logits")}
    return found[max(found, key=lambda title: int(title.rpartition("V=")[2].replace(",", "")))] if found else {}


def _price(name: str, ratios: Mapping[str, float]) -> str:
    """Of the member with fixed parameters."""
    for member, ratio in ratios.items():
        called, parenthesis, values = member.partition("(")
        if called == name:
            return f"{ratio:.2f}x" + (f" ({values}" if parenthesis else "")
    return overview.NONE


def parts(suites: Suites, records: Records) -> dict[str, Callable[[], str]]:
    return {
        "peers": lambda: overview.peers(suites),
        "peers-place": lambda: _place(suites),
        "verdicts": lambda: overview.verdicts(suites),
        "cpu-members": lambda: overview.cpu_members(suites),
        "prices": lambda: overview.prices(suites),
        "exchange": lambda: overview.exchange(suites),
        "targets": lambda: overview.targets_met(suites),
        "members": lambda: members(suites),
        "paper": lambda: _paper(records.whole),
    }


def _paper(runs: WholeRuns) -> str:
    """The whole runs of the paper's recipes: a line or two, and the table."""
    return f"{whole_run_findings.summary(runs)}\n{whole_runs.first_table(runs, is_short=True)}"


def _place(suites: Suites) -> str:
    names = (overview.LOGITS, overview.LINEAR, overview.WIDE, overview.CPU_LOGITS, overview.CPU_LINEAR)
    cases = suites.gpu | suites.cpu
    shown = [cases[name] for name in names if name in cases]
    return f"Measured on {overview.places(shown)}.\n" if shown else NO_RECORDS


def digest(panels: Sequence[time_memory.Panel]) -> str:
    return hashlib.sha256(json.dumps([dataclasses.asdict(panel) for panel in panels]).encode()).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is out of date")
    given = parser.parse_args(arguments)
    suites = Suites.read()
    made = parts(suites, Records(RESULTS))
    stale = 0
    for page in PAGES:
        stale |= rewritten(page, made, check=given.check, advice="run make bench-docs")
    panels = time_memory.panels(suites)
    if panels and drawn_from(PICTURE) != digest(panels):
        if given.check:
            print(f"{PICTURE.name} is not what the records give; run make bench-docs")
            stale = 1
        else:
            time_memory.draw(panels, PICTURE, digest(panels))
    return stale


if __name__ == "__main__":
    sys.exit(main())
