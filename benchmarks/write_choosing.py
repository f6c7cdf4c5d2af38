"""Make the tables of docs/choosing.md from records: `make choosing-docs`.

Capacity and perplexities come from results/, times from benchmarks/records. The page is written by hand but for what
stands between `<!-- generated: NAME -->` and `<!-- end -->`. `--check` writes nothing and exits with 1 if the page is
not what the records give.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import capacity_tables
import overview
from capacity_tables import Fits
from overview import Suites
from write_docs import rewritten
from write_reproduction import RESULTS, ROOT, Records, controls

PAGE = ROOT / "docs" / "choosing.md"


def parts(fits: Fits, suites: Suites, records: Records) -> dict[str, Callable[[], str]]:
    return {
        "capacity": lambda: capacity_tables.changes(fits),
        "fits": lambda: capacity_tables.every_fit(fits),
        "starts": lambda: capacity_tables.starts_below(fits),
        "mixtures": lambda: capacity_tables.mixtures(fits),
        "ranks": lambda: capacity_tables.ranks(fits),
        "controls": lambda: controls(records),
        "prices": lambda: overview.prices(suites),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    given = parser.parse_args(arguments)
    made = parts(Fits.read(RESULTS / "capacity"), Suites.read(), Records(RESULTS))
    return rewritten(PAGE, made, check=given.check, advice="run make choosing-docs")


if __name__ == "__main__":
    sys.exit(main())
