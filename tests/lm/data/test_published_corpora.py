"""A published corpus is one entry of one table, and the entries are those of the files here."""

import hashlib

import pytest
from tests.lm.corpora import folder_of, write_corpus

from sigsoftmax import cli
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.data.corpus_files import find
from sigsoftmax.lm.data.published_corpora import PUBLISHED, PublishedCorpus


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_corpora_are_those_here(name):
    folder = folder_of(name)
    for split, published in PUBLISHED[name].files.items():
        path = folder / f"{split}.txt"
        assert path.stat().st_size == published.size
        assert hashlib.sha256(path.read_bytes()).hexdigest() == published.sha256


def test_every_published_corpus_has_its_files_at_several_addresses():
    for corpus in PUBLISHED.values():
        assert set(corpus.files) == {"train", "valid", "test"}
        assert len(corpus.addresses) >= 2
        assert all("{split}" in address and address.startswith("https://") for address in corpus.addresses)


def test_an_entry_is_all_that_another_corpus_needs(tmp_path, monkeypatch, capsys):
    folder = write_corpus(tmp_path / "novels")
    for path in folder.iterdir():
        path.rename(path.with_name(f"novel-{path.stem}"))
    entry = PublishedCorpus(files={}, addresses=(), upstream_name="novel-{split}", checksum="")
    monkeypatch.setitem(PUBLISHED, "novels", entry)
    checksum = Corpus.load(folder).checksum
    monkeypatch.setitem(PUBLISHED, "novels", PublishedCorpus(**vars(entry) | {"checksum": checksum}))
    assert find("novels", tmp_path) == (folder, "novels")
    assert Corpus.load("novels", tmp_path).name == "novels"
    with pytest.raises(
        ValueError, match=r"no corpus 'novel' \(did you mean 'novels'\?\); expected ptb, wikitext-2, novels"
    ):
        Corpus.load("novel")
    with pytest.raises(SystemExit):
        cli.main(["data", "fetch", "--help"])
    # The help of a process is made of the entries that there are when it starts.
    assert "ptb or wikitext-2" in capsys.readouterr().out
