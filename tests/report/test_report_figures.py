"""The figures show all numbers of the results, and are left out without data.

Legend: S seeds.
"""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fabricated_study import COUPLED, OPTIMIZERS, STANDARD, fabricate, scaled, sgd
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from coupled_adam.metrics import METRICS, NATS
from coupled_adam.report.figures import draw_figures, write_figures
from coupled_adam.report.figures.ablations import draw_scale_complete, draw_scale_loss, draw_sgd_loss
from coupled_adam.report.figures.clouds import draw_clouds
from coupled_adam.report.figures.differences import draw_differences, draw_task_differences
from coupled_adam.report.figures.embedding_figures import draw_norm_and_frequency, draw_spectra
from coupled_adam.report.figures.experiments import draw_experiments
from coupled_adam.report.figures.training_curves import draw_isotropy, draw_mean_ratio, draw_training_loss
from coupled_adam.report.grid import gather_grid
from coupled_adam.report.run_files import mean_curve
from coupled_adam.study.results import Result, read_results

T_95 = {2: 2.919986, 1: 6.313752}  # Student's t at 95%, one-sided, from published tables
GRID_OF_SIZES = [("125M", 125_000_000, 5 * 10**9), ("125M", 125_000_000, 10**10), ("355M", 355_000_000, 10**10)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    return read_results(fabricate(tmp_path_factory.mktemp("demo") / "study"))


def fabricated(folder: Path, **settings: object) -> list[Result]:
    return read_results(fabricate(folder / "study", **settings))  # type: ignore[arg-type]


def values(results: list[Result], optimizer: str, metric: str = "loss") -> np.ndarray:
    return np.array([result.metrics[metric] for result in results if result.optimizer == optimizer])


def drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def run_of(results: list[Result], optimizer: str) -> Path:
    return next(result.run_folder for result in results if result.optimizer == optimizer)


def test_clouds_are_side_by_side_at_the_same_scale_with_origin_and_mean(demo: list[Result]) -> None:
    left, right = drawn(draw_clouds(gather_grid(demo))).axes
    assert [left.get_title(), right.get_title()] == ["standard Adam", "Coupled Adam"]
    assert left.get_xlim() == right.get_xlim()
    assert left.get_ylim() == right.get_ylim()
    for axes, optimizer in ((left, "standard"), (right, "coupled")):
        assert axes.get_aspect() == 1
        arrays = np.load(run_of(demo, optimizer) / "embeddings.npz")
        after, before = (np.asarray(cloud.get_offsets()) for cloud in axes.collections[:2])
        np.testing.assert_allclose(after, arrays["cloud_final"][:, :2])
        np.testing.assert_allclose(before, arrays["cloud_initial"][:, :2])
        marks = {line.get_label(): (line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines}
        assert marks["origin"] == (0, 0)
        assert marks["mean"] == pytest.approx(tuple(arrays["mean_final"][:2]))
        assert axes.get_xlim()[0] < 0 < axes.get_xlim()[1]


def test_up_to_four_optimizers_are_side_by_side_and_otherwise_only_the_pair(tmp_path: Path) -> None:
    centred = {**STANDARD, "centre": True}
    three = {"standard": STANDARD, "standard, centred": centred, "coupled": COUPLED}
    results = fabricated(tmp_path / "three", optimizers=three, seeds=[1])
    titles = [axes.get_title() for axes in drawn(draw_clouds(gather_grid(results))).axes]
    assert titles == ["standard Adam", "standard, centred", "Coupled Adam"]
    many = OPTIMIZERS | {f"coupled n={n}": scaled(n) for n in (-2, 2, 4)}
    results = fabricated(tmp_path / "many", optimizers=many, seeds=[1])
    assert [axes.get_title() for axes in drawn(draw_clouds(gather_grid(results))).axes] == [
        "standard Adam",
        "Coupled Adam",
    ]


def test_differences_have_the_papers_confidence_bars(tmp_path: Path) -> None:
    results = fabricated(tmp_path, metrics=("loss", "acc"), sizes=GRID_OF_SIZES[:2], with_runs=False)
    figure = drawn(draw_differences(gather_grid(results)))
    results = [result for result in results if result.tokens == 5 * 10**9]  # of the first marker
    assert [axes.get_ylabel() for axes in figure.axes] == [
        f"difference in {METRICS['loss'].symbol} ({NATS})",
        f"difference in {METRICS['acc'].label}",
    ]
    for axes, metric in zip(figure.axes, ("loss", "acc"), strict=True):
        old, new = values(results, "standard", metric), values(results, "coupled", metric)
        threshold = T_95[2] * np.sqrt(old.var(ddof=1) + new.var(ddof=1)) / np.sqrt(3)
        (marker, _, (bar,)) = axes.containers[0]
        assert marker.get_ydata()[0] == pytest.approx(new.mean() - old.mean())
        bottom, top = bar.get_segments()[0][:, 1]
        assert (top - bottom) / 2 == pytest.approx(threshold, rel=1e-5)


def test_only_significant_differences_are_filled(tmp_path: Path) -> None:
    for gain, is_filled in ((0.1, True), (-0.1, True), (0.0001, False)):
        results = read_results(fabricate(tmp_path / str(gain), gain=gain, sizes=GRID_OF_SIZES, with_runs=False))
        marker = drawn(draw_differences(gather_grid(results))).axes[0].containers[0][0]
        assert (marker.get_markerfacecolor() != "none") == is_filled


def test_one_seed_has_no_bar_and_a_missing_accuracy_no_panel(tmp_path: Path) -> None:
    figure = drawn(
        draw_differences(gather_grid(fabricated(tmp_path, seeds=(1,), sizes=GRID_OF_SIZES, with_runs=False)))
    )
    assert len(figure.axes) == 1
    marker, caps, bars = figure.axes[0].containers[0]
    assert not caps
    assert not bars
    assert marker.get_markerfacecolor() == "none"


def test_a_single_point_does_not_make_a_figure(tmp_path: Path, demo: list[Result]) -> None:
    assert draw_differences(gather_grid(demo)) is None
    assert draw_experiments(gather_grid(demo)) is None
    one_f = fabricated(tmp_path, optimizers={**OPTIMIZERS, "sgd f=100": sgd(100)}, with_runs=False)
    assert draw_sgd_loss(gather_grid(one_f)) is None
    one_task = [replace(result, metrics={**result.metrics, "race": 0.2 + 0.01 * result.seed}) for result in demo]
    assert draw_task_differences(gather_grid(one_task)) is None
    both = [replace(result, metrics={**result.metrics, "lambada": 0.3}) for result in one_task]
    assert draw_task_differences(gather_grid(both)) is not None
    grid = fabricated(tmp_path / "grid", sizes=GRID_OF_SIZES, metrics=("loss", "acc"), with_runs=False)
    largest = [
        result if result.model == "355M" else replace(result, metrics={"loss": result.metrics["loss"]})
        for result in grid
    ]
    assert len(drawn(draw_differences(gather_grid(grid))).axes) == 2
    (axes,) = drawn(draw_differences(gather_grid(largest))).axes  # a single accuracy does not make a panel
    assert METRICS["loss"].symbol in axes.get_ylabel()


def test_the_grid_of_sizes_has_the_line_n_is_d_over_20(tmp_path: Path) -> None:
    results = fabricated(tmp_path, sizes=GRID_OF_SIZES, with_runs=False)
    axes = drawn(draw_experiments(gather_grid(results))).axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines) == ["N = 125M", "N = 355M", "N = D/20"]
    assert list(lines["N = 125M"].get_xdata()) == [5 * 10**9, 10**10]
    assert list(lines["N = 355M"].get_ydata()) == [355_000_000]
    np.testing.assert_allclose(lines["N = D/20"].get_xdata(), 20 * np.asarray(lines["N = D/20"].get_ydata()))
    assert axes.get_xscale() == axes.get_yscale() == "log"


def test_models_with_the_same_name_have_separate_legend_entries(tmp_path: Path) -> None:
    sizes = [("30M", 30_000_000, 10**9), ("30M", 49_000_000, 10**9)]
    results = fabricated(tmp_path, sizes=sizes, with_runs=False)
    for draw in (draw_experiments, draw_differences):
        [legend] = drawn(draw(gather_grid(results))).legends
        assert [text.get_text() for text in legend.get_texts()][:2] == ["N = 30M (30M)", "N = 30M (49M)"]


def test_the_loss_over_n_is_the_difference_from_n_0(tmp_path: Path) -> None:
    ns = (-2, -1, 0, 1, 2)
    results = fabricated(tmp_path, optimizers={f"coupled n={n}": scaled(n) for n in ns}, with_runs=False)
    axes = drawn(draw_scale_loss(gather_grid(results))).axes[0]
    curve = next(line for line in axes.lines if len(line.get_xdata()) == len(ns))
    expected = [values(results, f"coupled n={n}").mean() - values(results, "coupled n=0").mean() for n in ns]
    assert list(curve.get_xdata()) == list(ns)
    np.testing.assert_allclose(curve.get_ydata(), expected, atol=1e-12)
    assert len(axes.containers) == len(ns) - 1  # n = 0 is the reference and has no bar


def test_every_measured_metric_is_drawn_over_n_as_the_difference_from_n_0(tmp_path: Path) -> None:
    ns = (-1, 0, 1, 2)
    exponents = {f"coupled n={n}": scaled(n) for n in ns}
    results = fabricated(tmp_path, optimizers=exponents, metrics=("loss", "iso", "kappa"), with_runs=False)
    shown = [axes for axes in drawn(draw_scale_complete(gather_grid(results))).axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == ["loss (↓)", "ISO (↑)", "κ (↑)"]
    curve = next(line for line in shown[2].lines if len(line.get_xdata()) == len(ns))
    itself = values(results, "coupled n=0", "kappa")
    expected = [values(results, name, "kappa").mean() - itself.mean() for name in exponents]
    np.testing.assert_allclose(curve.get_ydata(), expected, atol=1e-12)
    # Bars by App. error: t(0.95, 2) times the propagated deviation over the root of S = 3.
    spread = np.hypot(values(results, "coupled n=-1", "kappa").std(ddof=1), itself.std(ddof=1))
    [bar] = shown[2].containers[0][2][0].get_segments()
    np.testing.assert_allclose((bar[1][1] - bar[0][1]) / 2, 2.919986 * spread / 3**0.5, rtol=1e-5)


def test_studies_without_n_or_f_have_no_figure_for_them(demo: list[Result]) -> None:
    assert draw_scale_loss(gather_grid(demo)) is None
    assert draw_scale_complete(gather_grid(demo)) is None
    assert draw_sgd_loss(gather_grid(demo)) is None


def test_the_best_f_is_marked_and_the_others_are_plain_lines(tmp_path: Path) -> None:
    factors = {f"sgd f={f}": sgd(f) for f in (100, 200, 300)}
    results = fabricated(tmp_path, optimizers={**OPTIMIZERS, **factors}, noise=0.05, with_runs=False)
    axes = drawn(draw_sgd_loss(gather_grid(results))).axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    best = min(factors, key=lambda name: values(results, name).mean())
    assert lines["best f"].get_xdata()[0] == factors[best]["sgd_factor"]
    assert lines["Coupled Adam"].get_ydata()[0] == pytest.approx(values(results, "coupled").mean())
    assert lines["standard Adam"].get_ydata()[0] == pytest.approx(values(results, "standard").mean())


def test_curves_are_means_over_seeds_in_a_band_of_all_seeds(demo: list[Result]) -> None:
    axes = drawn(draw_training_loss(gather_grid(demo))).axes[0]
    curves = []
    for result in demo:
        if result.optimizer == "coupled":
            rows = [json.loads(line) for line in (result.run_folder / "metrics.jsonl").read_text().splitlines()]
            curves.append([row["loss"] for row in rows if row["kind"] == "train"])
    expected = np.array(curves)  # (S, points)
    line = next(line for line in axes.lines if line.get_label() == "Coupled Adam")
    np.testing.assert_allclose(line.get_ydata(), expected.mean(0))
    assert list(line.get_xdata()) == list(range(10, 301, 10))
    band = axes.collections[1].get_paths()[0].vertices[:, 1]
    assert band.min() == pytest.approx(expected.min())
    assert band.max() == pytest.approx(expected.max())


def test_ratio_and_isotropy_over_training_compare_standard_with_coupled(demo: list[Result]) -> None:
    for draw, last in ((draw_mean_ratio, (0.85, 0.02)), (draw_isotropy, (0.6, 0.97))):
        axes = drawn(draw(gather_grid(demo))).axes[0]
        ends = {line.get_label(): line.get_ydata()[-1] for line in axes.lines}
        assert ends == pytest.approx({"standard Adam": last[0], "Coupled Adam": last[1]})


def test_long_curves_are_thinned_to_the_means_of_neighbours(tmp_path: Path) -> None:
    [result] = fabricated(tmp_path, optimizers={"coupled": COUPLED}, seeds=(1,))
    rows = [{"kind": "train", "step": step, "loss": float(step)} for step in range(1, 1002)]
    (result.run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = mean_curve([result], "train", "loss", most=100)
    assert curve is not None
    assert len(curve.steps) == 91  # 1001 values in groups of eleven
    assert curve.steps[0] == curve.mean[0] == 6.0
    assert curve.steps[-1] == 991 + 5


def test_a_colour_belongs_to_an_optimizer_in_every_figure(demo: list[Result]) -> None:
    colours: dict[str, set[str]] = {"standard Adam": set(), "Coupled Adam": set()}
    for draw in (draw_training_loss, draw_mean_ratio, draw_spectra):
        for line in drawn(draw(gather_grid(demo))).axes[0].lines:
            colours[line.get_label()].add(to_hex(line.get_color()))
    for draw in (draw_clouds, draw_norm_and_frequency):
        for axes in drawn(draw(gather_grid(demo))).axes:
            colours[axes.get_title()].add(to_hex(axes.collections[0].get_facecolor()[0]))
    assert [len(found) for found in colours.values()] == [1, 1]
    assert colours["standard Adam"] != colours["Coupled Adam"]


def test_singular_values_are_relative_to_the_largest(demo: list[Result]) -> None:
    line = next(
        line for line in drawn(draw_spectra(gather_grid(demo))).axes[0].lines if line.get_label() == "standard Adam"
    )
    spectra = [
        np.load(result.run_folder / "embeddings.npz")["singular_values"]
        for result in demo
        if result.optimizer == "standard"
    ]
    expected = np.mean([np.sort(spectrum)[::-1] / spectrum.max() for spectrum in spectra], axis=0)
    np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-5)


def test_norms_are_drawn_over_log_frequency(demo: list[Result]) -> None:
    axes = drawn(draw_norm_and_frequency(gather_grid(demo))).axes[1]
    arrays = np.load(run_of(demo, "coupled") / "embeddings.npz")
    np.testing.assert_allclose(axes.collections[0].get_offsets().T, [arrays["log10_frequency"], arrays["norm"]])


@pytest.mark.parametrize("damage", ["missing", "cut", "text"])
def test_a_damaged_file_removes_only_its_own_figures(tmp_path: Path, damage: str) -> None:
    results = fabricated(tmp_path, sizes=GRID_OF_SIZES[:2])
    for result in results:
        for name in ("embeddings.npz", "metrics.jsonl"):
            path = result.run_folder / name
            if damage == "missing":
                path.unlink()
            else:
                path.write_bytes(
                    path.read_bytes()[: 2**9] if damage == "cut" and name != "metrics.jsonl" else b"no\nno\n"
                )
    left = {"primary_differences", "results", "experiments"}
    assert {figure.name for figure in draw_figures(gather_grid(results))} == left


def test_a_run_without_curves_does_not_remove_those_of_others(tmp_path: Path) -> None:
    results = fabricated(tmp_path)
    (results[0].run_folder / "metrics.jsonl").unlink()
    assert [line.get_label() for line in drawn(draw_training_loss(gather_grid(results))).axes[0].lines] == [
        "standard Adam",
        "Coupled Adam",
    ]


def test_untied_models_have_pictures_of_the_input_table_too(tmp_path: Path) -> None:
    names = {figure.name for figure in draw_figures(gather_grid(fabricated(tmp_path, untied=True, seeds=(1,))))}
    assert {"embedding_cloud_input", "norm_frequency_input", "singular_values_input"} <= names
    assert "mean_ratio_over_training_input" in names


def test_each_size_has_its_own_panel(tmp_path: Path) -> None:
    figure = drawn(draw_training_loss(gather_grid(fabricated(tmp_path, sizes=GRID_OF_SIZES, seeds=(1,)))))
    titles = [axes.get_title() for axes in figure.axes if axes.get_visible()]
    assert titles == [f"N = {n}, D = {d}" for n, d in (("125M", "5B"), ("125M", "10B"), ("355M", "10B"))]


def test_files_are_reproducible_and_complete(demo: list[Result], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "ablation_sgd.svg").write_text("of an earlier report")
    for folder in ("a", "b"):
        write_figures(draw_figures(gather_grid(demo)), tmp_path / folder)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert "ablation_sgd.svg" not in names
    assert "embedding_cloud.pdf" in names
    for name in names:
        content = (tmp_path / "a" / name).read_bytes()
        assert content == (tmp_path / "b" / name).read_bytes()
        if name.endswith(".pdf"):
            assert content.startswith(b"%PDF")
        else:
            ET.fromstring(content)
            assert b"currentColor" not in content
            assert b"var(" not in content
            assert b'fill="#ffffff"' in content


def test_names_are_never_interpreted_as_markup(tmp_path: Path) -> None:
    name = "<script>alert(1)</script> $\\frac{$ & {x}"
    results = fabricated(tmp_path, optimizers={"standard": STANDARD, name: COUPLED}, seeds=(1,))
    for figure in draw_figures(gather_grid(results)):
        ET.fromstring(figure.svg)
        assert "<script" not in figure.svg
    assert any(axes.get_title() == name for axes in drawn(draw_clouds(gather_grid(results))).axes)
