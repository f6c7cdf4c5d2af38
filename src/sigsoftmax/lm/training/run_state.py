"""The state of a run: model, optimiser, position and best weights; into a checkpoint, and back.

A checkpoint holds the whole run, however many processes share it, for any number of processes to go on with.

Shapes: R rows, B columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sigsoftmax.lm.config import Recipe
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.data.windows import WindowLengths, batchify
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.model.memory import check_model_fits
from sigsoftmax.lm.parallel.single_process import parallel_strategy
from sigsoftmax.lm.saving.checkpoints import Checkpoint
from sigsoftmax.lm.saving.saved_models import check_same_corpus, load_model, saved_meta
from sigsoftmax.lm.saving.saved_runs import SavedRun, check_run_tensors, prefixed, unprefixed
from sigsoftmax.lm.training.nt_asgd import AveragedSgd, NonMonotonicTrigger
from sigsoftmax.lm.training.options import TrainerOptions, resolve_device
from sigsoftmax.lm.training.precision import arithmetic, check_precision, lstm_dtype
from sigsoftmax.lm.training.updates import Updater
from sigsoftmax.records.envelope import to_plain
from sigsoftmax.records.schemas.training import RunIdentity

__all__ = ["RunState"]

POSITION = ("epoch", "row", "update", "seconds", "stale", "best_epoch", "valid_loss")
"""Attributes of a run that are fields of :class:`SavedRun` by the same names."""


class RunState:
    """All that training changes, and the identity of the run that it belongs to."""

    def __init__(self, recipe: Recipe, corpus: Corpus, options: TrainerOptions) -> None:
        self.recipe, self.corpus, self.phase = recipe, corpus, options.phase
        self.config = config = recipe.training if options.phase == "train" else recipe.finetuning
        self.device = resolve_device(options.device)
        self.precision = check_precision(options.precision, self.device)
        seed = recipe.seed if options.seed is None else options.seed
        self.model = self._new_model(seed) if options.start is None else self._loaded_model(Path(options.start))
        self.identity = RunIdentity(
            recipe=recipe.name,
            overrides=recipe.overrides,
            phase=options.phase,
            head=recipe.model.head,
            corpus=corpus.name,
            corpus_checksum=corpus.checksum,
            seed=seed,
            precision=self.precision,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
        )
        self.recurrence = self.model.stack.recurrence
        self.recurrence.concurrent_runs = options.concurrent_runs
        self._recurrence_change: str | None = None
        self.parallel = parallel_strategy(self.model, options.parallel)
        text_RB = batchify(corpus.train, config.batch)
        self.rows = text_RB.shape[0]
        window_seed = seed if config.window_seed is None else config.window_seed
        self.lengths = WindowLengths(window_seed, config.bptt, config.longest_window)
        self.optimizer = AveragedSgd(
            list(self.parallel.parts.values()),
            clip=config.clip,
            weight_decay=config.weight_decay,
            squares_of=self.parallel.squares,
        )
        if config.optimizer == "asgd":
            self.optimizer.begin_averaging()
        self.updater = Updater(
            self.model,
            self.optimizer,
            text_RB,
            config,
            generator=torch.Generator(self.device).manual_seed(seed),
            precision=self.precision,
            parallel=self.parallel,
            skip=self.recurrence.error_flag(self.device) if self.device.type == "cuda" else None,
        )
        self.trigger = NonMonotonicTrigger(config.patience)
        self.epoch, self.row, self.update, self.stale = 1, 0, 0, False
        self.seconds = 0.0
        """time spent on the epoch before a resumption"""
        self.best_epoch = 0
        self.valid_loss: float | None = None
        """validation loss of the best epoch, over rows; None before the first"""
        self.best: dict[str, Tensor] = {}
        """the parts of the best weights that this process holds"""

    @property
    def position(self) -> str:
        """The place of the run in its epochs, for messages."""
        if self.update:
            return f"after update {self.update} of epoch {self.epoch}"
        return f"after epoch {self.epoch - 1}" if self.epoch > 1 else "before the first update"

    def _new_model(self, seed: int) -> LanguageModel:
        config, size = self.recipe.model, len(self.corpus.vocabulary)
        check_model_fits(config, size, self.device, is_trained=True)
        return LanguageModel(config, size, seed=seed).to(self.device)

    def _loaded_model(self, path: Path) -> LanguageModel:
        loaded = load_model(path, device=self.device)
        check_same_corpus(loaded.meta, self.corpus, path)
        return loaded.model

    def keep_best(self, loss: float, *, epoch: int) -> None:
        self.best = {name: tensor.detach().clone() for name, tensor in self.parallel.parts.items()}
        self.valid_loss, self.best_epoch = loss, epoch

    def describe_recurrence(self) -> str:
        """One sentence: what computes the LSTM layers, why, and how a resumption has changed it."""
        with arithmetic(self.precision, self.device):
            sentence = self.model.describe_recurrence(self.updater.columns_at_once, lstm_dtype(self.precision))
        return sentence if self._recurrence_change is None else f"{sentence}; {self._recurrence_change}"

    def tensors(self, best: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All tensors that the run needs, whole; ``best`` are the whole best weights."""
        whole = self.parallel.whole
        return {
            **prefixed("model", whole(self.parallel.parts)),
            **prefixed("best", best),
            **prefixed("optimizer", self._with_averages(self.optimizer.state(), whole)),
            **prefixed("updater", self.updater.state()),
        }

    def _with_averages(
        self, optimizer: dict[str, Tensor], changed: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """The optimiser's state with its averages, which are like the parameters, made whole or cut."""
        names = {f"average.{index}": name for index, name in enumerate(self.parallel.parts)}
        averages = changed({names[key]: tensor for key, tensor in optimizer.items() if key in names})
        return optimizer | {key: averages[name] for key, name in names.items() if name in averages}

    def model_meta(self) -> dict[str, Any]:
        """The meta of the best weights: enough to build the model again and to know its text."""
        return saved_meta(self.recipe, self.identity, self.corpus, epoch=self.best_epoch, valid_loss=self.valid_loss)

    def meta(self, *, seconds: float, records_bytes: int) -> dict[str, Any]:
        """The meta of the run, as :class:`SavedRun` reads it; ``seconds`` are those spent on the epoch."""
        return {
            **self.model_meta(),
            **{name: getattr(self, name) for name in POSITION},
            "seconds": seconds,
            "losses": self.trigger.losses,
            "window_lengths": self.lengths.state(),
            "recurrence": to_plain(self.recurrence.plans_in_use()),
            "records_bytes": records_bytes,
        }

    def restore(self, checkpoint: Checkpoint, path: Path) -> SavedRun:
        """Go on where the checkpoint was. All of it is checked before any of it is used."""
        meta = SavedRun.read(checkpoint.meta, path)
        check_same_corpus(meta, self.corpus, path)
        self._check_same_run(checkpoint.meta, path)
        tensors, own = checkpoint.tensors, self.parallel.own
        check_run_tensors(meta, tensors, self.tensors({}), path)
        try:
            self.updater.restore(unprefixed("updater", tensors))
        except RuntimeError as error:
            raise SavedRun.refusal(path, f"its random state is none ({error})") from None
        with torch.no_grad():
            for name, tensor in own(unprefixed("model", tensors)).items():
                self.parallel.parts[name].copy_(tensor)
        self.best = {name: tensor.to(self.device) for name, tensor in own(unprefixed("best", tensors)).items()}
        self.optimizer.restore(self._with_averages(unprefixed("optimizer", tensors), own))
        self.lengths.restore(dataclasses.asdict(meta.window_lengths))
        self.trigger = NonMonotonicTrigger(self.config.patience, meta.losses)
        for name in POSITION:
            setattr(self, name, getattr(meta, name))
        with arithmetic(self.precision, self.device):
            self._recurrence_change = self.recurrence.restore(
                meta.recurrence,
                self.recipe.model.hidden,
                self.updater.columns_at_once,
                lstm_dtype(self.precision),
                self.device,
            )
        return meta

    def _check_same_run(self, meta: Mapping[str, Any], path: Path) -> None:
        """Refuse another recipe or identity; a run may go on for longer, and other phases do not concern it."""
        loose = {"epochs", "overrides", "dynamic_evaluation", "finetuning" if self.phase == "train" else "training"}
        ours = self.model_meta()
        for name in ("recipe", "run"):
            there, here = _leaves(meta[name]), _leaves(ours[name])
            for field in sorted(there.keys() | here.keys()):
                if there.get(field) != here.get(field) and loose.isdisjoint(field.split(".")):
                    raise ValueError(
                        f"{path} belongs to another run: {field} is {there.get(field)!r} there and "
                        f"{here.get(field)!r} here; choose another folder, or run it as it was begun (only the number "
                        "of epochs may change)"
                    )


def _leaves(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by their paths."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= _leaves(item, f"{prefix}{key}.") if isinstance(item, Mapping) else {f"{prefix}{key}": item}
    return found
