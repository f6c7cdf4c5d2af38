"""Saving and loading of encoder-decoder and masked models: every door opens, or says which one does."""

import json
import warnings

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from tests.integrations.huggingface.kinds import KINDS, inputs_of, kind, labels_of
from transformers import (
    AutoConfig,
    AutoModel,
    BartForConditionalGeneration,
    BertForMaskedLM,
    T5ForConditionalGeneration,
)

from sigsoftmax.integrations.huggingface import apply_output_function, from_pretrained, load_adapter
from sigsoftmax.integrations.huggingface.patching.patched_model import PatchedModel

AUTO = {
    "t5": ("AutoModelForSeq2SeqLM",),
    "t5 untied": ("AutoModelForSeq2SeqLM",),
    "bart": ("AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"),
    "whisper": ("AutoModelForSpeechSeq2Seq",),
    "bert": ("AutoModelForMaskedLM",),
    "modernbert": ("AutoModelForMaskedLM",),
    "modernbert sparse": ("AutoModelForMaskedLM",),
}
ALL = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModelForMaskedLM")


def patched(name, function="gss(k=learned:0.5)"):
    return apply_output_function(kind(name, dtype=torch.float32), function).eval()


def assert_same(name, one, other):
    call = {**inputs_of(name, torch.float32), "labels": labels_of(name)}
    wanted, found = one.eval()(**call), other.eval()(**call)
    assert torch.equal(found.logits, wanted.logits)
    assert torch.equal(found.loss, wanted.loss)
    assert torch.equal(other.train()(**call).loss, one.train()(**call).loss)
    assert other.examined == one.examined
    state, wanted = other.state_dict(), one.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[key].reshape(value.shape), value) for key, value in wanted.items())


@pytest.mark.parametrize("function", ["gss(k=learned:0.5)", "mos(K=2)"])
@pytest.mark.parametrize("name", KINDS)
def test_a_model_comes_back_through_every_door_that_fits(tmp_path, name, function):
    model = patched(name, function)
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["model_type"] == "sigsoftmax"
    assert settings["sigsoftmax"]["format"] == 3
    assert {key for key in settings["auto_map"] if key.startswith("AutoModelFor")} == {*AUTO[name]}
    loaded = from_pretrained(tmp_path)
    assert isinstance(loaded, PatchedModel)
    assert_same(name, model, loaded)
    assert_same(name, model, type(model).from_pretrained(tmp_path))
    for auto in ALL:
        if auto in AUTO[name]:
            assert_same(name, model, getattr(transformers, auto).from_pretrained(tmp_path))
            fresh = getattr(transformers, auto).from_config(AutoConfig.from_pretrained(tmp_path))
            assert isinstance(fresh, type(loaded))
        else:
            with pytest.raises(ValueError, match=f"which {auto} does not load; use {AUTO[name][0]}"):
                getattr(transformers, auto).from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "again")
    assert_same(name, model, from_pretrained(tmp_path / "again"))


@pytest.mark.parametrize(
    ("name", "own"),
    [("t5", T5ForConditionalGeneration), ("bart", BartForConditionalGeneration), ("bert", BertForMaskedLM)],
)
def test_a_class_of_transformers_does_not_run_it_as_softmax(tmp_path, name, own):
    patched(name, "sigsoftmax").save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatched"):
        own.from_pretrained(tmp_path)
    plain = kind(name, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="requires_sigsoftmax"):
        plain.load_state_dict(patched(name, "sigsoftmax").state_dict())


def test_the_auto_class_without_a_head(tmp_path):
    model = patched("bert")
    model.save_pretrained(tmp_path / "bert")
    body = AutoModel.from_pretrained(tmp_path / "bert").eval()
    assert type(body).__name__ == "BertModel"
    inputs = inputs_of("bert")
    assert torch.equal(body(**inputs).last_hidden_state, model.bert(**inputs).last_hidden_state)
    patched("t5").save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match=r"holds no model of its own below its output layer.*get_encoder"):
        AutoModel.from_pretrained(tmp_path / "t5")


@pytest.mark.parametrize(("name", "architectures"), [("t5", ["T5WithLMHeadModel"]), ("bart", None), ("bert", None)])
def test_a_plain_model_is_loaded_and_patched_in_one_call(tmp_path, name, architectures):
    plain = kind(name, dtype=torch.float32)
    plain.save_pretrained(tmp_path)
    if architectures:  # as models that were saved long ago name themselves
        settings = json.loads((tmp_path / "config.json").read_text()) | {"architectures": architectures}
        (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.warns(UserWarning, match="every one of its probabilities changes"):
        model = from_pretrained(tmp_path, function="sigsoftmax")
    assert isinstance(model, type(plain))
    assert_same(name, apply_output_function(plain, "sigsoftmax"), model)


def test_plain_softmax_is_saved_so_that_everybody_can_load_it(tmp_path):
    model = patched("bart", "softmax")
    model.save_pretrained(tmp_path)
    loaded, report = BartForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same("bart", model, apply_output_function(loaded))
    assert_same("bart", model, from_pretrained(tmp_path))


@pytest.mark.parametrize(
    ("name", "task", "modules"), [("t5", "SEQ_2_SEQ_LM", ["q", "v"]), ("bert", None, ["query", "value"])]
)
def test_adapters(tmp_path, name, task, modules):
    peft = pytest.importorskip("peft")
    model = patched(name, "sigsoftmax")
    model.save_pretrained(tmp_path / "model")
    options = {"target_modules": modules, "task_type": task, "init_lora_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT looks for a configuration under the model's name
        adapted = peft.get_peft_model(from_pretrained(tmp_path / "model"), peft.LoraConfig(r=2, **options)).train()
        call = {**inputs_of(name, torch.float32), "labels": labels_of(name)}
        output = adapted(**call)
        assert "logits" not in output
        output.loss.backward()
        assert all(p.grad is not None for key, p in adapted.named_parameters() if "lora" in key and "encoder" in key)
        adapted.save_pretrained(tmp_path / "adapter")
        wanted = adapted.eval()(**call).logits
        assert torch.equal(load_adapter(model, tmp_path / "adapter").eval()(**call).logits, wanted)
        assert torch.equal(from_pretrained(tmp_path / "adapter").eval()(**call).logits, wanted)
        plain = kind(name, dtype=torch.float32)
        with pytest.raises(ValueError, match="load_adapter"):
            peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"class_bias": "no.bias"}, r"'no.bias' is added to the logits.*has no such"),
        ({"labels": {"is_shifted": 3}}, "the use of labels in the configuration is damaged"),
        ({"auto_classes": 7}, "'auto_classes' should be"),
    ],
)
def test_damaged_configurations_are_refused(tmp_path, changes, why):
    patched("bart", "sigsoftmax").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["sigsoftmax"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(settings))
    call = {**inputs_of("bart", torch.float32), "labels": labels_of("bart")}
    with pytest.raises(ValueError, match=why):
        from_pretrained(tmp_path).train()(**call)
