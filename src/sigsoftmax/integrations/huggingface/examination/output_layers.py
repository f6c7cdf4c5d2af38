"""Examination of a model by running it on a few tokens: its output layer, what it does to its logits, and its labels.

Some models scale or cap their logits after the output layer, or add a bias to them, some cut them, some compute their
loss themselves. What a class does is not written anywhere that all classes share, so the output of the layer is
replaced by known numbers, and what arrives at the other end is looked at. This happens once, when the model is patched.

Shapes: B sequences of L tokens, d width, V classes.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from sigsoftmax import torch_internals
from sigsoftmax.integrations.huggingface.examination.label_convention import (
    IGNORED,
    LabelConvention,
    is_encoder_decoder,
)
from sigsoftmax.integrations.huggingface.examination.trial_run import (
    ATTENDED,
    LABELS,
    MODERATE_PROBES,
    OTHER_PROBE,
    PROBE,
    SATURATING,
    TrialRun,
    takes_tokens,
    trial_run,
)


@dataclass(frozen=True, kw_only=True)
class LogitAdjustment:
    """The change that a model makes to the logits of its output layer: ``cap tanh(scale z / cap)``."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        scaled = logits * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)

    def rounded(self, digits: int) -> LogitAdjustment:
        """The same with numbers of so many significant digits."""
        cap = None if self.cap is None else float(f"{self.cap:.{digits}g}")
        return LogitAdjustment(scale=float(f"{self.scale:.{digits}g}"), cap=cap)


@dataclass(frozen=True, kw_only=True)
class Examined:
    """The way in which a model computes its logits."""

    num_classes: int
    adjustment: LogitAdjustment = field(default_factory=LogitAdjustment)
    why_stored: str | None = None
    """Reason for which the loss needs stored logits; None if it can be computed from hidden vectors."""
    class_bias: str | None = None
    """Name of the parameter or buffer, one number per class, that is added after the output layer."""
    labels: LabelConvention = field(default_factory=LabelConvention)


def output_layer(model: Any) -> Any:
    """The module that makes logits of hidden vectors."""
    layer = model.get_output_embeddings()
    if isinstance(layer, nn.Module) and callable(getattr(layer, "weight", None)):
        raise ValueError(
            f"expected an output layer with a weight matrix, but that of this {type(model).__name__} is a "
            f"{type(layer).__module__}.{type(layer).__name__}, in which torch's quantisation keeps the weight packed. "
            "Leave the output layer out, as in model.model = quantize_dynamic(model.model, {torch.nn.Linear}), or "
            "quantise it with torchao, as in quantize_(model, Int8WeightOnlyConfig())"
        )
    if not isinstance(layer, nn.Module) or not isinstance(getattr(layer, "weight", None), Tensor):
        raise ValueError(
            f"{type(model).__name__} has no output layer with a weight matrix (get_output_embeddings() gave "
            f"{type(layer).__name__}); an output function can only be applied to a language model with a head"
        )
    return layer


def names_of(model: nn.Module, parameter: Tensor) -> list[str]:
    """Names that a parameter has in the state dict; two or more if it is tied."""
    return [name for name, value in model.named_parameters(remove_duplicate=False) if value is parameter]


def linear_layer(layer: Any) -> nn.Linear | None:
    """The plain linear map that an output layer is, adapters that train a copy of it unwrapped; None if it is none."""
    copies = getattr(layer, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict) and hasattr(layer, "original_module"):
        active = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in copies]
        layer = copies[active[0]] if active else layer.original_module
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        return None
    is_matrix = layer.weight.is_floating_point() and layer.weight.ndim == 2
    return layer if is_matrix and has_plain_weight(layer) else None


def has_plain_weight(layer: nn.Module) -> bool:
    """Tell whether the weight is an ordinary tensor, stands for one in an export, or is sharded and can be gathered.

    Any other class of tensors, such as the quantised weights of torchao, decides by itself which operations it has.
    """
    weight: Any = layer.weight
    return type(weight) in (Tensor, nn.Parameter) or hasattr(weight, "full_tensor") or torch_internals.is_fake(weight)


def described_layer(layer: Any) -> str:
    """The class of an output layer, and that of its weight if it is not an ordinary tensor."""
    kind: Any = type(layer)
    # Adapters and quantisation call their layers Linear, too.
    name = f"a {kind.__name__}" if kind is nn.Linear else f"a {kind.__module__}.{kind.__name__}"
    return name if has_plain_weight(layer) else f"{name} whose weight is of the class {type(layer.weight).__name__}"


