"""The page in a real browser: drawn, silent, usable with a mouse, with a keyboard, on a phone and on paper.

Needs playwright and a Chromium: Debian's package, or what `playwright install chromium` brings.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.report import synthetic_runs
from tests.report.test_page import HOSTILE, write_hostile

from sigsoftmax.records import Record, append
from sigsoftmax.report import ReportConfig, write_report

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

DRAWN = "html[data-drawn=all]"


class Tab:
    """A page that is watched: what it says on the console, what it asks of the network, what goes wrong in it."""

    def __init__(self, browser: "api.Browser", path: Path, **settings: object) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.add_init_script(
            "addEventListener('securitypolicyviolation', e => console.error('policy', e.violatedDirective))"
        )
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(DRAWN)

    def figure(self, name: str) -> "api.Locator":
        return self.page.locator(f"#{name}")

    def visible(self, name: str) -> list[str]:
        """Names of the traces that a figure shows."""
        return self.page.evaluate(
            "id => document.getElementById(`${id}-plot`).data.filter(t => t.visible).map(t => t.name)", name
        )

    def layout(self, name: str, path: str) -> object:
        return self.page.evaluate(
            "([id, path]) => path.split('.').reduce((o, k) => o[k], document.getElementById(`${id}-plot`)._fullLayout)",
            [name, path],
        )

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Polls from here: the page's policy forbids what playwright would evaluate inside it."""
        for _ in range(100):
            if condition():
                return
            self.page.wait_for_timeout(50)
        pytest.fail("waited in vain")

    def color(self, name: str) -> str:
        script = "n => getComputedStyle(document.documentElement).getPropertyValue(`--${n}`).trim()"
        return self.page.evaluate(script, name)


@pytest.fixture(scope="module")
def shared_tab(browser: "api.Browser", page: Path) -> Iterator[Tab]:
    opened = Tab(browser, page)
    yield opened
    opened.context.close()


@pytest.fixture
def tab(shared_tab: Tab, page: Path) -> Iterator[Tab]:
    """One page for many tests, each of which touches figures of its own."""
    yield shared_tab
    assert shared_tab.said == []
    assert shared_tab.requests == [page.as_uri()]


