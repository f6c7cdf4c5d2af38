"""The last layer of a language model, tied to the embedding, trained without holding its logits.

A small GRU reads generated sentences character by character. `OutputLayer` shares its matrix with the embedding; its
loss is `linear_cross_entropy`. The grammar is known, so the entropy of the text is too: no model can do better. After
training the model writes some text of its own. (With 28 characters and a width of 32 there is no softmax bottleneck
here: this shows how the layer is used, not what a function is worth.)
"""

import math
import random
import time

import torch
from torch import Tensor, nn

from sigsoftmax import OutputLayer

GRAMMAR = (
    ("the", "a", "one", "every"),
    ("red", "small", "quick", "old", "lazy", "bright", "hungry", "young"),
    ("fox", "dog", "bird", "king", "river", "student", "machine", "zebra"),
    ("sees", "finds", "loves", "jumps over", "paints", "forgets", "questions", "watches"),
    ("the", "a", "one", "every"),
    ("moon", "house", "tree", "book", "cat", "window", "number", "vase"),
)
WIDTH, BATCH, WINDOW, STEPS = 32, 32, 64, 300


def sentence(random_source: random.Random) -> str:
    return " ".join(random_source.choice(words) for words in GRAMMAR) + ". "


def entropy_per_character() -> float:
    """Nats: every choice is uniform, and the text can be read in one way only."""
    nats = sum(math.log(len(words)) for words in GRAMMAR)
    characters = sum(sum(map(len, words)) / len(words) for words in GRAMMAR) + len(GRAMMAR) + 1
    return nats / characters


class LanguageModel(nn.Module):
    def __init__(self, characters: int, function: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.recurrent = nn.GRU(WIDTH, 128, batch_first=True)
        self.project = nn.Linear(128, WIDTH)
        self.head = OutputLayer(WIDTH, characters, function=function, weight=self.embedding.weight)

    def hidden(self, text: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        output, state = self.recurrent(self.embedding(text), state)
        return self.project(output), state

    def loss(self, text: Tensor) -> Tensor:
        hidden, _ = self.hidden(text[:, :-1])
        return self.head.loss(hidden, text[:, 1:])

    @torch.no_grad()
    def write(self, first: Tensor, length: int, temperature: float = 1.0) -> list[int]:
        written, state = [int(first)], None
        for _ in range(length):
            hidden, state = self.hidden(torch.tensor([[written[-1]]]), state)
            written.append(int(self.head.sample(hidden[0, -1], temperature=temperature)))
        return written


def main() -> None:
    torch.set_num_threads(1)  # The tensors are small: more threads mostly wait for each other.
    torch.manual_seed(0)
    random_source = random.Random(0)
    text = "".join(sentence(random_source) for _ in range(6000))
    alphabet = sorted(set(text))
    ids = torch.tensor([alphabet.index(character) for character in text])
    train, valid = ids[:-20_000], ids[-20_000:].view(-1, 200)
    model = LanguageModel(len(alphabet), "sigsoftmax")
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    started = time.perf_counter()
    print(f"{len(alphabet)} characters, {sum(p.numel() for p in model.parameters())} parameters (the tied one once)")
    for step in range(STEPS + 1):
        if step % 100 == 0:
            with torch.no_grad():
                print(f"step {step:3d}: {model.loss(valid).item():.3f} nats a character on text held back")
        begin = torch.randint(len(train) - WINDOW, (BATCH, 1))
        optimizer.zero_grad()
        model.loss(train[begin + torch.arange(WINDOW)]).backward()
        optimizer.step()
    print(f"the text's own entropy: {entropy_per_character():.3f} nats; {time.perf_counter() - started:.1f} s")
    for temperature in (1.0, 0.3):
        start = torch.tensor(alphabet.index(" "))
        written = "".join(alphabet[i] for i in model.write(start, 150, temperature))
        print(f"written at temperature {temperature}: ...{written}...")


if __name__ == "__main__":
    main()
