"""Audits as records: what is written is what is read, with every part and with none."""

import dataclasses
import math

import pytest

from sigsoftmax.records import Record
from sigsoftmax.records.schemas.audits import (
    ArgmaxCounts,
    Audit,
    Bend,
    GradientShare,
    HeadAtWidth,
    LayerDescription,
    ShareOnLine,
    TargetResult,
    Truncation,
    TruncationPoint,
)
from sigsoftmax.records.schemas.spectra import RankBounds, Spectrum

LAYER = LayerDescription(
    words=100, width=8, has_bias=True, components=1, head="sigsoftmax", scale=1.0, how_known="stated", dtype="float32"
)
EMPTY = Audit(source="a test", layer=LAYER, contexts=0, contexts_from="")
FULL = dataclasses.replace(
    EMPTY,
    contexts=30,
    contexts_from="a text",
    bounds=RankBounds(
        source="x",
        head="sigsoftmax",
        width=8,
        words=100,
        contexts=30,
        lower=20,
        upper=30,
        upper_reason="the smaller side of the matrix",
        rule="press32",
        norm_bound=1.0,
        norm_contexts=30,
        threshold_bound=0.1,
        counting_threshold=0.1,
        block_contexts=30,
        block_words=50,
        block_singular_values=(3.0, 2.0),
        seed=0,
        seconds=1.0,
    ),
    spectrum=Spectrum(source="x", words=100, contexts=30, singular_values=(3.0, 2.0, 0.0)),
    truncation=Truncation(contexts=30, words=100, points=(TruncationPoint(width=0, kl=1.0, bound=1.0),)),
    bend=Bend(
        contexts=30,
        lines=(ShareOnLine(name="left", slope=2.0, logits=0.2, probability=0.1),),
        logits_in_bend=0.8,
        probability_in_bend=0.9,
        lowest_logit=-3.0,
        highest_logit=4.0,
        nearest_slope=1.2,
        kl_to_nearest_softmax=0.01,
    ),
    gradient=GradientShare(
        contexts=30,
        next_words="of the text",
        mean=math.nan,
        median=0.9,
        low=0.8,
        high=0.95,
        of_a_random_direction=0.92,
        rank_of_weight=8,
    ),
    argmax=ArgmaxCounts(
        words=100,
        in_question=50,
        yes=40,
        no=8,
        undecided=2,
        yes_seen=10,
        yes_by_steps=25,
        yes_by_program=5,
        never=(3, 9),
        has_solver=True,
        seconds=1.0,
    ),
    target=TargetResult(
        target="a language",
        contexts=30,
        words=50,
        all_words=100,
        mass=0.9,
        is_lower_bound=True,
        model_kl=None,
        heads=(HeadAtWidth(head="softmax", width=8, kl=0.1, spread=0.01, softmax_width=math.inf),),
        seconds=1.0,
    ),
    notes=("one", "two"),
    was_interrupted=True,
    seconds=12.0,
)


@pytest.mark.parametrize("audit", [EMPTY, FULL], ids=["empty", "full"])
def test_what_is_written_is_read(audit):
    read = Record.from_json(Record.of(audit).to_json()).payload_as(Audit)
    # NaN is not equal to itself.
    assert repr(read) == repr(audit)
    assert Record.of(audit).kind == "audit"


def test_a_part_of_another_shape_is_refused_by_its_name():
    record = Record.of(FULL)
    payload = {**record.payload, "argmax": {**record.payload["argmax"], "yes": "many"}}
    with pytest.raises(ValueError, match=r"payload.argmax.yes must be int, got 'many'"):
        dataclasses.replace(record, payload=payload).payload_as(Audit)
