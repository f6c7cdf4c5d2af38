"""Saving and loading: nothing is lost, and nothing that does not know the output function runs the model."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("transformers")

import torch
from tests.integrations.huggingface.tiny import NAMES, V, assert_same, config, tiny, tokens
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments

from sigsoftmax import OutputFunction, register_function
from sigsoftmax.integrations.huggingface import SigsoftmaxConfig, apply_output_function, from_pretrained
from sigsoftmax.integrations.huggingface.patching.patched_model import PatchedModel


@pytest.mark.parametrize("name", NAMES)
def test_a_model_comes_back_as_it_was_saved(tmp_path, name):
    model = apply_output_function(tiny(name), "shifted_sigsoftmax(b=per_class)")
    with torch.no_grad():
        model.output_function.function_parameters["b"].uniform_(-1, 3)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "sigsoftmax"
    loaded = from_pretrained(tmp_path)
    assert isinstance(loaded, PatchedModel)
    assert_same(model, loaded)
    assert loaded.examined == model.examined
    ids = tokens()
    assert torch.equal(loaded.train()(ids, labels=ids).loss, model.train()(ids, labels=ids).loss)
    tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert tied == bool(loaded.config.tie_word_embeddings)
    # And once more, from what was loaded.
    loaded.save_pretrained(tmp_path / "again")
    assert_same(model, from_pretrained(tmp_path / "again"))


@pytest.mark.parametrize(
    "function",
    [
        "sigsoftmax",
        "gss(k=0.2)",
        "gss(c=1.5, k=learned:0.5)",
        "softmax(alpha=1.5)",
        OutputFunction("shifted_sigsoftmax", b=torch.linspace(-1, 1, V)),
        OutputFunction("shifted_sigsoftmax", b=torch.nn.Parameter(torch.tensor(2.5))),
    ],
    ids=str,
)
def test_every_kind_of_parameter_comes_back(tmp_path, function):
    model = apply_output_function(tiny(), function)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert_same(model, loaded)
    trained = {key: value.requires_grad for key, value in model.output_function.function_parameters.items()}
    assert {key: value.requires_grad for key, value in loaded.output_function.function_parameters.items()} == trained


def test_half_precision_shards_and_options(tmp_path):
    model = apply_output_function(tiny(dtype=torch.bfloat16), "shifted_sigsoftmax(b=learned:12.3)")
    model.save_pretrained(tmp_path, max_shard_size="2KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same(model, from_pretrained(tmp_path))
    loaded = from_pretrained(tmp_path, dtype=torch.float16, attn_implementation="eager")
    assert loaded.lm_head.weight.dtype == torch.float16
    assert loaded.output_function.function_parameters["b"].item() == pytest.approx(12.3, rel=1e-7)
    assert loaded.config._attn_implementation == "eager"
    model, report = from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]


def test_the_auto_classes_load_it_once_this_package_is_imported(tmp_path):
    model = apply_output_function(tiny(), "sigsoftmax")
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), SigsoftmaxConfig)
    assert_same(model, AutoModelForCausalLM.from_pretrained(tmp_path))
    fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert isinstance(fresh, PatchedModel)
    assert type(fresh).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("name", ["llama", "llama tied"])
def test_the_auto_class_without_a_head_gives_the_model_below_the_output_layer(tmp_path, name):
    model = apply_output_function(tiny(name), "sigsoftmax").eval()
    model.save_pretrained(tmp_path)
    body, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(body).__name__ == "LlamaModel"
    assert not isinstance(body, PatchedModel)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    wanted = model.model(tokens()).last_hidden_state
    assert torch.equal(AutoModel.from_pretrained(tmp_path).eval()(tokens()).last_hidden_state, wanted)
    assert type(AutoModel.from_config(AutoConfig.from_pretrained(tmp_path))).__name__ == "LlamaModel"


def test_the_class_of_a_patched_model_loads_what_it_saved(tmp_path):
    model = apply_output_function(tiny(), "gss(k=learned:0.5)")
    model.save_pretrained(tmp_path)
    assert_same(model, type(model).from_pretrained(tmp_path))
    assert_same(model, type(model).from_pretrained(tmp_path, config=model.config))
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(loaded, type(model))
    assert not report["missing_keys"]
    other = apply_output_function(tiny("qwen2"), "sigsoftmax")
    with pytest.raises(ValueError, match="holds a LlamaForCausalLM, not a Qwen2ForCausalLM"):
        type(other).from_pretrained(tmp_path)


def test_a_reader_that_trusts_the_folder_gets_the_right_model(tmp_path):
    model = apply_output_function(tiny(), "sigsoftmax")
    model.save_pretrained(tmp_path)
    code = """
        import sys, torch
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
        torch.save(model.eval()(torch.tensor([[1, 2, 3]])).logits, sys.argv[1] + "/logits.pt")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    # transformers copies such code to a cache, which is to be that of the test.
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache")}
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, env=environment)
    logits = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(logits, model.eval()(torch.tensor([[1, 2, 3]])).logits)


