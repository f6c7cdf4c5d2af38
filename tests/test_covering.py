"""The thinned grids of ``make test``: every pair of values is tried, and no case that was listed by hand is lost."""

import itertools
import os
import subprocess
import sys

import pytest
from tests.covering import covering

GRID = list(itertools.product("abc", range(4), (False, True), ("mean", "sum", "none")))

TESTS = """
import pytest

three = pytest.mark.parametrize("c", range(3))

@three
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("a", range(3))
def test_three_axes(a, b, c): pass

@three
@pytest.mark.parametrize("a", range(3))
def test_two_axes(a, c): pass

@pytest.mark.grid
@three
@pytest.mark.parametrize("a", range(3))
def test_two_axes_of_which_each_value_is_enough(a, c): pass

@pytest.mark.parametrize("a, b, c", [(1, 2, 3), (1, 2, 4), (1, 3, 4), (2, 3, 4)])
def test_listed_by_hand(a, b, c): pass

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_of_which_one_case_is_thorough(a): pass
"""


def pairs(cases):
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_every_pair_of_values_is_covered_by_few_cases():
    chosen = covering(GRID)
    assert pairs(GRID[place] for place in chosen) == pairs(GRID)
    # Two parameters alone have 4 x 3 pairs; the grid has 72 cases.
    assert 12 <= len(chosen) <= 16
    assert chosen == covering(GRID)


def test_each_value_is_covered():
    chosen = covering(GRID, strength=1)
    assert len(chosen) == 4
    assert all({GRID[place][axis] for place in chosen} == {case[axis] for case in GRID} for axis in range(4))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("given", "environment", "count"),
    [
        # Nine cases would cover all pairs of three axes of three values; the greedy choice takes ten.
        ([], {}, 10 + 9 + 3 + 4 + 1),
        ([], {"SIGSOFTMAX_ALL_TESTS": "1"}, 27 + 9 + 9 + 4 + 2),
        (["test_it.py::test_three_axes[0-1-2]", "test_it.py::test_of_which_one_case_is_thorough"], {}, 3),
    ],
)
def test_what_pytest_collects(tmp_path, pytestconfig, given, environment, count):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_collection_modifyitems\n")
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {pytestconfig.rootpath}\nmarkers =\n  grid\n  thorough\n"
    )
    inherited = {name: value for name, value in os.environ.items() if name != "SIGSOFTMAX_ALL_TESTS"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-pno:cacheprovider", "-pno:xdist", *given],
        cwd=tmp_path,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{count} passed" in result.stdout, result.stdout + result.stderr
