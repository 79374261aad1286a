"""The figures and the page show the numbers of the measurement, and text that follows from them.

Letters: V rows of the table.
"""

import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from fabricated_theory import ROWS, SUMS, TOKENS, fabricate, without_mutual_information

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
from report_browser import CHROMIUM, Browser

from coupled_adam.theory import theory_plots
from coupled_adam.theory.record import OPTIMIZERS, Fit, RunTheory, TheoremFit
from coupled_adam.theory.run_figures import CAPTIONS
from coupled_adam.theory.story import chapters
from coupled_adam.theory.theory_folder import TheoryFolder, TokenArrays
from coupled_adam.theory.theory_numbers import fits_table, sums_table
from coupled_adam.theory.theory_page import write_page
from coupled_adam.theory.theory_plots import NAMES, PARTS
from coupled_adam.theory.toy import TRUE, toy_example
from coupled_adam.theory.toy_figure import draw_gradients_example

ATTACK = "<script>alert(1)</script> $\\frac{$ & {{ 7 * 7 }}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a measured run."""
    folder = tmp_path_factory.mktemp("theory") / "run"
    fabricate(folder)
    return folder


@pytest.fixture(scope="module")
def theory(run: Path) -> RunTheory:
    return TheoryFolder(run).read_run()


@pytest.fixture(scope="module")
def arrays(run: Path) -> TokenArrays:
    return TheoryFolder(run).read_arrays(90)


@pytest.fixture(scope="module")
def p(run: Path) -> np.ndarray:
    """(V,) unigram probabilities, zero for padding."""
    counts = TheoryFolder(run).read_unigram()
    return np.pad(counts / counts.sum(), (0, ROWS - TOKENS))


@pytest.fixture(scope="module")
def page(run: Path, theory: RunTheory) -> Path:
    """The page of a run with a hostile name, next to another run."""
    noted = replace(theory, notes=[f"scikit-learn is missing {ATTACK}"])
    return write_page(run, {ATTACK: noted, "other": theory}, ATTACK, {"command": ATTACK})


def points(axes) -> np.ndarray:
    return np.asarray(axes.collections[0].get_offsets())


def line(axes, label: str) -> np.ndarray:
    [found] = [each for each in axes.lines if each.get_label() == label]
    return np.column_stack(found.get_data())


def test_updates_of_the_toy_lie_along_the_hidden_state_and_sum_to_zero_except_for_adam() -> None:
    toy = toy_example()
    assert np.exp(toy.embeddings @ toy.hidden) / np.exp(toy.embeddings @ toy.hidden).sum() == pytest.approx(
        toy.probabilities
    )
    for name in OPTIMIZERS:
        update = toy.updates[name]
        cosines = update @ toy.hidden / np.linalg.norm(update, axis=1) / np.linalg.norm(toy.hidden)
        assert cosines == pytest.approx(np.where(np.arange(3) == TRUE, 1.0, -1.0))
        assert np.linalg.norm(update.sum(0)) == pytest.approx(0, abs=1e-12) or name == "adam"
    assert toy.relative_sum("adam") > 0.3
    assert toy.updates["adam"].sum(0) @ toy.hidden < 0, "rare tokens are pushed away, and the mean with them"


def test_the_toy_figure_shows_every_update_and_its_sum() -> None:
    vectors, chains = draw_gradients_example().axes
    assert len([text for text in vectors.texts if text.arrow_patch is not None]) == 1 + 3 + 2 * 3
    ends = [line for line in chains.lines if line.get_marker() == "o"]
    assert [float(end.get_xdata()[0]) for end in ends] == pytest.approx(
        [0, -1.9 * toy_example().relative_sum("adam"), 0]
    )


