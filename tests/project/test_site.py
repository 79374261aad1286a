"""The documentation site: built in strict mode, complete, and readable in a browser without server or network."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="needs the extra docs")
pytest.importorskip("latex2mathml", reason="needs the extra docs")
import yaml
from markdown_it import MarkdownIt

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "website"))
from mkdocs.exceptions import PluginError
from report_browser import CHROMIUM, Browser
from site_docstrings import as_markdown
from site_formulas import with_formulas
from site_hooks import PAGES_OUTSIDE
from site_links import dead_links

ROOT = Path(__file__).parents[2]
PAGES = {path.stem: path for path in (ROOT / "docs").glob("*.md")}
PAGES |= {Path(page).stem: ROOT / source for source, page in PAGES_OUTSIDE.items() if source.endswith(".md")}
COUNTED = ("h1", "h2", "h3", "h4", "table", "tr", "th", "td", "ul", "ol", "li", "pre", "blockquote", "img")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


class Article(HTMLParser):
    """The number of each tag in the text of a page, and all ids of the page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self._is_inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_inside = self._is_inside or tag == "article"
        if self._is_inside:
            self.tags[tag] += 1
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        self._is_inside = self._is_inside and tag != "article"


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        browser.call("Emulation.setFocusEmulationEnabled", enabled=True)  # a field without focus receives no keys
        yield browser


def html(site: Path, name: str) -> str:
    return (site / f"{name}.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(set(PAGES) - {"api"}))
def test_a_page_has_the_headings_lists_tables_and_code_that_a_commonmark_parser_finds(site: Path, name: str) -> None:
    source = PAGES[name].read_text(encoding="utf-8")
    expected = Article(f"<article>{MarkdownIt('commonmark').enable('table').render(source)}</article>").tags
    found = Article(html(site, name)).tags
    assert {tag: found[tag] for tag in COUNTED} == {tag: expected[tag] for tag in COUNTED}


def test_every_page_is_in_the_navigation(site: Path) -> None:
    navigation = yaml.safe_load(
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2].partition("\n\n")[0]
    )
    groups = [next(iter(entry)) for entry in navigation]
    assert groups[:5] == ["Home", "Tutorial", "How-to", "Reference", "Explanation"]
    names = {page.removesuffix(".md") for entry in navigation for page in pages_in(entry)}
    assert names == {*PAGES, "five-minutes"}
    assert all((site / f"{name}.html").is_file() for name in names)


def pages_in(entry: dict[str, object]) -> Iterator[str]:
    for value in entry.values():
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            for inner in value:
                yield from pages_in(inner)


def test_the_api_page_has_every_public_name_and_every_name_that_pages_import(site: Path) -> None:
    names = {
        f"{module}.{name}"
        for module in ("coupled_adam", "coupled_adam.embeddings", "coupled_adam.jax")
        for name in import_module(module).__all__
        if not name.startswith("__")
    }
    for path in PAGES.values():
        statements = re.findall(
            r"^from (coupled_adam[\w.]*) import ([\w, ]+)$", path.read_text(encoding="utf-8"), re.MULTILINE
        )
        names |= {f"{module}.{name.strip()}" for module, listed in statements for name in listed.split(",")}
    names -= {"coupled_adam.base.text.shorthand"}  # a helper of one example
    page = Article(html(site, "api"))
    assert names - set(page.ids) == set()
    text = html(site, "api")
    assert not re.search(r":(math|func|class|meth|attr):|\.\. math::|&gt;&gt;&gt;(?![^<]*</span>)", text)
    assert text.count("<math") > 20


def test_formulas_are_drawn_without_a_script(site: Path) -> None:
    source = PAGES["mathematics"].read_text(encoding="utf-8")
    page = html(site, "mathematics")
    assert page.count('display="block"') == len(re.findall(r"^\$\$$", source, re.MULTILINE)) // 2
    assert page.count("<math") > 80
    assert not any("arithmatex" in html(site, name) for name in PAGES)


def test_the_notebook_is_a_page_with_its_picture(site: Path) -> None:
    page = html(site, "five-minutes")
    [picture] = re.findall(r'<img[^>]* src="(images/[^"]+)"', page)
    assert (site / picture).read_bytes().startswith(b"\x89PNG")
    assert 'href="using-coupledadamw.html"' in page


def test_no_build_file_is_published(site: Path) -> None:
    assert not [path for path in site.rglob("*.py") if "website" in path.parts]
    assert not any(str(ROOT) in path.read_text(encoding="utf-8") for path in site.glob("*.html"))


