"""Which small defects the tests notice: python .ci/mutants.py [--number 75] [--seed 0] [--seconds 1800] [--out FILE]

A mutant is the package with one operator, comparison, number or condition changed. Mutants of the files that results
depend on most are drawn at random, and the tests of those files are run on each of them: those of ``make test``, and
where these pass, those of ``make test-all``. What survives is either a gap in the tests or a change that makes no
difference, as in the number of rows of a tile; the script prints every survivor, so that a person can tell.

Mutants are made in a copy of the checkout; the checkout itself is not touched.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

ROOT = Path(__file__).resolve().parents[1]
GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "family": (
        ("src/sigsoftmax/family",),
        ("tests/family", "tests/losses", "tests/backends/test_numerics.py", "tests/layers"),
    ),
    "token arithmetic": (
        ("src/sigsoftmax/contract/tokens.py", "src/sigsoftmax/contract/normalizing.py"),
        ("tests/losses", "tests/backends/test_numerics.py", "tests/backends/chunked", "tests/layers"),
    ),
    "kernels": (
        ("src/sigsoftmax/backends/triton/kernels",),
        ("tests/backends/triton",),
    ),
    "checkpoints": (
        ("src/sigsoftmax/lm/saving/checkpoints.py", "src/sigsoftmax/records/atomic_write.py"),
        ("tests/lm/saving", "tests/lm/training", "tests/records"),
    ),
    "records": (
        ("src/sigsoftmax/records",),
        ("tests/records", "tests/report", "tests/experiments/reproduce"),
    ),
}
"""name: files that are mutated, and the tests that are run on the mutants"""

UNENDED = "no end"
"""the tests of a mutant took longer than they may: nothing is known"""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutant:
    group: str
    file: str
    line: int
    before: str
    after: str
    content: str


@dataclass(frozen=True)
class Outcome:
    group: str
    file: str
    line: int
    before: str
    after: str
    noticed_by: str | None
    """``test``, ``test-all``, UNENDED, or None for a survivor"""
    seconds: float


def changed(node: ast.AST) -> ast.AST | None:
    """A copy of a node with one thing changed, or None where there is nothing to change."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPS:
            new.ops = [SWAPS[type(operator)]()]  # type: ignore[list-item]
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in SWAPS:
            new.op = SWAPS[type(operator)]()  # type: ignore[assignment]
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            return new.operand
        case ast.Constant(value=bool(value)):
            new.value = not value
        case ast.Constant(value=int(value) | float(value)):
            new.value = value + 1
        case _:
            return None
    return new


def mutants_of(group: str, path: Path) -> Iterator[Mutant]:
    """Every mutant of a file. Annotations and default values of kernels' types are left alone."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for place, node in enumerate(value if isinstance(value, list) else [value]):
                new = changed(node) if isinstance(node, ast.expr) else None
                if new is None:
                    continue
                _replace(parent, field, place, new)
                content = ast.unparse(tree)
                _replace(parent, field, place, node)
                yield Mutant(
                    group,
                    path.relative_to(ROOT).as_posix(),
                    node.lineno,
                    ast.unparse(node),
                    ast.unparse(new),
                    content,
                )


def _replace(parent: ast.AST, field: str, place: int, node: ast.AST) -> None:
    value = getattr(parent, field)
    if isinstance(value, list):
        value[place] = node
    else:
        setattr(parent, field, node)


def files_of(group: str, root: Path) -> list[Path]:
    paths = [root / place for place in GROUPS[group][0]]
    return [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]


def drawn(number: int, seed: int, groups: list[str]) -> list[Mutant]:
    """Mutants at random, as many of each group; files count by how much there is to change in them."""
    generator = random.Random(seed)
    chosen: list[Mutant] = []
    for group in groups:
        every = [mutant for file in files_of(group, ROOT) for mutant in mutants_of(group, file)]
        chosen += generator.sample(every, -(-number // len(groups)))
    return chosen


def run_tests(copy_of: Path, tests: Sequence[str], *, all_tests: bool, seconds: float) -> bool | None:
    """Whether tests pass; None where they have not ended in time."""
    environment = {**os.environ, "PYTHONPATH": str(copy_of / "src"), "OMP_NUM_THREADS": "1"}
    environment |= {"SIGSOFTMAX_ALL_TESTS": "1"} if all_tests else {}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-pno:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=copy_of, env=environment, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.returncode == 0


def own_tests(mutant: Mutant, copy_of: Path) -> list[str]:
    """The tests of the mutant's file alone: they notice most, and soonest."""
    place = Path(mutant.file).relative_to("src/sigsoftmax")
    path = "tests" / place.with_name(f"test_{place.name}")
    return [path.as_posix()] if (copy_of / path).is_file() else []


