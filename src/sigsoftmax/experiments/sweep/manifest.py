"""The plan of a sweep on disk (``sweep.json``), beside its trials.

A later command that would train something else in the same folders is refused; one that adds or leaves out trials says
so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sigsoftmax.experiments.sweep.plan import SweepConfig, Trial, binding_fields
from sigsoftmax.records.atomic_write import atomic_write
from sigsoftmax.records.envelope import from_plain
from sigsoftmax.records.parsing import parse_json
from sigsoftmax.report.number_text import counted

__all__ = ["PLAN_FILE", "PlanChange", "keep_plan", "plan_change"]

PLAN_FILE = "sweep.json"
PLAN_VERSION = 1


@dataclass(frozen=True)
class PlanChange:
    """The trials that are new against the plan of the folder, and those that it has beyond this one."""

    added: tuple[str, ...] = ()
    """folders of trials"""
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = []
        if self.added:
            parts.append(f"{counted(len(self.added), 'trial')} added")
        if self.left_out:
            names = ", ".join([*self.left_out[:3], *(["..."] if len(self.left_out) > 3 else [])])
            parts.append(f"{counted(len(self.left_out), 'trial')} of it left out and kept on disk ({names})")
        return ", ".join(parts)


def plan_change(config: SweepConfig, trials: Sequence[Trial]) -> PlanChange:
    """Against the earlier plan of the folder, if there is one. A trial that would become another is refused."""
    before, now = _kept(config.out), _described(config, trials)
    for folder in now.keys() & before.keys():
        if before[folder] != now[folder]:
            raise ValueError(
                f"{config.out} holds another sweep: {folder} has {_difference(before[folder], now[folder])}; choose "
                "another folder with --out, or give the same changes as before"
            )
    return PlanChange(
        tuple(folder for folder in now if before and folder not in before),
        tuple(folder for folder in before if folder not in now),
    )


def keep_plan(config: SweepConfig, trials: Sequence[Trial]) -> None:
    """Written whole or not at all. Trials of an earlier plan stay in it."""
    content = {"version": PLAN_VERSION, "trials": _kept(config.out) | _described(config, trials)}
    with atomic_write(config.out / PLAN_FILE) as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False).encode())


def _kept(out: Path) -> dict[str, Any]:
    path = out / PLAN_FILE
    if not path.is_file():
        return {}
    try:
        content = parse_json(path.read_bytes())
        if content["version"] > PLAN_VERSION:
            raise ValueError("it was written by a later sigsoftmax; upgrade")
        return dict(from_plain(dict[str, Any], content["trials"], "trials"))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no plan of a sweep: {error}; choose another folder with --out") from None


def _described(config: SweepConfig, trials: Sequence[Trial]) -> dict[str, Any]:
    """All that must stay as it is, by the folder of each trial."""
    return {
        trial.folder.relative_to(config.out).as_posix(): {
            "recipe": binding_fields(trial.recipe),
            "phases": list(trial.phases),
            "precision": config.precision,
        }
        for trial in trials
    }


def _difference(theirs: Any, ours: Any, where: str = "") -> str:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in ours.keys() | theirs.keys():
            if theirs.get(key) != ours.get(key):
                return _difference(theirs.get(key), ours.get(key), f"{where}.{key}".removeprefix("recipe").strip("."))
    return f"{where} {theirs!r} there and {ours!r} here"