def test_the_prior_is_the_logarithm_of_the_counts_with_its_largest(run: Path) -> None:
    counts = TheoryFolder(run).read_unigram()
    by_token, by_rank = theory_plots.draw_prior(counts).axes
    seen = np.flatnonzero(counts)
    np.testing.assert_allclose(points(by_token), np.column_stack([seen, np.log(counts[seen] / counts.sum())]))
    largest = counts.max() / counts.sum()
    assert by_token.texts[0].get_text() == f"max p̃ = {largest:.3f}\nlog p̃ = {np.log(largest):.2f}"
    ranked = by_rank.lines[0].get_ydata()
    assert len(ranked) == len(seen)
    assert (np.diff(ranked) <= 0).all()


def test_the_second_moment_is_drawn_with_the_line_of_its_fit(p: np.ndarray, arrays: TokenArrays) -> None:
    fit = Fit(3e-5, 0.873, 0.86, 1.2, TOKENS)
    plain, logarithmic = theory_plots.draw_second_moment(p, arrays.second_moment, fit).axes
    for axes in (plain, logarithmic):
        np.testing.assert_allclose(points(axes), np.column_stack([p, arrays.second_moment]))
        ends = line(axes, "A p̃, R² = 0.873")
        assert ends[:, 1] == pytest.approx(3e-5 * ends[:, 0])
        assert ends[1, 0] == p.max()
    assert logarithmic.get_xscale() == logarithmic.get_yscale() == "log"


def test_x_leaves_out_tokens_that_were_never_a_target(p: np.ndarray, arrays: TokenArrays, theory: RunTheory) -> None:
    left, right = theory_plots.draw_x(p, arrays.x_true, arrays.x_false, theory.checkpoints[-1].fits).axes
    shown = np.isfinite(arrays.x_true) & (p > 0)
    assert 0 < shown.sum() < TOKENS
    np.testing.assert_allclose(points(left), np.column_stack([p[shown], arrays.x_true[shown]]))
    np.testing.assert_allclose(points(right), np.column_stack([p, arrays.x_false]))
    assert (left.get_title(), right.get_title()) == ("R² of A p̃: 0.010", "R² of A p̃: 0.930")


def test_the_theorem_figure_plots_measured_over_predicted_with_the_diagonal(arrays: TokenArrays) -> None:
    [axes] = theory_plots.draw_theorem(arrays.squared_gradient, arrays.squared_gradient_predicted).axes
    np.testing.assert_allclose(
        points(axes), np.column_stack([arrays.squared_gradient_predicted, arrays.squared_gradient])
    )
    diagonal = line(axes, "equal")
    assert (diagonal[:, 0] == diagonal[:, 1]).all()


def test_A_is_drawn_over_the_tokens_seen_for_every_run(theory: RunTheory) -> None:
    shorter = replace(theory, checkpoints=theory.checkpoints[:2], parameters=125_000_000)
    [axes] = theory_plots.draw_A({"a": theory, "b$": shorter}).axes
    assert line(axes, "a (N = 365k)") == pytest.approx(np.array([[30720, 1e-5], [61440, 2e-5], [92160, 3e-5]]))
    assert len(line(axes, "b$ (N = 125M)")) == 2


def test_update_sums_have_a_panel_for_each_part_and_a_line_for_each_optimizer(theory: RunTheory) -> None:
    figure = theory_plots.draw_update_sums({"a": theory, "b": theory})
    assert len(figure.axes) == 2 * len(PARTS)
    for place, axes in enumerate(figure.axes):
        for name in OPTIMIZERS:
            drawn = line(axes, NAMES[name])
            assert drawn[:, 0].tolist() == [30720, 61440, 92160]
            assert drawn[:, 1] == pytest.approx([SUMS[name][place % 3]] * 3)


def test_gradient_sums_have_a_point_for_every_batch(theory: RunTheory) -> None:
    [axes] = theory_plots.draw_gradient_sums(theory).axes
    drawn = line(axes, "output layer")
    assert len(drawn) == 3 * 20
    assert drawn[21].tolist() == pytest.approx([61440 + 1024, 2e-8])
    assert {each.get_label() for each in axes.lines} == {"output layer", "input layer", "both (tied table)"}


