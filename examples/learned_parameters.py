"""Output functions with parameters that are learned: one shift for each class, and k of gss.

The language is a table of 200 contexts and 100 words with a free vector of 6 numbers for each context, so the KL
divergence from the truth that a head leaves is exact. Each head is trained from three seeds, with the same optimiser.
A parameter is learned because the text of the function says so; the layer creates it and the optimiser finds it.
Nothing holds a learned k at or above 0, below which gss no longer grows with its logit.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigsoftmax import OutputLayer

CONTEXTS, WORDS, WIDTH, STEPS, SEEDS = 200, 100, 6, 300, 3
FUNCTIONS = (
    "softmax",
    "sigsoftmax",
    "shifted_sigsoftmax",
    "shifted_sigsoftmax(b=per_class)",
    "gss(k=0.2)",
    "gss(k=learned:1)",
    "gss(k=learned:0.2, c=per_class)",
)


def fitted(function: str, truth: Tensor, seed: int) -> tuple[float, OutputLayer]:
    """KL(truth | model) in nats, the mean over contexts, and the layer that reaches it."""
    torch.manual_seed(seed)
    contexts = nn.Parameter(torch.randn(CONTEXTS, WIDTH))
    layer = OutputLayer(WIDTH, WORDS, function=function)
    optimizer = torch.optim.Adam([contexts, *layer.parameters()], lr=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        layer.loss(contexts, truth).backward()  # probability targets: the whole truth at once
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return F.kl_div(layer.log_probs(contexts), truth, reduction="batchmean").item(), layer


def described(layer: OutputLayer) -> str:
    """The learned parameters: a number, or the range over classes."""
    parts = []
    for name, value in layer.function_parameters.items():
        least, most = value.min().item(), value.max().item()
        parts.append(f"{name} = {least:.2f}" + (f" .. {most:.2f}" if value.ndim else ""))
    return ", ".join(parts)


def main() -> None:
    torch.set_num_threads(1)  # The tensors are small: more threads mostly wait for each other.
    torch.manual_seed(0)
    truth = F.softmax(1.5 * torch.randn(CONTEXTS, WORDS), -1)
    print(f"{'function':32s} {'KL, nats':>9s} {'range over seeds':>18s}   learned (last seed)")
    for function in FUNCTIONS:
        results = [fitted(function, truth, seed) for seed in range(SEEDS)]
        divergences = [divergence for divergence, _ in results]
        span = f"{min(divergences):.4f} .. {max(divergences):.4f}"
        print(f"{function:32s} {sum(divergences) / SEEDS:9.4f} {span:>18s}   {described(results[-1][1])}")
    print("One small language without structure, and few steps. Sigsoftmax with a bias comes as near to softmax as it")
    print("likes, so where it stays behind here, training has not ended. Measure on your own data before you choose.")


if __name__ == "__main__":
    main()
