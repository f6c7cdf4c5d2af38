"""Demands of torch on an operation: gradients in every mode, compilation, autocast, and the ops' own contract.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.recording import record_results
from tests.tables import (
    BACKENDS,
    MEMBERS,
    Member,
    assert_same,
    by_label,
    every_backend,
    every_member,
    frobenius_error,
    gradients,
)
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

import sigsoftmax
from sigsoftmax.backends.chunked.log_probs import ChunkedLogProbs
from sigsoftmax.backends.chunked.loss import ChunkedLoss
from sigsoftmax.contract.operands import Operands, Wanted
from sigsoftmax.contract.spec import log_probs_spec, loss_spec, member_of, statistics_spec
from sigsoftmax.losses import packing
from sigsoftmax.losses.log_probs_op import _op as LOG_PROBS_OP
from sigsoftmax.losses.op import _loss_op as LOSS_OP
from sigsoftmax.losses.statistics_op import _op as STATISTICS_OP

N, K, V, D = 6, 2, 7, 4
TORCHSCRIPT = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
"""torch's own formulas of forward mode, and inductor, still call torch.jit.script."""
SECOND_DERIVATIVE = r"no second derivative; pass backend='reference'"


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


TARGET = torch.tensor([0, 3, -100, 6, 1, 2])
Operation = Callable[..., Tensor]


def logits_loss(hidden: Tensor, matrix: Tensor, bias: Tensor, prior: Tensor, **options: Any) -> Tensor:
    """The loss of given logits, as a function of the same four inputs as the others."""
    z = hidden[:, 0] @ matrix.t() + bias + 0.0 * prior.sum()
    return sigsoftmax.cross_entropy(z, TARGET, **options)


def linear_loss(hidden: Tensor, matrix: Tensor, bias: Tensor, prior: Tensor, **options: Any) -> Tensor:
    flat = hidden[:, 0] + 0.0 * prior.sum()
    return sigsoftmax.linear_cross_entropy(flat, matrix, TARGET, linear_bias=bias, **options)


def mixture_loss(hidden: Tensor, matrix: Tensor, bias: Tensor, prior: Tensor, **options: Any) -> Tensor:
    return sigsoftmax.mixture_cross_entropy(hidden, prior, matrix, TARGET, linear_bias=bias, **options)


def log_probs(hidden: Tensor, matrix: Tensor, bias: Tensor, prior: Tensor, **options: Any) -> Tensor:
    return sigsoftmax.log_probs(hidden[:, 0] @ matrix.t() + bias + 0.0 * prior.sum(), **options)


def mixture_log_probs(hidden: Tensor, matrix: Tensor, bias: Tensor, prior: Tensor, **options: Any) -> Tensor:
    return sigsoftmax.mixture_log_probs(hidden, prior, matrix, linear_bias=bias, **options)


LOSSES: tuple[Operation, ...] = (logits_loss, linear_loss, mixture_loss)
OPERATIONS: tuple[Operation, ...] = (*LOSSES, log_probs, mixture_log_probs)
every_loss = pytest.mark.parametrize("operation", LOSSES, ids=lambda operation: operation.__name__)
every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
every_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
few_members = pytest.mark.parametrize(
    "member",
    [by_label[label] for label in ("softmax", "sigsoftmax", "shifted(b per class)", "relu", "user, phi alone")],
    ids=str,
)


def four_inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [leaf(N, K, D, dtype=dtype), leaf(V, D, dtype=dtype), leaf(V, dtype=dtype), leaf(N, K, dtype=dtype)]


# Backward, again and again


