"""Training a patched model is training with the plain formula: losses, gradients, counts, precision, memory."""

import copy

import pytest

pytest.importorskip("transformers")

import torch
from tests.allocations import allocations_of
from tests.integrations.huggingface.tiny import NAMES, TRAINING, InOrder, V, phi, plain_loss, tiny, tokens
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from sigsoftmax import OutputFunction
from sigsoftmax.integrations.huggingface import apply_output_function, remove_output_function


def gss(z, k):
    return k * z - (k - 1.0) * F.softplus(z)


@pytest.mark.parametrize("name", NAMES)
def test_fifty_steps_of_sigsoftmax_are_those_of_the_formula(name):
    plain = tiny(name, dtype=torch.float64).train()
    patched = apply_output_function(copy.deepcopy(plain), "sigsoftmax")
    assert patched.examined.why_stored is None
    # Not Adam, which makes large steps of gradients that are nothing but rounding, such as that of GPT-2's key bias.
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5) for model in (plain, patched)]
    for step in range(50):
        ids = (tokens(3, 1, seed=step) + torch.arange(7)) % V
        labels = ids.clone()
        labels[0, : step % 5] = -100
        wanted, output = plain_loss(phi(plain(ids).logits), labels), patched(ids, labels=labels)
        assert "logits" not in output
        torch.testing.assert_close(output.loss, wanted, rtol=1e-10, atol=0)
        for optimizer, loss in zip(optimizers, (wanted, output.loss), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for (key, own), value in zip(plain.named_parameters(), patched.parameters(), strict=True):
            torch.testing.assert_close(value, own, rtol=1e-8, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}")
    assert wanted < 2.0  # it learns to count


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize(
    ("function", "formula", "start"),
    [
        ("softmax", lambda z: z, {}),
        ("gss(k=learned:0.5)", lambda z, k: gss(z, k), {"k": 0.5}),
        ("shifted_sigsoftmax(b=per_class:1)", lambda z, b: z + F.logsigmoid(z + b), {"b": [1.0] * V}),
    ],
    ids=["softmax", "gss", "shifted"],
)
def test_other_members_and_what_they_learn(name, function, formula, start):
    plain = tiny(name, dtype=torch.float64).train()
    patched = apply_output_function(copy.deepcopy(plain), function)
    values = {key: torch.tensor(value, dtype=torch.float64, requires_grad=True) for key, value in start.items()}
    learned = dict(patched.output_function.function_parameters.items())
    assert learned.keys() == values.keys()
    ids = tokens()
    for _ in range(3):
        wanted, loss = plain_loss(formula(plain(ids).logits, **values), ids), patched(ids, labels=ids).loss
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
        for model, result in ((plain, wanted), (patched, loss)):
            model.zero_grad()
            result.backward()
        for own, value in zip(plain.parameters(), patched.parameters(), strict=False):
            torch.testing.assert_close(value.grad, own.grad, rtol=1e-6, atol=1e-9)
        for key, value in values.items():
            # Learned numbers are kept in float32, whatever the precision of the model.
            found = learned[key].grad.double().reshape(value.shape)
            torch.testing.assert_close(found, value.grad, rtol=1e-5, atol=1e-8)
            value.grad = None
            learned[key].grad = None


def test_a_composed_function_takes_a_tensor_of_its_user():
    shift = torch.nn.Parameter(torch.full((V,), 0.5))
    model = apply_output_function(tiny("gemma2"), OutputFunction("shifted_sigsoftmax", b=shift)).train()
    model(tokens(), labels=tokens()).loss.backward()
    assert model.output_function.function_parameters["b"] is shift
    assert shift.grad.abs().sum() > 0


class Ordered(InOrder, Trainer):
    pass


def training_arguments(folder, **changes):
    return TrainingArguments(str(folder), **TRAINING | {"num_train_epochs": 2, "learning_rate": 0.05} | changes)


def examples(count=12):
    rows = tokens(count, 8)
    labels = rows.clone()
    for row in range(count):
        # Micro-batches of very different numbers of tokens: a mean of means would show.
        labels[row, : (row * 5) % 7] = -100
    return rows, labels, [{"input_ids": r, "labels": t} for r, t in zip(rows, labels, strict=True)]


@pytest.mark.parametrize("function", ["sigsoftmax", "softmax"])
def test_the_trainer_counts_tokens_over_accumulated_batches(tmp_path, function):
    plain = tiny()
    patched = apply_output_function(copy.deepcopy(plain), function)
    rows, labels, dataset = examples()
    trainer = Ordered(model=patched, args=training_arguments(tmp_path), train_dataset=dataset)
    trainer.train()
    formula = phi if function == "sigsoftmax" else (lambda z: z)
    plain.train()
    losses = []
    for _ in range(2):
        for step in range(2):
            part = slice(6 * step, 6 * step + 6)
            count = (labels[part, 1:] != -100).sum()
            plain.zero_grad()
            losses.append(0.0)
            for first in range(part.start, part.stop, 2):
                micro = slice(first, first + 2)
                loss = plain_loss(formula(plain(rows[micro]).logits), labels[micro], reduction="sum") / count
                loss.backward()
                losses[-1] += loss.item()
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter -= 0.05 * parameter.grad
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-5)
    for own, value in zip(plain.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(value, own, rtol=1e-4, atol=1e-5)


def test_evaluation_of_the_trainer(tmp_path):
    plain = tiny().eval()
    patched = apply_output_function(copy.deepcopy(plain), "sigsoftmax")
    rows, _, _ = examples(4)
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    seen = {}

    def metrics(prediction):
        seen["logits"] = torch.from_numpy(prediction.predictions)
        return {}

    trainer = Trainer(model=patched, args=training_arguments(tmp_path), eval_dataset=dataset, compute_metrics=metrics)
    wanted = phi(plain(rows).logits.detach())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(plain_loss(wanted, rows)), rel=1e-5)
    torch.testing.assert_close(seen["logits"], wanted, rtol=1e-4, atol=1e-4)