def test_a_sum_that_is_exactly_zero_is_drawn_at_the_bottom(theory: RunTheory) -> None:
    nothing = replace(
        theory.checkpoints[0], updates=[replace(each, input=0.0) for each in theory.checkpoints[0].updates]
    )
    axes = theory_plots.draw_update_sums({"a": replace(theory, checkpoints=[nothing])}).axes[2]
    assert (line(axes, "Adam")[:, 1] >= axes.get_ylim()[0]).all()


def test_tables_have_every_checkpoint_the_means_and_the_papers_values(theory: RunTheory) -> None:
    table = fits_table(theory)
    assert [row[0] for row in table.rows] == ["30.7k", "61.4k", "92.2k"]
    cells = dict(zip(zip(table.groups, table.labels, strict=True), table.rows[1], strict=True))
    assert cells["E[v]", "A"] == "2.0e-5"
    assert cells["X, i ≠ t", "R²"] == "0.930"
    mean, paper = (dict(zip(zip(table.groups, table.labels, strict=True), row, strict=True)) for row in table.below)
    assert mean["E[v]", "R²"] == "0.90(1)"
    assert mean["E[v]", "A"] == "2(1)e-5"
    # Sec. theory and App. second_moment of the paper.
    assert [paper["E[v]", label] for label in ("A", "R²", "I")] == ["1.0e-4", "0.85(7)", "1.18(9)"]
    assert [paper["X, i = t", label] for label in ("R²", "I")] == ["0.003(1)", "0.14(2)"]
    assert [paper["X, i ≠ t", label] for label in ("R²", "I")] == ["0.92(1)", "0.50(2)"]
    sums = sums_table(theory)
    cells = dict(zip(zip(sums.groups, sums.labels, strict=True), sums.rows[0], strict=True))
    assert (cells["output layer", "SGD"], cells["whole update", "Adam"]) == ("3.0e-8", "0.550")
    assert cells["input layer", "Coupled"] == "0.090"


def test_an_untied_model_shows_the_sums_of_its_input_table(tmp_path: Path) -> None:
    untied = fabricate(tmp_path, tied=False)
    table = sums_table(untied)
    cells = dict(zip(zip(table.groups, table.labels, strict=True), table.rows[0], strict=True))
    assert (cells["input layer", "Adam"], cells["output layer", "Adam"]) == ("0.300", "0.600")
    axes = theory_plots.draw_update_sums({"a": untied}).axes[2]
    assert line(axes, "Coupled Adam")[:, 1] == pytest.approx([0.3] * 3)
    [axes] = theory_plots.draw_gradient_sums(untied).axes
    assert [each.get_label() for each in axes.lines] == ["output layer", "input layer"]


def test_without_scikit_learn_there_are_dashes_for_the_mutual_information(theory: RunTheory) -> None:
    table = fits_table(without_mutual_information(theory))
    places = [place for place, label in enumerate(table.labels) if label == "I"]
    assert len(places) == 3
    assert {row[place] for row in (*table.rows, table.below[0]) for place in places} == {"—"}


def finding(theory: RunTheory, chapter: str) -> str:
    return chapters(theory, dict.fromkeys(CAPTIONS))[chapter].finding  # type: ignore[arg-type]


def with_update(theory: RunTheory, name: str, **changes: float) -> RunTheory:
    checkpoints = [
        replace(each, updates=[replace(u, **changes) if u.optimizer == name else u for u in each.updates])
        for each in theory.checkpoints
    ]
    return replace(theory, checkpoints=checkpoints)


