"""Draw the pictures of docs/symmetry.md: small examples with real numbers, as SVG.

    python examples/symmetry_pictures.py docs/images/symmetry

Every picture stands on a light card, so that it reads the same on a light and on a dark page. The numbers are drawn
from fixed seeds: the same files come out every time, and a test compares them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from isomerge.alignment.solvers.assignment import assign
from isomerge.alignment.solvers.scale import balance

INK, FAINT, CARD = "#1b1f24", "#8a8f98", "#ffffff"
COLOURS = ("#1f6feb", "#d9822b", "#2f7d4f", "#8250df", "#bc4c00", "#0b7285")


def text(x: float, y: float, words: str, *, size: int = 13, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = FAINT, width: float = 1.5) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:g}"/>'


def dot(x: float, y: float, colour: str, radius: float = 11, label: str = "") -> str:
    made = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}"/>'
    return made + (text(x, y + 4, label, size=11, colour=CARD) if label else "")


def arrow(x: float, y: float, dx: float, dy: float, colour: str, label: str) -> str:
    """From (x, y), with a head, and a label beyond the tip."""
    length = float(np.hypot(dx, dy))
    ux, uy = dx / length, dy / length
    tip, left, right = (x + dx, y + dy), (-uy, ux), (uy, -ux)
    corners = [tip, *((tip[0] - 9 * ux + 4 * n[0], tip[1] - 9 * uy + 4 * n[1]) for n in (left, right))]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
    made = line(x, y, tip[0] - 6 * ux, tip[1] - 6 * uy, colour, 2.5) + f'<polygon points="{points}" fill="{colour}"/>'
    return made + text(tip[0] + 14 * ux, tip[1] + 14 * uy + 4, label, colour=colour)


def card(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" role="img">'
    )
    back = f'<rect width="{width}" height="{height}" rx="8" fill="{CARD}"/>'
    return "\n".join([head, f"<title>{title}</title>", back, *parts, "</svg>", ""])


def network(left: float, order: Sequence[int], caption: str) -> list[str]:
    """Inputs, hidden units in some order, outputs; a unit keeps its colour and takes its lines along."""
    ends, tops = (70, 130), (50, 100, 150)
    parts = [text(left + 95, 190, caption)]
    for place, unit in enumerate(order):
        for y in ends:
            parts.append(line(left + 20, y, left + 95, tops[place], COLOURS[unit], 1 + unit))
            parts.append(line(left + 95, tops[place], left + 170, y, COLOURS[unit], 3 - unit))
    parts += [dot(left + x, y, FAINT) for x in (20, 170) for y in ends]
    return parts + [dot(left + 95, tops[p], COLOURS[unit], label=str(unit + 1)) for p, unit in enumerate(order)]


def permutation() -> str:
    parts = network(20, (0, 1, 2), "as stored") + network(260, (2, 0, 1), "another order, the same function")
    return card(480, 210, "Hidden units in two orders: every unit keeps its incoming and outgoing weights", parts)


def shading(values: np.ndarray, left: float, caption: str) -> list[str]:
    cell, largest = 150 / len(values), np.abs(values).max()
    cells = [
        f'<rect x="{left + cell * j:.1f}" y="{20 + cell * i:.1f}" width="{cell:.1f}" height="{cell:.1f}" '
        f'fill="{COLOURS[0]}" fill-opacity="{max(value, 0) / largest:.2f}"/>'
        for i, row in enumerate(values) for j, value in enumerate(row)
    ]  # fmt: skip
    frame = f'<rect x="{left:g}" y="20" width="150" height="150" fill="none" stroke="{FAINT}"/>'
    return [*cells, frame, text(left + 75, 192, caption)]


def assignment() -> str:
    """Twelve units of a layer A, and of a layer B that is A in another order with noise."""
    draw = np.random.default_rng(0)
    a = draw.standard_normal((12, 30))
    b = a[draw.permutation(12)] + 0.6 * draw.standard_normal((12, 30))
    alike = b @ a.T
    order = assign(torch.tensor(alike)).numpy()
    parts = shading(alike, 30, "B as stored") + shading(b[order] @ a.T, 260, "B in the order found")
    return card(440, 212, "How alike the units of B (rows) and of A (columns) are, before and after assignment", parts)


def invertible() -> str:
    """One query and one key, seen in two bases: the arrows change, the score does not."""
    q, k = np.array([1.2, 0.4]), np.array([0.5, 1.1])
    s = np.array([[1.1, -0.3], [0.5, 0.7]])
    moved = s @ q, np.linalg.inv(s).T @ k
    parts = []
    for left, (one, two), names in ((110, (q, k), ("q", "k")), (330, moved, ("S q", "S⁻ᵀ k"))):
        parts += [line(left - 80, 150, left + 90, 150), line(left, 40, left, 170)]
        for vector, colour, name in ((one, COLOURS[0], names[0]), (two, COLOURS[1], names[1])):
            parts.append(arrow(left, 150, 65 * vector[0], -65 * vector[1], colour, name))
        parts.append(text(left, 196, f"score {one @ two:.2f}"))
    return card(450, 212, "A query and a key in two bases have the same score", parts)


def balanced() -> str:
    """The two factors of a head as ellipses: what remains free between balanced factors is a rotation."""
    draw = np.random.default_rng(3)
    q, k = draw.standard_normal((2, 6)) * [[1.8], [0.5]], draw.standard_normal((2, 6)) * [[0.4], [1.0]]
    s = balance(torch.tensor(q)[None], torch.tensor(k)[None])[0][0].numpy()
    circle = np.stack([np.cos(np.linspace(0, 2 * np.pi, 60)), np.sin(np.linspace(0, 2 * np.pi, 60))])
    parts = []
    for left, one, two, words in ((110, q, k, "as stored"), (330, s @ q, np.linalg.inv(s).T @ k, "balanced")):
        for factor, colour, dashes in ((one, COLOURS[0], ""), (two, COLOURS[1], ' stroke-dasharray="6 5"')):
            outline = np.linalg.cholesky(factor @ factor.T) @ circle * 13
            points = " ".join(f"{left + x:.1f},{100 - y:.1f}" for x, y in outline.T)
            parts.append(f'<polygon points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"{dashes}/>')
        parts.append(text(left, 200, words))
    parts += [text(200, 20, "Q Qᵀ", colour=COLOURS[0]), text(250, 20, "K Kᵀ", colour=COLOURS[1])]
    return card(450, 212, "The Gram matrices of the two factors of a head, as stored and balanced", parts)


def rotary() -> str:
    """A query of one frequency at four positions, and the same multiplied by one complex number."""
    q, c = 1.0 + 0.2j, 0.8 * np.exp(0.9j)
    parts = []
    for left, factor, words in ((110, 1.0, "q at positions 0 to 3"), (330, c, "c q at positions 0 to 3")):
        parts += [f'<circle cx="{left}" cy="100" r="{60 * abs(factor * q):.1f}" fill="none" stroke="{FAINT}"/>']
        for place in range(4):
            z = factor * q * np.exp(0.7j * place)
            parts.append(arrow(left, 100, 60 * z.real, -60 * z.imag, COLOURS[place], str(place)))
        parts.append(text(left, 200, words))
    return card(450, 212, "Rotary positions turn a pair of coordinates; one complex number commutes with that", parts)


def stream() -> str:
    """Points of a stream in three dimensions, seen along the ones vector, before and after a rotation that keeps it."""
    draw = np.random.default_rng(5)
    plane = np.array([[1, -1, 0], [1, 1, -2]]).T / np.sqrt([2, 6])  # at right angles to the ones vector
    turn = np.array([[np.cos(2), -np.sin(2)], [np.sin(2), np.cos(2)]])
    points = draw.standard_normal((6, 3)) @ plane
    parts = []
    for left, shown, words in ((110, points, "as stored"), (330, points @ turn.T, "turned about the ones vector")):
        parts += [line(left - 80, 100, left + 80, 100), line(left, 25, left, 175), dot(left, 100, INK, 4)]
        parts += [dot(left + 30 * x, 100 - 30 * y, colour, 7) for (x, y), colour in zip(shown, COLOURS, strict=True)]
        parts.append(text(left, 200, words))
    return card(450, 212, "The residual stream in front of a LayerNorm, seen along the ones vector", parts)


def scale() -> str:
    """A ReLU unit with a larger way in and a smaller way out."""
    parts = []
    for left, into, out, words in ((30, "w", "v", "as stored"), (250, "2 w", "v / 2", "rescaled")):
        parts += [line(left, 90, left + 75, 90, COLOURS[0], 2.5 if into == "w" else 5)]
        parts += [line(left + 75, 90, left + 150, 90, COLOURS[1], 5 if out == "v" else 2.5)]
        parts += [dot(left + 75, 90, INK, 20, "ReLU"), text(left + 28, 76, into), text(left + 125, 76, out)]
        parts += [text(left + 75, 150, words)]
    return card(430, 170, "A ReLU unit may be scaled up on its way in and down on its way out", parts)


PICTURES = {
    "permutation": permutation, "assignment": assignment, "invertible": invertible, "balanced": balanced,
    "rotary": rotary, "stream": stream, "scale": scale,
}  # fmt: skip


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
