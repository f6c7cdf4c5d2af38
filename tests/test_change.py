"""The change test of CONTRIBUTING.md: which files know an option of a loss, and how long lists of parameters may be.

A file that is not listed here and names an option has learned something that it need not know. Either the option can be
asked of the specification as a whole, or the design has to change; the list is what changes last.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from sigsoftmax.contract.spec import LossSpec

SOURCE = Path(__file__).parents[1] / "src" / "sigsoftmax"
ROAD = ("backends", "contract", "losses")
"""folders of the road; those who call the public functions pass options on by their names"""

PUBLIC = {"losses/functional.py", "contract/spec.py"}
"""files that list the options one by one: public functions, and the specification, which the op's schema follows"""
ARITHMETIC = {"contract/tokens.py", "backends/reference.py"}
FUSED = {"backends/triton/fused_loss.py", "backends/triton/fused_mixture.py"}
LAUNCHES = FUSED | {"backends/triton/fused_tokens.py"}
KERNELS = {
    "backends/triton/kernels/tokens.py",
    "backends/triton/kernels/fused_loss.py",
    "backends/triton/kernels/token_losses.py",
}
"""the transcription of the arithmetic, and the kernels that hand its numbers on to it"""
STATISTICS = {"losses/token_statistics.py"}
"""public functions of token statistics, which share some options with losses"""
MIXED_PROBABILITY = {
    "backends/chunked/log_probs.py",
    "backends/chunked/loop.py",
    "backends/chunked/mixture.py",
    "backends/triton/chunk_loop.py",
    "contract/normalizing.py",
}
"""files that compute the probability of every class of a mixture, which a floor is part of"""

KNOWN: dict[str, set[str]] = {
    "z_loss": PUBLIC | ARITHMETIC | LAUNCHES | KERNELS,
    "label_smoothing": PUBLIC | ARITHMETIC | {"backends/triton/fused_loss.py"} | KERNELS,
    "floor": PUBLIC | STATISTICS | ARITHMETIC | LAUNCHES | KERNELS | MIXED_PROBABILITY | {"contract/statistics.py"},
    "ignore_index": PUBLIC
    | STATISTICS
    | ARITHMETIC
    | LAUNCHES
    | KERNELS
    | {"losses/validation.py", "losses/op.py", "losses/statistics_op.py"}
    | {"contract/value_checks.py", "backends/chunked/loss.py"}
    | {"contract/statistics.py", "backends/chunked/statistics.py"},
    "reduction": PUBLIC | ARITHMETIC | LAUNCHES | {"losses/op.py", "backends/chunked/loss.py"},
    "weight_gradient": PUBLIC
    | STATISTICS
    | LAUNCHES
    | {"backends/chunked/path.py", "backends/chunked/logits.py", "backends/chunked/chunk_plan.py"}
    | {"backends/chunked/vocabulary_blocks.py"},
    "chunk_bytes": PUBLIC
    | STATISTICS
    | LAUNCHES
    | {
        "contract/problem.py",
        "backends/chunked/path.py",
        "backends/chunked/logits.py",
        "backends/chunked/chunk_plan.py",
    },
}


def files_that_name(word: str) -> set[str]:
    """Files of the road in whose code, comments aside, a word stands."""
    found = set()
    for folder in ROAD:
        for path in (SOURCE / folder).rglob("*.py"):
            if re.search(rf"\b{word}\b", path.read_text()):
                found.add(path.relative_to(SOURCE).as_posix())
    return found


@pytest.mark.parametrize("option", KNOWN)
def test_no_other_file_knows_an_option(option: str) -> None:
    assert files_that_name(option) - KNOWN[option] == set()


def test_the_list_names_all_options_of_a_loss() -> None:
    fields = {field.name for field in dataclasses.fields(LossSpec)}
    # What they are called is the language of all files: a member, its prior, what else is told, and who computes.
    assert fields - {"member", "prior", "extras", "backend"} == set(KNOWN)


MOST_PARAMETERS = 12
LONGER = {
    "losses/functional.py": {"cross_entropy", "linear_cross_entropy", "mixture_cross_entropy"},
    "distributed/losses.py": {"linear_cross_entropy", "mixture_cross_entropy"},
    "layers/mixture.py": {"__init__"},
    "losses/token_statistics.py": {"linear_token_statistics", "mixture_token_statistics"},
}
"""public signatures"""


def test_options_travel_together() -> None:
    """Functions with many parameters are kernels or public signatures."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and not any("jit" in ast.dump(d) for d in node.decorator_list):
                count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
                if count > MOST_PARAMETERS:
                    found.setdefault(path.relative_to(SOURCE).as_posix(), set()).add(node.name)
    assert found == LONGER


def files_with_the_text(text: str) -> set[str]:
    """Files of the package in whose code, docstrings aside, a string with exactly this text stands."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        constants = (
            node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in documentation
        )
        if any(node.value == text for node in constants):
            found.add(path.relative_to(SOURCE).as_posix())
    return found


PAPER = {"records/published/paper.py", "experiments/reproduce/run.py"}
"""publications of the paper, and the command that runs its tables"""
LOOKS = {"report/theme.py"}
"""colours that readers know from other reports; a head without an entry gets the next free one"""


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("wikitext-2", {"lm/data/published_corpora.py", "lm/settings.py"} | PAPER),
        # The start of its learned exponent is a setting of recipes.
        ("gss", {"family/members.py", "lm/recipes.py"} | LOOKS),
        ("shifted_sigsoftmax", {"family/members.py", "integrations/huggingface/trainers/retrofit.py"} | LOOKS),
        ("blocked", {"losses/lowering.py"}),
    ],
)
def test_a_corpus_a_member_and_a_backend_are_known_where_contributing_says(name: str, files: set[str]) -> None:
    assert files_with_the_text(name) == files


def test_every_path_that_contributing_and_the_architecture_name_exists() -> None:
    root = SOURCE.parents[1]
    for page in ("CONTRIBUTING.md", "docs/architecture.md"):
        for named in re.findall(r"`((?:\w+/)+[\w*]*(?:\.py)?)`", (root / page).read_text()):
            places = (root / named, SOURCE / named, SOURCE / f"{named}.py")
            assert any(place.exists() for place in places) or list(SOURCE.rglob(named.rstrip("/"))), f"{page}: {named}"
