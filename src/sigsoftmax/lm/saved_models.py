"""Models in checkpoints: what is stored with the weights, and the way back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sigsoftmax.lm import checkpoints
from sigsoftmax.lm.config import Recipe
from sigsoftmax.lm.data import Corpus, Vocabulary
from sigsoftmax.lm.model import LanguageModel
from sigsoftmax.lm.recipes import from_json, to_json
from sigsoftmax.records.envelope import from_plain, to_plain
from sigsoftmax.records.training import RunIdentity

__all__ = ["LoadedModel", "check_same_corpus", "load_model", "model_tensors", "saved_meta"]


@dataclass(frozen=True)
class LoadedModel:
    model: LanguageModel
    recipe: Recipe
    run: RunIdentity
    vocabulary: Vocabulary
    epoch: int
    """of training, after which these weights were the best"""
    meta: dict[str, Any]


def model_tensors(model: LanguageModel) -> dict[str, Tensor]:
    """The parameters by name, the tied matrix once."""
    return dict(model.named_parameters())


def saved_meta(recipe: Recipe, run: RunIdentity, corpus: Corpus, *, epoch: int, valid_loss: float) -> dict[str, Any]:
    """What a checkpoint says of its weights: recipe, run, words, corpus, and when they were the best."""
    return {
        "recipe": to_json(recipe),
        "run": to_plain(run),
        "words": list(corpus.words),
        "corpus": {"name": corpus.name, "checksum": corpus.checksum},
        "best_epoch": epoch,
        "valid_loss": valid_loss if math.isfinite(valid_loss) else None,
    }


def load_model(path: str | Path, *, device: str | torch.device = "cpu") -> LoadedModel:
    """The model of ``best.safetensors``, or of a folder that holds one."""
    path = Path(path)
    if path.is_dir():
        path = path / "best.safetensors"
    checkpoint = checkpoints.load(path)
    meta = checkpoint.meta
    if not {"recipe", "run", "words"} <= meta.keys():
        raise ValueError(f"{path} is no checkpoint of a language model: it lacks the recipe, the run or the words")
    recipe = from_json(meta["recipe"])
    vocabulary = Vocabulary(meta["words"])
    model = LanguageModel(recipe.model, len(vocabulary))
    with torch.no_grad():
        for name, parameter in model_tensors(model).items():
            if name not in checkpoint.tensors or checkpoint.tensors[name].shape != parameter.shape:
                raise ValueError(
                    f"{path} holds no weights {name!r} of shape {tuple(parameter.shape)}; a run's last.safetensors is "
                    "for going on with the run, and best.safetensors for using the model"
                )
            parameter.copy_(checkpoint.tensors[name])
    run = from_plain(RunIdentity, meta["run"], "run")
    return LoadedModel(model.to(device), recipe, run, vocabulary, meta["best_epoch"], meta)


def check_same_corpus(meta: dict[str, Any], corpus: Corpus, path: Path) -> None:
    """Refuse a text other than the checkpoint's own."""
    theirs = meta.get("corpus", {})
    if theirs.get("checksum") != corpus.checksum:
        raise ValueError(
            f"{path} belongs to another text: its corpus {theirs.get('name')!r} has the checksum "
            f"{str(theirs.get('checksum'))[:16]}..., and {corpus.name!r} has {corpus.checksum[:16]}...; was the "
            "corpus changed? Give the same files, or begin a new run in another folder"
        )