@every_backend
@few_members
@every_loss
@every_reduction
def test_backward_twice_gives_the_same_gradients(
    operation: Operation, member: Member, reduction: str, backend: str
) -> None:
    inputs = four_inputs()
    loss = operation(*inputs, function=member.make(V), reduction=reduction, backend=backend)
    first = [g.clone() for g in gradients(loss, inputs, retain_graph=True)]
    second = [g.clone() for g in gradients(loss, inputs, retain_graph=True)]
    last = gradients(loss, inputs)
    for a, b, c in zip(first, second, last, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@every_backend
@every_loss
@every_reduction
def test_what_is_done_to_a_gradient_does_not_come_back(operation: Operation, reduction: str, backend: str) -> None:
    """A gradient changed in place, or accumulated into, leaves what the graph keeps alone."""
    inputs = four_inputs()
    loss = operation(*inputs, function="sigsoftmax", reduction=reduction, backend=backend)
    by = torch.ones_like(loss)
    first = torch.autograd.grad(loss, inputs, by, retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.zero_()
    loss.backward(by, retain_graph=True)
    for tensor, expected in zip(inputs, kept, strict=True):
        assert torch.equal(tensor.grad, expected)
    loss.backward(by)
    for tensor, expected in zip(inputs, kept, strict=True):
        assert_same(tensor.grad, 2.0 * expected, "accumulated", tolerance=1e-14)


@every_backend
@every_loss
@pytest.mark.parametrize("factor", [0.0, 1.0, -2.5, 1e-3])
def test_the_incoming_gradient_scales_the_result(operation: Operation, factor: float, backend: str) -> None:
    inputs = four_inputs()
    for reduction in ("mean", "sum"):
        options: dict[str, Any] = {"function": "sigsoftmax", "reduction": reduction, "backend": backend}
        unscaled = gradients(operation(*inputs, **options), inputs)
        loss = operation(*inputs, **options)
        scaled = gradients(loss, inputs, torch.tensor(factor, dtype=torch.float64))
        for a, e in zip(scaled, unscaled, strict=True):
            assert_same(a, factor * e, reduction, tolerance=1e-14)


@every_backend
@every_operation
def test_gradients_of_single_elements(operation: Operation, backend: str) -> None:
    """A gradient that reaches one token alone."""
    inputs = four_inputs()
    options: dict[str, Any] = {"function": "sigsoftmax", "backend": backend}
    if operation in LOSSES:
        options["reduction"] = "none"
    result = operation(*inputs, **options)
    truth = operation(*inputs, **{**options, "backend": "reference"})
    for index in (0, result.numel() - 1):
        by = torch.zeros_like(result)
        by.view(-1)[index] = 1.0
        actual = torch.autograd.grad(result, inputs, by, retain_graph=True)
        expected = torch.autograd.grad(truth, inputs, by, retain_graph=True)
        for a, e in zip(actual, expected, strict=True):
            assert_same(a, e)


@every_backend
@every_operation
@every_member
def test_inputs_are_never_overwritten(operation: Operation, member: Member, backend: str) -> None:
    inputs = four_inputs()
    values = member.learned(V)
    before = [t.detach().clone() for t in (*inputs, *values.values())]
    result = (
        operation(*inputs, function=member.make(V, **values), prior_function="softmax", backend=backend)
        if (operation in (mixture_loss, mixture_log_probs))
        else operation(*inputs, function=member.make(V, **values), backend=backend)
    )
    by = torch.rand_like(result)
    by_before = by.clone()
    torch.autograd.grad(result, [*inputs, *values.values()], by)
    for tensor, expected in zip((*inputs, *values.values()), before, strict=True):
        assert torch.equal(tensor.detach(), expected)
    assert torch.equal(by, by_before)


@every_backend
def test_logits_that_are_changed_after_a_loss_are_noticed_or_do_not_matter(backend: str) -> None:
    """A gradient computed in the forward pass needs the logits no more; one that is recomputed says that they moved."""
    z = torch.randn(N, V, dtype=torch.float64)
    expected = {}
    for reduction in ("mean", "none"):
        logits = z.clone().requires_grad_()
        loss = sigsoftmax.cross_entropy(logits, TARGET, function="sigsoftmax", reduction=reduction, backend=backend)
        (expected[reduction],) = torch.autograd.grad(loss.sum(), logits)
    for reduction in ("mean", "none"):
        logits = z.clone().requires_grad_()
        moved = logits * 1.0
        loss = sigsoftmax.cross_entropy(moved, TARGET, function="sigsoftmax", reduction=reduction, backend=backend)
        with torch.no_grad():
            moved.mul_(3.0)
        try:
            (actual,) = torch.autograd.grad(loss.sum(), logits)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
        else:
            assert_same(actual, expected[reduction], reduction)


# Nothing that is not required


@every_backend
@every_operation
@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
def test_each_input_alone_may_want_a_gradient(operation: Operation, wanted: int, backend: str) -> None:
    inputs = four_inputs()
    options: dict[str, Any] = {"function": "sigsoftmax", "backend": backend}
    everything = gradients(operation(*inputs, **options), inputs)
    alone = [t.detach().requires_grad_(position == wanted) for position, t in enumerate(inputs)]
    result = operation(*alone, **options)
    assert_same(gradients(result, [alone[wanted]])[0], everything[wanted], tolerance=1e-13)


@every_loss
@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias", "nothing"])
def test_products_that_nobody_wants_are_not_computed(
    operation: Operation, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that are computed: those that are wanted."""
    if operation is logits_loss:
        wanted = "hidden" if wanted != "nothing" else wanted
    found = record_results(monkeypatch, ChunkedLoss, "compute")
    names = ("hidden", "weight", "bias", "prior")
    inputs = [t.detach().requires_grad_(name == wanted) for name, t in zip(names, four_inputs(), strict=True)]
    operation(*inputs, function="sigsoftmax", backend="blocked")
    (results,) = found
    computed = [name for name, g in zip((*names, "token weights"), results.gradients, strict=True) if g is not None]
    assert computed == [name for name in names if name == wanted]


@every_operation
def test_no_grad_computes_no_gradient(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = four_inputs()
    recorded = [record_results(monkeypatch, path, "compute") for path in (ChunkedLoss, ChunkedLogProbs)]
    expected = operation(*inputs, function="sigsoftmax", backend="reference").detach()
    with torch.no_grad():
        actual = operation(*inputs, function="sigsoftmax", backend="blocked")
    assert not actual.requires_grad
    assert_same(actual, expected)
    (result,) = itertools.chain(*recorded)
    if operation in LOSSES:
        assert all(g is None for g in result.gradients)


@every_backend
@every_operation
def test_inference_mode(operation: Operation, backend: str) -> None:
    inputs = four_inputs()
    expected = operation(*inputs, function="sigsoftmax", backend="reference").detach()
    with torch.inference_mode():
        actual = operation(*inputs, function="sigsoftmax", backend=backend)
        assert_same(actual, expected)


# gradcheck, and derivatives beyond the first


@every_backend
@every_operation
@few_members
def test_gradcheck(operation: Operation, member: Member, backend: str) -> None:
    # relu has a corner: logits on one side of it.
    inputs = four_inputs()
    if member.name == "relu":
        inputs = [t.detach().abs().add(0.1).requires_grad_() for t in inputs]
    values = member.learned(V)
    options: dict[str, Any] = {"backend": backend}
    if operation in (mixture_loss, mixture_log_probs):
        options["prior_function"] = "softmax"
        options["floor"] = 1e-3
    if operation in LOSSES:
        # The z-loss of a mixture holds the prior constant, which finite differences cannot know.
        options |= {"label_smoothing": 0.1, "z_loss": 0.0 if operation is mixture_loss else 0.01}

    def call(*tensors: Tensor) -> Tensor:
        parameters = dict(zip(values, tensors[4:], strict=True))
        return operation(*tensors[:4], function=member.make(V, **parameters), **options)

    assert torch.autograd.gradcheck(call, (*inputs, *values.values()), fast_mode=True)


@every_operation
@few_members
def test_second_derivatives_of_the_reference(operation: Operation, member: Member) -> None:
    inputs = four_inputs()
    if member.name == "relu":
        inputs = [t.detach().abs().add(0.1).requires_grad_() for t in inputs]

    def call(*tensors: Tensor) -> Tensor:
        options: dict[str, Any] = {"function": member.make(V), "backend": "reference"}
        if operation in (mixture_loss, mixture_log_probs):
            options["prior_function"] = "softmax"
        return operation(*tensors, **options)

    assert torch.autograd.gradgradcheck(call, tuple(inputs), fast_mode=True)


@pytest.mark.parametrize(
    "operation", [linear_loss, mixture_loss, mixture_log_probs], ids=lambda operation: operation.__name__
)
@every_reduction
@pytest.mark.parametrize("also_by", [False, True])
def test_second_derivatives_of_products_raise(operation: Operation, reduction: str, also_by: bool) -> None:
    """Never zeros: create_graph=True gives first derivatives, and differentiating those names the way out."""
    inputs = four_inputs()
    options: dict[str, Any] = {"reduction": reduction} if operation in LOSSES else {}
    result = operation(*inputs, function="sigsoftmax", backend="blocked", **options)
    truth = operation(*inputs, function="sigsoftmax", backend="reference", **options)
    by = torch.rand_like(result).requires_grad_(also_by)
    first = torch.autograd.grad(result, inputs, by, create_graph=True)
    expected = torch.autograd.grad(truth, inputs, by.detach())
    for a, e in zip(first, expected, strict=True):
        assert_same(a.detach(), e)
    for derivative in first:
        with pytest.raises(RuntimeError, match=SECOND_DERIVATIVE):
            torch.autograd.grad(derivative.square().sum(), inputs, retain_graph=True, allow_unused=True)


@every_reduction
def test_second_derivatives_of_products_by_token_weights_raise(reduction: str) -> None:
    hidden, t, matrix = leaf(N, D), torch.rand(N, dtype=torch.float64).requires_grad_(), torch.randn(V, D).double()
    loss = sigsoftmax.linear_cross_entropy(
        hidden, matrix, TARGET, function="sigsoftmax", token_weights=t, reduction=reduction, backend="blocked"
    )
    by_hidden, by_t = torch.autograd.grad(loss.sum(), [hidden, t], create_graph=True)
    with pytest.raises(RuntimeError, match=SECOND_DERIVATIVE):
        torch.autograd.grad(by_hidden.square().sum(), [hidden, t], retain_graph=True)
    with pytest.raises(RuntimeError, match=SECOND_DERIVATIVE):
        torch.autograd.grad(by_t.square().sum(), hidden)


@TORCHSCRIPT
@every_operation
def test_forward_mode_goes_to_the_reference(operation: Operation) -> None:
    inputs = [t.detach() for t in four_inputs()]
    tangent = torch.randn_like(inputs[0])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs[0], tangent)
        result = forward_ad.unpack_dual(operation(dual, *inputs[1:], function="sigsoftmax"))
        assert sigsoftmax.explain().backend == "reference"
        assert "forward-mode derivatives need plain autograd" in str(sigsoftmax.explain())
        with pytest.raises(ValueError, match="backend 'blocked' cannot be used: forward-mode derivatives"):
            operation(dual, *inputs[1:], function="sigsoftmax", backend="blocked")
    step = 1e-6
    upper, lower = (
        operation(inputs[0] + sign * step * tangent, *inputs[1:], function="sigsoftmax", backend="reference")
        for sign in (1.0, -1.0)
    )
    assert_same(result.tangent, (upper - lower) / (2.0 * step), tolerance=1e-7)
    operation(*inputs, function="sigsoftmax")
    assert sigsoftmax.explain().backend == "blocked"


@TORCHSCRIPT
def test_forward_mode_by_token_weights_goes_to_the_reference() -> None:
    z, t = torch.randn(N, V, dtype=torch.float64), torch.rand(N, dtype=torch.float64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(t, torch.ones_like(t))
        loss = sigsoftmax.cross_entropy(z, TARGET, function="sigsoftmax", token_weights=dual, reduction="sum")
        tangent = forward_ad.unpack_dual(loss).tangent
    expected = sigsoftmax.cross_entropy(z, TARGET, function="sigsoftmax", reduction="sum")
    assert_same(tangent, expected)


@every_operation
def test_torch_func_grad_goes_to_the_reference(operation: Operation) -> None:
    inputs = four_inputs()
    detached = [t.detach() for t in inputs]

    def total(hidden: Tensor, backend: str | None = None) -> Tensor:
        return operation(hidden, *detached[1:], function="sigsoftmax", backend=backend).sum()

    actual = torch.func.grad(total)(detached[0])
    assert sigsoftmax.explain().backend == "reference"
    assert "inside torch.func" in str(sigsoftmax.explain())
    (expected,) = torch.autograd.grad(total(inputs[0], "blocked"), inputs[0])
    assert_same(actual, expected)
    with pytest.raises(
        ValueError, match=r"backend 'blocked' cannot be used: .*torch\.func.*; pass backend='reference'"
    ):
        torch.func.grad(lambda hidden: total(hidden, "blocked"))(detached[0])


def test_vmap_goes_to_the_reference() -> None:
    """Over batches of logits and targets; each loss is what it is alone."""
    z = torch.randn(3, N, V, dtype=torch.float64)
    target = torch.randint(V, (3, N))
    for reduction in ("mean", "none"):

        def loss(z: Tensor, target: Tensor, reduction: str = reduction, backend: str | None = None) -> Tensor:
            return sigsoftmax.cross_entropy(z, target, function="sigsoftmax", reduction=reduction, backend=backend)

        batched = torch.func.vmap(loss)(z, target)
        assert sigsoftmax.explain().backend == "reference"
        assert_same(batched, torch.stack([loss(*pair) for pair in zip(z, target, strict=True)]))
        per_sample = torch.func.vmap(torch.func.grad(lambda z, t: loss(z, t).sum()))(z, target)
        leaf_z = z.clone().requires_grad_()
        total = sum(loss(*pair).sum() for pair in zip(leaf_z, target, strict=True))
        assert_same(per_sample, torch.autograd.grad(total, leaf_z)[0])
    with pytest.raises(ValueError, match="backend 'blocked' cannot be used"):
        torch.func.vmap(lambda z, t: loss(z, t, backend="blocked"))(z, target)


def test_vmap_over_targets_alone_goes_to_the_reference() -> None:
    z = torch.randn(N, V, dtype=torch.float64)
    target = torch.randint(V, (3, N))
    batched = torch.func.vmap(lambda t: sigsoftmax.cross_entropy(z, t, function="sigsoftmax"))(target)
    expected = [sigsoftmax.cross_entropy(z, t, function="sigsoftmax", backend="reference") for t in target]
    assert_same(batched, torch.stack(expected))


@every_operation
def test_vmap_over_hidden_vectors(operation: Operation) -> None:
    inputs = [t.detach() for t in four_inputs()]
    batch = torch.stack([inputs[0], 2.0 * inputs[0]])
    actual = torch.func.vmap(lambda hidden: operation(hidden, *inputs[1:], function="sigsoftmax"))(batch)
    expected = [operation(hidden, *inputs[1:], function="sigsoftmax", backend="reference") for hidden in batch]
    assert_same(actual, torch.stack(expected))


@TORCHSCRIPT
def test_hessians_by_torch_func() -> None:
    z = torch.randn(1, V, dtype=torch.float64)
    target = torch.tensor([2])
    actual = torch.func.hessian(lambda z: sigsoftmax.cross_entropy(z, target, function="softmax"))(z)
    p = torch.softmax(z[0], -1)
    assert_same(actual.view(V, V), torch.diag(p) - torch.outer(p, p))


# torch.compile


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled_agrees(call: Callable[..., Tensor], inputs: list[Tensor], backend: str, tolerance: float) -> None:
    expected = call(*inputs)
    expected_gradients = gradients(expected, inputs)
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for _ in range(2):
        actual = compiled(*inputs)
        assert_same(actual, expected, tolerance=tolerance)
        for a, e in zip(gradients(actual, inputs), expected_gradients, strict=True):
            assert_same(a, e, "gradient", tolerance=tolerance)


@pytest.mark.grid
@pytest.mark.usefixtures("_fresh_compiler")
@every_operation
@pytest.mark.parametrize("label", ["sigsoftmax", "shifted(b per class)", "softcap(c=5)", "user, with slope"])
def test_compiled_whole_it_is_what_it_is_eager(operation: Operation, label: str) -> None:
    member = by_label[label]
    function = member.make(V)
    prior: dict[str, Any] = {}
    if operation in (mixture_loss, mixture_log_probs):
        prior["prior_function"] = "softmax"

    def call(*tensors: Tensor) -> Tensor:
        return operation(*tensors, function=function, **prior)

    compiled_agrees(call, four_inputs(), "aot_eager", 1e-12)


@pytest.mark.grid
@pytest.mark.usefixtures("_fresh_compiler")
@every_loss
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_compiled_with_all_options(operation: Operation, reduction: str) -> None:
    weight = torch.rand(V, dtype=torch.float64)
    tokens = torch.rand(N, dtype=torch.float64)

    def call(*tensors: Tensor) -> Tensor:
        return operation(
            *tensors,
            function="gss(k=0.2)",
            weight=weight,
            token_weights=tokens,
            label_smoothing=0.1,
            z_loss=0.01,
            reduction=reduction,
        )

    compiled_agrees(call, four_inputs(), "aot_eager", 1e-12)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_learned_parameters_and_extras() -> None:
    z, b = leaf(N, V), torch.linspace(-1.0, 1.0, V, dtype=torch.float64).requires_grad_()

    def call(z: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        function = sigsoftmax.OutputFunction("shifted_sigsoftmax", b=b)
        loss, extras = sigsoftmax.cross_entropy(
            z, TARGET, function=function, extras=("log_normalizer", "argmax", "entropy")
        )
        return loss, extras.log_normalizer, extras.argmax, extras.entropy

    expected = call(z, b)
    actual = torch.compile(call, fullgraph=True, backend="aot_eager")(z, b)
    for a, e in zip(actual, expected, strict=True):
        assert_same(a, e, tolerance=1e-12)
    for a, e in zip(gradients(actual[0], [z, b]), gradients(expected[0], [z, b]), strict=True):
        assert_same(a, e, tolerance=1e-12)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_with_sizes_that_change() -> None:
    """One compilation for all numbers of tokens."""
    weight = leaf(V, D)

    def call(hidden: Tensor, target: Tensor) -> Tensor:
        return sigsoftmax.linear_cross_entropy(hidden, weight, target, function="sigsoftmax")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 8, 5):
        hidden, target = leaf(tokens, D), torch.randint(V, (tokens,))
        expected = call(hidden, target)
        actual = compiled(hidden, target)
        assert_same(actual, expected, tolerance=1e-12)
        for a, e in zip(gradients(actual, [hidden, weight]), gradients(expected, [hidden, weight]), strict=True):
            assert_same(a, e, tolerance=1e-12)


def sum_of_entropies(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    entropy = sigsoftmax.linear_token_statistics(hidden, weight, target, function="sigsoftmax", entropy=True).entropy
    assert entropy is not None
    return entropy.sum()


OF_A_SUBSET: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "loss": lambda h, w, t: sigsoftmax.linear_cross_entropy(h, w, t, function="sigsoftmax"),
    "losses": lambda h, w, t: sigsoftmax.linear_cross_entropy(h, w, t, function="sigsoftmax", reduction="none").sum(),
    "log_probs": lambda h, w, t: sigsoftmax.log_probs(h @ w.T, function="sigsoftmax").square().sum(),
    "entropies": sum_of_entropies,
}


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("call", OF_A_SUBSET.values(), ids=OF_A_SUBSET)
def test_compiled_with_a_number_of_tokens_that_depends_on_data(
    call: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    """As where padding is cut away before the output layer."""
    hidden, weight, target = leaf(8, D), leaf(V, D), torch.tensor([1, -100, 0, 3, -100, 2, 1, 0])

    def of_kept(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        kept = target != -100
        return call(hidden[kept], weight, target[kept])

    expected = of_kept(hidden, weight, target)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        actual = torch.compile(of_kept, fullgraph=True, backend="aot_eager")(hidden, weight, target)
        assert_same(actual, expected, tolerance=1e-12)
        for a, e in zip(gradients(actual, [hidden, weight]), gradients(expected, [hidden, weight]), strict=True):
            assert_same(a, e, tolerance=1e-12)


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_loss_still_checks_its_targets() -> None:
    compiled = torch.compile(
        lambda z, t: sigsoftmax.cross_entropy(z, t, function="sigsoftmax"), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(ValueError, match="target 7 at row 1 is out of range"):
        compiled(torch.randn(2, V), torch.tensor([0, V]))


@TORCHSCRIPT
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("operation", [linear_loss, mixture_loss], ids=lambda operation: operation.__name__)
def test_compiled_by_inductor(operation: Operation) -> None:
    compiled_agrees(lambda *tensors: operation(*tensors, function="sigsoftmax"), four_inputs(), "inductor", 1e-10)


# The ops' own contract


def op_arguments(
    prior: str | None = "sigsoftmax", dtype: torch.dtype = torch.float32, **changes: Any
) -> tuple[Any, ...]:
    """The arguments of the op for a mixture with everything on; ``changes`` replace operands and options by name."""
    member, arguments = member_of(sigsoftmax.OutputFunction("gss", k=2.0, c=torch.randn(V, requires_grad=True)))
    options: dict[str, Any] = {"z_loss": 0.01, "chunk_bytes": 100, "weight_gradient": "buffered"}
    operands: dict[str, Any] = {
        "input": leaf(N, K, D, dtype=dtype),
        "weight": leaf(V, D, dtype=dtype),
        "bias": leaf(V, dtype=dtype),
        "prior_logits": leaf(N, K, dtype=torch.float32),
        "target": TARGET,
        "class_weight": torch.rand(V),
        "token_weights": leaf(N, dtype=torch.float32).detach().abs().requires_grad_(),
        "arguments": arguments,
    }
    if prior is None:
        operands |= {"input": leaf(N, V, dtype=dtype), "weight": None, "bias": None, "prior_logits": None}
    else:
        options["floor"] = 1e-3
    by_losses = changes.pop("by_losses", None)
    operands |= {key: value for key, value in changes.items() if key in operands}
    options |= {key: value for key, value in changes.items() if key not in operands}
    spec = loss_spec(member=member, prior=None if prior is None else member_of(prior)[0], **options)
    given = Operands(**operands)
    wanted = Wanted.of([t is not None and t.requires_grad for t in given.differentiable], len(arguments))
    return LOSS_OP.pack(spec, given, packing.TracedSignature(given, wanted, None), "blocked", by_losses)


OP_CHANGES: dict[str, dict[str, Any]] = {
    "mixture": {},
    "mixture of every class": {"label_smoothing": 0.1, "extras": ("log_normalizer", "argmax", "entropy")},
    "gradients in the backward pass": {"reduction": "none"},
    "gradients of the losses": {"reduction": "none", "by_losses": torch.rand(N)},
    "a sum": {"reduction": "sum"},
    "probability targets": {"target": torch.rand(N, V)},
    "logits": {"prior": None},
    "logits, gradients in the backward pass": {"prior": None, "reduction": "none"},
    "bfloat16": {"dtype": torch.bfloat16},
    "float32 weight, bfloat16 products": {"input": torch.randn(N, K, D).bfloat16().requires_grad_()},
    "transposed": {
        "input": torch.randn(K, N, D).transpose(0, 1).requires_grad_(),
        "weight": torch.randn(D, V).t().requires_grad_(),
    },
    "several leading dimensions": {
        "input": torch.randn(2, 3, K, D).requires_grad_(),
        "prior_logits": torch.randn(2, 3, K).requires_grad_(),
        "target": TARGET.view(2, 3),
        "token_weights": None,
    },
}
# The checks that need no gradients of outputs that are gradients themselves.
OP_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("changes", OP_CHANGES.values(), ids=OP_CHANGES)
def test_the_loss_keeps_the_contract_of_an_op(changes: dict[str, Any]) -> None:
    results = torch.library.opcheck(torch.ops.sigsoftmax.loss.default, op_arguments(**changes), test_utils=OP_TESTS)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("changes", OP_CHANGES.values(), ids=OP_CHANGES)
def test_what_is_packed_is_unpacked(changes: dict[str, Any]) -> None:
    packed = op_arguments(**changes)
    spec, operands, wanted, autocast, by_losses = LOSS_OP.unpack(packed)
    assert LOSS_OP.unpack(packed)[0] is spec
    assert tuple(a.name for a in torch.ops.sigsoftmax.loss.default._schema.arguments) == LOSS_OP.fields
    signature = packing.TracedSignature(operands, wanted, autocast)
    again = LOSS_OP.pack(spec, operands, signature, spec.backend, by_losses)
    for name, before, after in zip(LOSS_OP.fields, packed, again, strict=True):
        assert before is after or before == after, name


@pytest.mark.parametrize("kind", ["logits", "mixture"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_log_probs_and_its_backward_keep_the_contract_of_an_op(kind: str, dtype: torch.dtype, transposed: bool) -> None:
    is_mixture = kind == "mixture"
    shape = (N, K, D) if is_mixture else (N, V)
    input = torch.randn(*reversed(shape)).permute(*reversed(range(len(shape)))) if transposed else torch.randn(*shape)
    prior_logits = torch.randn(K, N).t() if transposed else torch.randn(N, K)
    weight = (torch.randn(D, V).t() if transposed else torch.randn(V, D)).to(dtype).requires_grad_()
    member, arguments = member_of(sigsoftmax.OutputFunction("gss", k=2.0, c=torch.randn(V, requires_grad=True)))
    prior = member_of("softmax")[0] if is_mixture else None
    spec = log_probs_spec(member=member, prior=prior, floor=1e-3 if is_mixture else 0.0, chunk_bytes=100)
    operands = Operands(
        input.to(dtype).requires_grad_(),
        weight if is_mixture else None,
        torch.randn(V).to(dtype).requires_grad_() if is_mixture else None,
        prior_logits.detach().requires_grad_() if is_mixture else None,
        arguments=arguments,
    )
    wanted = Wanted.of([t is not None for t in operands.differentiable], len(arguments))
    signature = packing.TracedSignature(operands, wanted, None)
    packed = LOG_PROBS_OP.pack(spec, operands, signature, "blocked")
    results = torch.library.opcheck(torch.ops.sigsoftmax.log_probs.default, packed)
    assert set(results.values()) == {"SUCCESS"}
    detached = Operands.from_flat([None if t is None else t.detach() for t in operands.flat], len(arguments))
    packed = LOG_PROBS_OP.pack(spec, detached, signature, "blocked", torch.randn(N, V).to(dtype))
    results = torch.library.opcheck(torch.ops.sigsoftmax.log_probs.default, packed)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_target", [False, True])
@pytest.mark.parametrize("is_mixture", [False, True])
def test_token_statistics_and_their_backward_keep_the_contract_of_an_op(
    is_mixture: bool, has_target: bool, dtype: torch.dtype
) -> None:
    member, arguments = member_of(sigsoftmax.OutputFunction("gss", k=2.0, c=torch.randn(V, requires_grad=True)))
    prior = member_of("softmax")[0] if is_mixture else None
    spec = statistics_spec(member=member, prior=prior, entropy=True, topk=2, temperature=0.8, chunk_bytes=100)
    operands = Operands(
        leaf(N, K, D, dtype=dtype) if is_mixture else leaf(N, D, dtype=dtype),
        leaf(V, D, dtype=dtype),
        leaf(V, dtype=dtype),
        leaf(N, K, dtype=torch.float32) if is_mixture else None,
        TARGET if has_target else None,
        arguments=arguments,
    )
    wanted = Wanted.of([t is not None for t in operands.differentiable], len(arguments))
    signature = packing.TracedSignature(operands, wanted, None)
    packed = STATISTICS_OP.pack(spec, operands, signature, "blocked")
    assert STATISTICS_OP.unpack(packed)[0] == STATISTICS_OP.unpack(packed)[0]
    op = torch.ops.sigsoftmax.token_statistics.default
    assert set(torch.library.opcheck(op, packed).values()) == {"SUCCESS"}
    detached = Operands.from_flat([None if t is None else t.detach() for t in operands.flat], len(arguments))
    columns = has_target + 1 + (K if is_mixture else 1) + 2
    packed = STATISTICS_OP.pack(spec, detached, signature, "blocked", torch.randn(N, columns))
    assert set(torch.library.opcheck(op, packed).values()) == {"SUCCESS"}


# Autocast and mixed dtypes


@every_backend
@every_loss
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_multiplies_in_bfloat16_and_keeps_the_rest_in_float32(
    operation: Operation, reduction: str, backend: str
) -> None:
    inputs = four_inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = operation(*inputs, function="sigsoftmax", reduction=reduction, backend=backend)
    assert loss.dtype == torch.float32
    found = gradients(loss, inputs)
    assert all(g.dtype == torch.float32 for g in found)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    truth = operation(*exact, function="sigsoftmax", reduction=reduction, backend="reference")
    # The error of bfloat16 logits, and more than that of float32 ones.
    assert_same(loss, truth, tolerance=0.05)
    assert float((loss.detach().double() - truth.detach()).abs().max()) > 1e-6
    for a, e in zip(found, gradients(truth, exact), strict=True):
        assert float((a.double() - e).norm()) <= 0.05 * float(e.norm())


@every_backend
def test_autocast_leaves_float64_alone(backend: str) -> None:
    inputs = four_inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss = mixture_loss(*inputs, function="sigsoftmax", backend=backend)
    assert loss.dtype == torch.float64
    assert_same(loss, mixture_loss(*inputs, function="sigsoftmax", backend="reference"), tolerance=1e-12)


@every_backend
@pytest.mark.parametrize("operation", [linear_loss, mixture_loss], ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_input_in_bfloat16_weight_in_float32(operation: Operation, reduction: str, backend: str) -> None:
    """Products in the input's dtype; every input gets a gradient of its own."""
    hidden, weight, bias, prior = four_inputs(torch.float32)
    hidden = hidden.detach().bfloat16().requires_grad_()
    inputs = [hidden, weight, bias, prior]
    loss = operation(*inputs, function="sigsoftmax", reduction=reduction, backend=backend)
    assert loss.dtype == torch.bfloat16
    found = gradients(loss, inputs)
    assert [g.dtype for g in found] == [t.dtype for t in inputs]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    truth = operation(*exact, function="sigsoftmax", reduction=reduction, backend="reference")
    for a, e in zip(found, gradients(truth, exact, by=None), strict=True):
        assert float((a.double() - e).norm()) <= 0.05 * float(e.norm())


@every_backend
def test_mixture_log_probs_in_mixed_dtypes(backend: str) -> None:
    hidden, weight, bias, prior = four_inputs(torch.float32)
    hidden = hidden.detach().bfloat16().requires_grad_()
    inputs = [hidden, weight, bias, prior]
    log_p = mixture_log_probs(*inputs, function="sigsoftmax", backend=backend)
    assert log_p.dtype == torch.bfloat16
    assert [g.dtype for g in gradients(log_p, inputs)] == [t.dtype for t in inputs]
    exact = [t.detach().double() for t in inputs]
    assert_same(log_p, mixture_log_probs(*exact, function="sigsoftmax", backend="reference"), tolerance=0.06)


WAYS = ("auto", "fast", "buffered", "exact")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weight_gradients_over_many_chunks(dtype: torch.dtype, way: str) -> None:
    """Over 64 chunks, in the error of one product; sums in the weight's own low precision have a price."""
    tokens, classes, features, chunks = 512, 24, 8, 64
    hidden = torch.randn(tokens, features).to(dtype)
    weight = torch.randn(classes, features).to(dtype).requires_grad_()
    target = torch.randint(classes, (tokens,))
    exact = weight.detach().double().requires_grad_()
    truth = gradients(F.cross_entropy(hidden.double() @ exact.t(), target, reduction="sum"), [exact])[0]
    plain = gradients(F.cross_entropy(hidden @ weight.t(), target, reduction="sum"), [weight])[0]
    loss = sigsoftmax.linear_cross_entropy(
        hidden,
        weight,
        target,
        function="softmax",
        reduction="sum",
        chunk_bytes=tokens // chunks * classes * dtype.itemsize,
        weight_gradient=way,
        backend="blocked",
    )
    (actual,) = gradients(loss, [weight])
    assert actual.dtype == dtype
    price = ((chunks + 1) / 2) ** 0.5 if way == "fast" and dtype != torch.float32 else 1.0
    bound = 1.5 * price * frobenius_error(plain, truth) + 0.5 * torch.finfo(dtype).eps * float(truth.norm())
    assert frobenius_error(actual, truth) <= bound


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("operation", [linear_loss, mixture_loss], ids=lambda operation: operation.__name__)
@every_reduction
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ways_of_summing_weight_gradients_agree(
    operation: Operation, way: str, reduction: str, smoothing: float
) -> None:
    """For low precision, where they differ, every gradient is near float64's; the other gradients are as before."""
    inputs = four_inputs(torch.bfloat16)
    values = by_label["shifted(b per class)"].learned(V, torch.float32)
    function = by_label["shifted(b per class)"].make(V, **values)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "function": function}
    leaves = [*inputs, *values.values()]
    loss = operation(*inputs, weight_gradient=way, chunk_bytes=2 * K * V * 2, backend="blocked", **options)
    found = gradients(loss, leaves)
    usual = gradients(operation(*inputs, chunk_bytes=2**20, backend="blocked", **options), leaves)
    for a, e in zip(found, usual, strict=True):
        assert a.dtype == e.dtype
        assert float((a.double() - e.double()).norm()) <= 0.03 * float(e.double().norm())
    wide = [t.detach().float().requires_grad_() for t in inputs]
    in_float32 = [
        gradients(operation(*wide, weight_gradient=w, chunk_bytes=100, backend="blocked", **options), wide)
        for w in (way, "auto")
    ]
    assert all(torch.equal(a, e) for a, e in zip(*in_float32, strict=True)), "float32 weights are summed in place"


def test_the_table_covers_every_backend_pair() -> None:
    """Both backends agree in float32 to rounding, member by member and operation by operation."""
    inputs = four_inputs(torch.float32)
    for member, operation in itertools.product(MEMBERS, LOSSES):
        found = [operation(*inputs, function=member.make(V), backend=backend) for backend in BACKENDS]
        assert_same(found[0], found[1], f"{member}, {operation.__name__}", tolerance=3e-6)
