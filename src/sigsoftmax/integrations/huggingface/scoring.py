"""Log-likelihoods of given texts, token by token, without storing logits.

Shapes: B sequences of L tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sigsoftmax.integrations.huggingface.patching.apply import language_model
from sigsoftmax.integrations.huggingface.patching.causal_loss import IGNORED
from sigsoftmax.integrations.huggingface.patching.model_state import evaluating, loss_function_set
from sigsoftmax.integrations.huggingface.patching.patched_model import is_patched


def token_log_likelihoods(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None, **inputs: Any
) -> Tensor:
    """log p of each token given those before it, (B, L - 1) in float32.

    Where ``attention_mask`` is 0, at a token or at the one before it, the result is 0, so that a sum over the last
    dimension is the log-likelihood of each text. The model is run in evaluation mode; ``inputs`` are passed on to it.
    """
    inner: Any = language_model(model)
    if not is_patched(inner):
        raise ValueError(
            "scores are computed by the output function of a patched model; for a plain one, patch it with "
            "apply_output_function(model, 'softmax') first, which leaves its probabilities as they are"
        )
    if input_ids.ndim != 2 or input_ids.shape[1] < 2:
        raise ValueError(
            f"input_ids must have the shape (sequences, tokens) with two tokens or more, got {tuple(input_ids.shape)}"
        )
    labels_BL = input_ids.clone()
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}, got "
                f"{tuple(attention_mask.shape)}"
            )
        inputs["attention_mask"] = attention_mask
        labels_BL[attention_mask == 0] = IGNORED
        labels_BL[:, 1:][attention_mask[:, :-1] == 0] = IGNORED
    options, inner.scores = inner.loss_options, []
    inner.loss_options = replace(options, logits_with_labels="never")
    try:
        with evaluating(inner), loss_function_set(inner, None), torch.no_grad():
            model(input_ids=input_ids, labels=labels_BL, **inputs)
        (losses_BL,) = inner.scores
    finally:
        inner.scores, inner.loss_options = None, options
    return -losses_BL[:, :-1].float()