def test_label_smoothing_of_the_trainer_smooths_the_right_probabilities(tmp_path):
    plain = tiny()
    patched = apply_output_function(copy.deepcopy(plain), "sigsoftmax")
    rows, labels, dataset = examples(2)
    arguments = training_arguments(tmp_path, label_smoothing_factor=0.2, gradient_accumulation_steps=1, max_steps=1)
    trainer = Ordered(model=patched, args=arguments, train_dataset=dataset)
    trainer.train()
    log_p = torch.log_softmax(phi(plain(rows).logits), -1)[:, :-1][labels[:, 1:] != -100]
    target = labels[:, 1:][labels[:, 1:] != -100]
    wanted = -0.8 * log_p.gather(-1, target[:, None]).mean() - 0.2 * log_p.mean()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(wanted.detach()), rel=1e-5)


def test_regularisers_act_while_training_and_not_in_evaluation():
    plain = tiny(dtype=torch.float64)
    patched = apply_output_function(copy.deepcopy(plain), "sigsoftmax", z_loss=0.1, label_smoothing=0.3).train()
    ids = tokens()
    values = phi(plain(ids).logits)[:, :-1].flatten(0, 1)
    smoothed = F.cross_entropy(values, ids[:, 1:].flatten(), label_smoothing=0.3)
    wanted = smoothed + 0.1 * torch.logsumexp(values, -1).square().mean()
    torch.testing.assert_close(patched(ids, labels=ids).loss, wanted)
    torch.testing.assert_close(
        patched.eval()(ids, labels=ids).loss, plain_loss(phi(plain.eval()(ids).logits), ids), rtol=1e-10, atol=0
    )


