"""Log-likelihoods of given texts, token by token, without storing logits.

Shapes: B sequences of L tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sigsoftmax.integrations.huggingface.examination.label_convention import IGNORED
from sigsoftmax.integrations.huggingface.examination.model_state import evaluating, loss_function_set
from sigsoftmax.integrations.huggingface.patching.apply import language_model
from sigsoftmax.integrations.huggingface.patching.patched_model import is_patched


def token_log_likelihoods(
    model: nn.Module,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    labels: Tensor | None = None,
    **inputs: Any,
) -> Tensor:
    """log p of each token given those before it, (B, L - 1) in float32.

    Where ``attention_mask`` is 0, at a token or at the one before it, the result is 0, so that a sum over the last
    dimension is the log-likelihood of each text. The model is run in evaluation mode; ``inputs`` are passed on to it.

    Encoder-decoder and masked models need ``labels``, and give log p of each of them, (B, L), 0 where a label is -100.
    """
    inner: Any = language_model(model)
    if not is_patched(inner):
        raise ValueError(
            "scores are computed by the output function of a patched model; for a plain one, patch it with "
            "apply_output_function(model, 'softmax') first, which leaves its probabilities as they are"
        )
    convention = inner.examined.labels
    if convention.is_shifted == (labels is not None):
        raise ValueError(
            f"the labels of a causal model are its input_ids, and {type(inner).__name__} is one: leave labels out"
            if convention.is_shifted
            else f"{type(inner).__name__} does not predict its input; pass labels, with -100 where nothing counts"
        )
    if input_ids is not None:
        inputs["input_ids"] = input_ids
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
    labels_BL = _labels_of_text(input_ids, attention_mask) if labels is None else labels
    options, inner.scores = inner.loss_options, []
    inner.loss_options = replace(options, logits_with_labels="never")
    try:
        with evaluating(inner), loss_function_set(inner, None), torch.no_grad():
            model(labels=labels_BL, **inputs)
        (losses,) = inner.scores
    finally:
        inner.scores, inner.loss_options = None, options
    if convention.is_shifted:
        return -losses[:, :-1].float()
    if convention.drops_unlabelled:
        placed_BL = torch.zeros(labels_BL.shape, device=losses.device)
        return placed_BL.masked_scatter((labels_BL != IGNORED).to(losses.device), -losses.float())
    return -losses.float()


def _labels_of_text(ids_BL: Tensor | None, mask_BL: Tensor | None) -> Tensor:
    """The tokens of a text as labels, but for those that are masked or follow one that is."""
    if not isinstance(ids_BL, Tensor) or ids_BL.ndim != 2 or ids_BL.shape[1] < 2:
        kind = "none" if ids_BL is None else f"a {type(ids_BL).__name__}"
        found = tuple(ids_BL.shape) if isinstance(ids_BL, Tensor) else kind
        raise ValueError(
            f"input_ids must be a tensor of the shape (sequences, tokens) with two tokens or more, got {found}"
        )
    labels_BL = ids_BL.clone()
    if mask_BL is not None:
        if mask_BL.shape != ids_BL.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids, {tuple(ids_BL.shape)}, got {tuple(mask_BL.shape)}"
            )
        labels_BL[mask_BL == 0] = IGNORED
        labels_BL[:, 1:][mask_BL[:, :-1] == 0] = IGNORED
    return labels_BL
