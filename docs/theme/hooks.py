"""What mkdocs does for this site beyond its settings: pages made of other files, links to them, formulas, colours."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

from site_markdown import SiteMarkdown, block

from sigsoftmax.report import theme

ROOT = Path(__file__).parents[2]
PAGE_OF = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""files beside docs/ that pages link to, and where the site has them"""
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?=[)#])")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.append(SiteMarkdown())  # type: ignore[arg-type]
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "math", "class": "formula", "format": block})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "examples.md": examples_page(),
        "reference/command-line.md": command_line_page(),
        "assets/colours.css": colours(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Links that leave docs/ lead to the page that the site has of that file."""
    source = page.file.src_uri
    home = Path("docs") / source
    if source in ("contributing.md", "changelog.md"):
        home = Path(source)  # written beside docs/

    def led(match: re.Match[str]) -> str:
        path = match["path"]
        if path.startswith("#"):
            return path
        target = Path(*_resolved((home.parent / path).parts))
        if target.parts[:1] == ("docs",):
            inside = target.relative_to("docs").as_posix()
        elif target.parts[:1] == ("examples",):
            inside = f"examples.md#{target.stem}" if target.suffix == ".py" else "examples.md"
        else:
            inside = PAGE_OF.get(target.as_posix(), "")
        if not inside:
            return path
        return "../" * source.count("/") + inside

    return LINK.sub(led, markdown)


def _resolved(parts: tuple[str, ...]) -> list[str]:
    done: list[str] = []
    for part in parts:
        if part == ".." and done:
            done.pop()
        elif part != ".":
            done.append(part)
    return done


def examples_page() -> str:
    """All programs of examples/, which `make examples` runs."""
    text = "# Examples\n\nShort programs, run on every change; `make examples` runs them here.\n"
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        summary = (ast.get_docstring(ast.parse(source)) or "").strip()
        body = re.sub(r'\A""".*?"""\n+', "", source, flags=re.S)
        text += f"\n## examples/{path.name} {{ #{path.stem} }}\n\n{summary}\n\n```python\n{body}```\n"
    return text


def command_line_page() -> str:
    """The help of every verb, as the program prints it."""
    from sigsoftmax.cli import _parser

    parser = _parser([])
    (verbs,) = (action for action in parser._actions if hasattr(action, "_name_parser_map"))
    text = "# Command line\n\nWhat `sigsoftmax --help` and `sigsoftmax VERB --help` print.\n"
    text += f"\n```text\n{_help(parser)}```\n"
    for name, verb in verbs._name_parser_map.items():
        text += f"\n## {name}\n\n```text\n{_help(verb)}```\n"
        for action in verb._actions:
            for inner, one in getattr(action, "_name_parser_map", {}).items():
                text += f"\n### {name} {inner}\n\n```text\n{_help(one)}```\n"
    return text


def _help(parser: Any) -> str:
    # The width of the terminal must not show in the site.
    kind = parser.formatter_class
    parser.formatter_class = lambda prog: kind(prog, width=100, max_help_position=32)
    return parser.format_help()


def colours() -> str:
    """The report's colours, for both schemes of the site."""
    schemes = {"default": theme.LIGHT, "slate": theme.DARK}
    return "".join(
        f'[data-md-color-scheme="{scheme}"] {{ '
        + " ".join(f"--{name}: {value};" for name, value in colors.items())
        + " }\n"
        for scheme, colors in schemes.items()
    )
