"""The step of dynamic evaluation against its formula, for several models at once."""

import pytest
import torch

from sigsoftmax.lm.dynamic.adaptation import Adapted, Factors, TokenSum, adapt_

RATES = [(0.1, 0.5, 1.0, 1e-2), (0.2, 3.0, 1.0, 1e-2), (0.0, 2.0, 0.25, 1e-1)]
"""learning rate, decay / gbar, the bound of the pull, epsilon"""


def test_a_step_is_the_formula():
    generator = torch.Generator().manual_seed(0)
    start, rms, weights = (
        torch.rand(shape, dtype=torch.float64, generator=generator) for shape in [(6, 4)] * 2 + [(3, 6, 4)]
    )
    dense = torch.randn(3, 6, 4, dtype=torch.float64, generator=generator)
    left, right = (torch.randn(3, 2, n, dtype=torch.float64, generator=generator) for n in (6, 4))
    for gradient, g in ((dense, dense), (Factors(left, right), left.mT @ right)):
        moved = weights.clone()
        adapt_([Adapted(moved, start, rms)], [gradient], torch.tensor(RATES, dtype=torch.float64))
        for model, (learning_rate, decay, most, epsilon) in enumerate(RATES):
            pull = (decay * rms).clamp(max=most)
            theta = weights[model]
            expected = theta + pull * (start - theta) - learning_rate * g[model] / (rms + epsilon)
            torch.testing.assert_close(moved[model], expected)


def test_a_pull_of_one_ends_at_the_start_exactly():
    start, rms = torch.randn(50), torch.ones(50)
    weights = torch.randn(1, 50)
    adapt_([Adapted(weights, start, rms)], [torch.zeros(1, 50)], torch.tensor([[1.0, 7.0, 1.0, 1e-3]]))
    assert torch.equal(weights[0], start)


@pytest.mark.parametrize("shape", [(), (5,), (4, 3)])
def test_parameters_of_any_shape(shape):
    weights, start, rms, gradient = (
        torch.randn(2, *shape),
        torch.randn(shape),
        torch.rand(shape),
        torch.randn(2, *shape),
    )
    moved = weights.clone()
    adapt_([Adapted(moved, start, rms)], [gradient], torch.tensor([[0.5, 0.0, 1.0, 1.0]] * 2))
    torch.testing.assert_close(moved, weights - 0.5 * gradient / (rms + 1.0))


def test_the_gradient_of_a_vector_is_a_sum_over_tokens():
    weights, start, rms, of_tokens = torch.randn(2, 6), torch.randn(6), torch.rand(6), torch.randn(2, 3, 6)
    rates = torch.tensor(RATES[:2])
    moved, expected = weights.clone(), weights.clone()
    adapt_([Adapted(moved, start, rms)], [TokenSum(of_tokens)], rates)
    adapt_([Adapted(expected, start, rms)], [of_tokens.sum(1)], rates)
    torch.testing.assert_close(moved, expected)
