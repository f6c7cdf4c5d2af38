"""Records of training: what a run cannot be, and what older versions did not write."""

import dataclasses

import pytest
from tests.report.synthetic_runs import identity, training

from sigsoftmax.records import Record
from sigsoftmax.records.schemas.training import DynamicEvaluationRecord


@pytest.mark.parametrize("name", ["recipe", "phase", "head", "corpus"])
def test_a_run_has_names(name):
    with pytest.raises(ValueError, match=f"{name} of a run must be a name, got an empty text"):
        dataclasses.replace(identity("softmax", 1), **{name: ""})


def test_a_dynamic_evaluation_of_version_1_names_no_epoch():
    made = next(one for one in training() if isinstance(one, DynamicEvaluationRecord))
    record = Record.of(dataclasses.replace(made, epoch=7))
    assert record.payload_as(DynamicEvaluationRecord).epoch == 7
    older = {key: value for key, value in record.payload.items() if key != "epoch"}
    assert dataclasses.replace(record, version=1, payload=older).payload_as(DynamicEvaluationRecord).epoch is None
