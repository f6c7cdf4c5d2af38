"""What the pages and the docstrings use beyond Markdown.

Formulas, ``$...$`` and math blocks, become MathML when the site is built. Browsers draw that themselves, so that no
script and no font has to be fetched or shipped.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor

__all__ = ["SiteMarkdown", "block", "mathml"]

INLINE = r"(?<![\\$\w])\$(?=[^\s$])([^$]*[^\s$\\])\$(?![\w$])"
ROLE = r":(?:func|class|meth|mod|attr|data|exc):`~?([^`]+)`"
NAMED = re.compile(
    r"(?P<before><mo[^>]*>[^<]*</mo>|<mrow>|<mtd[^>]*>)?<mi>(?P<name>log|exp|tanh|max|min)</mi>"
    r"(?P<after><mo[^>]*>(?:\(|&#x00028;)</mo>)?"
)
# Between code (190) and backslash escapes (180): code is left alone, and a formula keeps its backslashes.
PRIORITY = 185
BEFORE_FENCES = 28


def mathml(latex: str, *, display: bool) -> str:
    """The formula as markup; ``ValueError`` with the formula where it is not understood."""
    try:
        markup = convert(" ".join(latex.split()), display="block" if display else "inline")
    except Exception as error:
        raise ValueError(f"the formula {latex!r} is not understood: {error!r}") from error
    # latex2mathml copies a command that it does not know, and closes what was left open.
    braces = latex.replace(r"\{", "").replace(r"\}", "")
    if "\\" in markup or braces.count("{") != braces.count("}"):
        raise ValueError(f"the formula {latex!r} is not understood: an unknown command, or braces that do not match")
    return NAMED.sub(_spaced, markup).replace("<mi>&#x02032;</mi>", "<mo>&#x02032;</mo>")


def _spaced(match: re.Match[str]) -> str:
    # latex2mathml writes log as if it were a variable: without the thin spaces around an operator's name.
    before, after = match["before"] or "", match["after"] or ""
    left, right = ("0" if before else "0.17em"), ("0" if after else "0.17em")
    return f'{before}<mo lspace="{left}" rspace="{right}">{match["name"]}</mo>{after}'


def block(source: str, language: str, css_class: str, options: Any, md: Markdown, **_: Any) -> str:
    """A math block, as superfences ask for it."""
    return f'<div class="formula" tabindex="0">{mathml(source, display=True)}</div>'


class _Formula(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        return self.md.htmlStash.store(mathml(m.group(1), display=False)), m.start(0), m.end(0)


class _Role(InlineProcessor):
    """``:func:`name``` of docstrings, which Markdown does not know."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element, int, int]:
        element = Element("code")
        element.text = m.group(1)
        return element, m.start(0), m.end(0)


class _Doctest(Preprocessor):
    """Examples of docstrings, which Markdown takes for quotations of quotations."""

    def run(self, lines: list[str]) -> list[str]:
        done: list[str] = []
        in_fence = in_example = False
        for line in lines:
            in_fence ^= line.lstrip().startswith("```")
            begins = line.startswith(">>> ") and not in_fence and not in_example
            ends = in_example and not line.strip()
            done += ["```pycon"] * begins + ["```"] * ends + [line]
            in_example = (in_example or begins) and not ends
        return done + ["```"] * in_example


class SiteMarkdown(Extension):
    """The extension that the hooks add."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.inlinePatterns.register(_Formula(INLINE, md), "formula", PRIORITY)
        md.inlinePatterns.register(_Role(ROLE, md), "role", PRIORITY + 10)
        md.preprocessors.register(_Doctest(md), "doctest", BEFORE_FENCES)
