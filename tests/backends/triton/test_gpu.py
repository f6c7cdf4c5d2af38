"""Tests that need a GPU: captured graphs, compiled functions, no waiting for the device, memory used before.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
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
ALIGNED_V = 1_008


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


def plain_logits(
    function: str | OutputFunction = "sigsoftmax", dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Call:
    y = target()
    return Call(lambda z: sigsoftmax.cross_entropy(z, y, function=function, **options), [leaf(N, V, dtype=dtype)])


def probabilities() -> Call:
    p = torch.softmax(torch.randn(N, V, device=DEVICE), -1)
    return Call(lambda z: sigsoftmax.cross_entropy(z, p, function="sigsoftmax"), [leaf(N, V)])


def weighted() -> Call:
    """Weights of classes and of tokens, whose gradient is a result too."""
    y, by_class = target(), torch.linspace(0.0, 2.0, V, device=DEVICE)

    def loss(hidden: Tensor, weight: Tensor, by_token: Tensor) -> Tensor:
        return sigsoftmax.linear_cross_entropy(
            hidden, weight, y, function="sigsoftmax", weight=by_class, token_weights=by_token, chunk_bytes=CHUNK_BYTES
        )

    return Call(loss, [leaf(N, D), leaf(V, D), leaf(N, dtype=torch.float32)])


def autocast() -> Call:
    y = target()

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return sigsoftmax.linear_cross_entropy(hidden, weight, y, function="sigsoftmax", chunk_bytes=CHUNK_BYTES)

    return Call(loss, [leaf(N, D, dtype=torch.float32), leaf(V, D, dtype=torch.float32)])


def product(function: str | OutputFunction = "sigsoftmax", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Call:
    y = target()
    inputs = [leaf(N, D), leaf(V, D, dtype=dtype), leaf(V, dtype=dtype)]

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return sigsoftmax.linear_cross_entropy(
            hidden, weight, y, function=function, linear_bias=bias, chunk_bytes=CHUNK_BYTES, **options
        )

    return Call(loss, inputs)


def mixture(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Call:
    y = target()
    inputs = [leaf(N, K, D, dtype=dtype), leaf(N, K, dtype=dtype), leaf(V, D, dtype=dtype)]

    def loss(hidden: Tensor, prior: Tensor, weight: Tensor) -> Tensor:
        return sigsoftmax.mixture_cross_entropy(
            hidden, prior, weight, y, function="sigsoftmax", chunk_bytes=K * CHUNK_BYTES, **options
        )

    return Call(loss, inputs)


def few_products(has_bias: bool = True, **options: Any) -> Call:
    """A loss with a number of classes that the kernels for few tokens accept."""
    y = target()
    inputs = [leaf(N, D), leaf(ALIGNED_V, D), leaf(ALIGNED_V)]

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return sigsoftmax.linear_cross_entropy(hidden, weight, y, function="sigsoftmax", linear_bias=bias, **options)

    return Call(loss, inputs if has_bias else inputs[:2])


def few_mixtures(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Call:
    y = target()
    inputs = [leaf(N, K, D, dtype=dtype), leaf(N, K, dtype=dtype), leaf(ALIGNED_V, D, dtype=dtype)]

    def loss(hidden: Tensor, prior: Tensor, weight: Tensor) -> Tensor:
        return sigsoftmax.mixture_cross_entropy(hidden, prior, weight, y, function="sigsoftmax", **options)

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
    "logits, float16": lambda: plain_logits(dtype=torch.float16),
    "logits, float32": lambda: plain_logits(dtype=torch.float32),
    "logits, softcap": lambda: plain_logits("softcap", z_loss=0.01),
    "probabilities": probabilities,
    "weights": weighted,
    "autocast": autocast,
    "mixture": mixture,
    "mixture, fast": lambda: mixture(weight_gradient="fast"),
    "mixture, buffered": lambda: mixture(weight_gradient="buffered"),
    "mixture, float32": lambda: mixture(torch.float32),
    "mixture, z-loss": lambda: mixture(z_loss=0.01),
    "mixture, none": lambda: mixture(reduction="none"),
    "mixture, smoothing": lambda: mixture(label_smoothing=0.1),
    "learned": learned,
    "few tokens": few_products,
    "few tokens, no bias": lambda: few_products(has_bias=False, z_loss=0.01, reduction="sum"),
    "few tokens of a mixture": few_mixtures,
    "few tokens of a mixture, chunks": lambda: few_mixtures(
        chunk_bytes=K * 40 * ALIGNED_V * 2, z_loss=0.01, weight_gradient="buffered"
    ),
    "few tokens of a mixture, float32": lambda: few_mixtures(torch.float32, floor=1e-8),
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


def capture(call: Call) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call.gradients()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call.gradients()
    return graph, captured


@every_call
def test_a_captured_graph_gives_the_eager_result(make: Callable[[], Call]) -> None:
    call = make()
    graph, captured = capture(call)
    for _ in range(2):
        with torch.no_grad():
            for tensor in call.inputs:
                tensor.normal_()
        graph.replay()
        assert_equal(captured, call.gradients())


@pytest.mark.parametrize(("weight_gradient", "classes"), [("fast", V), ("exact", V), ("auto", ALIGNED_V)])
def test_a_captured_graph_sees_other_targets(weight_gradient: str, classes: int) -> None:
    """Also another number of them that count."""
    y = target()
    inputs = [leaf(N, D), leaf(classes, D)]

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return sigsoftmax.linear_cross_entropy(
            hidden, weight, y, function="sigsoftmax", weight_gradient=weight_gradient, chunk_bytes=CHUNK_BYTES
        )

    call = Call(loss, inputs)
    graph, captured = capture(call)
    for ignored in (slice(0, 0), slice(10, 60), slice(1, None)):
        y.random_(0, V)
        y[ignored] = -100
        graph.replay()
        assert_equal(captured, call.gradients())


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("classes", [V, ALIGNED_V])
def test_graphed_callables(classes: int) -> None:
    """As the documentation recommends for losses of few tokens."""
    inputs = [leaf(N, D), leaf(classes, D)]

    def loss(hidden: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        return sigsoftmax.linear_cross_entropy(hidden, weight, y, function="sigsoftmax")

    graphed = torch.cuda.make_graphed_callables(
        loss, (*(t.detach().clone().requires_grad_() for t in inputs), target())
    )
    for factor in (1.0, 0.5):
        with torch.no_grad():
            for tensor in inputs:
                tensor.normal_()
        y = target()
        actual, expected = (
            (value.detach(), *torch.autograd.grad(factor * value, inputs))
            for value in (graphed(*inputs, y), loss(*inputs, y))
        )
        assert_equal(actual, expected)


@every_call
def test_what_memory_held_before_does_not_matter(make: Callable[[], Call]) -> None:
    """The allocator hands out blocks that were full of NaN, small and large ones."""
    call = make()
    expected = call.gradients()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    sizes = [*([128, 1024, 2**14, 2**17] * 40), *([2**19, 2**22] * 6), 2**25]
    dirty = [torch.full((size,), torch.nan, device=DEVICE) for size in sizes]
    del dirty
    assert_equal(call.gradients(), expected)


@pytest.mark.parametrize("make", [product, few_products, few_mixtures])
def test_a_graph_that_is_kept_gives_its_gradients_again(make: Callable[[], Call]) -> None:
    call = make()
    value = call.loss(*call.inputs)
    first = torch.autograd.grad(value, call.inputs, retain_graph=True)
    half = torch.autograd.grad(0.5 * value, call.inputs, retain_graph=True)
    assert_equal(torch.autograd.grad(value, call.inputs), first)
    for a, b in zip(half, first, strict=True):
        assert torch.equal(a, 0.5 * b)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "name", ["logits", "exact", "float32 weight", "none", "mixture", "learned", "few tokens", "autocast"]
)
def test_compiled_functions_give_the_eager_result(name: str) -> None:
    """The loss is one op; what stands around it is torch's, whose fused sums may round otherwise."""
    call = CALLS[name]()
    expected = call.gradients()
    torch.compiler.reset()
    actual = Call(torch.compile(call.loss, fullgraph=True), call.inputs).gradients()
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        tolerance = 2.0 * torch.finfo(e.dtype).eps
        assert frobenius_error(a.cpu(), e.cpu().double()) <= tolerance * float(e.double().norm()), f"result {i}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("classes", [V, ALIGNED_V])
