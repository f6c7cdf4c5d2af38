"""Recipes are named, complete and as published; any field can be changed, and what cannot be is explained."""

import json
import re

import pytest

from sigsoftmax import family
from sigsoftmax.lm.config import TrainingConfig
from sigsoftmax.lm.recipes import (
    HEADS,
    field_paths,
    from_json,
    from_toml,
    head_by_name,
    names,
    recipe,
    to_json,
    with_overrides,
)
from sigsoftmax.lm.settings import SETTINGS


@pytest.mark.parametrize("name", names())
def test_every_recipe_is_built_and_comes_back_from_json(name):
    built = recipe(name)
    assert built.name == name
    assert built.overrides == ()
    assert from_json(json.loads(json.dumps(to_json(built)))) == built


def test_every_setting_has_every_head_of_the_paper():
    assert {"ptb-softmax", "ptb-sigsoftmax", "wt2-moss", "tiny-gss-0.2", "language-mos"} <= set(names())
    assert len(set(names())) == len(SETTINGS) * len(HEADS)


# --- heads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("softmax", "softmax"),
        ("relu", "relu"),
        ("shifted-sigsoftmax", "shifted_sigsoftmax(b=learned)"),
        ("shifted_sigsoftmax", "shifted_sigsoftmax(b=learned)"),
        ("shifted-sigsoftmax-per-class", "shifted_sigsoftmax(b=per_class)"),
        ("shifted-sigsoftmax-4", "shifted_sigsoftmax(b=4.0)"),
        ("gss-0", "gss(k=0.0)"),
        ("gss-0.2", "gss(k=0.2)"),
        ("gss--1", "gss(k=-1.0)"),
        ("gss-learned", "gss(k=learned:1.0)"),
        ("gss(k=0.3, c=2)", "gss(k=0.3, c=2.0)"),
        ("softmax-1.5", "softmax(alpha=1.5)"),
        ("softcap", "softcap"),
        ("softcap-50", "softcap(c=50.0)"),
        ("mos", "mos(K=7)"),
        ("moss-3", "moss(K=3)"),
        ("mixture(gss(k=0), K=2)", "mixture(gss(k=0.0), K=2)"),
        ("mos(K=4, latent=linear)", "mos(K=4, latent=linear)"),
        ("moss(K=4, latent=tanh, prior=sigsoftmax)", "moss(K=4)"),
        ("moss(K=4, latent=linear, prior=softmax)", "moss(K=4, latent=linear, prior=softmax)"),
    ],
)
def test_heads_by_name(name, head):
    assert str(head_by_name(name, components=7)) == head
    assert recipe(f"ptb-{name}").name == f"ptb-{name}"


def test_every_member_of_the_family_makes_a_recipe_also_one_of_the_users_own():
    family.register_function("cube", lambda z, a: z + a * z**3, parameters={"a": 1.0})
    for member in family.names():
        assert recipe(f"wt2-{member}").model.head.startswith(member)
    assert recipe("tiny-cube-0.5").model.head == "cube(a=0.5)"


def refused_name(name, message):
    with pytest.raises(ValueError, match=message):
        recipe(name)


def test_unknown_recipes_are_refused_with_the_nearest():
    refused_name(
        "ptb-sigsoftmx", r"unknown recipe 'ptb-sigsoftmx' \(did you mean ptb-sigsoftmax or .*unknown output function"
    )
    refused_name("pbt-softmax", r"\(did you mean ptb-softmax .*names begin with ptb-, wt2-, tiny-, language-")
    refused_name("nothing", r"unknown recipe 'nothing': names begin with")
    refused_name("ptb", r"it must say a head too, as ptb-softmax")
    refused_name("ptb-", r"it must say a head too")


def test_values_that_a_head_does_not_take_are_refused():
    refused_name("wt2-gss-big", r"cannot read the value 'big'")
    refused_name("ptb-sigsoftmax-2", r"'sigsoftmax' has no parameter that '2' could be")
    refused_name("ptb-relu-learned", r"parameter 'eps' .* cannot be learned")
    refused_name("ptb-mos-0", r"at least one component, got 0")


# --- changes --------------------------------------------------------------------------------------------------------


