"""Giving a language model of transformers another output function, and taking it away again.

A patched model is the same object, of a class that stands between it and its own class (``patched_model``).

Shapes: B sequences of L tokens, V classes.
"""

from __future__ import annotations

import dataclasses
import types
import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sigsoftmax.contract.spec import Function, WeightGradient
from sigsoftmax.family.heads import Head
from sigsoftmax.integrations.huggingface.examination.output_layers import examine, output_layer, probe_logits
from sigsoftmax.integrations.huggingface.patching.causal_loss import CausalLossOptions, KeepLogits
from sigsoftmax.integrations.huggingface.patching.head_function import is_plain_softmax
from sigsoftmax.integrations.huggingface.patching.mixture_head import DEFAULT_LATENT, completed, made_head
from sigsoftmax.integrations.huggingface.patching.output_layer_hook import warn_of_stored_logits
from sigsoftmax.integrations.huggingface.patching.patched_model import (
    attach,
    detach,
    is_patched,
    own_class,
    patched_class,
)
from sigsoftmax.integrations.huggingface.storage import adapters, checkpoints

Model = TypeVar("Model", bound=nn.Module)


def language_model(model: Any) -> PreTrainedModel:
    """The transformers model in what a user passes: itself, or the base of a PEFT model."""
    inner = model
    if not isinstance(inner, PreTrainedModel) and hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if isinstance(inner, PreTrainedModel):
        return inner
    wrapped = getattr(inner, "module", getattr(inner, "_orig_mod", None))
    if isinstance(wrapped, nn.Module):
        raise ValueError(
            f"a model wrapped in {type(model).__name__} cannot be patched; patch the model first, then wrap or compile "
            "it"
        )
    raise ValueError(f"expected a language model of transformers, got {type(model).__name__}")


def apply_output_function(
    model: Model,
    function: Function | Head | None = None,
    *,
    logits_with_labels: KeepLogits = "eval",
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk_bytes: int | None = None,
    weight_gradient: WeightGradient = "auto",
    backend: str | None = None,
) -> Model:
    """Give a language model of transformers another output function, in place; returns the same model.

    The model may be causal, masked, or an encoder-decoder model.

    ``function`` is a member of the family, such as ``"sigsoftmax"``, ``"gss(k=learned)"`` or ``"softmax"``, which keeps
    the probabilities and brings the loss that stores no logits. Left out, it is the one that the model's configuration
    remembers; on a model that is patched already, only the keywords change. Learned parameters live in
    ``model.output_function``. A mixture, such as ``"mos(K=4)"`` or ``"mixture(gss(k=0.2), K=4)"``, begins with
    the probabilities that its member has alone, so that ``mos`` begins as the model that it is put on.

    From then on ``.logits`` is phi of the logits: sampling, beams, scoring and losses that others compute from logits
    are right without a change. What others compute from the output layer's weight is refused, or taken over if it is
    TRL's (see ``receipts`` and ``trl_fused_head``). A training step with labels returns no logits
    (``logits_with_labels="always"`` keeps them, ``"never"`` drops them in evaluation, too). ``z_loss`` and
    ``label_smoothing`` act in training mode; the rest is for the linear loss.
    """
    options = CausalLossOptions(
        logits_with_labels=logits_with_labels,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        chunk_bytes=chunk_bytes,
        weight_gradient=weight_gradient,
        backend=backend,
    )
    inner: Any = language_model(model)
    if function is None and is_patched(inner):
        inner.loss_options = options
        return model
    stored = checkpoints.stored_in(inner.config) if function is None else {}
    head = Head.parse(stored["function"] if function is None else function, allow_options=True)
    _warn_of_a_jump(inner, head)
    patch(inner, head, options, frozen=tuple(stored.get("frozen", ())))
    return model


