"""The notebook runs from top to bottom, and shows what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from docs.blocks import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_without_outputs() -> None:
    assert not any(cell["outputs"] or cell["execution_count"] for cell in CELLS)


def run(cells: list[str]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for number, code in enumerate(cells):
        exec(compile(code, f"{NOTEBOOK.name}, cell {number}", "exec"), names)
    return names


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer epochs than it has; alignment must still open the line between the models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    code = ["".join(cell["source"]) for cell in CELLS]
    assert sum("EPOCHS = 40" in cell for cell in code) == 1
    names = run([cell.replace("EPOCHS = 40", "EPOCHS = 8") for cell in code])
    results, curve = names["results"], names["curve"]
    assert names["difference"] < 1e-4
    assert results["aligned average"] > results["plain average"] + 0.2
    assert results["merged by features"] > results["plain average"] + 0.2
    assert curve["aligned"]["barrier"] < curve["barrier"] / 2
    assert not list(tmp_path.iterdir())