def test_changes_are_read_as_the_type_of_their_field():
    changed = with_overrides(
        recipe("ptb-softmax"),
        [
            "training.learning_rate=20",
            "training.epochs = 22",
            "training.group=4",
            "training.optimizer=asgd",
            "training.stop_when_stale=True",
            "finetuning.longest_window=none",
            "finetuning.window_seed=NONE",
            "model.hidden=(100, 50,)",
            "model.embedding=50",
            "dynamic_evaluation.decays=1e-3,0",
            "corpus=my folder",
            "seed=7",
        ],
    )
    assert changed.training == TrainingConfig(
        learning_rate=20.0, epochs=22, group=4, optimizer="asgd", stop_when_stale=True
    )
    assert changed.finetuning.longest_window is changed.finetuning.window_seed is None
    assert (changed.model.embedding, changed.model.hidden) == (50, (100, 50))
    assert changed.dynamic_evaluation.decays == (1e-3, 0.0)
    assert (changed.corpus, changed.seed, changed.name) == ("my folder", 7, "ptb-softmax")
    assert changed.overrides[:5] == (
        "training.learning_rate=20",
        "training.epochs=22",
        "training.group=4",
        "training.optimizer=asgd",
        "training.stop_when_stale=true",
    )
    assert with_overrides(recipe("ptb-softmax"), changed.overrides) == changed


def test_changes_are_recorded_once_and_only_where_they_change_something():
    base = recipe("ptb-softmax")
    assert with_overrides(base, []) == base
    assert with_overrides(base, ["training.learning_rate=3e1", "model.hidden=1150,1150,400"]) == base
    once = with_overrides(base, ["training.clip=0.5"])
    twice = with_overrides(once, ["training.clip=1", "seed=3"])
    assert twice.overrides == ("training.clip=1", "seed=3")
    assert with_overrides(base, ["training.clip=0.50"]) == once


def test_a_head_is_a_change_like_any_other():
    changed = with_overrides(recipe("ptb-mos"), ["model.head=mixture( gss(k=0) , K=2 )"])
    assert changed.model.head == "mixture(gss(k=0.0), K=2)"
    assert changed.overrides == ("model.head=mixture(gss(k=0.0), K=2)",)
    assert with_overrides(recipe("ptb-mos"), changed.overrides) == changed


def test_the_latent_vectors_of_a_mixture_are_part_of_its_head():
    changed = with_overrides(recipe("language-mos"), ["model.head=mos(K=4, latent=linear)"])
    assert (changed.model.head, changed.model.latent) == ("mos(K=4, latent=linear)", "linear")
    assert changed.overrides == ("model.head=mos(K=4, latent=linear)",)
    assert from_json(to_json(changed)) == changed
    # Records and checkpoints from before do not say, and are of the published kind.
    assert recipe("language-mos").model.latent == "tanh"
    assert with_overrides(recipe("language-mos"), ["model.head=mos(K=4, latent=tanh)"]) == recipe("language-mos")
    changes = ["model.head=mos(K=15, latent=residual)", "model.hidden=960,960,280"]
    assert with_overrides(recipe("ptb-mos"), changes).model.latent == "residual"
    with pytest.raises(
        ValueError, match=r"no field 'model\.latent'; it is an option of the head: model\.head=mos\(K=4"
    ):
        with_overrides(recipe("language-mos"), ["model.latent=linear"])
    with pytest.raises(ValueError, match=r"latent must be one of 'tanh', 'linear', 'residual', got 'cubic'"):
        with_overrides(recipe("language-mos"), ["model.head=mos(K=4, latent=cubic)"])


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("training.epochs", "many", "int"),
        ("training.epochs", "2.5", "int"),
        ("training.learning_rate", "fast", "float"),
        ("training.stop_when_stale", "1", "bool"),
        ("training.optimizer", "adam", "'nt-asgd' or 'asgd'"),
    ],
)
def test_values_of_another_type_are_refused(field, value, kind):
    with pytest.raises(ValueError, match=re.escape(f"{field} must be {kind}, got '{value}'")):
        with_overrides(recipe("ptb-softmax"), [f"{field}={value}"])


def refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        with_overrides(recipe("ptb-softmax"), [change])


def test_values_that_no_recipe_can_have_are_refused():
    cannot = "ptb-softmax cannot be changed so: "
    refused("training.learning_rate=nan", f"{cannot}learning_rate must be a positive number")
    refused("model.embedding=300", f"{cannot}the last LSTM layer feeds the tied matrix")
    refused("training.group=3", f"{cannot}group must divide the batch of 20")
    refused("model.hidden=", f"{cannot}hidden must name")
    refused("model.hidden=10,x", "model.hidden[1] must be int, got 'x'")
    refused("model.head=sigsoftmx", "unknown output function 'sigsoftmx' (did you mean 'sigsoftmax'?)")


