"""The hook before the output layer of a patched model, which computes losses and logits in place of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sigsoftmax.integrations.huggingface.patching.causal_loss import CausalLoss
from sigsoftmax.integrations.huggingface.patching.examination import described_layer, linear_layer, output_layer
from sigsoftmax.integrations.huggingface.patching.head_function import HeadFunction
from sigsoftmax.integrations.huggingface.patching.model_state import remove_hook


@dataclass(kw_only=True)
class WaitingCall:
    """One call of a patched model that waits for the input of its output layer."""

    loss: CausalLoss | None = None
    """The loss to compute; None if none is asked for."""
    head: HeadFunction | None = None
    """The output function that makes logits of that input; None if no logits are to be stored."""
    logits: Tensor | None = None
    """The logits once they are computed."""

    def take(self, layer: nn.Linear, hidden: Tensor) -> None:
        if self.loss is not None:
            self.loss.loss = self.loss.of_hidden(layer, hidden)
        if self.head is not None:
            self.logits = self.head.linear(hidden, layer).logits()


def serve_waiting_call(layer: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The hook: what waits for the input of the layer is computed, and the layer gets no rows.

    It is computed here rather than after the model's forward pass because a sharded weight is whole only while its
    layer runs.
    """
    waiting = getattr(layer, "waiting_call", None)
    if waiting is None:
        return None
    waiting.take(layer, arguments[0])
    return (arguments[0][..., :0, :], *arguments[1:])


def add_hook(layer: nn.Module) -> None:
    """Register the hook, unless it is there."""
    if serve_waiting_call not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(serve_waiting_call)


def remove_hooks(model: nn.Module) -> None:
    """Undo :func:`add_hook` in all layers: a model may have got another output layer since."""
    for module in model.modules():
        if remove_hook(module._forward_pre_hooks, serve_waiting_call):
            module.__dict__.pop("waiting_call", None)


def layer_with_hook(model: Any) -> nn.Linear | None:
    """The output layer, if it is a plain linear map; None with a warning if its logits have to be stored.

    A mixture has no use for stored logits, and raises.
    """
    layer = linear_layer(output_layer(model))
    if layer is None:
        found = described_layer(output_layer(model))
        if model.output_function.takes_hidden:
            raise ValueError(
                f"{model.output_function.described()} needs an output layer that is a plain linear map, but that of "
                f"this {type(model).__name__} is now {found}; leave the output layer out of adapters and quantisation"
            )
        warn_of_stored_logits(model, f"its output layer is now {found}, something other than a plain linear map")
    else:
        add_hook(layer)
    return layer


@contextmanager
def waiting(model: Any, layer: Any, call: WaitingCall) -> Iterator[None]:
    """Let a call wait for the input of ``layer``, or, if that is None, its loss for logits."""
    holders = [model] if layer is None else [model, layer]
    for holder in holders:
        holder.waiting_call = call
    try:
        yield
    finally:
        for holder in holders:
            holder.waiting_call = None


def warn_of_stored_logits(model: Any, reason: str) -> None:
    if not getattr(model, "warned_of_stored_logits", False):
        model.warned_of_stored_logits = True
        warnings.warn(
            f"the loss of {type(model).__name__} needs its logits stored, since {reason}; the results are right, but "
            "the memory grows with tokens times vocabulary",
            stacklevel=3,
        )
