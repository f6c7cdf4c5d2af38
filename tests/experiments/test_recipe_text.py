"""Recipes as text: what is printed can be given back."""

import pytest

from sigsoftmax.experiments.recipe_text import all_recipes, one_recipe
from sigsoftmax.lm.recipes import HEADS, recipe, with_overrides
from sigsoftmax.lm.settings import SETTINGS


def test_the_list_has_every_setting_and_head():
    text = all_recipes()
    assert all(f"\n  {name}" in text for name in (*SETTINGS, *HEADS))


@pytest.mark.parametrize("name", ["ptb-softmax", "wt2-moss", "tiny-gss-learned", "language-mos"])
def test_every_line_is_a_change_that_changes_nothing(name):
    first, *lines = one_recipe(name).splitlines()
    assert first == name
    for line in lines:
        path, _, value = line.partition("=")
        changed = with_overrides(recipe(name), [f"{path.strip()}={value.strip()}"])
        assert changed == recipe(name), line
