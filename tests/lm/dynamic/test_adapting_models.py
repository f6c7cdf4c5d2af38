"""Models that adapt side by side: each one's losses are those of the naive loop, whatever the others do."""

import copy
import math

import pytest
import torch
from tests.lm.dynamic.test_evaluation import CONFIG, MODELS, RATES, TEXT, TRAIN, build, naive
from tests.lm.masks import draw_masks

from sigsoftmax.lm.config import ModelConfig
from sigsoftmax.lm.dynamic.adapting_models import WIDEST_WINDOW, AdaptingModels, kernels_serve
from sigsoftmax.lm.dynamic.evaluation import GradientStatistics, adapt
from sigsoftmax.lm.dynamic.rates import Rates
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.training.evaluation import evaluate

SEVERAL = [RATES, Rates(learning_rate=1e-2, decay=3.0, epsilon=1e-4), Rates(learning_rate=0.0, decay=0.0)]


def losses_of(model, statistics, rates, **options):
    adapting = AdaptingModels(model, statistics.rms, TEXT, models=len(rates), window=5, **options)
    adapting.restart(statistics.rates_of_steps(rates))
    for _ in adapting.launch(lambda _: None, rates=rates):
        pass
    assert [at.rates for at in adapting.reports] == rates
    return [at.loss for at in adapting.reports]


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_the_naive_loop(name):
    model = build(name).double()
    statistics = GradientStatistics.of(model, TRAIN, CONFIG)
    losses = losses_of(model, statistics, SEVERAL)
    for loss, rates in zip(losses, SEVERAL, strict=True):
        numbers = {"learning_rate": rates.learning_rate, "decay": rates.decay, "epsilon": rates.epsilon}
        expected = naive(name, model).rms_form(TRAIN, TEXT, batch=4, window=5, **numbers)
        assert loss == pytest.approx(expected, rel=1e-9)
    assert abs(losses[0] - losses[2]) > 1e-5


@pytest.mark.parametrize("latent", ["linear", "residual"])
def test_mixtures_of_other_latent_vectors_adapt_as_alone(latent):
    """Against dynamic evaluation of one model, whose gradients come from autograd alone."""
    config = ModelConfig(head=f"mos(K=3, latent={latent})", embedding=6, hidden=(7, 6))
    model = LanguageModel(config, 13, seed=5).double()
    statistics = GradientStatistics.of(model, TRAIN, CONFIG)
    losses = losses_of(model, statistics, SEVERAL)
    assert losses[2] == pytest.approx(evaluate(copy.deepcopy(model).float(), TEXT.unsqueeze(1)).loss, rel=1e-5)
    for loss, rates in zip(losses, SEVERAL, strict=True):
        assert loss == pytest.approx(adapt(model, statistics, TEXT, rates).loss, rel=1e-9)


def test_a_run_begins_anew_and_the_model_is_left_alone():
    model = build("shifted_sigsoftmax").double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    statistics = GradientStatistics.of(model, TRAIN, CONFIG)
    adapting = AdaptingModels(model, statistics.rms, TEXT, models=2, window=5)
    losses = []
    for rates in (SEVERAL[:2], SEVERAL[1::-1]):
        adapting.restart(statistics.rates_of_steps(rates))
        for _ in adapting.launch(lambda _: None, rates=rates):
            pass
        losses.append([at.loss for at in adapting.reports])
    assert losses[0] == pytest.approx(losses[1][::-1], rel=1e-12)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_masks_that_were_drawn_before_do_not_act():
    model = build("moss").double()
    statistics = GradientStatistics.of(model, TRAIN, CONFIG)
    clean = losses_of(model, statistics, [RATES])
    masks = draw_masks(model.config, words=13, batch=1, generator=torch.Generator().manual_seed(0))
    model.float().features(TEXT[:3].unsqueeze(1), model.zero_state(1), masks)
    assert losses_of(model.double(), statistics, [RATES]) == clean


def test_one_that_diverges_does_not_disturb_the_others():
    model = build().double()
    statistics = GradientStatistics.of(model, TRAIN, CONFIG)
    wild = Rates(learning_rate=1e300, decay=0.0, epsilon=1e-4)
    losses = losses_of(model, statistics, [wild, RATES])
    assert not math.isfinite(losses[0])
    assert losses[1] == pytest.approx(losses_of(model, statistics, [RATES])[0], rel=1e-12)


def test_kernels_serve_float32_on_gpus_and_narrow_windows():
    model = build()
    assert not kernels_serve(model, 5)
    assert not kernels_serve(model.to("meta"), WIDEST_WINDOW + 1)
