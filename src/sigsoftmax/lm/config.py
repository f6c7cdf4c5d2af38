"""The configuration of a run: model, the two phases of training, dynamic evaluation, and a recipe that holds them all.

Every field is checked on construction. The values of the published recipes are in ``recipes``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch

from sigsoftmax.contract.spec import check_positive, prior_of
from sigsoftmax.family import Learned, OutputFunction
from sigsoftmax.family.heads import Head, Latent
from sigsoftmax.family.notation import check_choice

__all__ = ["DynamicEvaluationConfig", "ModelConfig", "Precision", "Recipe", "TrainingConfig", "parse_head"]

Precision = Literal["float32", "tf32", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""positive numbers that float32 holds with all its digits"""
EVALUATION_PRECISIONS: tuple[Precision, ...] = ("float32", "tf32")
"""arithmetic of validation and test: weights and state are float32 in both"""


DEFAULT_LATENT: Latent = "tanh"
"""the latent vectors of a mixture that names no others, as published"""


def parse_head(text: str | Head) -> Head:
    """A head as the configuration of a model names it, with the options of a mixture.

    An option that says the default is left out, so that equal heads have equal texts.
    """
    head = Head.parse(text, allow_options=True)
    if head.components == 1:
        return head
    default_prior = OutputFunction.parse(prior_of(head.function, None))
    return replace(
        head,
        latent=None if head.latent == DEFAULT_LATENT else head.latent,
        prior=None if head.prior == default_prior else head.prior,
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """An AWD-LSTM: one matrix is embedding and output, separate LSTM layers, six dropouts, any head."""

    head: str = "softmax"
    """a member of the family or a mixture, as ``gss(k=0.2)``, ``moss(K=15)`` or ``mos(K=15, latent=linear)``. Latent
    vectors of a mixture are tanh(W h + b), as published, unless it says ``linear`` or ``residual``"""
    embedding: int = 400
    """width of the tied matrix"""
    hidden: tuple[int, ...] = (1150, 1150, 400)
    """LSTM layers. The last feeds the head: without a mixture it has the width of the embedding"""
    floor: float = 0.0
    """added to every probability of a mixture, without renormalising; the published code has 1e-8"""
    dropout_words: float = 0.1
    """on rows of the embedding, at the input alone"""
    dropout_input: float = 0.4
    dropout_hidden: float = 0.25
    """between LSTM layers"""
    dropout_output: float = 0.4
    dropout_latent: float = 0.0
    """on a mixture's latent vectors"""
    weight_drop: float = 0.5
    """elements of the hidden-to-hidden matrices"""

    def __post_init__(self) -> None:
        head = self.parsed_head
        for name, value in head.function.parameters.items():
            number = value.initial if isinstance(value, Learned) else value
            if isinstance(number, int | float):
                _check_number(f"{name} of the head {self.head}", abs(number))
        if not self.hidden:
            raise ValueError("hidden must name the width of at least one LSTM layer, got ()")
        # How wide a model may be depends on the memory: whoever builds it checks that.
        for name, width in (("embedding", self.embedding), *(("hidden", width) for width in self.hidden)):
            check_positive(**{name: width})
        if head.components == 1 and self.hidden[-1] != self.embedding:
            raise ValueError(
                f"the last LSTM layer feeds the tied matrix, so its width must be that of the "
                f"embedding, {self.embedding}, got {self.hidden[-1]}; only a mixture has a latent layer between them"
            )
        if self.latent == "residual" and self.hidden[-1] != self.embedding:
            raise ValueError(
                "latent=residual adds to the output of the last LSTM layer, so its width must be that of the "
                f"embedding, {self.embedding}, got {self.hidden[-1]}; set model.hidden together with model.head, or "
                "take latent=linear"
            )
        if head.components == 1 and (self.floor or self.dropout_latent):
            raise ValueError(f"floor and dropout_latent belong to a mixture, and the head is {self.head!r}")
        _check_number("floor", self.floor)
        for name, rate in vars(self).items():
            if name.startswith(("dropout_", "weight_drop")) and not 0.0 <= rate < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1, got {rate}")

    @property
    def parsed_head(self) -> Head:
        return parse_head(self.head)

    @property
    def latent(self) -> Latent:
        """The way in which a mixture's latent vectors are made."""
        return cast(Latent, self.parsed_head.latent or DEFAULT_LATENT)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """One phase of training. Finetuning is another value of this, not another loop."""

    optimizer: Literal["nt-asgd", "asgd"] = "nt-asgd"
    """``asgd`` averages from the first update on, as finetuning does"""
    learning_rate: float = 30.0
    epochs: int = 500
    """at most"""
    stop_when_stale: bool = False
    """end, instead of beginning to average, when the trigger fires"""
    patience: int = 5
    """n of the non-monotonic trigger, in epochs"""
    batch: int = 20
    group: int | None = None
    """columns that share dropout masks; each group is computed apart. None: all of them"""
    bptt: int = 70
    """the usual window; lengths are drawn around it, and the learning rate scales with length / bptt"""
    longest_window: int | None = None
    """a cap on drawn lengths"""
    window_seed: int | None = None
    """seed of the window lengths; None: the run's seed"""
    clip: float = 0.25
    weight_decay: float = 1.2e-6
    activation: float = 2.0
    """weight of AR, the mean square of the dropped last output"""
    temporal_activation: float = 1.0
    """weight of TAR, the mean square of the change of the raw last output"""
    evaluation_batch: int = 10

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, ("nt-asgd", "asgd"))
        _check_counts(self, "epochs", "patience", "batch", "bptt", "evaluation_batch")
        for name in ("learning_rate", "clip", "weight_decay", "activation", "temporal_activation"):
            _check_number(name, getattr(self, name), positive=name in ("learning_rate", "clip"))
        if self.group is not None and (self.group < 1 or self.batch % self.group):
            raise ValueError(f"group must divide the batch of {self.batch} columns, got {self.group}")
        if self.longest_window is not None and self.longest_window < 5:
            raise ValueError(f"longest_window must be at least 5, the shortest window, got {self.longest_window}")
        if self.window_seed is not None:
            _check_seed("window_seed", self.window_seed)
        if self.stop_when_stale and self.optimizer == "nt-asgd":
            raise ValueError("stop_when_stale goes with optimizer 'asgd': under 'nt-asgd' the trigger begins averaging")

    def step_size(self, drawn: int) -> float:
        """The learning rate of a window whose drawn length is ``drawn``."""
        return self.learning_rate * drawn / self.bptt