def examine(model: Any) -> Examined:
    """Run the model on two tokens, and say how its logits come about; a model that cannot be patched is refused."""
    name = type(model).__name__
    layer = output_layer(model)
    if any(tensor.is_meta for tensor in (layer.weight, *model.parameters())) and not hasattr(model, "hf_device_map"):
        raise ValueError(f"{name} has parameters on the meta device; load its weights before you patch it")
    if not hasattr(type(model), "loss_function") or "labels" not in inspect.signature(type(model).forward).parameters:
        raise ValueError(f"{name} computes no loss of labels, so it is not a language model of transformers")
    convention = _label_convention(model, layer)
    class_bias, is_added = _class_bias(model, layer)
    with _zeroed(model, class_bias if is_added else None):
        first, second = (
            trial_run(model, layer, probe, loss=float(one)) for one, probe in enumerate((PROBE, OTHER_PROBE))
        )
    if not convention.is_own_loss and abs((second.loss or 0.0) - (first.loss or 0.0) - 1.0) > 1e-4:
        raise _refusal(model)
    adjustment = _adjustment(first.returned_BLV)
    why_stored = _why_stored(layer, first, adjustment)
    if class_bias is not None and not (is_added and adjustment == LogitAdjustment()):
        why_stored = f"it changes its logits after its output layer with {class_bias}, in a way other than a sum"
    return Examined(
        num_classes=first.returned_BLV.shape[-1],
        adjustment=adjustment or LogitAdjustment(),
        why_stored=why_stored,
        class_bias=class_bias if is_added and why_stored is None else None,
        labels=convention,
    )


def _refusal(model: Any, reason: str | None = None) -> ValueError:
    reason = reason or (
        "instead of by model.loss_function, and not as the cross-entropy of the label of each position, or it adds a "
        "term that depends on its logits"
    )
    return ValueError(
        f"{type(model).__name__} computes its training loss itself, {reason}, so its output function cannot be "
        "replaced; use sigsoftmax.OutputLayer in a model of your own, or switch what it adds off in its configuration"
    )


def probe_logits(model: Any) -> Tensor:
    """Logits (1, 2, V) that the model returns while its output layer gives known numbers."""
    return trial_run(model, output_layer(model), PROBE, loss=0.0).returned_BLV


def _why_stored(layer: Any, seen: TrialRun, adjustment: LogitAdjustment | None) -> str | None:
    if linear_layer(layer) is None:
        return f"its output layer is {described_layer(layer)}, not a plain linear map"
    if len(seen.entered) != 1:
        return f"it calls its output layer {len(seen.entered)} times"
    if adjustment is None:
        return "it changes its logits in a way other than a scale and a softcap"
    if seen.to_loss is not None:
        logits, labels = seen.to_loss
        kept = [torch.tensor(LABELS)[None], torch.tensor([label for label in LABELS if label != IGNORED])]
        if logits.shape != seen.returned_BLV.shape or not any(torch.equal(labels.cpu(), one) for one in kept):
            return "it changes its logits or its labels before the loss"
    if seen.returned_BLV.shape[:-1] != seen.entered[0].shape[:-1]:
        return "only some of the vectors that enter its output layer become logits"
    if seen.returned_BLV.shape[-1] != layer.weight.shape[0]:
        return f"it uses {seen.returned_BLV.shape[-1]} of the {layer.weight.shape[0]} rows of its output layer"
    return None


# --- labels ---------------------------------------------------------------------------------------------------------


def _label_convention(model: Any, layer: nn.Module) -> LabelConvention:
    """The use that a model makes of its labels, known by the loss that it computes of known numbers."""
    runs = [trial_run(model, layer, probe) for probe in MODERATE_PROBES]
    labelled = sum(label != IGNORED for label in LABELS)
    entered = runs[0].entered
    is_own = runs[0].to_loss is None
    drops = bool(entered) and entered[0].shape[:-1] == (labelled,)
    possible = []
    for is_shifted in (True, False):
        convention = LabelConvention(is_shifted=is_shifted, is_own_loss=is_own, drops_unlabelled=drops)
        excess, other = (_excess(convention, seen) for seen in runs)
        # A term that does not depend on logits, such as that of a router, stays what it is beside `loss_function`.
        known = 0.0 if is_own or not entered else excess
        if max(abs(excess - known), abs(other - known)) <= _tolerance(model):
            possible.append(convention)
    if len(possible) != 1:
        raise _refusal(model)
    if is_own:
        _check_own_loss(model, layer, possible[0], runs[0])
    return possible[0]


def _excess(convention: LabelConvention, seen: TrialRun) -> float:
    """The part of a loss that is not the cross-entropy of the labels; no number if these do not fit."""
    logits = seen.returned_BLV if seen.to_loss is None else seen.to_loss[0].detach().cpu()
    targets = convention.targets(torch.tensor([LABELS]), None, IGNORED)
    if seen.loss is None or logits.shape[:-1].numel() != targets.numel():
        return math.nan
    return seen.loss - float(F.cross_entropy(logits.flatten(0, -2).double(), targets.flatten()))


def _tolerance(model: Any) -> float:
    """Rounding of a loss; a single label in the wrong place makes ten times as much of a difference and more."""
    return 2e-2 if model.dtype in (torch.float16, torch.bfloat16) else 1e-3


