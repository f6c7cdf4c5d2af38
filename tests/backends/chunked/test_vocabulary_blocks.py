"""A walk over the classes: right gradients, and no logits computed twice that could have been kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sigsoftmax.backends.chunked import providers
from sigsoftmax.backends.chunked.providers import LinearLogits
from sigsoftmax.backends.chunked.vocabulary_blocks import ClassWalk, cut

DTYPE = torch.bfloat16


def source_of(
    tokens: int, features: int, classes: int, slab_tokens: int, components: int = 1
) -> tuple[LinearLogits, Tensor, Tensor, Tensor]:
    hidden = torch.randn(tokens, components, features).to(DTYPE)
    weight, bias = torch.randn(classes, features).to(DTYPE), torch.randn(classes).to(DTYPE)
    source = LinearLogits(
        hidden,
        weight,
        bias,
        DTYPE,
        slab_tokens * components * classes * 2,
        needs_hidden=True,
        needs_weight=True,
        needs_bias=True,
        weight_gradient="exact",
    )
    assert source.walks_classes
    return source, hidden, weight, bias


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize(
    ("tokens", "features", "classes", "slab_tokens", "components"),
    [(12, 4, 601, 5, 1), (12, 12, 601, 2, 1), (6, 40, 601, 1, 1), (10, 6, 333, 4, 3), (40, 3, 301, 1, 1)],
)
def test_every_class_is_measured_once_and_has_its_gradient(
    tokens: int,
    features: int,
    classes: int,
    slab_tokens: int,
    components: int,
    is_measured: bool,
    alignment: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(providers, "row_alignment", lambda device: alignment)
    source, hidden, weight, bias = source_of(tokens, features, classes, slab_tokens, components)
    rows = hidden.flatten(0, 1)
    logits = torch.addmm(bias, rows, weight.t())
    walk = ClassWalk(source)
    if is_measured:
        seen = []
        for first, part in walk.measured():
            torch.testing.assert_close(part, logits[:, first : first + part.shape[1]])
            seen += range(first, first + part.shape[1])
        assert seen == list(range(classes))
    by_logits = torch.randn(rows.shape[0], classes).to(DTYPE)
    seen = []
    for first, part, out in walk.gradients():
        span = slice(first, first + part.shape[1])
        torch.testing.assert_close(part, logits[:, span])
        out.copy_(by_logits[:, span])
        seen += range(first, first + part.shape[1])
    assert sorted(seen) == list(range(classes))
    assert source.hidden_gradient is not None
    assert source.weight_gradient is not None
    assert source.bias_gradient is not None
    torch.testing.assert_close(source.weight_gradient, by_logits.t() @ rows)
    torch.testing.assert_close(source.hidden_gradient.flatten(0, 1), by_logits @ weight, rtol=0.02, atol=0.3)
    torch.testing.assert_close(source.bias_gradient, by_logits.float().sum(0))


@pytest.mark.parametrize(
    ("tokens", "features", "computed_twice"),
    [(512, 1024, 0), (512, 512, 0), (512, 256, 1024), (512, 128, 1536)],
    ids=["fewer tokens", "as many", "twice as many", "four times"],
)
def test_logits_are_kept_in_the_memory_of_the_weights_gradient(
    tokens: int, features: int, computed_twice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slab keeps 512 of 2,560 classes; of the others as many as there are features for each token."""
    computed: list[int] = []
    compute = LinearLogits.logits_of

    def counted(self: LinearLogits, rows_Rd: Tensor, first: int, last: int, out_RV: Tensor) -> Tensor:
        computed.extend(range(first, last))
        return compute(self, rows_Rd, first, last, out_RV)

    monkeypatch.setattr(LinearLogits, "logits_of", counted)
    source, *_ = source_of(tokens, features, 2560, -(-tokens // 5) + 1)
    source.slab = source.slab[: tokens * 512]
    walk = ClassWalk(source)
    for _ in walk.measured():
        pass
    for *_, out in walk.gradients():
        out.zero_()
    assert len(computed) - 2560 == computed_twice
    assert set(computed) == set(range(2560))


@pytest.mark.parametrize(("first", "last", "most"), [(0, 0, 64), (0, 1000, 128), (64, 960, 896), (128, 129, 64)])
def test_ranges_are_few_and_alike(first: int, last: int, most: int) -> None:
    ranges = cut(first, last, most, 64)
    assert [i for begin, end in ranges for i in range(begin, end)] == list(range(first, last))
    assert len(ranges) == -(-(last - first) // most)
    assert all(end - begin <= most for begin, end in ranges)
    assert all(begin % 64 == 0 for begin, _ in ranges)
