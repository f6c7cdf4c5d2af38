"""Corpora are found where they may lie; what is missing or malformed is named, with what to do about it."""

import dataclasses

import pytest
from tests.lm.corpora import write_corpus

from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.data.corpus_files import cache_folder, tokenise
from sigsoftmax.lm.data.published_corpora import PUBLISHED


def test_every_line_ends_with_eos_and_a_blank_one_is_a_lone_eos():
    assert list(tokenise(["The  <unk>\tN \n", "\n", "   \n", "end"])) == [
        *("The", "<unk>", "N", "<eos>"),
        *("<eos>", "<eos>"),
        *("end", "<eos>"),
    ]


@pytest.fixture
def no_corpora(tmp_path, monkeypatch):
    """A machine without corpora; ``tmp_path / 'cache'`` is the user's cache."""
    monkeypatch.delenv("SIGSOFTMAX_DATA", raising=False)
    monkeypatch.setattr("sigsoftmax.lm.data.corpus_files.cache_folder", lambda: tmp_path / "cache")


@pytest.mark.usefixtures("no_corpora")
def test_a_missing_corpus_says_what_was_looked_for_where_and_how_to_get_it(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"'ptb' was not found.*train\.txt, valid\.txt and test\.txt") as error:
        Corpus.load("ptb")
    assert str(tmp_path / "cache" / "ptb") in str(error.value)
    assert "sigsoftmax data fetch ptb" in str(error.value)
    monkeypatch.setenv("SIGSOFTMAX_DATA", str(tmp_path / "variable"))
    with pytest.raises(ValueError, match="not found") as error:
        Corpus.load("wikitext-2")
    assert str(tmp_path / "variable" / "wikitext-2") in str(error.value)
    with pytest.raises(ValueError, match="not found") as error:
        Corpus.load("wikitext-2", tmp_path / "given")
    assert str(tmp_path / "given") in str(error.value)
    assert "variable" not in str(error.value)


@pytest.mark.usefixtures("no_corpora")
@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("given/ptb", "data"),
        ("given", "data"),
        ("variable/ptb", "variable"),
        ("variable", "variable"),
        ("cache/ptb", "cache"),
    ],
)
def test_a_published_corpus_is_found_by_name_and_known_by_its_checksum(tmp_path, monkeypatch, place, how):
    text = write_corpus(tmp_path / place)
    published = dataclasses.replace(PUBLISHED["ptb"], checksum=Corpus.load(text).checksum)
    monkeypatch.setitem(PUBLISHED, "ptb", published)
    if how == "variable":
        monkeypatch.setenv("SIGSOFTMAX_DATA", str(tmp_path / "variable"))
    assert Corpus.load("ptb", tmp_path / "given" if how == "data" else None).name == "ptb"


@pytest.mark.usefixtures("no_corpora")
def test_the_upstream_names_of_the_files_are_known(tmp_path):
    text = write_corpus(tmp_path / "mine")
    for split in ("train", "valid", "test"):
        (text / f"{split}.txt").rename(text / f"wiki.{split}.tokens")
    assert Corpus.load(text).words == ("a", "b", "<eos>")


@pytest.mark.usefixtures("no_corpora")
def test_another_text_is_not_taken_for_a_published_one(tmp_path):
    write_corpus(tmp_path / "cache" / "ptb")
    with pytest.raises(ValueError, match=r"does not hold the published text of 'ptb': .* data fetch ptb'.*--data"):
        Corpus.load("ptb")
    with pytest.raises(ValueError, match=r"does not hold the published text of 'ptb'"):
        Corpus.load("ptb", tmp_path / "cache")
    # Pointed at, it is text of one's own, and records will not call it ptb.
    assert Corpus.load("ptb", tmp_path / "cache" / "ptb").name == "cache/ptb"
    assert Corpus.load("ptb", write_corpus(tmp_path / "novels")).name == "novels"


def test_what_is_no_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no corpus 'wikitxt-2' \(did you mean 'wikitext-2'\?\)"):
        Corpus.load("wikitxt-2")
    (tmp_path / "train.txt").write_text("a\n")
    with pytest.raises(ValueError, match=r"expected train\.txt.*missing: valid\.txt, test\.txt"):
        Corpus.load(tmp_path)


@pytest.mark.parametrize(
    ("valid", "message"),
    [
        (b"", r"valid\.txt: empty; expected text"),
        (b"good\n\xff\xfe bad\n", r"valid\.txt: not UTF-8: invalid start byte in line 2; convert it"),
        ("a b\n".encode("utf-16-le"), r"valid\.txt: not text: it has NUL bytes, as UTF-16 has"),
    ],
)
def test_malformed_files_are_named(tmp_path, valid, message):
    with pytest.raises(ValueError, match=message):
        Corpus.load(write_corpus(tmp_path / "mine", valid=valid))


def test_the_cache_follows_the_system(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "sigsoftmax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "sigsoftmax"
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "sigsoftmax"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "sigsoftmax"
