"""Sweeps: recipes x alternatives x seeds on Ray, each trial in a folder of its own, all of them in one table.

The folders are the state: whatever dies, the same command goes on, and a trial that has ended is not made again.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sigsoftmax.experiments.display import Pace, Say
from sigsoftmax.experiments.runs.executors import Executor, Failed
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
from sigsoftmax.report.number_text import counted

__all__ = ["SweepConfig", "TrialsFailed", "run"]

RECORDS_FILE = "sweep.jsonl"
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
    sweep = _Sweep(config, trials, say, tell, progress)
    if config.dry_run:
        say(sweep.listing())
        return {}
    if len(sweep.ended) < len(trials):
        check_ray()
    with FolderLock(config.out) as lock:
        # Between the look and the lock another command may have ended some.
        sweep = _Sweep(config, trials, say, tell, progress)
        keep_plan(config, trials)
        say(sweep.introduction())
        if len(sweep.ended) < len(trials):
            remove_leftovers(config.out, "" if lock.before is None else lock.before.leftovers)
            sweep.run_rest(lock)
        sweep.gather()
    if sweep.failures:
        failed = counted(len(sweep.failures), "trial")
        raise TrialsFailed(f"{failed} of {len(trials)} failed; the same command tries again")
    return sweep.ended


class _Sweep:
    """The trials of a sweep, those that have ended, and why others failed."""

    def __init__(self, config: SweepConfig, trials: Sequence[Trial], say: Say, tell: Say, progress: Say) -> None:
        self._config, self._trials, self._say, self._tell, self._progress = config, trials, say, tell, progress
        found = {trial: finished_record(trial, config.precision) for trial in trials}
        self.ended = {trial: record for trial, record in found.items() if record is not None}
        self.failures: dict[Trial, str] = {}
        self._began, self._pace = time.time(), Pace()

    # --- training -----------------------------------------------------------------------------------------------------

    def run_rest(self, lock: FolderLock) -> None:
        """Train what has not ended."""
        config = self._config
        self._fail_without_text()
        left = [trial for trial in self._trials if trial not in self.ended and trial not in self.failures]
        if not left and not self.ended:
            raise ValueError(next(iter(self.failures.values())))
        if not left:
            return
        if config.address is None and ray_folder(config.out) is None:
            self._say(
                f"{config.out} is too long a path for Ray's sockets: its files go to a short one, removed at the end."
            )
        with ray_session(config.address, config.out, lock.note) as ray:
            device, share = _device_and_share(config, ray)
            room = trials_at_once(ray, share, is_local=config.address is None)
            at_once = min(room, len(left), config.at_once or room)
            self._say(f"{len(left)} trials to go, {at_once} at once, each with {share} ({device}).")
            place = Place.here(
                config.out / PLAN_FILE,
                data=config.data,
                device=device,
                precision=config.precision,
                evaluation_precision=config.evaluation_precision,
                threads=max(1, int(config.cpus_per_trial)),
                at_once=at_once,
            )
            executor: Executor = RayExecutor(
                ray=ray, place=place, share=share, at_once=config.at_once, say=self._line, look=self._look
            )
            for trial, outcome in executor.run(left, finish_trial):
                if isinstance(outcome, Failed):
                    self.failures[trial] = outcome.reason
                    self._line(f"{trial.name}: failed: {outcome.reason}")
                else:
                    self.ended[trial] = outcome
                    self._line(trial_line(trial, outcome, f"{len(self.ended)} of {len(self._trials)}"))

    def _fail_without_text(self) -> None:
        """Trials whose text is not here fail; on a cluster it may be where they run."""
        reasons: dict[str, str | None] = {"language": None} if self._config.data is None else {}
        for trial in self._trials:
            name = trial.recipe.corpus
            if trial in self.ended or self._config.address is not None:
                continue
            if name not in reasons:
                try:
                    find(name, self._config.data)
                    reasons[name] = None
                except ValueError as error:
                    reasons[name] = str(error)
            reason = reasons[name]
            if reason is not None:
                self.failures[trial] = reason

    def _line(self, text: str) -> None:
        self._progress("")
        self._tell(text)

    def _look(self, running: Sequence[Trial]) -> None:
        """Show a line about what is going on, from the records that trials write."""
        if not self._pace.is_due():
            return
        active = [
            f"{trial.name}: {_epochs_text(trial)}"
            for trial in running
            if any(path.stat().st_mtime >= self._began for path in _epoch_files(trial))
        ]
        more = f" and {len(active) - SHOWN_TRIALS} more" if len(active) > SHOWN_TRIALS else ""
        parts = [f"{len(self.ended)} of {len(self._trials)} trials ended", *active[:SHOWN_TRIALS]]
        # A line that wraps could not be replaced.
        self._progress(("; ".join(parts) + more)[: shutil.get_terminal_size().columns - 1])

    # --- what is said -------------------------------------------------------------------------------------------------

    def introduction(self) -> str:
        points = len({trial.point for trial in self._trials})
        parts = [counted(len(self._config.recipes), "recipe"), *([counted(points, "point")] if points > 1 else [])]
        parts.append(counted(max(1, len(self._config.seeds)), "seed"))
        before = f"; {len(self.ended)} ended before" if self.ended else ""
        return (
            f"{counted(len(self._trials), 'trial')}: {' x '.join(parts)}{before}.\n"
            f"Trials are kept in {self._config.out}: the same command goes on where it was stopped."
        )

    def listing(self) -> str:
        width = max(len(trial.name) for trial in self._trials)
        lines = [f"{counted(len(self._trials), 'trial')}, {len(self.ended)} ended, in {self._config.out}:"]
        for trial in self._trials:
            state = f"begun, {_epochs_text(trial)}" if _epoch_files(trial) else "to come"
            if trial in self.ended:
                state = f"ended, {duration_text(self.ended[trial].seconds)}"
            lines.append(f"  {trial.name:{width}}  {state}")
        return "\n".join(lines)

    def gather(self) -> None:
        """Write the records of all trials into one file, and print the table."""
        groups = groups_of(self._trials, self.ended)
        path, here = self._config.out / RECORDS_FILE, Environment.here()
        found = [Record.of(difference, here) for difference in differences(groups, self._config)]
        store(path, [*gathered(trial for trial in self._trials if trial in self.ended), *found])
        self._say(results_table(groups, self.failures, self._config))
        kept = f"Records of {counted(len(self.ended), 'trial')}: {path}"
        self._say(f"{kept}\nA page of all: sigsoftmax report {shlex.quote(str(path))}")


def _device_and_share(config: SweepConfig, ray: Any) -> tuple[str, Share]:
    device, gpus = config.device, config.gpus_per_trial
    if device is None and gpus is None and config.address is None:
        device = default_device()
    elif device is None:
        device = "cuda" if (ray.cluster_resources().get("GPU") if gpus is None else gpus) else "cpu"
    if gpus is None:
        gpus = 1.0 if device == "cuda" else 0.0
    return device, Share(cpus=config.cpus_per_trial, gpus=gpus)


def _epoch_files(trial: Trial) -> list[Path]:
    return [run.records for run in trial.runs() if run.records.is_file()]


def _epochs_text(trial: Trial) -> str:
    # Lines and not records: whoever writes them may be in the middle of one.
    done = sum(path.read_bytes().count(b"\n") for path in _epoch_files(trial))
    return f"{done} of {sum(run.epochs for run in trial.runs())} epochs"
