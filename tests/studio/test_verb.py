"""`isomerge studio` itself; what it serves is opened in tests/browser."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isomerge.cli.app import app


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("studio nowhere --no-browser", "There is no folder nowhere"),
        ("studio . --port 70000", "Ports end at 65535"),
        ("studio . --port -1", "Invalid value for '--port'"),
        ("studio . --trust-remote-code", "runs no code of models"),
    ],
)
def test_mistakes_are_met_before_anything_is_served(
    line: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 2 and says in done.stderr


def test_a_port_that_is_taken_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    before = (os.getcwd(), os.environ.get("HF_HUB_OFFLINE"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = CliRunner().invoke(app, ["studio", str(tmp_path), "--port", str(port), "--no-browser", "--json"])
    assert done.exit_code == 2 and f"port {port}" in done.stderr and "--port N" in done.stderr
    assert json.loads(done.stdout)["exit_code"] == 2
    assert (os.getcwd(), os.environ.get("HF_HUB_OFFLINE")) == before
