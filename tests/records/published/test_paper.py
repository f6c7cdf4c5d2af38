"""The published numbers: complete, in the order of the paper, and with the relations that its text states."""

import pytest

from sigsoftmax.family.heads import Head
from sigsoftmax.records.published import paper


def test_every_cell_of_the_tables_is_there_once():
    for table in paper.TABLES:
        for stage in table.stages:
            for split in paper.SPLITS:
                found = paper.results(corpus=table.corpus, stage=stage, split=split)
                assert [result.head for result in found] == list(paper.HEADS)
                assert all(result.source == paper.PAPER and result.deviation is not None for result in found)
                assert [result.seeds for result in found] == [10, 10, 10, 10, 5, 5]
    assert len(paper.results()) == 2 * 3 * 2 * 6
    assert [(rank.corpus, rank.head) for rank in paper.RANKS] == [
        (corpus, head) for corpus in paper.CORPORA for head in paper.HEADS
    ]


def test_heads_are_names_that_heads_are_parsed_from():
    for head in paper.HEADS:
        assert str(Head.parse(head)) == head


@pytest.mark.parametrize(
    ("corpus", "head", "stage", "split", "perplexity", "deviation"),
    [
        ("ptb", "sigsoftmax", "dynamic evaluation", "test", 49.2, 0.4),
        ("ptb", "moss(K=15)", "dynamic evaluation", "test", 47.7, 0.07),
        ("ptb", "softmax", "finetuned", "test", 57.0, 0.6),
        ("ptb", "relu", "dynamic evaluation", "test", 2.78e5, 8e5),
        ("wikitext-2", "sigmoid", "trained", "valid", 72.8, 0.3),
        ("wikitext-2", "mos(K=15)", "dynamic evaluation", "test", 40.8, 0.03),
        ("wikitext-2", "relu", "finetuned", "valid", 648, 10),
    ],
)
def test_cells_read_from_the_paper(corpus, head, stage, split, perplexity, deviation):
    (found,) = paper.results(corpus=corpus, head=head, stage=stage, split=split)
    assert (found.perplexity, found.deviation) == (perplexity, deviation)


def test_what_the_text_says_of_the_tables():
    def final(corpus: str, head: str) -> float:
        return paper.results(corpus=corpus, head=head, stage="dynamic evaluation", split="test")[0].perplexity

    for corpus in paper.CORPORA:
        assert final(corpus, "sigsoftmax") < final(corpus, "softmax")
        assert final(corpus, "moss(K=15)") < final(corpus, "mos(K=15)")
    assert final("ptb", "sigmoid") < final("ptb", "sigsoftmax")
    assert final("wikitext-2", "sigmoid") > final("wikitext-2", "softmax")
    ranks = {(rank.corpus, rank.head): rank.rank for rank in paper.RANKS}
    assert ranks["ptb", "softmax"] == ranks["wikitext-2", "softmax"] == 402


def test_other_sources_are_asked_for():
    every = paper.results(corpus="ptb", head="softmax", stage="trained", split="valid", source=None)
    assert [(result.perplexity, result.deviation) for result in every] == [(61.1, 0.4), (61.2, None)]
