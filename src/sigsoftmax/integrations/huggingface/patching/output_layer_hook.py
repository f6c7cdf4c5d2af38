"""The hook before the output layer of a patched model, which computes the loss in place of the logits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from sigsoftmax.integrations.huggingface.patching.causal_loss import CausalLoss
from sigsoftmax.integrations.huggingface.patching.examination import described_layer, linear_layer, output_layer
from sigsoftmax.integrations.huggingface.patching.model_state import remove_hook


def compute_waiting_loss(layer: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The hook: the loss that waits for the input of the layer is computed, and the layer gets no rows.

    It is computed here rather than after the model's forward pass because a sharded weight is whole only while its
    layer runs.
    """
    waiting = getattr(layer, "waiting_loss", None)
    if waiting is None:
        return None
    waiting.loss = waiting.of_hidden(layer, arguments[0])
    return (arguments[0][..., :0, :], *arguments[1:])


def add_hook(layer: nn.Module) -> None:
    """Register the hook, unless it is there."""
    if compute_waiting_loss not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(compute_waiting_loss)


def remove_hooks(model: nn.Module) -> None:
    """Undo :func:`add_hook` in all layers: a model may have got another output layer since."""
    for module in model.modules():
        if remove_hook(module._forward_pre_hooks, compute_waiting_loss):
            module.__dict__.pop("waiting_loss", None)


def layer_with_hook(model: Any) -> nn.Linear | None:
    """The output layer, if it is a plain linear map; None with a warning if its logits have to be stored."""
    layer = linear_layer(output_layer(model))
    if layer is None:
        found = described_layer(output_layer(model))
        warn_of_stored_logits(model, f"its output layer is now {found}, something other than a plain linear map")
    else:
        add_hook(layer)
    return layer


@contextmanager
def waiting(model: Any, layer: Any, loss: CausalLoss) -> Iterator[None]:
    """Let a loss wait for the input of ``layer``, or, if that is None, for logits."""
    holders = [model] if layer is None else [model, layer]
    for holder in holders:
        holder.waiting_loss = loss
    try:
        yield
    finally:
        for holder in holders:
            holder.waiting_loss = None


def warn_of_stored_logits(model: Any, reason: str) -> None:
    if not getattr(model, "warned_of_stored_logits", False):
        model.warned_of_stored_logits = True
        warnings.warn(
            f"the loss of {type(model).__name__} needs its logits stored, since {reason}; the results are right, but "
            "the memory grows with tokens times vocabulary",
            stacklevel=3,
        )
