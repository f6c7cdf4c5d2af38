"""Which output function a model applies after its output layer, checked by comparing what goes in with what comes out.

Softcap and scaling sit in each model's own forward pass, under names that differ and with signs that differ (one
`logits_scaling` divides, another multiplies). So a configuration gives names to what was found, and the model's output
decides.

Shapes: R rows of logits, V words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from sigsoftmax.family import OutputFunction, names

__all__ = ["Adjustment", "Detected", "declared_by", "detect"]

SOFTCAP_KEYS = ("final_logit_softcapping", "final_logits_softcapping", "logits_soft_cap", "logit_softcapping")
SETTING_WORDS = ("logit", "lm_head", "multiplier", "scaling")
"""A setting whose name holds one of these may concern the logits."""
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 3e-2


class Adjustment(NamedTuple):
    """What a probe of the model showed: its logits are ``cap tanh(scale z / cap)``."""

    scale: float = 1.0
    cap: float | None = None


class Detected(NamedTuple):
    function: OutputFunction
    scale: float
    """logits are multiplied by it before the function"""
    explanation: str
    error: float
    """of the model's output, relative to the spread of its logits"""


def detect(
    raw_RV: Tensor,
    output_RV: Tensor,
    settings: Mapping[str, object],
    *,
    probed: Adjustment | None = None,
    stated: OutputFunction | None = None,
    reason: str = "stated",
) -> Detected:
    """The member and the scale with which ``output_RV`` is phi(scale * raw), up to a number per row.

    ``raw_RV`` are the products h W^T + b, ``output_RV`` the logits that the model returns, ``settings`` the model's
    configuration. A function that is ``stated`` is taken, at the scale that was probed, and its error told. ValueError
    if nothing fits.
    """
    tolerance = TOLERANCES.get(output_RV.dtype, LOW_PRECISION_TOLERANCE)
    raw, output = raw_RV.to(torch.float64), output_RV.to(torch.float64)
    spread = float(_centred(output).norm())

    def candidate(function: OutputFunction, scale: float, explanation: str) -> Detected:
        difference = float((_centred(function.phi(scale * raw)) - _centred(output)).norm())
        return Detected(function, scale, explanation, difference / spread if spread > 0.0 else difference)

    probed = probed or Adjustment()
    if stated is not None:
        found = candidate(stated, probed.scale, reason)
        agrees = "which agrees" if found.error <= tolerance else f"which differs by {found.error:.2g}"
        return found._replace(explanation=f"{found.explanation}; compared with the model's output, {agrees}")
    scaled = _scale_in_words(probed.scale, settings)
    if probed.cap is None:
        likeliest = candidate(OutputFunction("softmax"), probed.scale, f"no other function is applied{scaled}")
    else:
        key = _setting_of(probed.cap, settings)
        capped = f"`{key}` = {probed.cap:g} of its configuration" if key else f"logits are capped at {probed.cap:g}"
        likeliest = candidate(OutputFunction("softcap", c=probed.cap), probed.scale, f"{capped}{scaled}")
    others = [candidate(OutputFunction(name), probed.scale, "found among the family") for name in names()]
    measured = _ratio(_centred(raw), _centred(output))
    if measured > 0.0:
        others.append(candidate(OutputFunction("softmax"), measured, f"measured{_scale_in_words(measured, settings)}"))
    best = likeliest
    if likeliest.error > tolerance:
        best = min([likeliest, *others], key=lambda one: one.error)
    if not best.error <= tolerance:
        raise ValueError(
            "the logits that this model returns are no known function of its output layer's (nearest: "
            f"{best.function}, off by {best.error:.2g} of their spread). State it with --function, or store the "
            "model's log-probabilities as a .npy file and audit that"
        )
    return best._replace(explanation=f"{best.explanation}; its output agrees within {best.error:.0e}")


def declared_by(settings: Mapping[str, object]) -> tuple[OutputFunction, str]:
    """What a configuration says about the function, for when the model is not run."""
    for key in SOFTCAP_KEYS:
        cap = settings.get(key)
        if isinstance(cap, int | float) and not isinstance(cap, bool) and cap > 0.0:
            told = f"`{key}` = {cap:g} of its configuration; not checked against its output"
            return OutputFunction("softcap", c=float(cap)), told
    return OutputFunction("softmax"), "its configuration names no other; not checked against its output"


def _scale_in_words(scale: float, settings: Mapping[str, object]) -> str:
    if math.isclose(scale, 1.0, rel_tol=1e-6):
        return ""
    for number, verb in ((scale, "multiplied"), (1.0 / scale, "divided")):
        key = _setting_of(number, settings)
        if key:
            return f", logits are {verb} by `{key}` = {number:g}"
    return f", logits are multiplied by {scale:.6g}"


def _setting_of(number: float, settings: Mapping[str, object]) -> str:
    """The name of a setting that may concern the logits and has this value; empty if there is none."""
    for key, value in settings.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if any(word in key for word in SETTING_WORDS) and math.isclose(value, number, rel_tol=1e-4):
            return key
    return ""


def _centred(x_RV: Tensor) -> Tensor:
    return x_RV - x_RV.mean(-1, keepdim=True)


def _ratio(x: Tensor, y: Tensor) -> float:
    """The factor that takes x nearest to y."""
    square = float((x * x).sum())
    return float((x * y).sum()) / square if square > 0.0 else 1.0
