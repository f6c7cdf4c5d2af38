"""The report in plain words follows the numbers of the record."""

import dataclasses
import math

import pytest
from tests.records import samples
from tests.records.schemas.test_audits import EMPTY

from sigsoftmax._version import install_extra
from sigsoftmax.records.schemas.audits import HeadAtWidth, ShareOnLine
from sigsoftmax.report.audits import audit_text, meaning

SAMPLE = samples.audit()
LAYER = dataclasses.replace(
    SAMPLE.layer, words=100, width=8, has_bias=True, head="sigsoftmax", how_known="stated", dtype="float32"
)
FULL = dataclasses.replace(
    SAMPLE,
    source="a test",
    layer=LAYER,
    contexts=30,
    contexts_from="a text",
    bounds=samples.rank_bounds(head="sigsoftmax", width=8, words=100, contexts=30, lower=20, upper=30),
    bend=dataclasses.replace(
        SAMPLE.bend, lines=(ShareOnLine(name="left", slope=2.0, logits=0.2, probability=0.1),), nearest_slope=1.2
    ),
    gradient=dataclasses.replace(SAMPLE.gradient, mean=math.nan),
    argmax=dataclasses.replace(
        SAMPLE.argmax, words=100, in_question=50, yes=40, no=8, undecided=2, never=(3, 9), has_solver=True
    ),
    target=dataclasses.replace(
        SAMPLE.target, target="a language", contexts=30, words=50, all_words=100, mass=0.9, model_kl=None
    ),
    notes=("one", "two"),
)


def said(**changes) -> str:
    return "\n".join(meaning(dataclasses.replace(FULL, **changes)))


def heads(softmax: float, other: float, spread: float = 0.001) -> tuple[HeadAtWidth, ...]:
    common = {"width": 8, "spread": spread}
    return (
        HeadAtWidth(head="softmax", kl=softmax, softmax_width=8.0, **common),
        HeadAtWidth(head="gss(k=0.0)", kl=other, softmax_width=11.3, **common),
        HeadAtWidth(head="softmax", kl=softmax / 2.0, softmax_width=16.0, width=16, spread=spread),
    )


def target(**changes):
    return dataclasses.replace(FULL.target, **changes)


def test_every_part_has_its_place():
    text = audit_text(FULL)
    for part in (
        "Audit of a test",
        "Words: 100; width: 8; with a class bias; weights in float32.",
        "Output function: sigsoftmax (stated).",
        "Contexts: 30, from a text.",
        "rank between 20 and 30",
        "Effective rank",
        "cut down to a rank",
        "On the left line (slope 2): 20.0% of the logits, 10.0% of the probability",
        "no gradient was left to look at",
        "Of 50 drawn at random of the 100 words, 40 can (proved by a hidden vector), 8 never can, 2 undecided.",
        "Never: 3, 9.",
        "More time (--argmax-seconds) settles more.",
        "Against a language, in 30 contexts and 50 of 100 words.",
        "they have 90.0% of the probability",
        "  - one\n  - two",
    ):
        assert part in " ".join(text.split("\n    ")), part
    assert max(len(line) for line in text.splitlines()) <= 130


def test_an_empty_audit_says_what_is_missing():
    text = audit_text(EMPTY)
    assert "cannot be known from the model alone" in " ".join(text.split())
    assert "Rank:" not in text


def test_no_bottleneck_where_words_are_few():
    few = dataclasses.replace(LAYER, words=9)
    assert "There is no bottleneck" in said(layer=few)
    assert "There is no bottleneck" not in said()


def test_bounds_of_a_softmax_and_of_others():
    softmax = dataclasses.replace(FULL.bounds, head="softmax", lower=10, upper=10)
    assert "a space of 10 dimensions out of 100; the layer uses all of them" in said(bounds=softmax)
    assert "Theory does not bound the rank of sigsoftmax; at least 20 dimensions are in use" in said()


def test_a_collapse_is_called_one():
    assert "sigsoftmax is in use" in said()
    collapsed = dataclasses.replace(FULL.bend, kl_to_nearest_softmax=1e-6, nearest_slope=1.0)
    assert "sigsoftmax has collapsed to softmax" in said(bend=collapsed)
    mixture = dataclasses.replace(LAYER, components=4, head="moss(K=4)")
    assert "in each component" in said(layer=mixture)
    line = dataclasses.replace(FULL.bend, lines=(), logits_in_bend=0.0, kl_to_nearest_softmax=0.0)
    assert "collapsed" not in said(bend=line)


def test_words_that_never_come_first():
    assert "8 of the 50 words asked about (16.0%) can never be ranked first" in said()
    none = dataclasses.replace(FULL.argmax, no=0, undecided=0, never=())
    assert "Every word asked about can be ranked first" in said(argmax=none)
    assert "not all were settled" in said(argmax=dataclasses.replace(none, undecided=3))
    without_scipy = dataclasses.replace(FULL.argmax, has_solver=False)
    assert f"{install_extra('audit')} brings SciPy" in audit_text(dataclasses.replace(FULL, argmax=without_scipy))


def test_without_a_target_the_cost_cannot_be_known():
    assert "cannot be known" in said(target=None)
    assert "--teacher MODEL" in said(target=None)
    assert "cannot be known" not in said()


def test_nats_against_a_target():
    better = said(target=target(heads=heads(0.4, 0.3)))
    assert "misses this target by at least 0.4000 nats" in better
    assert "gss(k=0) does best at width 8 against a language: 0.3000 nats, worth a softmax of d = 11.3" in better
    assert "smaller than the spread" not in better
    assert "smaller than the spread over starts" in said(target=target(heads=heads(0.4, 0.3, spread=0.2)))
    assert "None of the functions tried does better" in said(target=target(heads=heads(0.4, 0.399)))
    assert "costs nothing here" in said(target=target(heads=heads(1e-5, 1e-5)))
    whole = said(target=target(heads=heads(0.4, 0.3), is_lower_bound=False))
    assert "misses this target by 0.4000 nats" in whole


def test_what_the_model_itself_misses():
    softmax = dataclasses.replace(LAYER, head="softmax")
    text = said(layer=softmax, target=target(heads=heads(0.4, 0.3), model_kl=1.0, is_lower_bound=False))
    assert "The model misses it by 1.000 nats. The best that was found for softmax at this width loses 0.4000" in text
    assert "0.6000 or so come from elsewhere" in text


def test_fits_that_were_cut_short():
    only = (HeadAtWidth(head="gss(k=0.0)", width=8, kl=0.3, spread=0.0, softmax_width=math.nan),)
    assert "cut short before softmax was done" in said(target=target(heads=only))


@pytest.mark.parametrize(("width", "text"), [(0.0, "d < 8"), (math.inf, "d > 16"), (11.26, "d = 11.3")])
def test_softmax_widths_outside_the_curve(width, text):
    shown = [dataclasses.replace(head, softmax_width=width) for head in heads(0.4, 0.3)]
    assert text in audit_text(dataclasses.replace(FULL, target=target(heads=tuple(shown))))
