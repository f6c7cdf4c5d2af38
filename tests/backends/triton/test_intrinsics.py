"""The operations of the GPU that the language lacks, compared with mathematics: on a GPU the operations themselves,
and in the interpreter what stands for them there.
"""

from __future__ import annotations

import math

import pytest
import torch
from tests.backends.triton.device import DEVICE, IS_INTERPRETED

triton = pytest.importorskip("triton", reason="the package triton is not installed")

import triton.language as tl  # noqa: E402 - it needs triton

from sigsoftmax.backends.triton.kernels import intrinsics  # noqa: E402

SIZE = 4096
UNIT = 2.0**-23
"""unit in the last place of a float32, relative to it at most"""


@triton.jit
def unary_kernel(values, reciprocals, logarithms, widened, SIZE: tl.constexpr):
    position = tl.arange(0, SIZE)
    x = tl.load(values + position)
    tl.store(reciprocals + position, intrinsics.reciprocal(x))
    tl.store(logarithms + position, intrinsics.log2(x))
    tl.store(widened + position, intrinsics.widened(x))


@pytest.fixture(scope="module")
def found() -> dict[str, torch.Tensor]:
    """Numbers of all magnitudes, among them 2^k, and what was computed of them, in float64."""
    generator = torch.Generator().manual_seed(0)
    values = torch.exp2(torch.rand(SIZE, generator=generator) * 200.0 - 100.0)
    values[:201] = torch.exp2(torch.arange(-100.0, 101.0))
    values[1024:2048] = 1.0 + torch.rand(1024, generator=generator)
    results = [torch.full((SIZE,), math.nan, device=DEVICE) for _ in range(3)]
    unary_kernel[(1,)](values.to(DEVICE), *results, SIZE=SIZE)
    names = ("reciprocal", "log2", "widened")
    return {"x": values.double(), **{n: r.cpu().double() for n, r in zip(names, results, strict=True)}}


def test_reciprocals(found: dict[str, torch.Tensor]) -> None:
    expected = 1.0 / found["x"]
    tolerance = 0.5 * UNIT if IS_INTERPRETED else UNIT
    assert ((found["reciprocal"] - expected).abs() <= tolerance * expected).all()


def test_logarithms(found: dict[str, torch.Tensor]) -> None:
    expected = torch.log2(found["x"])
    error = (found["log2"] - expected).abs()
    is_near_1 = (found["x"] > 0.5) & (found["x"] < 2.0)
    # Near 1 the hardware's has few digits, and the interpreter's as many as elsewhere.
    bound = 2.0 * UNIT * expected.abs()
    assert (error <= (bound if IS_INTERPRETED else torch.where(is_near_1, 2.0**-22, bound))).all()


def test_a_masked_logit_and_a_zero() -> None:
    values = torch.full((SIZE,), -math.inf)
    values[1::4], values[2::4], values[3::4] = 0.0, 1.0, math.inf
    results = [torch.full((SIZE,), math.nan, device=DEVICE) for _ in range(3)]
    unary_kernel[(1,)](values.to(DEVICE), *results, SIZE=SIZE)
    reciprocals, logarithms, widened = (result.cpu() for result in results)
    assert torch.equal(widened, values)
    assert torch.equal(reciprocals[:4].abs(), torch.tensor([0.0, math.inf, 1.0, 0.0]))
    assert torch.equal(logarithms[1:4], torch.tensor([-math.inf, 0.0, math.inf]))


@triton.jit
def widen_kernel(values, widened, SIZE: tl.constexpr):
    position = tl.arange(0, SIZE)
    tl.store(widened + position, intrinsics.widened(tl.load(values + position)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_wider_numbers_are_the_same(dtype: torch.dtype) -> None:
    values = torch.randn(SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    values[:3] = torch.tensor([-math.inf, -0.0, torch.finfo(dtype).max], dtype=dtype)
    widened = torch.full((SIZE,), math.nan, device=DEVICE)
    widen_kernel[(1,)](values.to(DEVICE), widened, SIZE=SIZE)
    assert torch.equal(widened.cpu(), values.float())


@triton.jit
def fma_kernel(x, y, z, out, SIZE: tl.constexpr):
    position = tl.arange(0, SIZE)
    product = intrinsics.fma(tl.load(x + position), tl.load(y + position), tl.load(z + position))
    tl.store(out + position, product)


def fused(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    out = torch.full((SIZE,), math.nan, device=DEVICE)
    fma_kernel[(1,)](x.to(DEVICE), y.to(DEVICE), z.to(DEVICE), out, SIZE=SIZE)
    return out.cpu()


def test_products_and_sums_are_rounded_once() -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(SIZE, generator=generator) for _ in range(2))
    rounded = x * y
    exact = x.double() * y.double()
    # What rounding has taken from the product, which has no digits if the product is rounded before the sum.
    residual = fused(x, y, -rounded)
    assert torch.equal(residual.double(), exact - rounded.double())
    assert (residual != 0).float().mean() > 0.9
    z = torch.randn(SIZE, generator=generator)
    assert torch.equal(fused(x, y, z), (exact + z.double()).float())


def test_masks_stay_masks_in_a_sum() -> None:
    x = torch.full((SIZE,), -math.inf)
    assert torch.equal(fused(x, torch.ones(SIZE), torch.full((SIZE,), 1e38)), x)


@triton.jit
def wait_kernel(out, cycles):
    intrinsics.wait(cycles)
    tl.store(out, 1)


def test_waiting_ends() -> None:
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    wait_kernel[(1,)](out, 1000)
    assert out.item() == 1