def test_labels_that_are_shifted_already():
    model = apply_output_function(tiny(dtype=torch.float64), "sigsoftmax").train()
    ids = tokens()
    shifted = F.pad(ids, (0, 1), value=-100)[:, 1:]
    for options in ({}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}):
        torch.testing.assert_close(
            model(ids, labels=ids, shift_labels=shifted, **options).loss, model(ids, labels=ids, **options).loss
        )


def test_a_loss_function_of_the_user_gets_the_logits_that_the_model_returns():
    model = apply_output_function(tiny(), "sigsoftmax").train()
    plain = remove_output_function(copy.deepcopy(model))
    seen = {}

    def own_loss(logits, labels, vocab_size, **_):
        seen["logits"] = logits
        return logits.mean()

    model.loss_function = own_loss
    output = model(tokens(), labels=tokens())
    torch.testing.assert_close(output.loss, phi(plain(tokens()).logits).mean())
    torch.testing.assert_close(output.logits, phi(plain(tokens()).logits))
    torch.testing.assert_close(seen["logits"], output.logits)


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_half_precision_is_as_exact_as_plain_torch(name):
    exact = tiny(name, dtype=torch.bfloat16).double().train()
    plain = copy.deepcopy(exact).bfloat16()
    patched = apply_output_function(copy.deepcopy(plain), "sigsoftmax")
    ids = tokens(8, 12)
    plain_loss(phi(exact(ids).logits), ids).backward()
    truth = torch.cat([p.grad.flatten() for p in exact.parameters()])
    by_torch = plain_loss(phi(plain(ids).logits.float()), ids)
    ours = patched(ids, labels=ids).loss
    assert ours.dtype == torch.float32
    by_torch.backward()
    ours.backward()
    # Both lose most of it in the body of the model, which is the same.
    errors = [
        (torch.cat([p.grad.double().flatten() for p in model.parameters()]) - truth).norm() / truth.norm()
        for model in (plain, patched)
    ]
    assert errors[1] <= 1.2 * errors[0]


def test_autocast():
    model = apply_output_function(tiny(), "sigsoftmax").train()
    ids = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(model(ids, labels=ids).loss.item(), rel=0.05)


def test_gradient_checkpointing():
    model = apply_output_function(tiny(dtype=torch.float64), "sigsoftmax").train()
    ids = tokens()
    wanted = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    model.gradient_checkpointing_enable()
    got = torch.autograd.grad(model(ids, labels=ids, use_cache=False).loss, list(model.parameters()))
    for own, value in zip(wanted, got, strict=True):
        torch.testing.assert_close(value, own)


def test_torch_compile_keeps_the_step_whole():
    model = apply_output_function(tiny(), "sigsoftmax").train()
    ids = tokens()
    eager = model(ids, labels=ids).loss
    wanted = torch.autograd.grad(eager, list(model.parameters()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = compiled(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, eager)
    for got, own in zip(torch.autograd.grad(loss, list(model.parameters())), wanted, strict=True):
        torch.testing.assert_close(got, own)


def step_memory(function, classes, batch, length):
    model = tiny("llama tied", vocab_size=classes).train()
    if function is not None:
        apply_output_function(model, function)
    ids = tokens(batch, length, classes=classes)

    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    step()
    gradients = sum(parameter.numel() * 4 for parameter in model.parameters())
    return allocations_of(step).peak - gradients


@pytest.mark.parametrize("function", ["softmax", "sigsoftmax"])
def test_a_step_takes_a_quarter_of_the_memory(function):
    plain, patched = (step_memory(which, 32_064, 8, 60) for which in (None, function))
    assert patched <= plain / 4


@pytest.mark.slow
@pytest.mark.parametrize("function", ["softmax", "sigsoftmax"])
def test_a_step_takes_a_quarter_of_the_memory_at_the_vocabulary_of_llama_3(function):
    plain, patched = (step_memory(which, 128_256, 8, 60) for which in (None, function))
    assert patched <= plain / 4
