"""Statistics of seeds, against SciPy."""

import math

import pytest

from sigsoftmax.report.statistics import Gap, Sample, perplexity, seeds_to_resolve, student_quantile


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


def test_a_gap_has_welchs_interval():
    stats = pytest.importorskip("scipy.stats")
    first, second = [57.0, 58.0, 56.4, 57.7], [55.0, 55.3, 55.1]
    gap = Gap(Sample.of(first), Sample.of(second))
    expected = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    assert gap.size - gap.half_interval == pytest.approx(expected.low)
    assert gap.size + gap.half_interval == pytest.approx(expected.high)
    assert gap.is_resolved is True
    assert Gap(Sample.of(first), Sample.of([57.0, 57.5])).is_resolved is False


def test_one_seed_tells_nothing():
    gap = Gap(Sample.of([57.0]), Sample.of([56.0, 56.1]))
    assert gap.size == pytest.approx(0.95)
    assert gap.standard_error is gap.half_interval is gap.is_resolved is gap.seeds_needed() is None


def test_seeds_needed_give_the_power_they_promise():
    stats = pytest.importorskip("scipy.stats")
    # The paper's finetuned test perplexities on Penn Treebank, and after dynamic evaluation.
    for gap, first, second in ((0.4, 0.6, 0.4), (1.3, 0.5, 0.4), (0.05, 0.3, 0.3)):
        seeds = seeds_to_resolve(gap, first, second)

        def quantiles(n: int) -> float:
            return stats.t.ppf(0.975, 2 * n - 2) + stats.t.ppf(0.8, 2 * n - 2)

        assert gap >= quantiles(seeds) * math.hypot(first, second) / math.sqrt(seeds)
        assert seeds == 2 or gap < quantiles(seeds - 1) * math.hypot(first, second) / math.sqrt(seeds - 1)
    assert (
        seeds_to_resolve(0.0, 1.0, 1.0) is seeds_to_resolve(1e-6, 1.0, 1.0) is seeds_to_resolve(math.nan, 1, 1) is None
    )
    assert seeds_to_resolve(1.0, 0.0, 0.0) == 2
