"""The output function that a model applies after its output layer, found by comparing what goes in with what comes out.

Softcap and scaling sit in each model's own forward pass, under names that differ and with signs that differ (one
`logits_scaling` divides, another multiplies). So a configuration gives names to what was found, and the model's output
decides.

Shapes: R rows of logits, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from sigsoftmax.family import OutputFunction, names
from sigsoftmax.integrations.huggingface.examination.output_layers import LogitAdjustment

__all__ = ["Detected", "agreement", "declared_by", "detect", "relative_difference"]

SOFTCAP_KEYS = ("final_logit_softcapping", "final_logits_softcapping", "logits_soft_cap", "logit_softcapping")
SETTING_WORDS = ("logit", "lm_head", "multiplier", "scaling")
"""A setting whose name holds one of these may concern the logits."""
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 3e-2


class Detected(NamedTuple):
    """An output function and the evidence for it."""

    function: OutputFunction
    scale: float
    """factor of the logits before the function"""
    explanation: str
    error: float
    """difference from the model's output, relative to the spread of its logits"""


def detect(
    raw_RV: Tensor,
    output_RV: Tensor,
    settings: Mapping[str, object],
    *,
    probed: LogitAdjustment | None = None,
    stated: OutputFunction | None = None,
    reason: str = "stated",
) -> Detected:
    """The member and the scale with which ``output_RV`` is phi(scale * raw), up to a number per row.

    ``raw_RV`` are the products h W^T + b, ``output_RV`` the logits that the model returns, ``settings`` the model's
    configuration. A function that is ``stated`` is taken, at the scale that was probed, and its error told. ValueError
    if nothing fits.
    """
    tolerance = _tolerance(output_RV.dtype)
    raw, wide_RV = raw_RV.to(torch.float64), output_RV.to(torch.float64)

    def candidate(function: OutputFunction, scale: float, explanation: str) -> Detected:
        return Detected(function, scale, explanation, relative_difference(function.phi(scale * raw), wide_RV))

    scale, cap = (1.0, None) if probed is None else (probed.scale, probed.cap)
    if stated is not None:
        found = candidate(stated, scale, reason)
        return found._replace(explanation=agreement(reason, found.error, output_RV.dtype))
    scaled = _scale_text(scale, settings)
    if cap is None:
        best = candidate(OutputFunction("softmax"), scale, f"no other function is applied{scaled}")
    else:
        key = _setting_of(cap, settings)
        told = f"`{key}` = {cap:g} of its configuration" if key else f"logits are capped at {cap:g}"
        best = candidate(OutputFunction("softcap", c=cap), scale, f"{told}{scaled}")
    if best.error > tolerance:
        others = [candidate(OutputFunction(name), scale, "found among the family") for name in names()]
        centred_raw_RV, centred_RV = _centred(raw), _centred(wide_RV)
        square = float(centred_raw_RV.square().sum())
        # The factor that takes the products nearest to the output.
        measured = float((centred_raw_RV * centred_RV).sum()) / square if square > 0.0 else 1.0
        if measured > 0.0:
            explanation = f"measured{_scale_text(measured, settings)}"
            others.append(candidate(OutputFunction("softmax"), measured, explanation))
        best = min([best, *others], key=lambda one: one.error)
    if not best.error <= tolerance:
        raise ValueError(
            "the logits that this model returns are no known function of its output layer's (nearest: "
            f"{best.function}, off by {best.error:.2g} of their spread). State it with --function, or store the "
            "model's log-probabilities as a .npy file and audit that"
        )
    return best._replace(explanation=f"{best.explanation}; its output agrees within {best.error:.0e}")


def relative_difference(expected_RV: Tensor, output_RV: Tensor) -> float:
    """The difference of two matrices of logits, up to a number per row, relative to the spread of the second."""
    centred_RV = _centred(output_RV.to(torch.float64))
    spread = float(centred_RV.norm())
    difference = float((_centred(expected_RV.to(torch.float64)) - centred_RV).norm())
    return difference / spread if spread > 0.0 else difference


def agreement(reason: str, error: float, dtype: torch.dtype) -> str:
    """The origin of an output function that was not searched for, and its difference from the model's output."""
    agrees = "which agrees" if error <= _tolerance(dtype) else f"which differs by {error:.2g}"
    return f"{reason}; compared with the model's output, {agrees}"


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCES.get(dtype, LOW_PRECISION_TOLERANCE)


def declared_by(settings: Mapping[str, object]) -> tuple[OutputFunction, str]:
    """The function that a configuration names, for when the model is not run."""
    numbers = _numbers(settings)
    for key in SOFTCAP_KEYS:
        if numbers.get(key, 0.0) > 0.0:
            told = f"`{key}` = {numbers[key]:g} of its configuration; not checked against its output"
            return OutputFunction("softcap", c=numbers[key]), told
    return OutputFunction("softmax"), "its configuration names no other; not checked against its output"


def _scale_text(scale: float, settings: Mapping[str, object]) -> str:
    if math.isclose(scale, 1.0, rel_tol=1e-6):
        return ""
    for number, verb in ((scale, "multiplied"), (1.0 / scale, "divided")):
        key = _setting_of(number, settings)
        if key:
            return f", logits are {verb} by `{key}` = {number:g}"
    return f", logits are multiplied by {scale:.6g}"


def _setting_of(number: float, settings: Mapping[str, object]) -> str:
    """The name of a setting that may concern the logits and has this value; empty if there is none."""
    for key, value in _numbers(settings).items():
        if any(word in key for word in SETTING_WORDS) and math.isclose(value, number, rel_tol=1e-4):
            return key
    return ""


def _numbers(settings: Mapping[str, object]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in settings.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _centred(x_RV: Tensor) -> Tensor:
    return x_RV - x_RV.mean(-1, keepdim=True)
