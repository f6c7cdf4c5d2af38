"""The plan of a sweep: recipes x alternatives of fields x seeds, each a trial in a folder of its own.

A change with several alternatives, ``training.learning_rate=20,30``, is an axis of the grid; any other change holds for
all trials. A field that is itself a list takes its alternatives in brackets: ``model.hidden=(64,12),(32,12)``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sigsoftmax.contract.spec import check_positive
from sigsoftmax.experiments.runs.run import Run, folder_name, planned_runs
from sigsoftmax.family.heads import Head
from sigsoftmax.family.notation import split_items
from sigsoftmax.lm.config import Recipe
from sigsoftmax.lm.recipes import field_paths, to_json, with_overrides
from sigsoftmax.lm.training.precision import known_precision
from sigsoftmax.lm.training.trainer import Phase

__all__ = ["Axis", "Point", "SweepConfig", "Trial", "alternatives", "axes_of", "binding_fields"]

LONGEST_NAME = 120
"""bytes of a folder's name: file systems end at 255, and what lies inside has a name too"""

Point = tuple[str, ...]
"""one alternative of each axis, as ``training.learning_rate=20``"""


@dataclass(frozen=True, kw_only=True)
class Trial(Run):
    """One recipe at one point of the grid with one seed: a run, of which this is the first phase."""

    point: Point = ()
    phases: tuple[Phase, ...] = ("train",)

    @property
    def last(self) -> Trial:
        """The phase whose model counts."""
        return self.runs()[-1]

    @property
    def name(self) -> str:
        return ", ".join([self.recipe.name, *self.point, f"seed {self.seed}"])

    def runs(self) -> list[Trial]:
        """All phases."""
        return [replace(self, phase=phase) for phase in self.phases]


@dataclass(frozen=True)
class Axis:
    """A field and the values that it is set to in turn."""

    field: str
    changes: tuple[str, ...]
    """as ``training.learning_rate=20``"""


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    recipes: tuple[Recipe, ...]
    seeds: tuple[int, ...] = ()
    """seeds of each recipe; none: the published one"""
    changes: tuple[str, ...] = ()
    """``training.epochs=22`` for all, ``training.learning_rate=20,30`` in turn"""
    finetune: bool = False
    """finetune the recipes whose finetuning ends by itself, too; those of a fixed length are always finetuned"""
    baseline: tuple[str, ...] = ()
    """a recipe, or alternatives such as ``training.learning_rate=20``, or both; none: softmax if it is there"""
    confidence: float = 0.95
    """confidence of the intervals"""
    out: Path = Path("runs/sweep")
    """folder for trials, records and Ray's files"""
    data: Path | None = None
    """folder of train.txt, valid.txt and test.txt; None: where ``sigsoftmax data fetch`` puts them"""
    precision: str = "float32"
    """precision of training on a GPU"""
    evaluation_precision: str | None = None
    """precision of validation and test; None: TF32 products on a GPU, float32 elsewhere"""
    device: str | None = None
    """device of a trial, ``cpu`` or ``cuda``; None: a GPU where there is one"""
    address: str | None = None
    """address of a Ray cluster, or ``auto``; None: a Ray of its own on this machine"""
    cpus_per_trial: float = 1
    """CPUs of each trial, and threads"""
    gpus_per_trial: float | None = None
    """share of a GPU, as 0.25 for four trials on one; None: a whole one where a trial has one"""
    at_once: int | None = None
    """trials at the same time at most; None: as many as CPUs and GPUs allow"""
    dry_run: bool = False
    """list the trials, and which have ended"""

    def __post_init__(self) -> None:
        if not self.recipes:
            raise ValueError("a sweep needs at least one recipe")
        known_precision(self.precision)
        if not 0.0 < self.confidence < 1.0:
            raise ValueError(f"confidence must be between 0 and 1, as 0.95, got {self.confidence}")
        if self.at_once is not None:
            check_positive(at_once=self.at_once)
        self._check_shares()
        self.trials()
        self.baseline_choice()

    def _check_shares(self) -> None:
        if not 0.0 < self.cpus_per_trial < float("inf"):
            raise ValueError(f"cpus_per_trial must be above 0, got {self.cpus_per_trial:g}")
        gpus, device = self.gpus_per_trial, self.device
        if gpus is not None and not 0.0 <= gpus <= 1.0:
            raise ValueError(f"a trial runs on one GPU: gpus_per_trial must be between 0 and 1, got {gpus:g}")
        if device is not None and device.startswith("cuda:"):
            raise ValueError(f"Ray picks the GPU of each trial: device must be 'cuda' or 'cpu', got {device!r}")
        if device == "cuda" and gpus == 0.0:
            raise ValueError("a trial with device cuda needs a share of a GPU: gpus_per_trial is 0")
        if device not in (None, "cuda") and gpus:
            raise ValueError(f"device {device} uses no GPU, and gpus_per_trial is {gpus:g}; leave out one of them")

    def axes(self) -> tuple[Axis, ...]:
        return axes_of(self.changes)

    def trials(self) -> list[Trial]:
        """Recipe by recipe, then point by point, then seed by seed."""
        fixed = [change for change in self.changes if len(alternatives(change)) == 1]
        points: list[Point] = list(itertools.product(*(axis.changes for axis in self.axes())))
        trials: list[Trial] = []
        for base, point in itertools.product(self.recipes, points):
            chosen = with_overrides(base, [*fixed, *point])
            is_finetuned = self.finetune or not chosen.finetuning.stop_when_stale
            phases: tuple[Phase, ...] = ("train", "finetune") if is_finetuned else ("train",)
            runs = planned_runs([chosen], self.seeds, self.out / point_folder(point))
            trials += [Trial(**vars(run), point=point, phases=phases) for run in runs]
        _check_distinct(trials)
        return trials

    def baseline_choice(self) -> tuple[str | None, Mapping[str, str]]:
        """The recipe of the baseline and its alternatives by field; whatever they leave open is as in the other."""
        names = [chosen.name for chosen in self.recipes]
        axes = self.axes()
        if not self.baseline and len(names) == 1:
            return None, {axis.field: axis.changes[0] for axis in axes}
        if not self.baseline:
            plain = [chosen.name for chosen in self.recipes if chosen.model.head == str(Head.parse("softmax"))]
            return (plain or names)[0], {}
        field_of = {change: axis.field for axis in axes for change in axis.changes}
        recipe, fields = None, dict[str, str]()
        for word in self.baseline:
            if word in names and recipe is None:
                recipe = word
            elif word in field_of and field_of[word] not in fields:
                fields[field_of[word]] = word
            else:
                raise ValueError(
                    f"the baseline must be a recipe of the sweep, one alternative of a field, or both; got {word!r} "
                    f"among {', '.join(self.baseline)}; there are {', '.join([*names, *field_of])}"
                )
        return recipe, fields


