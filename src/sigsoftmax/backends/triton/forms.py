"""The forms of ``family`` for the device: one entry here for each formula there, and tests that hold them together.

A form takes up to three arguments; those it does not have are ignored. ``centre`` is the mean of c.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

LOGISTIC = tl.constexpr(0)
RELU = tl.constexpr(1)
SOFTCAP = tl.constexpr(2)
CODES = {"logistic": 0, "relu": 1, "softcap": 2}

IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def reciprocal(x):
    """1 / x by the hardware's approximation (one unit in the last place), much cheaper than a full division."""
    if IS_INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Small arguments by their series: 1 - 2 / (e^2x + 1) has no digits there."""
    square = x * x
    series = x * (
        1.0
        + square
        * (-0.3333333333333333 + square * (0.13333333333333333 + square * (-0.05396825396825397 + square * 0.02186949)))
    )
    magnitude = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(square < 0.04, series, tl.where(x < 0, -magnitude, magnitude))


@triton.jit
def relative(z, anchor, alpha, beta, c, centre, FORM: tl.constexpr):
    """phi(z) less the offset of a row whose largest logit is the anchor."""
    if FORM == LOGISTIC:
        x = z - c
        left = x < 0
        tail = -tl.log(1.0 + tl.exp(-tl.abs(x)))
        half_gap = 0.5 * z - 0.5 * anchor
        right_line = 2.0 * alpha * half_gap
        slope_left = alpha + beta
        bent = tl.where(left, slope_left * x - alpha * (anchor - c), right_line)
        straight = tl.where(
            left, 2.0 * slope_left * half_gap + beta * (centre - c), right_line - beta * (anchor - centre)
        )
        return tl.where(anchor > centre, bent, straight) + beta * tail
    elif FORM == RELU:
        return tl.log(tl.maximum(z, 0.0) + alpha) - tl.log(tl.maximum(anchor, 0.0) + alpha)
    else:
        return alpha * tanh((z - anchor) / alpha) * (1.0 - tanh(z / alpha) * tanh(anchor / alpha))


@triton.jit
def offset(anchor, alpha, beta, c, centre, FORM: tl.constexpr):
    if FORM == LOGISTIC:
        return alpha * anchor + beta * tl.minimum(anchor - centre, 0.0)
    elif FORM == RELU:
        return tl.log(tl.maximum(anchor, 0.0) + alpha)
    else:
        return alpha * tanh(anchor / alpha)


@triton.jit
def slope(z, alpha, beta, c, FORM: tl.constexpr):
    if FORM == LOGISTIC:
        x = z - c
        beyond = beta * sigmoid(-tl.abs(x))
        return tl.where(x < 0, (alpha + beta) - beyond, alpha + beyond)
    elif FORM == RELU:
        return tl.where(z > 0, 1.0 / (tl.maximum(z, 0.0) + alpha), 0.0)
    else:
        return 4.0 * sigmoid(2.0 * (z / alpha)) * sigmoid(-2.0 * (z / alpha))
