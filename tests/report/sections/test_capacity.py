"""Capacity curves: at equal width, at equal numbers per context, and what they say."""

import dataclasses

import pytest
from tests.report import synthetic_runs
from tests.report.sections.making import drawn, section_of

from sigsoftmax.records.schemas.capacity import CapacityResult
from sigsoftmax.report.sections import capacity


def test_capacity_at_equal_width_and_at_equal_numbers(tmp_path):
    made = section_of(capacity, synthetic_runs.capacities(), tmp_path)
    width, numbers, ranks = made.figures
    mos = next(t for t in width.traces if t.keys == ("head:mos(K=4)",)).data
    assert mos["x"] == [2, 4, 8, 16, 32, 64]
    assert next(t for t in numbers.traces if t.keys == ("head:mos(K=4)",)).data["x"] == [11, 19, 35, 67, 131, 259]
    assert "the higher rank did not lower it" in made.findings[0]
    (choice,) = ranks.choices
    assert choice.selected == "width:8"
    assert len(drawn(ranks, choice.selected)) == 7


def test_curves_are_fits_and_limits_stand_apart(tmp_path):
    """A minimum that is carried over from softmax would put sigsoftmax at or below it by construction."""
    results = [r for r in synthetic_runs.capacities() if r.width == 8 and r.head in ("softmax", "sigsoftmax")]
    softmax = next(r for r in results if r.head == "softmax")
    results = [
        dataclasses.replace(r, kl=softmax.fitted_kl, fitted_kl=1.1 * softmax.fitted_kl) if r.head == "sigsoftmax" else r
        for r in results
    ]
    made = section_of(capacity, results, tmp_path)
    trace = next(t for t in made.figures[0].traces if t.keys == ("head:sigsoftmax",)).data
    assert trace["y"] == pytest.approx([1.1 * softmax.fitted_kl], rel=1e-6)
    assert "in the limit at most" in trace["text"][0]
    assert "10.0% more" in made.findings[0]


def test_a_higher_rank_is_set_apart_from_a_loss_only_if_the_data_show_it(tmp_path):
    def capacities(kl_of_moss: float) -> list[CapacityResult]:
        results = [
            r for r in synthetic_runs.capacities() if r.width == 8 and r.head in ("mos(K=4)", "moss(K=4)", "softmax")
        ]
        return [
            dataclasses.replace(r, rank=200, fitted_kl=kl_of_moss if r.head == "moss(K=4)" else 0.1)
            if "K" in r.head
            else r
            for r in results
        ]

    said = "A higher rank does not by itself lower the loss"
    assert any(said in text for text in section_of(capacity, capacities(0.3), tmp_path).findings)
    assert not any(said in text for text in section_of(capacity, capacities(0.101), tmp_path).findings)


def test_mixtures_are_compared_at_equal_numbers_per_context(tmp_path):
    def counted(kl: float) -> str:
        """The summary for a mixture of so much KL, where softmax of as many numbers per context has 0.1."""
        found = {r.width: r for r in synthetic_runs.capacities() if r.head == "softmax"}
        softmax = [dataclasses.replace(found[w], fitted_kl=known) for w, known in ((2, 0.4), (8, 0.1), (64, 0.0))]
        mixture = dataclasses.replace(found[2], head="mos(K=4)", numbers_per_context=8, fitted_kl=kl)
        return section_of(capacity, [*softmax, mixture], tmp_path).figures[1].summary

    assert "less KL than softmax in 1 of 1 fits and more in 0" in counted(0.09)
    assert "less KL than softmax in 0 of 1 fits and more in 0" in counted(0.1005)
    assert "less KL than softmax in 0 of 1 fits and more in 1" in counted(0.12)
    assert "less KL than softmax in 1 of 1 fits" in counted(0.0)
