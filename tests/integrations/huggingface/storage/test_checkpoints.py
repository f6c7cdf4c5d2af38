"""Stored models: nothing that does not know the output function of a patched model runs it."""

import copy
import json
import os
import subprocess
import sys
import warnings

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file
from tests.integrations.huggingface.tiny import V, assert_same, tiny, tokens
from transformers import LlamaForCausalLM

from sigsoftmax.integrations.huggingface import apply_output_function, from_pretrained
from sigsoftmax.integrations.huggingface.patching.patched_model import PatchedModel

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


@pytest.mark.parametrize("function", ["softmax", "sigsoftmax"])
def test_a_configuration_that_names_another_function_than_the_weights_have(tmp_path, function):
    apply_output_function(tiny(), "shifted_sigsoftmax(b=learned:1)").save_pretrained(tmp_path)
    edit(tmp_path, function=function)
    with pytest.raises(ValueError, match=rf"holds output_function.* which {function} has not"):
        from_pretrained(tmp_path)


EDITS = [
    ({"function": 3}, "'function' should be str, and is 3"),
    ({"function": None}, "'function' should be str, and is None"),
    ({"logit_scale": "2"}, "'logit_scale' should be float or int, and is '2'"),
    ({"softcap": []}, "'softcap' should be float or int or NoneType"),
    ({"format": True}, "'format' should be int, and is True"),
    ({"reshaped": ["nope"]}, "says that 'nope' is stored in another shape"),
    ({"frozen": ["nope"]}, r"'nope' is to be frozen, and .* has no parameter of that name; its parameters are: b"),
    ({"architecture": "pipeline"}, "its model is a pipeline of the type llama"),
    ({"architecture": "GPT2LMHeadModel"}, "its model is a GPT2LMHeadModel of the type llama"),
    ({"own_model_type": "gpt2"}, "its model is a LlamaForCausalLM of the type gpt2"),
    ({"auto_map": [1]}, "'auto_map' should be dict or NoneType"),
]


@pytest.mark.parametrize(("changes", "message"), EDITS)
def test_a_damaged_configuration_is_refused_by_what_is_wrong(tmp_path, changes, message):
    apply_output_function(tiny(), "shifted_sigsoftmax(b=learned:1)").save_pretrained(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path)


def edit(folder, **changes):
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings["sigsoftmax"].update(changes)
    path.write_text(json.dumps(settings))


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


@pytest.mark.parametrize(
    ("trained", "other"),
    [
        ("sigsoftmax", "relu"),
        ("sigsoftmax", "softmax"),
        ("gss(k=0.2)", "gss(k=0.5)"),
        ("mos(K=2)", "moss(K=2)"),
        ("mos(K=2, latent=tanh)", "mos(K=2, latent=linear)"),
    ],
)
def test_a_state_dict_of_another_function_is_refused(trained, other):
    state = apply_output_function(tiny(), trained).state_dict()
    with pytest.raises(ValueError, match="trained with another output function"):
        apply_output_function(tiny(), other).load_state_dict(state, strict=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_state_dict_that_was_converted_is_read(dtype):
    """All of its entries, the mark of the function too."""
    model = apply_output_function(tiny(), "sigsoftmax")
    state = {key: value.to(dtype) for key, value in model.state_dict().items()}
    other = apply_output_function(tiny(seed=5), "sigsoftmax")
    other.load_state_dict(state)
    assert torch.equal(other.lm_head.weight, model.lm_head.weight.to(dtype).float())
    if dtype is not torch.float16:  # the marks exceed it
        with pytest.raises(ValueError, match="trained with another output function"):
            apply_output_function(tiny(), "relu").load_state_dict(state)


@pytest.mark.parametrize("head", ["gss(k=learned:0.5)", "moss(K=2)"])
def test_a_state_dict_without_a_mark_of_its_function_is_read(tmp_path, head):
    """State dicts and folders of older versions."""
    model = apply_output_function(tiny(), head)
    other = apply_output_function(tiny(seed=5), head)
    other.load_state_dict(model.state_dict() | {"output_function.requires_sigsoftmax": torch.ones(())})
    assert_same(model, other)
    other.output_function.requires_sigsoftmax = torch.ones(())
    other.save_pretrained(tmp_path)
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
