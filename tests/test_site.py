"""The documentation site: it builds without a warning, has every public name, and asks nobody for anything."""

import contextlib
import importlib
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright import sync_api as api

pytest.importorskip("material", reason="the site needs mkdocs-material: pip install '.[docs]'")
pytest.importorskip("mkdocstrings")
markdown = pytest.importorskip("markdown")

# The site is built for them; without them `make docs` still notices broken links and lost anchors.
pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[1]
PUBLIC = ("sigsoftmax", "sigsoftmax.distributed", "sigsoftmax.integrations.huggingface")
MODULES = {
    "analysis": (
        *("audit.argmax", "audit.findings", "audit.gradient_share", "audit.nonlinearity", "audit.truncation"),
        *("capacity", "capacity.curves", "capacity.distributions", "capacity.fits", "capacity.width_cost"),
        *("head_weights", "spectrum", "spectrum.bounds", "spectrum.matrix_files", "spectrum.matrix_readers"),
        *("spectrum.singular_values", "spectrum.streaming"),
    ),
    "lm": (
        *("config", "data.corpus", "dynamic.evaluation", "dynamic.search", "model.language_model", "recipes"),
        *("saving.saved_models", "training.evaluation", "training.trainer"),
    ),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once, as `make docs` builds it: a broken link, a lost anchor or a page outside the menu fails."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_reference_has_every_public_name(site: Path) -> None:
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.split(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    modules = [*PUBLIC, *(f"sigsoftmax.{package}.{short}" for package, shorts in MODULES.items() for short in shorts)]
    missing = ["sigsoftmax.integrations.onnx.export_onnx"]
    for path in modules:
        module = importlib.import_module(path)
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and str(getattr(value, "__module__", "")).startswith("sigsoftmax"):
                # Where it is imported from, or where it is defined.
                missing += [f"{path}.{name}"] * (f"{value.__module__}.{name}" not in known)
    assert [name for name in missing if name not in known] == []


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Markdown as the site draws it."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "theme"))
    extension = importlib.import_module("site_markdown").SiteMarkdown()
    return lambda text: markdown.markdown(text, extensions=[extension, "fenced_code"])


def test_formulas_become_markup_and_code_stays_code(drawn: Callable[[str], str]) -> None:
    assert "<msub><mi>z</mi><mi>i</mi></msub>" in drawn("with $z_i$ of")
    assert "<mi>b</mi>" in drawn("over $a +\nb$ lines")
    assert "<math" not in drawn("`$z$`, a$b$c, 5 $ and 6 $, \\$z$")
    assert 'rspace="0.17em">log</mo>' in drawn(r"$\alpha \log f$")
    for bad in (r"$\frac{1$", r"$\nosuch x$"):
        with pytest.raises(ValueError, match="is not understood"):
            drawn(bad)


def test_examples_and_roles_of_docstrings(drawn: Callable[[str], str]) -> None:
    text = drawn("See :func:`~sigsoftmax.probs`.\n\n>>> f(1)\n2\n\nText.\n\n> said\n")
    assert "<code>sigsoftmax.probs</code>" in text
    assert "&gt;&gt;&gt; f(1)\n2\n</code>" in text
    assert "<p>Text.</p>" in text
    assert text.count("<blockquote>") == 1


def test_docstrings_are_drawn_as_they_are_meant(site: Path) -> None:
    """No role of Sphinx and no formula is left as text, and no example is taken for a quotation."""
    for page in site.glob("**/*.html"):
        text = re.sub(r"<(pre|code|script|annotation)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.S)
        assert not re.search(r":(?:func|class|meth):`", text), page
        assert not re.search(r"\$\\", text), page
        assert "<blockquote>\n<blockquote>" not in text, page


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    for page in site.glob("**/*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text(encoding="utf-8")):
            assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag), (page, tag)
    for sheet in site.glob("**/*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


class _Watched:
    """A tab that notes what it asks for and what goes wrong in it."""

    def __init__(self, browser: "api.Browser", scheme: str, width: int) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.said: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))

    def find(self, word: str, title: str) -> None:
        """Search the site, and wait for the page of this title among what is found."""
        from playwright.sync_api import TimeoutError

        self.page.evaluate("document.querySelector('label[for=__search]').click()")
        found = self.page.locator(".md-search-result__article", has_text=title).first
        # What is typed before the program listens is lost, and a busy machine is late, also with what it finds for the
        # first letters of the word.
        for _ in range(12):
            self.page.fill(".md-search__input", "")
            self.page.type(".md-search__input", word)
            with contextlib.suppress(TimeoutError):
                found.wait_for(state="attached", timeout=5000)
                return
        pytest.fail(f"the search for {word!r} does not find {title!r}")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_a_browser_asks_nobody_else_and_nothing_is_cut_off(
    browser: "api.Browser", address: str, scheme: str, width: int
) -> None:
    tab = _Watched(browser, scheme, width)
    page = tab.page
    for path in ("index", "get-started", "mathematics", "choosing", "faq", "reference/index", "reference/analysis"):
        page.goto(f"{address}{path}.html")
        page.wait_for_function("document.querySelector('h1')")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
    page.goto(f"{address}mathematics.html")
    assert page.evaluate("document.querySelector('.formula math').getBoundingClientRect().height") > 20
    scheme_used = page.evaluate("document.body.dataset.mdColorScheme")
    assert scheme_used == ("slate" if scheme == "dark" else "default")
    tab.find("temperature", "Failure modes")
    tab.context.close()
    assert [url for url in tab.asked if not url.startswith(address)] == []
    assert tab.said == []


@pytest.mark.parametrize("path", ["index.html", "reference/index.html"])
def test_the_search_works_on_a_page_opened_from_the_disk(browser: "api.Browser", site: Path, path: str) -> None:
    """As `make docs` leaves the site: no server, so neither a worker nor a file that a script could read."""
    tab = _Watched(browser, "light", 1280)
    tab.page.goto((site / path).as_uri())
    tab.find("temperature", "Failure modes")
    tab.page.locator(".md-search-result__link", has_text="Failure modes").first.click()
    tab.page.wait_for_url("**/faq.html*")
    tab.context.close()
    assert [url for url in tab.asked if not url.startswith(site.as_uri())] == []
    assert tab.said == []