def test_a_compiled_function_whose_number_of_tokens_depends_on_data(classes: int) -> None:
    hidden, weight, y = leaf(N, D), leaf(classes, D), target()

    def loss(hidden: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        kept = y != -100
        return sigsoftmax.linear_cross_entropy(hidden[kept], weight, y[kept], function="sigsoftmax")

    expected = Call(lambda h, w: loss(h, w, y), [hidden, weight]).gradients()
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(loss, fullgraph=True)
        actual = Call(lambda h, w: compiled(h, w, y), [hidden, weight]).gradients()
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


@pytest.mark.parametrize("make", [product, few_products])
def test_streams_other_than_the_current_one(make: Callable[[], Call]) -> None:
    call = make()
    expected = call.gradients()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        actual = call.gradients()
    stream.synchronize()
    assert_equal(actual, expected)


# The gradient of a bias


@pytest.mark.parametrize("chunk_bytes", [None, 2**22], ids=["few tokens", "chunks"])
@pytest.mark.parametrize("weight_gradient", ["fast", "exact"])
def test_a_bias_takes_no_memory(weight_gradient: str, chunk_bytes: int | None) -> None:
    """Sizes at which torch's sum over rows would take more than the logits themselves."""
    tokens, classes = 1400, 10_000
    hidden, weight, bias = leaf(tokens, D), leaf(classes, D), leaf(classes)
    y = torch.randint(classes, (tokens,), device=DEVICE)

    def peak(linear_bias: Tensor | None) -> int:
        inputs = [hidden, weight, *([] if linear_bias is None else [linear_bias])]
        options: dict[str, Any] = {"chunk_bytes": chunk_bytes, "weight_gradient": weight_gradient}
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = sigsoftmax.linear_cross_entropy(
                hidden, weight, y, function="sigsoftmax", linear_bias=linear_bias, **options
            )
            torch.autograd.grad(loss, inputs)
        return torch.cuda.max_memory_allocated() - before

    assert peak(bias) <= peak(None) + 2**20


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
