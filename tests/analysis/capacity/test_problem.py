"""The fit's own mathematics: its gradient, its agreement with the reference backend, its optimiser."""

import pytest
import torch

from sigsoftmax.analysis.capacity import problem as fitting
from sigsoftmax.analysis.capacity.distributions import Distributions
from sigsoftmax.analysis.capacity.lbfgs import Budget, minimise
from sigsoftmax.analysis.capacity.problem import Problem
from sigsoftmax.analysis.capacity.starts import random_start
from sigsoftmax.contract import normalizing
from sigsoftmax.contract.rows import Logarithms
from sigsoftmax.family import register_function
from sigsoftmax.family.heads import Head
from sigsoftmax.synthetic import Language

LANGUAGE = Language.of_rank(contexts=9, words=7, rank=5, seed=1)
HEADS = (
    "softmax",
    "softmax(alpha=1.5)",
    "softmax(alpha=learned:1.5)",
    "sigsoftmax",
    "shifted_sigsoftmax(b=per_class:0.5)",
    "shifted_sigsoftmax(b=learned:0.5)",
    "sigmoid",
    "relu(eps=0.1)",
    "gss(k=0)",
    "gss(k=learned:0.5, c=per_class)",
    "softcap(c=3)",
    "mos(K=3)",
    "moss(K=3)",
    "mixture(gss(k=learned:0.2), K=2)",
)


def problem_at_random(text: str) -> tuple[Problem, torch.Tensor]:
    problem = Problem(Distributions.of_language(LANGUAGE, "stationary"), Head.parse(text), 3)
    return problem, random_start(problem, torch.Generator().manual_seed(0))


def loss_by_autograd(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    return (
        LANGUAGE.stationary_N[:, None] * LANGUAGE.log_p_NV.exp() * (LANGUAGE.log_p_NV - problem.log_output(x))
    ).sum()


@pytest.mark.parametrize("text", HEADS)
@pytest.mark.parametrize("block", [1, 40, 10_000])
def test_value_and_gradient_against_autograd_of_the_reference(text, block, monkeypatch):
    monkeypatch.setattr(fitting, "BLOCK", block)
    problem, x = problem_at_random(text)
    x = x + 0.1 * torch.randn_like(x)
    leaf = x.clone().requires_grad_()
    expected = loss_by_autograd(problem, leaf)
    (gradient,) = torch.autograd.grad(expected, leaf)
    value, found = problem.evaluate(x)
    assert value == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-14)
    assert problem.kl(problem.log_output(x)) == pytest.approx(LANGUAGE.kl(problem.log_output(x)), rel=1e-12)


def test_a_function_of_the_users_own_is_fitted():
    register_function("cube", lambda z, a: z + a * z**3 / 3, parameters={"a": 1.0})
    problem, x = problem_at_random("cube(a=learned)")
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_by_autograd(problem, leaf), leaf)
    torch.testing.assert_close(problem.evaluate(x)[1], gradient, rtol=1e-9, atol=1e-14)


def test_log_output_of_a_mixture_is_the_references():
    problem, x = problem_at_random("moss(K=3)")
    parts = problem.views(x)
    z_NKV = (parts.h_Rd @ parts.output_Ve[:, :-1].T + parts.output_Ve[:, -1]).view(9, 3, 7)
    function = problem.function_at(x)
    expected = normalizing.mixture_log_probs(
        z_NKV, Logarithms(torch.log_softmax(parts.prior_NK, -1)), function.form, function.arguments(7)
    )
    assert torch.equal(problem.log_output(x), expected)


@pytest.mark.parametrize("text", HEADS)
def test_the_preconditioner_is_symmetric_and_positive(text):
    problem, x = problem_at_random(text)
    apply = problem.preconditioner_at(x)
    one, other = torch.randn(2, problem.size, dtype=torch.float64)
    assert float(one @ apply(other)) == pytest.approx(float(other @ apply(one)), rel=1e-9)
    assert float(one @ apply(one)) > 0.0


def test_minimise_finds_the_bottom_of_a_narrow_valley():
    """Rosenbrock's function in four dimensions; its minimum 0 is at (1, 1, 1, 1)."""
    evaluated = []

    def rosenbrock(x):
        evaluated.append(x)
        leaf = x.clone().requires_grad_()
        value = (100.0 * (leaf[1:] - leaf[:-1] ** 2) ** 2 + (1.0 - leaf[:-1]) ** 2).sum()
        (gradient,) = torch.autograd.grad(value, leaf)
        return value.item(), gradient

    start = torch.tensor([-1.2, 1.0, -0.5, 2.0], dtype=torch.float64)
    budget = Budget(iterations=300, tolerance=0.0, floor=1e-20)
    found = minimise(rosenbrock, start, lambda _: torch.Tensor.clone, budget)
    torch.testing.assert_close(found.x, torch.ones(4, dtype=torch.float64), atol=1e-8, rtol=0)
    assert len(evaluated) < 2 * found.iterations


def test_minimise_turns_back_from_infinity_and_nan():
    def barrier(x):
        value = float(x[0] - x[0].log()) - 1.0 if x[0] > 0 else float("nan")
        return value, 1.0 - 1.0 / x

    found = minimise(barrier, torch.tensor([30.0]).double(), lambda _: torch.Tensor.clone, Budget(floor=1e-14))
    assert float(found.x) == pytest.approx(1.0, abs=1e-5)


def test_every_step_lowers_the_loss():
    problem, x = problem_at_random("gss(k=0)")
    values = [
        minimise(problem.evaluate, x, problem.preconditioner_at, Budget(iterations=n, tolerance=0.0)).value
        for n in range(0, 60, 10)
    ]
    assert values == sorted(values, reverse=True)


def test_bad_budgets_and_widths():
    with pytest.raises(ValueError, match=r"a budget needs iterations >= 0"):
        Budget(iterations=-1)
    with pytest.raises(ValueError, match=r"width must be a positive integer, got 0"):
        Problem(Distributions.of_language(LANGUAGE), Head.parse("softmax"), 0)
