"""Loss and accuracy between two models as an SVG, written by hand: a picture needs no plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT, TOP, BOTTOM, PANEL = 760, 330, 64, 48, 300
NAMES = {"none": "no alignment", "rotation": "level rotation", "full": "level full"}
COLOURS = {"none": "#8a8f98", "rotation": "#d9822b", "full": "#1f6feb"}

Curves = Sequence[Mapping[str, Any]]


def picture(curves: Curves) -> str:
    """Two panels over t: one faint line per pair, a bold one for their mean. `curves` as in demo.json."""
    worst = max(value for pair in curves for name in NAMES for value in pair["loss"][name])
    step = next(s for s in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if worst / s <= 6 or s == 5.0)
    ticks = [step * k for k in range(int(worst / step) + 2)]
    left = _panel(curves, "loss", "test loss", 54, ticks, lambda v: f"{v:g}")
    right = _panel(curves, "accuracy", "test accuracy", 438, [0, 0.2, 0.4, 0.6, 0.8, 1], lambda v: f"{100 * v:.0f} %")
    what = "one pair" if len(curves) == 1 else f"{len(curves)} pairs and their mean"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="Loss and accuracy on the straight line between two models">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="54" y="22" font-size="14" fill="#1b1f24">Along the line from model A to model B: {what}</text>',
        *_legend(), *left, *right, "</svg>", "",
    ])  # fmt: skip


def _legend() -> list[str]:
    lines, x = [], 54
    for name, label in NAMES.items():
        lines.append(f'<path d="M{x} 40h22" stroke="{COLOURS[name]}" stroke-width="3"/>')
        lines.append(f'<text x="{x + 28}" y="44" fill="#1b1f24">{label}</text>')
        x += 50 + 7 * len(label)
    return lines


def _panel(curves: Curves, key: str, title: str, left: int, ticks: Sequence[float], say: Any) -> list[str]:
    height, high = HEIGHT - TOP - BOTTOM, ticks[-1]

    def x(t: float) -> float:
        return left + PANEL * t

    def y(value: float) -> float:
        return TOP + height * (1 - value / high)

    def line(ts: Sequence[float], values: Sequence[float], name: str, width: float, opacity: float) -> str:
        points = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in zip(ts, values, strict=True))
        return (
            f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="{width}" '
            f'stroke-opacity="{opacity}" stroke-linejoin="round"/>'
        )

    lines = []
    for tick in ticks:
        lines.append(f'<path d="M{left} {y(tick):.1f}h{PANEL}" stroke="#e3e6ea"/>')
        lines.append(f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end" fill="#57606a">{say(tick)}</text>')
    for t, down, label in ((0, 30, "A"), (0.5, 30, "halfway"), (1, 30, "B"), (0.5, 10, title)):
        lines.append(f'<text x="{x(t):.1f}" y="{HEIGHT - down}" text-anchor="middle" fill="#57606a">{label}</text>')
    for name in NAMES:
        if len(curves) > 1:
            lines += [line(pair["t"], pair[key][name], name, 1, 0.35) for pair in curves]
        means = [sum(column) / len(curves) for column in zip(*(pair[key][name] for pair in curves), strict=True)]
        lines.append(line(curves[0]["t"], means, name, 3, 1))
    return lines
