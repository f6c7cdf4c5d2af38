"""The AWD-LSTM (Merity et al. 2018) with any output head.

Shapes: T time steps, B columns, V vocabulary, D embedding, H hidden of the last layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sigsoftmax.layers.mixture import MixtureOutputLayer
from sigsoftmax.layers.output_layer import OutputLayer
from sigsoftmax.lm.config import ModelConfig
from sigsoftmax.lm.model.embedding import dropped_embedding
from sigsoftmax.lm.model.recurrent import LayerState, LstmStack
from sigsoftmax.lm.model.regularization import Masks

__all__ = ["Features", "LanguageModel"]


class Features(NamedTuple):
    """The outputs of the recurrent part for a window."""

    raw_TBH: Tensor
    dropped_TBH: Tensor
    """the input of the head"""
    states: list[LayerState]


class _GivenMask(nn.Module):
    """Multiplies by the mask of the current pass: the mixture layer asks for a module."""

    mask: Tensor | None = None

    def forward(self, values: Tensor) -> Tensor:
        return values if self.mask is None else values * self.mask.to(values.dtype)


class LanguageModel(nn.Module):
    """One matrix (V, D) is embedding and output; between them stand LSTM layers and, for a mixture, a latent layer.

    There is no training mode: a pass with masks trains, a pass without evaluates.
    """

    def __init__(self, config: ModelConfig, vocabulary_size: int, *, seed: int = 0) -> None:
        if vocabulary_size < 2:
            raise ValueError(f"a language model needs at least 2 words, got {vocabulary_size}")
        super().__init__()
        self.config, self.vocabulary_size = config, vocabulary_size
        self.embedding = nn.Parameter(torch.empty(vocabulary_size, config.embedding))
        self.stack = LstmStack(config.embedding, config.hidden)
        head = config.parsed_head
        self._latent_mask = _GivenMask()
        self.output: OutputLayer | MixtureOutputLayer
        if head.components == 1:
            self.output = OutputLayer(config.embedding, vocabulary_size, function=head.function, weight=self.embedding)
        else:
            self.output = MixtureOutputLayer(
                config.hidden[-1],
                config.embedding,
                vocabulary_size,
                head.components,
                function=head.function,
                prior_function=head.prior,
                weight=self.embedding,
                latent=config.latent,
                latent_dropout=self._latent_mask,
                floor=config.floor,
            )
        self._initialise(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        self.embedding.uniform_(-0.1, 0.1, generator=generator)
        for layer in self.stack.in_order():
            layer.initialise(generator)
        if isinstance(self.output, MixtureOutputLayer):
            bound = 1.0 / math.sqrt(self.config.hidden[-1])
            drawn = [self.output.prior.weight]
            if self.config.latent != "residual":
                # A residual latent layer begins as zero, and has no bias.
                drawn += [self.output.latent.weight, self.output.latent.bias]
            for parameter in drawn:
                parameter.uniform_(-bound, bound, generator=generator)

    def describe_recurrence(self, batch: int, dtype: torch.dtype) -> str:
        """One sentence that says what computes the LSTM layers for that many columns, and why."""
        return self.stack.recurrence.describe(self.config.hidden, batch, dtype, self.embedding.device)

    def zero_state(self, batch: int, dtype: torch.dtype = torch.float32) -> list[LayerState]:
        return self.stack.zero_state(batch, dtype)

    def forward(
        self,
        tokens_TB: Tensor,
        targets_TB: Tensor,
        states: Sequence[LayerState],
        masks: Masks | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Features]:
        """The loss of a window and its features, in one call: wrappers that divide a model over processes need that."""
        features = self.features(tokens_TB, states, masks, dtype=dtype)
        return self.loss(features, targets_TB), features

    def features(
        self,
        tokens_TB: Tensor,
        states: Sequence[LayerState],
        masks: Masks | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Features:
        """Run the recurrent part, with the LSTM in ``dtype``."""
        if masks is None:
            layers = len(self.config.hidden)
            masks = Masks(hidden_1BH=(None,) * (layers - 1), weights_4HH=(None,) * layers)
        raw, new_states = self.stack(
            dropped_embedding(tokens_TB, self.embedding, masks.words_V, masks.input_1BD, dtype),
            states,
            hidden_masks=masks.hidden_1BH,
            weight_masks=masks.weights_4HH,
        )
        dropped = raw if masks.output_1BH is None else raw * masks.output_1BH.to(raw.dtype)
        self._latent_mask.mask = masks.latent_1BKD
        return Features(raw, dropped, new_states)

    def loss(self, features: Features, targets_TB: Tensor) -> Tensor:
        """Mean negative log-likelihood of the window, in nats."""
        return self.output.loss(features.dropped_TBH, targets_TB)

    def log_probs(self, features: Features) -> Tensor:
        """Log-probabilities of the next token, (T, B, V)."""
        return self.output.log_probs(features.dropped_TBH)
