"""PEFT on a patched model: training, what is stored, and where it goes again."""

import copy
import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import torch
from tests.integrations.huggingface.tiny import phi, plain_loss, tiny, tokens
from transformers import AutoModelForCausalLM

from sigsoftmax.integrations.huggingface import (
    apply_output_function,
    from_pretrained,
    load_adapter,
    remove_output_function,
    token_log_likelihoods,
)
from sigsoftmax.integrations.huggingface.patching.apply import language_model
from sigsoftmax.integrations.huggingface.patching.patched_model import PatchedModel

# PEFT looks for the vocabulary of a model under its name, and a patched model has one that leads nowhere.
pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")


def lora(**options):
    # Not the usual start at zero, so that the adapter does something.
    return peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False, **options
    )


@pytest.fixture
def stored(tmp_path):
    """The folder of a plain model."""
    tiny().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def patched_from(folder, function="shifted_sigsoftmax(b=learned:2)"):
    with pytest.warns(UserWarning, match="every one of its probabilities changes"):
        return from_pretrained(folder, function=function)


def same(one, other):
    return torch.equal(one.eval()(input_ids=tokens()).logits, other.eval()(input_ids=tokens()).logits)


@pytest.mark.parametrize("order", ["patch, then adapt", "adapt, then patch"])
def test_training_an_adapter_on_the_body(order):
    base = tiny(dtype=torch.float64)
    torch.manual_seed(3)
    plain = peft.get_peft_model(copy.deepcopy(base), lora(), autocast_adapter_dtype=False).train()
    torch.manual_seed(3)
    if order == "patch, then adapt":
        base = apply_output_function(base, "sigsoftmax")
        model = peft.get_peft_model(base, lora(), autocast_adapter_dtype=False)
    else:
        model = apply_output_function(peft.get_peft_model(base, lora(), autocast_adapter_dtype=False), "sigsoftmax")
        assert isinstance(model, peft.PeftModel)
    model.train()
    ids = tokens()
    for _ in range(3):
        wanted, output = plain_loss(phi(plain(input_ids=ids).logits), ids), model(input_ids=ids, labels=ids)
        assert "logits" not in output
        torch.testing.assert_close(output.loss, wanted)
        for one, loss in ((plain, wanted), (model, output.loss)):
            one.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert trained
    assert all("lora_" in name for name in trained)
    with torch.no_grad():
        log_p = torch.log_softmax(phi(plain(input_ids=ids).logits), -1)[:, :-1].gather(-1, ids[:, 1:, None])
    torch.testing.assert_close(token_log_likelihoods(model, ids).double(), log_p[..., 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("saves", [None, ["output_function"], ["output_function", "lm_head"]])
def test_an_adapter_comes_back_with_its_model(tmp_path, stored, saves):
    model = peft.get_peft_model(patched_from(stored), lora(modules_to_save=saves)).train()
    ids = tokens()
    output = model(input_ids=ids, labels=ids)
    assert "logits" not in output
    output.loss.backward()
    shift = language_model(model).output_function.function_parameters["b"]
    assert (shift.grad is not None) == bool(saves)
    if saves:
        with torch.no_grad():
            shift.add_(0.7)
    model.save_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["peft_type"] == "sigsoftmax:LORA"
    assert same(model, from_pretrained(tmp_path / "adapter"))
    assert same(model, load_adapter(patched_from(stored), tmp_path / "adapter"))
    for load in (
        lambda: peft.PeftModel.from_pretrained(tiny(), tmp_path / "adapter"),
        lambda: peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"),
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"),
    ):
        with pytest.raises((ValueError, OSError), match="sigsoftmax"):
            load()


@pytest.mark.parametrize("is_saved", [True, False])
def test_peft_says_how_the_adapter_of_a_patched_model_is_loaded(tmp_path, stored, is_saved):
    model = patched_from(stored, "gss(k=learned:0.5)")
    if is_saved:
        model.save_pretrained(tmp_path / "base")
        model = from_pretrained(tmp_path / "base")
    peft.get_peft_model(model, lora()).save_pretrained(tmp_path / "adapter")
    right = apply_output_function(tiny(), "gss(k=learned:0.5)")
    for load in (
        lambda: peft.PeftModel.from_pretrained(right, tmp_path / "adapter"),
        lambda: peft.PeftModel.from_pretrained(tiny(), tmp_path / "adapter"),
        lambda: peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"),
        lambda: right.load_adapter(tmp_path / "adapter"),
    ):
        with pytest.raises(ValueError, match=r"output function gss\(k=learned:0.5\).* load_adapter\(model, path\)"):
            load()
    assert isinstance(load_adapter(right, tmp_path / "adapter"), peft.PeftModel)


def test_an_adapter_goes_onto_a_model_with_its_function_alone(tmp_path, stored):
    peft.get_peft_model(patched_from(stored), lora()).save_pretrained(tmp_path / "adapter")
    remedy = r"apply_output_function\(model, 'shifted_sigsoftmax\(b=learned:2(.0)?\)'\)"
    with pytest.raises(ValueError, match=f"this model has none: it is a softmax model.*{remedy}"):
        load_adapter(tiny(), tmp_path / "adapter")
    with pytest.raises(ValueError, match=f"this model has sigsoftmax.*{remedy}"):
        load_adapter(apply_output_function(tiny(), "sigsoftmax"), tmp_path / "adapter")
    # The value of what is learned may differ.
    load_adapter(apply_output_function(tiny(), "shifted_sigsoftmax(b=learned:3)"), tmp_path / "adapter")


def test_an_adapter_on_a_saved_patched_model(tmp_path):
    apply_output_function(tiny(), "shifted_sigsoftmax(b=per_class:1)").save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(from_pretrained(tmp_path / "base"), lora())
    model.save_pretrained(tmp_path / "adapter")
    assert same(model, from_pretrained(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=r"huggingface\.from_pretrained"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")


def test_adapters_whose_model_cannot_be_found_again(tmp_path, stored):
    peft.get_peft_model(apply_output_function(tiny(), "sigsoftmax"), lora()).save_pretrained(tmp_path / "nameless")
    with pytest.raises(ValueError, match="was never saved"):
        from_pretrained(tmp_path / "nameless")
    model = patched_from(stored, "shifted_sigsoftmax(b=per_class:1)")
    peft.get_peft_model(model, lora()).save_pretrained(tmp_path / "valueless")
    with pytest.raises(ValueError, match="does not hold the values of b for each class"):
        from_pretrained(tmp_path / "valueless")


def test_a_second_adapter_is_guarded_too(tmp_path, stored):
    model = peft.get_peft_model(patched_from(stored), lora())
    model.add_adapter("second", lora())
    model.save_pretrained(tmp_path)
    for folder in (tmp_path, tmp_path / "second"):
        assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "sigsoftmax:LORA"


def test_adapters_by_transformers_itself(tmp_path, stored):
    model = patched_from(stored, "sigsoftmax")
    model.add_adapter(lora())
    model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    assert same(model, from_pretrained(tmp_path / "adapter"))


def test_merging_gives_a_patched_model(tmp_path, stored):
    model = peft.get_peft_model(patched_from(stored), lora(modules_to_save=["output_function"]))
    merged = copy.deepcopy(model).merge_and_unload()
    assert isinstance(merged, PatchedModel)
    assert not hasattr(merged, "peft_config")
    torch.testing.assert_close(
        merged.eval()(tokens()).logits, model.eval()(input_ids=tokens()).logits, rtol=1e-4, atol=1e-5
    )
    merged.save_pretrained(tmp_path / "merged")
    assert same(merged, from_pretrained(tmp_path / "merged"))


def test_undoing_frees_the_adapters(tmp_path):
    model = peft.get_peft_model(apply_output_function(tiny(), "sigsoftmax"), lora())
    remove_output_function(model)
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA"
    # And under plain softmax they are as free.
    other = peft.get_peft_model(apply_output_function(tiny(), "softmax"), lora())
    other.save_pretrained(tmp_path / "other")
    loaded = peft.PeftModel.from_pretrained(tiny(), tmp_path / "other")
    assert same(other, loaded)


def test_an_adapter_and_a_model_that_know_no_output_function(tmp_path):
    peft.get_peft_model(tiny(), lora()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^neither this model nor .* peft\.PeftModel\.from_pretrained\("):
        load_adapter(tiny(), tmp_path)


def test_an_adapter_on_the_output_layer_stores_logits_and_is_right():
    model = apply_output_function(tiny(), "sigsoftmax")
    options = {"r": 2, "target_modules": ["lm_head"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options)).train()
    ids = tokens()
    with pytest.warns(UserWarning, match=r"is now a peft\.\S+\.Linear, something other than a plain linear map"):
        loss = adapted(input_ids=ids, labels=ids).loss
    plain = remove_output_function(copy.deepcopy(adapted))
    torch.testing.assert_close(loss, plain_loss(phi(plain(input_ids=ids).logits), ids))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "cannot be read as JSON: it is nested deeper"),
        ("{", "cannot be read as JSON"),
        ("[]", "it names no peft_type"),
        ("{}", "it names no peft_type"),
        ('{"peft_type": 3}', "it names no peft_type"),
        ('{"peft_type": "sigsoftmax:LORA", "base_model_name_or_path": 3}', "base_model_name_or_path should be a text"),
        ('{"peft_type": "sigsoftmax:LORA", "sigsoftmax": []}', "sigsoftmax should be a text"),
    ],
)
def test_a_damaged_configuration_of_an_adapter_is_refused(tmp_path, content, message):
    (tmp_path / "adapter_config.json").write_text(content)
    model = apply_output_function(tiny(), "sigsoftmax")
    for load in (from_pretrained, lambda path: load_adapter(model, path)):
        with pytest.raises(ValueError, match=message):
            load(tmp_path)
