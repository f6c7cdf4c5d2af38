"""Sizes, initialisation, tying, dropouts and heads of the model."""

import dataclasses

import pytest
import torch
from tests.lm.masks import draw_masks
from torch.nn import functional as F

from sigsoftmax import OutputFunction
from sigsoftmax.lm.config import ModelConfig
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.model.regularization import Masks

AWD = ModelConfig()
MOS_PTB = ModelConfig(head="mos(K=15)", embedding=280, hidden=(960, 960, 620), floor=1e-8, dropout_latent=0.29)
MOS_WT2 = ModelConfig(head="moss(K=15)", embedding=300, hidden=(1150, 1150, 650), floor=1e-8, dropout_latent=0.29)
SMALL = ModelConfig(embedding=8, hidden=(12, 8))
SMALL_MIXTURE = ModelConfig(head="moss(K=3)", embedding=8, hidden=(12, 10), floor=1e-8)
HEADS = [
    "softmax",
    "relu",
    "sigmoid",
    "sigsoftmax",
    "shifted_sigsoftmax",
    "gss(k=0.2)",
    "gss(k=learned)",
    "softcap(c=5)",
]
NO_MASKS = Masks(
    words_V=None, input_1BD=None, hidden_1BH=(None,), output_1BH=None, latent_1BKD=None, weights_4HH=(None, None)
)


@pytest.mark.parametrize(
    ("config", "words", "parameters", "tensors"),
    [
        (AWD, 10_000, 24_221_600, 14),
        (AWD, 33_278, 33_556_078, 14),
        (MOS_PTB, 10_000, 21_500_620, 17),
        (MOS_WT2, 33_278, 34_909_528, 17),
    ],
)
def test_published_sizes(config, words, parameters, tensors):
    model = LanguageModel(config, words)
    found = list(model.parameters())
    assert sum(parameter.numel() for parameter in found) == parameters
    assert len(found) == tensors


