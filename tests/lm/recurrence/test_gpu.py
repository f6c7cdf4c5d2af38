"""Tests that need a Hopper GPU: numbers, repetition, weight drop, odd values, failures, graphs, streams."""

import pytest
import torch
from tests.lm.recurrence.layers import plan_id, recipe_plans
from tests.lm.runs import small_recipe, small_trainer

from sigsoftmax.lm.model.recurrent import LstmStack
from sigsoftmax.lm.model.regularization import WeightDrop
from sigsoftmax.lm.recurrence import LayerKernels, persistent_lstm, plan_layer, selection
from sigsoftmax.lm.recurrence.compilation import compile_together
from sigsoftmax.lm.recurrence.loading import describe_gpu
from sigsoftmax.lm.training.capture import RepeatedCalls
from sigsoftmax.lm.training.precision import arithmetic
from sigsoftmax.lm.training.trainer import Diverged

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

CUDA = torch.device("cuda", 0)
DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float32}
NAMES = (
    "output",
    "hidden",
    "cell",
    "input",
    "first hidden",
    "first cell",
    "weight_ih",
    "weight_hh",
    "bias_ih",
    "bias_hh",
)


@pytest.fixture(autouse=True)
def _tf32():
    with arithmetic("tf32", CUDA):
        yield


@pytest.fixture(scope="module", autouse=True)
def _compiled(request):
    """The plans of all tests that this process runs, at once, on all cores."""
    parameters = (getattr(item, "callspec", None) for item in request.session.items)
    plans = [parameter.params["plan"] for parameter in parameters if parameter and "plan" in parameter.params]
    compile_together([("layout", plan.forward) for plan in plans])
    compile_together([(kernel.direction, kernel) for plan in plans for kernel in (plan.forward, plan.backward)])


def kernels_for(hidden=400, batch=20, precision="bf16", runs=1):
    return LayerKernels(plan_layer(hidden, batch, precision, describe_gpu(CUDA, runs)), CUDA)


class Problem:
    """A layer and a window, rounded to bf16 so that all precisions start from the same numbers."""

    def __init__(self, hidden, batch, steps=23, inputs=None, seed=0):
        generator = torch.Generator(CUDA).manual_seed(seed)

        def new(*shape, scale=1.0):
            return (torch.randn(shape, device=CUDA, generator=generator) * scale).bfloat16().float()

        inputs = hidden if inputs is None else inputs
        self.x, self.gradient = new(steps, batch, inputs), new(steps, batch, hidden)
        self.hidden, self.cell = new(1, batch, hidden, scale=0.3), new(1, batch, hidden, scale=0.5)
        self.state_gradients = new(1, batch, hidden), new(1, batch, hidden)
        bound = hidden**-0.5
        shapes = ((4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,))
        self.parameters = [new(*shape, scale=bound / 1.7) for shape in shapes]

    def results(self, run, dtype, of_states=True):
        """Outputs and all gradients of ``run(x, hidden, cell, parameters)``."""
        x, hidden, cell = (t.to(dtype, copy=True).requires_grad_() for t in (self.x, self.hidden, self.cell))
        parameters = [p.clone().requires_grad_() for p in self.parameters]
        outputs = run(x, hidden, cell, parameters)
        gradients = [self.gradient, *self.state_gradients] if of_states else [self.gradient]
        torch.autograd.backward(outputs[: len(gradients)], [g.to(dtype) for g in gradients])
        tensors = (*outputs, x.grad, hidden.grad, cell.grad, *(p.grad for p in parameters))
        return dict(zip(NAMES, (t.detach().double() for t in tensors), strict=True))


def by_torch(dtype):
    def run(x, hidden, cell, parameters):
        flat = torch.cat([p.flatten() for p in parameters]).to(dtype)
        parts = flat.split([p.numel() for p in parameters])
        packed = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        return torch._VF.lstm(x, (hidden, cell), packed, True, 1, 0.0, True, False, False)

    return run


def by_kernels(kernels, flag=None, **options):
    flag = torch.zeros(1, dtype=torch.int32, device=CUDA) if flag is None else flag

    def run(x, hidden, cell, parameters):
        outputs = persistent_lstm(kernels, x, hidden, cell, tuple(parameters), error_flag=flag, **options)
        assert int(flag) == 0
        return outputs

    return run


