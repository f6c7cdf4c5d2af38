"""Heads: how they are written, and what they cost."""

import pytest

from sigsoftmax.family.heads import Head


@pytest.mark.parametrize(
    "text",
    ["softmax", "gss(k=0.2)", "mos(K=4)", "moss(K=15)", "mixture(gss(k=0.2), K=4)", "shifted_sigsoftmax(b=per_class)"],
)
def test_written_and_read(text):
    head = Head.parse(text)
    assert str(head) == text
    assert Head.parse(str(head)) == head
    assert hash(Head.parse(text)) == hash(head)


def test_a_mixture_of_softmaxes_is_mos():
    assert Head.parse("mixture(softmax, K=2)") == Head.parse("mos(K=2)") != Head.parse("moss(K=2)")


@pytest.mark.parametrize(
    ("text", "numbers", "parameters", "bound"),
    [
        ("softmax", 8, 1800, 10),
        ("softmax(alpha=2)", 8, 1800, 10),
        ("sigsoftmax", 8, 1800, 200),
        ("shifted_sigsoftmax(b=per_class)", 8, 2000, 200),
        ("gss(k=learned)", 8, 1801, 200),
        ("gss(k=1)", 8, 1800, 10),
        ("mos(K=4)", 35, 1800, 200),
    ],
)
def test_what_a_head_costs(text, numbers, parameters, bound):
    head = Head.parse(text)
    assert head.numbers_per_context(8) == numbers
    assert head.output_parameters(200, 8) == parameters
    assert head.rank_bound(200, 400, 8) == bound


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mos", r"cannot read the mixture 'mos'; write 'mos\(K=4\)'"),
        ("mos(k=4)", r"cannot read the mixture"),
        ("mos(K=0)", r"at least one component, got 0"),
        ("sigsoftmx", r"did you mean 'sigsoftmax'"),
    ],
)
def test_bad_heads(text, message):
    with pytest.raises(ValueError, match=message):
        Head.parse(text)