def patch(
    model: Any, function: Function | Head, options: CausalLossOptions | None = None, *, frozen: tuple[str, ...] = ()
) -> None:
    """Patch without a warning about probabilities that change."""
    wanted, was_patched = Head.parse(function, allow_options=True), is_patched(model)
    if was_patched and (wanted.components > 1 or model.output_function.takes_hidden):
        raise ValueError(
            f"this {type(model).__name__} has the output function {model.output_function.described()}, and mixtures "
            f"are not exchanged in place: trained parameters would be lost. Call remove_output_function(model) before "
            f"apply_output_function(model, {str(wanted)!r})"
        )
    examined = model.examined if was_patched else examine(model)
    made = made_head(wanted, examined, output_layer(model).weight.shape[-1], frozen=frozen)
    head = model.fused_head if was_patched else None
    if was_patched:
        _remove(model)
    before = probe_logits(model)
    configs = model.__dict__.pop("peft_config", None)
    own: Any = type(model)
    _change_class(model, patched_class(own))
    attach(model, made.to(output_layer(model).weight.device), options or CausalLossOptions())
    model.fused_head = head
    if configs is not None:
        model.peft_config = configs
    checkpoints.remember(model)
    checkpoints.rename(model)
    if not _is_served(model, before):
        remove_output_function(model)
        raise ValueError(
            f"the forward pass of this {type(model).__name__} does not go through its class, so it cannot be patched: "
            "something put another `forward` into the object; patch the model before that"
        )
    if examined.why_stored is not None:
        warn_of_stored_logits(model, examined.why_stored)


def _is_served(model: Any, before_BLV: Tensor) -> bool:
    """Tell whether calls come to the output function; ``before_BLV`` are the logits of the probe without it."""
    model.has_receipt = False
    try:
        found_BLV = probe_logits(model)
    except ValueError:
        return False  # the run was refused, since it left no receipt
    if model.output_function.takes_hidden:
        # The numbers of the probe stand behind the output layer, where a mixture does not look.
        return bool(model.has_receipt)
    return torch.allclose(found_BLV, model.output_function.transformed(before_BLV), rtol=1e-4)


def remove_output_function(model: Model) -> Model:
    """Undo :func:`apply_output_function`: the model is of its own class again, and its logits mean softmax."""
    inner: Any = language_model(model)
    if not is_patched(inner):
        raise ValueError(f"{type(inner).__name__} has no output function to remove; it was not patched")
    head = inner.fused_head
    _remove(inner)
    if head is not None:
        # TRL's trainer goes on to call the model with fused_lm_head=True.
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(inner, **dataclasses.asdict(head))
    return model


def _remove(inner: Any) -> None:
    own: Any = own_class(inner)
    if type(inner) is not patched_class(own):
        raise ValueError(
            f"{type(inner).__name__} was given another class after it was patched (fully_shard does that); undo that "
            "first"
        )
    configs = inner.__dict__.pop("adapter_configs", None)
    adapters.release_configs(configs)
    checkpoints.forget(inner)
    detach(inner)
    _change_class(inner, own)
    if configs is not None:
        inner.peft_config = configs


def _change_class(model: Any, to: Any) -> None:
    """Another class, and the hooks of accelerate, which keep the method that they found, led to its forward pass."""
    before: Any = type(model)
    model.__class__ = to
    for name in ("_old_forward", "forward"):
        method = model.__dict__.get(name)
        if getattr(method, "__func__", None) is before.forward:
            model.__dict__[name] = types.MethodType(to.forward, model)


def _warn_of_a_jump(model: Any, head: Head) -> None:
    """Warn that a trained model means its logits for the function that it has now."""
    name = checkpoints.own_name(model)
    now = Head(model.output_function.function) if is_patched(model) else Head.parse("softmax")
    remembered = getattr(model.config, checkpoints.KEY, None) or {}
    head = completed(head)
    keeps = head.latent in (None, DEFAULT_LATENT)
    is_same = str(head) == remembered.get("function") or (keeps and str(head.function) == str(now.function))
    if name and not is_same and not (keeps and is_plain_softmax(now.function) and is_plain_softmax(head.function)):
        warnings.warn(
            f"{name!r} was trained with {now}: with {head} every one of its probabilities "
            "changes before the first training step. To start from the probabilities it has, use retrofit(model, b), "
            "which begins with a shifted sigsoftmax that agrees with softmax to a bound you choose (shifted_start)",
            stacklevel=3,
        )
