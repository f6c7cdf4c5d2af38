"""Saving and loading: nothing is lost, and nothing that does not know the output function runs the model."""

import copy
import json
import os
import subprocess
import sys
import textwrap
import warnings

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file
from tests.integrations.huggingface.tiny import NAMES, V, config, tiny, tokens
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments

from sigsoftmax import OutputFunction, register_function
from sigsoftmax.integrations.huggingface import SigsoftmaxConfig, apply_output_function, from_pretrained
from sigsoftmax.integrations.huggingface.patching.patched_model import PatchedModel


@pytest.fixture(autouse=True)
def _no_bars():
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def assert_same(one, other):
    ids = tokens()
    assert torch.equal(one.eval()(ids).logits, other.eval()(ids).logits)
    state, wanted = other.state_dict(), one.state_dict()
    assert state.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(state[key].reshape(value.shape), value), key
        assert state[key].dtype == value.dtype, key


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


ATTEMPTS = {
    "auto": "AutoModelForCausalLM.from_pretrained(folder)",
    "trusting": "AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)",
    "no head": "AutoModel.from_pretrained(folder)",
    "own class": "LlamaForCausalLM.from_pretrained(folder)",
    "pipeline": "pipeline('text-generation', model=folder)",
    "own configuration": "LlamaForCausalLM.from_pretrained(folder, config=LlamaConfig.from_pretrained(folder))",
    "weights": "plain().load_state_dict(load_file(file))",
    "some weights": "plain().load_state_dict(load_file(file), strict=False)",
    "state dict": "plain().load_state_dict(torch.load(folder + '/state.pt'))",
    "adapter": "PeftModel.from_pretrained(plain(), folder + '/adapter')",
    "adapter and model": "AutoPeftModelForCausalLM.from_pretrained(folder + '/adapter')",
}
READER = """
import json, sys
class NotInstalled:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "sigsoftmax":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NotInstalled())
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, pipeline
try:
    from peft import AutoPeftModelForCausalLM, PeftModel
except ImportError:
    PeftModel = AutoPeftModelForCausalLM = None
attempts = json.loads(sys.argv[1])
results = {}
for folder in sys.argv[2:]:
    plain = lambda: LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    file = folder + "/model.safetensors"
    for name, code in attempts.items():
        try:
            eval(code)
            result = "it ran"
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        results.setdefault(name, []).append(result)
assert "sigsoftmax" not in sys.modules
print("RESULTS" + json.dumps(results))
"""


def test_without_this_package_nothing_runs_the_model(tmp_path):
    attempts = dict(ATTEMPTS)
    folders = {name: tmp_path / name for name in ("llama", "llama tied")}
    for name, folder in folders.items():
        model = apply_output_function(tiny(name), "sigsoftmax")
        model.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "state.pt")
        try:
            import peft
        except ImportError:
            attempts = {key: code for key, code in attempts.items() if "adapter" not in key}
        else:
            adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT looks for a configuration under the model's name
                adapted.save_pretrained(folder / "adapter")
    done = subprocess.run(
        [sys.executable, "-c", READER, json.dumps(attempts), *map(str, folders.values())],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.split("RESULTS")[1])
    assert {attempt for attempt, found in results.items() if "it ran" in found} == set()
    for untied_or_tied in range(2):
        assert "pip install sigsoftmax" in results["trusting"][untied_or_tied]
        assert "trust_remote_code=True" in results["auto"][untied_or_tied]
        assert "requires_sigsoftmax" in results["state dict"][untied_or_tied]


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


def test_plain_softmax_is_saved_so_that_everybody_can_load_it(tmp_path):
    plain = tiny().eval()
    model = apply_output_function(copy.deepcopy(plain), "softmax")
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "modeling_sigsoftmax.py").exists()
    loaded, report = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(loaded.eval()(tokens()).logits, plain(tokens()).logits)
    # One call after loading re-applies it, and so does from_pretrained.
    assert "logits" not in apply_output_function(loaded).train()(tokens(), labels=tokens())
    assert isinstance(from_pretrained(tmp_path), PatchedModel)


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
    with pytest.raises(ValueError, match="register_function"):
        from_pretrained(tmp_path)


def test_a_checkpoint_of_another_format_is_refused(tmp_path):
    apply_output_function(tiny(), "sigsoftmax").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["sigsoftmax"]["format"] = 99
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="stored in format 99"):
        from_pretrained(tmp_path)


def test_weights_that_do_not_belong_to_the_configuration(tmp_path):
    model = apply_output_function(tiny(), "shifted_sigsoftmax(b=learned)")
    model.save_pretrained(tmp_path)
    other = apply_output_function(tiny(), "sigsoftmax")
    other.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").replace(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks output_function.function_parameters.b"):
        from_pretrained(tmp_path)


def test_what_cannot_be_guarded_is_not_saved(tmp_path):
    model = apply_output_function(tiny(), "sigsoftmax")
    with pytest.raises(ValueError, match="distributed_checkpoint=True"):
        model.save_pretrained(tmp_path, distributed_checkpoint=True)
    assert not list(tmp_path.iterdir())

    def unguarded(folder, state_dict=None, **_):
        plain = copy.deepcopy(model)
        super(PatchedModel, plain).save_pretrained(folder)

    from sigsoftmax.integrations.huggingface.storage import checkpoints

    with pytest.raises(RuntimeError, match="holds the output layer as a softmax model has it"):
        checkpoints.save(model, unguarded, tmp_path)
    # Even then the configuration stops whoever reads it.
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "sigsoftmax"


def test_uploading_uploads_what_is_guarded(tmp_path, monkeypatch):
    model = apply_output_function(tiny(), "sigsoftmax")
    uploads = []
    monkeypatch.setattr(type(model), "push_to_hub", lambda self, name, **options: uploads.append((name, options)))
    model.save_pretrained(tmp_path / "name", push_to_hub=True, commit_message="first")
    model.save_pretrained(tmp_path / "name", push_to_hub=True, repo_id="somebody/model")
    assert uploads == [("name", {"commit_message": "first"}), ("somebody/model", {})]


def test_interrupted_saves_leave_nothing_that_runs_as_softmax(tmp_path, monkeypatch):
    from sigsoftmax.integrations.huggingface.storage import checkpoints

    model = apply_output_function(tiny(), "sigsoftmax")

    def killed(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "guard_configuration", killed)
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(tmp_path)
    # The configuration is that of a Llama; the weights are not.
    with pytest.raises(RuntimeError):
        LlamaForCausalLM.from_pretrained(tmp_path)
    monkeypatch.undo()
    assert_same(model, from_pretrained(tmp_path))


def test_state_dicts_of_files_go_into_a_patched_model(tmp_path):
    model = apply_output_function(tiny("llama tied"), "sigsoftmax")
    model.save_pretrained(tmp_path)
    other = apply_output_function(tiny("llama tied", seed=5), "sigsoftmax")
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.embed_tokens.weight"].shape == (1, V, 16)
    result = other.load_state_dict(stored, strict=False)
    assert result.missing_keys == ["lm_head.weight"]  # tied
    assert_same(model, other)
    other.load_state_dict(model.state_dict())


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
