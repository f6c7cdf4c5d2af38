"""A run small enough to be trained many times in a test, and how two of them are compared."""

import dataclasses

import torch

from sigsoftmax.lm.config import ModelConfig, Recipe, TrainingConfig
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.saving import checkpoints
from sigsoftmax.lm.training.trainer import Trainer, TrainerOptions
from sigsoftmax.records import read
from sigsoftmax.records.schemas.training import EpochRecord
from sigsoftmax.synthetic import Language

HEADS = {"sigsoftmax": (12, 8), "moss(K=3)": (12, 10), "mos(K=3, latent=residual)": (12, 8)}


def small_recipe(head="sigsoftmax", epochs=9, **training):
    # Averaging from the third epoch at the earliest, so that both optimisers are met.
    fields = {"batch": 4, "epochs": epochs, "learning_rate": 8.0, "bptt": 10, "patience": 1, "evaluation_batch": 2}
    return Recipe(
        name="small",
        corpus="language",
        model=ModelConfig(head=head, embedding=8, hidden=HEADS[head]),
        training=TrainingConfig(**{**fields, **training}),
        finetuning=TrainingConfig(
            **{**fields, "optimizer": "asgd", "stop_when_stale": True, "window_seed": 331, **training}
        ),
        seed=5,
    )


def small_corpus(seed=0):
    language = Language.of_rank(contexts=16, words=20, rank=6, memory=2, seed=seed)
    return Corpus.of_language(language, train=600, valid=120, test=120, seed=seed)


def small_trainer(folder, *, recipe=None, corpus=None, checkpoint_updates=None, **options):
    trainer = Trainer(recipe or small_recipe(), corpus or small_corpus(), folder, TrainerOptions(**options))
    if checkpoint_updates is not None:
        save_every(trainer, checkpoint_updates)
    return trainer


def save_every(trainer, updates):
    """Make checkpoints due after so many updates, whatever the clock says."""
    run, save = trainer.state.updater.run, trainer.save
    since = [0]

    def counted(**window):
        run(**window)
        since[0] += 1

    def saved():
        save()
        since[0] = 0

    trainer.state.updater.run, trainer.save = counted, saved
    trainer._save_is_due = lambda: since[0] >= updates


def epochs_of(folder):
    """The records without what the clock makes of them."""
    clocked = {"seconds_training": 0.0, "seconds_validation": 0.0}
    records = [record.payload_as(EpochRecord) for record in read(folder / "records.jsonl")]
    return [dataclasses.replace(record, **clocked) for record in records]


def assert_same_end(one, other):
    """Two runs ended in the same bits."""
    assert epochs_of(one) == epochs_of(other)
    assert (one / "best.safetensors").read_bytes() == (other / "best.safetensors").read_bytes()
    first, second = (checkpoints.load(folder / "last.safetensors") for folder in (one, other))
    assert first.tensors.keys() == second.tensors.keys()
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, second.tensors[name]), name
    ignored = ("seconds", "records_bytes")
    for name, value in first.meta.items():
        assert name in ignored or value == second.meta[name], name
