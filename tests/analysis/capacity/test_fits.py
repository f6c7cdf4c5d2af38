"""Capacity: containment, the rank of the truth as the width that suffices, and results that can be recorded."""

import dataclasses
import math

import pytest
import torch

from sigsoftmax.analysis.capacity.curves import CapacityConfig, capacity_curves, contained_pairs, planned_fits
from sigsoftmax.analysis.capacity.distributions import Distributions
from sigsoftmax.analysis.capacity.fits import fit
from sigsoftmax.analysis.capacity.lbfgs import Budget
from sigsoftmax.analysis.capacity.problem import Problem
from sigsoftmax.analysis.capacity.starts import Solution, contains, disturbed, embedded, linear_end, random_start
from sigsoftmax.family import OutputFunction, register_function
from sigsoftmax.family.heads import Head
from sigsoftmax.records import Record
from sigsoftmax.records.schemas.capacity import CapacityResult
from sigsoftmax.synthetic import Language

RANK = 9
LANGUAGE = Language.of_rank(contexts=40, words=20, rank=RANK, seed=0)
TRUTH = Distributions.of_language(LANGUAGE)
HEADS = ("softmax", "sigsoftmax", "shifted_sigsoftmax(b=per_class)", "sigmoid", "gss(k=0)", "mos(K=3)", "moss(K=3)")
WIDTHS = (1, 2, 4, RANK - 1)
CONFIG = CapacityConfig(heads=HEADS, widths=WIDTHS, random_starts=1, budget=Budget(iterations=80, floor=1e-6))


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, int], CapacityResult]:
    return {(r.head, r.width): r for r in capacity_curves(TRUTH, CONFIG)}


def test_every_head_at_every_width(results):
    assert set(results) == {(str(Head.parse(head)), width) for head in HEADS for width in WIDTHS}


@pytest.mark.parametrize(
    ("larger", "smaller"),
    [
        ("sigsoftmax", "softmax"),
        ("shifted_sigsoftmax(b=per_class)", "sigsoftmax"),
        ("sigmoid", "softmax"),
        ("gss(k=0.0)", "softmax"),
        ("mos(K=3)", "softmax"),
        ("moss(K=3)", "mos(K=3)"),
        ("moss(K=3)", "sigsoftmax"),
    ],
)
def test_containment(results, larger, smaller):
    for width in WIDTHS:
        assert results[larger, width].kl <= results[smaller, width].kl + 1e-9


def test_wider_is_never_worse(results):
    for head in {head for head, _ in results}:
        curve = [results[head, width].kl for width in WIDTHS]
        assert curve == sorted(curve, reverse=True)


def test_softmax_reaches_the_truth_where_its_rank_does(results):
    assert results["softmax", RANK - 1].kl <= 1e-6
    assert results["softmax", 4].kl > 0.05
    # One column less than the rank needs, however long the fit is.
    tight, _ = fit(TRUTH, Head.parse("softmax"), RANK - 2, budget=Budget(iterations=500))
    assert tight.kl > 1e-3


def test_ranks(results):
    for width in (1, 2, 4):
        assert results["softmax", width].rank == results["softmax", width].rank_bound == width + 2
        assert results["mos(K=3)", width].rank_bound == 20
    assert results["gss(k=0.0)", 4].rank > 6


def test_rank_is_not_nats(results):
    """sigsoftmax exceeds the rank bound of softmax and stays within three per cent of its KL."""
    softmax, sigsoftmax = results["softmax", 4], results["sigsoftmax", 4]
    assert sigsoftmax.rank > softmax.rank
    assert sigsoftmax.kl > 0.97 * softmax.kl
    assert results["mos(K=3)", 4].kl < 0.5 * softmax.kl


def test_figures_of_a_result(results):
    result = results["moss(K=3)", 2]
    ends = [start.kl for start in result.starts if start.iterations]
    assert len(ends) >= 2
    assert result.spread == pytest.approx(max(ends) - min(ends))
    assert result.kl <= result.fitted_kl == pytest.approx(min(ends))
    assert {start.name for start in result.starts} >= {"mos(K=3), exactly", "from mos(K=3)", "random 0"}


