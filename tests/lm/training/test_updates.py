"""An update against the same written out by hand, group by group."""

import pytest
import torch
from tests.lm.masks import draw_masks

from sigsoftmax.lm.config import ModelConfig, TrainingConfig
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.training.nt_asgd import AveragedSgd
from sigsoftmax.lm.training.updates import Updater

WORDS = 30


def parts(head="sigsoftmax", seed=0, skip=None, **training):
    hidden = (12, 10) if "(K" in head else (12, 8)
    model = LanguageModel(ModelConfig(head=head, embedding=8, hidden=hidden), WORDS, seed=1)
    config = TrainingConfig(**{"batch": 4, "learning_rate": 5.0, "bptt": 10, **training})
    optimizer = AveragedSgd(list(model.parameters()), clip=config.clip, weight_decay=config.weight_decay)
    text = torch.randint(WORDS, (60, config.batch), generator=torch.Generator().manual_seed(9))
    generator = torch.Generator().manual_seed(seed)
    updater = Updater(model, optimizer, text, config, generator=generator, skip=skip)
    updater.begin_epoch()
    return model, config, text, updater


def by_hand(model, config, text, lengths, seed=0):
    """The same updates with plain torch: autograd into .grad, torch's clipping and SGD."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=config.weight_decay)
    columns = config.group or config.batch
    groups = config.batch // columns
    states = [model.zero_state(columns) for _ in range(groups)]
    row, losses = 0, []
    for length in lengths:
        optimizer.zero_grad()
        total = 0.0
        for group in range(groups):
            own = text[:, group * columns : (group + 1) * columns]
            masks = draw_masks(model.config, words=WORDS, batch=columns, generator=generator)
            features = model.features(own[row : row + length], states[group], masks)
            states[group] = [type(s)(s.hidden.detach(), s.cell.detach()) for s in features.states]
            nll = model.loss(features, own[row + 1 : row + length + 1])
            changes = features.raw_TBH[1:] - features.raw_TBH[:-1]
            loss = nll + 2.0 * features.dropped_TBH.pow(2).mean() + changes.pow(2).mean()
            (loss / groups).backward()
            total += float(nll.detach()) / groups
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.param_groups[0]["lr"] = config.learning_rate * length / config.bptt
        optimizer.step()
        row += length
        losses.append(total)
    return losses


@pytest.mark.parametrize("group", [None, 2, 1])
@pytest.mark.parametrize("head", ["softmax", "sigsoftmax", "shifted_sigsoftmax", "moss(K=3)"])
def test_updates_are_those_written_out_by_hand(head, group):
    lengths = [10, 6, 13]
    model, config, text, updater = parts(head, group=group)
    for length in lengths:
        updater.run(drawn=length, length=length)
    reference, config, text, _ = parts(head, group=group)
    losses = by_hand(reference, config, text, lengths)
    assert updater.losses(0, 3) == pytest.approx(losses, rel=1e-5)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_learning_rate_follows_the_drawn_length_where_the_text_cuts_the_window():
    def change(drawn, length):
        model, _, _, updater = parts()
        before = [p.detach().clone() for p in model.parameters()]
        updater.run(drawn=drawn, length=length)
        return torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])

    torch.testing.assert_close(change(20, 10), 2.0 * change(10, 10), rtol=1e-3, atol=1e-6)


def test_restored_it_goes_on_bit_for_bit():
    model, _, _, updater = parts("moss(K=3)", group=2)
    updater.run(drawn=9, length=9)
    state = {name: tensor.clone() for name, tensor in updater.state().items()}
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    updater.run(drawn=12, length=12)
    other, _, _, resumed = parts("moss(K=3)", group=2, seed=77)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(weights[name])
    resumed.restore(state)
    resumed.run(drawn=12, length=12)
    assert resumed.losses(0, 2) == updater.losses(0, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_an_epoch_begins_at_the_first_row_with_zero_state():
    _, _, _, updater = parts()
    updater.run(drawn=9, length=9)
    updater.begin_epoch()
    state = updater.state()
    assert int(state["row"]) == 0
    assert int(state["count"]) == 0
    assert (state["hidden.0.0"] == 0.0).all()
    assert (state["cell.0.1"] == 0.0).all()


def test_an_error_flag_keeps_the_weights():
    flag = torch.ones((), dtype=torch.int32)
    model, _, _, updater = parts(skip=flag)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    updater.run(drawn=9, length=9)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    flag.zero_()
    updater.run(drawn=9, length=9)
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
