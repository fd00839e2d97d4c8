"""What goes to stdout and stderr, and which exit code: for results, mistakes, failures and interruptions."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isomerge.cli.output import ProgressLines, Voice
from isomerge.errors import AlignmentError, CheckpointError

RECORD = {"distance": {"before": 1.0, "after": 0.5}, "spaces": [], "max_output_difference": None, "seconds": 1.0}


def test_json_prints_exactly_one_object(run: Any, api: Any) -> None:
    api.record = RECORD
    result = run("align b a -o out --json")
    assert result.exit_code == 0
    assert len(result.stdout.strip().splitlines()) == 1
    record = json.loads(result.stdout)
    assert record["distance"] == {"before": 1.0, "after": 0.5} and record["out"] == "out"
    assert record["tensors"] == 3 and record["sha256"] == "ab" * 32


def test_json_has_no_nan(run: Any, api: Any) -> None:
    api.record = {"verdict": "strangers", "distance": float("nan"), "reasons": (Path("a"),)}
    assert json.loads(run("check a b --json").stdout) == {"verdict": "strangers", "distance": None, "reasons": ["a"]}


def test_quiet_prints_nothing_on_stdout(run: Any, api: Any) -> None:
    api.record = RECORD
    result = run("align b a -o out --quiet")
    assert result.exit_code == 0 and result.stdout == ""


def test_a_pipe_gets_paths_whole_and_nothing_filled_up(run: Any, api: Any) -> None:
    api.record = RECORD
    out = "/".join(["d" * 60, "e" * 60, "f" * 60])
    lines = run(f"align b a -o {out}").stdout.splitlines()
    assert any(line.endswith(f"{out} (3 tensors, 1.2 MB)") for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_a_pipe_gets_one_whole_line_for_each_method(run: Any) -> None:
    rows = json.loads(run("list methods --json").stdout)["methods"]
    lines = run("list methods").stdout.splitlines()
    assert len(rows) > 40
    for row, line in zip(rows, lines, strict=True):
        assert line.split(maxsplit=1) == [row["name"], row["summary"]]


@pytest.mark.parametrize("silence", ["--quiet", "--json"])
def test_who_wants_silence_gets_no_progress(run: Any, api: Any, silence: str) -> None:
    api.record = RECORD
    assert run(f"align b a -o out {silence}").exit_code == 0
    assert api.calls["align"][1]["progress"] is None


def test_without_a_terminal_progress_is_a_line_a_minute(run: Any, api: Any, capsys: Any) -> None:
    api.record = RECORD
    assert run("align b a -o out").exit_code == 0
    assert isinstance(api.calls["align"][1]["progress"], ProgressLines)
    moments = iter([0.0, 10.0, 59.0, 61.0, 100.0, 181.0, 301.0])
    tell = ProgressLines(clock=lambda: next(moments))
    tell(0, 10**9, "reading")
    tell(9 * 10**8, 10**9, "reading")
    tell(0, 8 * 10**9, "writing out")
    tell(10**9, 8 * 10**9, "writing out")
    tell(2 * 10**9, 8 * 10**9, "writing out")
    tell(7, 9, "measuring")
    assert capsys.readouterr().err.splitlines() == [
        "isomerge: writing out: 0 B of 8 GB",
        "isomerge: writing out: 2 GB of 8 GB, about 6 min 00 s left",
        "isomerge: measuring: 7 of 9",
    ]


def test_the_progress_bar_accepts_stages(capfd: pytest.CaptureFixture[str]) -> None:
    from isomerge.cli.output import progress_bar as bar

    for unit in ("bytes", "steps"):
        with bar(unit) as progress:
            progress(1, 10, "reading")
            progress(10, 10, "reading")
            progress(2, 4, "writing")
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("align b a -o out --level rotatoin", "--level cannot be 'rotatoin'. Did you mean 'rotation'?"),
        ("align b a -o out --only atention", "--only cannot be 'atention'. Did you mean 'attention'?"),
        ("align b a -o out --many univers", "Did you mean 'universe'?"),
        ("align b a -o out --solver sinkhron", "--solver cannot be 'sinkhron'. Did you mean 'sinkhorn'?"),
        ("align b a -o out --measure information", "--measure compares activations. Add --data PATH"),
        ("align b a -o out --out-dtype bfloat61", "Did you mean 'bfloat16'?"),
        ("align b a -o out --shard-size big", "--shard-size cannot be 'big'"),
        ("align b a -o out --max-memory 8X", "--max-memory cannot be '8X'"),
        ("align b a -o out --levle full", "No such option: --levle. Did you mean '--level'?"),
        ("algin b a -o out", "No such command 'algin'. Did you mean 'align'?"),
        ("align b a", "Missing option"),
        ("align b -o out", "align needs a second model"),
        ("align b a -o out --transform missing", "--transform missing is not a file"),
        ("align b a -o out --nearest --many cycle", "--nearest chooses an anchor, and --many cycle has none"),
        ("align b a -o out --anchor-out out", "--anchor-out out is the folder of -o"),
        ("align b a -o out --save-transform no/t", "there is no folder no"),
        ("check a", "name at least two"),
        ("list method", "list cannot be 'method'. Did you mean 'methods'?"),
        ("merge a -o out", "at least two models"),
        ("merge a b -o out --method linaer", "Did you mean 'linear'?"),
        ("merge a b -o out --weights 1,x", "--weights cannot be '1,x'"),
        ("merge a b -o out --weights 1", "1 number for 2 models"),
        ("merge a b -o out --methd ties", "No such option: --methd. Did you mean '--method'?"),
        ("merge a b -o out --densty 0.5", "No such option: --densty. Did you mean '--density'?"),
        ("merge a b -o out --density 0.5", "The method linear has no option --density."),
        ("merge a b --method ties --base x -o out --density half", "--density cannot be 'half'. Write a number"),
    ],
)
def test_a_wrong_request_ends_with_2_and_says_what_to_write(run: Any, api: Any, line: str, words: str) -> None:
    result = run(line)
    assert result.exit_code == 2, result.output
    told = [line for line in result.stderr.splitlines() if line != "a library that prints"]
    assert len(told) == 1 and words in told[0]
    assert result.stdout == ""
    assert words in json.loads(run(line + " --json").stdout)["error"]
    assert not {"align", "merge_recipe", "check"} & api.calls.keys()


def test_an_input_is_never_the_output(run: Any, api: Any, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    result = run("align b a -o ./b --force")
    assert result.exit_code == 2 and "inputs are never modified" in result.stderr
    assert not api.calls


def test_a_full_folder_is_replaced_only_with_force(run: Any, api: Any, tmp_path: Path) -> None:
    api.record = RECORD
    (tmp_path / "out").mkdir()
    assert run("align b a -o out").exit_code == 0
    (tmp_path / "out" / "config.json").write_text("{}")
    refused = run("align b a -o out")
    assert refused.exit_code == 2 and "--force" in refused.stderr
    assert run("align b a -o out --force").exit_code == 0


def test_a_failure_is_one_paragraph_with_its_exit_code(run: Any, api: Any) -> None:
    api.failure = AlignmentError("Aligning b:\n  tensor x holds NaN.")
    result = run("align b a -o out --json")
    assert result.exit_code == 1
    assert result.stderr.endswith("isomerge: Aligning b: tensor x holds NaN.\n")
    assert json.loads(result.stdout)["error"] == "Aligning b: tensor x holds NaN."


def test_debug_adds_the_traceback(run: Any, api: Any) -> None:
    api.failure = CheckpointError("no such shard")
    assert "Traceback" not in run("align b a -o out").stderr
    assert "Traceback" in run("align b a -o out --debug").stderr


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "out/model.safetensors"),
            "The disk is full while writing out/",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "out"), "could not be used"),
        (ModuleNotFoundError("No module named 'sklearn'", name="sklearn.datasets"), 'pip install "isomerge[demo]"'),
        (MemoryError(), "--max-memory"),
        (ZeroDivisionError("division by zero"), "Unexpected ZeroDivisionError: division by zero"),
    ],
)
def test_foreign_failures_are_told_with_the_next_step(
    run: Any, api: Any, failure: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # as if it were not installed
    api.failure = failure
    result = run("align b a -o out")
    assert result.exit_code == 1 and words in result.stderr
    assert "Traceback" not in result.stderr


def test_an_interruption_ends_with_130_and_says_what_is_left(run: Any, api: Any, tmp_path: Path) -> None:
    api.failure = KeyboardInterrupt()
    result = run("align b a -o out --json")
    assert result.exit_code == 130 and "Nothing was left behind" in result.stderr
    assert json.loads(result.stdout)["exit_code"] == 130
    (tmp_path / "out").mkdir()
    assert "remain: out." in run("align b a -o out").stderr


def test_the_console_entry_reports_a_mistake_by_exit_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "isomerge", "list", "solver", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Did you mean 'solvers'?" in done.stderr
    assert list(json.loads(done.stdout)) == ["error", "kind", "exit_code"]


def test_a_program_that_watches_gets_progress_as_lines_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with --json, which has stdout for itself; not every step, but every stage from its first to its last."""
    monkeypatch.setenv("ISOMERGE_PROGRESS", "json")
    with Voice(json=True).work() as progress:
        assert progress is not None
        for done in range(1001):
            progress(done, 1000, "reading")
        progress(3, 7, "writing\nout")
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in err.splitlines()]
    assert out == "" and lines[0] == {"done": 0, "total": 1000, "what": "reading"}
    assert lines[-2:] == [
        {"done": 1000, "total": 1000, "what": "reading"}, {"done": 3, "total": 7, "what": "writing\nout"},
    ]  # fmt: skip
    assert len(lines) < 500
