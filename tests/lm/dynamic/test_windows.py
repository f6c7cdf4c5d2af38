"""Windows of a text: how many, of what length, and what is refused."""

import pytest
import torch

from sigsoftmax.lm.config import ModelConfig
from sigsoftmax.lm.dynamic.windows import WindowGradients, check_text, in_turn, trainable_copy, window_count
from sigsoftmax.lm.model.language_model import LanguageModel

WORDS = 9
CONFIG = ModelConfig(head="shifted_sigsoftmax", embedding=4, hidden=(5, 4))


@pytest.mark.parametrize(
    ("tokens", "windows"), [(73_760, 14_752), (82_430, 16_486), (217_646, 43_529), (245_569, 49_114)]
)
def test_windows_of_the_published_texts(tokens, windows):
    assert window_count(tokens, 5) == windows


def test_windows_of_the_training_statistics():
    assert window_count(929_589 // 100, 5) == 1_859
    assert window_count(2_088_628 // 100, 5) == 4_177


def test_few_tokens():
    assert [window_count(tokens, 5) for tokens in (2, 6, 7)] == [1, 1, 2]
    with pytest.raises(ValueError, match="at least 2 tokens"):
        window_count(1, 5)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([3]), "at least 2 tokens, since the first is not scored, got 1"),
        (torch.tensor([], dtype=torch.int64), "at least 2 tokens"),
        (torch.tensor([3, WORDS]), "between 0 and 8, the vocabulary being 9 words, got 9"),
        (torch.tensor([3, -1]), "got -1"),
        (torch.tensor([3.0, 1.0]), "must be int64, got torch.float32"),
        (torch.tensor([[3, 1]]), r"the shape \(1, 2\)"),
    ],
)
def test_texts_that_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        check_text(ids, WORDS)


def test_a_copy_keeps_the_tie_and_has_gradients_for_all():
    model = LanguageModel(CONFIG, WORDS).requires_grad_(False)
    duplicate = trainable_copy(model)
    assert duplicate.output.weight is duplicate.embedding
    assert [name for name, p in duplicate.named_parameters() if p.requires_grad] == [
        name for name, _ in model.named_parameters()
    ]
    assert not any(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        duplicate.embedding.zero_()
    assert model.embedding.abs().min() > 0.0


def test_gradients_are_those_of_autograd_and_the_state_is_carried():
    model = LanguageModel(CONFIG, WORDS, seed=3)
    text_RB = torch.randint(WORDS, (8, 2))
    seen = []
    run = WindowGradients(model, text_RB, seen.append, window=3)
    assert len(list(run.launch(lambda _: None))) == run.windows == len(seen) == 3

    features = model.features(text_RB[:3], model.zero_state(2))
    expected = torch.autograd.grad(model.loss(features, text_RB[1:4]), list(model.parameters()))
    torch.testing.assert_close(seen[0], list(expected), rtol=0, atol=0)
    assert expected[-1].abs() > 0.0  # of the learned b

    whole = model.loss(model.features(text_RB[:-1], model.zero_state(2)), text_RB[1:])
    assert run.reports[0].loss == pytest.approx(whole.item(), rel=1e-6)  # windows of 3, 3 and 1
    assert run.scored() == 14
    assert [run.scored(windows) for windows in (1, 2, 3)] == [6, 12, 14]


def test_a_broken_window_is_named():
    model = LanguageModel(CONFIG, WORDS)
    count = 0

    def break_after_second(gradients):
        nonlocal count
        count += 1
        if count == 2:
            model.embedding.fill_(torch.nan)

    told = []
    run = WindowGradients(model, torch.randint(WORDS, (21, 1)), break_after_second, window=5)
    for _ in run.launch(told.append):
        pass
    assert run.reports[0].broken_at == 3
    assert not told


def test_a_limit():
    model = LanguageModel(CONFIG, WORDS)
    seen = []
    run = WindowGradients(model, torch.randint(WORDS, (21, 1)), seen.append, window=5, limit=2)
    for _ in run.launch(lambda _: None):
        pass
    assert len(seen) == 2
    assert run.scored() == 10
    with pytest.raises(ValueError, match="limit must be a positive integer, got 0"):
        WindowGradients(model, torch.randint(WORDS, (21, 1)), seen.append, window=5, limit=0)


def test_precisions_of_gpus_are_refused_elsewhere():
    with pytest.raises(ValueError, match="'bf16' is for CUDA devices"):
        WindowGradients(
            LanguageModel(CONFIG, WORDS), torch.randint(WORDS, (21, 1)), lambda _: None, window=5, precision="bf16"
        )


def test_an_error_of_one_run_closes_the_others():
    closed = []

    def run(fails):
        try:
            yield
            if fails:
                raise RuntimeError("broken")
            yield
        finally:
            closed.append(fails)

    with pytest.raises(RuntimeError, match="broken"):
        list(in_turn([run(False), run(True), run(False)]))
    assert sorted(closed) == [False, False, True]
