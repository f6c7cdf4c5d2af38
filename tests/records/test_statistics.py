"""Statistics of seeds, against SciPy."""

import math
import random

import pytest

from sigsoftmax.records.statistics import (
    LEAST_SEEDS,
    Gap,
    PairedDifference,
    Sample,
    perplexity,
    seeds_to_resolve,
    student_quantile,
)


def test_perplexity_does_not_overflow():
    assert perplexity(math.log(57.0)) == pytest.approx(57.0)
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_student_quantile():
    stats = pytest.importorskip("scipy.stats")
    for degrees in (0.8, 1, 2, 2.5, 4, 18, 1000):
        for probability in (0.2, 0.5, 0.8, 0.975, 0.999):
            expected = stats.t.ppf(probability, degrees)
            assert student_quantile(probability, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    with pytest.raises(ValueError, match="between 0 and 1"):
        student_quantile(1.0, 3)


def test_sample():
    sample = Sample.of([57.0, 58.0, 56.0])
    assert (sample.mean, sample.deviation, sample.count) == (57.0, 1.0, 3)
    assert sample.standard_error == pytest.approx(1.0 / math.sqrt(3.0))
    assert Sample.of([3.0]) == Sample(3.0, None, 1)
    assert math.isnan(Sample.of([1.0, math.nan]).deviation)
    assert math.isinf(Sample.of([1.0, math.inf]).mean)
    with pytest.raises(ValueError, match="at least one value"):
        Sample.of([])


def test_perplexities_of_runs_that_went_wrong_do_not_overflow():
    """A loss of 500 nats is finite, and so is its perplexity; its square is not."""
    sample = Sample.of([perplexity(500.0), perplexity(501.0)])
    assert sample.deviation == pytest.approx((math.exp(501.0) - math.exp(500.0)) / math.sqrt(2.0))
    assert seeds_to_resolve(1e200, 1e200, 1e200) == seeds_to_resolve(1.0, 1.0, 1.0)
    assert seeds_to_resolve(1e-200, 1e200, 1e200) is None
    assert seeds_to_resolve(1e-200, 0.0, 0.0) == LEAST_SEEDS
    assert seeds_to_resolve(1.0, math.nan, 1.0) is None


def test_a_gap_has_the_standard_error_of_a_difference():
    stats = pytest.importorskip("scipy.stats")
    first, second = [57.0, 58.0, 56.4, 57.7], [55.0, 55.3, 55.1]
    gap = Gap(Sample.of(first), Sample.of(second))
    assert gap.size / gap.standard_error == pytest.approx(stats.ttest_ind(first, second, equal_var=False).statistic)
    single = Gap(Sample.of([57.0]), Sample.of([56.0, 56.1]))
    assert single.size == pytest.approx(0.95)
    assert single.standard_error is single.seeds_needed() is None


@pytest.mark.parametrize("pairs", [3, 5, 30])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
def test_the_interval_is_that_of_a_paired_t_test(pairs, confidence):
    stats = pytest.importorskip("scipy.stats")
    draw = random.Random(pairs)
    one, other = ([draw.gauss(mean, 1.0) for _ in range(pairs)] for mean in (0.1, 0.0))
    found = PairedDifference.of(dict(enumerate(one)), dict(enumerate(other)), confidence)
    test = stats.ttest_rel(one, other)
    expected = test.confidence_interval(confidence)
    assert found.mean == pytest.approx(sum(one) / pairs - sum(other) / pairs, abs=1e-12)
    assert found.interval == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert found.is_resolved == (test.pvalue < 1.0 - confidence)
    assert found.perplexity_change == pytest.approx(math.expm1(found.mean))


def test_pairs_are_of_the_same_seed():
    found = PairedDifference.of({3: 1.0, 1: 2.0, 9: 100.0, 4: 0.0}, {1: 1.5, 2: -50.0, 3: 0.5, 4: -0.5})
    assert set(found.seeds) == {1, 3, 4}
    assert (found.mean, found.sample.deviation) == (0.5, 0.0)
    assert found.is_resolved is True
    assert PairedDifference.of({1: 1.0}, {2: 1.0}) is None


def test_two_pairs_have_no_interval_and_an_infinite_one_resolves_nothing():
    for seeds in (1, 2):
        few = PairedDifference.of(dict.fromkeys(range(seeds), 1.0), dict.fromkeys(range(seeds), 0.5))
        assert (few.mean, few.interval, few.is_resolved) == (0.5, None, None)
    broken = PairedDifference.of({1: math.inf, 2: 1.0, 3: 1.0}, dict.fromkeys((1, 2, 3), 0.0))
    assert broken.is_resolved is None
    assert broken.perplexity_change == math.inf


def test_seeds_needed_give_the_power_they_promise():
    stats = pytest.importorskip("scipy.stats")
    # The paper's finetuned test perplexities on Penn Treebank, and after dynamic evaluation.
    for gap, first, second in ((0.4, 0.6, 0.4), (1.3, 0.5, 0.4), (0.05, 0.3, 0.3)):
        seeds = seeds_to_resolve(gap, first, second)

        def quantiles(n: int) -> float:
            return stats.t.ppf(0.975, 2 * n - 2) + stats.t.ppf(0.8, 2 * n - 2)

        assert gap >= quantiles(seeds) * math.hypot(first, second) / math.sqrt(seeds)
        assert seeds == LEAST_SEEDS or gap < quantiles(seeds - 1) * math.hypot(first, second) / math.sqrt(seeds - 1)
    assert (
        seeds_to_resolve(0.0, 1.0, 1.0) is seeds_to_resolve(1e-6, 1.0, 1.0) is seeds_to_resolve(math.nan, 1, 1) is None
    )
    assert seeds_to_resolve(1.0, 0.0, 0.0) == LEAST_SEEDS