def test_initialisation():
    model = LanguageModel(ModelConfig(head="mos(K=4)", embedding=30, hidden=(40, 50)), 2000, seed=3)
    assert model.embedding.abs().max() <= 0.1
    assert model.embedding.std().item() == pytest.approx(0.2 / 12**0.5, rel=0.02)
    assert (model.output.bias == 0.0).all()
    for parameter in (model.output.prior.weight, model.output.latent.weight, model.output.latent.bias):
        assert parameter.abs().max() <= 50**-0.5
    assert model.output.latent.weight.std().item() == pytest.approx(50**-0.5 / 3**0.5, rel=0.05)
    again = LanguageModel(model.config, 2000, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(model.embedding, LanguageModel(model.config, 2000, seed=4).embedding)


def test_one_matrix_is_embedding_and_output():
    model = LanguageModel(SMALL, 30)
    assert model.output.weight is model.embedding
    tokens = torch.randint(30, (6, 2))
    features = model.features(tokens, model.zero_state(2))
    model.loss(features, tokens).backward()
    assert model.embedding.grad.abs().sum(1).min() > 0.0, "the output side reaches every word"


def test_word_dropout_zeroes_a_word_everywhere_at_the_input_and_nowhere_at_the_output():
    model = LanguageModel(SMALL, 30)
    kept = torch.ones(30)
    kept[7] = 0.0
    masks = Masks(**{**vars(NO_MASKS), "words_V": kept})
    tokens = torch.tensor([[7, 1], [2, 7], [3, 3]])
    dropped = model.features(tokens, model.zero_state(2), masks)
    silent = LanguageModel(SMALL, 30)
    silent.load_state_dict(model.state_dict())
    with torch.no_grad():
        silent.embedding[7] = 0.0
    expected = silent.features(tokens, silent.zero_state(2))
    torch.testing.assert_close(dropped.raw_TBH, expected.raw_TBH)
    # The dropped word can still be predicted.
    log_probs = model.log_probs(dropped)
    logits = F.linear(dropped.dropped_TBH, model.embedding, model.output.bias)
    torch.testing.assert_close(log_probs, torch.log_softmax(logits, -1))


def test_the_input_mask_is_the_same_at_all_times():
    model = LanguageModel(SMALL, 30)
    mask = torch.zeros(1, 2, 8)
    masks = Masks(**{**vars(NO_MASKS), "input_1BD": mask})
    features = model.features(torch.randint(30, (5, 2)), model.zero_state(2), masks)
    other = model.features(torch.randint(30, (5, 2)), model.zero_state(2), masks)
    torch.testing.assert_close(features.raw_TBH, other.raw_TBH)


def test_the_head_sees_the_dropped_output_and_the_raw_one_is_kept():
    model = LanguageModel(SMALL, 30)
    masks = Masks(**{**vars(NO_MASKS), "output_1BH": torch.full((1, 2, 8), 2.0)})
    features = model.features(torch.randint(30, (5, 2)), model.zero_state(2), masks)
    torch.testing.assert_close(features.dropped_TBH, 2.0 * features.raw_TBH)


def test_the_latent_mask_of_one_pass_does_not_reach_the_next():
    model = LanguageModel(SMALL_MIXTURE, 30)
    tokens, state = torch.randint(30, (5, 2)), model.zero_state(2)
    plain = model.log_probs(model.features(tokens, state))
    masks = Masks(**{**vars(NO_MASKS), "latent_1BKD": torch.zeros(1, 2, 24)})
    masked = model.log_probs(model.features(tokens, state, masks))
    assert (masked - plain).abs().max() > 1e-3
    torch.testing.assert_close(model.log_probs(model.features(tokens, state)), plain)


@pytest.mark.parametrize("head", HEADS)
def test_every_member_is_a_head(head):
    model = LanguageModel(ModelConfig(head=head, embedding=8, hidden=(12, 8)), 30)
    tokens, targets = torch.randint(30, (6, 2)), torch.randint(30, (6, 2))
    generator = torch.Generator().manual_seed(0)
    masks = draw_masks(model.config, words=30, batch=2, generator=generator)
    features = model.features(tokens, model.zero_state(2), masks)
    loss = model.loss(features, targets)
    logits = F.linear(features.dropped_TBH, model.embedding, model.output.bias)
    phi = model.output.function.phi(logits)
    torch.testing.assert_close(loss, F.cross_entropy(phi.flatten(0, 1), targets.flatten()))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert OutputFunction.parse(head).name in str(model.output)


@pytest.mark.parametrize("head", ["mos(K=3)", "moss(K=3)"])
def test_mixtures_by_the_published_formula(head):
    model = LanguageModel(ModelConfig(head=head, embedding=8, hidden=(12, 10), floor=1e-8), 30)
    tokens, targets = torch.randint(30, (6, 2)), torch.randint(30, (6, 2))
    features = model.features(tokens, model.zero_state(2))
    hidden = features.dropped_TBH
    latent = torch.tanh(F.linear(hidden, model.output.latent.weight, model.output.latent.bias)).unflatten(-1, (3, 8))
    logits = F.linear(latent, model.embedding, model.output.bias)
    prior_logits = F.linear(hidden, model.output.prior.weight)
    if head.startswith("moss"):
        logits, prior_logits = (z + F.logsigmoid(z) for z in (logits, prior_logits))
    mixed = (torch.softmax(prior_logits, -1).unsqueeze(-1) * torch.softmax(logits, -1)).sum(-2)
    expected = -torch.log(mixed + 1e-8).gather(-1, targets.unsqueeze(-1)).mean()
    torch.testing.assert_close(model.loss(features, targets), expected)


@pytest.mark.parametrize("head", ["mos(K=3, latent=linear)", "mos(K=3, latent=residual, prior=sigsoftmax)"])
def test_mixtures_of_other_latent_vectors(head):
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(head=head, embedding=8, hidden=(12, 8), floor=1e-8), 30)
    is_residual = "residual" in head
    if is_residual:
        assert model.output.latent.bias is None
        assert not model.output.latent.weight.any()
        torch.nn.init.normal_(model.output.latent.weight)
    tokens, targets = torch.randint(30, (6, 2)), torch.randint(30, (6, 2))
    features = model.features(tokens, model.zero_state(2))
    hidden = features.dropped_TBH
    latent = F.linear(hidden, model.output.latent.weight, model.output.latent.bias).unflatten(-1, (3, 8))
    logits = F.linear(latent + hidden.unsqueeze(-2) if is_residual else latent, model.embedding, model.output.bias)
    prior_logits = F.linear(hidden, model.output.prior.weight)
    if is_residual:
        prior_logits = prior_logits + F.logsigmoid(prior_logits)
    mixed = (torch.softmax(prior_logits, -1).unsqueeze(-1) * torch.softmax(logits, -1)).sum(-2)
    expected = -torch.log(mixed + 1e-8).gather(-1, targets.unsqueeze(-1)).mean()
    torch.testing.assert_close(model.loss(features, targets), expected)


def test_a_mixture_that_does_not_say_begins_with_the_published_latent_vectors():
    first = LanguageModel(SMALL_MIXTURE, 30, seed=1)
    second = LanguageModel(
        dataclasses.replace(SMALL_MIXTURE, head="moss(K=3, latent=tanh, prior=sigsoftmax)"), 30, seed=1
    )
    assert first.output.latent_kind == second.output.latent_kind == "tanh"
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])


def test_a_residual_mixture_needs_equal_widths():
    with pytest.raises(ValueError, match=r"width must be that of the embedding, 8, got 10; set model\.hidden together"):
        ModelConfig(head="mos(K=3, latent=residual)", embedding=8, hidden=(12, 10))


def test_a_mixture_may_have_another_width_and_others_may_not():
    with pytest.raises(ValueError, match="must be that of the embedding, 8, got 10"):
        ModelConfig(embedding=8, hidden=(12, 10))


def test_a_model_of_one_word_is_refused():
    with pytest.raises(ValueError, match="at least 2 words, got 1"):
        LanguageModel(SMALL, 1)
