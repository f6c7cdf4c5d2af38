"""Values that no run can use are refused where they are given, before anything is allocated."""

import dataclasses
import os
import re

import pytest
import torch
from tests.lm.runs import small_corpus, small_recipe, small_trainer

from sigsoftmax.lm.config import DynamicEvaluationConfig, ModelConfig, Recipe, TrainingConfig
from sigsoftmax.lm.model import memory
from sigsoftmax.lm.model.memory import check_model_fits, device_memory
from sigsoftmax.lm.recipes import recipe, with_overrides

HOLD = r"must be a number that float32 can hold, (0 or )?between 1\.18e-38 and 3\.4e\+38, got"


def refused(change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_overrides(recipe("tiny-softmax"), [change])


@pytest.mark.parametrize("value", ["1e300", "1e-300", "4e38"])
@pytest.mark.parametrize("phase", ["training", "finetuning"])
def test_learning_rates_that_float32_cannot_hold(phase, value):
    refused(f"{phase}.learning_rate={value}", f"learning_rate {HOLD} {re.escape(str(float(value)))}")


@pytest.mark.parametrize("field", ["clip", "weight_decay", "activation", "temporal_activation"])
def test_other_numbers_of_training_that_float32_cannot_hold(field):
    refused(f"training.{field}=1e39", f"{field} {HOLD}")


@pytest.mark.parametrize("head", ["softmax(alpha=1e300)", "gss(k=learned:1e300)", "gss(k=-1e300)"])
def test_parameters_of_heads_that_float32_cannot_hold(head):
    refused(f"model.head={head}", f"(alpha|k) of the head {re.escape(head.partition('=')[0])}.* {HOLD}")


def test_rates_of_dynamic_evaluation_that_float32_cannot_hold():
    refused("dynamic_evaluation.learning_rates=1e-5,1e300", f"each of learning_rates {HOLD}")
    refused("dynamic_evaluation.decays=1e300", f"each of decays {HOLD}")
    refused("dynamic_evaluation.epsilon=1e-300", f"epsilon {HOLD}")


@pytest.mark.parametrize("field", ["training.bptt", "training.epochs", "training.batch", "dynamic_evaluation.window"])
def test_counts_of_two_to_the_31_or_more(field):
    refused(f"{field}=3000000000", rf"{field.partition('.')[2]} must be below 2\*\*31, got 3000000000")


@pytest.mark.parametrize("field", ["seed", "training.window_seed"])
@pytest.mark.parametrize("value", [-1, 2**32])
def test_seeds_that_no_generator_takes(field, value):
    refused(f"{field}={value}", rf"seed must be between 0 and 2\*\*32 - 1, got {value}")


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
