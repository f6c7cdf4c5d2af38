"""The conditions under which a patched model may compute its loss from hidden vectors, past its own output layer.

Such a loss takes the input of the output layer and multiplies by its weight. That is the loss of the model's logits as
long as nothing else changes them: no hook, no other forward pass of the layer, no scale or cap other than the one that
was found when the model was patched. Whoever changes one of these later gets the loss of stored logits, which the model
computes itself, and a warning that says why.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from sigsoftmax.integrations.huggingface.examination.output_layers import described_layer, linear_layer, output_layer

OWN = __package__.removesuffix("patching")
HARMLESS = ("accelerate.", "deepspeed.", "torch.distributed.", "torch.nn.modules.", "trl.", OWN)
"""Starts of the modules whose functions move, gather or widen what the layer multiplies (TRL 1.16 computes its product
in float32 if asked to), or look at the model as ``examination`` does."""
PARTS_OF_NAMES = ("logit", "lm_head")
"""Parts of the names of settings by which models of transformers scale or cap their logits."""


def why_not_product(model: Any, layer: Any) -> str | None:
    """The reason why logits may be another thing than the product that is computed in their place; None without one."""
    plain = linear_layer(layer)
    if plain is None:
        return f"its output layer is now {described_layer(layer)}, something other than a plain linear map"
    if plain.weight.is_meta:
        return "its output layer is offloaded, and its weight is there while the layer runs alone"
    return model.found_change(id(model), id(layer), id(plain))


def found_change(model: Any) -> str | None:
    """The step or the setting that changes the logits of a model whose output layer is a plain linear map."""
    layer = output_layer(model)
    plain = linear_layer(layer)
    assert plain is not None
    # An adapter that trains a copy of the layer wraps it.
    step = _other_step(plain) or _other_step(layer)
    if step is not None:
        return f"its output layer has {step}, which may change what comes out of it"
    return _changed_setting(model)


def _other_step(layer: nn.Module) -> str | None:
    # accelerate keeps the forward pass that it wraps under the second name.
    for name in ("forward", "_old_forward"):
        own = layer.__dict__.get(name)
        if own is not None and not _is_harmless(own):
            return f"another `forward`, {_named(own)}"
    hooks = (hook for hook in layer._forward_hooks.values() if not _is_harmless(hook))
    return next((f"a forward hook, {_named(hook)}" for hook in hooks), None)


def _named(function: Any) -> str:
    return f"`{getattr(function, '__qualname__', type(function).__name__)}`"


def _is_harmless(function: Any) -> bool:
    """Tell it by the module whose code runs, which ``functools.wraps`` does not change."""
    function = getattr(function, "func", function)
    function = getattr(function, "__func__", function)
    module = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    return f"{module}.".startswith(HARMLESS)


def logit_settings(model: Any) -> dict[str, float | None]:
    """The numbers of a model and its configuration that may be a scale or a cap of logits, by their names."""
    config = model.config.get_text_config()
    named = [*((f"config.{name}", value) for name, value in vars(config).items()), *vars(model).items()]
    return {
        name: value
        for name, value in named
        if any(part in name for part in PARTS_OF_NAMES) and (value is None or type(value) in (int, float))
    }


def _changed_setting(model: Any) -> str | None:
    now, then = logit_settings(model), model.logit_settings
    if then is None or now == then:
        return None
    name = next(name for name in {**then, **now} if name not in then or name not in now or now[name] != then[name])
    return (
        f"{name} was {then.get(name)} when the model was patched and is {now.get(name)} now (to patch it anew, call "
        "remove_output_function(model) and then apply_output_function)"
    )
