"""Sweeps: recipes x alternatives x seeds on Ray, each trial in a folder of its own, all of them in one table.

The folders are the state: whatever dies, the same command goes on, and a trial that has ended is not made again.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Sequence
from typing import Any

from sigsoftmax.experiments.display import Pace, Say, counted
from sigsoftmax.experiments.runs.executors import Failed
from sigsoftmax.experiments.runs.folder_locks import FolderLock
from sigsoftmax.experiments.runs.ray_executor import (
    Place,
    RayExecutor,
    Share,
    check_ray,
    ray_folder,
    ray_session,
    remove_leftovers,
    trials_at_once,
)
from sigsoftmax.experiments.runs.run import default_device
from sigsoftmax.experiments.sweep.manifest import PLAN_FILE, keep_plan, plan_change
from sigsoftmax.experiments.sweep.plan import SweepConfig, Trial
from sigsoftmax.experiments.sweep.text import differences, groups_of, results_table, trial_line
from sigsoftmax.experiments.sweep.trials import finish_trial, finished_record, gathered
from sigsoftmax.lm.data.corpus_files import find
from sigsoftmax.records import Environment, Record, store
from sigsoftmax.records.durations import duration_text
from sigsoftmax.records.schemas.sweeps import TrialRecord

__all__ = ["SweepConfig", "TrialsFailed", "run"]

RECORDS_FILE = "sweep.jsonl"
SHOW_SECONDS = 1.0
SHOWN_TRIALS = 3


class TrialsFailed(OSError):
    """Some trials did not come through; the others are in the table."""


def run(
    config: SweepConfig, say: Say, tell: Say = lambda _: None, progress: Say = lambda _: None
) -> dict[Trial, TrialRecord]:
    """Train what is not trained yet, gather, print. Trials that fail are raised when the others have ended.

    ``say`` gets paragraphs, ``tell`` a line about each trial as it ends, ``progress`` lines that replace each other.
    """
    trials = config.trials()
    change = str(plan_change(config, trials))
    if change:
        say(f"The plan is not the one that {config.out} was begun with: {change}.")
    if config.dry_run:
        say(_listing(config, trials))
        return {}
    ended = _finished(trials, config)
    if len(ended) < len(trials):
        check_ray()
    with FolderLock(config.out) as lock:
        # Between the look and the lock another command may have ended some.
        ended = _finished(trials, config)
        keep_plan(config, trials)
        say(_introduction(config, trials, len(ended)))
        failures: dict[Trial, str] = {}
        if len(ended) < len(trials):
            remove_leftovers(config.out, "" if lock.before is None else lock.before.leftovers)
            failures = _run_rest(config, trials, ended, lock, say, tell, progress)
        _gather(config, trials, ended, failures, say)
    if failures:
        raise TrialsFailed(f"{counted(len(failures), 'trial')} of {len(trials)} failed; the same command tries again")
    return ended


def _finished(trials: Sequence[Trial], config: SweepConfig) -> dict[Trial, TrialRecord]:
    found = {trial: finished_record(trial, config.precision) for trial in trials}
    return {trial: record for trial, record in found.items() if record is not None}


def _run_rest(
    config: SweepConfig,
    trials: Sequence[Trial],
    ended: dict[Trial, TrialRecord],
    lock: FolderLock,
    say: Say,
    tell: Say,
    progress: Say,
) -> dict[Trial, str]:
    """Train what is left, add it to ``ended``, and return why the others failed."""
    failures = _without_text(config, [trial for trial in trials if trial not in ended])
    left = [trial for trial in trials if trial not in ended and trial not in failures]
    if not left and not ended:
        raise ValueError(next(iter(failures.values())))
    if not left:
        return failures

    def line(text: str) -> None:
        progress("")
        tell(text)

    if config.address is None and ray_folder(config.out) is None:
        say(f"{config.out} is too long a path for Ray's sockets: its files go to a short one, removed at the end.")
    with ray_session(config.address, config.out, lock.note) as ray:
        device, share = _device_and_share(config, ray)
        room = trials_at_once(ray, share, is_local=config.address is None)
        at_once = min(room, len(left), config.at_once or room)
        say(f"{len(left)} trials to go, {at_once} at once, each with {share} ({device}).")
        place = Place.here(
            config.out / PLAN_FILE,
            data=config.data,
            device=device,
            precision=config.precision,
            evaluation_precision=config.evaluation_precision,
            threads=max(1, int(config.cpus_per_trial)),
            at_once=at_once,
        )
        look = _Watch(len(trials), ended, progress)
        executor = RayExecutor(ray=ray, place=place, share=share, at_once=config.at_once, say=line, look=look)
        for trial, outcome in executor.run(left, finish_trial):
            if isinstance(outcome, Failed):
                failures[trial] = outcome.reason
                line(f"{trial.name}: failed: {outcome.reason}")
            else:
                ended[trial] = outcome
                line(trial_line(trial, outcome, f"{len(ended)} of {len(trials)}"))
    return failures


def _without_text(config: SweepConfig, trials: Sequence[Trial]) -> dict[Trial, str]:
    """Trials whose text is not here; on a cluster it may be where they run."""
    missing: dict[str, str] = {}
    for name in dict.fromkeys(trial.recipe.corpus for trial in trials):
        if config.address is None and (name, config.data) != ("language", None):
            try:
                find(name, config.data)
            except ValueError as error:
                missing[name] = str(error)
    return {trial: missing[name] for trial in trials if (name := trial.recipe.corpus) in missing}


def _device_and_share(config: SweepConfig, ray: Any) -> tuple[str, Share]:
    device, gpus = config.device, config.gpus_per_trial
    if device is None and gpus is None and config.address is None:
        device = default_device()
    elif device is None:
        device = "cuda" if (ray.cluster_resources().get("GPU") if gpus is None else gpus) else "cpu"
    if gpus is None:
        gpus = 1.0 if device == "cuda" else 0.0
    return device, Share(cpus=config.cpus_per_trial, gpus=gpus)


class _Watch:
    """A line about what is going on, from the records that trials write."""

    def __init__(self, count: int, ended: dict[Trial, TrialRecord], progress: Say) -> None:
        self._count, self._ended, self._progress = count, ended, progress
        self._began, self._pace = time.time(), Pace(SHOW_SECONDS)

    def __call__(self, running: Sequence[Trial]) -> None:
        if not self._pace.is_due():
            return
        active = [text for trial in running if (text := self._active(trial))]
        more = f" and {len(active) - SHOWN_TRIALS} more" if len(active) > SHOWN_TRIALS else ""
        parts = [f"{len(self._ended)} of {self._count} trials ended", *active[:SHOWN_TRIALS]]
        # A line that wraps could not be replaced.
        self._progress(("; ".join(parts) + more)[: shutil.get_terminal_size().columns - 1])

    def _active(self, trial: Trial) -> str | None:
        files = [run.records for run in trial.runs()]
        is_active = any(path.is_file() and path.stat().st_mtime >= self._began for path in files)
        return f"{trial.name}: {_epochs_text(trial)}" if is_active else None


def _epochs_text(trial: Trial) -> str | None:
    """The number of epochs that are done; None if there are none."""
    files = [run.records for run in trial.runs()]
    # Lines and not records: whoever writes them may be in the middle of one.
    done = sum(path.read_bytes().count(b"\n") for path in files if path.is_file())
    return f"{done} of {sum(run.epochs for run in trial.runs())} epochs" if done else None


# --- what is said -----------------------------------------------------------------------------------------------------


def _introduction(config: SweepConfig, trials: Sequence[Trial], ended: int) -> str:
    points = len({trial.point for trial in trials})
    parts = [counted(len(config.recipes), "recipe"), *([counted(points, "point")] if points > 1 else [])]
    parts.append(counted(max(1, len(config.seeds)), "seed"))
    before = f"; {ended} ended before" if ended else ""
    return (
        f"{counted(len(trials), 'trial')}: {' x '.join(parts)}{before}.\n"
        f"Trials are kept in {config.out}: the same command goes on where it was stopped."
    )


def _listing(config: SweepConfig, trials: Sequence[Trial]) -> str:
    width = max(len(trial.name) for trial in trials)
    ended = _finished(trials, config)
    lines = [f"{counted(len(trials), 'trial')}, {len(ended)} ended, in {config.out}:"]
    for trial in trials:
        epochs = _epochs_text(trial)
        state = f"begun, {epochs}" if epochs else "to come"
        if trial in ended:
            state = f"ended, {duration_text(ended[trial].seconds)}"
        lines.append(f"  {trial.name:{width}}  {state}")
    return "\n".join(lines)


def _gather(
    config: SweepConfig,
    trials: Sequence[Trial],
    ended: dict[Trial, TrialRecord],
    failures: dict[Trial, str],
    say: Say,
) -> None:
    groups = groups_of(trials, ended)
    path = config.out / RECORDS_FILE
    here = Environment.here()
    records = gathered(trial for trial in trials if trial in ended)
    store(path, [*records, *(Record.of(found, here) for found in differences(groups, config))])
    say(results_table(groups, failures, config))
    say(f"Records of {counted(len(ended), 'trial')}: {path}\nA page of all: sigsoftmax report {shlex.quote(str(path))}")
