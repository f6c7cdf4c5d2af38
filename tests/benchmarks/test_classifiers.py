"""The study of digit classifiers: equal terms, paired differences by hand, and a page that shows the records."""

import dataclasses
import math
import statistics

import pytest
import torch

pytest.importorskip("sklearn")

import classifiers as study
import classifiers_page as page
from examples import digits_classifier as example
from tests.records import samples

from sigsoftmax.records.schemas.classifiers import Attempt, Calibration, ClassifierResult, ConfidenceBin
from sigsoftmax.records.statistics import student_quantile


def result(head: str, width: int, seed: int, loss: float) -> ClassifierResult:
    bins = (ConfidenceBin(low=0.0, high=1.0, count=36, confidence=0.9, accuracy=0.8),)
    return samples.classifier(
        head=head,
        width=width,
        seed=seed,
        attempts=(Attempt(learning_rate=0.1, valid_loss=None, best_epoch=0),),
        valid_loss=loss,
        test_loss=loss,
        calibration=Calibration(expected_error=0.1, brier=0.3, bins=bins),
    )


def results(losses: dict[str, list[float]]) -> list[ClassifierResult]:
    """Each head at each width, as many seeds as softmax has losses."""
    return [
        result(point.head, point.width, point.seed, losses.get(point.head, losses["softmax"])[point.seed])
        for point in study.points(len(losses["softmax"]))
    ]


# --- equal terms ------------------------------------------------------------------------------------------------------


def test_a_seed_gives_every_head_the_same_first_weights():
    first = {}
    for head in study.HEADS:
        torch.manual_seed(3)
        first[head] = example.Classifier(head, 2).state_dict()
    plain = [head for head in study.HEADS if "mos" not in head]
    for head in study.HEADS:
        shared = first["softmax"].keys() & first[head].keys()
        names = shared if head in plain else {name for name in shared if not name.startswith("head.")}
        assert {name for name in names if name.startswith("body.")} == {
            name for name in first["softmax"] if name.startswith("body.")
        }
        for name in names:
            torch.testing.assert_close(first[head][name], first["softmax"][name], rtol=0, atol=0)


def test_splits_are_disjoint_whole_and_balanced():
    data = example.digits(0)
    splits = (data.train, data.valid, data.test)
    assert [len(split.labels_N) for split in splits] == [1078, 359, 360]
    images = torch.cat([split.images_NP for split in splits])
    assert len(images.unique(dim=0)) == len(images)
    for split in splits:
        shares = split.labels_N.bincount(minlength=10) / len(split.labels_N)
        assert (shares - 0.1).abs().max() < 0.01
    assert not torch.equal(example.digits(1).test.labels_N, data.test.labels_N)
    assert torch.equal(example.digits(0).test.images_NP, data.test.images_NP)


def test_the_best_epoch_is_kept():
    data = example.digits(0)
    fit = example.fitted("sigsoftmax", 2, data, learning_rate=0.03, seed=0, epochs=3)
    with torch.no_grad():
        assert fit.model.loss(data.valid.images_NP, data.valid.labels_N).item() == pytest.approx(fit.valid_loss)
    worse = example.fitted("sigsoftmax", 2, data, learning_rate=0.03, seed=0, epochs=1)
    assert 1 <= fit.best_epoch <= 3
    assert fit.valid_loss < worse.valid_loss
    # A learning rate that ruins the weights leaves the classifier as it was before.
    ruined = example.fitted("softmax", 2, data, learning_rate=1e38, seed=0, epochs=1)
    assert (ruined.valid_loss, ruined.best_epoch) == (math.inf, 0)


@pytest.mark.parametrize("head", ["wide softmax", "tanh gss(k=0)", "mos", "sigsoftmx"])
def test_a_head_that_does_not_exist_is_refused(head):
    with pytest.raises(ValueError, match=r"only a mixture can be|cannot read|unknown output function"):
        example.Classifier(head, 2)


def test_a_study_goes_on_where_it_was_stopped(tmp_path):
    out = tmp_path / "digits.jsonl"
    wanted = [study.Point(head, 2, 0) for head in ("softmax", "moss(K=2)")]
    options = {"processes": 1, "rates": (1e-2, 3e-2), "epochs": 1}
    assert study.train_missing(out, wanted[:1], **options) == 1
    with out.open("a", encoding="utf-8") as file:
        file.write('{"schema": 1, "ki')
    with pytest.warns(UserWarning, match="digits.jsonl"):
        assert study.train_missing(out, wanted, **options) == 1
    with pytest.warns(UserWarning, match="digits.jsonl"):
        found = study.results_in(out, malformed="skip")
    assert [(r.head, r.width, r.seed) for r in found] == [("softmax", 2, 0), ("moss(K=2)", 2, 0)]
    for r in found:
        best = min(r.attempts, key=lambda attempt: attempt.valid_loss)
        assert (r.learning_rate, r.valid_loss) == (best.learning_rate, best.valid_loss)
        assert sum(b.count for b in r.calibration.bins) == r.test


