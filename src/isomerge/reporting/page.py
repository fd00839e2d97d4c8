"""report.html: one file that needs nothing else, made from isomerge.json, the lock file and measured curves."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from isomerge.checkpoint.hashing import tensors_digest
from isomerge.checkpoint.lock import LOCK, read_lock
from isomerge.errors import RequestError
from isomerge.reporting.blocks import figures, layers_of
from isomerge.reporting.curves_view import read_curve
from isomerge.reporting.kept import with_kept
from isomerge.reporting.record import PAGE, RECORD, plain, read_record, record_text, write_text
from isomerge.reporting.view import cards, headline, sections

MISSING = 'report.html was not written: jinja2 is not installed (pip install "isomerge[report]")'

Record = Mapping[str, Any]
FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")


def report(
    folder: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    barrier: Sequence[str | os.PathLike[str] | Record] = (),
    keep_curves: bool = True,
) -> dict[str, Any]:
    """Write the page of an output, into `out` or as report.html beside its weights.

    `barrier` names files that `isomerge barrier … --json` has printed, or holds such records. They join the curves that
    the page has, or the one beside the weights where `out` is new, unless `keep_curves` is False. The result has
    `folder`, `kind`, `page` (None where jinja2 is missing), `summary`, `sections` and `notes`.
    """
    folder = Path(folder).expanduser()
    curves = [one if isinstance(one, Mapping) else read_curve(Path(one).expanduser()) for one in barrier]
    record = read_record(folder)
    target = folder / PAGE if out is None else Path(out).expanduser()
    if target.is_dir() or not target.parent.is_dir():
        wrong = "it is a folder" if target.is_dir() else f"there is no folder {target.parent}"
        raise RequestError(f"While writing the report {target}: {wrong}. Name a file, such as report.html.")
    if keep_curves:
        curves = with_kept(record, curves, target, folder / PAGE)
    content = page_content(folder, record, curves)
    text = render(folder.resolve().name, content)
    if text is not None:
        write_text(target, text)
    return {
        "folder": str(folder),
        "kind": record["kind"],
        "page": str(target) if text is not None else None,
        "summary": {label: f"{value} ({hint})" if hint else value for label, value, hint in cards(record)},
        "sections": [section.title for section in sections(record, content["lock"], content["curves"])],
        "notes": [] if text is not None else [MISSING],
    }


def finish_report(folder: Path, run: Record) -> Path | None:
    """Add what a run took and found to the record beside the weights, and write the page; None without jinja2."""
    record = {**read_record(folder), "run": run}
    write_text(folder / RECORD, record_text(record))
    page = report(folder)["page"]
    return Path(page) if page else None


def write_report(folder: Path, record: Record) -> Path | None:
    """The record and the page of an output that has none yet; None without jinja2."""
    write_text(folder / RECORD, record_text(record))
    page = report(folder)["page"]
    return Path(page) if page else None


def page_content(folder: Path, record: Record, curves: Sequence[Record]) -> dict[str, Any]:
    """Everything that the page shows, as it is embedded in it."""
    return dict(plain({"record": record, "lock": lock_summary(folder), "curves": list(curves)}))


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
    """The page; None where jinja2 is missing."""
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
    record = content["record"]
    found = sections(record, content["lock"], content["curves"])
    layers = {section.id: max(layers_of(section.blocks), default=0) for section in found}
    layered = [name for name, last in layers.items() if last > 0]
    return environment.from_string(part("page.html")).render(
        name="The demo" if record["kind"] == "demo" else name,
        headline=headline(record),
        cards=cards(record),
        sections=found,
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