def _check_own_loss(model: Any, layer: nn.Module, convention: LabelConvention, seen: TrialRun) -> None:
    """Refuse a model unless its loss is nothing but the cross-entropy of its logits, and can be computed without it.

    Causal models that compute their loss are refused even if they do not shift labels: trainers believe that they do.
    """
    accepted = inspect.signature(type(model).forward).parameters
    is_causal = LOSS_MAPPING.get(str(getattr(model, "loss_type", ""))) is ForCausalLMLoss and not is_encoder_decoder(
        model
    )
    if convention.is_shifted or is_causal:
        raise _refusal(model)
    if "output_router_logits" in accepted:
        raise _refusal(model, "and can be asked to add the losses of its routers (output_router_logits)")
    has_mask = "attention_mask" in accepted and takes_tokens(model)
    mask_BL = torch.tensor([ATTENDED]) if has_mask else None
    for one in (trial_run(model, layer, MODERATE_PROBES[0], mask_BL=mask_BL), trial_run(model, layer, None)):
        if not abs(_excess(convention, one)) <= _tolerance(model) * max(1.0, one.loss or 0.0):
            raise _refusal(model)
    alone = trial_run(model, layer, MODERATE_PROBES[0], with_labels=False)
    pairs = [(seen.returned_BLV, alone.returned_BLV), *zip(seen.entered, alone.entered, strict=False)]
    if not all(one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-4) for one, other in pairs):
        raise ValueError(
            f"{type(model).__name__} gives other logits when it is given labels than when it is given the decoder's "
            "input that these stand for, so its loss cannot be computed in its place; use sigsoftmax.OutputLayer in a "
            "model of your own"
        )


# --- a bias after the output layer ----------------------------------------------------------------------------------


def _class_bias(model: Any, layer: Any) -> tuple[str | None, bool]:
    """The parameter or buffer, one number per class, that changes logits after the layer; True if it is just added."""
    classes = probe_logits(model).shape[-1]
    held = [one for one in (*model.named_parameters(), *model.named_buffers()) if one[1].ndim and not one[1].is_meta]
    own = getattr(layer, "bias", None)
    candidates = [
        (name, tensor)
        for name, tensor in held
        if tensor.numel() == classes == tensor.shape[-1] and tensor is not own and tensor.is_floating_point()
    ]
    changing = []
    for name, tensor in candidates:
        others = (0.5 * (torch.arange(classes) % 8 - 3)).reshape(tensor.shape).to(tensor)
        with _zeroed(model, name):
            without = trial_run(model, layer, MODERATE_PROBES[0], loss=0.0).returned_BLV
            with torch.no_grad():
                tensor.copy_(others)
            difference = trial_run(model, layer, MODERATE_PROBES[0], loss=0.0).returned_BLV - without
        if bool(difference.any()):
            changing.append((name, torch.allclose(difference, others.to(difference).expand_as(difference), atol=1e-4)))
    return changing[0] if len(changing) == 1 else (", ".join(name for name, _ in changing) or None, False)


@contextmanager
def _zeroed(model: Any, name: str | None) -> Iterator[None]:
    """Let a parameter or buffer be zero, and give it back its numbers."""
    if name is None:
        yield
        return
    tensor = tensor_named(model, name)
    kept = tensor.detach().clone()
    try:
        with torch.no_grad():
            tensor.zero_()
        yield
    finally:
        with torch.no_grad():
            tensor.copy_(kept)


def tensor_named(model: Any, name: str) -> Tensor:
    """The parameter or buffer of that name in the state dict."""
    try:
        return functools.reduce(getattr, name.split("."), model)
    except AttributeError:
        raise ValueError(
            f"the configuration says that {name!r:.60} is added to the logits, and {type(model).__name__} has no such "
            "parameter or buffer; restore the config.json that save_pretrained wrote"
        ) from None


def _adjustment(returned_BLV: Tensor) -> LogitAdjustment | None:
    """The scale and cap that explain what became of the probe; None if these do not."""
    row = returned_BLV.reshape(-1, returned_BLV.shape[-1])[0].double()
    sent = torch.tensor(PROBE[: len(row)], dtype=torch.float64)
    got = row[: len(sent)]
    rest_is_zero = bool((row[len(sent) :] == 0).all())
    if len(sent) < 3 or not rest_is_zero or not bool(torch.isfinite(got).all()):
        return None
    scale, cap = float(got[1]), abs(float(got[0]))
    candidates = [LogitAdjustment(scale=scale)]
    if 0.0 < abs(scale) < cap < 0.5 * SATURATING * abs(scale):
        candidates.append(LogitAdjustment(scale=cap * float(torch.atanh(got[1] / cap)), cap=cap))
    # Numbers as a person writes them first: inverting a tanh leaves a cap of 30 at 29.999999999999996, and a model that
    # computes in single precision leaves it at 29.999998.
    for digits, tolerance in ((12, 1e-12), (6, 3e-7), (17, 1e-5)):
        for candidate in (one.rounded(digits) for one in candidates):
            if torch.allclose(candidate(sent), got, rtol=tolerance, atol=1e-8 * tolerance):
                return candidate
    return None
