"""An output layer whose classes are divided over processes, trained beside the same layer in one process.

    torchrun --standalone --nproc-per-node 2 examples/vocabulary_parallel.py

Each rank holds some of the rows of the output matrix and the same tokens. The ranks exchange a few numbers a token, so
that every one of them has the whole loss, and training takes the steps that one process would take. Started without
torchrun it is a world of one rank. On GPUs the same code runs on NCCL.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from sigsoftmax import MixtureOutputLayer, OutputLayer, distributed

WORDS, WIDTH, COMPONENTS, TOKENS, STEPS = 2_003, 32, 3, 64, 12


class Model(nn.Module):
    """A word's vector, a layer of a network, and a head."""

    def __init__(self, head: OutputLayer | MixtureOutputLayer) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = head

    def forward(self, words: Tensor, target: Tensor) -> Tensor:
        return self.head.loss(self.body(self.embedding(words)), target, ignore_index=0, label_smoothing=0.1)


def make(kind: str) -> Model:
    torch.manual_seed(0)
    if kind == "MoSS":
        return Model(MixtureOutputLayer(WIDTH, WIDTH, WORDS, COMPONENTS))
    return Model(OutputLayer(WIDTH, WORDS, function=kind))


def train(model: Model, device: torch.device) -> list[float]:
    # Every rank sees the same tokens: the generator has the same seed everywhere.
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        words = torch.randint(WORDS, (TOKENS,), generator=generator).to(device)
        optimizer.zero_grad()
        loss = model(words, (words * 7 + 1) % WORDS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.set_num_threads(1)
    with distributed.processes(timeout_s=60.0) as world:
        mesh = init_device_mesh(world.device.type, (world.size,))
        if world.is_first:
            print(f"ranks: {world.size}, words: {WORDS}")
        for kind in ("sigsoftmax", "shifted_sigsoftmax", "MoSS"):
            alone = train(make(kind).to(world.device), world.device)
            model = make(kind).to(world.device)
            distributed.shard_classes(model.head, mesh)
            together = train(model, world.device)
            # On every rank: the loss is the same everywhere.
            gap = max(abs(a - b) / a for a, b in zip(alone, together, strict=True))
            assert gap < 1e-4, gap
            if world.is_first:
                rows = model.head.weight.to_local().shape[0]
                print(f"{kind:20s} {rows} rows on rank 0, loss {together[0]:.4f} -> {together[-1]:.4f}")
                print(f"{'':20s} largest relative difference from one process in {STEPS} steps: {gap:.1e}")


if __name__ == "__main__":
    main()