def test_the_text_follows_from_the_numbers(theory: RunTheory) -> None:
    """The only test that checks the wording of a verdict."""
    assert re.search(r"\b2\.0e-8 .* vanishes\b", finding(theory, "gradients"))
    broken = replace(theory.checkpoints[1], gradient_sums={**theory.checkpoints[1].gradient_sums, "output": [0.3]})
    broken_run = replace(theory, checkpoints=[theory.checkpoints[0], broken])
    assert re.search(r"\b0\.300 .* not vanish\b", finding(broken_run, "gradients"))
    assert finding(theory, "updates").endswith(": as claimed.")
    for name, output in (("sgd", 0.1), ("coupled", 0.1), ("adam", 1e-7)):
        assert finding(with_update(theory, name, output=output), "updates").endswith(": not as claimed.")
    assert "as the hypothesis says" in finding(theory, "tying")
    assert "hypothesis does not hold" in finding(with_update(theory, "coupled", output=0.1), "tying")
    assert "is not tied" in finding(replace(theory, tied=False), "tying")
    assert re.search(r"R² = 0\.90\(1\).* 0\.85\(7\)", finding(theory, "second_moment"))


def test_the_page_explains_the_argument_with_every_figure_and_the_papers_values(page: Path, theory: RunTheory) -> None:
    html = page.read_text()
    chapters_of_page = re.findall(r'<li id="([\w-]+)"', html)
    assert chapters_of_page == ["gradients", "updates", "tying", "second-moment", "derivation"]
    assert sorted(re.findall(r'<figure id="figure-(\w+)"', html)) == sorted(CAPTIONS)
    for published in ("(paper: 0.85(7))", "(paper: 0.003(1))", "(paper: 1.0e-4)"):
        assert published in html
    for chapter in chapters_of_page:
        assert finding(theory, chapter.replace("-", "_")) in unescape(html)


def test_names_on_the_page_are_escaped_and_nothing_is_loaded_or_run(page: Path) -> None:
    html = page.read_text()
    assert "<script" not in html
    assert "{{ 7 * 7 }}" in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; $\\frac{$ &amp;" in html
    figures_beside = {f"./figures/{name}.{kind}" for name in CAPTIONS for kind in ("svg", "pdf")}
    for address in re.findall(r'(?:href|src)="([^"]*)"', html):
        assert address.startswith(("#", "data:image/png;base64,")) or address in figures_beside
    ids = Counter(re.findall(r'\bid="([^"]*)"', html))
    assert max(ids.values()) == 1
    assert set(re.findall(r'(?:url\(#|href="#)([^")]*)', html)) <= set(ids)


def test_figures_are_also_written_as_files(page: Path) -> None:
    for name in CAPTIONS:
        svg = (page.parent / "figures" / f"{name}.svg").read_bytes()
        ET.fromstring(svg)
        assert b"currentColor" not in svg
        assert (page.parent / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_a_run_with_hardly_any_measurements_still_has_a_page(tmp_path: Path) -> None:
    """One checkpoint, no fit, no target token: the smallest possible run."""
    theory = fabricate(tmp_path, steps=(1,), tied=False)
    none, nothing = Fit(None, None, None, None, 0), TheoremFit(None, None, None, None, None)
    [only] = theory.checkpoints
    only = replace(only, fits=dict.fromkeys(only.fits, none), theorem=nothing, theorem_elements=nothing)
    folder = TheoryFolder(tmp_path)
    arrays = folder.read_arrays(1)
    zeros = np.zeros(ROWS, np.float32)
    empty = replace(arrays, x_true=zeros * np.nan, x_false=zeros, squared_gradient=zeros, second_moment=zeros)
    folder.write_checkpoint(only, empty, {"step": 1})
    page = write_page(tmp_path, {"a": replace(theory, checkpoints=[only], summary={})}, "a", {})
    assert page.read_text().count("<figure") == len(CAPTIONS)
    html = page.read_text()
    assert re.search(r"tiny\b.* 365k parameters\b.* adamw\b", html)
    assert "1 checkpoint, 20 batches" in html


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_the_page_without_a_problem_at_any_width(page: Path, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        for width, dark in ((1280, False), (390, True)):
            browser.open(page, width, 800, dark=dark)
            assert browser.problems == []
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate("document.title").endswith(f": {ATTACK}")
        browser.open(page, 800, 800, media="print")
        assert browser.evaluate("getComputedStyle(document.querySelector('.values tbody tr')).display") == "table-row"
