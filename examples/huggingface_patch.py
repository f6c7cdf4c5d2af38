"""A Hugging Face model with another output function: trained, saved, loaded, sampled from, scored, and undone.

A small Llama reads bytes of generated sentences. One line gives it the generalised sigsoftmax with a learned exponent;
the Trainer, `generate` and `save_pretrained` are those of transformers. The vocabulary (256) is larger than the width
(32), so there is a softmax bottleneck, but bytes are an easy text: this shows how it is done, not what it is worth.
"""

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging

from sigsoftmax.integrations.huggingface import (
    apply_output_function,
    from_pretrained,
    remove_output_function,
    token_log_likelihoods,
)

WORDS = (
    ("the", "a", "one", "every"),
    ("red", "small", "quick", "old", "lazy", "bright"),
    ("fox", "dog", "bird", "king", "river", "student"),
    ("sees", "finds", "loves", "paints", "forgets"),
    ("the moon", "a house", "one tree", "every book"),
)
LENGTH, STEPS = 64, 200


def sentences(count: int, seed: int) -> Tensor:
    source = random.Random(seed)
    text = "".join(" ".join(source.choice(choices) for choices in WORDS) + ". " for _ in range(count))
    ids = torch.tensor(list(text.encode()))
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def train(model: Any, text: Tensor, folder: Path) -> None:
    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = [{"input_ids": row, "labels": row} for row in text]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def nats(model: Any, text: Tensor) -> float:
    return -token_log_likelihoods(model, text).mean().item()


def main() -> None:
    torch.set_num_threads(1)  # The tensors are small: more threads mostly wait for each other.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    text, held_back = sentences(2000, seed=1), sentences(100, seed=2)
    model = apply_output_function(LlamaForCausalLM(config), "gss(k=learned:0.5)")
    step = model(input_ids=text[:2], labels=text[:2])
    print(f"a training step returns a loss, {step.loss.item():.3f}; it stores logits: {'logits' in step}")
    print(f"before training: {nats(model, held_back):.3f} nats a byte on text held back")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(model, text, folder / "run")
        k = model.output_function.function_parameters["k"].item()
        print(f"after {STEPS} steps: {nats(model, held_back):.3f} nats a byte, k = {k:.3f}")

        model.save_pretrained(folder / "model")
        try:
            LlamaForCausalLM.from_pretrained(folder / "model")
        except RuntimeError as error:
            print(f"loaded as a plain Llama it refuses: {type(error).__name__}")
        loaded = from_pretrained(folder / "model")
        print(f"loaded with its function: {nats(loaded, held_back):.3f} nats a byte")

    prompt = torch.tensor([list(b"the old ")])
    for temperature in (0.5, 1.0):
        written = loaded.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=True, temperature=temperature, max_new_tokens=40
        )
        print(f"at temperature {temperature}: {bytes(written[0].tolist()).decode(errors='replace')!r}")

    z = remove_output_function(loaded)(held_back[:1]).logits
    print(f"undone, its logits are those of a {type(loaded).__name__} again, {tuple(z.shape)}")


if __name__ == "__main__":
    main()
