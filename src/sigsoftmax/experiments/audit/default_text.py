"""A small English text, generated: contexts for an audit when no text is given."""

from __future__ import annotations

import random

__all__ = ["generated_text"]


def _entries(text: str) -> list[str]:
    """The entries of a list that is separated by commas and may have several lines."""
    return [entry.strip() for entry in text.split(",")]


NOUNS = _entries(
    """
    river, window, teacher, market, engine, letter, garden, doctor, village, storm, library, sailor, question,
    bridge, forest, number, kitchen, captain, valley, machine, singer, harbour, picture, winter, farmer, station,
    mountain, answer, clock, child
    """
)
ADJECTIVES = _entries(
    """
    old, quiet, narrow, bright, broken, careful, distant, early, empty, famous, heavy, honest, hungry, large,
    lonely, narrow, patient, poor, red, silent, sudden, tall, tired, useful, warm, young
    """
)
VERBS = _entries(
    """
    found, watched, followed, opened, carried, forgot, painted, repaired, answered, counted, visited, remembered,
    measured, bought, crossed, described, reached, left, heard, built
    """
)
PLACES = _entries("beside the, behind the, near the, across the, under the, outside the, before the, on the way to the")
TIMES = _entries(
    """
    In the morning, Before noon, A week later, That evening, Every autumn, Long ago, After the rain, At midnight,
    By then
    """
)
NAMES = _entries("Anna, Paul, Mary, Henry, Clara, Thomas, Ruth, George, Alice, Peter, Helen, Simon")
REASONS = (
    "because the {0} was {1}",
    "although nobody had seen the {0}",
    "while the {0} stayed {1}",
    "until the {1} {0} came back",
    "and the {0} grew {1}",
)
SAYINGS = (
    '"Where is the {0}?" asked {2}.',
    '"The {0} is {1}," said {2}, "and so is the {3}."',
    "{2} had {4} books, {5} of them about the {0}.",
    "It cost {4} pounds and {5} pence, which {2} thought too much for a {1} {0}.",
)


def generated_text(words: int, seed: int = 0) -> str:
    """A text of at least so many words, in sentences and paragraphs; the same for the same seed."""
    draw = random.Random(seed)
    paragraphs: list[str] = []
    written = 0
    while written < words:
        sentences = [_sentence(draw) for _ in range(draw.randint(3, 7))]
        paragraphs.append(" ".join(sentences))
        written += sum(len(sentence.split()) for sentence in sentences)
    return "\n\n".join(paragraphs)


def _sentence(draw: random.Random) -> str:
    def phrase() -> str:
        noun, adjective = draw.choice(NOUNS), draw.choice(ADJECTIVES)
        return f"{adjective} {noun}" if draw.random() < 0.4 else noun

    if draw.random() < 0.25:
        return draw.choice(SAYINGS).format(
            draw.choice(NOUNS),
            draw.choice(ADJECTIVES),
            draw.choice(NAMES),
            phrase(),
            draw.randint(2, 90),
            draw.randint(2, 60),
        )
    subject = draw.choice(NAMES) if draw.random() < 0.4 else f"the {phrase()}"
    sentence = f"{subject} {draw.choice(VERBS)} the {phrase()} {draw.choice(PLACES)} {phrase()}"
    if draw.random() < 0.5:
        sentence += " " + draw.choice(REASONS).format(draw.choice(NOUNS), draw.choice(ADJECTIVES))
    if draw.random() < 0.3:
        sentence = f"{draw.choice(TIMES)} {sentence}"
    return sentence[0].upper() + sentence[1:] + "."
