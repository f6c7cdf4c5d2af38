"""Mask shapes, locking and scaling; AR on the dropped output, TAR on the raw one."""

import pytest
import torch
from tests.lm.masks import draw_masks

from sigsoftmax.lm.config import ModelConfig
from sigsoftmax.lm.model.regularization import MaskSampler, penalties

CONFIG = ModelConfig(
    head="moss(K=3)",
    embedding=10,
    hidden=(12, 14, 16),
    dropout_words=0.1,
    dropout_input=0.2,
    dropout_hidden=0.3,
    dropout_output=0.4,
    dropout_latent=0.5,
    weight_drop=0.6,
)


def masks_of(config=CONFIG, words=1000, batch=5, seed=0):
    return draw_masks(config, words=words, batch=batch, generator=torch.Generator().manual_seed(seed))


def test_every_mask_has_its_shape():
    masks = masks_of()
    assert masks.words_V.shape == (1000,)
    assert masks.input_1BD.shape == (1, 5, 10)
    assert [mask.shape for mask in masks.hidden_1BH] == [(1, 5, 12), (1, 5, 14)]
    assert masks.output_1BH.shape == (1, 5, 16)
    assert masks.latent_1BKD.shape == (1, 5, 30)
    assert [drop.kept_4HH.shape for drop in masks.weights_4HH] == [(48, 12), (56, 14), (64, 16)]


@pytest.mark.parametrize(
    ("name", "rate"),
    [("words_V", 0.1), ("input_1BD", 0.2), ("output_1BH", 0.4), ("latent_1BKD", 0.5)],
)
def test_kept_values_are_scaled_so_that_the_mean_is_one(name, rate):
    drawn = torch.cat([getattr(masks_of(seed=seed), name).flatten() for seed in range(200)])
    assert drawn.unique().tolist() == pytest.approx([0.0, 1.0 / (1.0 - rate)])
    assert (drawn == 0.0).double().mean() == pytest.approx(rate, abs=0.02)


def test_weight_masks_drop_single_elements():
    drop = masks_of(ModelConfig(embedding=80, hidden=(80,), weight_drop=0.25)).weights_4HH[0]
    assert drop.kept_4HH.dtype == torch.bool
    assert drop.scale == pytest.approx(1.0 / 0.75)
    assert drop.kept_4HH.double().mean() == pytest.approx(0.75, abs=0.02)
    assert not drop.kept_4HH.all(0).any()
    assert drop.kept_4HH.any(0).all()
    applied = drop.applied_to(torch.full((320, 80), 3.0))
    torch.testing.assert_close(applied, torch.where(drop.kept_4HH, 4.0, 0.0))


def test_masks_of_layers_have_the_dtype_of_the_lstm_and_those_of_the_embedding_do_not():
    sampler = MaskSampler(CONFIG, vocabulary_size=1000, batch=5, device=torch.device("cpu"), dtype=torch.bfloat16)
    masks, exact = sampler.draw(torch.Generator().manual_seed(3)), masks_of(seed=3)
    for name in ("words_V", "input_1BD"):
        assert torch.equal(getattr(masks, name), getattr(exact, name))
    for name in ("output_1BH", "latent_1BKD"):
        assert torch.equal(getattr(masks, name), getattr(exact, name).bfloat16())
    assert torch.equal(masks.hidden_1BH[1], exact.hidden_1BH[1].bfloat16())


def test_a_rate_of_zero_draws_nothing():
    off = {f"dropout_{name}": 0.0 for name in ("words", "input", "hidden", "output")}
    masks = masks_of(ModelConfig(embedding=8, hidden=(9, 8), weight_drop=0.0, **off))
    assert masks.words_V is None
    assert masks.input_1BD is None
    assert masks.output_1BH is None
    assert masks.latent_1BKD is None
    assert masks.hidden_1BH == (None,)
    assert masks.weights_4HH == (None, None)


def test_masks_follow_the_generator():
    first, again, other = masks_of(seed=1), masks_of(seed=1), masks_of(seed=2)
    assert torch.equal(first.input_1BD, again.input_1BD)
    assert not torch.equal(first.weights_4HH[0].kept_4HH, other.weights_4HH[0].kept_4HH)


def test_penalties_by_hand():
    raw = torch.tensor([[[1.0, 2.0]], [[4.0, 0.0]]])  # T=2, B=1, H=2
    dropped = torch.tensor([[[2.0, 0.0]], [[0.0, 1.0]]])
    activation = (4.0 + 0.0 + 0.0 + 1.0) / 4
    temporal = (3.0**2 + 2.0**2) / 2
    assert penalties(raw, dropped, activation=2.0, temporal_activation=1.0) == pytest.approx(2 * activation + temporal)
    assert penalties(raw, dropped, activation=0.0, temporal_activation=3.0) == pytest.approx(3 * temporal)


def test_a_window_of_one_step_has_no_temporal_penalty():
    one = torch.ones(1, 2, 3)
    assert penalties(one, one, activation=0.0, temporal_activation=1.0) == 0.0
