"""A later verification in the record and on the page of an output: they tell the newest answers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isomerge.reporting.kept import page_curves
from isomerge.reporting.page import report
from isomerge.reporting.record import PAGE, RECORD, read_record, record_text, write_text

MODELS = ("merge", "align")  # the kinds of record that speak of one model folder


def record_verification(folder: Path, told: Mapping[str, Any], *, deep: bool) -> Path | None:
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
    verified = {"when": when, "deep": deep, "seconds": told["seconds"]}
    record["run"] = {**(record.get("run") or {}), "checks": told["checks"], "verified": verified}
    write_text(folder / RECORD, record_text(record))
    page = folder / PAGE
    return _again(folder, page) if page.is_file() and not page.is_symlink() else None


def _again(folder: Path, page: Path) -> Path | None:
    """With the curves that the page was made with: they are inside it and nowhere else."""
    curves = page_curves(page)
    if curves is None:
        return None
    written = report(folder, barrier=curves)["page"]
    return Path(written) if written else None
