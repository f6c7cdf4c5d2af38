"""Training and finetuning: what is evaluated, recorded and printed."""

import io
import math
import random
import re
import statistics

import pytest
from tests.experiments.small_runs import small_resources, small_runs

from sigsoftmax import cli
from sigsoftmax.experiments.display import PlainLines
from sigsoftmax.experiments.runs.train import FinetuneConfig, TrainConfig, finetune, run
from sigsoftmax.lm.recipes import with_overrides
from sigsoftmax.records import read
from sigsoftmax.records.schemas.training import EvaluationRecord


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    resources = small_resources(folder)
    runs = small_runs(folder, "tiny-softmax", seeds=(1, 2))
    config = TrainConfig(recipes=(runs[0].recipe,), seeds=(1, 2), out=folder / "runs", resources=resources)
    said, shown = [], io.StringIO()
    results = run(config, said.append, PlainLines(shown))
    return config, results, said, shown.getvalue()


def test_the_best_weights_are_evaluated_and_recorded(trained):
    config, results, _, _ = trained
    for one, evaluations in results.items():
        assert [(e.split, e.batch) for e in evaluations] == [("valid", 2), ("valid", 1), ("test", 1)]
        recorded = [record.payload_as(EvaluationRecord) for record in read(one.path / "evaluations.jsonl")]
        assert recorded == evaluations
        assert evaluations[0].tokens == 2 * ((20 * 7) // 2 - 1)
        assert evaluations[2].tokens == 20 * 7 - 1
    assert [one.seed for one in results] == [1, 2] == list(config.seeds)


def test_mean_and_deviation_over_seeds_are_printed(trained):
    _, results, said, _ = trained
    perplexities = [evaluations[2].perplexity for evaluations in results.values()]
    mean, deviation = statistics.mean(perplexities), statistics.stdev(perplexities)
    assert "n = 2" in said[-1]
    assert f"test (batch 1) {mean:.2f} ± {deviation:.2f}" in said[-1]


def test_every_epoch_has_a_line(trained):
    said, lines = (
        [line for line in trained[3].splitlines() if ("LSTM recurrence" in line) == is_note]
        for is_note in (True, False)
    )
    assert (len(said), len(lines)) == (2, 4)
    assert all("validation" in line and "tokens/s" in line and "perplexity" in line for line in lines)


def test_finetuning_starts_from_the_best_and_lies_beside(trained):
    config, results, _, _ = trained
    first = next(iter(results))
    said = []
    tuned = finetune(
        FinetuneConfig(runs=(first.folder,), resources=config.resources), said.append, PlainLines(io.StringIO())
    )
    [(one, evaluations)] = tuned.items()
    assert one.path == first.folder / "finetune"
    assert all(evaluation.run.phase == "finetune" for evaluation in evaluations)
    # The start counts as the best so far, so that finetuning ends no worse.
    assert evaluations[0].loss <= results[first][0].loss + 1e-6
    assert math.isfinite(evaluations[2].loss)


def test_evaluations_are_made_again_when_the_weights_change(tmp_path):
    resources = small_resources(tmp_path)
    best = []
    for epochs in (1, 3):
        recipe = with_overrides(small_runs(tmp_path, "tiny-softmax")[0].recipe, [f"training.epochs={epochs}"])
        config = TrainConfig(recipes=(recipe,), seeds=(1,), out=tmp_path / "runs", resources=resources)
        [evaluations] = run(config, lambda _: None, PlainLines(io.StringIO())).values()
        best.append(evaluations[0].epoch)
    assert best == [1, 3]
    assert len(list(read(tmp_path / "runs/tiny-softmax/1/train/evaluations.jsonl"))) == 6


def test_a_run_that_breaks_at_the_last_update_of_an_epoch_saves_nothing_of_it(tmp_path, capsys):
    """From the command line, with an update an epoch: the second one makes the weights NaN after its finite loss."""
    draw = random.Random(0)
    for split in ("train", "valid", "test"):
        text = "".join(" ".join(f"w{draw.randrange(60)}" for _ in range(12)) + "\n" for _ in range(130))
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{split}.txt").write_text(text)

    def train(epochs):
        changes = ("training.batch=200", "training.learning_rate=3e38", "training.clip=1e38", "model.embedding=24")
        words = ("train", "tiny-softmax", "--data", tmp_path / "text", "--out", tmp_path / "runs", "--device", "cpu")
        more = ("--set", *changes, "model.hidden=32,24", f"training.epochs={epochs}")
        status = cli.main([str(word) for word in (*words, *more)])
        return status, capsys.readouterr().err

    folder = tmp_path / "runs/tiny-softmax/141/train"
    assert train(1)[0] == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for _ in range(2):
        status, told = train(2)
        assert status == 1
        assert re.search(
            r"is no longer finite after update 1 of epoch 2; nothing was saved since\. Kept: \S+last\.safetensors "
            r"holds the run after epoch 1: .*; \S+best\.safetensors holds the best weights, of epoch 1\.",
            told,
        )
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert train(1)[0] == 0, "what was kept can be used"
