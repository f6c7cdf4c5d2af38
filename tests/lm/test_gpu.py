"""Tests that need a GPU: cuDNN with masked weights, captured graphs that draw new masks, precisions, runs at once."""

import math

import pytest
import torch
from tests.lm.masks import draw_masks
from tests.lm.runs import epochs_of, small_recipe, small_trainer

from sigsoftmax.lm.config import ModelConfig, TrainingConfig
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.model.regularization import WeightDrop
from sigsoftmax.lm.training.evaluation import evaluate
from sigsoftmax.lm.training.nt_asgd import AveragedSgd
from sigsoftmax.lm.training.precision import arithmetic
from sigsoftmax.lm.training.trainer import run_together
from sigsoftmax.lm.training.updates import Updater

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda")
WORDS = 50


def model_of(head="sigsoftmax", device=CUDA):
    hidden = (24, 20) if "(K" in head else (24, 16)
    return LanguageModel(ModelConfig(head=head, embedding=16, hidden=hidden), WORDS, seed=1).to(device)


def updater_of(head="sigsoftmax", capture=True, precision="float32", learning_rate=5.0, text=None, skip=None):
    model = model_of(head)
    config = TrainingConfig(batch=4, learning_rate=learning_rate, bptt=10)
    optimizer = AveragedSgd(list(model.parameters()), clip=config.clip, weight_decay=config.weight_decay)
    text = torch.randint(WORDS, (200, 4), generator=torch.Generator().manual_seed(9)) if text is None else text
    updater = Updater(
        model,
        optimizer,
        text,
        config,
        generator=torch.Generator(CUDA).manual_seed(0),
        capture=capture,
        precision=precision,
        skip=skip,
    )
    return model, optimizer, updater


def run(updater, lengths):
    with torch.cuda.stream(torch.cuda.Stream()):
        updater.begin_epoch()
        for length in lengths:
            updater.run(drawn=length, length=length)
        return updater.losses(0, len(lengths))


def on_cpu_too(value):
    if isinstance(value, WeightDrop):
        return WeightDrop(value.kept_4HH.cpu(), value.scale)
    if isinstance(value, tuple):
        return tuple(map(on_cpu_too, value))
    return None if value is None else value.cpu()


@pytest.mark.parametrize("head", ["sigsoftmax", "gss(k=learned)", "moss(K=3)"])
def test_the_masked_pass_of_cudnn_is_that_of_the_cpu(head):
    on_gpu, on_cpu = model_of(head), model_of(head, torch.device("cpu"))
    masks = draw_masks(on_gpu.config, words=WORDS, batch=4, generator=torch.Generator(CUDA).manual_seed(3))
    there = type(masks)(**{name: on_cpu_too(value) for name, value in vars(masks).items()})
    tokens, targets = torch.randint(WORDS, (12, 4)), torch.randint(WORDS, (12, 4))
    with arithmetic("float32", CUDA):
        loss = on_gpu.loss(on_gpu.features(tokens.to(CUDA), on_gpu.zero_state(4), masks), targets.to(CUDA))
        gradients = torch.autograd.grad(loss, list(on_gpu.parameters()))
    expected = on_cpu.loss(on_cpu.features(tokens, on_cpu.zero_state(4), there), targets)
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, list(on_cpu.parameters())), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-6)


def test_weight_drop_acts_from_the_second_step_on():
    model = model_of("softmax")
    tokens = torch.randint(WORDS, (6, 4), device=CUDA)

    def raw(seed):
        masks = draw_masks(
            ModelConfig(
                embedding=16,
                hidden=(24, 16),
                dropout_words=0.0,
                dropout_input=0.0,
                dropout_hidden=0.0,
                dropout_output=0.0,
            ),
            words=WORDS,
            batch=4,
            generator=torch.Generator(CUDA).manual_seed(seed),
        )
        return model.features(tokens, model.zero_state(4), masks).raw_TBH

    one, other = raw(0), raw(1)
    torch.testing.assert_close(one[0], other[0])
    assert (one[1:] - other[1:]).abs().amax(dim=(1, 2)).min() > 1e-5


