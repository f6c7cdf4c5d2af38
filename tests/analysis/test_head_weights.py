"""The output layer that an analysis looks at: its output against the reference, and what it refuses."""

import pytest
import torch

from sigsoftmax.analysis.head_weights import Contexts, HeadWeights, blocks_of, full_precision, sample_rows
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.heads import Head
from sigsoftmax.losses import functional


def tensors(vocabulary=30, width=4, contexts=7, components=1):
    generator = torch.Generator().manual_seed(0)
    weight_Vd = torch.randn(vocabulary, width, generator=generator)
    bias_V = torch.randn(vocabulary, generator=generator)
    hidden_NKd = torch.randn(contexts, components, width, generator=generator)
    return weight_Vd, bias_V, hidden_NKd, torch.randn(contexts, components, generator=generator)


@pytest.mark.parametrize("text", ["softmax", "sigsoftmax", "gss(k=0.2)", "softcap(c=3)"])
@pytest.mark.parametrize("block", [7, 1000])
def test_log_probs_of_a_single_component(text, block, monkeypatch):
    monkeypatch.setattr("sigsoftmax.analysis.head_weights.TOKENS_AT_ONCE", block)
    weight_Vd, bias_V, hidden_NKd, _ = tensors()
    for bias in (None, bias_V):
        layer = HeadWeights(weight_Vd=weight_Vd, bias_V=bias, head=text)
        logits = hidden_NKd[:, 0].double() @ weight_Vd.double().T + (0.0 if bias is None else bias.double())
        expected = functional.log_probs(logits, function=layer.function)
        torch.testing.assert_close(layer.log_probs(Contexts(hidden_NKd=hidden_NKd)), expected)


@pytest.mark.parametrize("text", ["softmax", "sigsoftmax"])
def test_log_probs_of_a_mixture_have_the_prior_of_its_kind(text):
    weight_Vd, bias_V, hidden_NKd, prior_NK = tensors(components=3)
    layer = HeadWeights(weight_Vd=weight_Vd, bias_V=bias_V, head=Head(OutputFunction.parse(text), 3))
    contexts = Contexts(hidden_NKd=hidden_NKd, prior_logits_NK=prior_NK)
    expected = functional.mixture_log_probs(
        hidden_NKd.double(), prior_NK.double(), weight_Vd.double(), function=text, linear_bias=bias_V.double()
    )
    torch.testing.assert_close(layer.log_probs(contexts), expected)
    assert not layer.has_shared_phi


def test_what_was_learned_is_written_as_learned():
    weight_Vd, _, _, _ = tensors()
    scalar = HeadWeights(weight_Vd=weight_Vd, head=Head(OutputFunction("gss", k=torch.tensor(0.25))))
    assert scalar.head_text == "gss(k=learned:0.25)"
    assert scalar.has_shared_phi
    shifted = Head(OutputFunction("shifted_sigsoftmax", b=torch.zeros(30)))
    per_class = HeadWeights(weight_Vd=weight_Vd, head=shifted)
    assert per_class.head_text == "shifted_sigsoftmax(b=per_class)"
    assert not per_class.has_shared_phi
    for layer in (scalar, per_class):
        assert str(Head.parse(layer.head_text)) == layer.head_text


def test_contexts_are_indexed_together():
    _, _, hidden_NKd, prior_NK = tensors(components=2)
    following = torch.arange(7)
    contexts = Contexts(hidden_NKd=hidden_NKd, prior_logits_NK=prior_NK, next_tokens_N=following)[2:4]
    assert len(contexts) == 2
    assert torch.equal(contexts.prior_logits_NK, prior_NK[2:4])
    assert torch.equal(contexts.next_tokens_N, following[2:4])