def judged(mutant: Mutant, copy_of: Path, seconds: float) -> Outcome:
    began = time.monotonic()
    path = copy_of / mutant.file
    original = path.read_bytes()
    tests = GROUPS[mutant.group][1]
    ways: list[tuple[str, bool, Sequence[str]]] = [("test", False, tests), ("test-all", True, tests)]
    if own := own_tests(mutant, copy_of):
        ways.insert(0, ("test", False, own))
    noticed = None
    try:
        path.write_text(mutant.content, encoding="utf-8")
        for name, whole, chosen in ways:
            passed = run_tests(copy_of, chosen, all_tests=whole, seconds=seconds)
            if not passed:
                noticed = UNENDED if passed is None else name
                break
    finally:
        path.write_bytes(original)
    about = {name: value for name, value in asdict(mutant).items() if name != "content"}
    return Outcome(**about, noticed_by=noticed, seconds=round(time.monotonic() - began, 1))


def check_unchanged(group: str, copy_of: Path, seconds: float) -> None:
    """Mutants are written without comments and in another layout: that alone must not fail a test."""
    originals = {path: path.read_bytes() for path in files_of(group, copy_of)}
    for path, content in originals.items():
        path.write_text(ast.unparse(ast.parse(content)), encoding="utf-8")
    try:
        passed = run_tests(copy_of, GROUPS[group][1], all_tests=False, seconds=seconds)
    finally:
        for path, content in originals.items():
            path.write_bytes(content)
    if not passed:
        raise SystemExit(f"the tests of {group} fail, or do not end in {seconds:.0f} s, without any mutant")


def spread(do: Callable[[Item, Path], Result], items: Sequence[Item], copies: Sequence[Path]) -> Iterator[Result]:
    """Results as they come: every copy of the checkout serves one item at a time."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for copy_of in copies:
        free.put(copy_of)

    def one(item: Item) -> Result:
        copy_of = free.get()
        try:
            return do(item, copy_of)
        finally:
            free.put(copy_of)

    with ThreadPoolExecutor(len(copies)) as pool:
        for done in as_completed([pool.submit(one, item) for item in items]):
            yield done.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=75, help="of mutants, over all groups (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default: %(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1800.0,
        help="after which a run of the tests is ended; its mutant counts as neither noticed nor a survivor "
        "(default: %(default)s)",
    )
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, help="mutants (default: %(default)s)")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--out", type=Path, help="a file for the outcomes, one JSON object a line")
    options = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder) / str(number) for number in range(options.at_once)]
        ignored = shutil.ignore_patterns(".venv", ".git", "site", "dist", "__pycache__", ".*_cache")
        for copy_of in copies:
            shutil.copytree(ROOT, copy_of, ignore=ignored)
        for _ in spread(partial(check_unchanged, seconds=options.seconds), options.groups, copies):
            pass
        mutants = drawn(options.number, options.seed, options.groups)
        for outcome in spread(partial(judged, seconds=options.seconds), mutants, copies):
            outcomes.append(outcome)
            verdict = "SURVIVED" if outcome.noticed_by is None else f"noticed by make {outcome.noticed_by}"
            verdict = "tests did not end" if outcome.noticed_by == UNENDED else verdict
            print(
                f"{outcome.file}:{outcome.line}: {outcome.before} -> {outcome.after}: {verdict} ({outcome.seconds} s)"
            )
            sys.stdout.flush()
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    for group in options.groups:
        count = Counter(outcome.noticed_by for outcome in outcomes if outcome.group == group)
        print(
            f"{group}: {count.total()} mutants, make test notices {count['test']}, "
            f"make test-all {count['test'] + count['test-all']}, {count[UNENDED]} did not end"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
