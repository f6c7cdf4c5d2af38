"""Which small defects the tests notice: python .ci/mutants.py [--number 75] [--seed 0] [--seconds 900] [--out FILE]

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
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

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
    """``test``, ``test-all``, or None for a survivor"""
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


def drawn(number: int, seed: int, groups: list[str]) -> list[Mutant]:
    """Mutants at random, as many of each group; files count by how much there is to change in them."""
    generator = random.Random(seed)
    chosen: list[Mutant] = []
    for group in groups:
        paths = [ROOT / place for place in GROUPS[group][0]]
        files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
        every = [mutant for file in files for mutant in mutants_of(group, file)]
        chosen += generator.sample(every, -(-number // len(groups)))
    return chosen


def passes(copy_of: Path, tests: tuple[str, ...], *, all_tests: bool, seconds: float) -> bool:
    """Tests that do not end in time count as failed: the mutant does not end."""
    environment = {**os.environ, "PYTHONPATH": str(copy_of / "src"), "OMP_NUM_THREADS": "1"}
    environment |= {"SIGSOFTMAX_ALL_TESTS": "1"} if all_tests else {}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-pno:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=copy_of, env=environment, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def judged(mutant: Mutant, copy_of: Path, seconds: float) -> Outcome:
    began = time.monotonic()
    path = copy_of / mutant.file
    original = path.read_bytes()
    _, tests = GROUPS[mutant.group]
    try:
        path.write_text(mutant.content, encoding="utf-8")
        ways = (("test", False), ("test-all", True))
        noticed = next(
            (name for name, whole in ways if not passes(copy_of, tests, all_tests=whole, seconds=seconds)), None
        )
    finally:
        path.write_bytes(original)
    about = {name: value for name, value in asdict(mutant).items() if name != "content"}
    return Outcome(**about, noticed_by=noticed, seconds=round(time.monotonic() - began, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=75, help="of mutants, over all groups (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default: %(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=900.0,
        help="after which a run of the tests counts as one that does not end: more on a busy machine "
        "(default: %(default)s)",
    )
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--out", type=Path, help="a file for the outcomes, one JSON object a line")
    options = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        copy_of = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".venv", ".git", "site", "dist", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, copy_of, ignore=ignored)
        for group in options.groups:
            if not passes(copy_of, GROUPS[group][1], all_tests=False, seconds=options.seconds):
                raise SystemExit(f"the tests of {group} fail without any mutant")
        for mutant in drawn(options.number, options.seed, options.groups):
            outcome = judged(mutant, copy_of, options.seconds)
            outcomes.append(outcome)
            verdict = f"noticed by make {outcome.noticed_by}" if outcome.noticed_by else "SURVIVED"
            print(
                f"{outcome.file}:{outcome.line}: {outcome.before} -> {outcome.after}: {verdict} ({outcome.seconds} s)"
            )
            sys.stdout.flush()
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    for group in options.groups:
        own = [outcome for outcome in outcomes if outcome.group == group]
        quick = sum(outcome.noticed_by == "test" for outcome in own)
        whole = sum(outcome.noticed_by is not None for outcome in own)
        print(f"{group}: {len(own)} mutants, make test notices {quick}, make test-all {whole}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
