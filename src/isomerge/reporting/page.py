"""report.html: one file that needs nothing else, made from isomerge.json, the lock file and measured curves."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from isomerge.arguments import require_types
from isomerge.checkpoint.hashing import tensors_digest
from isomerge.checkpoint.lock import LOCK, read_lock
from isomerge.errors import RequestError
from isomerge.packages import why_not_imported
from isomerge.reporting.ancestors import earlier_generations
from isomerge.reporting.blocks import figures, layers_of
from isomerge.reporting.demo_sections import demo_headline
from isomerge.reporting.kept_measurements import (
    kept_measurements,
    measurements_beside,
    page_measurements,
    replaced,
    searched_scores,
)
from isomerge.reporting.measurements import read_measurement
from isomerge.reporting.origin_sections import lineage
from isomerge.reporting.quality import how_to_measure, merge_lines, own_scores
from isomerge.reporting.record import PAGE, RECORD, Record, of_our_form, read_record, record_text, write_text
from isomerge.reporting.sections import cards, sections
from isomerge.reporting.verdict import has_failed, verdict
from isomerge.results import Result, plain
from isomerge.text import all_visible, as_flags, visible

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
    """The verdict and the numbers on top of the page."""
    sections: list[str]
    notes: list[str]


def report(
    folder: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    measured: Sequence[str | os.PathLike[str] | Record] = (),
    keep_curves: bool = True,
) -> ReportResult:
    """Write the page of an output, into `out` or as report.html beside its weights.

    `measured` names files that `isomerge eval`, `barrier`, `curve` or `sweep` have printed with `--json`, or holds such
    records. They join what the page has, or the one beside the weights where `out` is new, unless `keep_curves` is
    False; and the files eval*.json, barrier*.json, curve*.json and sweep*.json beside the weights.

    >>> written = isomerge.merge(["model-a", "model-b"]).save("merged")
    >>> print(isomerge.report("merged").page)
    merged/report.html
    """
    require_types(folder=(folder, str, os.PathLike), out=(out, str, os.PathLike, None), keep_curves=(keep_curves, bool))
    if isinstance(measured, (str, os.PathLike, Mapping)) or not isinstance(measured, Iterable):
        raise RequestError(
            "measured must be a list of files or records, as in measured=['curve.json'].", keys=("measured",)
        )
    folder = Path(folder).expanduser()
    given = [_measurement(one) for one in measured]
    record = read_record(folder)
    target = folder / PAGE if out is None else Path(out).expanduser()
    if target.is_dir() or not target.parent.is_dir():
        missing = f"there is no folder {target.parent}. Create it first, or name another place"
        wrong = "it is a folder. Name a file, such as report.html" if target.is_dir() else missing
        raise RequestError(f"While writing the report {target}: {wrong}.", keys=("out",))
    old = kept_measurements(record, target, folder / PAGE) if keep_curves else []
    beside, notes = measurements_beside(folder)
    name = folder.resolve().name
    joined = replaced(old, searched_scores(record, name), beside, given)
    if earlier := earlier_generations(record):
        record = {**record, "earlier": earlier}
    content = plain({"record": record, "lock": lock_summary(folder), "measurements": joined}, strict=True)
    with of_our_form(folder / RECORD):
        text = render(name, content, _place(folder))
        summary = _summary(record, content["measurements"], name)
        titles = [section.title for section in sections(record, content["lock"], content["measurements"])]
    if text is not None:
        write_text(target, text)
    return ReportResult(
        folder=str(folder),
        kind=record["kind"],
        page=str(target) if text is not None else None,
        summary=summary,
        sections=titles,
        notes=notes if text is not None else [*notes, why_no_page()],
    )


def _place(folder: Path) -> str:
    """The folder as a command names it that is run here, where the models' names lead to the models."""
    try:
        below = folder.resolve().relative_to(Path.cwd())
    except (ValueError, OSError):
        return str(folder)
    return str(below) if below.parts else folder.resolve().name


def _measurement(given: str | os.PathLike[str] | Record) -> Record:
    if isinstance(given, (Mapping, Result)):
        return given.to_dict() if isinstance(given, Result) else given
    require_types(measured=(given, str, os.PathLike))
    return read_measurement(Path(given).expanduser())


def _summary(record: Record, measurements: Sequence[Record], name: str) -> dict[str, str]:
    found = verdict(record, measurements, name)
    said = {} if found is None else {"verdict": f"{found.label}. {found.sentence}"}
    numbers = cards(record, measurements, name)
    return said | {label: f"{value} ({hint})" if hint else value for label, value, hint in numbers}


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
                "sha256": tensors_digest({name: tensor.hash for name, tensor in entry.tensors.items()}),
            }
            for entry in lock.inputs
        ],
    }


def render(name: str, content: Record, place: str | None = None) -> str | None:
    """The page of everything that `content` holds and that is embedded in it; None without a working jinja2. `place` is
    the folder in commands."""
    try:
        template = _template()
    except ImportError:
        return None
    from markupsafe import Markup, escape

    def prose(text: Any) -> Markup:
        """Flags stay whole at the end of a line: browsers break after their dashes."""
        return Markup(FLAG.sub(r'<span class="flag">\g<0></span>', str(escape(text))))

    # What is embedded stays as it was; what is shown has names that could reverse or hide what stands beside them.
    record, lock, measurements = (all_visible(content[key]) for key in ("record", "lock", "measurements"))
    demo, name, place = record["kind"] == "demo", visible(name, keep=""), visible(place or name, keep="")
    shown = sections(record, lock, measurements)
    layers = {section.id: max(layers_of(section.blocks), default=0) for section in shown}
    layered = [id_ for id_, last in layers.items() if last > 0]
    measured = bool(own_scores(measurements, name) or merge_lines(record, measurements)) or has_failed(record)
    page: str = template.render(
        name="The demo" if demo else name,
        headline=demo_headline(record) if demo else "",
        verdict=verdict(record, measurements, name, place),
        to_measure=how_to_measure(record, place) if record["kind"] == "merge" and not measured else "",
        lineage="" if demo else lineage(record, name),
        cards=cards(record, measurements, name),
        sections=shown,
        last_layer=max(layers.values(), default=0),
        layered=layered[0] if layered else None,  # the filter stands where the first layers are
        version=record["isomerge"],
        style=Markup(_part("page.css")),
        script=Markup(_part("page.js")),
        data=Markup(_embedded(content)),
        as_flags=as_flags,
        drawing=Markup,
        figures=figures,
        prose=prose,
    )
    return page


def why_no_page() -> str:
    """For a note."""
    try:
        _template()
    except ImportError as error:
        return f"report.html was not written: {why_not_imported('jinja2', error)}"
    return "report.html was not written"


def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    return _compiled(Environment, StrictUndefined)


@cache
def _compiled(environment: Any, undefined: Any) -> Any:
    """Once in a process. Everything is escaped but the drawings, which escape their own text, and our own style and
    script."""
    made = environment(autoescape=True, undefined=undefined, trim_blocks=True, lstrip_blocks=True)
    return made.from_string(_part("page.html"))


def _part(file: str) -> str:
    return (files("isomerge.reporting") / "templates" / file).read_text(encoding="utf-8")


def _embedded(content: Record) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


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
    ours = not page.is_symlink() and page_measurements(page) is not None
    written = report(folder).page if ours else None
    return Path(written) if written else None
