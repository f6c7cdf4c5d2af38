"""The text of a page, read without a browser."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

# What the page itself is made of; an element or attribute beyond these came from data.
TAGS = frozenset(
    [
        "a",
        "body",
        "button",
        "caption",
        "code",
        "dd",
        "details",
        "div",
        "dl",
        "dt",
        "figcaption",
        "figure",
        "footer",
        "h1",
        "h2",
        "h3",
        "h4",
        "head",
        "header",
        "html",
        "label",
        "li",
        "line",
        "main",
        "meta",
        "nav",
        "ol",
        "option",
        "p",
        "script",
        "section",
        "select",
        "span",
        "style",
        "summary",
        "svg",
        "table",
        "tbody",
        "td",
        "th",
        "thead",
        "title",
        "tr",
        "ul",
    ]
)


class Page(HTMLParser):
    """Elements, texts and figures of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.texts: list[tuple[str, str]] = []
        """element -> its text"""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "script":
            self.scripts.append(data)
        elif inside != "style":
            self.texts.append((inside, data))

    @property
    def text(self) -> str:
        return " ".join(text for _, text in self.texts)

    @property
    def figures(self) -> list[dict[str, Any]]:
        for tag, attributes in self.tags:
            if tag == "script" and attributes.get("id") == "figures":
                return json.loads(self.scripts[0])
        return []

    def figure(self, identifier: str) -> dict[str, Any]:
        return next(figure for figure in self.figures if figure["id"] == identifier)

    def headings(self) -> list[tuple[int, str]]:
        return [(int(tag[1]), text) for tag, text in self.texts if tag in ("h1", "h2", "h3", "h4")]
