"""The sentences about an audit follow the numbers of its record."""

import dataclasses
import math

from tests.report.findings.test_audits import FULL, LAYER, heads, target

from sigsoftmax._version import install_extra
from sigsoftmax.records.schemas.audits import HeadAtWidth
from sigsoftmax.report.findings.audit_meaning import meaning
from sigsoftmax.report.findings.audits import audit_text


def said(**changes) -> str:
    return "\n".join(meaning(dataclasses.replace(FULL, **changes)))


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
    assert "8 of the 50 tokens asked about (16.0%) can never be ranked first" in said()
    none = dataclasses.replace(FULL.argmax, no=0, undecided=0, never=())
    assert "Every token asked about can be ranked first" in said(argmax=none)
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
