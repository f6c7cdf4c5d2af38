"""Corpora for tests: the published ones where this machine has them (else the test is skipped), and small ones."""

import os
from pathlib import Path

import pytest

from sigsoftmax.lm.data.corpus_files import split_files

BESIDE_THE_REPOSITORY = Path(__file__).parents[2].parent / "shared" / "data"


def folder_of(name):
    for root in (os.environ.get("SIGSOFTMAX_DATA"), BESIDE_THE_REPOSITORY):
        for folder in (Path(root) / name, Path(root)) if root else ():
            if split_files(folder) is not None:
                return folder
    return pytest.skip(f"the text of {name} is not here; SIGSOFTMAX_DATA may name its folder")


def write_corpus(folder, train="a b\n", valid="b\n", test="a\n"):
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in {"train": train, "valid": valid, "test": test}.items():
        (folder / f"{split}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder
