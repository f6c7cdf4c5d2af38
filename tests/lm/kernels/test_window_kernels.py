"""Optimiser, embedding and penalties by kernels against plain torch; ``test_interpreted`` runs this without a GPU."""

import pytest
import torch
from tests.backends.triton.device import DEVICE, IS_INTERPRETED
from tests.lm.kernels.plain import plain

from sigsoftmax.lm import kernels
from sigsoftmax.lm.model.embedding import dropped_embedding
from sigsoftmax.lm.model.regularization import penalties
from sigsoftmax.lm.training.nt_asgd import AveragedSgd, joint_squares

SHAPES = [(300, 40), (5,), (), (1,), (9000,), (0,), (3, 4)]
"""several blocks, whole ones and parts, scalars, and the empty part that a process may hold"""


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def tensors_of(seed):
    return [random(*shape, seed=seed + index) for index, shape in enumerate(SHAPES)]


def run_sgd(device, updates, begin=None, skip=None, clip=0.25, scale=1.0):
    """The parameters, averages and numbers after some updates; averaging begins before update ``begin``."""
    parameters = [tensor.to(device) for tensor in tensors_of(0)]
    optimizer = AveragedSgd(parameters, clip=clip, weight_decay=1e-2)
    for update in range(updates):
        if update == begin:
            optimizer.begin_averaging()
        gradients = [scale * gradient.to(device) for gradient in tensors_of(100 * (update + 1))]
        optimizer.update(gradients, 3.0 + update, skip=skip)
    return [*parameters, *optimizer.state().values()]


def test_kernels_run_here():
    assert kernels.run_on(torch.zeros(1, device=DEVICE))
    assert not kernels.run_on(torch.zeros(1, device=DEVICE, dtype=torch.float64))


@pytest.mark.parametrize("begin", [None, 0, 2])
@pytest.mark.parametrize("clip", [0.25, 1e9])
def test_updates_are_those_of_plain_torch(begin, clip):
    ours = run_sgd(DEVICE, 5, begin, clip=clip)
    theirs = plain(run_sgd)(DEVICE, 5, begin, clip=clip)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_repeated_updates_are_bitwise_equal():
    for a, b in zip(run_sgd(DEVICE, 4, 2), run_sgd(DEVICE, 4, 2), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("by_kernels", [True, False])
def test_an_error_flag_skips_the_update(by_kernels):
    run = run_sgd if by_kernels else plain(run_sgd)
    flag = torch.ones((), dtype=torch.int32, device=DEVICE)
    for a, b in zip(run(DEVICE, 3, 0, skip=flag), run(DEVICE, 0, 0), strict=False):
        assert torch.equal(a, b)
    for a, b in zip(run(DEVICE, 3, 0, skip=flag.zero_()), run(DEVICE, 3, 0), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_gradients_that_are_no_numbers_end_in_parameters_that_are_none(broken):
    def run():
        parameters = [torch.ones(3, device=DEVICE), torch.ones(2, device=DEVICE)]
        gradients = [torch.tensor([1.0, broken, 2.0], device=DEVICE), torch.ones(2, device=DEVICE)]
        AveragedSgd(parameters, clip=0.25, weight_decay=0.0).update(gradients, 1.0)
        return torch.cat(parameters)

    torch.testing.assert_close(run(), plain(run)(), equal_nan=True)


def test_squares_are_those_of_plain_torch():
    gradients = tensors_of(7)
    gradients[0] = gradients[0].T
    torch.testing.assert_close(joint_squares(gradients).sum(), plain(joint_squares)(gradients).sum())


@pytest.mark.parametrize(
    ("steps", "batch", "words", "width", "masked"),
    [
        (9, 5, 7, 140, (True, True)),
        (5, 4, 30, 12, (True, False)),
        (5, 4, 3, 12, (False, True)),
        (1, 1, 5, 3, (False, False)),
        (140, 4, 7, 5, (True, True)),  # more than are compared, and more of one word than are added, at once
    ],
)
def test_the_embedding_is_that_of_plain_torch(steps, batch, words, width, masked):
    tokens = torch.randint(words, (steps, batch), device=DEVICE)
    weight = random(words, width, seed=1).requires_grad_()
    of_words = (random(words, seed=2) > 0.5).float() * 1.4 if masked[0] else None
    of_input = (random(1, batch + 1, width, seed=3) > 0.5).float()[:, 1:] * 1.4 if masked[1] else None
    outer = random(steps, batch, width, seed=4)
    found = []
    for function in (dropped_embedding, plain(dropped_embedding)):
        output = function(tokens, weight, of_words, of_input, torch.float32)
        (gradient,) = torch.autograd.grad(output, weight, outer)
        found.append((output.detach(), gradient))
    (output, gradient), (expected, expected_gradient) = found
    assert torch.equal(output, expected)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)
    again = dropped_embedding(tokens, weight, of_words, of_input, torch.float32)
    assert torch.equal(torch.autograd.grad(again, weight, outer)[0], gradient)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter truncates where it stores bf16")
def test_the_embedding_in_bf16():
    tokens, weight = torch.randint(30, (20, 4), device=DEVICE), random(30, 24, seed=1).requires_grad_()
    outer = random(20, 4, 24, seed=2).bfloat16()
    ours, theirs = (
        f(tokens, weight, None, None, torch.bfloat16) for f in (dropped_embedding, plain(dropped_embedding))
    )
    assert torch.equal(ours, theirs)
    # Torch adds up rounded rows; these are float32.
    exact = plain(dropped_embedding)(tokens, weight, None, None, torch.float32)
    expected = torch.autograd.grad(exact, weight, outer.float())[0]
    torch.testing.assert_close(torch.autograd.grad(ours, weight, outer)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", [(2.0, 0.7), (0.0, 1.0), (2.0, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("steps", [1, 2, 30])
def test_penalties_are_those_of_plain_torch(steps, weights):
    raw, dropped = (random(steps, 4, 50, seed=seed).requires_grad_() for seed in (1, 2))
    ours, theirs = (
        function(raw, dropped, activation=weights[0], temporal_activation=weights[1])
        + 0.0 * (raw.sum() + dropped.sum())
        for function in (penalties, plain(penalties))
    )
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(3.0 * total, [raw, dropped]) for total in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
