"""Six dropouts and two penalties.

Masks are drawn before the forward pass and given to it, so that a pass is a function of its arguments: the same masks
give the same numbers, no mask means evaluation, and a captured CUDA graph draws new ones at each replay.
Kept values are scaled by 1 / (1 - rate).

Shapes: T time steps, B columns, V vocabulary, D embedding, H hidden of a layer, K components of a mixture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sigsoftmax.lm import kernels
from sigsoftmax.lm.config import ModelConfig

__all__ = ["MaskSampler", "Masks", "WeightDrop", "penalties"]

ALIGNMENT = 16
"""elements; kernels load several elements of a mask at once where it begins at a multiple"""


class WeightDrop(NamedTuple):
    """The elements of a hidden-to-hidden matrix that a window keeps, and the factor of these."""

    kept_4HH: Tensor
    """bool; False where an element is dropped"""
    scale: float

    def applied_to(self, weight_4HH: Tensor) -> Tensor:
        """The matrix with dropped elements zero and kept ones scaled."""
        return weight_4HH * (self.kept_4HH.to(weight_4HH.dtype) * self.scale)


@dataclass(frozen=True, kw_only=True)
class Masks:
    """Scaled masks of one forward pass; None where the rate is 0. All but the first and last are shared over time."""

    words_V: Tensor | None = None
    """word dropout: a dropped token is zero wherever it stands in the window; the output matrix is not touched"""
    input_1BD: Tensor | None = None
    hidden_1BH: tuple[Tensor | None, ...]
    """masks of the outputs of all layers but the last"""
    output_1BH: Tensor | None = None
    latent_1BKD: Tensor | None = None
    """mask of a mixture's latent vectors, (1, B, K D)"""
    weights_4HH: tuple[WeightDrop | None, ...]
    """masks of the hidden-to-hidden matrices: one mask for all time steps and columns"""

    def of_columns(self, columns: slice) -> Masks:
        """The masks of some columns of the batch."""

        def cut(mask: Tensor | None) -> Tensor | None:
            return None if mask is None else mask[:, columns]

        return replace(
            self,
            input_1BD=cut(self.input_1BD),
            hidden_1BH=tuple(map(cut, self.hidden_1BH)),
            output_1BH=cut(self.output_1BH),
            latent_1BKD=cut(self.latent_1BKD),
        )


class _Mask(NamedTuple):
    """A mask before it is drawn."""

    name: str
    rate: float
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements up to where the next mask may begin."""
        return -(-math.prod(self.shape) // ALIGNMENT) * ALIGNMENT


class MaskSampler:
    """Draws the masks of windows: all that are shared over time in one draw, and all of weights in another.

    Masks that multiply what the LSTM computes have its dtype; those of the embedding are float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocabulary_size: int,
        batch: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        *inner, last = config.hidden
        components = config.parsed_head.components
        of_embedding = [
            _Mask("words", config.dropout_words, (vocabulary_size,)),
            _Mask("input", config.dropout_input, (1, batch, config.embedding)),
        ]
        of_layers = [
            *(_Mask(f"hidden {i}", config.dropout_hidden, (1, batch, width)) for i, width in enumerate(inner)),
            _Mask("output", config.dropout_output, (1, batch, last)),
            _Mask("latent", config.dropout_latent, (1, batch, components * config.embedding)),
        ]
        self._of_embedding, self._of_layers = ([m for m in masks if m.rate] for masks in (of_embedding, of_layers))
        self._of_weights = [
            _Mask(f"weight {i}", config.weight_drop, (4 * width, width)) for i, width in enumerate(config.hidden)
        ]
        locked = [*self._of_embedding, *self._of_layers]
        kept = [1.0 - mask.rate for mask in locked]
        numbers = torch.tensor([kept, [1.0 / share for share in kept]], dtype=torch.float32)
        sizes = torch.tensor([mask.size for mask in locked], dtype=torch.int64)
        self._kept, self._scale = numbers.repeat_interleave(sizes, dim=1).to(device)
        self._weight_drop, self._dtype = config.weight_drop, dtype

    def draw(self, generator: torch.Generator) -> Masks:
        """New masks, on the generator's device."""
        drawn = torch.bernoulli(self._kept, generator=generator).mul_(self._scale)
        of_embedding, of_layers = drawn.split([sum(m.size for m in ms) for ms in (self._of_embedding, self._of_layers)])
        masks = _views(of_embedding, self._of_embedding) | _views(of_layers.to(self._dtype), self._of_layers)
        return Masks(
            words_V=masks.get("words"),
            input_1BD=masks.get("input"),
            hidden_1BH=tuple(masks.get(f"hidden {i}") for i in range(len(self._of_weights) - 1)),
            output_1BH=masks.get("output"),
            latent_1BKD=masks.get("latent"),
            weights_4HH=self._draw_weights(generator),
        )

    def _draw_weights(self, generator: torch.Generator) -> tuple[WeightDrop | None, ...]:
        if not self._weight_drop:
            return (None,) * len(self._of_weights)
        kept = torch.empty(sum(mask.size for mask in self._of_weights), dtype=torch.bool, device=generator.device)
        kept.bernoulli_(1.0 - self._weight_drop, generator=generator)
        views = _views(kept, self._of_weights).values()
        return tuple(WeightDrop(view, 1.0 / (1.0 - self._weight_drop)) for view in views)


def _views(flat: Tensor, masks: list[_Mask]) -> dict[str, Tensor]:
    parts = flat.split([mask.size for mask in masks]) if masks else ()
    return {m.name: part[: math.prod(m.shape)].view(m.shape) for part, m in zip(parts, masks, strict=True)}


def penalties(raw_TBH: Tensor, dropped_TBH: Tensor, *, activation: float, temporal_activation: float) -> Tensor:
    """The weighted sum of AR of the dropped output and TAR of the raw one, which a window of one step does not have."""
    if kernels.run_on(raw_TBH, torch.float32, torch.bfloat16):
        from sigsoftmax.lm.kernels.penalties import Penalties

        return Penalties.apply(raw_TBH, dropped_TBH, activation, temporal_activation)
    total = raw_TBH.new_zeros((), dtype=torch.float32)
    if activation:
        total = total + activation * dropped_TBH.float().square().mean()
    if temporal_activation and raw_TBH.shape[0] > 1:
        total = total + temporal_activation * raw_TBH.float().diff(dim=0).square().mean()
    return total
