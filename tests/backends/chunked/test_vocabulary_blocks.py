"""Blocks of the vocabulary: right gradients, and no logits computed twice that could have been kept."""

from __future__ import annotations

import pytest
import torch
from tests.backends.problems import problem_of
from torch import Tensor

from sigsoftmax.backends.chunked import chunk_plan
from sigsoftmax.backends.chunked.logits import LinearLogits
from sigsoftmax.backends.chunked.vocabulary_blocks import VocabularyBlocks, even_blocks
from sigsoftmax.contract.operands import Operands

DTYPE = torch.bfloat16


def provider_of(
    tokens: int, features: int, classes: int, chunk_tokens: int, components: int = 1
) -> tuple[LinearLogits, Tensor, Tensor, Tensor]:
    hidden = torch.randn(tokens, components, features).to(DTYPE)
    weight, bias = torch.randn(classes, features).to(DTYPE), torch.randn(classes).to(DTYPE)
    leaves = [t.clone().requires_grad_() for t in (hidden if components > 1 else hidden[:, 0], weight, bias)]
    prior = torch.zeros(tokens, components) if components > 1 else None
    operands = Operands(*leaves, prior, torch.zeros(tokens, dtype=torch.int64))
    chunk_bytes = chunk_tokens * components * classes * 2
    problem = problem_of(operands, chunk_bytes=chunk_bytes, weight_gradient="exact")
    provider = LinearLogits(problem, Operands(*(leaf.detach() for leaf in leaves)))
    assert provider.tiles_vocabulary
    return provider, hidden, weight, bias


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("is_forward_run", [False, True])
@pytest.mark.parametrize(
    ("tokens", "features", "classes", "chunk_tokens", "components"),
    [(12, 4, 601, 5, 1), (12, 12, 601, 2, 1), (6, 40, 601, 1, 1), (10, 6, 333, 4, 3), (40, 3, 301, 1, 1)],
)
def test_every_class_is_computed_once_and_has_its_gradient(
    tokens: int,
    features: int,
    classes: int,
    chunk_tokens: int,
    components: int,
    is_forward_run: bool,
    alignment: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_plan, "row_alignment", lambda device: alignment)
    provider, hidden, weight, bias = provider_of(tokens, features, classes, chunk_tokens, components)
    rows = hidden.flatten(0, 1)
    logits = torch.addmm(bias, rows, weight.t())
    blocks = VocabularyBlocks(provider)
    if is_forward_run:
        seen = []
        for first, part in blocks.forward():
            torch.testing.assert_close(part, logits[:, first : first + part.shape[1]])
            seen += range(first, first + part.shape[1])
        assert seen == list(range(classes))
    by_logits = torch.randn(rows.shape[0], classes).to(DTYPE)
    seen = []
    for first, part, out in blocks.backward():
        span = slice(first, first + part.shape[1])
        torch.testing.assert_close(part, logits[:, span])
        out.copy_(by_logits[:, span])
        seen += range(first, first + part.shape[1])
    assert sorted(seen) == list(range(classes))
    assert provider.hidden_gradient is not None
    assert provider.weight_gradient is not None
    assert provider.bias_gradient is not None
    torch.testing.assert_close(provider.weight_gradient, by_logits.t() @ rows)
    torch.testing.assert_close(provider.hidden_gradient.flatten(0, 1), by_logits @ weight, rtol=0.02, atol=0.3)
    torch.testing.assert_close(provider.bias_gradient, by_logits.float().sum(0))


@pytest.mark.parametrize(
    ("tokens", "features", "computed_twice"),
    [(512, 1024, 0), (512, 512, 0), (512, 256, 1024), (512, 128, 1536)],
    ids=["fewer tokens", "as many", "twice as many", "four times"],
)
def test_logits_are_kept_in_the_memory_of_the_weights_gradient(
    tokens: int, features: int, computed_twice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a chunk keeps 512 of 2,560 classes; of the others as many as there are features for each token."""
    computed: list[int] = []
    compute = LinearLogits.logits_of

    def counted(self: LinearLogits, rows_Rd: Tensor, first: int, last: int, out_RV: Tensor) -> Tensor:
        computed.extend(range(first, last))
        return compute(self, rows_Rd, first, last, out_RV)

    monkeypatch.setattr(LinearLogits, "logits_of", counted)
    provider, *_ = provider_of(tokens, features, 2560, -(-tokens // 5) + 1)
    provider.memory = provider.memory[: tokens * 512]
    blocks = VocabularyBlocks(provider)
    for _ in blocks.forward():
        pass
    for *_, out in blocks.backward():
        out.zero_()
    assert len(computed) - 2560 == computed_twice
    assert set(computed) == set(range(2560))


@pytest.mark.parametrize(("first", "last", "most"), [(0, 0, 64), (0, 1000, 128), (64, 960, 896), (128, 129, 64)])
def test_blocks_are_few_and_alike(first: int, last: int, most: int) -> None:
    blocks = even_blocks(first, last, most, 64)
    assert [i for begin, end in blocks for i in range(begin, end)] == list(range(first, last))
    assert len(blocks) == -(-(last - first) // most)
    assert all(end - begin <= most for begin, end in blocks)
    assert all(begin % 64 == 0 for begin, _ in blocks)
