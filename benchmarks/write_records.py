"""Make the tables of docs/records.md: every file of records, what it was measured with, and how to make it anew.

Part of `make bench-docs` and `make reproduction-docs`. The page is written by hand but for what stands between
`<!-- generated: NAME -->` and `<!-- end -->`. `--check` writes nothing and exits with 1 if the page is not what the
records give.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from write_docs import markdown_table, rewritten

from sigsoftmax.records import Environment, read

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "records.md"
FOLDERS = ("benchmarks/records", "results", "src/sigsoftmax/records/published")
NOT_RECORDED = "not recorded"
CHANGED = {"language_models.py alone": "the stage alone is called times now"}
"""beginnings of recorded commands that are written otherwise since, and what is other"""


@dataclass(frozen=True)
class Place:
    """The page that shows the records of a file, and the work of making them anew."""

    shown: str
    takes: str


BENCHMARKS = "[benchmarks](benchmarks.md)"
SHORT_RUNS = "[reproduction](reproduction.md#the-stage-gate)"
PLACES = {
    "benchmarks/records/classifiers/digits.jsonl": Place(
        "[classifiers](classifiers.md#digits-through-two-units)", "half an hour of one CPU core"
    ),
    "benchmarks/records/compiling.jsonl": Place(
        "[compiling kernels](benchmark-tables.md#compiling-kernels)", "2 minutes of a CPU"
    ),
    "benchmarks/records/cpu.jsonl": Place(BENCHMARKS, "10 minutes of a CPU that is free"),
    "benchmarks/records/distributed/cpu.jsonl": Place(
        "[many processes](distributed.md#measured)", "2 minutes of two free CPU cores"
    ),
    "benchmarks/records/gpu.jsonl": Place(BENCHMARKS, "5 minutes of an H200"),
    "benchmarks/records/huggingface/steps.jsonl": Place(
        "[Hugging Face](huggingface.md#memory-and-speed)", "5 minutes of a CPU"
    ),
    "benchmarks/records/spectra/cpu.jsonl": Place(
        "[analysis](analysis.md#measured)", "5 minutes of two free CPU cores"
    ),
    "benchmarks/records/spectra/cuda.jsonl": Place("[analysis](analysis.md#measured)", "2 minutes of an H200"),
    "results/capacity": Place("[choosing](choosing.md#what-each-head-can-express)", "2 to 5 minutes of a CPU each"),
    "results/paper": Place("[reproduction](reproduction.md)", "27 minutes of an H200 each"),
    "results/ptb-bf16-persistent.jsonl": Place(SHORT_RUNS, "2 minutes of an H200"),
    "results/ptb-bf16.jsonl": Place(SHORT_RUNS, "7 minutes of an H200"),
    "results/ptb-dynamic.jsonl": Place(
        "[reproduction](reproduction.md#dynamic-evaluation-after-22-epochs)", "1 minute of an H200 and the short runs"
    ),
    "results/ptb-float32.jsonl": Place(SHORT_RUNS, "9 minutes of an H200"),
    "results/ptb-mixtures.jsonl": Place(SHORT_RUNS, "3 minutes of an H200"),
    "results/ptb-ranks.jsonl": Place(
        "[reproduction](reproduction.md#ranks-after-22-epochs)", "1 minute of an H200 and the short runs"
    ),
    "results/ptb-timing.jsonl": Place("[reproduction](reproduction.md#time-and-memory)", "4 minutes of an H200"),
    "results/rehearsals": Place("nowhere: trials of whole runs with a few epochs", "3 minutes of an H200 each"),
    "src/sigsoftmax/records/published/reference_curves.jsonl": Place(
        SHORT_RUNS, "some minutes of an H200 and the code of others"
    ),
}
"""by file, or by folder for all files below it"""


def files(root: Path) -> Iterator[tuple[str, list[Environment]]]:
    """Every file of records below ``root`` with its environments; an environment that repeats stands there once."""
    for folder in FOLDERS:
        for path in sorted((root / folder).glob("**/*.jsonl")):
            found: dict[tuple[str, ...], Environment] = {}
            for record in read(path):
                where = record.environment
                day = where.time_utc[:10]
                found.setdefault((day, where.device, where.revision_text, where.command, *where.libraries), where)
            yield path.relative_to(root).as_posix(), list(found.values())


def place_of(name: str) -> Place:
    for known, place in PLACES.items():
        if name == known or name.startswith(f"{known}/"):
            return place
    raise ValueError(f"{name}: no entry in PLACES says where these records are shown; add one to {Path(__file__).name}")


def provenance(root: Path = ROOT) -> str:
    """The page of each file, and when, where and with which code it was measured; a table for each folder."""
    blocks = []
    for folder in FOLDERS:
        inside = [(name, found) for name, found in files(root) if name.startswith(f"{folder}/")]
        if inside:
            blocks.append(f"In `{folder}`:\n\n{_table(folder, inside)}\n")
    return "\n".join(blocks)


def _table(folder: str, inside: Sequence[tuple[str, list[Environment]]]) -> str:
    """A row for all files that are alike."""
    named: dict[tuple[str, ...], list[str]] = {}
    for name, environments in inside:
        place = place_of(name)
        cells = (
            place.shown,
            _listed(_measured_text(where) for where in environments),
            _listed(_commit_text(where) for where in environments),
            _listed(", ".join(where.libraries) or NOT_RECORDED for where in environments),
            place.takes,
        )
        # The fits of a folder have one file.
        named.setdefault(cells, []).append(name.removeprefix(f"{folder}/").removesuffix("/capacity.jsonl"))
    rows = [[_names(names), *cells] for cells, names in named.items()]
    heads = ("records", "shown in", "measured", "commit", "other libraries", "to make them anew")
    return markdown_table(heads, "l" * len(heads), rows)


def _names(names: Sequence[str]) -> str:
    """Files in one cell, as plain text: a long name in another font would not be broken, and widen the table."""
    return "<br>".join(names)


def _listed(texts: Iterator[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _measured_text(where: Environment) -> str:
    date = f"{where.time_utc[:10]}, " if where.time_utc[:1].isdigit() else ""
    torch = f", torch {where.torch_version}" if where.torch_version[:1].isdigit() else ""
    return f"{date}{where.device}{torch}"


def _commit_text(where: Environment) -> str:
    return where.revision_text.removeprefix("commit ")


def without_commit(root: Path = ROOT) -> str:
    """Sentences on the files that lack the commit, or were measured with code that was changed since the commit."""
    every = dict(files(root))
    lacking = [name for name, environments in every.items() if not all(where.commit for where in environments)]
    changed = [name for name, environments in every.items() if any(where.clean is False for where in environments)]
    return (
        f"Of {len(every)} files {_have(lacking)} records without a commit, and {_have(changed)} records of code "
        "that had been changed since the commit that they name.\n"
    )


def _have(names: Sequence[str]) -> str:
    return "1 has" if len(names) == 1 else f"{len(names) or 'none'} {'have' if names else 'has'}"


def commands(root: Path = ROOT) -> str:
    """The commands as the records hold them, by file, from the folder of the project."""
    lines = []
    for name, environments in files(root):
        found = dict.fromkeys(_from_here(where.command) for where in environments)
        lines += [f"# {name}", *found, ""]
    return "```sh\n" + "\n".join(lines[:-1]) + "\n```\n"


def _from_here(command: str) -> str:
    if command in ("", NOT_RECORDED):
        return f"# {NOT_RECORDED}"
    script = command.partition(" ")[0]
    here = f"python benchmarks/{command}" if script.endswith(".py") else command.removeprefix("python -m ")
    changed = next((words for beginning, words in CHANGED.items() if command.startswith(beginning)), "")
    return f"# {changed}: {here}" if changed else here


PARTS = {"provenance": provenance, "without-commit": without_commit, "record-commands": commands}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    given = parser.parse_args(arguments)
    return rewritten(PAGE, PARTS, check=given.check, advice="run make bench-docs")


if __name__ == "__main__":
    sys.exit(main())
