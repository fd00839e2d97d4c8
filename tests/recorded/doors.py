"""Everything of isomerge that the results are computed with: public doors, named in this one file.

The packages behind them may be moved and renamed; then only the lines here change, and no result may.
"""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

import isomerge
from isomerge.calibration import calibrate, cross_statistics
from isomerge.cli.app import app

__all__ = ["calibrate", "cross_statistics", "isomerge", "said"]


def said(*arguments: Any) -> dict[str, Any]:
    """The record that a verb of the command line prints; it must have gone well."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    if done.exit_code:
        raise RuntimeError(f"isomerge {' '.join(map(str, arguments))}: {done.output} {done.exception!r}")
    return json.loads(done.stdout)