def test_containment_is_asserted_over_all_pairs(results):
    pairs = {
        ((larger.head, larger.width), (smaller.head, smaller.width))
        for larger, smaller in contained_pairs(list(results.values()))
    }
    assert (("moss(K=3)", 4), ("mos(K=3)", 4)) in pairs
    assert (("softmax", 4), ("softmax", 1)) in pairs
    assert (("softmax", 4), ("sigsoftmax", 4)) not in pairs
    worse = dataclasses.replace(results["moss(K=3)", 4], kl=results["mos(K=3)", 4].kl + 0.1)
    with pytest.raises(RuntimeError, match=r"moss\(K=3\) of width 4 contains .* of width 4, but its KL is"):
        contained_pairs([worse, results["mos(K=3)", 4]])


def test_at_least_so_many_starts():
    for head in ("softmax", "gss(k=0)", "relu"):
        result, fitted = fit(TRUTH, Head.parse(head), 2, random_starts=0, least_starts=3, budget=Budget(iterations=3))
        assert sum(start.iterations > 0 for start in result.starts) == 3
        wider, _ = fit(
            TRUTH,
            Head.parse(head),
            3,
            warm=[fitted],
            random_starts=0,
            least_starts=3,
            budget=Budget(iterations=3),
        )
        assert sum(start.iterations > 0 for start in wider.starts) == 3
        assert any(start.name == "from width 2" for start in wider.starts)


def test_a_learned_parameter_starts_from_every_fixed_one():
    config = CapacityConfig(
        heads=("gss(k=0)", "gss(k=0.5)", "gss(k=learned)"), widths=(2,), budget=Budget(iterations=20)
    )
    found = {result.head: result for result in capacity_curves(TRUTH, config)}
    names = {start.name for start in found["gss(k=learned)"].starts}
    assert names >= {"gss(k=0.0), exactly", "from gss(k=0.0)", "gss(k=0.5), exactly", "from gss(k=0.5)"}
    assert found["gss(k=learned)"].kl <= found["gss(k=0.0)"].kl


def test_given_distributions_are_fitted_as_a_language_is():
    config = CapacityConfig(heads=("sigsoftmax",), widths=(2,), budget=Budget(iterations=10))
    of_language = capacity_curves(TRUTH, config)
    of_matrix = capacity_curves(Distributions.given(LANGUAGE.log_p_NV), config)
    assert [r.kl for r in of_matrix] == pytest.approx([r.kl for r in of_language])
    assert {r.language for r in of_matrix} == {"given distributions"}


def test_planned_fits_are_those_that_are_done():
    config = CapacityConfig(heads=("moss(K=2)",), widths=(1, 2), softmax_widths=(3,), budget=Budget(iterations=1))
    done = [(result.head, result.width) for result in capacity_curves(TRUTH, config)]
    assert list(planned_fits(config)) == done


def test_results_are_records(results):
    for result in results.values():
        record = Record.from_json(Record.of(result).to_json())
        assert record.payload_as(CapacityResult) == result


@pytest.mark.thorough
def test_the_result_depends_on_neither_workers_nor_repetition():
    config = CapacityConfig(heads=("moss(K=2)",), widths=(1, 2), budget=Budget(iterations=15))
    one, two = (capacity_curves(TRUTH, CapacityConfig(**{**vars(config), "workers": workers})) for workers in (1, 2))
    assert [(r.head, r.width, r.kl) for r in one] == [(r.head, r.width, r.kl) for r in two]
    assert {r.head for r in one} == {"softmax", "sigsoftmax", "mos(K=2)", "moss(K=2)"}


def test_weights_choose_what_is_judged():
    """A context that never counts is free to be wrong."""
    weights_N = torch.zeros(40, dtype=torch.float64)
    weights_N[:3] = 1.0 / 3.0
    truth = Distributions(log_p_NV=LANGUAGE.log_p_NV, weights_N=weights_N, description="")
    result, _ = fit(truth, Head.parse("softmax"), 2)
    assert result.kl < 1e-4