@pytest.fixture(scope="module")
def small_page(runs: Path, page: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with one figure, for tests that must open it anew."""
    out = tmp_path_factory.mktemp("small") / "report.html"
    write_report(ReportConfig(paths=(runs / "benchmarks",), out=out))
    return out


def test_every_plot_is_drawn(tab):
    plots = tab.page.locator(".plot")
    assert plots.count() == 11
    for place in range(plots.count()):
        plot = plots.nth(place)
        assert plot.locator("svg.main-svg").count() >= 1
        assert plot.locator(".plot-container .trace").count() >= 1
        assert not plot.locator(".no-plot").is_visible()
    # Points of the mean of softmax are where the data are, not at a corner.
    box = tab.figure("capacity-1-width").locator(".scatterlayer .trace path.js-line").first.bounding_box()
    assert box["width"] > 300
    assert box["height"] > 100


def test_the_verdict_is_what_a_reader_sees_first(browser, tmp_path):
    where = synthetic_runs.environment("sigsoftmax compare --seeds 1,2,3")
    append(tmp_path / "a.jsonl", [Record.of(payload, where) for payload in synthetic_runs.comparisons(seeds=3)])
    write_report(ReportConfig(paths=(tmp_path,), out=tmp_path / "r.html"))
    opened = Tab(browser, tmp_path / "r.html")
    assert opened.page.locator(".sections > section").first.get_attribute("id") == "verdict"
    answer = opened.page.locator("#verdict .findings li").first
    assert answer.text_content().startswith("Use MoS(K=4)")
    assert answer.bounding_box()["y"] < 900
    # Time and parameters are seen without scrolling, intervals and all.
    table = opened.page.locator("#verdict .scroll").first
    assert table.evaluate("e => e.scrollWidth - e.clientWidth") == 0
    # Beside the contents on a wide screen, before them on a phone.
    assert opened.page.locator("nav").bounding_box()["y"] < answer.bounding_box()["y"]
    opened.page.set_viewport_size({"width": 390, "height": 844})
    assert answer.bounding_box()["y"] < 844
    assert opened.page.locator("nav").bounding_box()["y"] > table.bounding_box()["y"]
    opened.context.close()


def test_a_legend_entry_hides_its_curve(tab):
    entry = tab.figure("capacity-1-width").get_by_role("button", name="MoSS(K=4)")
    before = tab.visible("capacity-1-width")
    assert "MoSS(K=4)" in before
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    assert tab.visible("capacity-1-width") == [name for name in before if name != "MoSS(K=4)"]
    # Another figure keeps its own choice.
    assert "MoSS(K=4)" in tab.visible("comparison-1")
    entry.press("Enter")
    assert entry.get_attribute("aria-pressed") == "true"
    assert tab.visible("capacity-1-width") == before
    entry.press("Space")
    assert entry.get_attribute("aria-pressed") == "false"


def test_a_head_far_off_can_be_brought_in(tab):
    entry = tab.figure("perplexity-1").get_by_role("button", name="ReLU")
    assert entry.get_attribute("aria-pressed") == "false"
    assert "ReLU, ours" not in tab.visible("perplexity-1")
    narrow = tab.layout("perplexity-1", "xaxis.range.1")
    entry.click()
    assert "ReLU, ours" in tab.visible("perplexity-1")
    assert tab.layout("perplexity-1", "xaxis.range.1") > 10 * narrow


def test_switches_of_learning_curves(tab):
    figure = tab.figure("learning-1")
    means = set(tab.visible("learning-1"))
    figure.get_by_role("button", name="Single runs").click()
    assert {"softmax, seed 141", "softmax, seed 143"} <= set(tab.visible("learning-1")) - means
    figure.get_by_role("button", name="Reference").click()
    assert not any(name and name.endswith("reference") for name in tab.visible("learning-1"))
    figure.get_by_role("button", name="Validation").click()
    assert tab.visible("learning-1") == []


def test_axes_change_between_linear_and_logarithmic(tab):
    for axis in ("x", "y"):
        button = tab.figure("spectrum-1").get_by_role("button", name=f"Log {axis}")
        assert tab.layout("spectrum-1", f"{axis}axis.type") == "log"
        button.click()
        assert button.get_attribute("aria-pressed") == "false"
        assert tab.layout("spectrum-1", f"{axis}axis.type") == "linear"


def test_a_choice_changes_what_is_shown(tab):
    shown = "id => document.getElementById(`${id}-plot`).data.filter(t => t.visible).map(t => t.hovertemplate).join()"
    before = tab.page.evaluate(shown, "capacity-1-spectra")
    tab.figure("capacity-1-spectra").get_by_label("Width", exact=True).select_option("64")
    after = tab.page.evaluate(shown, "capacity-1-spectra")
    assert "rank 10," in before
    assert "rank 66," in after


def test_zoom_by_mouse_and_by_keyboard(tab):
    name = "capacity-1-numbers"
    plot = tab.page.locator(f"#{name}-plot")
    plot.scroll_into_view_if_needed()
    whole = tab.layout(name, "xaxis.range")
    box = plot.bounding_box()
    tab.page.mouse.move(box["x"] + 200, box["y"] + 100)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 400, box["y"] + 250, steps=5)
    tab.page.mouse.up()
    zoomed = tab.layout(name, "xaxis.range")
    assert zoomed[1] - zoomed[0] < 0.6 * (whole[1] - whole[0])
    # Hiding a curve does not lose the view.
    tab.figure(name).get_by_role("button", name="MoS(K=4)", exact=True).click()
    assert tab.layout(name, "xaxis.range") == pytest.approx(zoomed)
    plot.focus()
    plot.press("+")
    closer = tab.layout(name, "xaxis.range")
    assert closer[1] - closer[0] == pytest.approx(0.8 * (zoomed[1] - zoomed[0]))
    plot.press("ArrowRight")
    assert tab.layout(name, "xaxis.range.0") > closer[0]
    plot.press("0")
    assert tab.layout(name, "xaxis.autorange") is True


def test_hovering_tells_the_values(tab):
    plot = tab.page.locator("#comparison-1-plot")
    plot.scroll_into_view_if_needed()
    point = plot.locator(".scatterlayer .trace .point").first.bounding_box()
    tab.page.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
    label = plot.locator(".hoverlayer .hovertext")
    label.first.wait_for()
    assert "MoS(K=4)" in label.first.text_content()
    assert "test perplexity" in label.first.text_content()


def test_saving_a_picture(tab):
    with tab.page.expect_download() as waiting:
        tab.figure("audit-1-truncation").get_by_role("button", name="Save SVG").click()
    assert waiting.value.suggested_filename == "audit-1-truncation.svg"
    assert Path(waiting.value.path()).read_text().startswith("<svg")


@pytest.mark.thorough
def test_the_theme_follows_the_system_until_the_reader_chooses(browser, small_page):
    for system, other in (("light", "dark"), ("dark", "light")):
        opened = Tab(browser, small_page, color_scheme=system)
        button = opened.page.get_by_role("button", name="Dark theme")

        def becomes_dark(expected: bool, opened: Tab = opened, button: "api.Locator" = button) -> None:
            background = {True: "#14171b", False: "#fbfaf7"}[expected]
            opened.wait_until(lambda: opened.color("page") == background)
            opened.wait_until(lambda: opened.layout("benchmark-1", "paper_bgcolor") == opened.color("card"))
            assert button.get_attribute("aria-pressed") == str(expected).lower()

        becomes_dark(system == "dark")
        button.click()
        becomes_dark(other == "dark")
        opened.page.emulate_media(color_scheme=other)
        opened.page.emulate_media(color_scheme=system)
        opened.page.wait_for_timeout(100)
        becomes_dark(other == "dark")
        # The choice is forgotten with the page.
        opened.page.reload()
        opened.page.wait_for_selector(DRAWN)
        becomes_dark(system == "dark")
        opened.page.emulate_media(color_scheme=other)
        becomes_dark(other == "dark")
        assert opened.said == []
        opened.context.close()


def test_a_phone_scrolls_down_only(browser, page):
    opened = Tab(browser, page, viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 360
    wide = opened.page.evaluate(
        """() => [...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, .plot')
             && e.getBoundingClientRect().right > 361).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert wide == []
    # Dragging a finger over a plot scrolls the page.
    assert opened.layout("learning-1", "dragmode") is False
    heights = opened.page.evaluate("[...document.querySelectorAll('button, select')].map(e => e.offsetHeight)")
    assert min(heights) >= 40
    assert opened.said == []
    opened.page.set_viewport_size({"width": 740, "height": 360})
    opened.wait_until(lambda: opened.layout("learning-1", "width") > 500)
    opened.context.close()


def test_paper_is_light_and_holds_the_whole_plot(browser, page, tmp_path):
    opened = Tab(browser, page, color_scheme="dark")
    before = opened.layout("learning-1", "width")
    opened.page.set_viewport_size({"width": 690, "height": 1000})
    opened.page.emulate_media(media="print")
    opened.wait_until(lambda: opened.layout("learning-1", "width") == 660)
    assert opened.color("page") == "#fbfaf7"
    assert opened.layout("learning-1", "paper_bgcolor") == "#ffffff"
    for hidden in ("nav", ".controls", "#theme", "details.data:not([open])"):
        assert not opened.page.locator(hidden).first.is_visible()
    assert opened.page.locator("#learning-1 .legend").is_visible()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 690
    opened.page.emulate_media(media="screen")
    opened.page.set_viewport_size({"width": 1280, "height": 900})
    opened.wait_until(lambda: opened.layout("learning-1", "width") == before)
    assert opened.color("page") == "#14171b"
    opened.page.pdf(path=tmp_path / "page.pdf", format="A4")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert opened.layout("learning-1", "width") == before
    assert opened.said == []
    opened.context.close()


def test_with_the_keyboard_from_the_top(browser, small_page):
    opened = Tab(browser, small_page, reduced_motion="reduce")
    press = opened.page.keyboard.press
    press("Tab")
    assert opened.page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert opened.page.locator(".skip").bounding_box()["y"] >= 0
    press("Enter")
    assert opened.page.evaluate("document.activeElement.id") == "content"
    press("Tab")
    assert opened.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    # Tables that scroll and plots can be reached.
    reachable = "[...document.querySelectorAll('.plot, .scroll')].every(e => e.tabIndex === 0)"
    assert opened.page.evaluate(reachable)
    # Calm readers are not scrolled smoothly.
    assert opened.page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    opened.context.close()


def test_what_a_screen_reader_is_told(tab):
    for role in ("banner", "navigation", "main", "contentinfo"):
        assert tab.page.get_by_role(role).count() == 1
    assert tab.page.locator("html").get_attribute("lang") == "en"
    nameless = tab.page.evaluate(
        """() => [...document.querySelectorAll('button, select, a, summary, [role=group], [role=region]')].filter(e =>
             !(e.getAttribute('aria-label') || e.textContent.trim() || (e.labels && e.labels.length))).length"""
    )
    assert nameless == 0
    plot = tab.page.locator("#learning-1-plot")
    assert plot.get_attribute("aria-label").startswith("Penn Treebank: training. Arrow keys move")
    described = plot.get_attribute("aria-describedby")
    assert "Least validation perplexity: MoSS(K=15)" in tab.page.locator(f"#{described}").text_content()
    tab.figure("learning-1").get_by_text("Data of this figure").press("Enter")
    table = tab.figure("learning-1").get_by_role("table", name="Penn Treebank, training: perplexity by epoch")
    assert table.get_by_role("row").count() == 2 + 24


def test_the_contents_say_where_the_reader_is(tab):
    link = tab.page.get_by_role("navigation").get_by_role("link", name="Learning curves")
    link.click()
    current = "document.querySelector('nav [aria-current]')?.textContent"
    tab.wait_until(lambda: tab.page.evaluate(current) == "Learning curves")
    assert tab.page.locator("nav").bounding_box()["y"] >= 0


def test_nothing_from_data_runs(browser, runs, tmp_path):
    decisive = frozenset({"phase", "split", "corpus", "baseline", "implementation"})
    write_hostile(runs, tmp_path / "hostile.jsonl", but=decisive)
    out = tmp_path / "hostile.html"
    write_report(ReportConfig(paths=(tmp_path / "hostile.jsonl",), out=out, title=HOSTILE))
    opened = Tab(browser, out)
    for button in opened.page.locator(".legend-entry").all()[:8]:
        button.click()
    plot = opened.page.locator("#capacity-1-width-plot")
    plot.scroll_into_view_if_needed()
    point = plot.locator(".scatterlayer .trace .point").first.bounding_box()
    opened.page.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
    plot.locator(".hoverlayer .hovertext").first.wait_for()
    assert "<script>window.hacked" in plot.locator(".hoverlayer .hovertext").first.text_content()
    assert opened.page.evaluate("window.hacked") is None
    assert opened.page.locator("img, main script, .plot a").count() == 0
    assert opened.page.locator("h1").text_content() == HOSTILE
    assert opened.said == []
    assert opened.requests == [out.as_uri()]
    opened.context.close()


def test_the_policy_forbids_other_scripts_and_the_network(browser, small_page):
    opened = Tab(browser, small_page)
    opened.page.evaluate(
        """() => {
          const script = document.createElement('script');
          script.textContent = 'window.hacked = 1';
          document.body.append(script);
          fetch('http://localhost:9/').catch(() => {});
        }"""
    )
    opened.page.wait_for_timeout(200)
    assert opened.page.evaluate("window.hacked") is None
    blocked = {text.removeprefix("error: policy ") for text in opened.said if text.startswith("error: policy ")}
    assert {"script-src-elem", "connect-src"} <= blocked
    opened.context.close()


def test_without_scripts_the_words_and_tables_are_there(browser, page):
    context = browser.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.goto(page.as_uri())
    assert opened.locator("#learning-1 .no-plot").is_visible()
    assert not opened.locator("#theme").is_visible()
    opened.locator("#learning-1 details summary").click()
    assert opened.locator("#learning-1 table").is_visible()
    context.close()
