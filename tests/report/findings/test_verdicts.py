"""Verdicts: the answer goes as far as the records do, and each thing that bounds it has a sentence."""

import math

import pytest
from tests.report.findings.test_rankings import THREE, TWO, by_loss, ranked, ranking

from sigsoftmax.report.findings.verdicts import verdict

CLEAR = {
    "softmax": (0.400, 0.451, 0.349),
    "softmax(alpha=1.5)": (0.391, 0.440, 0.341),
    "sigsoftmax": (0.395, 0.446, 0.344),
    "mos(K=4)": (0.200, 0.250, 0.150),
}
"""MoS is far below all others in every seed"""


def starting(sentences, beginning):
    (found,) = [text for text in sentences if text.startswith(beginning)]
    return found


def test_a_head_that_is_resolved_from_all_others_is_recommended_with_its_scope_and_price():
    said = verdict(ranking({**CLEAR, "mos(K=4)": ranked("mos(K=4)", CLEAR["mos(K=4)"], seconds={1: 80.0})}))
    assert said[0].startswith(
        "Use MoS(K=4), as far as these records go (a text, 6 epochs, 3 seeds): it has the lowest KL to the truth, "
        "0.2000 nats: 0.2000 nats below softmax (−18.1 % in perplexity, 50.0 % of its KL), interval −0.2"
    )
    assert said[0].endswith("resolved by 3 seeds.")
    assert said[1] == "MoS(K=4) is resolved from each of the other heads."
    assert (
        said[-1]
        == "The price: MoS(K=4) 26,000 parameters and 1 min 20 s a run, against softmax's 26,000 and 1 min 15 s."
    )


@pytest.mark.parametrize(("count", "have"), [(1, "With one seed"), (2, "With 2 seeds")])
def test_below_three_seeds_sizes_come_first_and_nothing_is_recommended(count, have):
    said = verdict(ranking({head: values[:count] for head, values in TWO.items()}))
    assert said[0].startswith("MoS(K=4) has the lowest KL to the truth, 0.2")
    assert "nats below softmax (−1" in said[0]
    assert said[1].startswith(f"{have} nothing can be resolved, so no head is recommended")
    assert "--seeds 1,2,3" in said[1]
    text = " ".join(said)
    assert "Use " not in text
    assert "Keep " not in text
    assert "interval" not in text


def test_softmax_is_kept_where_nothing_is_resolved_to_be_better():
    said = verdict(ranking({"softmax": (0.40, 0.45, 0.35), "sigsoftmax": (0.42, 0.40, 0.35)}))
    assert said[0].startswith(
        "Keep softmax, as far as these records go (a text, 6 epochs, 3 seeds): no head is resolved to be better"
    )
    assert "sigsoftmax has the lowest KL to the truth, 0.3900 nats: 0.0100 nats below softmax" in said[0]
    assert "not resolved by 3 seeds" in said[0]
    assert said[1] == "sigsoftmax is the best by its mean, but the seeds do not tell it apart from softmax."
    assert not any(text.startswith("The price") for text in said)


def test_the_chance_of_many_comparisons_is_counted():
    """A gap that one comparison would call resolved is not when it is the best of six."""
    pair = {"softmax": (0.400, 0.450, 0.350), "sigsoftmax": (0.380, 0.434, 0.324)}
    assert verdict(ranking(pair))[0].startswith("Use sigsoftmax rather than softmax, as far as")
    others = {f"gss(k={k})": (0.5, 0.6, 0.4) for k in range(5)}
    assert verdict(ranking({**pair, **others}))[0].startswith("Keep softmax")


def test_heads_that_cannot_be_told_apart_are_both_named():
    said = verdict(ranking({**THREE, "moss(K=4)": (0.202, 0.247, 0.153)}))
    assert said[0].startswith("Use MoS(K=4) or MoSS(K=4) rather than softmax, as far as these records go")
    assert said[1] == "MoS(K=4) is the best by its mean, but the seeds do not tell it apart from MoSS(K=4)."
    assert starting(said, "The price").count("26,000 parameters") == 2


