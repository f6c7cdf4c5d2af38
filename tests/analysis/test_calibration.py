"""Calibration against computations by hand, and what it refuses."""

import math

import pytest
import torch

from sigsoftmax.analysis.calibration import BINS, calibration

PROBS = [[0.62, 0.38], [0.68, 0.32], [0.05, 0.95], [0.91, 0.09], [0.5, 0.5]]
TARGET = [0, 1, 1, 1, 0]


def found(bins=10):
    return calibration(torch.tensor(PROBS, dtype=torch.float64).log(), torch.tensor(TARGET), bins=bins)


def test_the_error_is_that_of_a_hand_computation():
    # (0.6, 0.7]: 0.62 right and 0.68 wrong; (0.9, 1.0]: 0.95 right and 0.91 wrong; (0.4, 0.5]: 0.5 right.
    expected = (2 * abs(0.5 - 0.65) + 2 * abs(0.5 - 0.93) + 1 * abs(1.0 - 0.5)) / 5
    assert found().expected_error == pytest.approx(expected)


def test_the_bins_hold_what_falls_into_them():
    filled = {round(b.high, 1): b for b in found().bins if b.count}
    assert {high: b.count for high, b in filled.items()} == {0.5: 1, 0.7: 2, 1.0: 2}
    assert filled[0.7].confidence == pytest.approx(0.65)
    assert filled[0.7].accuracy == pytest.approx(0.5)
    empty = found().bins[0]
    assert (empty.count, empty.confidence, empty.accuracy) == (0, None, None)
    assert sum(b.count for b in found(bins=3).bins) == len(TARGET)


def test_the_brier_score_is_that_of_a_hand_computation():
    squares = [2 * (1 - 0.62) ** 2, 2 * 0.68**2, 2 * 0.05**2, 2 * 0.91**2, 2 * 0.5**2]
    assert found().brier == pytest.approx(sum(squares) / 5)


def test_certainty_is_in_the_last_bin_and_has_no_error_if_it_is_right():
    log_probs = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])
    sure = calibration(log_probs, torch.tensor([0, 1]))
    assert sure.bins[-1].count == 2
    assert len(sure.bins) == BINS
    assert (sure.expected_error, sure.brier) == (0.0, 0.0)
    wrong = calibration(log_probs, torch.tensor([1, 0]))
    assert (wrong.expected_error, wrong.brier) == (1.0, 2.0)


def test_classes_drawn_from_the_probabilities_are_calibrated():
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(2.0 * torch.randn(50_000, 5, generator=generator), -1)
    target = torch.multinomial(probs, 1, generator=generator)[:, 0]
    assert calibration(probs.log(), target).expected_error < 0.01
    overconfident = torch.log_softmax(3.0 * probs.log(), -1)
    assert calibration(overconfident, target).expected_error > 0.1


@pytest.mark.parametrize(
    ("log_probs", "target", "bins", "message"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.long), 10, r"of shape \(examples, classes\), got .* shape \(3,\)"),
        (torch.zeros(3, 1), torch.zeros(2, dtype=torch.long), 10, r"int64 and of shape \(3,\), got .* shape \(2,\)"),
        (torch.zeros(3, 1), torch.zeros(3), 10, "must be int64"),
        (torch.zeros(0, 1), torch.zeros(0, dtype=torch.long), 10, "at least one example"),
        (torch.zeros(2, 1), torch.tensor([0, 1]), 10, r"must lie in 0 .. 0, got 0 .. 1"),
        (torch.zeros(2, 3), torch.tensor([0, 1]), 10, "a row adds up to 3; pass layer.log_probs"),
        (torch.full((2, 3), math.nan), torch.tensor([0, 1]), 10, "a row adds up to nan"),
        (torch.zeros(2, 1), torch.tensor([0, 0]), 0, "positive integer, got 0"),
    ],
)
def test_what_cannot_be_judged_is_refused(log_probs, target, bins, message):
    with pytest.raises(ValueError, match=message):
        calibration(log_probs, target, bins=bins)
