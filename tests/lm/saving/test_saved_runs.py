"""Crafted checkpoints: whatever a file with the right checksum says, it is used rightly or refused by its name."""

import copy
import dataclasses
import math
import re
import shutil

import pytest
import torch
from tests.lm.crafted import changed
from tests.lm.runs import small_recipe, small_trainer

from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.model.memory import parameter_count
from sigsoftmax.lm.recipes import HEADS, recipe
from sigsoftmax.lm.saving import checkpoints
from sigsoftmax.lm.saving.saved_models import load_model

WRONG = (None, True, "x", -1, 10**400, 3.5, math.inf, math.nan, [], [1], {}, {"a": 1})
"""values of all kinds that JSON has"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped in its third epoch, after averaging had begun."""
    folder = tmp_path_factory.mktemp("stopped")
    trainer = small_trainer(folder, recipe=small_recipe(epochs=3, optimizer="asgd"))
    while not (progress := trainer.advance()) or (progress.epoch, progress.update) != (3, 4):
        pass
    trainer.save()
    return folder


def resume(folder):
    return small_trainer(folder, recipe=small_recipe(epochs=3, optimizer="asgd"))


def refused(folder, name, use):
    """The message with which ``use`` refuses the file; whatever lies beside it stays as it is."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=rf"{name} (is no|belongs to)") as error:
        use(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    return str(error.value)


def crafted(source, folder, name, **changes):
    shutil.copytree(source, folder, dirs_exist_ok=True)
    changed(source / name, folder / name, **changes)
    return folder


def paths(value, prefix=()):
    """The place of every part of a nested value."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*prefix, key)
        yield from paths(item, (*prefix, key))


def owner(meta, path):
    for key in path[:-1]:
        meta = meta[key]
    return meta


@pytest.mark.parametrize(("name", "use"), [("last.safetensors", resume), ("best.safetensors", load_model)])
def test_no_field_of_the_meta_raises_anything_but_a_value_error(stopped, tmp_path, name, use, monkeypatch):
    """Every field is left out and given values of every other kind; what is accepted can be used."""
    checkpoint = checkpoints.load(stopped / name)
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    given: list[dict] = []
    # Without the disk: reading and writing files would take most of the time.
    monkeypatch.setattr(checkpoints, "load", lambda _: checkpoints.Checkpoint(checkpoint.tensors, given[-1]))
    places, refusals = list(paths(checkpoint.meta)), []
    assert len(places) > 60
    for path in places:
        for wrong in ("left out", *WRONG):
            meta = copy.deepcopy(checkpoint.meta)
            if wrong == "left out":
                del owner(meta, path)[path[-1]]
            else:
                owner(meta, path)[path[-1]] = wrong
            given.append(meta)
            try:
                use(tmp_path)
            except ValueError as error:
                refusals.append(str(error))
    assert len(refusals) > 0.9 * len(given)
    assert all(str(tmp_path) in refusal for refusal in refusals)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta: meta.pop("losses"), "lacks the fields: losses"),
        (lambda meta: meta.update(more=1), "unknown fields: more"),
        (lambda meta: meta.update(epoch="3"), "meta.epoch must be int, got '3'"),
        (lambda meta: meta.update(epoch=0), "must be a place in a run, got 0"),
        (lambda meta: meta.update(update=0), "must be a place in a run, got 3, [0-9]+ and 0"),
        (lambda meta: meta.update(row=10**9), "is at row 1000000000, update 4, and its tensors are at row"),
        (lambda meta: meta.update(update=5), "update 5, and its tensors are at row [0-9]+, update 4"),
        (lambda meta: meta.update(best_epoch=3), "best_epoch must be below epoch, 3, got 3"),
        (lambda meta: meta.update(losses=[1.0, math.nan]), "finite validation losses of 2 epochs, got 2: 1, nan"),
        (lambda meta: meta.update(losses=[1.0]), "finite validation losses of 2 epochs, got 1"),
        (lambda meta: meta.update(valid_loss=None), "holds the tensor 'best.embedding', which has no place"),
        (lambda meta: meta.update(valid_loss=math.inf), "valid_loss must be finite, got inf"),
        (lambda meta: meta.update(seconds=-1.0), "must be at least 0, got -1.0"),
        (lambda meta: meta.update(records_bytes=-5), "must be at least 0, got .* and -5"),
        (lambda meta: meta["window_lengths"].update(key=[1] * 623), "key must be 624 numbers of 32 bits"),
        (lambda meta: meta["window_lengths"].update(key=[-1] * 624), "key must be 624 numbers of 32 bits"),
        (lambda meta: meta["window_lengths"].update(position=625), "position must be between 0 and 624, got 625"),
        (lambda meta: meta["window_lengths"].update(has_gauss=7), "has_gauss must be 0 or 1"),
        (lambda meta: meta["words"].__setitem__(0, "other"), "belongs to another text"),
        (lambda meta: meta["words"].pop(), "run.parameters is [0-9]+, and the rest of the meta says"),
        (lambda meta: meta["corpus"].update(checksum="0"), "run.corpus_checksum is '[0-9a-f]+', .* says '0'"),
        (lambda meta: meta["run"].update(head="relu"), "run.head is 'relu', .* says 'sigsoftmax'"),
        (lambda meta: meta["recipe"]["model"].update(embedding=10**11), "embedding"),
        (lambda meta: meta["recipe"]["training"].update(learning_rate=1e300), "float32 can hold"),
    ],
)
def test_a_crafted_meta_is_refused_with_what_is_wrong(stopped, tmp_path, change, message):
    folder = crafted(stopped, tmp_path, "last.safetensors", meta=change)
    found = refused(folder, "last.safetensors", resume)
    assert re.search(message, found)
    assert "another folder" in found, "what to do"