def errors(results, exact):
    return {name: ((results[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact}


@pytest.mark.parametrize("plan", recipe_plans(), ids=plan_id)
def test_every_plan_is_as_exact_as_cudnn_and_repeats_its_bits(plan):
    hidden, batch, precision = plan.forward.hidden, plan.forward.batch, plan.forward.precision
    problem, dtype = Problem(hidden, batch, inputs=70), DTYPES[precision]
    exact = problem.results(by_torch(torch.float64), torch.float64)
    theirs = errors(problem.results(by_torch(torch.bfloat16), torch.bfloat16), exact)
    run = by_kernels(LayerKernels(plan, CUDA))
    ours = problem.results(run, dtype)
    for name, error in errors(ours, exact).items():
        assert error <= 1.5 * theirs[name] * (1.0 if precision == "bf16" else 0.2), name
    again = problem.results(run, dtype)
    for name, tensor in ours.items():
        assert torch.equal(tensor, again[name]), name


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_weight_drop_and_the_mask_of_the_input_are_those_of_torch(precision):
    problem, dtype = Problem(400, 20, inputs=1150), DTYPES[precision]
    kept = torch.rand(1600, 400, device=CUDA) < 0.5
    mask = (torch.rand(1, 20, 1150, device=CUDA) < 0.75) * 1.25  # a scale that bf16 has
    drop = WeightDrop(kept, 2.0)

    def masked(x, hidden, cell, parameters):
        weight_ih, weight_hh, *biases = parameters
        return by_torch(x.dtype)(x * mask.to(x.dtype), hidden, cell, [weight_ih, drop.applied_to(weight_hh), *biases])

    exact = problem.results(masked, torch.float64)
    theirs = errors(problem.results(masked, torch.bfloat16), exact)
    run = by_kernels(kernels_for(precision=precision), input_mask_1BI=mask, kept_4HH=kept, scale=2.0)
    ours = problem.results(run, dtype)
    for name, error in errors(ours, exact).items():
        assert error <= 1.5 * theirs[name], name
    assert (ours["weight_hh"][~kept] == 0.0).all()
    plain = problem.results(by_kernels(kernels_for(precision=precision)), dtype)
    assert errors(plain, exact)["output"] > 10 * errors(ours, exact)["output"]


def test_gradients_of_states_alone_reach_everything():
    problem, kernels = Problem(400, 5), kernels_for(batch=5, precision="tf32")

    for which in range(3):

        def gradients(run, dtype, which=which):
            x = problem.x.to(dtype, copy=True).requires_grad_()
            parameters = [p.clone().requires_grad_() for p in problem.parameters]
            outputs = run(x, problem.hidden.to(dtype), problem.cell.to(dtype), parameters)
            return torch.autograd.grad(outputs[which].double().sin().sum(), [x, *parameters])

        ours = gradients(by_kernels(kernels), torch.float32)
        for mine, exact in zip(ours, gradients(by_torch(torch.float64), torch.float64), strict=True):
            assert ((mine - exact).norm() / exact.norm()).item() < 2e-3


def test_a_window_of_one_column_and_any_number_of_steps_uses_one_binary():
    kernels = kernels_for(1150, 1, "tf32")
    for steps in (1, 2, 5, 70, 131):
        problem = Problem(1150, 1, steps=steps)
        exact = problem.results(by_torch(torch.float64), torch.float64)
        assert max(errors(problem.results(by_kernels(kernels), torch.float32), exact).values()) < 2e-3
    assert kernels.is_loaded(backward=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["input", "hidden", "cell"])
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_values_that_are_not_finite_go_where_they_go_in_torch(precision, where, value):
    problem, dtype = Problem(650, 5, steps=4), DTYPES[precision]
    if where == "input":
        problem.x[1, 2, 7] = value
    else:
        getattr(problem, where)[0, 2, 7] = value
    ours = problem.results(by_kernels(kernels_for(650, 5, precision)), dtype)
    exact = problem.results(by_torch(torch.float32), torch.float32)
    for name in ("output", "hidden", "cell"):
        assert torch.equal(ours[name].isnan(), exact[name].isnan()), name
        assert torch.equal(ours[name].isinf(), exact[name].isinf()), name
    # A column that is finite keeps finite gradients.
    assert ours["input"][:, [0, 1, 3, 4]].isfinite().all()
    for name in ("weight_ih", "weight_hh"):
        assert ours[name].isfinite().all() == exact[name].isfinite().all(), name


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_grid_that_waits_in_vain_ends_with_the_flag_and_nan(direction, monkeypatch):
    """One thread block less than the others wait for: as if it had died."""
    kernels, problem = kernels_for(400, 20), Problem(400, 20)
    flag = torch.zeros(1, dtype=torch.int32, device=CUDA)
    kernels.load(backward=True)
    name = f"lstm_{direction}"
    whole = kernels._loaded[name]
    missing = 1 if direction == "forward" else 4
    monkeypatch.setitem(kernels._loaded, name, lambda grid, *a, **k: whole(grid - missing, *a, **k))

    def run(x, hidden, cell, parameters):
        return persistent_lstm(kernels, x, hidden, cell, tuple(parameters), error_flag=flag, patience_ns=5_000_000)

    results = problem.results(run, torch.bfloat16)
    assert int(flag) == (1 if direction == "forward" else 2)
    assert results["output" if direction == "forward" else "weight_hh"].isnan().any()
    # The flag stays: what comes after does not wait, and is NaN too.
    monkeypatch.undo()
    assert problem.results(run, torch.bfloat16)["output"].isnan().all()
    flag.zero_()
    assert problem.results(run, torch.bfloat16)["output"].isfinite().all()


def test_a_captured_graph_replays_with_new_inputs():
    kernels, problem = kernels_for(400, 20), Problem(400, 20)
    x = problem.x.bfloat16().requires_grad_()
    states = problem.hidden.bfloat16(), problem.cell.bfloat16()
    parameters = tuple(p.clone().requires_grad_() for p in problem.parameters)
    flag = torch.zeros(1, dtype=torch.int32, device=CUDA)

    def step():
        output, *_ = persistent_lstm(kernels, x, *states, parameters, error_flag=flag)
        return output, *torch.autograd.grad(output, [x, *parameters], problem.gradient.bfloat16())

    captured = []
    calls = RepeatedCalls(CUDA)
    with torch.cuda.stream(torch.cuda.Stream()):
        for seed in range(4):
            with torch.no_grad():
                x.copy_(Problem(400, 20, seed=seed).x)
            # The first call is plain, the second is captured and replayed, the others are replayed.
            calls("window", lambda: captured.__setitem__(slice(None), step()))
            for ours, plain in zip(captured, step(), strict=True):
                assert torch.equal(ours, plain)


def test_what_is_not_loaded_is_not_loaded_while_a_graph_is_captured():
    kernels, problem = kernels_for(401, 3), Problem(401, 3)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run the layer once before"), torch.cuda.graph(graph):
        problem.results(by_kernels(kernels), torch.bfloat16)


@pytest.mark.parametrize("runs", [1, 2])
def test_streams_at_once_give_the_bits_of_one_after_the_other(runs):
    kernels = kernels_for(1150, 20, runs=runs)
    problems = [Problem(1150, 20, steps=70, seed=seed) for seed in range(3)]
    flag = torch.zeros(1, dtype=torch.int32, device=CUDA)

    def forward(problem):
        inputs = (t.bfloat16() for t in (problem.x, problem.hidden, problem.cell))
        return persistent_lstm(kernels, *inputs, tuple(problem.parameters), error_flag=flag)[0]

    expected = [forward(problem) for problem in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    found = []
    for _ in range(20):
        found.clear()
        for problem, stream in zip(problems, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(forward(problem))
    torch.cuda.synchronize()
    assert int(flag) == 0
    for ours, other in zip(found, expected, strict=True):
        assert torch.equal(ours, other)


def test_a_stack_runs_on_the_kernels_and_says_so(monkeypatch):
    stack = LstmStack(40, (96, 64)).to(CUDA)
    for layer in stack.in_order():
        layer.initialise(torch.Generator(CUDA).manual_seed(1))
    x = torch.randn(9, 6, 40, device=CUDA)
    masks = [(torch.rand(1, 6, 96, device=CUDA) < 0.5) * 2.0]
    drops = [WeightDrop(torch.rand(4 * h, h, device=CUDA) < 0.5, 2.0) for h in (96, 64)]

    def outputs():
        states = stack.zero_state(6, torch.float32)
        return stack(x, states, hidden_masks=masks, weight_masks=drops)[0].double()

    ours = outputs()
    assert len(stack.recurrence.plans_in_use()) == 2
    monkeypatch.setenv(selection.SWITCH, "torch")
    plain = outputs()
    assert 0.0 < ((ours - plain).norm() / plain.norm()).item() < 1e-3


def test_a_failure_ends_the_run_and_leaves_the_weights_alone(tmp_path):
    trainer = small_trainer(tmp_path, recipe=small_recipe(epochs=2), device="cuda", precision="bf16")
    assert "persistent kernels" in trainer.advance().note
    for _ in range(3):
        trainer.advance()
    torch.cuda.synchronize()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.model.stack.recurrence.error_flag(CUDA).fill_(1)
    with pytest.raises(Diverged, match=r"are NaN, after update.*Kept: nothing.*SIGSOFTMAX_RECURRENCE=torch"):
        trainer.run()
    for old, new in zip(before, trainer.model.parameters(), strict=True):
        assert torch.equal(old, new)
    assert not (tmp_path / "last.safetensors").exists()