@pytest.mark.parametrize("head", ["softmax", "moss(K=3)"])
@pytest.mark.parametrize("averaged", [False, True])
def test_captured_updates_are_the_plain_ones(head, averaged):
    lengths = [10, 10, 10, 7, 7, 10, 7, 10]
    runs = []
    for capture in (True, False):
        model, optimizer, updater = updater_of(head, capture)
        if averaged:
            optimizer.begin_averaging()
        runs.append((run(updater, lengths), [p.detach().clone() for p in (*model.parameters(), *optimizer.averages)]))
    (captured, ours), (plain, theirs) = runs
    assert captured == pytest.approx(plain, rel=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_every_replay_draws_new_masks():
    # All words alike and no learning: only masks can change the loss.
    text = torch.zeros(200, 4, dtype=torch.int64)
    _, _, updater = updater_of(learning_rate=1e-30, text=text)
    losses = run(updater, [10] * 12)
    assert len(set(losses[2:])) == 10


def test_a_switch_of_the_optimiser_is_not_replayed_over():
    model, optimizer, updater = updater_of()
    run(updater, [10] * 4)
    optimizer.begin_averaging()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(4):
            updater.run(drawn=10, length=10)
    torch.cuda.synchronize()
    assert not all(torch.equal(a, p) for a, p in zip(optimizer.averages, model.parameters(), strict=True))


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("head", ["sigsoftmax", "moss(K=3)"])
def test_precisions_agree_to_their_rounding(head, precision):
    _, _, exact = updater_of(head)
    _, _, updater = updater_of(head, precision=precision)
    tolerance = {"float32": 1e-6, "tf32": 1e-3, "bf16": 1e-2}[precision]
    assert run(updater, [10] * 5) == pytest.approx(run(exact, [10] * 5), rel=tolerance)


def test_an_error_flag_keeps_captured_updates_from_changing_the_weights():
    flag = torch.zeros((), dtype=torch.int32, device=CUDA)
    model, _, updater = updater_of(skip=flag)
    run(updater, [10] * 4)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    flag.fill_(1)
    run(updater, [10] * 4)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    flag.zero_()
    run(updater, [10])
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("averaged", [False, True])
def test_repeated_updates_are_bitwise_equal(averaged):
    runs = []
    for _ in range(2):
        model, optimizer, updater = updater_of()
        if averaged:
            optimizer.begin_averaging()
        losses = run(updater, [10] * 6)
        runs.append((losses, [p.detach().clone() for p in (*model.parameters(), *optimizer.averages)]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_evaluation_in_tf32_is_near_float32():
    model, text = model_of(), torch.randint(WORDS, (300, 3))
    losses = [evaluate(model, text, precision=precision).loss for precision in ("float32", "tf32")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[1] != losses[0]


def test_evaluation_is_that_of_the_cpu():
    model, text = model_of(), torch.randint(WORDS, (300, 3))
    with torch.cuda.stream(torch.cuda.Stream()):
        evaluation = evaluate(model, text)
    assert evaluation.loss == pytest.approx(evaluate(model_of(device=torch.device("cpu")), text).loss, rel=1e-6)


def test_runs_at_once_end_and_learn_and_go_on(tmp_path):
    recipes = {"a": small_recipe(epochs=4), "b": small_recipe("moss(K=3)", epochs=4)}
    for limit in (25, None):
        trainers = [
            small_trainer(tmp_path / name, recipe=recipe, device="cuda", precision="bf16", checkpoint_updates=5)
            for name, recipe in recipes.items()
        ]
        if limit:
            for _ in range(limit):
                for trainer in trainers:
                    trainer.advance()
        else:
            list(run_together(trainers, lambda trainer, progress: None))
    for name in recipes:
        records = epochs_of(tmp_path / name)
        assert [record.epoch for record in records] == [1, 2, 3, 4]
        assert min(record.valid_loss for record in records) < math.log(20)
