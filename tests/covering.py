"""Grids of test cases: all of them, or as few as still try every pair of values together.

A grid over several parameters grows as their product, while nearly all defects need one or two values to meet. So
``make test`` runs a subset of every grid in which each pair of values of two parameters occurs, and ``make test-all``
(``SIGSOFTMAX_ALL_TESTS=1``) runs the grids whole.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import TypeVar

import pytest

Case = TypeVar("Case", bound=Sequence[Hashable])
RUNS_ALL = os.environ.get("SIGSOFTMAX_ALL_TESTS") == "1"


def covering(cases: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Places of few cases, in order, in which every combination of ``strength`` values occurs that occurs in all."""

    def combinations(case: Sequence[Hashable]) -> set[tuple[tuple[int, Hashable], ...]]:
        return set(itertools.combinations(enumerate(case), min(strength, len(case))))

    open_in = {place: combinations(case) for place, case in enumerate(cases)}
    uncovered = set().union(*open_in.values())
    chosen = []
    while uncovered:
        # The first of the best: the choice depends on the cases alone.
        best = max(open_in, key=lambda place: (len(open_in[place] & uncovered), -place))
        uncovered -= open_in.pop(best)
        chosen.append(best)
    return sorted(chosen)


def chosen_cases(cases: Sequence[Case]) -> list[Case]:
    """The cases of a grid inside a test that are run."""
    return list(cases) if RUNS_ALL else [cases[place] for place in covering(cases)]


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Tests that need not run because others cover their pairs of parameters.

    Grids of two parameters are left whole, except where ``@pytest.mark.grid`` says that each value once is enough.
    Tests marked ``thorough`` are left out too: others run the same code in less time, or what they would notice shows
    elsewhere, as a broken link does when the site is built.
    """
    grids: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    result: list[pytest.Item] = []
    for item in items:
        if item.get_closest_marker("thorough"):
            result.append(item)
        elif isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            grids[item.nodeid.partition("[")[0], item.originalname].append(item)
    for grid in grids.values():
        cases = [_axes(item) for item in grid]
        strength = 1 if grid[0].get_closest_marker("grid") else 2
        if sum(len(set(values)) > 1 for values in zip(*cases, strict=True)) > strength:
            kept = set(covering(cases, strength))
            result += [item for place, item in enumerate(grid) if place not in kept]
    return result


def _axes(item: pytest.Function) -> list[str]:
    """The value of each parameter; parameters that one decorator declares together are one axis of the grid."""
    parameters = {name: repr(value) for name, value in item.callspec.params.items()}
    axes = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        axes.append(" ".join(parameters.pop(name) for name in names))
    return [*axes, *parameters.values()]
