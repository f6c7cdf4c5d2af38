"""The arithmetic of tokens on the device, compared with what autograd makes of the definition of a loss in float64.

Shapes: N tokens, K components.
"""

from __future__ import annotations

import math

import pytest
import torch
from tests.backends.triton.device import DEVICE

triton = pytest.importorskip("triton", reason="the package triton is not installed")

import triton.language as tl  # noqa: E402 - it needs triton

from sigsoftmax.backends.triton.kernels import tokens  # noqa: E402

N, K = 32, 4
LARGEST = torch.finfo(torch.float32).max


@triton.jit
def plain_kernel(
    normalizer,
    at_target,
    offset,
    weight,
    scale,
    kept,
    out_6N,
    z_loss,
    unit,
    HAS_WEIGHT: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    N: tl.constexpr,
):
    token = tl.arange(0, N)
    n, s, o = tl.load(normalizer + token), tl.load(at_target + token), tl.load(offset + token)
    w, t = tl.load(weight + token), tl.load(scale + token)
    is_kept = tl.load(kept + token) != 0
    loss = unit * tokens.token_losses(n, s, o, w, z_loss, unit, HAS_WEIGHT, HAS_Z_LOSS)
    tl.store(out_6N + token, tokens.token_shares(loss, t, is_kept))
    counted = tokens.token_scales(is_kept, t)
    tl.store(out_6N + N + token, tokens.scaled(loss, counted))
    by_n = tokens.class_coefficients(counted, w, HAS_WEIGHT)
    tl.store(out_6N + 3 * N + token, -by_n)
    if HAS_Z_LOSS:
        by_n = tokens.with_z_slopes(by_n, tokens.z_slopes(counted, z_loss), n, o, unit)
    tl.store(out_6N + 2 * N + token, by_n)
    by_n, by_s = tokens.token_coefficients(n, o, t, is_kept, z_loss, unit, HAS_Z_LOSS)
    tl.store(out_6N + 4 * N + token, by_n)
    tl.store(out_6N + 5 * N + token, by_s)


def run_plain(n, s, o, weight, scale, kept, *, z_loss=0.0, has_weight=False, unit=8.0):
    """``s`` is what it is, and handed to the kernel in units; losses are what they are."""
    out_6N = torch.full((6, N), math.nan, device=DEVICE)
    values = [v.float().to(DEVICE) for v in (n, s / unit, o, weight, scale)]
    flags = {"HAS_WEIGHT": has_weight, "HAS_Z_LOSS": z_loss != 0, "N": N}
    plain_kernel[(1,)](*values, kept.int().to(DEVICE), out_6N, z_loss, unit, **flags)
    return out_6N.cpu().double()


def numbers(generator, *shape):
    """Numbers that float32 represents, in float64."""
    return torch.randn(*shape, generator=generator).double()


