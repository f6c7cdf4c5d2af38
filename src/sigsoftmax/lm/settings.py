"""The settings of recipes: everything but the head, with the numbers as published.

Where the published text and the published code differ, the numbers are those of the code, except for the epochs of
training, which the Sigsoftmax paper doubles: 1000 and 1500. The code's own are one change away:
``training.epochs=500`` for ``ptb``, 750 for ``wt2``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sigsoftmax.family.heads import Head
from sigsoftmax.lm.config import DynamicEvaluationConfig, ModelConfig, Recipe, TrainingConfig
from sigsoftmax.lm.dynamic.rates import Rates

__all__ = ["SETTINGS", "Setting", "rms_form"]


@dataclass(frozen=True)
class Setting:
    """Everything but the head."""

    build: Callable[[str, Head], Recipe]
    components: int
    """components of a mixture that does not say"""
    summary: str


def rms_form(
    learning_rate: float, decay: float, epsilon: float, *, windows: int, tensors: int
) -> DynamicEvaluationConfig:
    """One point of dynamic evaluation, given in the older scaling."""
    rates = Rates.from_sum_form(learning_rate, decay, epsilon, windows=windows, tensors=tensors)
    return DynamicEvaluationConfig(learning_rates=(rates.learning_rate,), decays=(rates.decay,), epsilon=rates.epsilon)


def _finetuning(**values: Any) -> TrainingConfig:
    return TrainingConfig(optimizer="asgd", stop_when_stale=True, window_seed=331, **values)


def _mixture(head: Head, **values: Any) -> ModelConfig:
    return ModelConfig(head=str(head), floor=1e-8, dropout_latent=0.29, **values)


def _ptb(name: str, head: Head) -> Recipe:
    if head.components > 1:
        return Recipe(
            name=name,
            corpus="ptb",
            model=_mixture(head, embedding=280, hidden=(960, 960, 620), dropout_input=0.4, dropout_hidden=0.225),
            training=TrainingConfig(learning_rate=20.0, epochs=1000, batch=12, longest_window=110),
            finetuning=_finetuning(learning_rate=25.0, epochs=1000, batch=12, longest_window=110),
            dynamic_evaluation=rms_form(0.002, 0.075, 0.001, windows=1859, tensors=17),
            seed=28,
        )
    return Recipe(
        name=name,
        corpus="ptb",
        model=ModelConfig(head=str(head), dropout_input=0.4, dropout_hidden=0.25),
        training=TrainingConfig(learning_rate=30.0, epochs=1000, batch=20),
        finetuning=_finetuning(learning_rate=30.0, epochs=500, batch=20, longest_window=80),
        seed=141,
    )


def _wt2(name: str, head: Head) -> Recipe:
    if head.components > 1:
        return Recipe(
            name=name,
            corpus="wikitext-2",
            model=_mixture(head, embedding=300, hidden=(1150, 1150, 650), dropout_input=0.55, dropout_hidden=0.2),
            training=TrainingConfig(learning_rate=15.0, epochs=1000, batch=15, group=5, longest_window=90),
            finetuning=_finetuning(learning_rate=20.0, epochs=1000, batch=15, group=5, longest_window=90),
            dynamic_evaluation=rms_form(0.002, 0.02, 0.002, windows=4177, tensors=17),
            seed=1882,
        )
    return Recipe(
        name=name,
        corpus="wikitext-2",
        model=ModelConfig(head=str(head), dropout_input=0.65, dropout_hidden=0.2),
        training=TrainingConfig(learning_rate=30.0, epochs=1500, batch=80),
        finetuning=_finetuning(learning_rate=30.0, epochs=750, batch=80, longest_window=80),
        seed=1882,
    )


def _tiny(name: str, head: Head) -> Recipe:
    """Sizes for two CPU cores and some minutes; little regularisation, since it does not get to overfit."""
    common: dict[str, Any] = {"batch": 20, "bptt": 35, "activation": 0.0, "temporal_activation": 0.0}
    return Recipe(
        name=name,
        corpus="ptb",
        model=ModelConfig(
            head=str(head),
            embedding=128,
            hidden=(256, 128),
            dropout_words=0.0,
            dropout_input=0.1,
            dropout_hidden=0.1,
            dropout_output=0.1,
            weight_drop=0.0,
        ),
        training=TrainingConfig(learning_rate=20.0, epochs=6, **common),
        finetuning=_finetuning(learning_rate=20.0, epochs=10, **common),
    )


def _language(name: str, head: Head) -> Recipe:
    """A width far below the rank of the language, so that heads differ, and seconds per epoch.

    The latent layer of a mixture takes the place of the second LSTM and has about as many parameters; with both, a
    mixture stays at the frequencies of the tokens for epochs before it learns from context.

    Training ends before averaging could begin, and finetuning has a fixed length: when averaging begins would otherwise
    depend on the head, and matter more than the head.
    """
    common: dict[str, Any] = {"batch": 10, "bptt": 35, "activation": 0.0, "temporal_activation": 0.0}
    return Recipe(
        name=name,
        corpus="language",
        model=ModelConfig(
            head=str(head),
            embedding=12,
            hidden=(64,) if head.components > 1 else (64, 12),
            dropout_words=0.0,
            dropout_input=0.0,
            dropout_hidden=0.0,
            dropout_output=0.0,
            weight_drop=0.0,
        ),
        training=TrainingConfig(learning_rate=10.0, epochs=6, **common),
        finetuning=TrainingConfig(optimizer="asgd", window_seed=331, learning_rate=10.0, epochs=3, **common),
    )


SETTINGS: Mapping[str, Setting] = {
    "ptb": Setting(_ptb, 15, "Penn Treebank, as published"),
    "wt2": Setting(_wt2, 15, "WikiText-2, as published"),
    "tiny": Setting(_tiny, 4, "Penn Treebank, small enough for two CPU cores"),
    "language": Setting(_language, 4, "text sampled from a language of known truth"),
}
