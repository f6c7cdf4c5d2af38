"""The settings have the published numbers, every one."""

import pytest

from sigsoftmax.lm.config import TrainingConfig
from sigsoftmax.lm.recipes import recipe
from sigsoftmax.lm.settings import rms_form


def test_penn_treebank_as_published():
    built = recipe("ptb-sigsoftmax")
    assert (built.corpus, built.seed) == ("ptb", 141)
    model = built.model
    assert (model.head, model.embedding, model.hidden, model.floor) == ("sigsoftmax", 400, (1150, 1150, 400), 0.0)
    assert dropouts(model) == (0.1, 0.4, 0.25, 0.4, 0.0, 0.5)
    common = {"batch": 20, "learning_rate": 30.0}
    assert built.training == TrainingConfig(epochs=1000, **common)
    assert built.finetuning == finetuning(epochs=500, longest_window=80, **common)
    assert built.dynamic_evaluation.learning_rates == (3e-5, 4e-5, 5e-5, 6e-5, 7e-5, 1e-4)
    assert built.dynamic_evaluation.decays == (1e-3, 2e-3, 3e-3, 5e-3)
    assert built.dynamic_evaluation.epsilon == 2e-5


def test_wikitext_2_as_published():
    built = recipe("wt2-softmax")
    assert (built.corpus, built.seed) == ("wikitext-2", 1882)
    assert (built.model.embedding, built.model.hidden) == (400, (1150, 1150, 400))
    assert dropouts(built.model) == (0.1, 0.65, 0.2, 0.4, 0.0, 0.5)
    common = {"batch": 80, "learning_rate": 30.0}
    assert built.training == TrainingConfig(epochs=1500, **common)
    assert built.finetuning == finetuning(epochs=750, longest_window=80, **common)


@pytest.mark.parametrize("head", ["mos", "moss"])
def test_mixtures_on_penn_treebank_as_published(head):
    built = recipe(f"ptb-{head}")
    assert (built.corpus, built.seed) == ("ptb", 28)
    model = built.model
    assert (model.head, model.embedding, model.hidden) == (f"{head}(K=15)", 280, (960, 960, 620))
    assert model.floor == 1e-8
    assert dropouts(model) == (0.1, 0.4, 0.225, 0.4, 0.29, 0.5)
    common = {"batch": 12, "epochs": 1000, "longest_window": 110}
    assert built.training == TrainingConfig(learning_rate=20.0, **common)
    assert built.finetuning == finetuning(learning_rate=25.0, **common)
    assert point(built.dynamic_evaluation) == pytest.approx((4.64e-5, 4.41e-3, 2.32e-5), rel=2e-3)


@pytest.mark.parametrize("head", ["mos", "moss"])
def test_mixtures_on_wikitext_2_as_published(head):
    built = recipe(f"wt2-{head}")
    assert (built.corpus, built.seed) == ("wikitext-2", 1882)
    assert (built.model.embedding, built.model.hidden) == (300, (1150, 1150, 650))
    assert built.model.floor == 1e-8
    assert dropouts(built.model) == (0.1, 0.55, 0.2, 0.4, 0.29, 0.5)
    common = {"batch": 15, "group": 5, "epochs": 1000, "longest_window": 90}
    assert built.training == TrainingConfig(learning_rate=15.0, **common)
    assert built.finetuning == finetuning(learning_rate=20.0, **common)
    assert point(built.dynamic_evaluation) == pytest.approx((3.09e-5, 1.18e-3, 3.09e-5), rel=4e-3)


def test_what_every_published_recipe_shares():
    for name in ("ptb-softmax", "wt2-softmax", "ptb-mos", "wt2-mos"):
        for phase in (recipe(name).training, recipe(name).finetuning):
            assert (phase.clip, phase.weight_decay, phase.bptt, phase.patience) == (0.25, 1.2e-6, 70, 5)
            assert (phase.activation, phase.temporal_activation, phase.evaluation_batch) == (2.0, 1.0, 10)
        assert recipe(name).training.optimizer == "nt-asgd"
        assert recipe(name).training.window_seed is None


def dropouts(model):
    return (
        *(model.dropout_words, model.dropout_input, model.dropout_hidden),
        *(model.dropout_output, model.dropout_latent, model.weight_drop),
    )


def finetuning(**values):
    return TrainingConfig(optimizer="asgd", stop_when_stale=True, window_seed=331, **values)


def point(dynamic_evaluation):
    (rate,), (decay,) = dynamic_evaluation.learning_rates, dynamic_evaluation.decays
    return rate, decay, dynamic_evaluation.epsilon


def test_the_older_scaling_of_dynamic_evaluation_is_converted():
    assert point(rms_form(0.6, 0.5, 0.3, windows=9, tensors=5)) == pytest.approx((0.2, 0.1, 0.1))
