"""Another output function in an existing classifier: one changed line.

A small network learns to tell 40 overlapping clusters in the plane apart. Its loss is torch's own, then the drop-in for
it, then other members of the family. `softmax(alpha=1.5)` is the control: it has a steeper slope, as sigsoftmax has,
and nothing else. Two hidden units in the last layer make a bottleneck. Each line is the mean over three seeds.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sigsoftmax

CLASSES, STEPS, SEEDS = 40, 300, 3


def clusters(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    angle = torch.arange(CLASSES) * 2.4  # a sunflower
    centres = torch.arange(1, CLASSES + 1).sqrt().unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], 1)
    label = torch.randint(CLASSES, (samples,), generator=generator)
    return centres[label] + 0.5 * torch.randn(samples, 2, generator=generator), label


def trained(cross_entropy: Callable[[Tensor, Tensor], Tensor], seed: int) -> tuple[float, float]:
    """The loss on new points, and the share of them that is classified right."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(0)
    points, labels = clusters(1000, generator)
    new_points, new_labels = clusters(2000, generator)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2), nn.Linear(2, CLASSES)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(model(points), labels).backward()
        optimizer.step()
    with torch.no_grad():
        logits = model(new_points)
        loss = cross_entropy(logits, new_labels).item()
        return loss, (logits.argmax(-1) == new_labels).float().mean().item()


def member(function: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, labels: sigsoftmax.cross_entropy(logits, labels, function=function)


def main() -> None:
    torch.set_num_threads(1)  # The tensors are small: more threads mostly wait for each other.
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"F.cross_entropy": F.cross_entropy}
    losses |= {name: member(name) for name in ("softmax", "softmax(alpha=1.5)", "sigsoftmax")}
    print(f"{'loss':20s} {'nats':>7s} {'range':>15s} {'right':>7s}")
    for name, cross_entropy in losses.items():
        nats, right = zip(*(trained(cross_entropy, seed) for seed in range(SEEDS)), strict=True)
        span = f"{min(nats):.3f} .. {max(nats):.3f}"
        print(f"{name:20s} {sum(nats) / SEEDS:7.3f} {span:>15s} {sum(right) / SEEDS:7.1%}")
    print(
        "The first two lines are the same function. Compare the others with the range over seeds before you conclude."
    )


if __name__ == "__main__":
    main()
