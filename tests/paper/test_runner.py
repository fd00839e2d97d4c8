"""The runner of the paper's experiments: cells are kept, records come back, pages say how they were made."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "paper"))
import render
import runner
from results import from_json, to_json
from runner import Map, Mean, Plot, Result, Run, Table

PAPER = Path(runner.__file__).parent
VALUES = [1.0, 2.0, 4.5]


def new_run(work: Path, **changes: object) -> Run:
    given = {"scale": "reduced", "device": "cpu", "seeds": 1, "data": None, "models": None, **changes}
    return Run("example", work=work, out=work / "results", **given)  # type: ignore[arg-type]


class Counted:
    """A computation that counts how often it was asked for."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> dict[str, float]:
        self.times += 1
        return {"accuracy": 0.1 + self.times, "shape": (1, 2)}  # type: ignore[dict-item]


def example(run: Run) -> Result:
    run.settings["images"] = 5
    found = run.cell("one", lambda: {"accuracy": 50.0})
    run.note("nothing was left out")
    table = Table("accuracy", ["way", "%"], [["simple", Mean([found["accuracy"], 60.0], unit=" %")]])
    lines = Plot("curve", [0.0, 1.0], {"a": [1.0, 2.0], "b": [None, 1.0]}, errors={"a": [0.1, 0.1]})
    bars = Plot("bars", ["x", "y"], {"a": [1.0, math.nan]}, kind="bars", log=True)
    plane = Map("plane", [0, 1], [0, 1], [[0.0, 1.0], [1.0, 2.0]], [("A", 0.0, 0.0)])
    return Result([table], [lines, bars, plane], ["Matching helps: held, 50 instead of 40 %."])


def start(work: Path, *more: str) -> None:
    argv = ["--scale", "reduced", "--device", "cpu", "--work", str(work), *more]
    runner.main("example", "An example", "Table 0 of the founding paper", example, argv)


def test_the_standard_error_is_that_of_numpy() -> None:
    mean = Mean(VALUES, 4, " %")
    error = np.std(VALUES, ddof=1) / np.sqrt(len(VALUES))
    assert str(mean) == f"{np.mean(VALUES):.4f} ± {error:.4f} %"
    assert mean.error == pytest.approx(error)


def test_a_missing_number_is_a_dash_and_compares_with_nothing() -> None:
    nothing = Mean([None, math.nan])
    assert str(nothing) == "–"
    assert not nothing.mean < 1 and not nothing.mean > 1


def test_a_finished_cell_is_not_computed_again(tmp_path: Path) -> None:
    compute = Counted()
    first = new_run(tmp_path).cell("simple 0-1", compute)
    again = new_run(tmp_path).cell("simple 0-1", compute)
    assert compute.times == 1
    assert first == again == {"accuracy": 1.1, "shape": [1, 2]}


@pytest.mark.parametrize("change", [{"scale": "small"}, {"device": "cuda"}, {"settings": {"images": 7}}])
def test_a_cell_of_other_circumstances_is_computed_anew(tmp_path: Path, change: dict[str, object]) -> None:
    compute = Counted()
    new_run(tmp_path).cell("simple 0-1", compute)
    new_run(tmp_path, **change).cell("simple 0-1", compute)
    assert compute.times == 2
    new_run(tmp_path).cell("simple 0-1", compute)
    assert compute.times == 2


def test_cells_finished_before_an_interruption_are_kept(tmp_path: Path) -> None:
    def broken() -> dict[str, float]:
        raise KeyboardInterrupt

    compute = Counted()
    run = new_run(tmp_path)
    run.cell("first", compute)
    with pytest.raises(KeyboardInterrupt):
        run.cell("second", broken)
    later = new_run(tmp_path)
    assert later.cell("first", compute)["accuracy"] == 1.1
    assert later.cell("second", compute)["accuracy"] == 2.1


def test_a_dry_run_computes_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path / "work", "--dry-run")
    assert "would compute: one" in capsys.readouterr().out
    assert not (tmp_path / "work").exists()
    assert math.isnan(new_run(tmp_path, dry=True).cell("one", Counted())["anything"])


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    result = example(new_run(tmp_path))
    record = json.loads(json.dumps(to_json(result), allow_nan=False))
    back = from_json(record)
    assert [[str(cell) for cell in row] for row in back.tables[0].rows] == [["simple", "55.0 ± 5.0 %"]]
    assert [plot.kind for plot in back.plots] == ["lines", "bars", "map"]
    assert back.claims == result.claims


