"""The recursion against torch's own optimisers, the trigger, clipping."""

import pytest
import torch

from sigsoftmax.lm.training.nt_asgd import AveragedSgd, NonMonotonicTrigger, clip_norm_

DECAY = 1.2e-6


def parameters_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(3, 4), (5,), ()]]


def gradients_of(step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in [(3, 4), (5,), ()]]


def run_torch(optimizer, parameters, sizes, clip):
    for step, size in enumerate(sizes):
        for parameter, gradient in zip(parameters, gradients_of(step), strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.param_groups[0]["lr"] = size
        optimizer.step()


def test_sgd_is_torchs():
    ours, theirs, sizes = parameters_of(), parameters_of(), [30.0, 12.0, 31.0]
    run_torch(torch.optim.SGD(theirs, lr=30.0, weight_decay=DECAY), theirs, sizes, 0.25)
    optimizer = AveragedSgd(ours, clip=0.25, weight_decay=DECAY)
    for step, size in enumerate(sizes):
        optimizer.update(gradients_of(step), size)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_asgd_is_torchs_with_the_step_size_one_update_late():
    ours, theirs, sizes = parameters_of(), parameters_of(), [30.0, 12.0, 31.0, 29.0, 15.0, 33.0, 30.0]
    reference = torch.optim.ASGD(theirs, lr=30.0, t0=0, lambd=0.0, weight_decay=DECAY)
    run_torch(reference, theirs, sizes, 0.25)
    optimizer = AveragedSgd(ours, clip=0.25, weight_decay=DECAY)
    optimizer.begin_averaging()
    for step, size in enumerate(sizes):
        optimizer.update(gradients_of(step), size)
    for a, b, average in zip(ours, theirs, optimizer.averages, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(average, reference.state[b]["ax"], rtol=1e-5, atol=1e-5)


def test_the_average_leaves_the_first_iterate_out():
    """Iterates 1 to 7 average to 4.5: the mean of 2 to 7."""
    weight = torch.zeros(1)
    optimizer = AveragedSgd([weight], clip=1e9, weight_decay=0.0)
    optimizer.begin_averaging()
    averages = []
    for _ in range(7):
        optimizer.update([torch.tensor([-1.0])], 1.0)
        averages.append(float(optimizer.averages[0]))
    assert float(weight) == 7.0
    assert averages[:2] == [1.0, 2.0]
    assert averages[-1] == pytest.approx(4.5)


def test_a_late_switch_starts_a_fresh_average():
    weight = torch.zeros(1)
    optimizer = AveragedSgd([weight], clip=1e9, weight_decay=0.0)
    for _ in range(5):
        optimizer.update([torch.tensor([-1.0])], 1.0)
    assert optimizer.mode == "sgd"
    optimizer.begin_averaging()
    assert optimizer.mode == "asgd"
    for _ in range(3):
        optimizer.update([torch.tensor([-1.0])], 1.0)
    assert float(optimizer.averages[0]) == pytest.approx((7.0 + 8.0) / 2)
    optimizer.begin_averaging()
    assert float(optimizer.averages[0]) == pytest.approx(7.5), "a second call changes nothing"


def test_averages_that_are_swapped_twice_are_as_before():
    ours = parameters_of()
    optimizer = AveragedSgd(ours, clip=0.25, weight_decay=DECAY)
    optimizer.swap_averages()  # nothing to swap yet
    optimizer.begin_averaging()
    for step in range(4):
        optimizer.update(gradients_of(step), 3.0)
    weights = [p.detach().clone() for p in ours]
    averages = [a.clone() for a in optimizer.averages]
    optimizer.swap_averages()
    assert all(torch.equal(p, a) for p, a in zip(ours, averages, strict=True))
    optimizer.swap_averages()
    assert all(torch.equal(p, w) for p, w in zip(ours, weights, strict=True))


def test_restored_it_goes_on_bit_for_bit():
    whole = parameters_of()
    optimizer = AveragedSgd(whole, clip=0.25, weight_decay=DECAY)
    optimizer.begin_averaging()
    for step in range(3):
        optimizer.update(gradients_of(step), 3.0 + step)
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in whole]
    other = AveragedSgd(resumed, clip=0.25, weight_decay=DECAY)
    other.restore({name: tensor.clone() for name, tensor in optimizer.state().items()})
    for step in range(3, 6):
        optimizer.update(gradients_of(step), 3.0 + step)
        other.update(gradients_of(step), 3.0 + step)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(optimizer.averages, other.averages, strict=True))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_clipping_is_torchs(scale):
    ours = [scale * gradient for gradient in gradients_of(0)]
    theirs = parameters_of()
    for parameter, gradient in zip(theirs, ours, strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.25)
    torch.testing.assert_close(clip_norm_(ours, 0.25), expected)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.grad)


@pytest.mark.parametrize(
    ("losses", "epoch"),
    [
        ([5, 4, 3, 3, 3, 3, 6], 7),
        ([5, 4, 3, 3, 3, 3, 4.9], None),
        ([5, 4, 3, 3, 3, 3, 5], None),
        ([5, 9, 9, 9, 9, 9], None),
        ([5, 4, 3, 3, 3, 3, 4.9, 4.1], 8),
    ],
)
def test_the_trigger(losses, epoch):
    trigger = NonMonotonicTrigger(5)
    fired = [number for number, loss in enumerate(losses, start=1) if trigger.fires(loss)]
    assert (fired[0] if fired else None) == epoch


@pytest.mark.parametrize("averaged", [False, True])
def test_an_update_that_is_skipped_changes_nothing(averaged):
    ours = parameters_of()
    optimizer = AveragedSgd(ours, clip=0.25, weight_decay=DECAY)
    if averaged:
        optimizer.begin_averaging()
        optimizer.update(gradients_of(0), 3.0)
    before = [tensor.detach().clone() for tensor in (*ours, *optimizer.state().values())]
    optimizer.update(gradients_of(1), 5.0, skip=torch.ones((), dtype=torch.int32))
    after = [*ours, *optimizer.state().values()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
