"""The stack against torch's own LSTM, and weight drop that acts."""

import pytest
import torch

from sigsoftmax.lm.model.recurrent import LstmStack
from sigsoftmax.lm.model.regularization import WeightDrop


def stack_of(inputs=5, hidden=(7, 6), seed=0):
    stack = LstmStack(inputs, hidden)
    generator = torch.Generator().manual_seed(seed)
    for layer in stack.in_order():
        layer.initialise(generator)
    return stack


def as_torch(layer, inputs):
    lstm = torch.nn.LSTM(inputs, layer.hidden)
    with torch.no_grad():
        lstm.weight_ih_l0.copy_(layer.weight_ih)
        lstm.weight_hh_l0.copy_(layer.weight_hh)
        lstm.bias_ih_l0.copy_(layer.bias_ih)
        lstm.bias_hh_l0.copy_(layer.bias_hh)
    return lstm


def run(stack, x, weight_masks=(None, None), hidden_masks=(None,), states=None):
    states = states or stack.zero_state(x.shape[1], x.dtype)
    return stack(x, states, hidden_masks=hidden_masks, weight_masks=weight_masks)


def test_without_masks_it_is_torchs_lstm_with_the_same_gradients():
    stack, x = stack_of(), torch.randn(9, 4, 5)
    first, second = as_torch(stack.in_order()[0], 5), as_torch(stack.in_order()[1], 7)
    middle, _ = first(x)
    expected, (hidden, cell) = second(middle)
    raw, states = run(stack, x)
    torch.testing.assert_close(raw, expected)
    torch.testing.assert_close(states[1].hidden, hidden)
    torch.testing.assert_close(states[1].cell, cell)
    expected.square().sum().backward()
    raw.square().sum().backward()
    torch.testing.assert_close(stack.in_order()[0].weight_hh.grad, first.weight_hh_l0.grad)


def test_the_state_is_carried():
    stack, x = stack_of(), torch.randn(9, 4, 5)
    whole, _ = run(stack, x)
    first, states = run(stack, x[:4])
    second, _ = run(stack, x[4:], states=states)
    torch.testing.assert_close(torch.cat([first, second]), whole)


def test_weight_drop_acts_from_the_second_step_on():
    """From a zero state the first step does not see the hidden-to-hidden matrix; the others do."""
    stack, x = stack_of(), torch.randn(6, 4, 5)

    def masked(seed):
        generator = torch.Generator().manual_seed(seed)
        masks = [
            WeightDrop(torch.rand(4 * layer.hidden, layer.hidden, generator=generator) < 0.5, 2.0)
            for layer in stack.in_order()
        ]
        return run(stack, x, weight_masks=masks)[0]

    one, other = masked(0), masked(1)
    torch.testing.assert_close(one[0], other[0])
    assert (one[1] - other[1]).abs().max() > 1e-3
    torch.testing.assert_close(one, masked(0))


def test_the_gradient_reaches_the_raw_matrix_through_the_mask():
    stack, x = stack_of(hidden=(6,)), torch.randn(6, 4, 5)
    layer = stack.in_order()[0]
    kept = torch.zeros(24, 6, dtype=torch.bool)
    kept[:, :3] = True
    run(stack, x, weight_masks=[WeightDrop(kept, 2.0)], hidden_masks=[])[0].square().sum().backward()
    gradient = layer.weight_hh.grad
    assert gradient[:, :3].abs().min() > 0.0
    assert (gradient[:, 3:] == 0.0).all()


def test_a_mask_of_ones_changes_nothing():
    stack, x = stack_of(), torch.randn(6, 4, 5)
    ones = [WeightDrop(torch.ones_like(layer.weight_hh, dtype=torch.bool), 1.0) for layer in stack.in_order()]
    torch.testing.assert_close(run(stack, x, weight_masks=ones)[0], run(stack, x)[0])


def test_hidden_masks_act_between_layers_and_not_on_the_carried_state():
    stack, x = stack_of(), torch.randn(6, 4, 5)
    mask = torch.zeros(1, 4, 7)
    raw, states = run(stack, x, hidden_masks=[mask])
    _, plain_states = run(stack, x)
    torch.testing.assert_close(states[0].hidden, plain_states[0].hidden)
    expected, _ = as_torch(stack.in_order()[1], 7)(torch.zeros(6, 4, 7))
    torch.testing.assert_close(raw, expected)


@pytest.mark.parametrize("hidden", [1, 4, 100])
def test_all_tensors_of_a_layer_are_uniform_within_one_over_the_root_of_its_width(hidden):
    (layer,) = stack_of(3, (hidden,)).in_order()
    bound = hidden**-0.5
    for parameter in layer.parameters():
        assert parameter.abs().max() <= bound
    assert layer.bias_hh.abs().max() > 0.0
    if hidden == 100:
        assert layer.weight_hh.max() > 0.99 * bound
        assert layer.weight_hh.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
