"""A line chart as an SVG element, to be put into a page that has the colours.

It is drawn about as large as it is shown, on a phone and beside another one on a desk, so that its letters keep
their size.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 36, 16, 12, 42  # margins around the plot


def line_chart(title: str, series: Mapping[str, Sequence[tuple[float, float]]], y_start: float | None = None) -> str:
    """An SVG line chart over training steps.

    Args:
        title: what is drawn, read out by screen readers.
        series: points (step, value) by the CSS class of their line; values that are not finite are left out.
        y_start: where the vertical axis begins; near the smallest value if None.
    """
    finite = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in series.items()}
    xs = [x for points in finite.values() for x, _ in points] or [0.0]
    ys = [y for points in finite.values() for _, y in points] or [0.0]
    x_ticks = ticks(0.0, max(xs))
    y_ticks = ticks(min(ys) if y_start is None else y_start, max(ys))
    x_end = max(xs) or 1.0
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def place_x(x: float) -> float:
        return LEFT + x / x_end * (WIDTH - LEFT - RIGHT)

    def place_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for y in y_ticks:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place_y(y):.1f}" y2="{place_y(y):.1f}"/>'
            f'<text x="{LEFT - 8}" y="{place_y(y) + 4:.1f}" text-anchor="end">{y:g}</text>'
        )
    for x in x_ticks:
        if x <= x_end:
            parts.append(f'<text x="{place_x(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">training step</text>')
    for name, points in finite.items():
        places = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in points)
        parts.append(f'<polyline class="{escape(name)}" points="{places}"/>')
    return "\n".join([*parts, "</svg>"])


def ticks(low: float, high: float) -> list[float]:
    """Round numbers, at most seven, at least two, that enclose `low` and `high`.

    Example:
        >>> ticks(0.0, 0.905), ticks(4.7, 8.3)
        ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    """
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span))
    distance = next(power * factor for factor in (0.2, 0.5, 1.0, 2.0) if span <= 5 * power * factor)
    first, last = math.floor(low / distance), math.ceil(high / distance)
    return [round(number * distance, 12) for number in range(first, max(last, first + 1) + 1)]
