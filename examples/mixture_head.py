"""A mixture of sigsoftmaxes (MoSS) as the last layer, beside layers without a mixture.

The language is a table: 200 contexts, each with its own random distribution over 100 words. Every context has a free
vector of 16 numbers. The heads squeeze it to 4 numbers, or to 4 for each of 4 components, and the KL divergence that
remains is exact, since the truth is known. A mixture spends more parameters between context and output matrix, so a
plain head that may use all 16 numbers is shown too.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigsoftmax import MixtureOutputLayer, OutputLayer

CONTEXTS, WORDS, STATE, WIDTH, COMPONENTS, STEPS = 200, 100, 16, 4, 4, 400


class PlainHead(nn.Module):
    """A linear map to the width of the output layer, then the layer."""

    def __init__(self, width: int, function: str) -> None:
        super().__init__()
        self.squeeze = nn.Linear(STATE, width)
        self.output = OutputLayer(width, WORDS, function=function)

    def loss(self, state: Tensor, truth: Tensor) -> Tensor:
        return self.output.loss(self.squeeze(state), truth)


def remaining_divergence(head: PlainHead | MixtureOutputLayer, truth: Tensor) -> float:
    """KL(truth | model) in nats, the mean over contexts, after training contexts and head together."""
    states = nn.Parameter(torch.randn(CONTEXTS, STATE))
    entropy = -torch.xlogy(truth, truth).sum(-1).mean()
    optimizer = torch.optim.Adam([states, *head.parameters()], lr=0.03)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        head.loss(states, truth).backward()  # probability targets: the whole truth at once
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return (head.loss(states, truth) - entropy).item()


def main() -> None:
    torch.set_num_threads(1)  # The tensors are small: more threads mostly wait for each other.
    torch.manual_seed(0)
    truth = F.softmax(1.5 * torch.randn(CONTEXTS, WORDS), -1)
    heads: dict[str, Callable[[], PlainHead | MixtureOutputLayer]] = {
        "softmax, width 4": lambda: PlainHead(WIDTH, "softmax"),
        "sigsoftmax, width 4": lambda: PlainHead(WIDTH, "sigsoftmax"),
        "MoS, 4 of width 4": lambda: MixtureOutputLayer(STATE, WIDTH, WORDS, COMPONENTS, function="softmax"),
        "MoSS, 4 of width 4": lambda: MixtureOutputLayer(STATE, WIDTH, WORDS, COMPONENTS, function="sigsoftmax"),
        "softmax, width 16": lambda: PlainHead(STATE, "softmax"),
    }
    print(f"{'head':20s} {'head parameters':>15s} {'KL, nats':>9s}")
    for name, make in heads.items():
        torch.manual_seed(1)
        head = make()
        divergence = remaining_divergence(head, truth)
        parameters = sum(parameter.numel() for parameter in head.parameters())
        print(f"{name:20s} {parameters:15d} {divergence:9.4f}")
    print("One run of each, same optimiser and steps for all; not the best that each could do.")

    layer = MixtureOutputLayer(STATE, WIDTH, WORDS, COMPONENTS)
    words = layer.sample(torch.randn(5, STATE), num_samples=3)
    print(f"sampling draws a component, then a word from it alone: 3 words for 5 states, {tuple(words.shape)}")


if __name__ == "__main__":
    main()
