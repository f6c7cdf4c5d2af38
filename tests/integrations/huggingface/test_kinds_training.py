"""Encoder-decoder and masked models under the trainers of transformers, and whatever else a training step meets."""

import copy

import pytest

pytest.importorskip("transformers")

import torch
from tests.integrations.huggingface.kinds import ENCODER_DECODER, PAD, inputs_of, kind, labels_of, loss_of, z_of
from tests.integrations.huggingface.tiny import TRAINING, InOrder, phi, tokens
from tokenizers import Tokenizer, models
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from sigsoftmax.integrations.huggingface import apply_output_function, from_pretrained

SETTINGS = TRAINING | {"per_device_eval_batch_size": 12, "max_steps": 2, "learning_rate": 0.02}


class OrderedTrainer(InOrder, Trainer):
    pass


class OrderedSeq2SeqTrainer(InOrder, Seq2SeqTrainer):
    pass


def examples(name, count=12):
    ids, length = tokens(count, 7), 7 if name == "bert" else 6
    labels = tokens(count, length, seed=8)
    for row in range(count):
        # Micro-batches of very different numbers of tokens: a mean of means would show.
        labels[row, : (row * 5) % 6] = -100
    return (
        ids,
        labels,
        [{"input_ids": one, "labels": label} for one, label in zip(ids.tolist(), labels.tolist(), strict=True)],
    )


def log_likelihoods(name, plain, ids, labels):
    """log p of every class at every position that has a label, and these labels."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    log_p = torch.log_softmax(phi(z_of(name, plain, inputs, labels)), -1)
    return log_p[labels != -100], labels[labels != -100]


def losses_of_training(name, plain, ids, labels, smoothing=0.0):
    """Two steps of SGD on three batches of two rows each; a step's loss is a mean over its tokens."""
    losses = []
    for step in range(2):
        part = slice(6 * step, 6 * step + 6)
        log_p, targets = log_likelihoods(name, plain, ids[part], labels[part])
        nll = -log_p.gather(-1, targets[:, None]).mean()
        loss = (1.0 - smoothing) * nll - smoothing * log_p.mean()
        losses.append(float(loss.detach()))
        plain.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                if parameter.grad is not None:
                    parameter -= SETTINGS["learning_rate"] * parameter.grad
    return losses


def logged(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def tokenizer():
    words = {f"w{index}": index for index in range(23)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")), pad_token="w0")


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("name", ["bert", "t5", "bart"])
def test_the_trainers_count_tokens_over_accumulated_batches(tmp_path, name, smoothing):
    plain = kind(name, dtype=torch.float32).train()
    patched = apply_output_function(copy.deepcopy(plain), "sigsoftmax")
    ids, labels, dataset = examples(name)
    settings = SETTINGS | {"label_smoothing_factor": smoothing}
    if name == "bert":
        trainer = OrderedTrainer(
            model=patched, args=TrainingArguments(str(tmp_path), **settings), train_dataset=dataset
        )
    else:
        collator = DataCollatorForSeq2Seq(tokenizer(), model=patched)
        trainer = OrderedSeq2SeqTrainer(
            model=patched,
            args=Seq2SeqTrainingArguments(str(tmp_path), **settings),
            train_dataset=dataset,
            data_collator=collator,
        )
    trainer.train()
    assert logged(trainer) == pytest.approx(losses_of_training(name, plain, ids, labels, smoothing), rel=1e-5)
    for own, value in zip(plain.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(value, own, rtol=1e-4, atol=1e-6)


def test_a_trainer_evaluates_generates_and_resumes(tmp_path):
    plain = kind("t5", dtype=torch.float32).eval()
    model = apply_output_function(copy.deepcopy(plain), "gss(k=learned:1.0)")
    ids, labels, dataset = examples("t5")
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), **SETTINGS | {"save_strategy": "steps", "save_steps": 1}, predict_with_generate=True
    )
    seen = {}

    def metrics(predicted):
        seen["predictions"], seen["labels"] = predicted.predictions, predicted.label_ids
        return {}

    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        eval_dataset=dataset,
        data_collator=DataCollatorForSeq2Seq(tokenizer(), model=model),
        processing_class=tokenizer(),
        compute_metrics=metrics,
    )
    found = trainer.evaluate(max_new_tokens=4)
    with torch.no_grad():
        wanted = loss_of(plain(input_ids=ids, labels=labels).logits, labels)  # k = 1 is softmax
    assert found["eval_loss"] == pytest.approx(float(wanted), rel=1e-4)
    assert torch.equal(torch.tensor(seen["predictions"])[:, :5], plain.generate(ids, max_new_tokens=4))
    trainer.train()
    same = from_pretrained(tmp_path / "checkpoint-2").eval()
    call = {"input_ids": ids, "labels": labels}
    assert torch.equal(same(**call).logits, model.eval()(**call).logits)
    assert same.output_function.function_parameters["k"].item() != 1.0


@pytest.mark.parametrize("function", ["sigsoftmax", "mos(K=2)"])
@pytest.mark.parametrize("name", ["t5", "whisper", "bert"])
def test_gradient_checkpointing(name, function):
    model = apply_output_function(kind(name), function).train()
    call = {**inputs_of(name), "labels": labels_of(name)}

    def gradients():
        model.zero_grad()
        model(**call).loss.backward()
        return {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}

    wanted = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = gradients()
    assert wanted.keys() == found.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, msg=key)


@pytest.mark.parametrize(
    "name", ["t5", "bert", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("bart", "whisper"))]
)
def test_torch_compile_keeps_the_step_whole(name):
    model = apply_output_function(kind(name, dtype=torch.float32), "sigsoftmax", logits_with_labels="never")
    # Layers that are dropped at random, as BART's and Whisper's in training, are branches that no graph holds.
    model.train(name in ("t5", "bert"))
    call = {**inputs_of(name, torch.float32), "labels": labels_of(name)}
    call.pop("attention_mask", None)
    eager = model(**call).loss
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(**call).loss
    torch.testing.assert_close(loss, eager)


@pytest.mark.parametrize("name", ["t5", "bart", "bert"])
def test_half_precision_and_autocast(name):
    model = apply_output_function(kind(name, dtype=torch.float32), "sigsoftmax").train()
    call = {**inputs_of(name), "labels": labels_of(name)}
    exact = model(**call).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**call).loss
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)
    half = apply_output_function(kind(name, dtype=torch.bfloat16), "sigsoftmax").train()
    loss = half(**call).loss
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.1)


def test_padding_of_the_decoder_is_that_of_the_model():
    # A label that is the padding token counts like any other; -100 alone does not.
    for name in ENCODER_DECODER:
        plain = kind(name)
        inputs, labels = inputs_of(name), labels_of(name)
        labels[1, -2:] = PAD
        wanted = loss_of(phi(z_of(name, plain, inputs, labels)), labels)
        found = apply_output_function(plain, "sigsoftmax").train()(**inputs, labels=labels).loss
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)
