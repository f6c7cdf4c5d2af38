"""Dynamic evaluation written out by hand in float64, for the tests to compare with: slow, and nothing shared.

Parameters are a dict by the model's names; the layers, the heads and both scalings are spelled out.
"""

import torch
from torch import Tensor


def parameters_of(model) -> dict[str, Tensor]:
    return {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}


def _layer(values, layer, inputs, hidden, cell):
    weights = [values[f"stack.layers.{layer}.{name}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    outputs = []
    for step in inputs:
        gates = step @ weights[0].T + hidden @ weights[1].T + weights[2] + weights[3]
        i, f, g, o = gates.chunk(4, dim=-1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        outputs.append(hidden)
    return torch.stack(outputs), (hidden, cell)


def _scores(head, values, logits):
    """The logarithm of each class's unnormalised probability."""
    if head == "softmax":
        return logits
    if head == "shifted_sigsoftmax":
        return logits + torch.nn.functional.logsigmoid(logits + values["output.function_parameters.b"])
    return logits + torch.nn.functional.logsigmoid(logits)


def _log_probs(head, components, floor, values, features):
    matrix, bias = values["embedding"], values["output.bias"]
    if components == 1:
        return _scores(head, values, features @ matrix.T + bias).log_softmax(-1)
    prior = _scores(head, values, features @ values["output.prior.weight"].T).softmax(-1)
    latent = (features @ values["output.latent.weight"].T + values["output.latent.bias"]).tanh()
    latent = latent.unflatten(-1, (components, -1))
    of_components = _scores(head, values, latent @ matrix.T + bias).softmax(-1)
    return ((prior.unsqueeze(-1) * of_components).sum(-2) + floor).log()


class NaiveModel:
    """``head`` is the member; a mixture has ``components`` of it."""

    def __init__(self, model, head, components=1, floor=0.0):
        self.start = parameters_of(model)
        self.hidden = model.config.hidden
        self.head, self.components, self.floor = head, components, floor

    def windows(self, values, text_RB, window, use):
        """Each window's length and mean loss; ``use`` gets its gradients, and may change ``values``."""
        states = [
            (torch.zeros(text_RB.shape[1], h).double(), torch.zeros(text_RB.shape[1], h).double()) for h in self.hidden
        ]
        losses = []
        for first in range(0, len(text_RB) - 1, window):
            last = min(first + window, len(text_RB) - 1)
            leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
            features, new_states = leaves["embedding"][text_RB[first:last]], []
            for layer, state in enumerate(states):
                features, state = _layer(leaves, layer, features, *state)
                new_states.append(tuple(part.detach() for part in state))
            states = new_states
            log_probs = _log_probs(self.head, self.components, self.floor, leaves, features)
            loss = -log_probs.gather(-1, text_RB[first + 1 : last + 1].unsqueeze(-1)).mean()
            loss.backward()
            losses.append((last - first, loss.item()))
            use({name: leaf.grad for name, leaf in leaves.items()})
        return losses

    def sums_of_squares(self, train_ids, batch, window):
        """And over how many windows."""
        rows = len(train_ids) // batch
        text_RB = train_ids[: rows * batch].view(batch, rows).T
        sums = {name: torch.zeros_like(value) for name, value in self.start.items()}

        def add(gradients):
            for name, gradient in gradients.items():
                sums[name] += gradient**2

        return sums, len(self.windows(self.start, text_RB, window, add))

    def rms_form(self, train_ids, ids, *, batch, window, learning_rate, decay, epsilon):
        sums, count = self.sums_of_squares(train_ids, batch, window)
        rms = {name: (value / count).sqrt() for name, value in sums.items()}
        mean = sum(value.mean() for value in rms.values()) / len(rms)
        return self._adapt(ids, window, rms, mean, learning_rate, decay, epsilon)

    def sum_form(self, train_ids, ids, *, batch, window, learning_rate, decay, epsilon):
        sums, _ = self.sums_of_squares(train_ids, batch, window)
        roots = {name: value.sqrt() for name, value in sums.items()}
        total = sum(value.mean() for value in roots.values())
        return self._adapt(ids, window, roots, total, learning_rate, decay, epsilon)

    def _adapt(self, ids, window, roots, scale, learning_rate, decay, epsilon):
        values = {name: value.clone() for name, value in self.start.items()}

        def update(gradients):
            for name, gradient in gradients.items():
                towards_start = roots[name] / scale
                if decay > 0.0:
                    towards_start = towards_start.clamp(max=1.0 / decay)
                values[name] = (
                    values[name]
                    + decay * towards_start * (self.start[name] - values[name])
                    - learning_rate * gradient / (roots[name] + epsilon)
                )

        losses = self.windows(values, ids.unsqueeze(1), window, update)
        return sum(length * loss for length, loss in losses) / sum(length for length, _ in losses)
