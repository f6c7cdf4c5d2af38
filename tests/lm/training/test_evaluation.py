"""Static evaluation against a plain pass over the whole text, and the two ways to divide."""

import math

import pytest
import torch
from torch.nn import functional as F

from sigsoftmax.lm.config import ModelConfig
from sigsoftmax.lm.data.windows import batchify
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.training.evaluation import Evaluator, evaluate


def model_of(head="sigsoftmax"):
    return LanguageModel(ModelConfig(head=head, embedding=8, hidden=(12, 8)), 30, seed=1)


@pytest.mark.parametrize("rows", [2, 70, 71, 72, 143, 200])
def test_windows_with_carried_state_are_one_pass(rows):
    model, text = model_of(), torch.randint(30, (rows, 3))
    with torch.no_grad():
        log_probs = model.log_probs(model.features(text[:-1], model.zero_state(3)))
    expected = F.nll_loss(log_probs.flatten(0, 1).double(), text[1:].flatten(), reduction="sum")
    evaluation = evaluate(model, text)
    assert evaluation.total == pytest.approx(float(expected), rel=1e-5)
    assert evaluation.scored == (rows - 1) * 3
    assert evaluation.loss == pytest.approx(float(expected) / ((rows - 1) * 3), rel=1e-5)
    assert evaluation.loss_over_rows == pytest.approx(float(expected) / (rows * 3), rel=1e-5)


def test_an_evaluator_starts_anew_each_time():
    model, text = model_of(), torch.randint(30, (100, 3))
    evaluator = Evaluator(model, text)
    totals = []
    for _ in range(2):
        for _ in evaluator.launch():
            pass
        totals.append(evaluator.result().total)
    assert totals[0] == totals[1]


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary():
    model = model_of("softmax")
    with torch.no_grad():
        model.embedding.zero_()
    evaluation = evaluate(model, batchify(torch.randint(30, (500,)), 5))
    assert math.exp(evaluation.loss) == pytest.approx(30.0, rel=1e-6)


def test_a_text_without_a_target_is_refused():
    with pytest.raises(ValueError, match="at least 2 rows to be evaluated, got 1"):
        evaluate(model_of(), torch.zeros(1, 4, dtype=torch.int64))
