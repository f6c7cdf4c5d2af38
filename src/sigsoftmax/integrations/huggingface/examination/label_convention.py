"""The use that a model makes of its labels: which position each belongs to, and who computes the loss of them.

Causal models predict the token after each position and call ``model.loss_function``. Masked models and encoder-decoder
models predict the label of the position itself, and most of them compute cross-entropy in their forward pass, where
nothing can take its place. Such a model is run without labels; an encoder-decoder model is given the decoder's input
that it would make of them.

Shapes: B sequences of L tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""Label of tokens that do not count, as everywhere in transformers."""
LOSS_KEYWORDS = ("num_items_in_batch", "ignore_index", "shift_labels")
"""Keywords of a call that are for its loss alone."""

DecoderInput = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LabelConvention:
    """The labels of a model as its own class understands them."""

    is_shifted: bool = True
    """The label of a position is that of the token after it."""
    is_own_loss: bool = False
    """The model computes its loss itself instead of by ``model.loss_function``."""
    drops_unlabelled: bool = False
    """Only positions that have a label enter the output layer (ModernBERT's sparse prediction)."""

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> LabelConvention:
        """The counterpart of ``dataclasses.asdict``."""
        names = [field.name for field in fields(cls)]
        if not all(name in names and type(value) is bool for name, value in stored.items()):
            raise ValueError(
                f"the use of labels in the configuration is damaged: expected {', '.join(names)}, each true or false, "
                f"got {dict(stored)!r:.80}; restore the config.json that save_pretrained wrote"
            )
        return cls(**stored)

    def targets(self, labels_BL: Tensor | None, shifted_labels_BL: Tensor | None, ignore_index: int) -> Tensor:
        """The label that counts at each position that enters the output layer."""
        if shifted_labels_BL is not None:
            return shifted_labels_BL
        if labels_BL is None:
            raise ValueError("the loss needs labels or shift_labels, got neither")
        if self.is_shifted:
            # Nothing follows the last.
            return F.pad(labels_BL, (0, 1), value=ignore_index)[..., 1:]
        return labels_BL[labels_BL != ignore_index] if self.drops_unlabelled else labels_BL


def is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def without_labels(
    model: Any, options: dict[str, Any], accepted: Collection[str], decoder_input: DecoderInput | None
) -> dict[str, Any]:
    """The keywords of a call without its labels, with the decoder's input that the model would make of them.

    ``accepted`` are the keywords of the model's forward pass, ``decoder_input`` is :func:`decoder_input_of` its class.
    """
    labels_BL = options["labels"]
    options = {key: value for key, value in options.items() if key not in ("labels", *LOSS_KEYWORDS)}
    if "use_cache" in accepted:
        # Nothing is generated from a call with labels; many classes switch it off themselves.
        options["use_cache"] = False
    has_input = any(options.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
    if is_encoder_decoder(model) and not has_input:
        if decoder_input is None:
            raise ValueError(
                f"{type(model).__name__} does not say which tokens its decoder is given for labels; pass "
                "decoder_input_ids beside the labels"
            )
        options["decoder_input_ids"] = decoder_input(model, labels_BL)
    return options


def decoder_input_of(own: Any) -> DecoderInput | None:
    """The function by which an encoder-decoder class makes the tokens of its decoder from labels; None if unknown.

    ``examination`` compares a run with what it makes with a run with labels.
    """
    if hasattr(own, "prepare_decoder_input_ids_from_labels"):
        return lambda model, labels_BL: model.prepare_decoder_input_ids_from_labels(labels_BL)
    for kind in own.__mro__:
        shift: Any = getattr(sys.modules.get(kind.__module__), "shift_tokens_right", None)
        if shift is not None:
            return lambda model, labels_BL: shift(
                labels_BL, model.config.pad_token_id, model.config.decoder_start_token_id
            )
    return None
