"""The shifted start and its bound, the schedule, and what it refuses."""

import copy
import math

import pytest

pytest.importorskip("transformers")

import torch
from tests.integrations.huggingface.tiny import NAMES, phi, tiny, tokens
from transformers import Trainer, TrainingArguments

from sigsoftmax.integrations.huggingface import (
    AnnealShift,
    apply_output_function,
    from_pretrained,
    retrofit,
    shifted_start,
    smallest_logit,
)
from sigsoftmax.integrations.huggingface.trainers.retrofit import shift_of


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bound", [1e-1, 1e-3, 1e-5])
def test_step_zero_equals_softmax_to_the_bound(name, bound):
    plain = tiny(name, dtype=torch.float64).eval()
    text = tokens(8, 12)
    with torch.no_grad():
        z = plain(text).logits
    b = shifted_start(plain, [text[:3], {"input_ids": text[3:], "labels": text[3:]}], bound=bound)
    assert b == pytest.approx(-math.log(bound) - z.min().item())
    model = retrofit(copy.deepcopy(plain), b)
    with torch.no_grad():
        difference = torch.log_softmax(model(text).logits, -1) - torch.log_softmax(z, -1)
    assert difference.abs().max() <= bound
    assert difference.abs().max() > 0.01 * bound


def test_the_bound_holds_for_every_shift():
    plain = tiny(dtype=torch.float64).eval()
    with torch.no_grad():
        z = plain(tokens()).logits
        for b in (-3.0, 0.0, 2.0, 5.0, 20.0):
            shifted = z + torch.nn.functional.logsigmoid(z + b)
            difference = torch.log_softmax(shifted, -1) - torch.log_softmax(z, -1)
            assert difference.abs().max() <= math.exp(-(z.min() + b))


def test_the_smallest_logit_leaves_out_padding():
    model = tiny()
    text = tokens(2, 6)
    mask = torch.ones_like(text)
    mask[0, 3:] = 0
    with torch.no_grad():
        z = model.eval()(text, attention_mask=mask).logits
    model.train()
    found = smallest_logit(model, [{"input_ids": text, "attention_mask": mask}])
    assert found == pytest.approx(z[mask.bool()].min().item(), rel=1e-5)
    assert model.training


def test_mistakes():
    model = tiny()
    with pytest.raises(ValueError, match="batches held no token"):
        smallest_logit(model, [])
    with pytest.raises(ValueError, match="bound must be"):
        shifted_start(model, [tokens()], bound=0.0)
    with pytest.raises(ValueError, match="measure it before you patch it"):
        shifted_start(apply_output_function(tiny(), "sigsoftmax"), [tokens()])
    with pytest.raises(ValueError, match="b must be a finite number"):
        retrofit(model, math.inf)
    with pytest.raises(ValueError, match=r"b must be a number, got 'mos\(K=4\)'"):
        retrofit(model, "mos(K=4)")
    with pytest.raises(ValueError, match="steps must be 1 or more"):
        AnnealShift(steps=0)
    with pytest.raises(ValueError, match="start must be a finite number"):
        AnnealShift(start=math.nan)
    with pytest.raises(ValueError, match="schedule must be"):
        AnnealShift(schedule="stairs")
    with pytest.raises(ValueError, match="give them to AnnealShift"):
        AnnealShift().at(3)
    with pytest.raises(ValueError, match="its output function is none"):
        shift_of(model)
    with pytest.raises(ValueError, match="its output function is sigsoftmax"):
        shift_of(apply_output_function(tiny(), "sigsoftmax"))
    with pytest.raises(ValueError, match="a schedule would fight with it"):
        shift_of(apply_output_function(tiny(), "shifted_sigsoftmax(b=learned:3)"))
    shifted_start(apply_output_function(model, "softmax"), [tokens()])


def test_schedules():
    linear = AnnealShift(start=8.0, end=-2.0, steps=10)
    assert [linear.at(step) for step in (0, 5, 10, 99)] == [8.0, 3.0, -2.0, -2.0]
    cosine = AnnealShift(start=8.0, steps=10, schedule="cosine")
    assert [cosine.at(step) for step in (0, 5, 10)] == pytest.approx([8.0, 4.0, 0.0])
    assert cosine.at(2) > AnnealShift(start=8.0, steps=10).at(2)
    assert AnnealShift(start=8.0, steps=10, schedule=lambda part: part**2).at(5) == 6.0


def trainer(model, folder, callback, **changes):
    settings = {
        "max_steps": 6,
        "save_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    rows = tokens(8, 6)
    arguments = TrainingArguments(str(folder), **settings | changes)
    data = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback])


def test_the_trainer_lowers_the_shift_and_ends_at_sigsoftmax(tmp_path):
    model = retrofit(tiny(), 12.0)
    seen = []

    class Watching(AnnealShift):
        def set(self, model, step):
            seen.append((step, super().set(model, step)))
            return seen[-1][1]

    trainer(model, tmp_path, Watching(steps=4)).train()
    assert seen == [(0, 12.0), (1, 9.0), (2, 6.0), (3, 3.0), (4, 0.0), (5, 0.0), (6, 0.0)]
    ids = tokens()
    with_shift = model.eval()(ids).logits
    assert not shift_of(model).requires_grad
    # What was stored half-way has the shift of half-way.
    assert shift_of(from_pretrained(tmp_path / "checkpoint-3")).item() == 3.0
    apply_output_function(model, "sigsoftmax")
    torch.testing.assert_close(model(ids).logits, with_shift)


def test_a_resumed_run_continues_the_schedule(tmp_path):
    whole = retrofit(tiny(), 12.0)
    trainer(whole, tmp_path, AnnealShift(start=12.0, steps=6)).train()
    checkpoint = str(tmp_path / "checkpoint-3")
    resumed = retrofit(tiny(seed=4), 12.0)
    with pytest.raises(ValueError, match="give AnnealShift the start"):
        trainer(resumed, tmp_path, AnnealShift(steps=6)).train(resume_from_checkpoint=checkpoint)
    trainer(resumed, tmp_path, AnnealShift(start=12.0, steps=6)).train(resume_from_checkpoint=checkpoint)
    for own, value in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(own, value)


@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")
def test_an_adapter_must_keep_the_shift(tmp_path):
    peft = pytest.importorskip("peft")
    tiny().save_pretrained(tmp_path / "plain")
    from transformers import AutoModelForCausalLM

    def adapted(saves):
        base = retrofit(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), 12.0)
        return peft.get_peft_model(
            base, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=saves, task_type="CAUSAL_LM")
        )

    with pytest.raises(ValueError, match=r"modules_to_save=\['output_function'\]"):
        trainer(adapted(None), tmp_path / "run", AnnealShift(steps=3)).train()
    model = adapted(["output_function"])
    trainer(model, tmp_path / "run", AnnealShift(end=1.5, steps=3)).train()
    assert shift_of(model).item() == 1.5
    loaded = from_pretrained(tmp_path / "run" / "checkpoint-6")
    assert shift_of(loaded).item() == 1.5
    assert torch.equal(loaded.eval()(input_ids=tokens()).logits, model.eval()(input_ids=tokens()).logits)


def test_without_a_trainer():
    model = retrofit(tiny(), 6.0).train()
    anneal = AnnealShift(start=6.0, steps=3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(3):
        anneal.set(model, step)
        model(tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert anneal.set(model, 3) == 0.0
    plain = copy.deepcopy(model)
    from sigsoftmax.integrations.huggingface import remove_output_function

    z = remove_output_function(plain).eval()(tokens()).logits
    torch.testing.assert_close(model.eval()(tokens()).logits, phi(z))
