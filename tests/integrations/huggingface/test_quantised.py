"""Quantised output layers: with torchao's weights the loss is right, with logits stored; packed ones are refused."""

import copy
import warnings

import pytest

pytest.importorskip("transformers")

import torch
from tests.integrations.huggingface.tiny import phi, plain_loss, tiny, tokens
from torch import nn

from sigsoftmax.integrations.huggingface import apply_output_function, token_log_likelihoods

IDS = tokens()


@pytest.fixture
def quantise():
    """A function that quantises the output layer of a model, in place, to int8 with torchao."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao says which of its libraries it cannot load
        torchao = pytest.importorskip("torchao.quantization")

    def quantise(model):
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig(), filter_fn=lambda _, name: name == "lm_head")
        assert isinstance(model.lm_head, nn.Linear)
        assert type(model.lm_head.weight) is torchao.Int8Tensor
        return model

    return quantise


@pytest.mark.parametrize("name", ["llama", "llama tied"])
@pytest.mark.parametrize("order", ["quantise, then patch", "patch, then quantise"])
def test_a_quantised_output_layer_stores_logits_and_is_right(quantise, name, order):
    plain = quantise(tiny(name))
    wanted = plain_loss(phi(plain(IDS).logits), IDS)

    def trained():
        if order == "quantise, then patch":
            model = apply_output_function(copy.deepcopy(plain), "sigsoftmax").train()
        else:
            model = quantise(apply_output_function(tiny(name), "sigsoftmax")).train()
        return model, model(IDS, labels=IDS).loss

    with pytest.warns(UserWarning, match=r"logits stored.* Linear whose weight is of the class Int8Tensor"):
        model, loss = trained()
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    wanted.backward()
    body = {key: value.grad for key, value in plain.model.named_parameters()}
    for key, value in model.model.named_parameters():
        torch.testing.assert_close(value.grad, body[key], rtol=1e-4, atol=1e-5)
    log_p = torch.log_softmax(phi(plain(IDS).logits), -1)[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0]
    torch.testing.assert_close(token_log_likelihoods(model, IDS), log_p.detach(), rtol=1e-4, atol=1e-5)


def test_a_mixture_on_a_quantised_output_layer_is_refused(quantise):
    model = quantise(tiny())
    own, attributes = type(model), set(vars(model))
    with pytest.raises(ValueError, match=r"weight is of the class Int8Tensor.*Use a single output function"):
        apply_output_function(model, "mos(K=2)")
    assert (type(model), set(vars(model))) == (own, attributes)
    model = quantise(apply_output_function(tiny(), "mos(K=2)"))
    for options in ({}, {"labels": IDS}):
        with pytest.raises(
            ValueError, match=r"Int8Tensor, .*; leave the output layer out of adapters and quantisation"
        ):
            model(IDS, **options)


def test_a_quantised_output_layer_is_not_saved_without_its_guard(quantise, tmp_path):
    model = quantise(apply_output_function(tiny(), "sigsoftmax"))
    with pytest.raises(ValueError, match=r"of the class Int8Tensor.* save the model before you quantise it"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_an_output_layer_that_torch_has_packed_is_refused_and_the_body_is_not():
    from torch.ao.quantization import quantize_dynamic

    message = r"torch\.ao\.nn\.quantized\.dynamic.* packed.*model\.model = quantize_dynamic\(model\.model"
    with pytest.raises(ValueError, match=message):
        apply_output_function(quantize_dynamic(tiny(), {nn.Linear}), "sigsoftmax")
    model = quantize_dynamic(apply_output_function(tiny(), "sigsoftmax"), {nn.Linear})
    with pytest.raises(ValueError, match=message):
        model.train()(IDS, labels=IDS)
    with pytest.raises(ValueError, match=message):
        token_log_likelihoods(model, IDS)
    # What the message says to do.
    plain = tiny()
    plain.model = quantize_dynamic(plain.model, {nn.Linear})
    model = apply_output_function(copy.deepcopy(plain), "sigsoftmax").train()
    torch.testing.assert_close(model(IDS, labels=IDS).loss, plain_loss(phi(plain(IDS).logits), IDS))
