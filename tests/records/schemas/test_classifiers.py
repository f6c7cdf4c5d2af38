"""Results of classifiers survive a file, empty bins and lost attempts included."""

from tests.records import samples

from sigsoftmax.records import Record, append, read
from sigsoftmax.records.schemas.classifiers import Attempt, Calibration, ClassifierResult, ConfidenceBin


def test_a_result_is_read_as_it_was_written(tmp_path):
    bins = (
        ConfidenceBin(low=0.0, high=0.5, count=0, confidence=None, accuracy=None),
        ConfidenceBin(low=0.5, high=1.0, count=7, confidence=0.9, accuracy=6 / 7),
    )
    written = samples.classifier(
        attempts=(
            Attempt(learning_rate=0.1, valid_loss=0.4, best_epoch=5),
            Attempt(learning_rate=10.0, valid_loss=None, best_epoch=0),
        ),
        calibration=Calibration(expected_error=0.04, brier=0.2, bins=bins),
        learned={"k": 0.7},
    )
    append(tmp_path / "records.jsonl", Record.of(written))
    (record,) = read(tmp_path / "records.jsonl")
    assert record.payload_as(ClassifierResult) == written
