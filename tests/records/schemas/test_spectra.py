"""Ranks that a spectrum counts and refuses, and records of the first version."""

import json
import math

import numpy as np
import pytest
from tests.records import samples

from sigsoftmax.records import Record
from sigsoftmax.records.schemas.spectra import RULES, BelowNoiseFloor, Spectrum


def made(**changes):
    fields = {"source": "made", "words": 4, "contexts": 9, "singular_values": (8.0, 4.0, 1e-3, 1e-9)}
    return Spectrum(**{**fields, **changes})


def test_thresholds_are_those_of_the_paper_and_of_numpy():
    found = made(words=10_000, contexts=82_430)
    relative = {name: found.threshold(name) / found.largest for name in RULES}
    assert relative == pytest.approx(
        {"press32": 1.81e-5, "numpy32": 9.8e-3, "numpy64": 1.8e-11, "press64": 3.4e-14}, rel=0.02
    )
    assert made().threshold("numpy64") == 9 * 8.0 * np.finfo(np.float64).eps
    with pytest.raises(ValueError, match="unknown rule 'press' for a rank; the known ones are press32"):
        made().threshold("press")


def test_counts_are_refused_below_the_floor():
    found = made(value_error=1e-7)
    assert found.noise_floor == 2e-7
    assert found.rank(2e-7) == found.count("noise").rank == 3
    with pytest.raises(BelowNoiseFloor, match=r"threshold 1e-07 would count noise: the noise floor .* 2e-07"):
        found.rank(1e-7)
    assert {count.rule: count.rank for count in found.ranks()} == {
        "press32": 3, "numpy32": 3, "numpy64": None, "press64": None, "noise": 3,
    }  # fmt: skip


def test_what_lies_near_a_threshold_is_uncertain():
    found = made(squared_error=1e-6)
    threshold = found.threshold("press32")
    assert threshold < found.noise_floor
    near = made(singular_values=(8.0, 1.001 * threshold, 0.999 * threshold), value_error=0.01 * threshold)
    count = near.count("press32")
    assert (count.rank, count.at_least, count.at_most) == (2, 1, 3)
    assert count.text == "2 (1 to 3)"
    squared = made(singular_values=(8.0, 1.001 * threshold, 0.999 * threshold), squared_error=0.01 * threshold**2)
    assert squared.count("press32")[2:] == (2, 1, 3)


def test_the_remedy_fits_the_cause():
    with pytest.raises(BelowNoiseFloor, match="method='exact'"):
        made(method="gram", squared_error=1e-12).rank(1e-7)
    with pytest.raises(BelowNoiseFloor, match="more precision"):
        made(method="gram", squared_error=1e-20, value_error=1.0).rank(1e-7)


def test_stable_and_effective_rank():
    assert made(singular_values=(2.0, 2.0, 1.0)).stable_rank == 2.25
    assert made(singular_values=(3.0, 3.0, 3.0)).effective_rank == pytest.approx(3.0)
    p = np.array([0.75, 0.25])
    expected = math.exp(-(p * np.log(p)).sum())
    assert made(singular_values=(3.0, 1.0)).effective_rank == pytest.approx(expected)
    # Noise has no part in it.
    assert made(singular_values=(3.0, 1.0, 0.5), value_error=0.4).effective_rank == pytest.approx(expected)


def test_a_record_of_version_1_is_read():
    line = json.loads(Record.of(made()).to_json())
    line["version"] = 1
    line["payload"] = {key: line["payload"][key] for key in ("source", "words", "contexts", "singular_values")}
    read = Record.from_json(json.dumps(line)).payload_as(Spectrum)
    assert read == made()
    assert (read.noise_floor, read.press32_rank, read.method) == (0.0, 3, "svd")


def test_records_come_back_as_they_went():
    spectrum = made(row_sum_error=1e-7, contexts_expected=12, seconds=1.0, precision="float32")
    for payload in (samples.rank_bounds(), spectrum):
        assert Record.from_json(Record.of(payload).to_json()).payload_as(type(payload)) == payload


@pytest.mark.parametrize(
    "values", [(1.0, math.inf), (1.0, math.nan), (1.0, 2.0), (1.0, -0.5), (1.7e308, 1.7e308), (math.inf, 1.0), ()]
)
def test_singular_values_that_are_none_are_not_used(values):
    assert not Spectrum(source="", words=3, contexts=3, singular_values=values).is_usable


def test_singular_values_far_below_the_largest_have_no_share():
    spectrum = Spectrum(source="", words=3, contexts=3, singular_values=(1e300, 1e-320))
    assert spectrum.is_usable
    assert spectrum.effective_rank == spectrum.stable_rank == 1.0