def test_a_plain_model_is_loaded_and_patched_in_one_call(tmp_path):
    tiny().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="function='sigsoftmax'"):
        from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="every one of its probabilities changes"):
        model = from_pretrained(tmp_path, function="sigsoftmax")
    assert str(model.output_function.function) == "sigsoftmax"


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config.json and no adapter_config.json"):
        from_pretrained(tmp_path)


def test_a_saved_function_is_not_replaced_by_a_keyword(tmp_path):
    apply_output_function(tiny(), "sigsoftmax").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="was saved with sigsoftmax, not with softmax"):
        from_pretrained(tmp_path, function="softmax")
    assert isinstance(from_pretrained(tmp_path, function="sigsoftmax"), PatchedModel)


def test_functions_of_the_user_must_be_registered_before_loading(tmp_path):
    from sigsoftmax.family import members

    register_function("cubic", lambda z: z + z**3 / 3)
    model = apply_output_function(tiny(), "cubic")
    model.save_pretrained(tmp_path)
    del members._DEFINITIONS["cubic"]
    members._parsed_once.cache_clear()
    with pytest.raises(ValueError, match="register_function"):
        from_pretrained(tmp_path)


def test_the_trainer_resumes_from_its_checkpoints(tmp_path):
    def trainer(model, steps):
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=2,
            learning_rate=0.01,
            lr_scheduler_type="constant",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        rows = tokens(8, 6)
        return Trainer(model=model, args=arguments, train_dataset=[{"input_ids": r, "labels": r} for r in rows])

    def fresh(seed):
        return apply_output_function(tiny(seed=seed), "gss(k=learned:0.5)")

    whole = fresh(0)
    trainer(whole, 4).train()
    assert whole.output_function.function_parameters["k"].item() != 0.5
    resumed = fresh(9)
    trainer(resumed, 4).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(whole, resumed)
    assert_same(whole, from_pretrained(tmp_path / "checkpoint-4"))
    with pytest.raises(ValueError, match="trained with another output function"):
        trainer(apply_output_function(tiny(), "relu"), 4).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


MODELING = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own-llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_models_with_code_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "modeling_own.py").write_text(MODELING)
    settings = config("llama").to_dict() | {
        "model_type": "own-llama",
        "auto_map": {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    }
    (tmp_path / "own" / "config.json").write_text(json.dumps(settings))
    own = AutoConfig.from_pretrained(tmp_path / "own", trust_remote_code=True)
    with pytest.warns(UserWarning, match="every one of its probabilities changes"):
        model = apply_output_function(AutoModelForCausalLM.from_config(own, trust_remote_code=True), "sigsoftmax")
    model.save_pretrained(tmp_path / "patched")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        from_pretrained(tmp_path / "patched")
    loaded = from_pretrained(tmp_path / "patched", trust_remote_code=True)
    assert type(loaded).__name__ == "OwnForCausalLM"
    assert_same(model, loaded)


def test_nobody_is_asked_whether_code_of_others_may_run(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    marker = tmp_path / "it-ran"
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w').close()\n{MODELING}")
    settings = config("llama").to_dict() | {
        "model_type": "own-llama",
        "auto_map": {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    }
    (tmp_path / "own" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        from_pretrained(tmp_path / "own", function="sigsoftmax")
    assert not marker.exists()
