"""report.html: one file that needs nothing else, made from isomerge.json, the lock file and measured curves."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

from isomerge.arguments import require_types
from isomerge.checkpoint.hashing import tensors_digest
from isomerge.checkpoint.lock import LOCK, read_lock
from isomerge.errors import RequestError
from isomerge.json_files import JsonError, parse_json
from isomerge.reporting.blocks import figures, layers_of
from isomerge.reporting.curve_sections import is_curve, is_plane, read_curve
from isomerge.reporting.record import PAGE, RECORD, Record, of_our_form, read_record, record_text, write_text
from isomerge.reporting.sections import cards, headline, sections
from isomerge.results import Result, plain
from isomerge.text import all_visible, visible

MISSING = 'report.html was not written: jinja2 is not installed (pip install "isomerge[report]")'

FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")


@dataclass
class ReportResult(Result):
    """What `report` wrote."""

    folder: str
    kind: str
    """"merge", "align", "adapters" or "demo"."""
    page: str | None
    """None where jinja2 is missing."""
    summary: dict[str, str]
    """The numbers on top of the page."""
    sections: list[str]
    notes: list[str]


def report(
    folder: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    barrier: Sequence[str | os.PathLike[str] | Record] = (),
    keep_curves: bool = True,
) -> ReportResult:
    """Write the page of an output, into `out` or as report.html beside its weights.

    `barrier` names files that `isomerge barrier … --json` has printed, or holds such records. They join the curves that
    the page has, or the one beside the weights where `out` is new, unless `keep_curves` is False.

    >>> written = isomerge.merge(["model-a", "model-b"]).save("merged")
    >>> print(isomerge.report("merged").page)
    merged/report.html
    """
    require_types(folder=(folder, str, os.PathLike), out=(out, str, os.PathLike, None), keep_curves=(keep_curves, bool))
    if isinstance(barrier, (str, os.PathLike, Mapping)) or not isinstance(barrier, Iterable):
        raise RequestError(
            "barrier must be a list of files or records, as in barrier=['curve.json'].", keys=("barrier",)
        )
    folder = Path(folder).expanduser()
    curves = [_curve(one) for one in barrier]
    record = read_record(folder)
    target = folder / PAGE if out is None else Path(out).expanduser()
    if target.is_dir() or not target.parent.is_dir():
        wrong = "it is a folder" if target.is_dir() else f"there is no folder {target.parent}"
        raise RequestError(f"While writing the report {target}: {wrong}. Name a file, such as report.html.")
    if keep_curves:
        curves = with_old_curves(record, curves, target, folder / PAGE)
    content = plain({"record": record, "lock": lock_summary(folder), "curves": curves}, strict=True)
    with of_our_form(folder / RECORD):
        text = render(folder.resolve().name, content)
        summary = {label: f"{value} ({hint})" if hint else value for label, value, hint in cards(record)}
        titles = [section.title for section in sections(record, content["lock"], content["curves"])]
    if text is not None:
        write_text(target, text)
    return ReportResult(
        folder=str(folder),
        kind=record["kind"],
        page=str(target) if text is not None else None,
        summary=summary,
        sections=titles,
        notes=[] if text is not None else [MISSING],
    )


def _curve(given: str | os.PathLike[str] | Record) -> Record:
    if isinstance(given, (Mapping, Result)):
        return given.to_dict() if isinstance(given, Result) else given
    require_types(barrier=(given, str, os.PathLike))
    return read_curve(Path(given).expanduser())


def finish_report(folder: Path, run: Record) -> Path | None:
    """Add what a run took and found to the record beside the weights, and write the page; None without jinja2."""
    return write_report(folder, {**read_record(folder), "run": run})


def write_report(folder: Path, record: Record) -> Path | None:
    """The record and the page of an output that has none yet; None without jinja2."""
    write_text(folder / RECORD, record_text(record))
    page = report(folder).page
    return Path(page) if page else None


def lock_summary(folder: Path) -> dict[str, Any] | None:
    """The lock file without the hash of every single tensor; None where there is none."""
    if not (folder / LOCK).is_file():
        return None
    lock = read_lock(folder)
    return {
        "sha256": lock.sha256,
        "tensors": len(lock.tensors),
        "side_files": dict(lock.side_files),
        "seed": lock.seed,
        "options": dict(lock.options),
        "versions": dict(lock.versions),
        "inputs": [
            {
                "reference": entry.reference,
                "kind": entry.kind,
                "revision": entry.revision,
                "config_sha256": entry.config_sha256,
                "tensors": len(entry.tensors),
                "sha256": tensors_digest({name: tensor.sha256 for name, tensor in entry.tensors.items()}),
            }
            for entry in lock.inputs
        ],
    }


def render(name: str, content: Record) -> str | None:
    """The page of everything that `content` holds and that is embedded in it; None where jinja2 is missing."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError:
        return None
    from markupsafe import Markup, escape

    def part(file: str) -> str:
        return (files("isomerge.reporting") / "templates" / file).read_text(encoding="utf-8")

    def prose(text: Any) -> Markup:
        """Flags stay whole at the end of a line: browsers break after their dashes."""
        return Markup(FLAG.sub(r'<span class="flag">\g<0></span>', str(escape(text))))

    # Everything is escaped but the drawings, which escape their own text, and our own style and script.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    # What is embedded stays as it was; what is shown has names that could reverse or hide what stands beside them.
    record, lock, curves = (all_visible(content[key]) for key in ("record", "lock", "curves"))
    shown = sections(record, lock, curves)
    layers = {section.id: max(layers_of(section.blocks), default=0) for section in shown}
    layered = [name for name, last in layers.items() if last > 0]
    return environment.from_string(part("page.html")).render(
        name="The demo" if record["kind"] == "demo" else visible(name, keep=""),
        headline=headline(record),
        cards=cards(record),
        sections=shown,
        last_layer=max(layers.values(), default=0),
        layered=layered[0] if layered else None,  # the filter stands where the first layers are
        version=record["isomerge"],
        style=Markup(part("page.css")),
        script=Markup(part("page.js")),
        data=Markup(_embedded(content)),
        drawing=Markup,
        figures=figures,
        prose=prose,
    )


