"""Values that no run can use are refused where they are given, before anything is allocated."""

import dataclasses
import os

import pytest
import torch
from tests.lm.runs import small_corpus, small_recipe, small_trainer

from sigsoftmax.lm.config import DynamicEvaluationConfig, ModelConfig, Recipe, TrainingConfig
from sigsoftmax.lm.model import memory
from sigsoftmax.lm.model.memory import check_model_fits, device_memory
from sigsoftmax.lm.recipes import recipe, with_overrides

HOLD = r"must be a number that float32 can hold, (0 or )?between 1\.18e-38 and 3\.4e\+38, got"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.learning_rate=1e300", rf"learning_rate {HOLD} 1e\+300"),
        ("training.learning_rate=1e-300", rf"learning_rate {HOLD} 1e-300"),
        ("finetuning.learning_rate=4e38", rf"learning_rate {HOLD} 4e\+38"),
        ("training.clip=1e300", f"clip {HOLD}"),
        ("training.weight_decay=1e300", f"weight_decay {HOLD}"),
        ("training.activation=1e39", f"activation {HOLD}"),
        ("training.temporal_activation=1e39", f"temporal_activation {HOLD}"),
        ("model.head=softmax(alpha=1e300)", rf"alpha of the head softmax\(alpha=1e\+300\) {HOLD}"),
        ("model.head=gss(k=learned:1e300)", f"k of the head .* {HOLD}"),
        ("model.head=gss(k=-1e300)", f"k of the head .* {HOLD}"),
        ("dynamic_evaluation.learning_rates=1e-5,1e300", f"each of learning_rates {HOLD}"),
        ("dynamic_evaluation.decays=1e300", f"each of decays {HOLD}"),
        ("dynamic_evaluation.epsilon=1e-300", f"epsilon {HOLD}"),
        ("training.bptt=3000000000", r"bptt must be below 2\*\*31, got 3000000000"),
        ("training.epochs=100000000000", r"epochs must be below 2\*\*31, got 100000000000"),
        ("training.batch=100000000000", r"batch must be below 2\*\*31"),
        ("dynamic_evaluation.window=3000000000", r"window must be below 2\*\*31"),
        ("seed=-1", r"seed must be between 0 and 2\*\*32 - 1, got -1"),
        ("seed=4294967296", r"seed must be between 0 and 2\*\*32 - 1, got 4294967296"),
        ("training.window_seed=-1", r"window_seed must be between 0 and 2\*\*32 - 1, got -1"),
    ],
)
def test_numbers_that_a_run_cannot_compute_with(change, message):
    with pytest.raises(ValueError, match=message):
        with_overrides(recipe("tiny-softmax"), [change])


def test_the_ends_of_what_float32_holds_are_accepted():
    TrainingConfig(learning_rate=3.4e38, clip=1.2e-38, weight_decay=0.0, activation=3.4e38)
    ModelConfig(head="mos(K=2)", floor=1.2e-38)
    DynamicEvaluationConfig(learning_rates=(0.0,), decays=(0.0,), epsilon=1.2e-38)
    Recipe(name="x", corpus="ptb", seed=2**32 - 1)


WIDE = ("model.embedding=100000000000", "model.hidden=32,100000000000")


def test_a_model_that_no_memory_holds_says_how_many_bytes_it_needs(tmp_path):
    wide = dataclasses.replace(small_recipe(), model=with_overrides(recipe("tiny-softmax"), WIDE).model)
    with pytest.raises(
        ValueError,
        match=r"embedding 100,000,000,000, hidden 32, 100,000,000,000 and head softmax for 20 words has "
        r"40,000,[0-9,]+ parameters; its weights, gradients and best weights need 480,[0-9,]+ bytes \([0-9,]+ GiB\), "
        r"and the memory of cpu has [0-9,]+ \([0-9,]+ GiB\); take a smaller model",
    ):
        small_trainer(tmp_path, recipe=wide)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("width", [10**11, 10**30, 10**300])
def test_any_width_is_measured_and_none_is_allocated(width):
    for config in (
        ModelConfig(embedding=8, hidden=(width, 8)),
        ModelConfig(embedding=width, hidden=(width,)),
        ModelConfig(head=f"mos(K={width})", embedding=8, hidden=(8, 8)),
    ):
        with pytest.raises(ValueError, match="take a smaller model"):
            check_model_fits(config, 100, torch.device("cpu"), is_trained=False)


def test_the_memory_of_this_machine(monkeypatch, tmp_path):
    known = device_memory(torch.device("cpu"))
    assert 2**26 < known < 2**50
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "GROUP_LIMITS", (str(limit),))
    whole = device_memory(torch.device("cpu"))
    limit.write_text("max\n")
    assert device_memory(torch.device("cpu")) == whole
    limit.write_text("1000000\n")
    assert device_memory(torch.device("cpu")) == 1_000_000
    config = ModelConfig(embedding=100, hidden=(100,))
    check_model_fits(config, 1000, torch.device("cpu"), is_trained=False)
    with pytest.raises(ValueError, match=r"the memory of cpu has 1,000,000 \(0 GiB\)"):
        check_model_fits(config, 1000, torch.device("cpu"), is_trained=True)


def test_a_machine_that_does_not_say_its_memory_refuses_what_no_machine_has(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "GROUP_LIMITS", (str(tmp_path / "none"),))
    monkeypatch.setattr(os, "sysconf_names", {}, raising=False)
    check_model_fits(ModelConfig(embedding=10**6, hidden=(10**6,)), 100, torch.device("cpu"), is_trained=True)
    with pytest.raises(ValueError, match="take a smaller model"):
        check_model_fits(ModelConfig(embedding=10**12, hidden=(10**12,)), 100, torch.device("cpu"), is_trained=True)


def test_a_usual_model_fits(tmp_path):
    small_trainer(tmp_path, corpus=small_corpus())
    check_model_fits(recipe("ptb-softmax").model, 10_000, torch.device("cpu"), is_trained=True)
