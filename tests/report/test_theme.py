"""Colours: readable in both themes, the same head in the same look everywhere, strangers never in a known one."""

import pytest

from sigsoftmax.report.theme import DARK, LIGHT, SLOTS, Looks, head_label, same_head, stylesheet_variables, swatch


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255.0 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_contrasts_meet_wcag_aa(theme):
    for background in ("page", "card", "sunken"):
        for text in ("ink", "soft-ink", "accent", "good", "bad"):
            assert contrast(theme[text], theme[background]) >= 4.5, (text, background)
    assert contrast(theme["ink"], theme["caution-page"]) >= 4.5
    assert contrast(theme["accent-ink"], theme["accent"]) >= 4.5
    # Graphical objects need less.
    for mark in ("target", *(f"s{slot}" for slot in range(SLOTS))):
        assert contrast(theme[mark], theme["card"]) >= 3.0, mark


def test_both_themes_name_the_same_colours():
    assert LIGHT.keys() == DARK.keys()
    css = stylesheet_variables()
    assert css.count("--page:") == 3
    assert css.count("{") == css.count("}")


def test_one_spelling_for_a_head():
    assert same_head("gss(k=0.0)") == same_head("gss(k=0)") == "gss(k=0)"
    assert same_head("softmax(alpha=1.50)") == "softmax(alpha=1.50)"
    assert same_head("mixture(gss(k=2.0), K=4)") == "mixture(gss(k=2),K=4)"
    assert (head_label("moss(K=15)"), head_label("relu"), head_label("gss(k=0.2)")) == (
        "MoSS(K=15)",
        "ReLU",
        "gss(k=0.2)",
    )


def test_looks_do_not_depend_on_who_comes_first():
    first = Looks(["softmax", "a stranger", "sigsoftmax", "mos(K=4)"])
    second = Looks(["mos(K=4)", "sigsoftmax", "a stranger", "softmax"])
    for head in ("softmax", "sigsoftmax", "mos(K=4)"):
        assert first[head].slot == second[head].slot
    assert first["a stranger"].slot not in {first[head].slot for head in ("softmax", "sigsoftmax", "mos(K=4)")}


def test_looks_differ_however_many_heads_there_are():
    heads = ["softmax", "softmax(alpha=1.5)", "softmax(alpha=2)", *(f"gss(k=0.{i})" for i in range(6)), "own", "other"]
    heads += [f"mos(K={k})" for k in (2, 4, 15)]
    looks = Looks(heads)
    assert len({(looks[head].slot, looks[head].dash) for head in heads}) == len(heads)
    Looks(f"head {i}" for i in range(100))


def test_a_swatch_shows_the_dash():
    assert "stroke-dasharray" not in swatch(Looks(["softmax"])["softmax"])
    assert "stroke-dasharray" in swatch(Looks(["mos(K=2)", "mos(K=4)"])["mos(K=4)"])
