"""Text becomes ids exactly as the published scripts have them."""

from functools import cache

import pytest
import torch
from tests.lm.corpora import folder_of, write_corpus

from sigsoftmax.lm.data.corpus import Corpus, Vocabulary
from sigsoftmax.lm.data.windows import batchify, evaluation_windows
from sigsoftmax.synthetic import Language

# --- words and ids --------------------------------------------------------------------------------------------------


def test_ids_count_first_appearances_over_train_valid_and_test(tmp_path):
    corpus = Corpus.load(write_corpus(tmp_path / "mine", "b a\nb\n", "new a\n", "\nlast new"))
    assert corpus.words == ("b", "a", "<eos>", "new", "last")
    assert corpus.train.tolist() == [0, 1, 2, 0, 2]
    assert corpus.valid.tolist() == [3, 1, 2]
    assert corpus.test.tolist() == [2, 4, 3, 2]
    assert corpus.train.dtype == torch.int64
    assert corpus.name == "mine"
    assert corpus.language is corpus.contexts("test") is None


def test_line_ends_and_byte_order_marks_of_other_systems_change_nothing(tmp_path):
    plain = Corpus.load(write_corpus(tmp_path / "plain", "é b\nc\n"))
    other = Corpus.load(write_corpus(tmp_path / "other", b"\xef\xbb\xbf" + "é b\r\nc\r\n".encode()))
    assert plain.words == other.words
    assert plain.checksum == other.checksum


def test_the_checksum_changes_with_a_word_with_an_id_and_with_a_split(tmp_path):
    texts = [
        ("a b\n", "b\na\n", "a\n"),
        ("a c\n", "c\na\n", "a\n"),
        ("a b\n", "a\na\n", "a\n"),
        ("a b\n", "b\n", "a\na\n"),
    ]
    corpora = [Corpus.load(write_corpus(tmp_path / str(i), *text)) for i, text in enumerate(texts)]
    assert len({corpus.checksum for corpus in corpora}) == len(texts)


def test_a_vocabulary_goes_both_ways_and_names_what_it_lacks():
    vocabulary = Vocabulary(["cat", "dog", "<unk>"])
    assert vocabulary.decode(vocabulary.encode(["dog", "cat"])) == ["dog", "cat"]
    assert "cat" in vocabulary
    assert len(vocabulary) == 3
    with pytest.raises(ValueError, match=r"'dig' is not among the 3 .*did you mean 'dog'\?\); write <unk> instead"):
        vocabulary.encode(["cat", "dig"])
    with pytest.raises(ValueError, match=r"the ids must be between 0 and 2, .* got 3 at position 1; was the text made"):
        vocabulary.decode([0, 3])
    with pytest.raises(ValueError, match=r"got -1 at position 0"):
        vocabulary.check(torch.tensor([-1]), "the targets")
    with pytest.raises(ValueError, match=r"'a' is in the vocabulary more than once"):
        Vocabulary(["a", "b", "a"])


def test_ids_outside_the_vocabulary_make_no_corpus():
    good = torch.tensor([0, 1])
    with pytest.raises(
        ValueError, match=r"ids of the valid split of 'x' must be between 0 and 1, .* got 2 at position 1"
    ):
        Corpus(name="x", vocabulary=Vocabulary("ab"), train=good, valid=torch.tensor([0, 2]), test=good)
    with pytest.raises(ValueError, match=r"test split must be one stream of ids, got shape \(0,\)"):
        Corpus(name="x", vocabulary=Vocabulary("ab"), train=good, valid=good, test=good[:0])


def test_text_is_read_with_the_vocabulary_of_a_model(tmp_path):
    folder = write_corpus(tmp_path / "mine", "b a\n", "b\n", "a\n")
    vocabulary = Vocabulary(["<eos>", "a", "b"])
    assert Corpus.load(folder, vocabulary=vocabulary).train.tolist() == [2, 1, 0]
    with pytest.raises(ValueError, match=r"valid\.txt: the word 'zebra' is not among the 3"):
        Corpus.load(write_corpus(tmp_path / "other", "b a\n", "zebra\n"), vocabulary=vocabulary)


