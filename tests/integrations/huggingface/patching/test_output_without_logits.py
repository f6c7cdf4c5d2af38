"""Outputs of calls that stored no logits: they say so, and are otherwise those of transformers."""

import copy
import dataclasses
import pickle

import pytest

pytest.importorskip("transformers")

import torch
from tests.integrations.huggingface.tiny import tiny, tokens
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutputWithPast

from sigsoftmax.integrations.huggingface import apply_output_function

IDS = tokens()


@pytest.fixture
def model():
    return apply_output_function(tiny(), "sigsoftmax").train()


def test_whoever_reads_the_logits_of_a_training_step_is_told_why_there_are_none(model):
    output = model(IDS, labels=IDS)
    with pytest.warns(UserWarning, match=r"no logits: .* training mode.*logits_with_labels='always'") as told:
        assert output.logits is None
    assert told[0].filename == __file__
    with pytest.raises(KeyError, match="logits_with_labels='always'"):
        output["logits"]
    apply_output_function(model, logits_with_labels="never")
    with pytest.warns(UserWarning, match="evaluation mode with logits_with_labels='never'"):
        assert model.eval()(IDS, labels=IDS).logits is None


def test_logits_that_are_there_are_read_without_a_word(model):
    assert model(IDS).logits is not None
    assert model.eval()(IDS, labels=IDS).logits is not None
    output = model.train()(IDS, labels=IDS)
    output.logits = torch.ones(2)
    assert torch.equal(output.logits, torch.ones(2))
    assert torch.equal(output["logits"], torch.ones(2))


def test_what_copies_or_prints_an_output_is_not_told(model):
    output = model(IDS, labels=IDS, use_cache=False)
    assert isinstance(output, CausalLMOutputWithPast)
    assert "logits=None" in repr(output)
    detached = dataclasses.replace(output, loss=output.loss.detach())
    leaves, structure = pytree.tree_flatten(output)
    copies = [
        detached,
        type(output)(dict(output.items())),
        pytree.tree_unflatten(leaves, structure),
        copy.deepcopy(detached),
        pickle.loads(pickle.dumps(detached)),  # noqa: S301
    ]
    for one in copies:
        assert torch.equal(one.loss, output.loss)
        assert list(one.keys()) == ["loss"]