# --- tables -----------------------------------------------------------------------------------------------------------


def test_differences_are_paired_and_their_interval_allows_for_overlap():
    losses = {"softmax": [1.0, 2.0, 3.0], "sigsoftmax": [0.9, 2.0, 2.8]}
    difference = page.Study(results(losses)).difference(page.nats, "sigsoftmax")
    assert difference.sample.mean == pytest.approx(-0.1)
    deviation = statistics.stdev([-0.1, 0.0, -0.2])
    expected = student_quantile(0.975, 2) * deviation * math.sqrt(1 / 3 + 40 / 120)
    assert difference.half_interval == pytest.approx(expected)
    assert not difference.is_resolved
    assert page.against(difference, 1) == f"-0.1 ± {expected:.1f}"


def test_what_is_told_apart_is_said_and_what_is_not_is_not():
    losses = {"softmax": [1.0, 2.0, 3.0], "sigsoftmax": [0.5, 1.51, 2.49], "gss(k=0)": [1.5, 2.51, 3.49]}
    lines = page.verdict(page.Study(results(losses))).splitlines()
    assert lines[0].endswith(": `sigsoftmax`.")
    assert lines[1].endswith(": `gss(k=0)`.")
    assert "`gss(k=0.2)`" in lines[2]
    assert "**-0.500 ± 0.0" in page.likelihood(page.Study(results(losses)))


def test_a_seed_that_lacks_a_head_counts_nowhere():
    whole = results({"softmax": [1.0, 2.0]})
    lacking = [r for r in whole if (r.head, r.width, r.seed) != ("mos(K=4)", 9, 1)]
    assert page.Study(whole).seeds == [0, 1]
    assert page.Study(lacking).seeds == [0]
    with pytest.raises(ValueError, match="twice for seed 0"):
        page.Study([*whole, whole[0]])


def test_the_widths_say_where_the_bottleneck_ends():
    table = page.widths(page.Study(results({"softmax": [1.0, 2.0]})))
    verdicts = dict(line.split(" | ")[:2] for line in table.splitlines()[2:])
    assert verdicts == {"| 1": "yes", "| 2": "yes", "| 3": "yes", "| 4": "yes", "| 9": "no", "| 16": "no"}


def test_bins_are_pooled_by_their_counts():
    bins = [
        ConfidenceBin(low=0.0, high=1.0, count=1, confidence=0.2, accuracy=1.0),
        ConfidenceBin(low=0.0, high=1.0, count=3, confidence=0.6, accuracy=0.0),
        ConfidenceBin(low=0.0, high=1.0, count=0, confidence=None, accuracy=None),
    ]
    assert page.pooled(bins) == (pytest.approx(0.5), pytest.approx(0.25), 4)


def test_pages_are_made_of_the_records_and_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "draw_regions", lambda data, path, drawn: None)
    text = "".join(f"<!-- generated: {name} -->\n<!-- end -->\n" for name in page.PARTS)
    target = tmp_path / "classifiers.md"
    target.write_text(text, encoding="utf-8")
    (tmp_path / "images").mkdir()
    found = results({"softmax": [1.0, 2.0], "sigsoftmax": [0.5, 1.0]})
    assert page.update(found, check=True, page=target)[0] == "classifiers.md"
    assert target.read_text(encoding="utf-8") == text
    page.update(found, check=False, page=target)
    assert page.update(found, check=True, page=target) == [f"images/{page.REGIONS}"]
    changed = [dataclasses.replace(r, test_loss=r.test_loss + 1.0) for r in found]
    assert page.update(changed, check=True, page=target)[:2] == ["classifiers.md", f"images/{page.CURVES}"]
    target.write_text("<!-- generated: widths -->\n<!-- end -->\n", encoding="utf-8")
    with pytest.raises(ValueError, match="expected one each for setup"):
        page.update(found, check=True, page=target)


def test_the_page_shows_the_records():
    if not study.OUT.is_file():
        pytest.skip("no records of classifiers yet")
    assert page.update(study.results_in(study.OUT), check=True) == []
