"""Patching, undoing, refusing: which models, what they say, and that nothing is left behind."""

import copy
import pickle
import warnings

import pytest

pytest.importorskip("transformers")

import torch
from tests.integrations.huggingface.tiny import NAMES, SIZES, V, config, phi, plain_loss, tiny, tokens
from torch import nn
from transformers import AutoModelForCausalLM, BartConfig, BartForCausalLM, LlamaForCausalLM, LlamaModel

from sigsoftmax import OutputFunction, register_function
from sigsoftmax.integrations.huggingface import apply_output_function, remove_output_function
from sigsoftmax.integrations.huggingface.examination.output_layers import LogitAdjustment
from sigsoftmax.integrations.huggingface.patching.patched_model import PatchedModel


def trained(tmp_path, name="llama"):
    """A model that comes from a checkpoint."""
    tiny(name).save_pretrained(tmp_path / "trained")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "trained")


@pytest.mark.parametrize("name", NAMES)
def test_undoing_leaves_the_model_as_it_was(name):
    model = tiny(name).eval()
    ids = tokens()
    before = (type(model), model.config.to_dict(), set(model.state_dict()), set(vars(model)), model(ids).logits)
    assert apply_output_function(model, "gss(k=learned:0.3)") is model
    assert isinstance(model, PatchedModel)
    assert isinstance(model, before[0])
    assert type(model).__name__ == before[0].__name__
    model.train()
    model(ids, labels=ids)
    model.eval()
    assert remove_output_function(model) is model
    assert type(model) is before[0]
    assert model.config.to_dict() == before[1]
    assert set(model.state_dict()) == before[2]
    assert set(vars(model)) == before[3]
    assert torch.equal(model(ids).logits, before[4])
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not model._load_state_dict_pre_hooks
    assert not model._state_dict_pre_hooks
    torch.testing.assert_close(model(ids, labels=ids).loss, plain_loss(before[4], ids))


def test_patching_again_replaces_the_function_and_keywords_alone_change_options():
    model = apply_output_function(tiny(), "shifted_sigsoftmax(b=learned:2)")
    model.output_function.function_parameters["b"].data.fill_(5.0)
    apply_output_function(model, z_loss=0.1)
    assert model.loss_options.z_loss == 0.1
    assert model.output_function.function_parameters["b"].item() == 5.0
    apply_output_function(model, "sigsoftmax")
    assert str(model.output_function.function) == "sigsoftmax"
    remove_output_function(model)
    assert type(model) is LlamaForCausalLM


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
def test_copies_are_independent(copied):
    model = apply_output_function(tiny(), "shifted_sigsoftmax(b=learned:2)").train()
    twin = copied(model)
    ids = tokens()
    assert type(twin) is type(model)
    twin(ids, labels=ids).loss.backward()
    assert model.output_function.function_parameters["b"].grad is None
    remove_output_function(twin)
    assert "logits" not in model(ids, labels=ids)


