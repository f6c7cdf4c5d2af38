"""What only a GPU can show: large slabs, captured graphs, compiled functions, no waiting for the device.

Shapes: N tokens, K components, V classes, d features.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.tables import frobenius_error
from torch import Tensor
from torch.nn import functional as F

import sigsoftmax
from sigsoftmax import OutputFunction

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

DEVICE = torch.device("cuda")
N, K, V, D = 96, 3, 1_003, 64
CHUNK_BYTES = 32 * V * 2
"""A third of the tokens."""


# Slabs of more than 2^31 elements

LARGE_ROWS, LARGE_CLASSES = 17_000, 128_256
assert LARGE_ROWS * LARGE_CLASSES > 2**31


@pytest.fixture
def large_slab() -> Iterator[Tensor]:
    free, _ = torch.cuda.mem_get_info()
    if free < 20 * 2**30:
        pytest.skip("needs 20 GiB of memory")
    slab = torch.empty(LARGE_ROWS, LARGE_CLASSES, dtype=torch.bfloat16, device=DEVICE)
    slab.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    yield slab
    del slab
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", ["softmax", "sigsoftmax", "gss(k=0.2)"])
def test_rows_beyond_two_to_the_31(name: str, large_slab: Tensor) -> None:
    from sigsoftmax.backends.blocked.any_form import FormRows
    from sigsoftmax.backends.interface import RowCoefficients
    from sigsoftmax.backends.triton.rows import TritonRows

    function = OutputFunction.parse(name)
    edge = 2**31 // LARGE_CLASSES
    some = torch.tensor([0, 1, edge - 1, edge, edge + 1, LARGE_ROWS - 1])
    kept = large_slab[some.to(DEVICE)].cpu().double()
    index = torch.arange(LARGE_ROWS, device=DEVICE) * 7 % LARGE_CLASSES
    index[-1] = LARGE_CLASSES - 1
    ones = torch.ones(LARGE_ROWS, device=DEVICE)
    routines = TritonRows(function.form, function.arguments(), large_slab)
    by = RowCoefficients(ones, -ones, None, None)
    stats = routines.stats_and_gradient(large_slab, by, None, index, None, large_slab, False, False)

    exact = FormRows(function.form, function.arguments(), kept)
    targets = index.cpu()[some]
    expected = exact.stats(kept, targets, None, False, False)
    by_kept = torch.empty_like(kept)
    one = torch.ones(len(some), dtype=torch.float64)
    exact.gradient(kept, expected, RowCoefficients(one, -one, None, None), targets, None, by_kept)
    assert expected.target is not None
    assert stats.target is not None
    losses = (stats.normalizer - stats.target).cpu().double()[some]
    torch.testing.assert_close(losses, expected.normalizer - expected.target, rtol=1e-5, atol=1e-5)
    found = large_slab[some.to(DEVICE)].cpu().double()
    # One rounding to bfloat16.
    torch.testing.assert_close(found, by_kept, rtol=2.0**-8, atol=1e-12)


def test_sums_over_rows_beyond_two_to_the_31(large_slab: Tensor) -> None:
    """A shift of each class: the sum over all rows is the sum over two halves."""
    from sigsoftmax.backends.interface import RowCoefficients
    from sigsoftmax.backends.triton.rows import TritonRows

    c = torch.linspace(-1.0, 1.0, LARGE_CLASSES, device=DEVICE)
    function = OutputFunction("gss", k=torch.tensor(0.5, device=DEVICE), c=c)
    out = torch.empty_like(large_slab)

    def by_arguments(*spans: slice) -> list[Tensor]:
        routines = TritonRows(function.form, function.arguments(LARGE_CLASSES), large_slab, needs_arguments=True)
        for span in spans:
            logits = large_slab[span]
            index = torch.arange(LARGE_ROWS, device=DEVICE)[span]
            ones = torch.ones(len(logits), device=DEVICE)
            by = RowCoefficients(ones, -ones, None, None)
            routines.stats_and_gradient(logits, by, None, index, None, out[span], False, False)
        return routines.argument_gradients()

    half = LARGE_ROWS // 2
    whole, halves = by_arguments(slice(None)), by_arguments(slice(half), slice(half, None))
    for a, b in zip(whole, halves, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_scaling_beyond_two_to_the_31(large_slab: Tensor) -> None:
    from sigsoftmax.backends.triton.scaling import scale_in_place

    last = large_slab[-1].clone()
    scale_in_place(large_slab, torch.tensor(0.5, device=DEVICE))
    assert torch.equal(large_slab[-1], 0.5 * last)
    scale_in_place(large_slab, torch.tensor(1.0, device=DEVICE))
    assert torch.equal(large_slab[-1], 0.5 * last)


# Whole losses


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


def target(count: int = N) -> Tensor:
    y = torch.randint(V, (count,), device=DEVICE)
    y[::5] = -100
    return y


class Call:
    """A loss with its inputs on the device; ``gradients`` runs it forward and backward."""

    def __init__(self, loss: Callable[..., Tensor], inputs: list[Tensor]) -> None:
        self.loss, self.inputs = loss, inputs

    def gradients(self) -> tuple[Tensor, ...]:
        value = self.loss(*self.inputs)
        return value.detach(), *torch.autograd.grad(value.sum(), self.inputs)


def plain_logits(function: str | OutputFunction = "sigsoftmax", **options: Any) -> Call:
    y = target()
    return Call(lambda z: sigsoftmax.cross_entropy(z, y, function=function, **options), [leaf(N, V)])


def product(function: str | OutputFunction = "sigsoftmax", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Call:
    y = target()
    inputs = [leaf(N, D), leaf(V, D, dtype=dtype), leaf(V, dtype=dtype)]

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return sigsoftmax.linear_cross_entropy(
            hidden, weight, y, function=function, linear_bias=bias, chunk_bytes=CHUNK_BYTES, **options
        )

    return Call(loss, inputs)


def mixture(**options: Any) -> Call:
    y = target()
    inputs = [leaf(N, K, D), leaf(N, K), leaf(V, D)]

    def loss(hidden: Tensor, prior: Tensor, weight: Tensor) -> Tensor:
        return sigsoftmax.mixture_cross_entropy(
            hidden, prior, weight, y, function="sigsoftmax", chunk_bytes=K * CHUNK_BYTES, **options
        )

    return Call(loss, inputs)


def learned() -> Call:
    y = target()
    inputs = [leaf(N, D), leaf(V, D), leaf(dtype=torch.float32), leaf(V, dtype=torch.float32)]

    def loss(hidden: Tensor, weight: Tensor, k: Tensor, c: Tensor) -> Tensor:
        function = OutputFunction("gss", k=k, c=c)
        return sigsoftmax.linear_cross_entropy(hidden, weight, y, function=function, chunk_bytes=CHUNK_BYTES)

    return Call(loss, inputs)


CALLS: dict[str, Callable[[], Call]] = {
    "logits": plain_logits,
    "logits, softmax": lambda: plain_logits("softmax"),
    "logits, smoothing": lambda: plain_logits(label_smoothing=0.1, z_loss=0.01),
    "logits, none": lambda: plain_logits(reduction="none"),
    "fast": lambda: product(weight_gradient="fast"),
    "buffered": lambda: product(weight_gradient="buffered"),
    "exact": lambda: product(weight_gradient="exact"),
    "exact, z-loss": lambda: product(weight_gradient="exact", z_loss=0.01),
    "float32 weight": lambda: product(dtype=torch.float32),
    "none": lambda: product(reduction="none"),
    "mixture": mixture,
    "mixture, smoothing": lambda: mixture(label_smoothing=0.1),
    "learned": learned,
}
every_call = pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)


def assert_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert not e.isnan().any(), f"result {i}"
        assert torch.equal(a, e), f"result {i}"


@every_call
def test_the_default_is_these_kernels_and_gives_the_same_bits_twice(make: Callable[[], Call]) -> None:
    call = make()
    first = call.gradients()
    decision = sigsoftmax.explain()
    assert decision is not None
    assert decision.backend == "triton"
    assert_equal(call.gradients(), first)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@every_call
def test_nothing_waits_for_the_device(make: Callable[[], Call]) -> None:
    call = make()
    call.gradients()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.gradients()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_call
def test_a_captured_graph_gives_the_eager_result(make: Callable[[], Call]) -> None:
    call = make()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call.gradients()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call.gradients()
    for _ in range(2):
        with torch.no_grad():
            for tensor in call.inputs:
                tensor.normal_()
        graph.replay()
        assert_equal(captured, call.gradients())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["logits", "exact", "float32 weight", "none", "mixture", "learned"])
def test_compiled_functions_give_the_eager_result(name: str) -> None:
    """The loss is one op; what stands around it is torch's, whose fused sums may round otherwise."""
    call = CALLS[name]()
    expected = call.gradients()
    torch.compiler.reset()
    actual = Call(torch.compile(call.loss, fullgraph=True), call.inputs).gradients()
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        tolerance = 2.0 * torch.finfo(e.dtype).eps
        assert frobenius_error(a.cpu(), e.cpu().double()) <= tolerance * float(e.double().norm()), f"result {i}"


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("deviation", [1.0, 3.0])
def test_accumulated_gradients_are_as_good_as_torchs(weight_dtype: torch.dtype, deviation: float) -> None:
    """Three batches summed into .grad, against float64; plain torch rounds its logits to bfloat16 too."""
    hidden = [deviation * torch.randn(N, D, device=DEVICE).to(torch.bfloat16) for _ in range(3)]
    weight = (torch.randn(V, D, device=DEVICE) / D**0.5).to(weight_dtype)
    targets = [target() for _ in hidden]

    def total(loss: Callable[..., Tensor], dtype: torch.dtype | None) -> Tensor:
        w = weight.to(dtype or weight_dtype).requires_grad_()
        for h, y in zip(hidden, targets, strict=True):
            (loss(h.to(dtype or h.dtype), w, y) / len(hidden)).backward()
        assert w.grad is not None
        return w.grad.double()

    def plain(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        logits = h @ w.to(h.dtype).t()
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), y)

    def ours(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return sigsoftmax.linear_cross_entropy(h, w, y, function="softmax", chunk_bytes=CHUNK_BYTES)

    truth = total(plain, torch.float64)
    assert frobenius_error(total(ours, None), truth) <= 1.1 * frobenius_error(total(plain, None), truth)


def test_streams_other_than_the_current_one() -> None:
    call = product()
    expected = call.gradients()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        actual = call.gradients()
    stream.synchronize()
    assert_equal(actual, expected)


# Targets out of range

OUT_OF_RANGE = """
import torch, sigsoftmax
z = torch.randn(4, 10, device="cuda", requires_grad=True)
sigsoftmax.cross_entropy(z, torch.tensor([0, 1, 10, 2], device="cuda"), function="sigsoftmax").backward()
torch.cuda.synchronize()
print("not noticed")
"""


@pytest.mark.parametrize("check", ["0", "1"])
def test_a_target_out_of_range_is_noticed(check: str) -> None:
    """By an assert on the device, which ends the process's use of it; with the full message if asked for."""
    environment = {**os.environ, "SIGSOFTMAX_CHECK": check}
    result = subprocess.run([sys.executable, "-c", OUT_OF_RANGE], env=environment, capture_output=True, text=True)
    assert result.returncode != 0
    assert "not noticed" not in result.stdout
    assert ("ValueError" if check == "1" else "assert") in result.stderr
