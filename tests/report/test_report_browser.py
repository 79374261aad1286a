"""The report in a real browser: at any width, light, dark and printed, and its interactive parts."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fabricated_study import PAGE_PARTS
from report_browser import CHROMIUM, Browser

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@needs_chromium
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (375, 700)], ids=["desk", "phone"])
def test_a_browser_shows_every_part_without_errors_at_any_width(
    browser: Browser, demo: Path, width: int, height: int
) -> None:
    browser.open(demo, width, height)
    assert browser.problems == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    for part in PAGE_PARTS:
        assert browser.evaluate(f"document.getElementById('{part}').getBoundingClientRect().height") > 10, part
    pictures = "document.querySelectorAll('figure svg, figure canvas, #curves svg')"
    boxes = f"Array.from({pictures}, (each) => each.getBoundingClientRect()).filter((box) => box.width > 0)"
    assert browser.evaluate(f"{boxes}.length") == 2 + 5 + 3  # clouds, curves, and other figures
    assert browser.evaluate(f"{boxes}.every((box) => box.width > 150 && box.height > 100)")
    bottom = browser.evaluate("document.getElementById('verdict').getBoundingClientRect().bottom")
    assert bottom < height  # the verdict is on the first screen
    if width > 1000:
        for part in ("key-numbers", "figure-embedding_cloud"):
            assert browser.evaluate(f"document.getElementById('{part}').getBoundingClientRect().bottom") < height


@needs_chromium
def test_pointing_at_a_step_shows_the_values_of_all_curves(browser: Browser, demo: Path) -> None:
    browser.open(demo, 1000, 800)
    titles = "Array.from(document.querySelectorAll('.curve h3'), (title) => title.firstChild.textContent)"
    quantities = ["mean-embedding ratio", "ISO", "training loss", "validation loss"]
    difference = "validation loss minus that of standard Adam"  # has one line, the others have two
    assert browser.evaluate(titles) == [*quantities, difference]
    assert browser.evaluate("document.querySelectorAll('#curves polyline').length") == 2 * len(quantities) + 1
    values = (
        "Array.from(document.querySelectorAll('.at'), (at) => Array.from(at.children, (v) => Number(v.textContent)))"
    )
    read = "document.getElementById('readout').textContent"
    assert browser.evaluate(read) == "at step 300"
    assert browser.evaluate(values)[:2] == [[0.85, 0.02], [0.6, 0.97]]
    # The fabricated ratio is its last value times (step / 300) ** 0.3; point at step 150 in another chart.
    browser.evaluate(
        "(() => { const svg = document.querySelectorAll('#curves svg')[2], box = svg.getBoundingClientRect();"
        "const [left, right] = [46, 10].map((margin) => margin * box.width / svg.viewBox.baseVal.width);"
        "const clientX = box.left + left + (box.width - left - right) / 2;"
        "svg.dispatchEvent(new PointerEvent('pointermove', { clientX, clientY: box.top + 50, bubbles: true })); })()"
    )
    assert browser.evaluate(read) == "at step 150"
    assert browser.evaluate(values)[0] == pytest.approx([0.85 * 0.5**0.3, 0.02 * 0.5**0.3], rel=5e-3)
    browser.evaluate(
        "for (let i = 0; i < 60; i++) "
        "document.getElementById('curves').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))"
    )
    assert browser.evaluate(read) == "at step 50"
    assert browser.problems == []


@needs_chromium
def test_no_curve_is_shown_twice(browser: Browser, demo: Path) -> None:
    curves = (
        "mean_ratio_over_training",
        "iso_over_training",
        "training_loss",
        "validation_loss",
        "validation_difference",
    )
    seen = "['{}', 'curves'].map((id) => document.getElementById(id).getBoundingClientRect().height > 0)"
    for media, expected in (("", [False, True]), ("print", [True, False])):
        browser.open(demo, 1000, 800, media=media)
        for name in curves:
            assert browser.evaluate(seen.format(f"figure-{name}")) == expected, (name, media)


@needs_chromium
def test_without_scripts_every_curve_and_cloud_is_a_picture(browser: Browser, demo: Path, tmp_path: Path) -> None:
    html = re.sub(r"<script.*?</script>", "", demo.read_text(), flags=re.DOTALL)
    (tmp_path / "still.html").write_text(html)
    browser.open(tmp_path / "still.html", 1000, 800)
    heights = "Array.from(document.querySelectorAll('figure svg'), (svg) => svg.getBoundingClientRect().height)"
    assert len(browser.evaluate(heights)) == 9
    assert min(browser.evaluate(heights)) > 100
    assert browser.evaluate("document.getElementById('curves').getBoundingClientRect().height") == 0


@needs_chromium
def test_the_clouds_can_be_rotated_and_reset(browser: Browser, demo: Path) -> None:
    browser.open(demo, 1000, 800)
    pictures = "Array.from(document.querySelectorAll('#clouds canvas'), (canvas) => canvas.toDataURL())"
    first = browser.evaluate(pictures)
    assert len(first) == 2
    browser.evaluate(
        "document.querySelector('#clouds canvas').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}))"
    )
    turned = browser.evaluate(pictures)
    assert turned[0] != first[0]
    assert turned[1] != first[1]  # all at once
    browser.evaluate("document.querySelectorAll('#clouds button')[1].click()")
    assert browser.evaluate(pictures) == first
    assert browser.problems == []


@needs_chromium
def test_hostile_names_do_not_run_as_scripts(browser: Browser, hostile: Path) -> None:
    for width in (1280, 375):
        browser.open(hostile, width, 800)
        assert browser.problems == []
        assert browser.evaluate("document.title") != "run"
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert "<script>" in browser.evaluate("document.querySelector('.compared').textContent")


@needs_chromium
def test_a_browser_draws_the_page_light_dark_and_printed(browser: Browser, demo: Path, tmp_path: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('figure svg text')).fill"
    colours = {}
    for name, options in (("light", {}), ("dark", {"dark": True}), ("paper", {"dark": True, "media": "print"})):
        browser.open(demo, 800, 800, **options)  # type: ignore[arg-type]
        colours[name] = (browser.evaluate(ground), browser.evaluate(ink))
    assert colours["light"] == ("rgb(255, 255, 255)", "rgb(28, 32, 36)")
    assert colours["dark"] == ("rgb(22, 24, 27)", "rgb(232, 234, 237)")
    assert colours["paper"] == ("rgb(255, 255, 255)", "rgb(0, 0, 0)")
    browser.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert browser.evaluate("Array.from(document.querySelectorAll('details')).every((each) => each.open)")


@needs_chromium
def test_the_test_browser_detects_script_errors(browser: Browser, demo: Path, tmp_path: Path) -> None:
    """Otherwise the tests above could pass without checking anything."""
    broken = tmp_path / "broken.html"
    broken.write_text(demo.read_text().replace('id="readout"', 'id="gone"'))
    browser.open(broken, 800, 800)
    assert any("TypeError" in problem for problem in browser.problems)
    forbidden = tmp_path / "forbidden.html"
    forbidden.write_text(demo.read_text().replace("</body>", "<script>document.title = 'run'</script></body>"))
    browser.open(forbidden, 800, 800)
    assert any("Content Security Policy" in problem for problem in browser.problems)
    assert browser.evaluate("document.title") != "run"
