"""TRL's trainers train the output function that a model has: their losses against the formula."""

import copy

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")

import torch
from datasets import Dataset
from tests.integrations.huggingface.tiny import V, phi, plain_loss, tiny, tokens
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from sigsoftmax.integrations.huggingface import apply_output_function, from_pretrained, retrofit

# The plain model, the patch that keeps softmax, and another function; the last column is what the logits mean.
MODELS = [(None, lambda z: z), ("softmax", lambda z: z), ("sigsoftmax", phi)]
IDS = ["unpatched", "softmax", "sigsoftmax"]

pytestmark = pytest.mark.filterwarnings(
    # transformers and TRL import what torch and Python have deprecated.
    "ignore::DeprecationWarning:torch.*",
    "ignore::DeprecationWarning:multiprocess.*",
    "ignore::DeprecationWarning:dill.*",
)


def model_of(function, seed=0):
    model = tiny(seed=seed)
    return model if function is None else apply_output_function(model, function)


def tokenizer():
    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index for index in range(2, V)}}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def texts(count, length, seed=1):
    return [
        " ".join(f"w{index}" for index in row) for row in (2 + tokens(count, length, seed=seed, classes=V - 2)).tolist()
    ]


def settings(folder, **changes):
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 1,
        "logging_steps": 1,
        "learning_rate": 0.0,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    } | changes


def logged(trainer, key="loss"):
    trainer.train()
    return next(entry[key] for entry in trainer.state.log_history if key in entry)


def log_probs(logits_BLV, ids_BL):
    return logits_BLV[:, :-1].log_softmax(-1).gather(-1, ids_BL[:, 1:, None])[..., 0]


def sft(folder, model, **changes):
    rows = tokens(4, 9)
    dataset = Dataset.from_dict({"input_ids": rows.tolist()})
    arguments = SFTConfig(**settings(folder, **changes))
    return rows, SFTTrainer(model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer())


@pytest.mark.parametrize(("function", "of"), MODELS, ids=IDS)
def test_sft(tmp_path, function, of):
    rows, trainer = sft(tmp_path, model_of(function))
    logits = of(tiny()(rows).logits.detach())
    assert logged(trainer) == pytest.approx(float(plain_loss(logits, rows)), rel=1e-4)
    log_p = logits[:, :-1].log_softmax(-1)
    entry = trainer.state.log_history[0]
    assert entry["entropy"] == pytest.approx(float(-(log_p.exp() * log_p).sum(-1).mean()), rel=1e-4)
    assert entry["mean_token_accuracy"] == pytest.approx(float((log_p.argmax(-1) == rows[:, 1:]).float().mean()))


def test_sft_of_the_three_models_differs_where_it_should(tmp_path):
    losses = [logged(sft(tmp_path, model_of(function))[1]) for function, _ in MODELS]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert abs(losses[2] - losses[0]) > 0.1


