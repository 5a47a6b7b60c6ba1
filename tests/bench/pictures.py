"""The report's pictures, as SVG: bars and lines, drawn with nothing but text."""

from __future__ import annotations

import html
import math
import pathlib
from typing import Sequence

WIDTH = 860
LEFT, RIGHT = 250, 70  # of bars: room for labels, and for figures behind them
ROW, GAP = 22, 8
COLOURS = ("#2b6cb0", "#dd6b20", "#38a169", "#805ad5", "#718096", "#d53f8c", "#319795", "#b7791f")
GREY = "#a0aec0"


class Canvas:
    def __init__(self, title: str, height: int) -> None:
        self.height = height
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        ]
        self.text(12, 22, title, size=15)

    def text(self, x: float, y: float, text: str, anchor: str = "start", size: int = 12, colour: str = "#1a202c") -> None:
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">'
                           f"{html.escape(text)}</text>")  # fmt: skip

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self._parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}" fill="{colour}"/>')

    def line(self, points: Sequence[tuple[float, float]], colour: str, dashed: bool = False, width: float = 1.5) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>')

    def dot(self, x: float, y: float, colour: str) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')

    def legend(self, names: Sequence[str], y: float) -> None:
        x = 14.0
        for name, colour in zip(names, COLOURS):
            self.box(x, y - 10, 12, 12, colour)
            self.text(x + 17, y, name)
            x += 30 + 6.4 * len(name)

    def save(self, file: pathlib.Path) -> None:
        file.write_text("\n".join([*self._parts, "</svg>"]) + "\n")


def _round_up(value: float) -> float:
    """To 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value)


def bars(file: pathlib.Path, title: str, rows: Sequence[tuple[str, Sequence[float], str]], parts: Sequence[str],
         unit: str, marks: Sequence[float | None] = ()) -> None:  # fmt: skip
    """A stacked bar for each row (label, parts, what is written behind it), and a stroke at each row's mark."""
    legend = 24 if len(parts) > 1 else 0
    canvas = Canvas(title, 60 + legend + len(rows) * (ROW + GAP))
    if legend:
        canvas.legend(parts, 46)
    most = max([sum(values) for _, values, _ in rows] + [mark for mark in marks if mark])
    scale = (WIDTH - LEFT - RIGHT) / most
    for i, (label, values, behind) in enumerate(rows):
        y = 40 + legend + i * (ROW + GAP)
        canvas.text(LEFT - 8, y + 15, label, "end")
        x = float(LEFT)
        for value, colour in zip(values, COLOURS):
            canvas.box(x, y, value * scale, ROW, colour)
            x += value * scale
        canvas.text(x + 6, y + 15, behind)
        if i < len(marks) and (mark := marks[i]) is not None:
            canvas.line([(LEFT + mark * scale, y - 3), (LEFT + mark * scale, y + ROW + 3)], "#1a202c", width=2)
    canvas.text(WIDTH - 12, 22, unit, "end", colour="#4a5568")
    canvas.save(file)


class Chart:
    """Lines over an x axis; several may lie one below the other in a picture."""

    HEIGHT = 190

    def __init__(self, canvas: Canvas, top: float, title: str, x_range: tuple[float, float], y_range: tuple[float, float],
                 height: float = HEIGHT) -> None:  # fmt: skip
        x_least, x_most = x_range
        self._canvas, self._top, self._x_least, self._x_most, self._y = canvas, top, x_least, x_most, y_range
        self._left, self._right, self._bottom = 62, WIDTH - 32, top + height - 36
        canvas.text(self._left, top + 4, title, colour="#4a5568")
        for i in range(5):
            value = y_range[0] + (y_range[1] - y_range[0]) * i / 4
            canvas.line([self._at(x_least, value), self._at(x_most, value)], "#e2e8f0", width=1)
            canvas.text(self._left - 6, self._at(x_least, value)[1] + 4, f"{value:.3g}", "end", colour="#4a5568")

    def _at(self, x: float, y: float) -> tuple[float, float]:
        y = min(max(y, self._y[0]), self._y[1])
        across = (x - self._x_least) / (self._x_most - self._x_least)
        up = (y - self._y[0]) / (self._y[1] - self._y[0])
        return self._left + across * (self._right - self._left), self._bottom - up * (self._bottom - self._top - 14)

    def tick(self, x: float, text: str) -> None:
        self._canvas.text(self._at(x, self._y[0])[0], self._bottom + 16, text, "middle", colour="#4a5568")

    def line(self, points: Sequence[tuple[float, float]], colour: str, dashed: bool = False, dots: bool = False) -> None:
        placed = [self._at(x, y) for x, y in points]
        self._canvas.line(placed, colour, dashed)
        if dots:
            for x, y in placed:
                self._canvas.dot(x, y, colour)


def timelines(file: pathlib.Path, title: str, charts: Sequence[tuple[str, list[list[float]], tuple[float, float]]], seconds: float) -> None:
    """Bytes a second read and written (samples: time, read, written) with both limits, a chart each."""
    canvas = Canvas(title, 56 + len(charts) * Chart.HEIGHT)
    canvas.legend(("read", "written", "(dashed: limits), MB/s over seconds"), 46)
    for i, (name, samples, limits) in enumerate(charts):
        most = _round_up(max(limits) * 1.05 / 1e6)
        chart = Chart(canvas, 66 + i * Chart.HEIGHT, name, (0, seconds), (0, most))
        for second in range(0, int(seconds) + 1, max(1, int(seconds / 10))):
            chart.tick(second, str(second))
        for direction, limit in enumerate(limits):
            chart.line([(0, limit / 1e6), (seconds, limit / 1e6)], COLOURS[direction], dashed=True)
            chart.line([(s[0], s[1 + direction] / 1e6) for s in _smoothed(samples) if s[0] <= seconds], COLOURS[direction])
    canvas.save(file)


def _smoothed(samples: list[list[float]], width: int = 5) -> list[list[float]]:
    """Means of so many samples: throttling lets bytes through in slices of a tenth of a second."""
    groups = [samples[i : i + width] for i in range(0, len(samples) - width + 1, width)]
    return [[group[0][0], *(sum(s[k] for s in group) / width for k in (1, 2))] for group in groups]


def lines(file: pathlib.Path, title: str, series: dict[str, list[tuple[float, float]]], y_range: tuple[float, float],
          ticks: Sequence[tuple[float, str]], x_name: str, dashed: dict[str, list[tuple[float, float]]] | None = None) -> None:  # fmt: skip
    canvas = Canvas(title, 70 + 2 * Chart.HEIGHT)
    canvas.legend(list(series), 46)
    xs = [x for x, _ in ticks]
    chart = Chart(canvas, 66, x_name, (min(xs), max(xs)), y_range, 2 * Chart.HEIGHT)
    for x, text in ticks:
        chart.tick(x, text)
    for points, colour in zip(series.values(), COLOURS):
        chart.line(points, colour, dots=True)
    for points in (dashed or {}).values():
        chart.line(points, GREY, dashed=True)
    canvas.save(file)
