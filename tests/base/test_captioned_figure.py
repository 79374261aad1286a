"""The style of all figures: page colours in the page, fixed colours in files, and text stays text."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from coupled_adam.base.captioned_figure import (
    CaptionedFigure,
    captioned_figure,
    figure_style,
    powers_of_ten,
    write_captioned_figures,
)


def drawn(name: str, lowest: float = 1e-3) -> CaptionedFigure:
    with figure_style():
        figure = Figure(figsize=(3, 2), layout="constrained")
        axes = figure.add_subplot()
        axes.plot([1, 100], [lowest, 1], label="$\\frac{$")
        axes.set(xscale="log", yscale="log")
        axes.legend()
        powers_of_ten(axes)
        return captioned_figure(name, "Title", "Caption.", figure)


def texts(svg: str) -> set[str | None]:
    return {element.text for element in ET.fromstring(svg).iter() if element.tag.endswith("text")}


def test_names_and_powers_of_ten_are_text() -> None:
    shown = texts(drawn("plain").svg)
    assert {"$\\frac{$", "10⁰", "10²", "10⁻³"} <= shown
    assert not any("mathdefault" in str(text) for text in shown)


def test_an_axis_of_less_than_a_power_of_ten_has_more_than_one_label() -> None:
    labels = texts(drawn("short", lowest=0.5).svg)
    assert {"0.5", "0.6"} <= labels


def test_ids_start_with_the_name_so_that_figures_of_one_page_do_not_clash() -> None:
    def ids(name: str) -> set[str]:
        return {value for element in ET.fromstring(drawn(name).svg).iter() if (value := element.get("id"))}

    assert ids("one")
    assert not ids("one") & ids("two")


def test_a_figure_uses_the_colours_of_the_page_and_a_file_its_own(tmp_path: Path) -> None:
    figure = drawn("colours")
    assert "currentColor" in figure.svg
    assert "var(--line)" in figure.svg
    (tmp_path / "old.svg").touch()
    (tmp_path / "mine.svg").touch()
    write_captioned_figures([figure], tmp_path, ["colours", "old"])
    assert {path.name for path in tmp_path.iterdir()} == {"colours.svg", "colours.pdf", "mine.svg"}
    written = (tmp_path / "colours.svg").read_text()
    assert "currentColor" not in written
    assert "var(" not in written
    assert (tmp_path / "colours.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("name", ["a", "b"])
def test_svg_output_is_reproducible(name: str) -> None:
    assert drawn(name).svg == drawn(name).svg
