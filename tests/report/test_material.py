"""The material of a page: repetitions count once, and runs that are no repetitions stay apart."""

import dataclasses
from pathlib import Path

from tests.report import synthetic_runs
from tests.report.sections.making import material_of

from sigsoftmax.records.schemas.training import EpochRecord


def epochs_of(recurrence: str, *, first: int = 1, last: int = 4) -> list[EpochRecord]:
    made = [p for p in synthetic_runs.training({"softmax": (57.0, 402)}, epochs=last) if isinstance(p, EpochRecord)]
    one_seed = [p for p in made if p.run.seed == synthetic_runs.SEEDS[0] and p.epoch >= first]
    return [dataclasses.replace(p, recurrence=recurrence) for p in one_seed]


def test_runs_on_different_recurrences_are_no_repetitions(tmp_path: Path) -> None:
    material = material_of([*epochs_of("torch's own"), *epochs_of("persistent kernels")], tmp_path)
    assert material.replaced == 0
    found = [e.payload.run.precision for e in material.epochs]
    assert found == ["float32"] * 4 + ["float32, persistent recurrence"] * 4


def test_a_run_that_went_on_with_another_recurrence_is_one(tmp_path: Path) -> None:
    material = material_of([*epochs_of("persistent kernels"), *epochs_of("torch's own", first=4, last=9)], tmp_path)
    assert {e.payload.run.precision for e in material.epochs} == {"float32"}
    # The fourth epoch was made again after the resumption.
    assert material.replaced == 1
    assert sorted(e.payload.epoch for e in material.epochs) == list(range(1, 10))


def test_runs_on_persistent_kernels_alone_keep_their_name(tmp_path: Path) -> None:
    material = material_of(epochs_of("persistent kernels"), tmp_path)
    assert {e.payload.run.precision for e in material.epochs} == {"float32"}
