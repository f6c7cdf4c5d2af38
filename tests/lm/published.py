"""Where the published corpora may lie on this machine; tests that need them are skipped where they do not."""

import os
from pathlib import Path

import pytest

from sigsoftmax.lm.corpus_files import split_files

BESIDE_THE_REPOSITORY = Path(__file__).parents[2].parent / "shared" / "data"


def folder_of(name):
    for root in (os.environ.get("SIGSOFTMAX_DATA"), BESIDE_THE_REPOSITORY):
        for folder in (Path(root) / name, Path(root)) if root else ():
            if split_files(folder) is not None:
                return folder
    return pytest.skip(f"the text of {name} is not here; SIGSOFTMAX_DATA may name its folder")