def without(name):
    return lambda tensors: tensors.pop(name)


def given(name, value):
    return lambda tensors: tensors.update({name: value(tensors[name]) if callable(value) else value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model.embedding"), "lacks the tensor 'model.embedding'"),
        (without("updater.row"), "lacks the tensor 'updater.row'"),
        (without("updater.generator"), "lacks the tensor 'updater.generator'"),
        (without("best.embedding"), "lacks the tensor 'best.embedding'"),
        (without("optimizer.average.1"), "lacks the tensor 'optimizer.average.1'"),
        (without("optimizer.step_size"), "lacks the tensor 'optimizer.step_size'"),
        (given("more", torch.zeros(1)), "holds the tensor 'more', which has no place"),
        (given("best.embedding", torch.zeros(3)), r"'best.embedding' has shape \(3,\) .* not \(20, 8\) and float32"),
        (given("best.embedding", torch.zeros(8, 20)), r"'best.embedding' has shape \(8, 20\)"),
        (given("best.embedding", torch.Tensor.double), r"'best.embedding' has .* type float64, not .* and float32"),
        (given("model.embedding", torch.Tensor.half), r"'model.embedding' has .* type float16, not .* and float32"),
        (given("optimizer.average.0", torch.zeros(3)), r"'optimizer.average.0' has shape \(3,\)"),
        (given("updater.hidden.0.0", torch.zeros(1, 4, 11)), r"'updater.hidden.0.0' has shape \(1, 4, 11\)"),
        (given("updater.losses", torch.zeros(2)), r"'updater.losses' has shape \(2,\)"),
        (given("updater.row", torch.tensor(1.0)), r"'updater.row' has shape \(\) and type float32, not \(\) and int64"),
        (given("updater.row", torch.tensor(10**9)), r"its tensors are at row 1000000000, update 4"),
        (given("updater.count", torch.tensor([7])), r"its tensors are at row [0-9]+, update 7"),
        (given("updater.generator", lambda state: state[:16]), r"'updater.generator' has shape \(16,\)"),
        (given("updater.generator", torch.Tensor.zero_), r"its random state is none \("),
        (given("optimizer.updates", torch.tensor(-1.0, dtype=torch.float64)), "counts -1 averaged updates"),
        (given("model.embedding", lambda t: t * math.nan), "'model.embedding' holds numbers that are not finite"),
        (given("best.embedding", lambda t: t / 0.0), "'best.embedding' holds numbers that are not finite"),
        (given("updater.cell.0.0", lambda t: t * math.nan), "'updater.cell.0.0' holds numbers that are not finite"),
    ],
)
def test_crafted_tensors_are_refused_with_what_is_wrong(stopped, tmp_path, change, message):
    folder = crafted(stopped, tmp_path, "last.safetensors", tensors=change)
    found = refused(folder, "last.safetensors", resume)
    assert re.search(rf"{message}.*; best\.safetensors beside it .* begin the run anew", found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors": without("embedding")}, "its model has [0-9,]+ parameters, and it holds"),
        ({"tensors": lambda t: t.update(other=t.pop("embedding"))}, "lacks the tensor 'embedding'"),
        ({"tensors": given("embedding", lambda t: t.t().contiguous())}, r"'embedding' has shape \(8, 20\)"),
        ({"tensors": given("embedding", torch.Tensor.double)}, "type float64"),
        ({"tensors": given("output.bias", lambda t: t - math.inf)}, "'output.bias' holds numbers that are not finite"),
        ({"meta": lambda meta: meta["recipe"]["model"].update(hidden=[12, 10**9, 8])}, "run.parameters is"),
        ({"meta": lambda meta: meta.pop("recipe")}, "lacks the fields: recipe"),
        ({"meta": lambda meta: meta.update(words=["a", "a"] * 10)}, "the word 'a' is in the vocabulary more than once"),
        ({"meta": lambda meta: meta["recipe"]["model"].update(head="softmax(")}, "softmax"),
    ],
)
def test_a_crafted_model_is_refused_with_what_is_wrong(stopped, tmp_path, changes, message):
    folder = crafted(stopped, tmp_path, "best.safetensors", **changes)
    assert re.search(message, refused(folder, "best.safetensors", load_model))


