"""Dynamic evaluation from the command line: the grid, one pair of rates, and what is on record."""

import copy
import json
import math
import os

import pytest
import torch
from tests.experiments.small_runs import small_resources, small_runs

from sigsoftmax.experiments.runs import dynamic
from sigsoftmax.experiments.runs.dynamic import DynamicConfig, known_runs, points_at_once, run, search_grid
from sigsoftmax.experiments.runs.evaluate import evaluate_best
from sigsoftmax.experiments.runs.executors import train_runs
from sigsoftmax.records import read
from sigsoftmax.records.schemas.training import DynamicEvaluationRecord


@pytest.fixture
def trained(tmp_path):
    resources = small_resources(tmp_path)
    [(one, evaluations)] = train_runs(small_runs(tmp_path, "tiny-softmax"), resources, evaluate_best)
    return one, resources, evaluations


def test_the_grid_is_searched_recorded_and_not_run_again(trained, monkeypatch):
    one, resources, _ = trained
    said = []
    result = search_grid(one.best, None, resources, say=said.append)
    assert len(result.points) == 2
    assert result.valid.loss == min(point.loss for point in result.points)
    assert result.test.rates == result.valid.rates
    records = [record.payload_as(DynamicEvaluationRecord) for record in read(one.path / "dynamic.jsonl")]
    assert [(r.split, r.chosen) for r in records] == [
        ("valid", False),
        ("valid", False),
        ("valid", True),
        ("test", True),
    ]
    assert any(text.startswith("It will take about") for text in said)
    assert sum(text.startswith("valid") for text in said) == 2
    again = search_grid(one.best, None, resources)
    assert again.valid == result.valid
    assert again.test == result.test
    assert len(list(read(one.path / "dynamic.jsonl"))) == len(records)


def test_a_grid_that_was_stopped_goes_on(trained, monkeypatch):
    one, resources, _ = trained
    straight = search_grid(one.best, None, resources)
    lines = (one.path / "dynamic.jsonl").read_text().splitlines(keepends=True)
    (one.path / "dynamic.jsonl").write_text(lines[0])
    assert len(known_runs(one.best)) == 1
    ran = []
    keep = dynamic._Subject.keep
    monkeypatch.setattr(
        dynamic._Subject, "keep", lambda self, result: (ran.append(result.split), keep(self, result))[1]
    )
    resumed = search_grid(one.best, None, resources)
    assert ran == ["valid", "valid", "test"]
    assert [point.loss for point in resumed.points] == [point.loss for point in straight.points]
    assert resumed.test.loss == straight.test.loss


def test_rates_of_nothing_leave_the_static_perplexity(trained):
    one, resources, evaluations = trained
    config = DynamicConfig(checkpoint=one.folder, learning_rate=0.0, decay=0.001, resources=resources)
    found = {result.split: result for result in run(config, lambda _: None)}
    static = {(e.split, e.batch): e.loss for e in evaluations}
    for split in ("valid", "test"):
        assert math.isclose(found[split].loss, static[split, 1], rel_tol=1e-5)
        assert found[split].complete


def test_a_limit_ends_runs_early_and_is_said(trained):
    one, resources, _ = trained
    said = []
    config = DynamicConfig(
        checkpoint=one.best, learning_rate=1e-5, decay=0.001, splits=("test",), limit=3, resources=resources
    )
    [found] = run(config, said.append)
    assert (found.tokens, found.complete) == (30, False)
    assert "the first 30 tokens" in said[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"learning_rate": 1e-5}, "both --learning-rate and --decay"), ({"limit": 0}, "limit must be a positive integer")],
)
def test_bad_settings_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        DynamicConfig(checkpoint=tmp_path, **options)


def test_runs_on_other_weights_are_not_taken_for_these(trained):
    """Times of files do not tell: a copy of a folder may have them in any order, and clocks are set."""
    one, resources, _ = trained
    search_grid(one.best, None, resources)
    path = one.path / "dynamic.jsonl"
    lines = path.read_text()
    assert len(known_runs(one.best)) == 4
    records = [json.loads(line) for line in lines.splitlines()]

    def known(change):
        changed = copy.deepcopy(records)
        for record in changed:
            change(record["payload"])
        path.write_text("".join(json.dumps(record) + "\n" for record in changed))
        return len(known_runs(one.best))

    epoch = records[0]["payload"]["epoch"]
    assert known(lambda payload: payload.update(epoch=epoch + 1)) == 0
    assert known(lambda payload: payload["run"].update(overrides=["training.epochs=7"])) == 0
    # Records of version 1 do not name the epoch.
    assert known(lambda payload: payload.pop("epoch")) == 4
    path.write_text(lines)
    os.utime(path, (0, 0))
    assert known_runs(one.best) == []


@pytest.mark.parametrize(("device", "runs", "points"), [("cpu", 4, 1), ("cuda", 1, 8), ("cuda", 12, 12)])
def test_points_share_a_gpu_however_many_runs_do(tmp_path, device, runs, points):
    """A head that is trained alone has a grid of as many points as one that is trained beside others."""
    resources = small_resources(tmp_path, at_once=runs)
    assert points_at_once(resources, torch.device(device)) == points


def test_a_grid_of_another_precision_is_searched_anew(trained, monkeypatch):
    one, resources, _ = trained
    search_grid(one.best, None, resources)
    path = one.path / "dynamic.jsonl"
    path.write_text(path.read_text().replace('"precision": "float32", "clip', '"precision": "bf16", "clip'))
    assert {found.precision for found in known_runs(one.best)} == {"bf16"}
    ran = []
    keep = dynamic._Subject.keep
    monkeypatch.setattr(
        dynamic._Subject, "keep", lambda self, result: (ran.append(result.split), keep(self, result))[1]
    )
    search_grid(one.best, None, resources)
    assert ran == ["valid", "valid", "valid", "test"]
