"""The command line, run in this process: importing torch anew takes longer than any merge here."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from isomerge.cli.app import app


def verb(*arguments: Any, folder: Path | None = None) -> Result:
    """Run a verb, inside a folder if one is given, so that models have short names."""
    before = Path.cwd()
    os.chdir(folder or before)
    try:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])
    finally:
        os.chdir(before)


def said(*arguments: Any, folder: Path | None = None) -> dict[str, Any]:
    """The record that a verb prints; it must have gone well."""
    done = verb(*arguments, "--json", folder=folder)
    assert done.exit_code == 0, done.output
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def hear_ctrl_c() -> None:
    """Before a program starts (`preexec_fn`): what a shell without job control has put into the background, and all
    that it starts, is deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
