"""The report: what is in the folder and on the page, that nothing is loaded, and what a real browser makes of it."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fabricated_study import COUPLED, STANDARD, fabricate, scaled
from report_browser import CHROMIUM, Browser

from coupled_adam.study.expansion import cells_of
from coupled_adam.study.plan import load_study, study_text
from coupled_adam.study.report import write_report
from coupled_adam.study.report_page import commands, what_was_compared
from coupled_adam.study.report_tables import address, headline
from coupled_adam.study.results import merge_results, read_results

ATTACK = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">{{ 7 * 7 }}"
SIZES = [("125M", 124_373_760, 5 * 10**9), ("125M", 124_373_760, 10**10), ("355M", 354_000_000, 10**10)]
PARTS = (
    "verdict",
    "main-table",
    "figure-embedding_cloud",
    "curves",
    "table-main",
    "table-comparisons",
    "table-runs",
    "repeat",
)


def fabricated_demo(folder: Path, **settings: object) -> Path:
    """The demo study with made-up numbers, named as its own plan names things."""
    fabricate(folder, sizes=(("tiny", 364_864, 307_200),), **settings)  # type: ignore[arg-type]
    text = (folder / "results.jsonl").read_text().replace("tiny-307200-", "tiny-307.2k-")
    (folder / "results.jsonl").write_text(text)
    for run in (folder / "runs").glob("tiny-307200-*"):
        run.rename(run.with_name(run.name.replace("307200", "307.2k")))
    (folder / "study.toml").write_text(study_text("demo"))
    return folder


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = fabricated_demo(tmp_path_factory.mktemp("report") / "demo")
    page = write_report([folder], folder)
    assert page == folder / "report.html"
    return page


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hostile names wherever a file can carry one."""
    folder = tmp_path_factory.mktemp("hostile") / "a&b<i>"
    optimizers = {"standard": STANDARD, ATTACK: COUPLED}
    fabricate(folder, name=ATTACK, optimizers=optimizers, sizes=((ATTACK, 1000, 2000),), seeds=(1, 2))
    text = (folder / "results.jsonl").read_text()
    (folder / "results.jsonl").write_text(text.replace('"device": "cpu"', f'"device": {json.dumps(ATTACK)}'))
    lines = study_text("demo").splitlines()
    lines[1] = f"title = {json.dumps(ATTACK)} # {ATTACK}"
    (folder / "study.toml").write_text("\n".join(lines))
    return write_report([folder], folder)


def test_the_folder_holds_figures_tables_and_the_page(demo: Path) -> None:
    folder = demo.parent
    for name in ("embedding_cloud", "results", "training_loss", "mean_ratio_over_training", "singular_values"):
        assert (folder / "figures" / f"{name}.svg").is_file()
        assert (folder / "figures" / f"{name}.pdf").is_file()
    for name in ("main", "comparisons", "runs"):
        assert (folder / "tables" / f"{name}.csv").is_file()
    assert not list(folder.rglob("*.tmp"))


def test_the_first_screen_says_what_was_compared_and_what_came_out(demo: Path) -> None:
    html = demo.read_text()
    first = html[: html.index("Over training")]
    for words in (
        "<title>AdamW against Coupled Adam: a small model on built-in text</title>",
        "Standard Adam and Coupled Adam · model tiny (365k parameters) · 307k training tokens · 3 seeds each",
        "Coupled Adam reaches a lower test loss than standard Adam",
        "2% of a typical embedding&#39;s length, against 85% with standard Adam",
        "mean-embedding ratio",
        '<div class="verdict better"',
        ">standard Adam</text>",
        ">origin</text>",
    ):
        assert words in first, words
    row = re.search(r"mean-embedding ratio.*?</tr>", first, re.DOTALL)
    assert row is not None
    assert re.search(r"<b>0\.02<small>\(0\)</small></b>", row[0])
    assert "better" in row[0]


def test_every_part_of_the_page_is_there(demo: Path) -> None:
    html = demo.read_text()
    for part in PARTS:
        assert f'id="{part}"' in html
    figures = list((demo.parent / "figures").glob("*.svg"))
    assert html.count("<figure") == html.count("<figcaption>") == len(figures) >= 9
    assert 'id="partial"' not in html
    assert 'id="unfinished"' not in html
    assert "coupled-adam study run" in html
    assert "pip install &#39;coupled-adam[study]==0.1.0&#39;" in html
    assert "abc1234" in html  # the commit
    assert "c0ffee0000" in html  # the settings of a run
    assert "base = &#34;tiny&#34;" in html  # study.toml


