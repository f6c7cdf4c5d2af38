"""The log-output matrix of an output layer against plain torch."""

import pytest
import torch
from torch.nn import functional as F

from sigsoftmax import OutputFunction
from sigsoftmax.analysis import log_outputs as head_sources
from sigsoftmax.analysis.log_outputs import OutputHead, full_precision
from sigsoftmax.analysis.spectrum.matrix_readers import tensors
from sigsoftmax.family.heads import Head
from sigsoftmax.losses import functional

CONTEXTS, WORDS, WIDTH = 30, 11, 4


def numbers(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def rows(head, **arguments):
    return torch.cat([block.clone() for block in tensors(head.source(**arguments), 0)])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(head_sources, "BLOCK_BYTES", 8 * WORDS * 7)


@pytest.mark.parametrize("name", ["softmax", "sigsoftmax", "gss(k=0.2)", "sigmoid", "relu", "softcap(c=5)"])
@pytest.mark.parametrize("bias", [True, False])
def test_rows_are_log_probabilities_of_the_head(name, bias):
    hidden, weight, bias_M = numbers(CONTEXTS, WIDTH), numbers(WORDS, WIDTH), numbers(WORDS) if bias else None
    head = OutputHead(hidden=hidden, weight_Md=weight, bias_M=bias_M, head=name)
    expected = functional.log_probs(F.linear(hidden, weight, bias_M), function=name)
    torch.testing.assert_close(rows(head), expected)
    chosen = torch.tensor([3, 8, 29])
    torch.testing.assert_close(rows(head, contexts=chosen), expected[chosen])
    torch.testing.assert_close(rows(head, quick=True), expected)


def test_mixtures_and_parameters_per_class():
    hidden, prior, weight = numbers(CONTEXTS, 3, WIDTH), numbers(CONTEXTS, 3), numbers(WORDS, WIDTH)
    mixture = OutputHead(hidden=hidden, weight_Md=weight, head="moss(K=3)", prior_logits_TK=prior, floor=1e-8)
    expected = functional.mixture_log_probs(hidden, prior, weight, function="sigsoftmax", floor=1e-8)
    torch.testing.assert_close(rows(mixture), expected)
    shifted = Head(OutputFunction("shifted_sigsoftmax", b=numbers(WORDS)))
    head = OutputHead(hidden=hidden[:, 0], weight_Md=weight, head=shifted)
    torch.testing.assert_close(rows(head), functional.log_probs(hidden[:, 0] @ weight.T, function=shifted.function))


def test_arithmetic_is_float32_or_more_and_never_autocast():
    half = OutputHead(
        hidden=numbers(CONTEXTS, WIDTH, dtype=torch.bfloat16), weight_Md=numbers(WORDS, WIDTH, dtype=torch.bfloat16)
    )
    with torch.autocast("cpu", torch.bfloat16):
        found = rows(half)
    assert found.dtype == torch.float32
    expected = torch.log_softmax(half.hidden.double() @ half.weight_Md.double().T, -1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    assert rows(OutputHead(hidden=half.hidden, weight_Md=half.weight_Md, dtype=torch.float64)).dtype == torch.float64


def test_a_matrix_of_another_dtype_is_converted_in_parts(monkeypatch):
    monkeypatch.setattr(head_sources, "WORDS_AT_ONCE", 4)
    for bias in (None, numbers(WORDS)):
        head = OutputHead(hidden=numbers(CONTEXTS, WIDTH), weight_Md=numbers(WORDS, WIDTH).float(), bias_M=bias)
        logits = head.hidden @ head.weight_Md.double().T + (0.0 if bias is None else bias)
        torch.testing.assert_close(rows(head, dtype=torch.float64), torch.log_softmax(logits, -1))


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_Md": numbers(WORDS)}, r"expected a floating-point output matrix \(words, features\)"),
        ({"hidden": numbers(CONTEXTS, 5)}, r"expected hidden vectors \(T, d\) with d = 4 for the head softmax"),
        ({"hidden": numbers(0, WIDTH)}, "expected hidden vectors"),
        ({"bias_M": numbers(3)}, r"expected a bias of shape \(11,\), got \(3,\)"),
        ({"head": "mos(K=2)"}, r"expected hidden vectors \(T, K = 2, d\)"),
        ({"head": "mos(K=2)", "hidden": numbers(CONTEXTS, 2, WIDTH)}, r"expected prior_logits_TK of shape \(30, 2\)"),
        ({"floor": 1e-8}, "is no mixture"),
        ({"dtype": torch.bfloat16}, "dtype must be torch.float32 or torch.float64"),
        ({"hidden": numbers(CONTEXTS, WIDTH) / 0.0}, "hidden has infinite or NaN entries"),
    ],
)
def test_bad_heads(changes, message):
    with pytest.raises(ValueError, match=message):
        OutputHead(**{"hidden": numbers(CONTEXTS, WIDTH), "weight_Md": numbers(WORDS, WIDTH), **changes})
