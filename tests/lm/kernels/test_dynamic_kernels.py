"""Layers of few tokens and the step of dynamic evaluation by kernels; ``test_interpreted`` runs this without a GPU."""

import pytest
import torch
from tests.backends.triton.device import DEVICE
from tests.lm.dynamic.test_evaluation import CONFIG, RATES, TEXT, TRAIN, build
from tests.lm.kernels.plain import plain

from sigsoftmax.lm.dynamic.adaptation import Adapted, Factors, TokenSum, adapt_
from sigsoftmax.lm.dynamic.adapting_models import kernels_serve
from sigsoftmax.lm.dynamic.evaluation import DynamicEvaluator, GradientStatistics
from sigsoftmax.lm.dynamic.few_tokens import linear, linear_input_gradient, lstm, lstm_gate_gradients
from sigsoftmax.lm.dynamic.rates import Rates

RATES_P4 = [(0.1, 0.5, 1.0, 1e-2), (0.2, 3.0, 1.0, 1e-2), (0.0, 2.0, 0.25, 1e-1)]


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def layer_of(models, tokens, inputs, width):
    shapes = {
        "input": (tokens, inputs),
        "weight_ih": (4 * width, inputs),
        "bias_ih": (4 * width,),
        "bias_hh": (4 * width,),
        "weight_hh": (4 * width, width),
        "hidden": (width,),
        "cell": (width,),
        "gradient": (3, tokens, width),
    }
    scales = {"weight_ih": 0.3, "weight_hh": 0.3}
    return {
        name: scales.get(name, 1.0) * random(models, *shape, seed=seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def run_layer(layer):
    gates = linear(layer["input"], layer["weight_ih"], layer["bias_ih"], layer["bias_hh"])
    steps = lstm(gates, layer["weight_hh"], layer["hidden"], layer["cell"])
    of_gates = lstm_gate_gradients(layer["gradient"], layer["weight_hh"], steps)
    return [gates, steps.gates_PTG, of_gates, linear_input_gradient(of_gates, layer["weight_ih"]).sum(dim=1)], steps


@pytest.mark.parametrize(
    ("models", "tokens", "inputs", "width"),
    [(1, 5, 300, 30), (3, 5, 20, 24), (2, 1, 7, 5), pytest.param(2, 4, 270, 70, marks=pytest.mark.thorough)],
)
def test_layers_are_those_of_plain_torch_and_one_model_is_as_many(models, tokens, inputs, width):
    layer = layer_of(models, tokens, inputs, width)
    found, steps = run_layer(layer)
    expected, expected_steps = run_layer({name: tensor.double() for name, tensor in layer.items()})
    for ours, theirs in zip([*found, *steps], [*expected, *expected_steps], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
    for p in range(models):
        alone, _ = run_layer({name: tensor[p : p + 1] for name, tensor in layer.items()})
        assert all(torch.equal(ours[p], own[0]) for ours, own in zip(found, alone, strict=True))


def test_rows_may_be_longer_than_they_count():
    layer = layer_of(2, 5, 7, 21)
    expected, expected_steps = run_layer(layer)
    for name in ("weight_ih", "weight_hh"):
        stored = torch.zeros(2, 84, 32, device=DEVICE)
        layer[name] = stored[..., : layer[name].shape[2]].copy_(layer[name])
    found, steps = run_layer(layer)
    for ours, theirs in zip([*found, *steps], [*expected, *expected_steps], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("models", [1, 3])
def test_the_step_is_that_of_plain_torch(models):
    shapes = [(33, 70), (5, 64), (100, 7), (9,), (), (1,), (2000,), (40, 20)]
    parameters = [
        Adapted(random(models, *shape, seed=index), random(*shape, seed=10 + index), random(*shape, seed=20).abs())
        for index, shape in enumerate(shapes)
    ]
    # The steps of a layer come first in its hidden states.
    gradients = [
        Factors(random(models, tokens, shape[0], seed=30), random(tokens, models, shape[1], seed=31).transpose(0, 1))
        for tokens, shape in zip((5, 1, 10), shapes, strict=False)
    ] + [random(models, *shape, seed=40) for shape in shapes[3:]]
    gradients[6] = TokenSum(random(models, 4, 2000, seed=41))
    rates = torch.tensor(RATES_P4[:models], device=DEVICE)
    expected = [Adapted(weights.clone(), start, rms) for weights, start, rms in parameters]
    adapt_(parameters, gradients, rates)
    plain(adapt_)(expected, gradients, rates)
    for ours, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["shifted_sigsoftmax", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("softmax", "moss"))]
)
def test_an_evaluation_is_that_of_plain_torch(name):
    model = build(name).to(DEVICE)
    several = [RATES, Rates(learning_rate=1e-2, decay=0.5, epsilon=1e-4)]
    statistics = plain(GradientStatistics.of)(model, TRAIN[:44], CONFIG)

    @plain
    def by_autograd(rates):
        evaluator = DynamicEvaluator(model, statistics, TEXT[:18])
        assert len(list(evaluator.launch(rates))) == 4
        return evaluator.results()

    expected = [result for rates in several for result in by_autograd(rates)]
    assert kernels_serve(model, CONFIG.window)
    evaluator = DynamicEvaluator(model, statistics, TEXT[:18], at_once=2)
    for _ in evaluator.launch(*several):
        pass
    for ours, theirs in zip(evaluator.results(), expected, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert (ours.rates, ours.tokens, ours.complete) == (theirs.rates, theirs.tokens, theirs.complete)
