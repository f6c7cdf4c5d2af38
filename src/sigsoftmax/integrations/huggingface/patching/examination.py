"""Examination of a model by running it on two tokens: its output layer, and the scale and cap of its logits.

Some models scale or cap their logits after the output layer, some cut them, some compute their loss themselves. What a
class does is not written anywhere that all classes share, so the output of the layer is replaced by known numbers, and
what arrives at the other end is looked at. This happens once, when the model is patched.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sigsoftmax.integrations.huggingface.patching.model_state import evaluating, loss_function_set

SATURATING = 59904.0
"""Far beyond any cap, and representable in half precision."""
PROBE = (SATURATING, 1.0, -2.0, 0.5, 8.0, -30.0, 0.0, 3.0)


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


@dataclass
class _Seen:
    """Observations of one run."""

    loss: float
    returned_BLV: Tensor
    to_loss: Tensor | None
    labels_are_kept: bool
    calls_of_layer: int


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
    """Tell whether the weight is an ordinary tensor, or a sharded one, which can be gathered.

    Any other class of tensors, such as the quantised weights of torchao, decides by itself which operations it has.
    """
    return type(layer.weight) in (Tensor, nn.Parameter) or hasattr(layer.weight, "full_tensor")


def described_layer(layer: Any) -> str:
    """The class of an output layer, and that of its weight if it is not an ordinary tensor."""
    name = f"a {type(layer).__name__}"
    return name if has_plain_weight(layer) else f"{name} whose weight is of the class {type(layer.weight).__name__}"


def examine(model: Any) -> Examined:
    """Run the model on two tokens, and say how its logits come about; a model that cannot be patched is refused."""
    name = type(model).__name__
    layer = output_layer(model)
    if any(tensor.is_meta for tensor in (layer.weight, *model.parameters())) and not hasattr(model, "hf_device_map"):
        raise ValueError(f"{name} has parameters on the meta device; load its weights before you patch it")
    if not hasattr(type(model), "loss_function") or "labels" not in inspect.signature(type(model).forward).parameters:
        raise ValueError(f"{name} computes no loss of labels, so it is not a causal language model of transformers")
    # Other numbers the second time, of another sum and norm: a term that depends on the logits then shows in the loss.
    other_probe = tuple(0.25 * value for value in PROBE[::-1])
    first, second = _run(model, layer, PROBE, loss=0.0), _run(model, layer, other_probe, loss=1.0)
    if first.to_loss is None or abs(second.loss - first.loss - 1.0) > 1e-4:
        raise ValueError(
            f"{name} computes its training loss itself instead of by model.loss_function, or adds a term that depends "
            "on its logits, so its output function cannot be replaced; use sigsoftmax.OutputLayer in a model of your "
            "own, or switch that term off in its configuration"
        )
    adjustment = _adjustment(first.returned_BLV)
    return Examined(
        num_classes=first.returned_BLV.shape[-1],
        adjustment=adjustment or LogitAdjustment(),
        why_stored=_why_stored(layer, first, adjustment),
    )


def probe_logits(model: Any) -> Tensor:
    """Logits (1, 2, V) that the model returns while its output layer gives known numbers."""
    return _run(model, output_layer(model), PROBE, loss=0.0).returned_BLV


def _why_stored(layer: Any, seen: _Seen, adjustment: LogitAdjustment | None) -> str | None:
    if linear_layer(layer) is None:
        return f"its output layer is {described_layer(layer)}, not a plain linear map"
    if seen.calls_of_layer != 1:
        return f"it calls its output layer {seen.calls_of_layer} times"
    if adjustment is None:
        return "it changes its logits in a way other than a scale and a softcap"
    assert seen.to_loss is not None
    if seen.to_loss.shape != seen.returned_BLV.shape or not seen.labels_are_kept:
        return "it changes its logits or its labels before the loss"
    if seen.returned_BLV.shape[-1] != layer.weight.shape[0]:
        return f"it uses {seen.returned_BLV.shape[-1]} of the {layer.weight.shape[0]} rows of its output layer"
    return None


def _run(model: Any, layer: nn.Module, probe: tuple[float, ...], *, loss: float) -> _Seen:
    calls: list[tuple[Tensor, Tensor | None]] = []
    layer_calls = 0

    def known_numbers(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        nonlocal layer_calls
        layer_calls += 1
        row = torch.zeros(output.shape[-1], dtype=_widest_dtype(output.device))
        row[: len(probe)] = torch.tensor(probe, dtype=row.dtype)[: len(row)]
        return row.to(output.device).expand(output.shape).clone()

    def recorded(logits: Tensor, labels: Tensor | None = None, *arguments: Any, **options: Any) -> Tensor:
        calls.append((logits, labels))
        return torch.full((), loss, device=logits.device)

    device = model.get_input_embeddings().weight.device
    ids_BL = torch.zeros(1, 2, dtype=torch.long, device=model.device if device.type == "meta" else device)
    labels_BL = torch.tensor([[1, 0]], device=ids_BL.device)
    accepted = inspect.signature(type(model).forward).parameters
    options = {"use_cache": False} if "use_cache" in accepted else {}
    with evaluating(model), loss_function_set(model, recorded), torch.no_grad():
        handle = layer.register_forward_hook(known_numbers)
        try:
            output = model(input_ids=ids_BL, labels=labels_BL, return_dict=True, **options)
        except (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{type(model).__name__} could not be run on two tokens, which shows what it does with its logits: "
                f"{error}"
            ) from error
        finally:
            handle.remove()
    to_loss, labels = calls[0] if calls else (None, None)
    return _Seen(
        loss=float(output.loss),
        returned_BLV=output.logits.to(_widest_dtype(output.logits.device)).cpu(),
        to_loss=to_loss,
        labels_are_kept=labels is not None and torch.equal(labels, labels_BL),
        calls_of_layer=layer_calls,
    )


def _widest_dtype(device: torch.device) -> torch.dtype:
    """Double precision where there is any, which shows a scale and a cap to the last digit in a model of any dtype."""
    return torch.float32 if device.type == "mps" else torch.float64


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