@pytest.mark.parametrize("z_loss", [0.0, 0.25])
@pytest.mark.parametrize("has_weight", [False, True], ids=["plain", "weighted"])
def test_losses_and_coefficients_are_those_of_autograd(has_weight: bool, z_loss: float) -> None:
    generator = torch.Generator().manual_seed(0)
    n, s = (numbers(generator, N).requires_grad_() for _ in range(2))
    o = 10.0 * numbers(generator, N)
    weight, scale = numbers(generator, N).abs(), numbers(generator, N).abs()
    weight[:5] = 0.0
    kept = torch.arange(N) % 7 != 3
    counted = torch.where(kept, scale, 0.0)
    losses = (weight if has_weight else 1.0) * (n - s) + z_loss * (n + o) ** 2
    total = (counted * losses).sum()
    by_n, by_s = torch.autograd.grad(total, (n, s))
    found = run_plain(n.detach(), s.detach(), o, weight, scale, kept, z_loss=z_loss, has_weight=has_weight)
    torch.testing.assert_close(found[:2], (counted * losses).detach().expand(2, N), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2:4], torch.stack([by_n, by_s]), rtol=1e-5, atol=1e-5)
    if not has_weight:
        torch.testing.assert_close(found[4:6], torch.stack([by_n, by_s]), rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_count_add_nothing_whatever_they_hold() -> None:
    nan, ones = torch.full((N,), math.nan), torch.ones(N)
    found = run_plain(nan, nan, nan, ones, ones, torch.zeros(N), z_loss=0.1)
    assert (found == 0).all()
    found = run_plain(nan, nan, nan, 0.0 * ones, ones, torch.ones(N), has_weight=True)
    assert (found[:4] == 0).all()


def test_the_mean_of_no_tokens_is_nan() -> None:
    values = torch.ones(N)
    found = run_plain(values, values, values, values, torch.full((N,), math.inf), torch.zeros(N))
    assert found[0].isnan().all()
    assert (found[2:] == 0).all()


def test_an_offset_that_overflowed_counts_as_the_largest_float() -> None:
    values = torch.ones(N)
    offset = torch.where(torch.arange(N) % 2 == 0, math.inf, -math.inf)
    found = run_plain(values, values, offset, values, 1e-30 * values, torch.ones(N), z_loss=1e-6)
    slope = torch.sign(offset) * (2e-6 * 1e-30 * LARGEST)
    torch.testing.assert_close(found[2], (1e-30 + slope).double(), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(found[4], (1e-30 + slope).double(), rtol=1e-5, atol=0.0)


def test_a_class_weight_brings_a_loss_back_that_overflowed() -> None:
    """The target is farther from the row's peak than the largest float."""
    zeros, ones = torch.zeros(N), torch.ones(N)
    far, weight = -1.75 * LARGEST * ones.double(), torch.linspace(0.01, 0.5, N)
    found = run_plain(zeros, far, zeros, weight, 0.5 * ones, ones, has_weight=True, unit=4.0)
    exact = 0.875 * LARGEST * weight.double()
    torch.testing.assert_close(found[0] / LARGEST, exact / LARGEST, rtol=1e-5, atol=0.0)


def test_the_coefficient_of_a_z_loss_times_a_slope_of_phi_is_finite() -> None:
    ones = torch.ones(N)
    found = run_plain(ones, ones, 3e38 * ones, ones, ones, ones, z_loss=100.0, unit=64.0)
    torch.testing.assert_close(found[[2, 4]], (LARGEST / 64.0 * ones.double()).expand(2, N), rtol=1e-6, atol=0.0)


@triton.jit
def counting_kernel(counted, kept, out_2N, N: tl.constexpr):
    token = tl.arange(0, N)
    tl.store(out_2N + token, tokens.mean_scale(tl.load(counted + token)))
    tl.store(out_2N + N + token, tokens.empty_mean(tl.load(kept + token)))


def test_what_a_mean_divides_by() -> None:
    counted, kept = torch.arange(N, device=DEVICE) / 4.0, torch.arange(N, dtype=torch.int32, device=DEVICE)
    out_2N = torch.full((2, N), math.nan, device=DEVICE)
    counting_kernel[(1,)](counted, kept, out_2N, N=N)
    torch.testing.assert_close(out_2N[0], 1.0 / counted, rtol=1e-6, atol=0.0)
    assert out_2N[1].isnan().tolist() == [True] + [False] * (N - 1)
    assert (out_2N[1, 1:] == 0).all()


@triton.jit
def smoothing_kernel(at_target, mean, by_target, out_3N, label_smoothing, classes, N: tl.constexpr):
    token = tl.arange(0, N)
    smoothed = tokens.smoothed_targets(tl.load(at_target + token), tl.load(mean + token), label_smoothing)
    by_s, by_class = tokens.smoothing_coefficients(tl.load(by_target + token), label_smoothing, classes)
    tl.store(out_3N + token, smoothed)
    tl.store(out_3N + N + token, by_s)
    tl.store(out_3N + 2 * N + token, by_class)


def test_label_smoothing_is_that_of_torch() -> None:
    classes, label_smoothing = 10, 0.1
    generator = torch.Generator().manual_seed(1)
    phi_NV = numbers(generator, N, classes).requires_grad_()
    target = torch.randint(classes, (N,), generator=generator)
    total = torch.nn.functional.cross_entropy(phi_NV, target, reduction="sum", label_smoothing=label_smoothing)
    (gradient_NV,) = torch.autograd.grad(total, phi_NV)
    at_target = phi_NV.detach().gather(1, target[:, None])[:, 0]
    values = [v.float().to(DEVICE) for v in (at_target, phi_NV.detach().mean(1), -torch.ones(N))]
    out_3N = torch.full((3, N), math.nan, device=DEVICE)
    smoothing_kernel[(1,)](*values, out_3N, label_smoothing, classes, N=N)
    smoothed, by_s, by_class = out_3N.cpu().double()
    torch.testing.assert_close((torch.logsumexp(phi_NV, 1) - smoothed).sum(), total, rtol=1e-5, atol=1e-5)
    expected_NV = torch.softmax(phi_NV, 1) + by_class[:, None] + by_s[:, None] * torch.eye(classes)[target]
    torch.testing.assert_close(gradient_NV, expected_NV, rtol=1e-5, atol=1e-6)


@triton.jit
def mixture_kernel(
    normalizer,
    at_target,
    offset,
    log_prior,
    weight,
    scale,
    losses,
    by_2NK,
    K,
    floor,
    z_loss,
    unit,
    HAS_FLOOR: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    N: tl.constexpr,
    LANES: tl.constexpr,
):
    token = tl.arange(0, N)
    component = tl.arange(0, LANES)[None, :]
    position = token[:, None] * K + component
    inside = (token[:, None] >= 0) & (component < K)
    n = tl.load(normalizer + position, mask=inside, other=0.0)
    o = tl.load(offset + position, mask=inside, other=0.0)
    prior = tl.load(log_prior + position, mask=inside, other=-float("inf"))
    gap = tl.load(at_target + position, mask=inside, other=0.0)
    w, t = tl.load(weight + token), tl.load(scale + token)[:, None]
    log_p, responsibility = tokens.mixture_responsibilities(prior, n, gap, inside, floor, unit, HAS_FLOOR)
    loss = tokens.mixture_losses(log_p, n, o, prior, inside, w, z_loss, unit, HAS_WEIGHT, HAS_Z_LOSS)
    tl.store(losses + token, tokens.mixture_unit(unit) * loss)
    by_n, by_s = tokens.mixture_coefficients(
        responsibility, n, o, prior, w[:, None], t, z_loss, unit, HAS_WEIGHT, HAS_Z_LOSS
    )
    tl.store(by_2NK + position, by_n, mask=inside)
    tl.store(by_2NK + N * K + position, by_s, mask=inside)


def run_mixture(n, s, o, log_prior, weight, scale, *, floor=0.0, z_loss=0.0, has_weight=False, unit=8.0):
    components = n.shape[1]
    losses = torch.full((N,), math.nan, device=DEVICE)
    by_2NK = torch.full((2, N, components), math.nan, device=DEVICE)
    values = [v.detach().float().to(DEVICE).contiguous() for v in (n, s / unit, o, log_prior, weight, scale)]
    flags = {"HAS_FLOOR": floor != 0, "HAS_WEIGHT": has_weight, "HAS_Z_LOSS": z_loss != 0}
    lanes = triton.next_power_of_2(components)
    mixture_kernel[(1,)](*values, losses, by_2NK, components, floor, z_loss, unit, **flags, N=N, LANES=lanes)
    return losses.cpu().double(), by_2NK.cpu().double()


@pytest.mark.parametrize("components", [K, 3], ids=["all lanes", "some lanes"])
@pytest.mark.parametrize("floor", [0.0, 0.05])
@pytest.mark.parametrize("z_loss", [0.0, 0.25])
@pytest.mark.parametrize("has_weight", [False, True], ids=["plain", "weighted"])
def test_mixtures_are_those_of_autograd(has_weight: bool, z_loss: float, floor: float, components: int) -> None:
    generator = torch.Generator().manual_seed(2)
    n, s = (numbers(generator, N, components).requires_grad_() for _ in range(2))
    o = 3.0 * numbers(generator, N, components)
    log_prior = torch.log_softmax(numbers(generator, N, components), 1).float().double().requires_grad_()
    weight, scale = numbers(generator, N).abs(), numbers(generator, N).abs()
    scale[:3] = 0.0
    p = torch.exp(log_prior + s - n).sum(1)
    squares = (log_prior.detach().exp() * (n + o) ** 2).sum(1)
    expected = (weight if has_weight else 1.0) * -torch.log(p + floor) + z_loss * squares
    by_n, by_s, by_prior = torch.autograd.grad((scale * expected).sum(), (n, s, log_prior))
    options = {"floor": floor, "z_loss": z_loss, "has_weight": has_weight}
    losses, by_2NK = run_mixture(n, s, o, log_prior, weight, scale, **options)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(by_2NK, torch.stack([by_n, by_s]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(by_2NK[1], by_prior, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("floor", [0.0, 0.05])
def test_no_component_answers_for_a_target_that_all_of_them_mask(floor: float) -> None:
    zeros, ones = torch.zeros(N, K), torch.ones(N)
    masked = torch.full((N, K), -math.inf)
    losses, by_2NK = run_mixture(zeros, masked, zeros, zeros - math.log(K), ones, ones, floor=floor)
    assert (by_2NK == 0).all()
    torch.testing.assert_close(losses, torch.full((N,), -math.log(floor) if floor else math.inf).double())