def test_sft_trains_the_gradient_of_the_formula(tmp_path):
    rows, trainer = sft(
        tmp_path,
        model_of("sigsoftmax"),
        learning_rate=0.1,
        optim="sgd",
        max_grad_norm=0.0,
        save_strategy="steps",
        save_steps=1,
    )
    trainer.train()
    plain = tiny().train()
    plain_loss(phi(plain(rows).logits), rows).backward()
    for own, value in zip(plain.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(value, own - 0.1 * own.grad, rtol=1e-4, atol=1e-5)
    same = from_pretrained(tmp_path / "checkpoint-1")
    torch.testing.assert_close(same(rows).logits, trainer.model(rows).logits)


def test_sft_of_a_mixture(tmp_path):
    # It begins as the softmax model, and its parameters are trained.
    model = model_of("mos(K=3)")
    rows, trainer = sft(tmp_path, model, learning_rate=0.1, optim="sgd")
    assert logged(trainer) == pytest.approx(float(plain_loss(tiny()(rows).logits.detach(), rows)), rel=1e-4)
    assert model.output_function.latent_weight.abs().sum() > 0


def test_sft_of_an_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    rows, trainer = sft(
        tmp_path, peft.get_peft_model(model_of("sigsoftmax"), peft.LoraConfig(target_modules=["q_proj"]))
    )
    assert logged(trainer) == pytest.approx(float(plain_loss(phi(tiny()(rows).logits.detach()), rows)), rel=1e-4)


def test_sft_in_bfloat16(tmp_path):
    rows, trainer = sft(tmp_path, model_of("sigsoftmax"), bf16=True)
    assert logged(trainer) == pytest.approx(float(plain_loss(phi(tiny()(rows).logits.detach()), rows)), rel=0.03)


def test_sft_with_gradient_checkpointing_and_evaluation(tmp_path):
    rows, trainer = sft(tmp_path, model_of("sigsoftmax"), gradient_checkpointing=True)
    wanted = float(plain_loss(phi(tiny()(rows).logits.detach()), rows))
    assert logged(trainer) == pytest.approx(wanted, rel=1e-4)
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(("function", "of"), MODELS, ids=IDS)
def test_dpo(tmp_path, function, of):
    prompts, chosen, rejected = texts(4, 3), texts(4, 4, seed=2), texts(4, 4, seed=3)
    dataset = Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected})
    trainer = DPOTrainer(
        model=model_of(function),
        ref_model=model_of(function, seed=7),
        args=DPOConfig(**settings(tmp_path, beta=0.5)),
        train_dataset=dataset,
        processing_class=tokenizer(),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    ids, mask = batch["input_ids"], batch["completion_mask"][:, 1:]
    sums = [(log_probs(of(tiny(seed=seed)(ids).logits.detach()), ids) * mask).sum(1) for seed in (0, 7)]
    gain = (sums[0] - sums[1]).chunk(2)
    wanted = -F.logsigmoid(0.5 * (gain[0] - gain[1])).mean()
    assert logged(trainer) == pytest.approx(float(wanted), rel=1e-4)


def reward(completions, **_):
    return [float(len(text) % 5) for text in completions]


def reinforced(kind, config, folder, model, **changes):
    arguments = config(
        **settings(folder, num_generations=4, max_completion_length=5, temperature=0.7, beta=0.0, **changes)
    )
    return kind(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": texts(4, 3)}),
        processing_class=tokenizer(),
    )


REINFORCED = [None, "softmax", "sigsoftmax", "moss(K=3)"]


class LogitsOf:
    """The logits of a model: of a single function by the formula, of a mixture those of a copy of the model.

    The logits of a mixture are compared with the formula in test_mixture_head.
    """

    def __init__(self, model, function):
        self.of = dict(MODELS).get(function, lambda z: z)
        self.model = copy.deepcopy(model) if "K" in (function or "") else tiny()

    def __call__(self, ids):
        return self.of(self.model(ids).logits)


def model_and_its_logits(function):
    model = model_of(function)
    if "K" in (function or ""):
        model.output_function.latent_weight.data.normal_(0.0, 0.2)
    return model, LogitsOf(model, function)


@pytest.mark.parametrize(
    ("kind", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)], ids=["grpo", "rloo"]
)
@pytest.mark.parametrize("function", REINFORCED)
def test_log_probabilities_of_reinforcement(tmp_path, kind, config, function):
    model, logits_of = model_and_its_logits(function)
    trainer = reinforced(kind, config, tmp_path, model)
    ids = tokens(4, 8)
    found = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, torch.ones_like(ids), 5, compute_entropy=True
    )
    scaled = logits_of(ids) / 0.7  # generation divides logits by the temperature
    log_p = scaled.log_softmax(-1)[:, :-1]
    torch.testing.assert_close(found[0], log_probs(scaled, ids)[:, -5:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], -(log_p.exp() * log_p).sum(-1)[:, -5:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", REINFORCED)
def test_grpo(tmp_path, function):
    model, logits_of = model_and_its_logits(function)
    trainer = reinforced(GRPOTrainer, GRPOConfig, tmp_path, model, loss_type="grpo", entropy_coef=0.1)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    ids = tokens(4, 8)
    advantages = torch.tensor([1.0, -0.5, 0.3, -0.8])
    scaled = logits_of(ids) / 0.7
    log_p = log_probs(scaled, ids)[:, -5:]
    old = log_p.detach() + 0.3 * torch.randn_like(log_p)
    inputs = {
        "prompt_ids": ids[:, :3],
        "prompt_mask": torch.ones_like(ids[:, :3]),
        "completion_ids": ids[:, 3:],
        "completion_mask": torch.ones_like(ids[:, 3:]),
        "advantages": advantages,
        "old_per_token_logps": old,
    }
    ratio = (log_p - old).exp()
    policy = torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    every = scaled.log_softmax(-1)[:, -6:-1]
    wanted = -policy.mean() + 0.1 * (every.exp() * every).sum(-1).mean()
    found = trainer._compute_loss(trainer.model, inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    own, expected = (
        torch.autograd.grad(loss, [source.lm_head.weight])[0]
        for loss, source in ((found, trainer.model), (wanted, logits_of.model))
    )
    torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "config", "function"),
    [
        (GRPOTrainer, GRPOConfig, "sigsoftmax"),
        (GRPOTrainer, GRPOConfig, "moss(K=3)"),
        (RLOOTrainer, RLOOConfig, "sigsoftmax"),
    ],
    ids=["grpo", "grpo of a mixture", "rloo"],
)
def test_reinforcement_generates_and_trains(tmp_path, kind, config, function):
    trainer = reinforced(kind, config, tmp_path, model_of(function), learning_rate=0.1)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    assert trainer.model.trained_past is None
    assert any(not torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())


@pytest.mark.thorough
@pytest.mark.parametrize(("function", "of"), MODELS, ids=IDS)
def test_kto(tmp_path, function, of):
    dataset = Dataset.from_dict(
        {"prompt": texts(4, 3), "completion": texts(4, 4, seed=2), "label": [True, False, True, False]}
    )
    trainer = KTOTrainer(
        model=model_of(function),
        ref_model=model_of(function, seed=7),
        # Without the term of a shared reference point: sigmoid(beta * gain) of each text.
        args=KTOConfig(**settings(tmp_path, beta=0.5, loss_type="apo_zero_unpaired")),
        train_dataset=dataset,
        processing_class=tokenizer(),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    ids, mask, labels = batch["input_ids"], batch["completion_mask"][:, 1:], torch.as_tensor(batch["label"])
    sums = [(log_probs(of(tiny(seed=seed)(ids).logits.detach()), ids) * mask).sum(1) for seed in (0, 7)]
    wins = torch.sigmoid(0.5 * (sums[0] - sums[1]))
    assert logged(trainer) == pytest.approx(float(torch.where(labels, 1 - wins, wins).mean()), rel=1e-4)


def test_a_reference_model_is_loaded_with_the_same_function(tmp_path):
    dataset = Dataset.from_dict({"prompt": texts(4, 3), "chosen": texts(4, 4, seed=2), "rejected": texts(4, 4, seed=3)})
    model_of("sigsoftmax").save_pretrained(tmp_path / "model")
    tiny().save_pretrained(tmp_path / "plain")
    with pytest.warns(UserWarning, match="was trained with softmax"):
        patched = from_pretrained(tmp_path / "plain", function="sigsoftmax")
    for model, message in ((from_pretrained(tmp_path / "model"), None), (patched, r"sigsoftmax\[sigsoftmax\]:.*plain")):
        options = {
            "model": model,
            "args": DPOConfig(**settings(tmp_path)),
            "train_dataset": dataset,
            "processing_class": tokenizer(),
        }
        if message is None:
            trainer = DPOTrainer(**options)
            assert str(trainer.ref_model.output_function.function) == "sigsoftmax"
            assert logged(trainer) == pytest.approx(float(torch.tensor(2.0).log()), rel=1e-4)
        else:
            # Its name is that of no model, so that nobody loads softmax for the reference.
            with pytest.raises(OSError, match=message):
                DPOTrainer(**options)


def test_a_schedule_of_a_shift(tmp_path):
    model = retrofit(tiny(), 3.0)
    rows, trainer = sft(tmp_path, model)
    z = tiny()(rows).logits.detach()
    assert logged(trainer) == pytest.approx(float(plain_loss(z + F.logsigmoid(z + 3.0), rows)), rel=1e-4)


def test_distillation_reads_the_output_layer_and_is_refused(tmp_path):
    dataset = Dataset.from_dict({"prompt": texts(4, 3)})
    trainer = DistillationTrainer(
        model=model_of("sigsoftmax"),
        teacher_model=tiny(seed=7),
        args=DistillationConfig(**settings(tmp_path, max_completion_length=5)),
        train_dataset=dataset,
        processing_class=tokenizer(),
    )
    with pytest.raises(RuntimeError, match="which did not use it"):
        trainer.train()
    with pytest.raises(RuntimeError, match="the last training step"):
        trainer.model.save_pretrained(tmp_path / "model")
