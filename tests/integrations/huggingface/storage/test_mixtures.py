"""Saved mixtures: everything comes back, and no reader takes such a folder for a softmax model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from tests.integrations.huggingface.tiny import V, assert_same, tiny, tokens
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments

from sigsoftmax.integrations.huggingface import apply_output_function, from_pretrained, load_adapter
from sigsoftmax.integrations.huggingface.patching.mixture_head import MixtureHead


def mixture(name: str = "llama", function: str = "moss(K=3)", **options: Any) -> Any:
    model = apply_output_function(tiny(name, **options), function)
    model.output_function.latent_weight.data.normal_(0.0, 0.2)
    return model


@pytest.mark.parametrize("name", ["llama", "llama tied", "gemma2", "granite"])
@pytest.mark.parametrize(
    "function", ["moss(K=3)", "mixture(gss(k=learned:0.3), K=2, latent=linear, prior=sigsoftmax)"], ids=["moss", "gss"]
)
def test_a_mixture_is_loaded_as_it_was_saved(tmp_path: Path, name: str, function: str) -> None:
    model = mixture(name, function)
    model.save_pretrained(tmp_path)
    for loaded in (from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert isinstance(loaded.output_function, MixtureHead)
        assert_same(model, loaded)
        assert loaded.output_function.stored() == model.output_function.stored()


def test_a_model_of_half_precision(tmp_path: Path) -> None:
    model = mixture(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_same(model, loaded)
    assert loaded.output_function.latent_weight.dtype == torch.float32


def test_readers_that_do_not_know_mixtures_are_stopped(tmp_path: Path) -> None:
    mixture().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())["sigsoftmax"]
    assert settings["format"] == 2
    assert settings["function"] == "moss(K=3, latent=residual, prior=sigsoftmax)"
    with pytest.raises(RuntimeError):
        LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="was saved with moss"):
        from_pretrained(tmp_path, function="moss(K=4)")
    assert_same(from_pretrained(tmp_path, function="moss(K=3)"), from_pretrained(tmp_path))


def test_members_keep_their_format(tmp_path: Path) -> None:
    apply_output_function(tiny(), "sigsoftmax").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["sigsoftmax"]["format"] == 1
    from_pretrained(tmp_path)


def test_the_trainer_trains_stores_and_resumes_a_mixture(tmp_path: Path) -> None:
    rows = (tokens(8, 1) + torch.arange(8)) % V
    data = [{"input_ids": row, "labels": row} for row in rows]

    def trained(steps: int, resume: bool) -> Any:
        torch.manual_seed(3)
        settings: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_steps": 2}
        arguments = TrainingArguments(
            str(tmp_path), max_steps=steps, learning_rate=1e-2, lr_scheduler_type="constant", **settings
        )
        trainer = Trainer(model=mixture(), args=arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    trained(2, False)
    resumed = trained(4, True)
    assert resumed.state.global_step == 4
    losses = [entry["train_loss"] for entry in resumed.state.log_history if "train_loss" in entry]
    assert losses
    assert_same(resumed.model, from_pretrained(tmp_path / "checkpoint-4"))


# --- adapters -------------------------------------------------------------------------------------------------------


def with_adapter(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


def test_an_adapter_on_a_saved_mixture(tmp_path: Path) -> None:
    mixture().save_pretrained(tmp_path / "base")
    model = with_adapter(from_pretrained(tmp_path / "base")).eval()
    model.save_pretrained(tmp_path / "adapter")
    wanted = model(tokens()).logits
    torch.testing.assert_close(from_pretrained(tmp_path / "adapter").eval()(tokens()).logits, wanted)
    onto = load_adapter(from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
    torch.testing.assert_close(onto(tokens()).logits, wanted)
    with pytest.raises(ValueError, match="was trained on a model with the output function moss"):
        load_adapter(apply_output_function(tiny(), "mos(K=3)"), tmp_path / "adapter")


def test_an_adapter_that_trains_the_mixture(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "base")
    base = apply_output_function(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), "mos(K=3)")
    model = with_adapter(base, modules_to_save=["output_function"]).train()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    held = model.get_base_model().output_function
    assert held.latent_weight.grad.abs().sum() > 0
    held.latent_weight.data.normal_(0.0, 0.2)
    model.eval().save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    wanted = model(tokens()).logits
    torch.testing.assert_close(from_pretrained(tmp_path / "adapter").eval()(tokens()).logits, wanted)


def test_an_adapter_without_the_mixture_is_refused_where_that_would_be_lost(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "base")
    base = apply_output_function(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), "mos(K=3)")
    with_adapter(base).save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(ValueError, match="the prior and the latent vectors; train it with modules_to_save"):
        from_pretrained(tmp_path / "adapter")


def test_an_adapter_on_the_output_layer_is_refused() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(mixture(), peft.LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="leave the output layer out of adapters"):
        model(input_ids=tokens())