@pytest.mark.parametrize(
    ("name", "adjustment"),
    [
        ("llama", LogitAdjustment()),
        ("gemma2", LogitAdjustment(cap=4.0)),
        ("granite", LogitAdjustment(scale=1 / 3)),
        ("cohere", LogitAdjustment(scale=0.3)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_model_does_to_its_logits_is_found(name, adjustment, dtype):
    found = apply_output_function(tiny(name, dtype=dtype), "sigsoftmax").examined.adjustment
    assert found.scale == pytest.approx(adjustment.scale, rel=1e-11)
    assert found.cap == adjustment.cap


class Bent(LlamaForCausalLM):
    """Changes its logits in a way of its own."""

    def forward(self, input_ids=None, labels=None, **options):
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        logits = logits + 0.1 * logits**3
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=V)
        output = super().forward(input_ids=input_ids)
        output["logits"] = logits
        if loss is not None:
            output["loss"] = loss
        return output


class Greedy(LlamaForCausalLM):
    """Adds a term that depends on its logits to the loss."""

    def forward(self, input_ids=None, labels=None, **options):
        output = super().forward(input_ids=input_ids, labels=labels, **options)
        if labels is not None:
            output["loss"] = output["loss"] + 0.01 * output["logits"].logsumexp(-1).square().mean()
        return output


def test_an_unknown_change_of_logits_costs_memory_and_not_correctness():
    torch.manual_seed(0)
    model = Bent(config("llama")).train()
    ids = tokens()
    z = model(ids).logits.detach()
    with pytest.warns(UserWarning, match="needs its logits stored"):
        apply_output_function(model, "sigsoftmax")
    output = model(ids, labels=ids)
    torch.testing.assert_close(output.loss, plain_loss(phi(z), ids))
    torch.testing.assert_close(output.logits, phi(z))


def test_models_that_compute_their_loss_themselves_are_refused():
    sizes = {"vocab_size": V, "d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    for model in (BartForCausalLM(BartConfig(**sizes, is_decoder=True)), Greedy(config("llama"))):
        own = type(model)
        with pytest.raises(ValueError, match="computes its training loss itself"):
            apply_output_function(model, "sigsoftmax")
        assert type(model) is own


def test_what_is_no_language_model_is_refused():
    with pytest.raises(ValueError, match="expected a language model of transformers, got Linear"):
        apply_output_function(nn.Linear(2, 2), "sigsoftmax")
    with pytest.raises(ValueError, match="patch the model first, then wrap or compile it"):
        apply_output_function(nn.DataParallel(tiny()), "sigsoftmax")
    with pytest.raises(ValueError, match="patch the model first, then wrap or compile it"):
        apply_output_function(torch.compile(tiny(), backend="eager"), "sigsoftmax")
    with pytest.raises(ValueError, match="has no output layer"):
        apply_output_function(LlamaModel(config("llama")), "sigsoftmax")
    with torch.device("meta"):
        empty = LlamaForCausalLM(config("llama"))
    with pytest.raises(ValueError, match="load its weights before you patch it"):
        apply_output_function(empty, "sigsoftmax")


def test_mistakes_in_arguments():
    model = tiny()
    with pytest.raises(ValueError, match="did you mean 'sigsoftmax'"):
        apply_output_function(model, "sigsoftmx")
    with pytest.raises(ValueError, match="remembers no output function"):
        apply_output_function(model)
    with pytest.raises(ValueError, match="logits_with_labels must be"):
        apply_output_function(model, "sigsoftmax", logits_with_labels="sometimes")
    with pytest.raises(ValueError, match="label_smoothing must lie in"):
        apply_output_function(model, "sigsoftmax", label_smoothing=1.5)
    with pytest.raises(ValueError, match="label_smoothing must be a number, got None"):
        apply_output_function(model, "sigsoftmax", label_smoothing=None)
    with pytest.raises(ValueError, match="z_loss must be"):
        apply_output_function(model, "sigsoftmax", z_loss=-1.0)
    with pytest.raises(ValueError, match="chunk_bytes must be a positive number of bytes, got 0"):
        apply_output_function(model, "sigsoftmax", chunk_bytes=0)
    with pytest.raises(ValueError, match="weight_gradient must be one of"):
        apply_output_function(model, "sigsoftmax", weight_gradient="quick")
    with pytest.raises(ValueError, match="unknown backend 'quick'"):
        apply_output_function(model, "sigsoftmax", backend="quick")
    with pytest.raises(ValueError, match=r"is given by its name, .* got int"):
        apply_output_function(model, 3)
    with pytest.raises(ValueError, match=f"has 5 values, but there are {V} classes"):
        apply_output_function(model, OutputFunction("shifted_sigsoftmax", b=torch.zeros(5)))
    with pytest.raises(ValueError, match="was not patched"):
        remove_output_function(model)
    assert type(model) is LlamaForCausalLM


def test_labels_must_fit_the_tokens():
    model = apply_output_function(tiny(), "sigsoftmax").train()
    with pytest.raises(ValueError, match="leave logits_to_keep out"):
        model(tokens(), labels=tokens(), logits_to_keep=1)
    model(tokens(), labels=tokens())


def test_a_trained_model_is_warned_of_the_jump_and_a_fresh_one_is_not(tmp_path):
    model = trained(tmp_path)
    with pytest.warns(UserWarning, match=r"every one of its probabilities changes.*retrofit"):
        apply_output_function(model, "sigsoftmax")
    with pytest.warns(UserWarning, match="was trained with sigsoftmax: with softmax"):
        apply_output_function(model, "softmax")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_output_function(trained(tmp_path), "softmax")
        apply_output_function(tiny(), "sigsoftmax")


def test_functions_of_the_user():
    register_function("cubic", lambda z: z + z**3 / 3)
    model = tiny(dtype=torch.float64).train()
    z = model(tokens()).logits.detach()
    apply_output_function(model, "cubic")
    torch.testing.assert_close(model(tokens(), labels=tokens()).loss, plain_loss(z + z**3 / 3, tokens()))


@pytest.mark.parametrize("name", ["llama", "llama tied"])
def test_resizing_the_vocabulary(name):
    model = apply_output_function(tiny(name), "shifted_sigsoftmax(b=per_class:1)").train()
    shift = model.output_function.function_parameters["b"]
    with torch.no_grad():
        shift.copy_(torch.arange(V))
    model.resize_token_embeddings(V + 2, mean_resizing=False)
    resized = model.output_function.function_parameters["b"]
    assert resized.tolist() == [*range(V), *[sum(range(V)) / V] * 2]
    ids = tokens(classes=V + 2)
    loss = model(ids, labels=ids).loss
    plain = remove_output_function(copy.deepcopy(model))
    z = plain(ids).logits
    torch.testing.assert_close(loss, plain_loss(z + nn.functional.logsigmoid(z + resized), ids))
    loss.backward()
    assert resized.grad is not None
    assert model.config.sigsoftmax["num_classes"] == V + 2
    model.resize_token_embeddings(V - 3)
    assert model.output_function.function_parameters["b"].tolist() == list(range(V - 3))


def test_learned_numbers_stay_exact_when_a_model_goes_to_half_precision():
    model = apply_output_function(tiny(), "shifted_sigsoftmax(b=learned:12.3)").bfloat16()
    shift = model.output_function.function_parameters["b"]
    assert shift.dtype == torch.float32
    assert shift.item() == pytest.approx(12.3, rel=1e-7)
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_an_output_layer_that_is_replaced_later():
    model = apply_output_function(tiny(), "sigsoftmax").train()
    model.lm_head = nn.Linear(SIZES["hidden_size"], V, bias=True)
    ids = tokens()
    plain = remove_output_function(copy.deepcopy(model))
    wanted = plain_loss(phi(plain(ids).logits), ids)
    output = model(ids, labels=ids)
    assert "logits" not in output
    torch.testing.assert_close(output.loss, wanted)
    model.lm_head = nn.Sequential(model.lm_head)
    model.lm_head.weight = model.lm_head[0].weight
    with pytest.warns(UserWarning, match="other than a plain linear map"):
        torch.testing.assert_close(model(ids, labels=ids).loss, wanted)


def test_hooks_of_accelerate_lead_to_the_patched_forward_pass_and_back():
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny().eval()
    ids = tokens()
    z = model(ids).logits
    # What a device_map does to a model that it spreads over devices.
    hooks.add_hook_to_module(model, hooks.AlignDevicesHook(io_same_device=True))
    apply_output_function(model, "sigsoftmax")
    torch.testing.assert_close(model(ids).logits, phi(z))
    assert "logits" not in model.train()(ids, labels=ids)
    remove_output_function(model)
    assert torch.equal(model.eval()(ids).logits, z)


def test_a_forward_pass_that_bypasses_the_class_is_refused():
    model = tiny()
    own = model.forward
    model.forward = lambda *arguments, **options: own(*arguments, **options)
    with pytest.raises(ValueError, match="patch the model before that"):
        apply_output_function(model, "sigsoftmax")
    assert type(model) is LlamaForCausalLM
    assert not hasattr(model.config, "sigsoftmax")


def test_a_replacement_that_fails_leaves_the_function_that_was():
    model = apply_output_function(tiny(), "sigsoftmax")
    with pytest.raises(ValueError, match="has 5 values"):
        apply_output_function(model, OutputFunction("shifted_sigsoftmax", b=torch.zeros(5)))
    assert str(model.output_function.function) == "sigsoftmax"


def test_a_request_that_fails_leaves_nothing_waiting(monkeypatch):
    model = apply_output_function(tiny(), "sigsoftmax").train()
    ids = tokens()
    with pytest.raises(IndexError):
        model(ids + V, labels=ids)
    assert model.waiting_call is None
    assert model.lm_head.waiting_call is None
    assert model(ids).logits.shape == (*ids.shape, V)
