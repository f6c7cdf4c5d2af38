"""A run: a recipe and a seed, trained and perhaps finetuned, in a folder of its own; and what it may use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self, TypeVar, get_args

import torch

from sigsoftmax.contract.spec import check_positive
from sigsoftmax.family.notation import check_choice
from sigsoftmax.lm.config import Recipe, TrainingConfig
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.data.published_corpora import PUBLISHED
from sigsoftmax.lm.parallel.single_process import Kind, check_kind
from sigsoftmax.lm.recipes import from_toml, recipe, with_overrides
from sigsoftmax.lm.saving import checkpoints
from sigsoftmax.lm.saving.saved_models import LoadedModel, SavedModel, check_same_corpus, load_model
from sigsoftmax.lm.settings import SETTINGS
from sigsoftmax.lm.training.precision import known_precision, resolve_evaluation_precision
from sigsoftmax.lm.training.trainer import Phase, Trainer, TrainerOptions, resolve_device
from sigsoftmax.records import Payload, read_payloads
from sigsoftmax.records.schemas.training import EpochRecord, RunIdentity

__all__ = [
    "Resources",
    "Run",
    "check_out",
    "check_setting",
    "checkpoint_file",
    "chosen_recipes",
    "default_device",
    "epoch_records",
    "measured_on",
    "payloads",
    "planned_runs",
    "run_folder",
    "run_in",
    "text_of",
]

P = TypeVar("P", bound=Payload)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The device on which runs are made, its share and precision, and the text."""

    data: Path | None = None
    """folder of train.txt, valid.txt and test.txt; None: where ``sigsoftmax data fetch`` puts them"""
    device: str = "cpu"
    """cpu, cuda or cuda:1"""
    precision: str = "float32"
    """precision of training on a GPU"""
    evaluation_precision: str | None = None
    """precision of validation and test; None: TF32 products on a GPU, float32 elsewhere"""
    at_once: int = 1
    """runs that share the device; on a CPU each in a process of one thread"""
    parallel: Kind | None = None
    """division of a run by the processes of torchrun: columns of text (ddp), also the weights (fsdp), or the rows of
    the output matrix (vocabulary); None: ddp"""
    checkpoint_seconds: float = 300.0
    """time between two checkpoints, which is the most that is lost if the process is killed"""

    def __post_init__(self) -> None:
        check_positive(at_once=self.at_once)
        known_precision(self.precision)
        resolve_evaluation_precision(self.evaluation_precision, resolve_device(self.device))
        check_kind(self.parallel)

    def corpus(self, name: str) -> Corpus:
        return Corpus.load(name, self.data)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One phase of one run."""

    recipe: Recipe
    seed: int
    folder: Path
    """in which each phase has a folder"""
    phase: Phase = "train"

    @property
    def path(self) -> Path:
        return self.folder / self.phase

    @property
    def best(self) -> Path:
        return self.path / "best.safetensors"

    @property
    def records(self) -> Path:
        """The file with a record of each epoch."""
        return self.path / "records.jsonl"

    @property
    def config(self) -> TrainingConfig:
        return self.recipe.training if self.phase == "train" else self.recipe.finetuning

    @property
    def epochs(self) -> int:
        return self.config.epochs

    @property
    def name(self) -> str:
        return f"{self.recipe.name}, seed {self.seed}" + (", finetuning" if self.phase == "finetune" else "")

    def finetuning(self) -> Self:
        return replace(self, phase="finetune")

    def trainer(self, corpus: Corpus, resources: Resources) -> Trainer:
        """New, or where it was left if its folder has a checkpoint."""
        options = TrainerOptions(
            phase=self.phase,
            start=replace(self, phase="train").best if self.phase == "finetune" else None,
            seed=self.seed,
            device=resources.device,
            precision=resources.precision,
            evaluation_precision=resources.evaluation_precision,
            checkpoint_seconds=resources.checkpoint_seconds,
            concurrent_runs=resources.at_once,
            parallel=resources.parallel,
        )
        return Trainer(self.recipe, corpus, self.path, options)


def payloads(path: Path, kind: type[P]) -> list[P]:
    """The payloads of one kind in a file of records; none if it is missing."""
    return list(read_payloads(path, kind, malformed="skip")) if path.is_file() else []


class Measured(Payload, Protocol):
    """A payload that says which weights were measured."""

    @property
    def run(self) -> RunIdentity: ...

    @property
    def epoch(self) -> int | None:
        """The epoch of the weights; None in records of older versions."""


M = TypeVar("M", bound=Measured)


def measured_on(checkpoint: Path, name: str, kind: type[M]) -> list[M]:
    """The payloads in a file beside a checkpoint that were measured on its weights as they are.

    Times alone do not tell: folders are copied, and clocks are set. So records name the run and the epoch; those of
    older versions lack the epoch. Of one run and epoch there may be two sets of weights where training is not
    repeated bit by bit, hence the times besides.
    """
    path = checkpoint.parent / name
    if not path.is_file() or path.stat().st_mtime < checkpoint.stat().st_mtime:
        return []
    found = payloads(path, kind)
    if not found:
        return []
    meta = SavedModel.read(checkpoints.load(checkpoint).meta, checkpoint)
    return [one for one in found if one.run == meta.run and one.epoch in (None, meta.best_epoch)]


def epoch_records(*runs: Run) -> list[EpochRecord]:
    """The epochs of these phases that are on record."""
    return [epoch for run in runs for epoch in payloads(run.records, EpochRecord)]


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def chosen_recipes(names: Sequence[str], config: Path | None, changes: Iterable[str]) -> list[Recipe]:
    """Recipes by name or from a file, with the changes made to each."""
    if config is not None and names:
        raise ValueError("name recipes or give --config FILE, which names its own, not both")
    bases = [from_toml(config)] if config is not None else [recipe(name) for name in names]
    if not bases:
        raise ValueError("name a recipe, as ptb-sigsoftmax, or give --config FILE; 'sigsoftmax recipes' lists them")
    repeated = {base.name for base in bases if [other.name for other in bases].count(base.name) > 1}
    if repeated:
        raise ValueError(f"{' and '.join(sorted(repeated))} is named more than once; give --seeds for several runs")
    return [with_overrides(base, changes) for base in bases]


def planned_runs(recipes: Iterable[Recipe], seeds: Sequence[int], out: Path) -> list[Run]:
    """Every recipe with every seed, or with the published one."""
    if len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds must differ, got {', '.join(map(str, seeds))}")
    if any(not 0 <= seed < 2**32 for seed in seeds):
        raise ValueError(f"seeds must be between 0 and 2**32 - 1, got {', '.join(map(str, seeds))}")
    check_out(out)
    return [
        Run(recipe=chosen, seed=seed, folder=out / folder_name(chosen.name) / str(seed))
        for chosen in recipes
        for seed in (seeds or (chosen.seed,))
    ]


def check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"the output folder {out} is a file; choose another with --out")


def check_setting(setting: str | None) -> None:
    if setting is not None:
        check_choice("setting", setting, SETTINGS)


def folder_name(name: str) -> str:
    """``gss(k=0.3)`` as ``gss-k=0.3``: what shells and file systems leave alone."""
    return re.sub(r"[^\w.=+]+", "-", name).strip("-")


def checkpoint_file(path: Path) -> Path:
    """The best weights in the folder of a run, the finetuned ones if there are any; or the file that was named."""
    if path.is_file():
        return path
    for folder in (path, path / "finetune", path / "train"):
        if (folder / "best.safetensors").is_file():
            return folder / "best.safetensors"
    raise ValueError(
        f"no trained model at {path}: expected the folder of a run, as runs/ptb-softmax/141, or a best.safetensors"
    )


def run_folder(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint belongs to; where it lies in no run, its own."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name in get_args(Phase) else folder


def text_of(loaded: LoadedModel, resources: Resources) -> Corpus:
    """The text that the model was trained on, or other text in its words."""
    trained_on, expected = loaded.run.corpus, loaded.recipe.corpus
    if resources.data is None and trained_on != expected and expected in (*PUBLISHED, "language"):
        raise ValueError(
            f"the model was trained on the text {trained_on!r} in place of {expected!r}; say where that text is with "
            "--data FOLDER"
        )
    return Corpus.load(expected, resources.data, vocabulary=loaded.vocabulary)


def run_in(folder: Path, resources: Resources) -> Run:
    """The trained run whose folder this is, or whose training has this folder; its text must be at hand."""
    trained = folder / "train" if (folder / "train").is_dir() else folder
    best = trained / "best.safetensors"
    if trained.name != "train" or not best.is_file():
        raise ValueError(f"no trained run in {folder}: expected a folder like runs/ptb-softmax/141, with train in it")
    loaded = load_model(best)
    check_same_corpus(loaded.meta, text_of(loaded, resources), best)
    return Run(recipe=loaded.recipe, seed=loaded.run.seed, folder=trained.parent)
