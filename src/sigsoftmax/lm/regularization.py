"""Six dropouts and two penalties.

Masks are drawn before the forward pass and given to it, so that a pass is a function of its arguments: the same masks
give the same numbers, no mask means evaluation, and a captured CUDA graph draws new ones at each replay.
Kept values are scaled by 1 / (1 - rate).

Shapes: T time steps, B columns, V words, D embedding, H hidden of a layer, K components of a mixture.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sigsoftmax.heads import Head
from sigsoftmax.lm.config import ModelConfig

__all__ = ["Masks", "draw_masks", "penalties"]


@dataclass(frozen=True, kw_only=True)
class Masks:
    """Scaled masks of one forward pass; None where the rate is 0. All but the first and last are shared over time."""

    words_V: Tensor | None
    """a dropped word is zero wherever it stands in the window; the output matrix is not touched"""
    input_1BD: Tensor | None
    hidden_1BH: tuple[Tensor | None, ...]
    """of the outputs of all layers but the last"""
    output_1BH: Tensor | None
    latent_1BKD: Tensor | None
    """(1, B, K D): of a mixture's latent vectors"""
    weights_4HH: tuple[Tensor | None, ...]
    """of the hidden-to-hidden matrices: one mask for all time steps and columns"""

    def of_columns(self, columns: slice) -> Masks:
        """Those of some columns of the batch."""

        def cut(mask: Tensor | None) -> Tensor | None:
            return None if mask is None else mask[:, columns]

        return replace(
            self,
            input_1BD=cut(self.input_1BD),
            hidden_1BH=tuple(map(cut, self.hidden_1BH)),
            output_1BH=cut(self.output_1BH),
            latent_1BKD=cut(self.latent_1BKD),
        )


def draw_masks(config: ModelConfig, *, words: int, batch: int, generator: torch.Generator) -> Masks:
    """New masks, on the generator's device."""

    def mask(rate: float, *shape: int) -> Tensor | None:
        if rate == 0.0:
            return None
        kept = torch.empty(shape, device=generator.device).bernoulli_(1.0 - rate, generator=generator)
        return kept.div_(1.0 - rate)

    components = Head.parse(config.head).components
    *inner, last = config.hidden
    return Masks(
        words_V=mask(config.dropout_words, words),
        input_1BD=mask(config.dropout_input, 1, batch, config.embedding),
        hidden_1BH=tuple(mask(config.dropout_hidden, 1, batch, width) for width in inner),
        output_1BH=mask(config.dropout_output, 1, batch, last),
        latent_1BKD=mask(config.dropout_latent, 1, batch, components * config.embedding),
        weights_4HH=tuple(mask(config.weight_drop, 4 * width, width) for width in config.hidden),
    )


def penalties(raw_TBH: Tensor, dropped_TBH: Tensor, *, activation: float, temporal_activation: float) -> Tensor:
    """AR of the dropped output and TAR of the raw one, weighted; a window of one step has no change to penalise."""
    total = raw_TBH.new_zeros((), dtype=torch.float32)
    if activation:
        total = total + activation * dropped_TBH.float().square().mean()
    if temporal_activation and raw_TBH.shape[0] > 1:
        total = total + temporal_activation * raw_TBH.float().diff(dim=0).square().mean()
    return total