def test_the_page_says_how_it_was_made_and_the_index_lists_it(tmp_path: Path) -> None:
    start(tmp_path, "--data", str(tmp_path), "--commit", "abc1234")
    out = tmp_path / "results"
    page = (out / "example.md").read_text()
    assert "| simple | 55.0 ± 5.0 % |" in page
    assert "--scale reduced --seeds 1 --device cpu --data DATA`" in page
    assert str(tmp_path) not in page
    for part in ("| commit | abc1234 |", "| hardware | ", "| date | 2", "- nothing was left out", "(example.svg)"):
        assert part in page
    assert (out / "example.svg").read_text().count("<svg") == 1
    index = (out / "index.md").read_text()
    assert "[An example](example.md)" in index and "- Matching helps: held, 50 instead of 40 %. ([An example]" in index
    assert "**Matching helps**: held in 1 of 1." in index
    assert "**Overhead under 5 %**: not measured yet." in index


def test_a_record_made_elsewhere_is_rendered_the_same(tmp_path: Path) -> None:
    start(tmp_path, "--record-only")
    out = tmp_path / "results"
    assert [path.name for path in out.iterdir()] == ["example.json"]
    record = json.loads((out / "example.json").read_text())
    runner.main("example", "", "", example, ["--from", str(out / "example.json"), "--out", str(tmp_path / "pages")])
    assert (tmp_path / "pages" / "example.md").read_text() == render.markdown(record)
    assert (tmp_path / "pages" / "example.svg").exists()


def test_one_command_makes_all_pages(tmp_path: Path) -> None:
    start(tmp_path, "--record-only")
    pages = tmp_path / "pages"
    command = [sys.executable, str(PAPER / "render.py"), str(tmp_path / "results"), "--out", str(pages)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert {path.name for path in pages.iterdir()} == {"example.json", "example.md", "example.svg", "index.md"}
    command[2] = str(tmp_path / "nothing")
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1 and "holds no records" in refused.stderr


def test_without_matplotlib_the_record_is_written_and_the_rest_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    start(tmp_path)
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["example.json"]
    assert "benchmarks/paper/render.py" in capsys.readouterr().out


@pytest.mark.parametrize("word", render.VERDICTS)
def test_a_verdict_is_read_from_its_sentence(word: str) -> None:
    assert render.verdict(f"Matching helps (a, b): {word}. It held: 3.") == word


def test_numbers_of_another_scale_are_not_overwritten(tmp_path: Path) -> None:
    start(tmp_path, "--record-only")
    with pytest.raises(SystemExit, match="holds numbers of scale reduced, not small"):
        runner.main("example", "", "", example, ["--scale", "small", "--device", "cpu", "--work", str(tmp_path),
                                                 "--out", str(tmp_path / "results")])  # fmt: skip


def test_the_commits_of_all_cells_are_named(tmp_path: Path) -> None:
    start(tmp_path, "--record-only", "--commit", "first")
    start(tmp_path, "--record-only", "--commit", "second")
    record = json.loads((tmp_path / "results" / "example.json").read_text())
    assert record["commit"] == "first"


def test_a_record_says_where_its_cells_were_measured_not_where_it_was_written(tmp_path: Path) -> None:
    start(tmp_path, "--record-only")
    cells = tmp_path / "example.cells.json"
    elsewhere = {key: {**cell, "hardware": "another machine"} for key, cell in json.loads(cells.read_text()).items()}
    cells.write_text(json.dumps(elsewhere))
    start(tmp_path, "--record-only", "--finished")
    assert json.loads((tmp_path / "results" / "example.json").read_text())["hardware"] == "another machine"


def test_with_finished_nothing_is_computed_and_the_gap_is_told(tmp_path: Path) -> None:
    start(tmp_path, "--record-only", "--finished")
    record = json.loads((tmp_path / "results" / "example.json").read_text())
    assert "Not finished: one." in record["notes"] and record["cells"] == {}
    assert record["tables"][0]["rows"][0][1]["values"] == [None, 60.0]


def scripts() -> list[str]:
    return sorted(path.stem for path in PAPER.glob("*.py") if '":\n    main("' in path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("script", scripts())
def test_asking_a_script_for_help_needs_no_heavy_package(script: str) -> None:
    """The machine with the GPU lacks most of them."""
    blocked = {"matplotlib", "pydantic", "typer", "seqeval", "sklearn", "ot", "datasets"}
    code = (
        f"import sys, runpy\nfor name in {sorted(blocked)}: sys.modules[name] = None\n"
        f"sys.argv = ['{script}.py', '--help']\nsys.path.insert(0, {str(PAPER)!r})\n"
        f"runpy.run_path({str(PAPER / script)!r} + '.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "--record-only" in done.stdout, done.stderr