def test_the_state_of_a_run_is_no_model(stopped):
    with pytest.raises(ValueError, match=r"last\.safetensors is no .*, and best\.safetensors for using the model"):
        load_model(stopped / "last.safetensors")


def test_a_model_that_no_memory_holds_is_refused_before_it_is_made(stopped, tmp_path):
    """Even where all that the file says of it agrees."""

    def wide(meta):
        meta["recipe"]["model"] |= {"embedding": 10**9, "hidden": [10**9]}
        config = small_recipe().model
        object.__setattr__(config, "embedding", 10**9)
        object.__setattr__(config, "hidden", (10**9,))
        meta["run"]["parameters"] = parameter_count(config, len(meta["words"]))

    folder = crafted(stopped, tmp_path, "best.safetensors", meta=wide)
    with pytest.raises(ValueError, match=r"its model has 8,000,[0-9,]+ parameters, and it holds"):
        load_model(folder)


def test_the_latent_vectors_of_a_mixture_are_recorded_and_loaded(tmp_path):
    head = "mos(K=3, latent=residual)"
    small_trainer(tmp_path, recipe=small_recipe(head, epochs=1)).run()
    loaded = load_model(tmp_path / "best.safetensors")
    assert (loaded.run.head, loaded.recipe.model.head) == (head, head)
    assert loaded.model.output.latent_kind == "residual"
    assert loaded.model.output.latent.weight.any()


@pytest.mark.parametrize(
    "head",
    [*HEADS, "shifted_sigsoftmax", "mixture(shifted_sigsoftmax(b=per_class), K=3)", "mos(K=3, latent=linear)"],
)
def test_parameters_are_counted_as_the_model_has_them(head):
    for setting in ("language", "tiny"):
        config = recipe(f"{setting}-{head}").model
        model = LanguageModel(config, 37)
        assert parameter_count(config, 37) == sum(parameter.numel() for parameter in model.parameters())


def test_the_parameters_of_a_residual_mixture_are_counted_too():
    config = dataclasses.replace(recipe("tiny-softmax").model, head="mos(K=3, latent=residual)")
    model = LanguageModel(config, 37)
    assert parameter_count(config, 37) == sum(parameter.numel() for parameter in model.parameters())
