"""Operations of the GPU that Triton's language has no words for, and what stands for them in Triton's interpreter.

The interpreter runs kernels on a CPU by numpy: it knows no inline assembly, rounds after every operation, and has no
clock. This is the only file of kernels that asks whether it runs. Each function here computes the same quantity in
both places, and says how far the GPU may be from it; all formulas around them are the ones that run on a GPU.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def reciprocal(x):
    """1 / x in float32.

    On a GPU it is the hardware's approximation, off by one unit in the last place at most and much cheaper than a
    division; subnormal numbers count as 0 there, so that 1 / x is infinite for such an x. The stand-in divides.
    """
    if IS_INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def log2(x):
    """log2(x) in float32.

    On a GPU it is the hardware's approximation, off by 2^-22 at most between 1/2 and 2 and by two units in the last
    place elsewhere; subnormal numbers count as 0 there. The stand-in is the logarithm of the interpreter.
    """
    if IS_INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def fma(x, y, z):
    """x y + z in float32, rounded once.

    On a GPU it is one operation. The stand-in computes in float64, where the product of two float32 is exact, and
    rounds the sum to float32: it is the same but for sums that float64 rounds to the middle of two float32.
    """
    if IS_INTERPRETED:
        return (x.to(tl.float64) * y + z).to(tl.float32)
    else:
        return tl.fma(x, y, z)


@triton.jit
def widened(x):
    """The same numbers in float32.

    On a GPU two bfloat16 of one register take one operation each, where the compiler would use three. The stand-in,
    and all other dtypes, convert as the language does. Both are exact.
    """
    if IS_INTERPRETED or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )


@triton.jit
def wait(cycles):
    """Let so many clock cycles of the multiprocessor pass, and compute nothing.

    The stand-in returns at once: in the interpreter programs run one after the other.
    """
    if not IS_INTERPRETED:
        tl.inline_asm_elementwise(
            """
            {
            .reg .u64 begin, now, wanted;
            .reg .pred is_early;
            cvt.u64.u32 wanted, $1;
            mov.u64 begin, %clock64;
            again:
            mov.u64 now, %clock64;
            sub.u64 now, now, begin;
            setp.lt.u64 is_early, now, wanted;
            @is_early bra again;
            mov.u32 $0, 0;
            }
            """,
            "=r,r",
            [cycles],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