# --- languages ------------------------------------------------------------------------------------------------------


def test_text_of_a_language_comes_with_its_truth():
    language = Language.dirichlet(contexts=9, words=7, memory=2, seed=3)
    corpus = Corpus.of_language(language, train=500, valid=60, test=80, seed=5)
    again = Corpus.of_language(language, train=500, valid=60, test=80, seed=5)
    other = Corpus.of_language(language, train=500, valid=60, test=80, seed=6)
    assert corpus.words == tuple(f"w{i}" for i in range(7))
    assert [corpus.split(split).numel() for split in ("train", "valid", "test")] == [500, 60, 80]
    assert corpus.checksum == again.checksum != other.checksum
    assert not torch.equal(corpus.train[:60], corpus.valid)
    for split in ("valid", "test"):
        contexts, words = corpus.contexts(split), corpus.split(split)
        assert torch.equal(language.next_context_NV[contexts[:-1], words[:-1]], contexts[1:])
    assert corpus.language is language
    with pytest.raises(ValueError, match=r"the valid split of a sampled text needs at least one word, got 0"):
        Corpus.of_language(language, train=5, valid=0, test=5, seed=0)


def test_the_language_of_the_package_is_a_corpus_like_any_other():
    corpus = Corpus.load("language")
    assert corpus.name == "language"
    assert corpus.checksum == Corpus.load("language").checksum
    assert corpus.language.log_rank == corpus.language.num_contexts == 64
    assert corpus.train.numel() == 200_000


# --- published corpora ----------------------------------------------------------------------------------------------


@cache
def published(name):
    return Corpus.load(folder_of(name))


@pytest.mark.parametrize(
    ("name", "tokens", "words", "eos", "unk", "last", "lines"),
    [
        ("ptb", (929_589, 73_760, 82_430), 10_000, 24, 26, "unilab", (42_068, 3_370, 3_761)),
        ("wikitext-2", (2_088_628, 217_646, 245_569), 33_278, 0, 9, "gallinae", (36_718, 3_760, 4_358)),
    ],
)
def test_published_corpora_have_the_published_counts(name, tokens, words, eos, unk, last, lines):
    corpus = published(name)
    splits = [corpus.split(split) for split in ("train", "valid", "test")]
    assert corpus.name == name
    assert tuple(ids.numel() for ids in splits) == tokens
    assert tuple(int((ids == eos).sum()) for ids in splits) == lines
    assert len(corpus.words) == words
    assert (corpus.words[eos], corpus.words[unk], corpus.words[-1]) == ("<eos>", "<unk>", last)
    assert int(corpus.train.max()) == words - 1, "valid and test add no word"


@pytest.mark.parametrize(
    ("name", "split", "batch", "rows", "dropped"),
    [
        ("ptb", "train", 20, 46_479, 9),
        ("ptb", "train", 12, 77_465, 9),
        ("wikitext-2", "train", 80, 26_107, 68),
        ("wikitext-2", "train", 15, 139_241, 13),
        ("ptb", "train", 100, 9_295, 89),
        ("wikitext-2", "train", 100, 20_886, 28),
        ("ptb", "valid", 10, 7_376, 0),
        ("wikitext-2", "valid", 10, 21_764, 6),
        ("ptb", "test", 1, 82_430, 0),
    ],
)
def test_published_corpora_have_the_published_rows(name, split, batch, rows, dropped):
    ids = published(name).split(split)
    assert batchify(ids, batch).shape == (rows, batch)
    assert ids.numel() - rows * batch == dropped


@pytest.mark.parametrize(
    ("name", "split", "windows"),
    [
        ("ptb", "valid", 14_752),
        ("ptb", "test", 16_486),
        ("wikitext-2", "valid", 43_529),
        ("wikitext-2", "test", 49_114),
    ],
)
def test_dynamic_evaluation_has_the_published_windows(name, split, windows):
    assert sum(1 for _ in evaluation_windows(published(name).split(split).numel(), 5)) == windows
