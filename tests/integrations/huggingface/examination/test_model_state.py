"""Changes to a model that are undone when a block ends, and hooks that are found again."""

import pytest

pytest.importorskip("transformers")

from torch import nn

from sigsoftmax.integrations.huggingface.examination.model_state import evaluating, loss_function_set, remove_hook


def test_every_module_gets_its_own_mode_back():
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False]


@pytest.mark.parametrize("own", [None, max])
@pytest.mark.parametrize("other", [None, min])
def test_the_loss_that_was_set_comes_back(own, other):
    model = nn.Linear(1, 1)
    if own is not None:
        model._loss_function = own
    with loss_function_set(model, other):
        assert getattr(model, "_loss_function", None) is other
    assert getattr(model, "_loss_function", None) is own
    assert ("_loss_function" in vars(model)) == (own is not None)


def test_hooks_are_removed_by_their_function():
    def hook(*_):
        return None

    model = nn.Linear(1, 1)
    model.register_forward_pre_hook(hook)
    model.register_load_state_dict_pre_hook(hook)
    model.register_forward_pre_hook(print)
    assert remove_hook(model._forward_pre_hooks, hook)
    assert not remove_hook(model._forward_pre_hooks, hook)
    assert list(model._forward_pre_hooks.values()) == [print]
    assert remove_hook(model._load_state_dict_pre_hooks, hook)
