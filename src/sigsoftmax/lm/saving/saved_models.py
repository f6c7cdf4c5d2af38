"""Models in checkpoints: the meta that is stored with the weights, and the way back.

Whatever a file says is checked before it is used, so that one that was damaged or crafted is refused by its name and
with what is wrong about it: each field by its type and by what it must agree with, each tensor by name, shape, type and
finiteness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from sigsoftmax.lm.config import Recipe
from sigsoftmax.lm.data.corpus import Corpus, Vocabulary
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.model.memory import check_model_fits, parameter_count
from sigsoftmax.lm.saving import checkpoints
from sigsoftmax.records.envelope import from_plain, to_plain
from sigsoftmax.records.schemas.training import RunIdentity

__all__ = [
    "LoadedModel",
    "SavedModel",
    "check_same_corpus",
    "check_tensors",
    "first_not_finite",
    "load_model",
    "saved_meta",
]


@dataclass(frozen=True, kw_only=True)
class CorpusIdentity:
    """The text that a model was trained on."""

    name: str
    checksum: str


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """The meta of a checkpoint with the weights of a model: recipe, run, vocabulary, corpus, and the best epoch."""

    WHAT: ClassVar[str] = "checkpoint of a language model that can be used"
    REMEDY: ClassVar[str] = (
        "a run's last.safetensors is for going on with the run, and best.safetensors for using the model; if that one "
        "is no good, train it anew"
    )
    """advice about a file that is refused"""

    recipe: Recipe
    run: RunIdentity
    words: tuple[str, ...]
    corpus: CorpusIdentity
    best_epoch: int
    valid_loss: float | None
    """validation loss of the best epoch; None before the first"""

    def __post_init__(self) -> None:
        for what, told, here in (
            ("recipe", self.run.recipe, self.recipe.name),
            ("overrides", self.run.overrides, self.recipe.overrides),
            ("head", self.run.head, self.recipe.model.head),
            ("corpus_checksum", self.run.corpus_checksum, self.corpus.checksum),
            ("parameters", self.run.parameters, parameter_count(self.recipe.model, len(self.words))),
        ):
            if told != here:
                raise ValueError(f"run.{what} is {told!r}, and the rest of the meta says {here!r}")
        if len(Vocabulary(self.words)) < 2:
            raise ValueError(f"a language model has at least 2 words, and words has {len(self.words)}")
        if self.best_epoch < 0:
            raise ValueError(f"best_epoch must be at least 0, got {self.best_epoch}")
        if self.valid_loss is not None and not math.isfinite(self.valid_loss):
            raise ValueError(f"valid_loss must be finite, got {self.valid_loss}")

    @classmethod
    def read(cls, meta: Mapping[str, Any], path: Path) -> Self:
        """The typed meta of the checkpoint at ``path``, which must have each of the fields and no other."""
        try:
            return cast(Self, from_plain(cls, dict(meta), "meta"))
        except ValueError as error:
            raise cls.refusal(path, str(error)) from None

    @classmethod
    def refusal(cls, path: Path, problem: str) -> ValueError:
        """The error to raise about a file that has a problem."""
        return ValueError(f"{path} is no {cls.WHAT}: {problem}; {cls.REMEDY}")


@dataclass(frozen=True)
class LoadedModel:
    model: LanguageModel
    recipe: Recipe
    run: RunIdentity
    vocabulary: Vocabulary
    epoch: int
    """epoch of training after which these weights were the best"""
    meta: SavedModel


def saved_meta(
    recipe: Recipe, run: RunIdentity, corpus: Corpus, *, epoch: int, valid_loss: float | None
) -> dict[str, Any]:
    """The meta of a checkpoint with these weights, as JSON can hold it."""
    saved = SavedModel(
        recipe=recipe,
        run=run,
        words=corpus.words,
        corpus=CorpusIdentity(name=corpus.name, checksum=corpus.checksum),
        best_epoch=epoch,
        valid_loss=valid_loss,
    )
    return cast(dict[str, Any], to_plain(saved))


def check_tensors(
    kind: type[SavedModel], found: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path
) -> None:
    """Refuse tensors that are not, by name, shape and type, those that are expected, or that are not finite."""
    if missing := sorted(expected.keys() - found.keys()):
        raise kind.refusal(path, f"it lacks the tensor {missing[0]!r}")
    if unknown := sorted(found.keys() - expected.keys()):
        raise kind.refusal(path, f"it holds the tensor {unknown[0]!r}, which has no place there")
    for name, tensor in expected.items():
        told, here = ((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in (found[name], tensor))
        if told != here:
            problem = f"its tensor {name!r} has shape {told[0]} and type {told[1]}, not {here[0]} and {here[1]}"
            raise kind.refusal(path, problem)
    if (broken := first_not_finite(found)) is not None:
        raise kind.refusal(path, f"its tensor {broken!r} holds numbers that are not finite")


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor with a number that is not finite; None if there is none.

    One reduction over all tensors, and one wait for the device.
    """
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    if not floating or bool(_largest(list(floating.values())).isfinite()):
        return None
    return next(name for name, tensor in floating.items() if not bool(_largest([tensor]).isfinite()))


@torch.no_grad()
def _largest(tensors: list[Tensor]) -> Tensor:
    """The largest absolute value; NaN if there is one. Unlike a sum of squares it does not overflow."""
    return get_total_norm(tensors, math.inf)


def load_model(path: str | Path, *, device: str | torch.device = "cpu") -> LoadedModel:
    """The model of ``best.safetensors``, or of a folder that holds one."""
    path = Path(path)
    if path.is_dir():
        path = path / "best.safetensors"
    checkpoint = checkpoints.load(path)
    meta = SavedModel.read(checkpoint.meta, path)
    recipe, stored = meta.recipe, sum(tensor.numel() for tensor in checkpoint.tensors.values())
    if stored != meta.run.parameters:
        # Before a model is made of what the file says: that could be one that no memory holds.
        raise SavedModel.refusal(path, f"its model has {meta.run.parameters:,} parameters, and it holds {stored:,}")
    check_model_fits(recipe.model, len(meta.words), torch.device(device), is_trained=False)
    vocabulary = Vocabulary(meta.words)
    model = LanguageModel(recipe.model, len(vocabulary))
    parameters = dict(model.named_parameters())
    check_tensors(SavedModel, checkpoint.tensors, parameters, path)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(checkpoint.tensors[name])
    return LoadedModel(model.to(device), recipe, meta.run, vocabulary, meta.best_epoch, meta)


def check_same_corpus(meta: SavedModel, corpus: Corpus, path: Path) -> None:
    """Refuse a text other than the checkpoint's own."""
    theirs = meta.corpus
    if theirs.checksum != corpus.checksum or meta.words != corpus.words:
        raise ValueError(
            f"{path} belongs to another text: its corpus {theirs.name!r} has the checksum {theirs.checksum[:16]}..., "
            f"and {corpus.name!r} has {corpus.checksum[:16]}...; was the corpus changed? Give the same files, or begin "
            "a new run in another folder"
        )
