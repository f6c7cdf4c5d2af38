"""The layers of few tokens against autograd through torch's own LSTM and linear maps, in float64."""

import pytest
import torch

from sigsoftmax.lm.dynamic.few_tokens import linear, linear_input_gradient, lstm, lstm_gate_gradients


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("models", "tokens", "inputs", "width"), [(1, 5, 7, 6), (3, 4, 2, 5), (2, 1, 3, 1)])
def test_an_lstm_layer_is_torchs_with_the_same_gradients(models, tokens, inputs, width):
    input_PTI, gradient_PTH = random(models, tokens, inputs), random(models, tokens, width, seed=1)
    state = [random(models, width, seed=seed) for seed in (2, 3)]
    layers = [torch.nn.LSTM(inputs, width, batch_first=True, dtype=torch.float64) for _ in range(models)]
    weight_ih, weight_hh, bias_ih, bias_hh = (
        torch.stack([getattr(layer, f"{name}_l0").detach() for layer in layers])
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    steps = lstm(linear(input_PTI, weight_ih, bias_ih, bias_hh), weight_hh, *state)
    of_gates = lstm_gate_gradients(torch.stack([0.25 * gradient_PTH, 0.75 * gradient_PTH], dim=1), weight_hh, steps)
    of_input = linear_input_gradient(of_gates, weight_ih).sum(dim=1)
    before = steps.hidden[:-1].transpose(0, 1)
    for p, layer in enumerate(layers):
        own = input_PTI[p].clone().requires_grad_()
        output, (hidden, cell) = layer(own, tuple(part[p].unsqueeze(0) for part in state))
        torch.testing.assert_close(steps.hidden[1:, p], output)
        torch.testing.assert_close(steps.hidden[-1, p], hidden[0])
        torch.testing.assert_close(steps.cell[-1, p], cell[0])
        expected = torch.autograd.grad(output, [own, *layer.parameters()], gradient_PTH[p])
        for ours, theirs in zip(
            (of_input[p], of_gates[p].T @ input_PTI[p], of_gates[p].T @ before[p], of_gates[p].sum(0)),
            expected[:4],
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)


def test_the_state_before_the_tokens_stands_first():
    state = [random(2, 3, seed=seed) for seed in (0, 1)]
    steps = lstm(random(2, 4, 12), random(2, 12, 3), *state)
    assert torch.equal(steps.hidden[0], state[0])
    assert torch.equal(steps.cell[0], state[1])