def test_the_best_may_be_softmax():
    said = verdict(ranking({"softmax": (0.3, 0.35, 0.25), "relu": (0.5, 0.55, 0.45)}))
    assert said[0].startswith("Keep softmax")
    assert "softmax has the lowest KL to the truth, 0.3000 nats: 0.2000 nats below ReLU" in said[0]


def test_without_softmax_the_others_are_compared_and_that_is_said():
    said = verdict(ranking({"sigsoftmax": (0.40, 0.45, 0.35), "mos(K=4)": (0.2, 0.25, 0.15)}))
    assert said[0].startswith("Use MoS(K=4)")
    assert said[0].endswith("resolved by 3 seeds. softmax was not trained.")
    said = verdict(ranking({"sigsoftmax": (0.40, 0.45, 0.35), "mos(K=4)": (0.41, 0.43, 0.35)}))
    assert said[0].startswith("Use MoS(K=4) or sigsoftmax")
    assert "the seeds do not tell them apart; softmax was not trained" in said[0]


def test_the_control_for_scale_is_named_and_compared():
    text = starting(verdict(ranking(CLEAR)), "The control for scale")
    assert "softmax(alpha=1.5) is 0.0093 nats below softmax" in text
    assert "MoS(K=4) is 0.1907 nats below softmax(alpha=1.5)" in text
    assert "sigsoftmax is 0.0043 nats above softmax(alpha=1.5)" in text


def test_the_want_of_a_control_for_scale_is_said():
    assert starting(verdict(ranking(THREE)), "No control for scale is on record, as softmax(alpha=1.5)")
    only_scales = verdict(ranking({"softmax": (0.4, 0.4, 0.4), "softmax(alpha=2)": (0.3, 0.3, 0.3)}))
    assert not any("control" in text for text in only_scales)


def test_runs_of_different_lengths_are_said_to_be():
    levels = {**CLEAR, "mos(K=4)": ranked("mos(K=4)", CLEAR["mos(K=4)"], epochs=12)}
    assert starting(verdict(ranking(levels)), "The runs are of different lengths, 6 to 12 epochs")
    levels["mos(K=4)"] = ranked("mos(K=4)", CLEAR["mos(K=4)"], epochs=None)
    levels["mos(K=4)"].epochs.clear()
    assert starting(verdict(ranking(levels)), "How long some of these runs were is not on record")
    assert not any("length" in text for text in verdict(ranking(CLEAR)))


def test_too_few_common_seeds_are_no_tie():
    said = verdict(ranking({**THREE, "gss(k=0)": {1: 0.19}, "gss(k=0.2)": {7: 0.3}}))
    assert "for " in starting(said, "gss(k=0) is the best by its mean")
    assert "too few seeds in common" in starting(said, "gss(k=0) is the best by its mean")
    none = verdict(ranking({"softmax": {1: 0.4}, "sigsoftmax": {2: 0.3}}))
    assert none[0].endswith("no seed is common to it and softmax.")
    assert none[1].startswith("Without a seed that two heads share nothing can be resolved")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_said_and_not_compared(value):
    said = verdict(ranking({**THREE, "relu": (value, 0.5, 0.5)}))
    assert starting(said, "ReLU came to no finite number in some run and stands last.")
    assert "nan" not in " ".join(said).lower().replace("finite", "")
    assert verdict(ranking({"softmax": (value, 0.4), "relu": (value, 0.5)}))[0] == (
        "These records speak for no head: none has a finite KL to the truth."
    )
    lost = verdict(ranking({"softmax": (value, 0.4, 0.4), "sigsoftmax": (0.3, 0.3, 0.3)}))
    assert "softmax came to no finite number" in lost[0]


def test_without_a_truth_the_loss_is_what_counts():
    said = verdict(by_loss({"softmax": (4.4,), "mos(K=4)": (4.3,)}))
    assert (
        said[0] == "MoS(K=4) has the lowest test loss, 4.3000 nats: 0.1000 nats below softmax (−9.5 % in perplexity)."
    )


def test_one_head_is_no_choice():
    assert verdict(ranking({"softmax": (0.4, 0.4, 0.4)})) == [
        "Only softmax was trained under this budget, so there is nothing to choose between."
    ]
