"""The curves of a page: they are inside it and nowhere else, so a page that is written again keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from isomerge.reporting.curves_view import is_line, is_plane

Record = Mapping[str, Any]


def with_kept(record: Record, new: Sequence[Record], *pages: Path) -> list[Record]:
    """The curves of the first page that is of this record, then the new ones.

    A new curve takes the place of an old one between the same models, on the same data and aligned alike."""
    kept = next((found for page in pages if (found := _curves_of(page, record)) is not None), [])
    replaced = {_subject(curve) for curve in new}
    return [*(curve for curve in kept if _subject(curve) not in replaced), *new]


def page_curves(page: Path) -> list[dict[str, Any]] | None:
    """The curves and planes of a page; None for a page that holds no record: it is somebody else's."""
    content = _content(page)
    return None if content is None else _readable(content["curves"])


def _curves_of(page: Path, record: Record) -> list[dict[str, Any]] | None:
    """None where the page tells of another output; a later verification changes only what the run says."""
    content = _content(page) if page.is_file() else None
    if content is None or _without_run(content["record"]) != _without_run(record):
        return None
    return _readable(content["curves"])


def _content(page: Path) -> dict[str, Any] | None:
    parser = _Embedded()
    parser.feed(page.read_text(encoding="utf-8", errors="replace"))
    try:
        content = json.loads(parser.text)
    except ValueError:
        return None
    ours = isinstance(content, dict) and isinstance(content.get("curves"), list)
    return content if ours and isinstance(content.get("record"), dict) else None


def _readable(curves: Sequence[Any]) -> list[dict[str, Any]]:
    return [curve for curve in curves if isinstance(curve, dict) and (is_line(curve) or is_plane(curve))]


def _without_run(record: Record) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "run"}


def _subject(curve: Record) -> str:
    """What a curve is about, whatever was measured there and at how many points."""
    models = [model["model"] if isinstance(model, Mapping) else model for model in curve.get("models") or ()]
    data, aligned = curve.get("data"), curve.get("aligned")
    levels = [one["level"] if isinstance(one, Mapping) else one for one in _several(aligned)]
    sha256 = data.get("sha256") if isinstance(data, Mapping) else data
    return json.dumps([is_plane(curve), models, sha256, curve.get("task"), levels], default=str)


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value] if value else []


class _Embedded(HTMLParser):
    """The text of the element `record`."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self._inside = "", False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "script" and ("id", "record") in attrs

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.text += data