def test_links_lead_to_run_folders_and_files_that_exist(demo: Path) -> None:
    links = re.findall(r'<a href="([^"]*)"', demo.read_text())
    local = [link for link in links if not link.startswith("#")]
    assert sum(link.startswith("./runs/") for link in local) == 6
    for link in local:
        assert (demo.parent / link).exists(), link


def test_nothing_on_the_page_is_loaded_and_only_our_script_runs(demo: Path, hostile: Path) -> None:
    for page in (demo, hostile):
        html = page.read_text()
        assert html.startswith("<!DOCTYPE html>")
        assert re.findall(r"<script[^>]*>", html) == ['<script type="application/json" id="curves-data">', "<script>"]
        assert "<img" not in html
        for link in re.findall(r'(?:href|src)="([^"]*)"', html):
            assert link.startswith(("#", "./", "data:image/png;base64,")), link
        assert "@import" not in html
        assert not re.findall(r"url\((?!#)", html)
        assert re.search(r"default-src 'none'; .*script-src 'sha256-[\w+/=]+'\"", html)


def test_ids_on_the_page_are_unique_and_every_reference_has_its_target(demo: Path) -> None:
    html = demo.read_text()
    ids = Counter(re.findall(r'\bid="([^"]*)"', html))
    assert max(ids.values()) == 1
    assert set(re.findall(r'(?:url\(#|href="#)([^")]*)', html)) <= set(ids)


def test_pictures_take_the_colours_of_the_page(demo: Path) -> None:
    html = demo.read_text()
    assert "#010203" not in html
    assert "#d9dde3" not in html
    assert "currentColor" in html
    assert len(html) < 2_000_000


def test_coupled_being_worse_is_said_on_the_page(tmp_path: Path) -> None:
    html = write_report([fabricated_demo(tmp_path / "s", gain=-0.1, with_runs=False)], tmp_path / "out").read_text()
    assert '<div class="verdict worse"' in html
    assert "Coupled Adam is worse in test loss than standard Adam" in html
    assert '<td class="claim worse">worse' in html


def test_one_seed_claims_nothing_on_the_page(tmp_path: Path) -> None:
    html = write_report([fabricate(tmp_path / "s", seeds=(1,), with_runs=False)], tmp_path / "out").read_text()
    assert "With one seed each nothing can be claimed" in html
    assert '<td class="claim no-claim">no claim' in html
    assert "claim better" not in html
    assert "<b>" not in html


def test_unfinished_runs_are_listed_with_the_reason(tmp_path: Path) -> None:
    folder = fabricated_demo(tmp_path / "demo", with_runs=False)
    lines = (folder / "results.jsonl").read_text().splitlines(keepends=True)
    (folder / "results.jsonl").write_text("".join(lines[:4]))  # all of standard, one of coupled
    cell = cells_of(load_study("demo"))[4]
    (folder / cell.run).mkdir(parents=True)
    (folder / cell.run / "error.txt").write_text("the loss is <nan> at step 7\n\ndetails\n")
    html = write_report([folder], folder).read_text()
    assert "4 of 6 runs are finished, 1 failed" in html
    assert "the loss is &lt;nan&gt; at step 7" in html
    assert "details" not in html[html.index('id="unfinished"') : html.index('id="repeat"')].replace("<details", "")
    waiting = html[html.index('id="unfinished"') :]
    assert "tiny-307.2k-coupled/seed-3</th><td" in waiting
    assert "waiting" in waiting
    assert "1 of 3" in html  # seeds of coupled, in the table
    assert "1 to 3 seeds" in html
    assert "With 3 and 1 seeds nothing can be claimed" in html


def test_a_study_without_its_file_is_reported_and_said_so(tmp_path: Path) -> None:
    html = write_report([fabricate(tmp_path / "s", with_runs=False)], tmp_path / "s").read_text()
    assert "study.toml is missing" in html
    assert 'id="partial"' not in html


def test_several_folders_become_one_report(tmp_path: Path) -> None:
    first = fabricated_demo(tmp_path / "a", seeds=(1, 2))
    second = fabricated_demo(tmp_path / "b", seeds=(3,))
    page = write_report([first, second], tmp_path / "both")
    html = page.read_text()
    assert "3 seeds each" in html
    assert f"coupled-adam study report {first}-again {second}-again --out {tmp_path / 'both'}" in html
    assert 'id="partial"' not in html  # what one folder lacks the other has
    links = re.findall(r'<a href="(\./[^"]*runs/[^"]*)"', html)
    assert len(links) == 6
    assert {link.split("/")[2] for link in links} == {"a", "b"}
    assert all((page.parent / link).is_dir() for link in links)
    assert f"study.toml of {second}" in html


