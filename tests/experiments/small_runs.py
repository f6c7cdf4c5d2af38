"""Texts, changes and runs so small that a test can train several."""

import random
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from sigsoftmax.experiments.reproduce.run_times import RunTimes
from sigsoftmax.experiments.runs.run import Resources, Run, chosen_recipes, planned_runs

CHANGES = (
    "model.embedding=6",
    "training.epochs=2",
    "training.batch=4",
    "training.bptt=8",
    "training.evaluation_batch=2",
    "finetuning.epochs=2",
    "finetuning.batch=4",
    "finetuning.bptt=8",
    "finetuning.evaluation_batch=2",
    "dynamic_evaluation.learning_rates=1e-5,1e-4",
    "dynamic_evaluation.decays=0.001",
    "dynamic_evaluation.window=10",
    "dynamic_evaluation.statistics_batch=4",
)
SINGLE = (*CHANGES, "model.hidden=8,6")
"""for any head but a mixture, whose last LSTM need not be as wide as the embedding"""


def write_text(folder: Path, seed: int = 0) -> Path:
    """A corpus of some hundred words."""
    draw = random.Random(seed)
    words = [f"word{number}" for number in range(15)]
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in (("train", 80), ("valid", 20), ("test", 20)):
        text = "".join(" ".join(draw.choices(words, weights=range(1, 16), k=6)) + "\n" for _ in range(lines))
        (folder / f"{split}.txt").write_text(text)
    return folder


def small_runs(folder: Path, *names: str, seeds: tuple[int, ...] = (1,), changes: tuple[str, ...] = ()) -> list[Run]:
    return planned_runs(chosen_recipes(names, None, (*SINGLE, *changes)), seeds, folder / "runs")


def small_resources(folder: Path, **options) -> Resources:
    return Resources(data=write_text(folder / "text"), **options)


def run_times(**changes: float) -> RunTimes:
    """Times of a run: a second for each stage, unless something else is said."""
    ones = dict.fromkeys((field.name for field in fields(RunTimes)), 1.0)
    return RunTimes(**{**ones, "parameters": 2, "dynamic_points": 2, **changes})


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "sigsoftmax", *map(str, words)]


def sigsoftmax(*words: object, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=300, **options)
