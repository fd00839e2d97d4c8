"""The page of a merge of merges names what its inputs were made of."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import isomerge
from isomerge.reporting.ancestors import earlier_generations
from isomerge.reporting.kept_measurements import page_measurements


def made(folder: Path, name: str, *parents: str) -> None:
    """An output with nothing but its record."""
    (folder / name).mkdir(exist_ok=True)
    inputs = [{"reference": parent, "role": "model"} for parent in parents]
    content = {"kind": "merge", "format": 1, "isomerge": "0.1.0", "method": "ties", "inputs": inputs, "notes": []}
    (folder / name / "isomerge.json").write_text(json.dumps(content))


def table(page: Path) -> list[list[str]]:
    """The cells of the table of earlier generations."""
    caption = "<figcaption>What the inputs were made of"
    found = page.read_text().split(caption)[1].split("</table>")[0]
    rows = re.findall(r"<tr.*?</tr>", found, re.S)
    cells = [re.findall(r"<td.*?</td>", row, re.S) for row in rows]
    return [[" ".join(re.sub(r"<.*?>", "", cell).split()) for cell in row] for row in cells if row]


def test_a_merge_of_merges_lists_every_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path, "last", "middle", "org/elsewhere")
    made(tmp_path, "middle", "first", "b")
    made(tmp_path, "first", "a")
    isomerge.report("last")
    assert table(tmp_path / "last" / "report.html") == [
        ["first", "model", "middle", "ties", "2"],
        ["a", "model", "first", "ties", "3"],
        ["b", "model", "middle", "ties", "2"],
    ]


def test_a_page_with_earlier_generations_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path, "last", "middle", "org/elsewhere")
    made(tmp_path, "middle", "a", "b")
    points = [{"t": t, "loss": 1.5 + t, "metric": None} for t in (0.0, 0.5, 1.0)]
    line = {"points": points, "barrier": 0.25, "models": ["middle", "org/elsewhere"], "notes": []}
    isomerge.report("last", measured=[line])
    isomerge.report("last")
    assert page_measurements(tmp_path / "last" / "report.html") == [line]


def test_inputs_that_isomerge_has_not_made_add_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path, "last", "a", "org/elsewhere")
    isomerge.report("last")
    assert "What the inputs were made of" not in (tmp_path / "last" / "report.html").read_text()


def test_records_that_name_each_other_come_to_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"model-{number}" for number in range(3)]
    for name in names:
        made(tmp_path, name, *names)
    isomerge.report("model-0")
    # Behind each of three: three parents, behind two of these three more, and behind one of these three more.
    assert len(table(tmp_path / "model-0" / "report.html")) == 3 * (3 + 2 * (3 + 1 * 3))


def test_a_few_small_records_do_not_make_an_endless_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each names the next one fifty times: written out, that is 50 to the power of 7."""
    monkeypatch.chdir(tmp_path)
    for number in range(7):
        made(tmp_path, f"m{number}", *[f"m{number + 1}"] * 50)
    record = json.loads((tmp_path / "m0" / "isomerge.json").read_text())
    assert 0 < len(earlier_generations(record)) <= 1000
