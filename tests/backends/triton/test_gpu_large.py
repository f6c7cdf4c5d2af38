"""Chunks of logits of more than 2^31 elements, on a GPU: indices that would not fit 32 bits.

Shapes: N tokens, V classes, d width.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.tables import frobenius_error
from torch import Tensor

import sigsoftmax
from sigsoftmax import OutputFunction

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

DEVICE = torch.device("cuda")
D = 64
LARGE_ROWS, LARGE_CLASSES = 17_000, 128_256
assert LARGE_ROWS * LARGE_CLASSES > 2**31


@pytest.fixture
def large_chunk() -> Iterator[Tensor]:
    free, _ = torch.cuda.mem_get_info()
    if free < 20 * 2**30:
        pytest.skip("needs 20 GiB of memory")
    chunk = torch.empty(LARGE_ROWS, LARGE_CLASSES, dtype=torch.bfloat16, device=DEVICE)
    chunk.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    yield chunk
    del chunk
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", ["softmax", "sigsoftmax", "gss(k=0.2)"])
def test_rows_beyond_two_to_the_31(name: str, large_chunk: Tensor) -> None:
    from sigsoftmax.backends.chunked.form_rows import FormRows
    from sigsoftmax.backends.triton.logits_kernels import LogitsKernels
    from sigsoftmax.contract.rows import RowCoefficients, RowTargets

    function = OutputFunction.parse(name)
    edge = 2**31 // LARGE_CLASSES
    some = torch.tensor([0, 1, edge - 1, edge, edge + 1, LARGE_ROWS - 1])
    kept = large_chunk[some.to(DEVICE)].cpu().double()
    index = torch.arange(LARGE_ROWS, device=DEVICE) * 7 % LARGE_CLASSES
    index[-1] = LARGE_CLASSES - 1
    ones = torch.ones(LARGE_ROWS, device=DEVICE)
    routines = LogitsKernels(function.form, function.arguments(), large_chunk)
    by = RowCoefficients(ones, -ones, None, None)
    stats = routines.stats_and_gradient(large_chunk, RowTargets(index), by, None, large_chunk)

    exact = FormRows(function.form, function.arguments(), kept)
    targets = RowTargets(index.cpu()[some])
    expected = exact.stats(kept, targets)
    by_kept = torch.empty_like(kept)
    one = torch.ones(len(some), dtype=torch.float64)
    exact.gradient(kept, targets, expected, RowCoefficients(one, -one, None, None), by_kept)
    assert expected.target is not None
    assert stats.target is not None
    losses = (stats.normalizer - routines.unit * stats.target).cpu().double()[some]
    expected_losses = expected.normalizer - exact.unit * expected.target
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    found = large_chunk[some.to(DEVICE)].cpu().double()
    # One rounding to bfloat16.
    torch.testing.assert_close(found, by_kept, rtol=2.0**-8, atol=1e-12)


def test_sums_over_rows_beyond_two_to_the_31(large_chunk: Tensor) -> None:
    """A shift of each class: the sum over all rows is the sum over two halves."""
    from sigsoftmax.backends.triton.logits_kernels import LogitsKernels
    from sigsoftmax.contract.rows import RowCoefficients, RowTargets

    c = torch.linspace(-1.0, 1.0, LARGE_CLASSES, device=DEVICE)
    function = OutputFunction("gss", k=torch.tensor(0.5, device=DEVICE), c=c)
    out = torch.empty_like(large_chunk)

    def by_arguments(*spans: slice) -> list[Tensor]:
        routines = LogitsKernels(function.form, function.arguments(LARGE_CLASSES), large_chunk, needs_arguments=True)
        for span in spans:
            logits = large_chunk[span]
            index = torch.arange(LARGE_ROWS, device=DEVICE)[span]
            ones = torch.ones(len(logits), device=DEVICE)
            by = RowCoefficients(ones, -ones, None, None)
            routines.stats_and_gradient(logits, RowTargets(index), by, None, out[span])
        return routines.argument_gradients()

    half = LARGE_ROWS // 2
    whole, halves = by_arguments(slice(None)), by_arguments(slice(half), slice(half, None))
    for a, b in zip(whole, halves, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", ["fast", "exact"])
def test_a_loss_with_a_chunk_beyond_two_to_the_31(way: str) -> None:
    """Small chunks give the same gradients but for the rounding of sums."""
    free, _ = torch.cuda.mem_get_info()
    if free < 20 * 2**30:
        pytest.skip("needs 20 GiB of memory")
    # Two chunks: a single one would not tile the vocabulary.
    tokens = 2 * LARGE_ROWS
    hidden = torch.randn(tokens, D, device=DEVICE).bfloat16().requires_grad_()
    weight = (torch.randn(LARGE_CLASSES, D, device=DEVICE) / D**0.5).bfloat16().requires_grad_()
    y = torch.randint(LARGE_CLASSES, (tokens,), device=DEVICE)

    def gradients(weight_gradient: str, chunk_bytes: int) -> tuple[Tensor, ...]:
        loss = sigsoftmax.linear_cross_entropy(
            hidden, weight, y, function="sigsoftmax", weight_gradient=weight_gradient, chunk_bytes=chunk_bytes
        )
        return loss.detach(), *torch.autograd.grad(loss, [hidden, weight])

    whole, parts = gradients(way, 5 * 2**30), gradients("exact", 2**29)
    torch.testing.assert_close(whole[0], parts[0], rtol=1e-5, atol=0.0)
    for a, b in zip(whole[1:], parts[1:], strict=True):
        assert frobenius_error(a, b.double()) <= 2.0**-8 * float(b.double().norm())
    torch.cuda.empty_cache()


def test_scaling_beyond_two_to_the_31(large_chunk: Tensor) -> None:
    from sigsoftmax.backends.triton.scaling import Scaling

    last = large_chunk[-1].clone()
    scale = Scaling([large_chunk.numel()], large_chunk.device)
    scale([large_chunk], torch.tensor(0.5, device=DEVICE))
    assert torch.equal(large_chunk[-1], 0.5 * last)
    scale([large_chunk], torch.tensor(1.0, device=DEVICE))
    assert torch.equal(large_chunk[-1], 0.5 * last)