def test_blocks_cover_everything_once():
    assert [list(range(7))[block] for block in blocks_of(7, 3)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_samples_are_sorted_distinct_and_the_same_for_files_of_equal_length():
    rows = sample_rows(100, 30, 5)
    assert torch.equal(rows, rows.unique())
    assert torch.equal(rows, sample_rows(100, 30, 5))
    assert sample_rows(10, 30, 5).tolist() == list(range(10))


def test_precision_of_products_is_put_back():
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    try:
        switch.fp32_precision = "tf32"
        with full_precision(torch.device("cpu")):
            assert switch.fp32_precision == "ieee"
        assert switch.fp32_precision == "tf32"
    finally:
        switch.fp32_precision = before


def test_memory_bounds_the_rows():
    weight_Vd, _, _, _ = tensors()
    layer = HeadWeights(weight_Vd=weight_Vd)
    contexts = Contexts(hidden_NKd=tensors(contexts=150)[2])
    assert [(stop, len(chosen)) for stop, chosen in layer.blocks(contexts, 100 * 6 * 30 * 8)] == [(100, 100), (150, 50)]
    assert {len(chosen) for _, chosen in layer.blocks(contexts, 1)} == {1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_Vd": torch.zeros(3)}, r"W must be a floating-point matrix .* got torch.float32 of shape \(3,\)"),
        ({"weight_Vd": torch.zeros(1, 3)}, r"at least two tokens"),
        ({"bias_V": torch.zeros(3)}, r"one number for each of the 30 rows of W, got torch.float32 of shape \(3,\)"),
        ({"bias_V": torch.full((30,), torch.inf)}, r"class bias b must be finite, but holds inf at \(0,\)"),
        (
            {"head": Head(OutputFunction("gss", c=torch.zeros(3)))},
            r"'c' of 'gss' has 3 values, but there are 30 classes",
        ),
        ({"floor": 1e-8}, r"the head softmax is no mixture"),
        ({"weight_Vd": torch.ones(30, 4) / 0.0}, r"output matrix W must be finite, but holds inf at \(0, 0\)"),
    ],
)
def test_layers_that_make_no_sense(change, message):
    weight_Vd, bias_V, _, _ = tensors()
    with pytest.raises(ValueError, match=message):
        HeadWeights(**{"weight_Vd": weight_Vd, "bias_V": bias_V, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_NKd": torch.zeros(0, 1, 4)}, r"at least one context"),
        (
            {"hidden_NKd": torch.full((2, 1, 4), torch.nan)},
            r"hidden vectors H must be finite, but holds nan at \(0, 0\)",
        ),
        ({"prior_logits_NK": torch.zeros(7, 1)}, r"a single component none; got \(7, 1\)"),
        ({"next_tokens_N": torch.zeros(3, dtype=torch.int64)}, r"there are 7 contexts, but 3 next tokens"),
    ],
)
def test_contexts_that_make_no_sense(change, message):
    _, _, hidden_NKd, _ = tensors()
    with pytest.raises(ValueError, match=message):
        Contexts(**{"hidden_NKd": hidden_NKd, **change})


def test_contexts_of_another_layer():
    weight_Vd, _, hidden_NKd, _ = tensors()
    layer = HeadWeights(weight_Vd=weight_Vd)
    with pytest.raises(ValueError, match=r"H has 3 columns, but W has 4 \(H is \(7, 3\), W is \(30, 4\)\)"):
        layer.check(Contexts(hidden_NKd=hidden_NKd[..., :3]))
    with pytest.raises(ValueError, match=r"W looks transposed"):
        HeadWeights(weight_Vd=weight_Vd.T.contiguous()).check(Contexts(hidden_NKd=hidden_NKd))
    with pytest.raises(ValueError, match=r"next tokens must be between 0 and 29, got 30 to 30"):
        layer.check(Contexts(hidden_NKd=hidden_NKd, next_tokens_N=torch.full((7,), 30)))
    with pytest.raises(ValueError, match=r"must be a matrix \(contexts, width\)"):
        Contexts.of_rows(hidden_NKd, description="")
