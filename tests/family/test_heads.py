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


@pytest.mark.parametrize(
    "text",
    [
        "mos(K=4, latent=tanh)",
        "moss(K=2, latent=residual, prior=softmax)",
        "mixture(gss(k=0), K=4, prior=gss(k=2.0, c=1.0))",
    ],
)
def test_options_of_a_mixture_are_read_where_they_are_allowed(text):
    head = Head.parse(text, allow_options=True)
    assert Head.parse(str(head), allow_options=True) == head
    assert (head.latent, head.prior) != (None, None)
    for given in (text, head):
        with pytest.raises(
            ValueError,
            match=r"latent and prior cannot be chosen here, where no layer makes them; write '.*K=\d\)' instead of",
        ):
            Head.parse(given)


def test_parts_of_a_head_are_checked():
    member = Head.parse("softmax").function
    assert Head.parse(member) == Head.parse("softmax")
    with pytest.raises(ValueError, match=r"must be a whole number, got 2.5"):
        Head(member, 2.5)
    with pytest.raises(ValueError, match="latent must be one of 'tanh', 'linear', 'residual', got 'cubic'"):
        Head(member, 2, "cubic")
    with pytest.raises(ValueError, match="one component has neither latent nor prior"):
        Head(member, 1, "tanh")


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
        ("gss(k=0.2, K=4)", r"no parameter 'K'.*; a mixture of it is written as in 'mixture\(gss\(k=0\), K=4\)'"),
        ("sigsoftmx", r"did you mean 'sigsoftmax'"),
        (["sigsoftmax"], r"given by its name, such as 'sigsoftmax' or 'mos\(K=4\)', .* got list"),
    ],
)
def test_bad_heads(text, message):
    with pytest.raises(ValueError, match=message):
        Head.parse(text)
