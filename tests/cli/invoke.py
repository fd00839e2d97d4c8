"""How the command line is asked about the two models `a` and `b` of the fixture `here`."""

from __future__ import annotations

from typer.testing import CliRunner

from isomerge.cli.app import app

MODELS = "models:\n- model: a\n- model: b\n"
MERGE = "merge a b -o out"


def told(line: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, line.split())
    assert "Traceback" not in done.output and not isinstance(done.exception, Exception)
    return done.exit_code, done.stderr
