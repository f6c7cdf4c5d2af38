"""The report in plain words follows the numbers of the record."""

import dataclasses
import math

import pytest
from tests.records import samples
from tests.records.schemas.test_audits import EMPTY

from sigsoftmax.records.schemas.audits import HeadAtWidth, ShareOnLine
from sigsoftmax.report.findings.audits import audit_text

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
        "Vocabulary: 100 tokens; width: 8; with a class bias; weights in float32.",
        "Output function: sigsoftmax (stated).",
        "Contexts: 30, from a text.",
        "rank between 20 and 30",
        "Effective rank",
        "cut down to a rank",
        "On the left line (slope 2): 20.0% of the logits, 10.0% of the probability",
        "no gradient was left to look at",
        "Of 50 drawn at random of the 100 tokens, 40 can (proved by a hidden vector), 8 never can, 2 undecided.",
        "Never: 3, 9.",
        "More time (--argmax-seconds) settles more.",
        "Against a language, in 30 contexts and 50 of 100 tokens.",
        "they have 90.0% of the probability",
        "  - one\n  - two",
    ):
        assert part in " ".join(text.split("\n    ")), part
    assert max(len(line) for line in text.splitlines()) <= 130


def test_an_empty_audit_says_what_is_missing():
    text = audit_text(EMPTY)
    assert "cannot be known from the model alone" in " ".join(text.split())
    assert "Rank:" not in text


@pytest.mark.parametrize(("width", "text"), [(0.0, "d < 8"), (math.inf, "d > 16"), (11.26, "d = 11.3")])
def test_softmax_widths_outside_the_curve(width, text):
    shown = [dataclasses.replace(head, softmax_width=width) for head in heads(0.4, 0.3)]
    assert text in audit_text(dataclasses.replace(FULL, target=target(heads=tuple(shown))))
