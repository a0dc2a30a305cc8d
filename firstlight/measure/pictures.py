"""A self-contained HTML page of tables and plots (inline SVG), and the same plots as a PNG.

Knows titles, labels and numbers; knows nothing of servers. The page loads nothing from anywhere.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from firstlight.errors import ConfigError

__all__ = ["Bars", "Lines", "Table", "render_page", "write_png"]

_COLOURS = ("#2f6fde", "#d9622b", "#2a9d5c", "#8a4fc7", "#b8860b", "#c2185b", "#0e8a8a", "#666666")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 300, 64, 44, 14
_STYLE = """
:root{color-scheme:light dark;--fg:#1c1e21;--bg:#fff;--line:#d5d8dc}
@media(prefers-color-scheme:dark){:root{--fg:#e6e8ea;--bg:#15171a;--line:#3a3e44}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--fg);background:var(--bg);max-width:1100px;margin:2em auto;
 padding:0 1em}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:1em 0;display:block;overflow-x:auto}
th,td{padding:.3em .8em;border-bottom:1px solid var(--line);text-align:right}
th:first-child,td:first-child{text-align:left}
figure{margin:1.5em 0}svg{max-width:100%;height:auto}svg text{fill:var(--fg);font:12px system-ui,sans-serif}
.axis{stroke:var(--line)}.note{opacity:.75}figcaption{font-weight:600}
"""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a header; the first column names the row."""

    title: str
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Lines:
    """Curves by name, each a list of (x, y) in ascending x."""

    title: str
    x_label: str
    y_label: str
    curves: dict[str, list[tuple[float, float]]]
    is_log: bool = False
    """Whether x is drawn by its logarithm; points at 0 and below are left out."""
    dots: frozenset[str] = frozenset()
    """Curves of which only the points are drawn."""


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar per label; 0 and above."""

    title: str
    y_label: str
    values: dict[str, float]


def render_page(title: str, note: str, parts: Sequence[Table | Lines | Bars]) -> str:
    """The page as HTML: title, the conditions under it, then the parts in order."""
    body = "".join(_table(part) if isinstance(part, Table) else _figure(part) for part in parts)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>"
        f'<p class="note">{html.escape(note)}</p>{body}</html>\n'
    )


def _table(table: Table) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    rows = line(table.rows[0], "th") + "".join(line(row, "td") for row in table.rows[1:])
    return f"<h2>{html.escape(table.title)}</h2><table>{rows}</table>"


def _figure(part: Lines | Bars) -> str:
    inner = _bars(part) if isinstance(part, Bars) else _lines(part)
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{html.escape(part.title)}">'
    return f"<figure><figcaption>{html.escape(part.title)}</figcaption>{head}{inner}</svg></figure>"


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'


def _ticks(top: float) -> list[float]:
    """Four to six round steps from 0 to at least `top`."""
    step = 10 ** math.floor(math.log10(top / 4)) if top > 0 else 1.0
    step *= next((m for m in (1, 2, 2.5, 5, 10) if top / (step * m) <= 5), 10)
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)] if top > 0 else [0.0, 1.0]


def _grid(top_y: float, y_label: str) -> tuple[str, float]:
    ticks = _ticks(top_y)
    out = []
    for tick in ticks:
        y = _y(tick, ticks[-1])
        out.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(_text(_LEFT - 6, y + 4, f"{tick:g}", "end"))
    middle = (_HEIGHT - _BOTTOM + _TOP) / 2
    turn = (
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">{html.escape(y_label)}</text>'
    )
    return "".join(out) + turn, ticks[-1]


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / top


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _halves(label: str) -> list[str]:
    """A label in at most two lines, broken at its last space."""
    return label.rsplit(" ", 1)


def _bars(part: Bars) -> str:
    grid, top = _grid(max(part.values.values(), default=1.0), part.y_label)
    width = (_WIDTH - _LEFT - 10) / max(1, len(part.values))
    out = [grid]
    for at, (label, value) in enumerate(part.values.items()):
        x, y = _LEFT + width * (at + 0.5), _y(value, top)
        colour = _COLOURS[at % len(_COLOURS)]
        height = _HEIGHT - _BOTTOM - y
        out.append(f'<rect x="{x - width * 0.35:.1f}" y="{y:.1f}" width="{width * 0.7:.1f}" height="{height:.1f}" ')
        out.append(f'fill="{colour}"/>' + _text(x, y - 3, _number(value)))
        out += [_text(x, _HEIGHT - _BOTTOM + 15 + 13 * i, word) for i, word in enumerate(_halves(label))]
    return "".join(out)


def _shown(part: Lines) -> dict[str, list[tuple[float, float]]]:
    return {name: [(x, y) for x, y in curve if x > 0 or not part.is_log] for name, curve in part.curves.items()}


def _x_axis(xs: list[float], is_log: bool) -> tuple[list[float], Callable[[float], float]]:
    """Where ticks stand, and where in 0..1 an x lies between the first and the last of them."""
    if not is_log:
        ticks = _ticks(max(xs))
        return ticks, lambda x: x / ticks[-1]
    low, high = math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs)))
    span = max(1, high - low)
    return [10.0**e for e in range(low, low + span + 1)], lambda x: (math.log10(x) - low) / span


def _lines(part: Lines) -> str:
    curves = _shown(part)
    points = [point for curve in curves.values() for point in curve] or [(1.0, 1.0)]
    grid, top = _grid(max(y for _, y in points), part.y_label)
    x_ticks, place = _x_axis([x for x, _ in points], part.is_log)
    scale = _WIDTH - _LEFT - 20
    out = [grid, *(_text(_LEFT + place(x) * scale, _HEIGHT - _BOTTOM + 16, f"{x:g}") for x in x_ticks)]
    out.append(_text(_WIDTH / 2, _HEIGHT - 6, part.x_label))
    for at, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[at % len(_COLOURS)]
        places = [(_LEFT + place(x) * scale, _y(y, top)) for x, y in curve]
        if name in part.dots:
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>' for x, y in places]
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            out.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        out.append(
            f'<rect x="{_WIDTH - 160}" y="{_HEIGHT - _BOTTOM - 14 - 16 * at}" width="10" height="10" fill="{colour}"/>'
        )
        out.append(_text(_WIDTH - 145, _HEIGHT - _BOTTOM - 5 - 16 * at, name, "start"))
    return "".join(out)


def write_png(path: str, title: str, parts: Sequence[Table | Lines | Bars]) -> None:
    """The plots side by side in one PNG. Raises ConfigError where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a PNG needs matplotlib", hint="pip install 'firstlight[bench]', or ask for --html") from None
    plots = [part for part in parts if not isinstance(part, Table)]
    columns = 2 if len(plots) > 1 else 1
    rows = math.ceil(len(plots) / columns)
    figure = Figure(figsize=(7 * columns, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for at, part in enumerate(plots):
        axes = figure.add_subplot(rows, columns, at + 1)
        axes.set_title(part.title, fontsize=10)
        axes.set_ylabel(part.y_label)
        if isinstance(part, Bars):
            labels = ["\n".join(_halves(label)) for label in part.values]
            drawn = axes.bar(labels, list(part.values.values()), color=_COLOURS[: len(labels)])
            axes.bar_label(drawn, fmt=_number, fontsize=8)
            axes.tick_params(axis="x", labelsize=7)
        else:
            for (name, curve), colour in zip(_shown(part).items(), itertools.cycle(_COLOURS), strict=False):
                style = "o" if name in part.dots else "-"
                axes.plot([x for x, _ in curve], [y for _, y in curve], style, label=name, color=colour)
            if part.is_log:
                axes.set_xscale("log")
            axes.set_xlabel(part.x_label)
            axes.legend(fontsize=8)
        axes.set_ylim(bottom=0)
    figure.savefig(Path(path), format="png", dpi=110)
