"""Where a model comes from, as a small drawing: inputs on the left, what was done to them, the output on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 400
ROW, BOX = 50, 40
INPUT, STEP, OUTPUT = (2, 116), (147, 110), (288, 110)
"""Where each column begins and how wide its boxes are."""
LETTER = 7.8  # the width of one, in the larger letters of a phone
MOST = 6


@dataclass(frozen=True)
class Origin:
    """A model or data that went in, and as what."""

    name: str
    role: str


def lineage_picture(origins: Sequence[Origin], step: tuple[str, str], out: str) -> str:
    """`step` is what was done, in one or two words, and a word on how."""
    shown = list(origins[: MOST if len(origins) <= MOST else MOST - 1])
    if len(origins) > len(shown):
        shown.append(Origin(f"{len(origins) - len(shown)} more", ", ".join(dict.fromkeys(o.role for o in origins))))
    height = max(1, len(shown)) * ROW
    middle = height / 2
    parts = []
    for number, origin in enumerate(shown):
        at = ROW * (number + 0.5)
        start, end = sum(INPUT), STEP[0]
        bend = (start + end) / 2
        dashed = "" if origin.role == "model" else " aside"
        parts.append(f'<path class="flow{dashed}" d="M{start} {at}C{bend} {at} {bend} {middle} {end} {middle}"/>')
        parts.append(_box(INPUT, at, origin.name, origin.role, kind=dashed))
    parts.append(f'<path class="flow" d="M{sum(STEP)} {middle}H{OUTPUT[0] - 7}"/>')
    tip = f"{OUTPUT[0] - 1},{middle} {OUTPUT[0] - 9},{middle - 5} {OUTPUT[0] - 9},{middle + 5}"
    parts.append(f'<polygon class="head" points="{tip}"/>')
    parts += [_box(STEP, middle, *step, kind=" step"), _box(OUTPUT, middle, out, "output", kind=" out")]
    names = ", ".join(f"{origin.name} ({origin.role})" for origin in origins)
    label = escape(f"Lineage: {names}; {' '.join(filter(None, step))}; the output is {out}")
    return f'<svg class="lineage" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _box(column: tuple[int, int], at: float, name: str, role: str, *, kind: str) -> str:
    left, width = column
    middle, most = left + width / 2, int((width - 10) / LETTER)
    lines = [("name", name), ("role", role)] if role else [("name", name)]
    text = "".join(
        f'<text class="{style}" x="{middle}" y="{at + 4 + 15 * number - 7.5 * (len(lines) - 1):.1f}" '
        f'text-anchor="middle">{escape(_cut(words, most))}</text>'
        for number, (style, words) in enumerate(lines)
    )
    tip = escape(f"{name}, {role}" if role else name)
    return (
        f'<g class="box{kind}" data-tip="{tip}"><rect x="{left}" y="{at - BOX / 2}" width="{width}" height="{BOX}" '
        f'rx="8"/>{text}</g>'
    )


def _cut(text: str, most: int) -> str:
    """The end of a long name tells more than its beginning.

    >>> _cut("someone/Model-3.1-8B", 9)
    '…l-3.1-8B'
    """
    return text if len(text) <= most else f"…{text[len(text) - most + 1 :]}"