def test_threads_are_put_back_and_interrupts_pass():
    threads = torch.get_num_threads()

    def interrupt(result, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capacity_curves(TRUTH, CONFIG, progress=interrupt)
    assert torch.get_num_threads() == threads


def test_functions_of_the_users_own_are_fitted_here_whatever_workers_says():
    register_function("cube", lambda z: z + z**3 / 3)
    config = CapacityConfig(heads=("cube",), widths=(1,), budget=Budget(iterations=3), workers=2)
    assert [r.head for r in capacity_curves(TRUTH, config)] == ["softmax", "cube"]


def solution_of(text: str, width: int, seed: int = 0) -> Solution:
    problem = Problem(TRUTH, Head.parse(text), width)
    x = random_start(problem, torch.Generator().manual_seed(seed))
    return Solution(problem, x, problem.evaluate(x)[0])


@pytest.mark.parametrize(
    ("larger", "smaller"),
    [
        ("sigsoftmax", "softmax"),
        ("sigsoftmax", "softmax(alpha=1.5)"),
        ("sigmoid", "softmax"),
        ("gss(k=0.2)", "softmax"),
        ("gss(k=2)", "sigsoftmax"),
        ("shifted_sigsoftmax(b=per_class)", "sigsoftmax"),
        ("shifted_sigsoftmax(b=per_class:3)", "softmax"),
        ("shifted_sigsoftmax(b=-100)", "softmax"),
        ("shifted_sigsoftmax(b=100)", "softmax"),
        ("gss(k=0.2, c=100)", "softmax(alpha=1.5)"),
        ("gss(k=learned:0.5)", "gss(k=0.5)"),
        ("gss(k=learned:0.5)", "gss(k=0)"),
        ("gss(k=learned, c=per_class)", "gss(k=0.2, c=1)"),
        ("shifted_sigsoftmax(b=per_class)", "shifted_sigsoftmax(b=3)"),
        ("mixture(gss(k=learned), K=2)", "gss(k=0.2)"),
        ("relu", "relu"),
        ("mos(K=3)", "softmax"),
        ("mixture(sigmoid, K=2)", "mos(K=2)"),
        ("moss(K=2)", "softmax"),
    ],
)
def test_a_contained_solution_is_carried_over_exactly(larger, smaller):
    assert contains(Head.parse(larger), Head.parse(smaller))
    source = solution_of(smaller, 3)
    target = Problem(TRUTH, Head.parse(larger), 5)
    x = embedded(source, target)
    torch.testing.assert_close(target.log_output(x), source.problem.log_output(source.x), rtol=0, atol=1e-10)
    start = disturbed(source, target, torch.Generator().manual_seed(0))
    assert not torch.equal(start, x)
    assert math.isfinite(target.evaluate(start)[0])


@pytest.mark.parametrize(
    ("larger", "smaller"),
    [
        ("softmax", "sigsoftmax"),
        ("relu", "softmax"),
        ("softcap", "softmax"),
        ("mos(K=4)", "mos(K=2)"),
        ("gss(k=learned, c=1)", "gss(k=0.2)"),
        ("gss(k=0.2)", "gss(k=learned)"),
    ],
)
def test_what_is_not_contained(larger, smaller):
    assert not contains(Head.parse(larger), Head.parse(smaller))


def test_where_phi_becomes_a_line():
    assert linear_end(OutputFunction("sigsoftmax")) == (1.0, 1.0, 0.0)
    assert linear_end(OutputFunction("sigmoid")) == (-1.0, 1.0, 0.0)
    assert linear_end(OutputFunction("softmax", alpha=1.5)) == (1.0, 1.5, 0.0)
    assert linear_end(OutputFunction("softmax", alpha=torch.tensor(-0.5))) is None
    assert linear_end(OutputFunction("gss", k=torch.tensor(-0.5), c=torch.tensor(90.0))) == (1.0, 1.0, 90.0)
    assert linear_end(OutputFunction("relu")) is None
    assert linear_end(OutputFunction("softcap")) is None


def test_where_a_phi_of_the_users_own_becomes_a_line():
    register_function("flat_right", lambda z: 3.0 * torch.nn.functional.logsigmoid(z))
    assert linear_end(OutputFunction("flat_right")) == (-1.0, 3.0, 0.0)
    register_function("never", torch.asinh)
    assert linear_end(OutputFunction("never")) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"widths": ()}, r"widths must be at least one positive number, got \(\)"),
        ({"widths": (0,)}, r"widths must be at least one positive number"),
        ({"workers": 0}, r"workers must be a positive integer, got 0"),
        ({"random_starts": -1}, r"must not be negative"),
        ({"least_starts": -1}, r"must not be negative"),
        ({"heads": ()}, r"expected at least one head"),
        ({"heads": ("sofmax",)}, r"unknown output function 'sofmax'"),
    ],
)
def test_bad_configurations(wrong, message):
    with pytest.raises(ValueError, match=message):
        CapacityConfig(**wrong)
