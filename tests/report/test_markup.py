"""Markup: text is escaped wherever it stands, markup is not, and nothing ends a script early."""

import json

import pytest

from sigsoftmax.report.markup import Markup, join, plot_text, script_json, tag, visible

HOSTILE = "</script><script>alert('x')</script>\"><img src=x onerror=alert(1)>"


def test_text_is_escaped_and_markup_is_not():
    inner = tag("b", "1 < 2")
    assert inner == "<b>1 &lt; 2</b>"
    assert tag("p", inner, " & ", 3, None, [inner, "'"]) == ("<p><b>1 &lt; 2</b> &amp; 3<b>1 &lt; 2</b>&#x27;</p>")
    assert isinstance(join(inner), Markup)


def test_attributes():
    assert tag("a", "x", href='"><b>', class_="c", aria_label="l") == (
        '<a href="&quot;&gt;&lt;b&gt;" class="c" aria-label="l">x</a>'
    )
    assert tag("button", hidden=True, disabled=False, title=None) == "<button hidden></button>"
    assert tag("meta", name="n", content="c") == '<meta name="n" content="c">'


def test_json_in_a_script_cannot_leave_it():
    written = script_json({HOSTILE: [HOSTILE, "<!--", "\u2028 & \u2029", 1.5, None]})
    for forbidden in ("<", ">", "&", "\u2028", "\u2029"):
        assert forbidden not in written
    assert json.loads(written) == {HOSTILE: [HOSTILE, "<!--", "\ufffd & \ufffd", 1.5, None]}
    with pytest.raises(ValueError, match="JSON compliant"):
        script_json(float("nan"))


@pytest.mark.parametrize("character", [*"\x00\x1b\r\x9f\ud800\u202e\u2066\u200e\u061c\uffff"])
def test_what_no_page_may_hold_is_replaced(character):
    assert visible(f"a{character}b") == "a\ufffdb"
    tag("p", f"a{character}b").encode()
    script_json(f"a{character}b").encode()
    assert visible("tab\tline\nümlaut 🙂") == "tab\tline\nümlaut 🙂"


def test_plotly_sees_neither_tags_nor_templates():
    assert plot_text("<a href='javascript:1'>%{x}&lt;") == "&lt;a href='javascript:1'&gt;%&#123;x}&amp;lt;"