@dataclass(frozen=True, kw_only=True)
class DynamicEvaluationConfig:
    """Dynamic evaluation in the RMS form, with a grid to search on validation."""

    learning_rates: tuple[float, ...] = (3e-5, 4e-5, 5e-5, 6e-5, 7e-5, 1e-4)
    decays: tuple[float, ...] = (1e-3, 2e-3, 3e-3, 5e-3)
    """both for windows of 5: with another window the grid is scaled by window / 5"""
    epsilon: float = 2e-5
    window: int = 5
    statistics_batch: int = 100
    """columns in which the training text is laid out for the gradient statistics"""

    def __post_init__(self) -> None:
        _check_counts(self, "window", "statistics_batch")
        if not self.learning_rates or not self.decays:
            raise ValueError("learning_rates and decays must each hold at least one number")
        for name in ("learning_rates", "decays"):
            for value in getattr(self, name):
                _check_number(f"each of {name}", value)
        _check_number("epsilon", self.epsilon, positive=True)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that determines a run but its seed and its precision."""

    name: str
    corpus: str
    """``ptb``, ``wikitext-2``, ``language`` (text sampled from a language of known truth), or a folder"""
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    finetuning: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(optimizer="asgd", stop_when_stale=True, window_seed=331)
    )
    dynamic_evaluation: DynamicEvaluationConfig = field(default_factory=DynamicEvaluationConfig)
    seed: int = 141
    """the published seed; runs may take others"""
    overrides: tuple[str, ...] = ()
    """changes to the named recipe, for records"""

    def __post_init__(self) -> None:
        _check_seed("seed", self.seed)


def _check_counts(config: Any, *names: str) -> None:
    """Counts of epochs, columns, steps: positive integers that any tensor of indices can hold."""
    for name in names:
        value = getattr(config, name)
        check_positive(**{name: value})
        if value >= 2**31:
            raise ValueError(f"{name} must be below 2**31, got {value}")


def _check_number(name: str, value: float, *, positive: bool = False) -> None:
    """A number that updates compute with, in float32: neither infinite nor zero there unless it is zero."""
    if not (math.isfinite(value) and (value > 0.0 if positive else value >= 0.0)):
        raise ValueError(f"{name} must be a {'positive number' if positive else 'number of at least 0'}, got {value}")
    if value and not SMALLEST <= value <= LARGEST:
        raise ValueError(
            f"{name} must be a number that float32 can hold, {'' if positive else '0 or '}between {SMALLEST:.3g} and "
            f"{LARGEST:.3g}, got {value:g}"
        )


def _check_seed(name: str, seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ValueError(f"{name} must be between 0 and 2**32 - 1, got {seed}")
