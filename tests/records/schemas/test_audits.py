"""Audits as records: what is written is what is read, with every part and with none."""

import dataclasses
import math

import pytest
from tests.records import samples

from sigsoftmax.records import Record
from sigsoftmax.records.schemas.audits import Audit

EMPTY = Audit(source="a test", layer=samples.audit().layer, contexts=0, contexts_from="")
FULL = samples.audit(
    bounds=samples.rank_bounds(),
    gradient=dataclasses.replace(samples.audit().gradient, mean=math.nan),
    target=dataclasses.replace(samples.audit().target, model_kl=None),
    meaning=("one", "two"),
    was_interrupted=True,
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