def test_fields_that_do_not_exist_are_refused_with_the_nearest():
    refused("learning_rate=3", "no field 'learning_rate'; did you mean training.learning_rate or finetuning.")
    refused("training.learning_rat=3", "no field 'training.learning_rat'; did you mean training.learning_rate")
    refused("optimiser=asgd", "no field 'optimiser'; did you mean training.optimizer or finetuning.optimizer?")
    refused("zzz=1", "no field 'zzz'; the fields are corpus, model.head")
    refused("name=x", "no field 'name'")


def test_changes_that_are_not_of_one_field_are_refused():
    refused("model=softmax", "model is not one field but several: model.head, model.embedding")
    refused("training.epochs", "cannot read the change 'training.epochs'; write it as training.learning_rate=20")


def test_a_field_is_changed_once_at_a_time():
    with pytest.raises(ValueError, match=r"seed is changed twice"):
        with_overrides(recipe("ptb-softmax"), ["seed=1", "seed=2"])


def test_every_field_can_be_written_as_it_is():
    for name in ("ptb-softmax", "wt2-moss", "language-gss-learned"):
        base = recipe(name)
        for path in field_paths():
            value = base
            for part in path.split("."):
                value = getattr(value, part)
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            assert with_overrides(base, [f"{path}={text}"]) == base, path


# --- files ----------------------------------------------------------------------------------------------------------


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_a_file_names_a_recipe_and_changes_it(tmp_path):
    path = write(
        tmp_path,
        """
        recipe = "wt2-mos"
        seed = 3
        [model]
        head = "moss(K=10)"
        hidden = [100, 80]
        [training]
        learning_rate = 10
        longest_window = "none"
        [dynamic_evaluation]
        decays = [1e-3, 0]
        """,
    )
    changes = (
        *("seed=3", "model.head=moss(K=10)", "model.hidden=100,80", "training.learning_rate=10"),
        *("training.longest_window=none", "dynamic_evaluation.decays=0.001,0"),
    )
    assert from_toml(path) == with_overrides(recipe("wt2-mos"), changes)
    assert from_toml(path).overrides == changes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = 3", r'mine\.toml must name the recipe that it changes, as recipe = "ptb-softmax"'),
        ("recipe = 3", r"mine\.toml must name the recipe"),
        ('recipe = "ptb-softmx"', r"mine\.toml: unknown recipe 'ptb-softmx' \(did you mean ptb-softmax"),
        ("recipe = ", r"mine\.toml is not TOML: "),
        ('recipe = "ptb-softmax"\n[trainin]\nepochs = 3', r"mine\.toml: a recipe has no field 'trainin'"),
        (
            'recipe = "ptb-softmax"\n[training]\nepoch = 3',
            r"mine\.toml: .*no field 'training\.epoch'; did you mean tra",
        ),
        ('recipe = "ptb-softmax"\n[training]\nepochs = "3"', r"mine\.toml: training\.epochs must be int, got '3'"),
        ('recipe = "ptb-softmax"\ntraining = 3', r"mine\.toml: training is not one field but several"),
        ('recipe = "ptb-softmax"\n[training.epochs]\nx = 3', r"mine\.toml: training\.epochs must be int, got \{"),
        ("x = " + "[" * 5000 + "]" * 5000, r"mine\.toml is not a recipe file: it is nested deeper than 64 levels"),
        ("x = " + "[" * 80 + "]" * 80, r"mine\.toml is not a recipe file: it is nested deeper than 64 levels"),
        (".".join("a" * 5000) + " = 1", r"mine\.toml is not a recipe file: it is nested deeper than 64 levels"),
        ("[" + ".".join("a" * 5000) + "]\nx = 1", r"mine\.toml is not a recipe file: it is nested deeper"),
        ("seed = " + "9" * 5000, r"mine\.toml is not a recipe file: Exceeds the limit"),
        (
            'recipe = "ptb-softmax"\n[training]\nlearning_rate = 1' + "0" * 400,
            r"mine\.toml: training\.learning_rate is an integer that no float can hold: a number of 1,329 bits",
        ),
    ],
)
def test_files_that_make_no_recipe_are_explained(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        from_toml(write(tmp_path, text))


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(ValueError, match=r"no recipe file at .*none\.toml"):
        from_toml(tmp_path / "none.toml")
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"x\.toml is not UTF-8 text"):
        from_toml(tmp_path / "x.toml")
    with pytest.raises(ValueError, match=r"cannot be read: "):
        from_toml(tmp_path)
