"""The demo's verdict, chart, page and file."""

import itertools
import math
import re
from html.parser import HTMLParser

import pytest

from coupled_adam.demo.chart import line_chart, ticks
from coupled_adam.demo.comparison import Outcome, Record
from coupled_adam.demo.report import render_report
from coupled_adam.demo.summary import summary_rows, verdict

VOID_ELEMENTS = {"meta", "br", "hr", "img", "input", "link"}


def outcome(name: str, *, loss: float, ratio: float, state_bytes: int = 1000) -> Outcome:
    return Outcome(name, [Record(0, 8.0, 0.01), Record(10, loss + 0.1, ratio)], loss, state_bytes)


class Page(HTMLParser):
    """Checks that elements nest, and collects attributes and visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


ADAMW = outcome("AdamW", loss=4.9, ratio=0.9, state_bytes=1000)
COUPLED = outcome("CoupledAdamW", loss=4.8, ratio=0.01, state_bytes=640)


def test_verdict_says_what_is_better() -> None:
    assert verdict(ADAMW, COUPLED) == (
        "Against AdamW, CoupledAdamW ended with a lower mean-embedding ratio (better: 0.010 against 0.900), "
        "a lower validation loss (better: 4.800 against 4.900) and 36 % less optimizer state."
    )


def test_verdict_says_when_coupled_is_worse() -> None:
    worse = outcome("CoupledAdamW", loss=5.0, ratio=0.95, state_bytes=1500)
    assert verdict(ADAMW, worse) == (
        "Against AdamW, CoupledAdamW ended with a higher mean-embedding ratio (worse: 0.950 against 0.900), "
        "a higher validation loss (worse: 5.000 against 4.900) and 50 % more optimizer state."
    )


def test_verdict_sees_no_difference_that_the_table_does_not_show() -> None:
    alike = outcome("CoupledAdamW", loss=4.9004, ratio=0.8996)
    assert "the same mean-embedding ratio (0.900), the same validation loss (4.900)" in verdict(ADAMW, alike)


def test_verdict_is_withheld_when_a_training_diverged() -> None:
    sentence = verdict(outcome("AdamW", loss=math.nan, ratio=0.5), COUPLED)
    assert sentence == "No verdict: the validation loss with AdamW is not finite."


def test_page_is_well_formed_and_loads_nothing() -> None:
    html = render_report(ADAMW, COUPLED, {"command": "coupled-adam demo"})
    page = Page(html)
    assert not [name for name, _ in page.attributes if name in {"src", "href", "srcset", "action", "data"}]
    assert not re.search(r"https?:|url\(|@import|<script", html)
    assert "prefers-color-scheme: dark" in html
    assert ("name", "viewport") in page.attributes
    for row in summary_rows(ADAMW, COUPLED):
        assert all(cell in page.text for cell in row)
    assert verdict(ADAMW, COUPLED) in page.text
    assert html.count("<polyline") == 4


def test_page_escapes_what_it_is_given() -> None:
    evil = '<script>alert("&")</script>'
    html = render_report(outcome(evil, loss=4.9, ratio=0.9), COUPLED, {evil: evil})
    assert "<script" not in html
    assert Page(html).text.count(evil) == 4  # table head, legend, name and value of the fact


def test_chart_puts_values_where_they_belong_and_leaves_out_what_is_not_finite() -> None:
    chart = line_chart("t", {"adamw": [(0, 0.0), (5, math.inf), (10, 1.0)], "coupled": [(0, math.nan)]}, y_start=0.0)
    line, empty = re.findall(r'<polyline class="\w+" points="([^"]*)"', chart)
    (x0, y0), (x1, y1) = ([float(number) for number in point.split(",")] for point in line.split())
    assert x0 < x1, "time runs to the right"
    assert y0 > y1, "large values are high, where y is small"
    assert empty == ""


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 0.905), (4.7, 8.3), (0.0, 0.0), (5.0, 5.0), (0.013, 0.0131), (0, 1e6), (0, 1), (-3, 12)]
)
def test_ticks_enclose_the_values_with_few_even_steps(low: float, high: float) -> None:
    found = ticks(low, high)
    distances = [b - a for a, b in itertools.pairwise(found)]
    assert 2 <= len(found) <= 7
    assert found[0] <= low <= high <= found[-1]
    assert distances == pytest.approx([distances[0]] * len(distances))
