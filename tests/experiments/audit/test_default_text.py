"""The generated text: as long as asked for, the same for a seed, and varied enough to make contexts."""

from sigsoftmax.experiments.audit.default_text import generated_text


def test_length_and_seed():
    text = generated_text(500, seed=3)
    assert 500 <= len(text.split()) < 700
    assert text == generated_text(500, seed=3)
    assert text != generated_text(500, seed=4)
    assert generated_text(0) == ""


def test_it_looks_like_text():
    text = generated_text(3000)
    assert len(set(text.lower().split())) > 120
    for paragraph in text.split("\n\n"):
        assert paragraph[0].isupper() or paragraph[0] == '"'
        assert paragraph[-1] in '."'
    assert "{" not in text