def test_a_dead_link_a_missing_heading_and_a_page_outside_the_navigation_end_the_build(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "LICENSE", *PAGES_OUTSIDE):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    # Without the API, which takes most of the time.
    (tmp_path / "docs" / "api.md").write_text(
        "# API\n\n[gone](no-such-page.md) [nor this](rivals.md#no-such-heading)\n"
    )
    (tmp_path / "docs" / "lost.md").write_text("# Lost\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    for problem in ("no-such-page.md", "no-such-heading", "lost.md"):
        assert problem in done.stderr + done.stdout


def test_the_check_of_links_finds_files_headings_and_resources_from_a_network(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="b.html#there">x</a><a href="#here">y</a><a href="https://x.org">z</a>'
    )
    (tmp_path / "b.html").write_text('<p id="there"><script src="website/x.js"></script>')
    (tmp_path / "website").mkdir()
    (tmp_path / "website" / "x.js").write_text("")
    assert dead_links(tmp_path) == []
    (tmp_path / "b.html").write_text(
        '<p id="elsewhere"><a href="c.html">x</a><script src="https://x.org/x.js"></script>'
    )
    assert [line.split(": ")[0] for line in dead_links(tmp_path)] == ["a.html", "b.html", "b.html"]


def test_a_formula_that_cannot_be_drawn_is_an_error() -> None:
    assert with_formulas(r'<span class="arithmatex">\(x_i\)</span>', "p").startswith("<math")
    with pytest.raises(PluginError, match="page-name"):
        with_formulas(r'<span class="arithmatex">\(\nosuchcommand x\)</span>', "page-name")


def test_roles_of_docstrings_become_markdown() -> None:
    docstring = (
        "Rows :math:`e_i`.\n\n.. math::\n    a &= b \\\\\n    c &= d\n\nSee :func:`coupled_adam.jax.x`, :attr:`lr`.\n"
    )
    expected = "Rows $e_i$.\n\n$$\na &= b \\\\\nc &= d\n$$\n\nSee [`coupled_adam.jax.x`][coupled_adam.jax.x], `lr`."
    assert as_markdown(docstring) == expected


@needs_chromium
def test_every_page_opens_from_the_disk_without_errors_and_without_a_network(site: Path, browser: Browser) -> None:
    for path in sorted(site.glob("*.html")):
        if path.name == "404.html":  # for servers: its links start at the root
            continue
        browser.open(path, 1200, 900)
        assert browser.evaluate("document.querySelector('article h1').textContent.length") > 3
        assert browser.problems == [], path.name


@needs_chromium
def test_a_navigation_link_opens_a_page_with_its_formulas(site: Path, browser: Browser) -> None:
    browser.open(site / "theory.html", 1400, 900)
    follow = (
        "const link = Array.from(document.querySelectorAll('.md-nav--primary a'))"
        ".find((a) => a.textContent.trim() === '{}'); setTimeout(() => link.click())"
    )
    browser.evaluate(follow.format("The mathematics"))
    wait_for(browser, "location.pathname.endsWith('mathematics.html') && document.readyState === 'complete'")
    assert browser.evaluate("document.querySelector('article').innerText.length") > 5000
    heights = (
        "Array.from(document.querySelectorAll('math[display=block]'), (each) => each.getBoundingClientRect().height)"
    )
    assert min(browser.evaluate(heights)) > 15
    assert browser.problems == []


@needs_chromium
def test_search_finds_a_name_without_a_server(site: Path, browser: Browser) -> None:
    browser.open(site / "index.html", 1400, 900)
    browser.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
    browser.call("Input.insertText", text="CoupledAdamW")
    browser.call("Input.dispatchKeyEvent", type="keyUp", key="W")
    results = "Array.from(document.querySelectorAll('.md-search-result__link'), (a) => a.getAttribute('href'))"
    wait_for(browser, f"{results}.length > 3")
    found = {re.sub(r".*/|\?.*|#.*", "", link) for link in browser.evaluate(results)}
    assert {"using-coupledadamw.html", "api.html"} <= found
    assert browser.problems == []


def wait_for(browser: Browser, condition: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds(browser, condition):
        assert time.monotonic() < end, condition
        time.sleep(0.1)


def holds(browser: Browser, condition: str) -> bool:
    """Whether a condition is true now; false while another page is loading."""
    try:
        return bool(browser.evaluate(condition))
    except AssertionError as error:
        if "navigated" not in str(error):
            raise
        return False
