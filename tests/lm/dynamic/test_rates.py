"""The two scalings of the rates, each from the other."""

import pytest

from sigsoftmax.lm.dynamic.rates import Rates
from sigsoftmax.lm.dynamic.windows import window_count

PTB_WINDOWS = window_count(929_589 // 100, 5)
WT2_WINDOWS = window_count(2_088_628 // 100, 5)


def sum_form(rates, *, windows, tensors):
    """The inverse of ``Rates.from_sum_form``."""
    root = windows**0.5
    return {
        "learning_rate": rates.learning_rate * root,
        "decay": rates.decay * tensors,
        "epsilon": rates.epsilon * root,
    }


def test_the_published_values_of_mixtures():
    ptb = Rates.from_sum_form(0.002, 0.075, 0.001, windows=PTB_WINDOWS, tensors=17)
    assert (ptb.learning_rate, ptb.decay, ptb.epsilon) == pytest.approx((4.64e-5, 4.41e-3, 2.32e-5), rel=2e-3)
    wt2 = Rates.from_sum_form(0.002, 0.02, 0.002, windows=WT2_WINDOWS, tensors=17)
    assert (wt2.learning_rate, wt2.decay, wt2.epsilon) == pytest.approx((3.09e-5, 1.18e-3, 3.09e-5), rel=3e-3)


def test_there_and_back():
    given = {"learning_rate": 0.002, "decay": 0.075, "epsilon": 0.001}
    back = sum_form(Rates.from_sum_form(**given, windows=7, tensors=3), windows=7, tensors=3)
    assert back == pytest.approx(given)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rate": -1e-5, "decay": 0.0}, "learning_rate must be a number of at least 0, got -1e-05"),
        ({"learning_rate": float("nan"), "decay": 0.0}, "learning_rate must be"),
        ({"learning_rate": 0.0, "decay": -1.0}, "decay must be a number of at least 0, got -1.0"),
        ({"learning_rate": 0.0, "decay": float("inf")}, "decay must be"),
        ({"learning_rate": 0.0, "decay": 0.0, "epsilon": 0.0}, "epsilon must be a positive number, got 0.0"),
    ],
)
def test_rates_that_make_no_sense(values, message):
    with pytest.raises(ValueError, match=message):
        Rates(**values)


@pytest.mark.parametrize(("windows", "tensors"), [(0, 3), (3, 0), (-1, -1)])
def test_scaling_by_nothing(windows, tensors):
    with pytest.raises(ValueError, match=f"at least 1, got {windows} and {tensors}"):
        Rates.from_sum_form(1.0, 1.0, 1.0, windows=windows, tensors=tensors)