def _check_distinct(trials: Sequence[Trial]) -> None:
    seen: dict[str, Trial] = {}
    folders: dict[Path, Trial] = {}
    for trial in trials:
        fields = binding_fields(trial.recipe) | {"name": None}
        same = seen.setdefault(json.dumps([fields, trial.seed], sort_keys=True), trial)
        if same is not trial:
            raise ValueError(f"{same.name} and {trial.name} are the same trial; name it once")
        same = folders.setdefault(trial.folder, trial)
        if same is not trial:
            raise ValueError(f"{same.name} and {trial.name} would share {trial.folder}; rename one")


def binding_fields(recipe: Recipe) -> dict[str, Any]:
    """All of a recipe that makes a trial what it is."""
    loose = ("overrides", "dynamic_evaluation", "seed")
    return {key: value for key, value in to_json(recipe).items() if key not in loose}


# --- alternatives -----------------------------------------------------------------------------------------------------


def axes_of(changes: Iterable[str]) -> tuple[Axis, ...]:
    """The changes that have several alternatives."""
    axes = []
    for change in changes:
        axis = Axis(change.partition("=")[0].strip(), alternatives(change))
        if len(set(axis.changes)) < len(axis.changes):
            raise ValueError(f"the alternatives of {axis.field} must differ, got {', '.join(axis.changes)}")
        axes += [axis] if len(axis.changes) > 1 else []
    return tuple(axes)


def alternatives(change: str) -> tuple[str, ...]:
    """One change for each value: commas separate values, but for those inside brackets or between items of a list."""
    field, equals, text = (part.strip() for part in change.partition("="))
    if not equals or (typing.get_origin(field_paths().get(field)) is tuple and not text.startswith(("(", "["))):
        return (change,)
    values = split_items(text)
    if not all(values):
        raise ValueError(f"cannot read the alternatives of {change!r}: there is nothing between two commas")
    return tuple(f"{field}={value}" for value in values)


def point_folder(point: Point) -> str:
    """The alternatives as a name; what a name cannot hold is told apart by a digest."""
    text = ",".join(point)
    name = folder_name(text)
    if name.replace("-", ",") == text and len(name.encode()) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return name.encode()[: LONGEST_NAME - 9].decode(errors="ignore") + f"-{digest}"