def test_a_run_that_no_folder_has_finished_is_missing_once(tmp_path: Path) -> None:
    first = fabricated_demo(tmp_path / "a", seeds=(1,), with_runs=False)
    second = fabricated_demo(tmp_path / "b", seeds=(2,), with_runs=False)
    cell = next(each for each in cells_of(load_study("demo")) if each.seed == 3)
    (second / cell.run).mkdir(parents=True)
    (second / cell.run / "error.txt").write_text("out of memory\n")
    html = write_report([first, second], tmp_path / "both").read_text()
    assert "4 of 6 runs are finished, 1 failed" in html
    assert html.count(f">{cell.label}</th>") == 1
    assert "out of memory" in html


def test_the_newest_version_is_the_one_to_install(tmp_path: Path) -> None:
    results = read_results(fabricate(tmp_path / "s", with_runs=False))
    mixed = [replace(each, package=package) for each, package in zip(results, ["0.9.0", "0.10.0"] * 3, strict=True)]
    assert commands([], mixed, tmp_path)[0] == "pip install 'coupled-adam[study]==0.10.0'"


def test_a_validation_loss_is_called_so_on_the_page(tmp_path: Path) -> None:
    folder = fabricated_demo(tmp_path / "s", with_runs=False)
    text = (folder / "results.jsonl").read_text()
    (folder / "results.jsonl").write_text(text.replace('"loss_split": "test"', '"loss_split": "val"'))
    html = write_report([folder], folder).read_text()
    assert "reaches a lower validation loss" in html
    assert "The loss is that of the validation text: the corpus has no test split." in html[: html.index("Figures")]
    assert not re.search("test loss", html, re.IGNORECASE)


def test_tied_and_untied_models_of_one_name_share_the_first_table(tmp_path: Path) -> None:
    tied = fabricate(tmp_path / "a", optimizers={"coupled": COUPLED}, sizes=(("30M", 30_000_000, 10**9),))
    settings = {"untied standard": {**STANDARD, "tied": False}}
    untied = fabricate(tmp_path / "b", optimizers=settings, sizes=(("30M", 49_000_000, 10**9),))
    found = headline(merge_results([tied, untied]))
    assert found is not None
    assert list(found.optimizers) == ["untied standard, N = 49M", "Coupled Adam, N = 30M"]
    assert found.rows[0].claim == "better"
    html = write_report([tied, untied], tmp_path / "both").read_text()
    assert "Coupled Adam reaches a lower test loss than untied standard" in html


def test_published_values_beside_the_headline_are_explained(tmp_path: Path) -> None:
    explained = "In brackets: what the paper has"
    for name, sizes, there in (("a", SIZES[:1], True), ("b", [("tiny", 364_864, 307_200)], False)):
        html = write_report([fabricate(tmp_path / name, sizes=sizes, with_runs=False)], tmp_path / name).read_text()
        assert (explained in html[: html.index("Figures")]) == there


def test_averaged_curves_are_said_to_be(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "s", seeds=(1,))
    averaged = "Neighbouring steps are averaged"
    assert averaged not in write_report([folder], folder).read_text()
    for path in folder.glob("runs/*/*/metrics.jsonl"):
        path.write_text("".join(f'{{"kind": "train", "step": {step}, "loss": 3.0}}\n' for step in range(1, 402)))
    html = write_report([folder], folder).read_text()
    assert html.count(averaged) == 1  # the training loss; the other curves are short
    assert "Curves of more than 150 points are averaged" in html


def test_published_values_stand_beside_the_measured_ones(tmp_path: Path) -> None:
    html = write_report([fabricate(tmp_path / "s", sizes=SIZES, with_runs=False)], tmp_path / "s").read_text()
    # Tab. results_S: 5B tokens, 125M parameters, Coupled: loss 3.12(1), bold.
    assert '<span class="published"><b>3.12<small>(1)</small></b></span>' in html
    assert "D = 5B, N = 125M" in html


def test_an_ablation_shows_its_table_and_figures(tmp_path: Path) -> None:
    exponents = {f"coupled n={n}": scaled(n) for n in range(-2, 3)}
    html = write_report([fabricate(tmp_path / "s", optimizers=exponents, with_runs=False)], tmp_path / "s").read_text()
    assert "Of 5 optimizers" in html
    assert 'id="figure-ablation_scale"' in html
    assert 'id="figure-ablation_scale_complete"' in html
    assert 'id="table-scale"' in html