def _embedded(content: Record) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# --- the curves of a page: it keeps them when it is written again -----------------------------------------------------


def with_old_curves(record: Record, new: Sequence[Record], *pages: Path) -> list[Record]:
    """The curves of the first page that is of this record, then the new ones.

    A new curve takes the place of an old one between the same models, on the same data and aligned alike."""
    old = next((curves for page in pages if (curves := page_curves(page, record)) is not None), [])
    replaced = {_subject(curve) for curve in new}
    return [*(curve for curve in old if _subject(curve) not in replaced), *new]


def page_curves(page: Path, record: Record | None = None) -> list[dict[str, Any]] | None:
    """The curves and planes of a page; None for one that is not ours, or not of the output that `record` describes."""
    content = _content(page) if page.is_file() else None
    # A later verification changes only what the run says.
    if content is None or (record is not None and _without_run(content["record"]) != _without_run(record)):
        return None
    return [curve for curve in content["curves"] if isinstance(curve, dict) and is_curve(curve)]


def _content(page: Path) -> dict[str, Any] | None:
    parser = _Embedded()
    parser.feed(page.read_text(encoding="utf-8", errors="replace"))
    try:
        content = parse_json(parser.text)
    except JsonError:
        return None
    ours = isinstance(content, dict) and isinstance(content.get("curves"), list)
    return content if ours and isinstance(content.get("record"), dict) else None


def _without_run(record: Record) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "run"}


def _subject(curve: Record) -> str:
    """What a curve is about, whatever was measured there and at how many points."""
    models = [model["model"] if isinstance(model, Mapping) else model for model in curve.get("models") or ()]
    data, aligned = curve.get("data"), curve.get("aligned")
    several = aligned if isinstance(aligned, list) else [aligned] if aligned else []
    levels = [one["level"] if isinstance(one, Mapping) else one for one in several]
    sha256 = data.get("sha256") if isinstance(data, Mapping) else data
    return json.dumps([is_plane(curve), models, sha256, curve.get("task"), levels], default=str)


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


# --- a later verification ---------------------------------------------------------------------------------------------
MODELS = ("merge", "align")  # the kinds of record that speak of one model folder


def record_verification(folder: Path, verification: Mapping[str, Any], *, deep: bool) -> Path | None:
    """Put what `isomerge verify` found into isomerge.json, and write the page again if there is one.

    Nothing else in the folder is touched, and a folder without such a record is left as it is, and so are links: what
    they lead to may be a cache. The path is that of the page; None where there is none of ours, or jinja2 is missing.
    """
    if not (folder / RECORD).is_file() or (folder / RECORD).is_symlink():
        return None
    record = read_record(folder)
    if record["kind"] not in MODELS:
        return None
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    verified = {"when": when, "deep": deep, "seconds": verification["seconds"]}
    record["run"] = {**(record.get("run") or {}), "checks": verification["checks"], "verified": verified}
    write_text(folder / RECORD, record_text(record))
    page = folder / PAGE
    curves = page_curves(page) if page.is_file() and not page.is_symlink() else None
    written = None if curves is None else report(folder, barrier=curves).page
    return Path(written) if written else None
