"""The loop over classes that are spread over processes, with threads in the place of processes.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

import pytest
import torch
from tests.backends.ranks_in_threads import (
    D,
    K,
    Meeting,
    N,
    Outcome,
    V,
    assert_equals_one,
    in_one_process,
    in_threads,
    inputs,
)
from tests.tables import LEAST, Member, by_label, every_member, option_grid

from sigsoftmax import OutputFunction

UNEVEN = (4, 1, 6)
WITH_NONE = (0, 7, 4, 0)

both = pytest.mark.parametrize("mixture", [False, True], ids=["plain", "mixture"])


@both
@every_member
def test_every_member(member: Member, mixture: bool) -> None:
    tensors, target = inputs(mixture), torch.randint(V, (N,))
    learned = member.learned(V)
    function = member.make(V)
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.01}):
        one = in_one_process(function, tensors, learned, target, **options)
        assert_equals_one(one, in_threads(UNEVEN, function, tensors, learned, target, **options))


@both
@pytest.mark.parametrize("kind", ["indices", "some ignored", "a class ignored", "probabilities"])
def test_every_combination_of_options(kind: str, mixture: bool) -> None:
    tensors, member = inputs(mixture), by_label["gss(k=0.5, c per class)"]
    learned, function = member.learned(V), member.make(V)
    extras = ("log_normalizer", "argmax", "entropy")
    for count, (label, target, options) in enumerate(option_grid(N, V)):
        if label.startswith(kind):
            options = {**options, "extras": extras} if count % 3 == 0 else options
            one = in_one_process(function, tensors, learned, target, **options)
            sizes = WITH_NONE if count % 2 else UNEVEN
            assert_equals_one(one, in_threads(sizes, function, tensors, learned, target, **options))


@both
@pytest.mark.parametrize("name", ["softmax", "sigsoftmax", "relu", "sigmoid"])
def test_masked_classes_shards_and_targets(name: str, mixture: bool) -> None:
    """A shard whose classes are all masked, in all rows or in one; a target there; a row that is masked altogether."""
    tensors, function = inputs(mixture), OutputFunction(name)
    target = torch.randint(4, (N,))
    tensors["bias"][4:5] = LEAST
    tensors["bias"][9] = LEAST
    assert_equals_one(
        in_one_process(function, tensors, {}, target, extras=("argmax", "entropy", "log_normalizer")),
        in_threads(UNEVEN, function, tensors, {}, target, extras=("argmax", "entropy", "log_normalizer")),
    )
    target[2] = 4
    one = in_one_process(function, tensors, {}, target, reduction="none")
    assert one.loss[2] == torch.inf
    assert_equals_one(one, in_threads(UNEVEN, function, tensors, {}, target, reduction="none"))
    tensors["bias"][:] = LEAST
    one = in_one_process(function, tensors, {}, target)
    assert one.loss.isnan()
    for outcome in in_threads(UNEVEN, function, tensors, {}, target):
        assert outcome.loss.isnan()


@pytest.mark.parametrize("name", ["softmax", "sigsoftmax", "gss(k=0)", "sigmoid", "softcap(c=1e4)"])
@pytest.mark.parametrize("level", [0.0, 1e4, -1e4, 300.0])
def test_float32_keeps_its_digits_far_from_zero(name: str, level: float) -> None:
    """Rows whose logits lie far out, and rows whose shards lie far apart: held against float64."""
    torch.manual_seed(1)
    function = OutputFunction.parse(name)
    logits = torch.randn(N, V) + level
    logits[1, :4] -= 500.0
    logits[2, 5:] += 900.0
    logits[3, 4] -= 2e4
    eye = {"weight": torch.eye(V), "bias": torch.zeros(V)}
    target = torch.randint(V, (N,))
    exact = in_one_process(
        function, {k: t.double() for k, t in {"hidden": logits, **eye}.items()}, {}, target, reduction="none"
    )
    alone = in_one_process(function, {"hidden": logits, **eye}, {}, target, reduction="none")
    ranks = in_threads(UNEVEN, function, {"hidden": logits, **eye}, {}, target, reduction="none")
    found = Outcome(ranks[0].loss, None, {n: sum(o.gradients[n] for o in ranks) for n in alone.gradients})
    scale = 1.0 + exact.loss.abs()
    error = ((found.loss - exact.loss).abs() / scale).max()
    assert error <= 2.0 * ((alone.loss - exact.loss).abs() / scale).max() + 3e-7
    for key, gradient in exact.gradients.items():
        of_one = (alone.gradients[key] - gradient).norm()
        assert (found.gradients[key] - gradient).norm() <= 2.0 * of_one + 1e-6 * gradient.norm()


@pytest.mark.parametrize("name", ["softmax", "sigsoftmax", "gss(k=-1)", "gss(k=-2)", "gss(k=0.2)", "relu"])
def test_logits_near_the_largest_float(name: str) -> None:
    """Offsets of ranks overflow where the differences that count do not."""
    function = OutputFunction.parse(name)
    logits = torch.randn(N, V)
    logits[0, 5:] = -3e38
    logits[1] = -3e38
    logits[2, ::2] = 3e38
    logits[3] = torch.linspace(-1.0, 1.0, V) * 3.4e38
    logits[4, 3] = -1e30
    logits[5, 7:9] = -1.7e38
    tensors = {"hidden": logits, "weight": torch.eye(V), "bias": torch.zeros(V)}
    target = torch.randint(V, (N,))
    for smoothing in (0.0, 0.1):
        options = {"reduction": "none", "label_smoothing": smoothing}
        one = in_one_process(function, tensors, {}, target, **options)
        assert not one.loss.isnan().any()
        ranks = in_threads(UNEVEN, function, tensors, {}, target, **options)
        for outcome in ranks:
            # With smoothing every gap between ranks counts, and some are more than a float32.
            finite = one.loss.isfinite() & (outcome.loss.isfinite() | (smoothing == 0.0))
            torch.testing.assert_close(outcome.loss[finite], one.loss[finite], rtol=1e-5, atol=1e-5)
            assert not outcome.loss.isnan().any()
        for key, whole in one.gradients.items():
            found = sum(o.gradients[key] for o in ranks)
            if key == "bias":
                torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["softmax(alpha=1.5)", "sigsoftmax", "gss(k=0.01, c=3.7)", "relu", "softcap(c=1e4)"])
def test_the_gap_of_two_offsets_does_not_cancel(name: str) -> None:
    function = OutputFunction.parse(name)
    gap, relative = function.form.offset_gap, function.form.relative
    assert gap is not None
    near = torch.tensor([0.25, -3.0, 4.5, -1e4, 1e4])
    one, other = near.repeat_interleave(3), (near.unsqueeze(-1) + torch.tensor([-0.125, 0.0, 2.0])).flatten()
    arguments = [a.float() for a in function.arguments()]
    found = function.form.unit(*arguments) * gap(one, arguments, other, arguments)
    exact = [a.double() for a in arguments]
    offsets = [relative(peak.double(), peak.double(), *exact)[1] for peak in (one, other)]
    torch.testing.assert_close(found.double(), offsets[0] - offsets[1], rtol=1e-6, atol=1e-6)


def test_far_shifts_of_the_classes() -> None:
    """The offsets of ranks depend on the mean shift of their classes, which differ by far here."""
    tensors = {k: t.float() for k, t in inputs(False).items()}
    shift = torch.randn(V) + torch.tensor([200.0] * 4 + [-300.0] + [40.0] * 6)
    function, target = OutputFunction("shifted_sigsoftmax", b=0.0), torch.randint(V, (N,))
    one = in_one_process(function, tensors, {"b": shift}, target)
    assert_equals_one(one, in_threads(UNEVEN, function, tensors, {"b": shift}, target), tolerance=1e-5)


@both
def test_what_is_sent_does_not_grow_with_the_classes(mixture: bool) -> None:
    sent = []
    for classes in (12, 120):
        tensors = inputs(mixture, classes=classes)
        meeting = Meeting(3)
        size = classes // 3
        target = torch.randint(classes, (N,))
        in_threads((size,) * 3, OutputFunction("sigsoftmax"), tensors, {}, target, meeting=meeting, chunk_bytes=10**6)
        sent.append(sum(t.numel() for t in meeting.sent[0]))
    rows = N * K if mixture else N
    assert sent == [4 * rows] * 2, "row maximum, offset, normaliser and target of every row"


def test_no_tokens() -> None:
    tensors = {**inputs(False), "hidden": torch.empty(0, D, dtype=torch.float64)}
    target = torch.empty(0, dtype=torch.int64)
    for reduction in ("sum", "none"):
        one = in_one_process(OutputFunction("sigsoftmax"), tensors, {}, target, reduction=reduction)
        ranks = in_threads(UNEVEN, OutputFunction("sigsoftmax"), tensors, {}, target, reduction=reduction)
        assert_equals_one(one, ranks)


def test_the_reference_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'reference' cannot be used.*gather the weight"):
        in_threads(
            (V,), OutputFunction("softmax"), inputs(False), {}, torch.zeros(N, dtype=torch.int64), backend="reference"
        )