def test_no_finished_run_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "results.jsonl").write_text("")
    with pytest.raises(ValueError, match="no finished run to report; run the study first"):
        write_report([tmp_path / "s"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failure_while_the_page_is_made_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fabricate(tmp_path / "s", with_runs=False)
    (folder / "report.html").write_text("old")

    def fail(*_: object) -> str:
        raise RuntimeError("no")

    monkeypatch.setattr("coupled_adam.study.report_page.render_report", fail)
    with pytest.raises(RuntimeError):
        write_report([folder], folder)
    assert (folder / "report.html").read_text() == "old"


def test_hostile_names_are_text(hostile: Path) -> None:
    html = hostile.read_text()
    assert "<script>document" not in html
    assert "&lt;script&gt;document.title=&#39;run&#39;&lt;/script&gt;" in html
    assert "{{ 7 * 7 }}" in html
    assert ">49<" not in html


def test_addresses_cannot_become_scripts(tmp_path: Path) -> None:
    assert address(tmp_path / "javascript:alert(1)", tmp_path) == "./javascript%3Aalert%281%29/"
    assert address(tmp_path / "a" / 'q"<', tmp_path / "b") == "./../a/q%22%3C/"


def test_many_optimizers_are_named_by_their_ends(tmp_path: Path) -> None:
    exponents = {f"coupled n={n}": scaled(n) for n in range(-3, 4)}
    words = what_was_compared(read_results(fabricate(tmp_path / "s", optimizers=exponents, with_runs=False)))
    assert words[0] == "Coupled n=-3, …, coupled n=3 (7 optimizers)"


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
    for part in PARTS:
        assert browser.evaluate(f"document.getElementById('{part}').getBoundingClientRect().height") > 10, part
    figures = "Array.from(document.querySelectorAll('figure svg'), (svg) => svg.getBoundingClientRect())"
    assert browser.evaluate(f"{figures}.every((box) => box.width > 250 && box.height > 100)")
    bottom = browser.evaluate("document.getElementById('verdict').getBoundingClientRect().bottom")
    assert bottom < height  # the verdict is on the first screen
    if width > 1000:
        for part in ("main-table", "figure-embedding_cloud"):
            assert browser.evaluate(f"document.getElementById('{part}').getBoundingClientRect().bottom") < height


@needs_chromium
def test_the_curves_can_be_picked_and_read(browser: Browser, demo: Path) -> None:
    browser.open(demo, 1000, 800)
    assert browser.evaluate("document.querySelectorAll('#curves polyline').length") == 2
    text = "document.getElementById('readout').textContent"
    assert browser.evaluate(text) == "step 300standard Adam 0.85Coupled Adam 0.02"
    browser.evaluate(
        "(() => { const pick = document.getElementById('quantity'); pick.value = 'ISO';"
        "pick.dispatchEvent(new Event('change')); })()"
    )
    assert browser.evaluate(text) == "step 300standard Adam 0.6Coupled Adam 0.97"
    browser.evaluate(
        "document.getElementById('curves').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}));"
        "for (let i = 0; i < 60; i++) "
        "document.getElementById('curves').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))"
    )
    assert browser.evaluate(text).startswith("step 50")
    assert browser.problems == []


@needs_chromium
def test_a_browser_runs_no_hostile_name(browser: Browser, hostile: Path) -> None:
    for width in (1280, 375):
        browser.open(hostile, width, 800)
        assert browser.problems == []
        assert browser.evaluate("document.title") != "run"
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert "<script>" in browser.evaluate("document.querySelector('.compared').textContent")


@needs_chromium
def test_a_browser_draws_the_page_light_dark_and_on_paper(browser: Browser, demo: Path, tmp_path: Path) -> None:
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
def test_the_browser_of_these_tests_sees_a_script_error(browser: Browser, demo: Path, tmp_path: Path) -> None:
    """Without this the tests above could pass for want of ears."""
    broken = tmp_path / "broken.html"
    broken.write_text(demo.read_text().replace('id="readout"', 'id="gone"'))
    browser.open(broken, 800, 800)
    assert any("TypeError" in problem for problem in browser.problems)
    forbidden = tmp_path / "forbidden.html"
    forbidden.write_text(demo.read_text().replace("</body>", "<script>document.title = 'run'</script></body>"))
    browser.open(forbidden, 800, 800)
    assert any("Content Security Policy" in problem for problem in browser.problems)
    assert browser.evaluate("document.title") != "run"


@pytest.mark.parametrize(("metrics", "is_said"), [(("loss", "acc"), True), (("loss",), False)])
def test_the_first_screen_says_where_accuracy_is_of_a_few_documents(
    metrics: tuple[str, ...], is_said: bool, tmp_path: Path
) -> None:
    study = fabricate(tmp_path / "study", metrics=metrics, with_runs=False)
    rows = [json.loads(line) for line in (study / "results.jsonl").read_text().splitlines()]
    for row in rows:
        row["metrics"]["task_limit"] = 10
    (study / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report([study], study).read_text()
    first_screen = page.partition('id="main-table"')[2].partition("</section>")[0]
    assert ("only the first 10 documents were evaluated" in first_screen) is is_said
