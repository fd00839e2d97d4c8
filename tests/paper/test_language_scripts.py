"""The language experiments: which models are merged, layers, and both scripts from end to end on tiny models."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "paper"))
import corpora
import figure4
import language
import runner
import table1
import table1_report

from paper.small_jobs import OLD, job


# --- merging ----------------------------------------------------------------------------------------------------------
def test_every_set_has_two_partners_in_a_ring_and_seeds_have_others() -> None:
    rings = [table1.pairs(8, seed, every=False) for seed in range(3)]
    for ring in rings:
        assert all(sum(member in pair for pair in ring) == 2 for member in range(8))
    assert len({pair for ring in rings for pair in ring}) == 24
    assert table1.pairs(2, 0, every=False) == [(0, 1)]
    assert len(table1.pairs(6, 1, every=True)) == 15


def test_mixing_layers_is_matching_only_those(models: Path, data: Path, tmp_path: Path) -> None:
    import isomerge

    first, second = (job(models, data, tmp_path, "CoLA", base=1, seed=seed) for seed in (0, 1))
    for each in (first, second):
        language.fine_tune(each)
    head = ["score.weight"]
    plain, matched = figure4.merged_bodies(figure4.Pair(first, second, 1), head)
    found = isomerge.align(first.folder, second.folder, level="rotation", only="attention", layers="1")
    assert isinstance(found, isomerge.Alignment)
    alone = found.state_dict()
    expected = isomerge.merge_state_dicts([alone, language.state_of(second.folder)])
    mixed = figure4.mixed(plain, matched, [1])
    body = [name for name in mixed if name not in head]
    assert all(torch.allclose(mixed[name], expected[name], atol=1e-6) for name in body)
    moved = [name for name in body if not torch.equal(mixed[name], plain[name])]
    assert moved and all(".layers.1.self_attn." in name for name in moved)


# --- the scripts ------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore::isomerge.merging.regression.StatisticsWarning")
@pytest.mark.slow
def test_table1_from_end_to_end_and_again_from_its_cells(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ("table1", "title", "paper", table1.script)
    runner.main(*told, tiny)
    record = json.loads((tmp_path / "out" / "table1.json").read_text())
    rows = {row[0]: row[1:] for row in record["tables"][0]["rows"]}
    assert len(rows) == 1 + len(table1.METHODS) * len(table1.MATCHINGS) + len(table1.BEYOND)
    assert all(len(cell["values"]) == 1 and 0 <= cell["values"][0] <= 100 for row in rows.values() for cell in row)
    assert any("Larger models gain more" in claim for claim in record["claims"])
    merges = [cell["values"]["losses"] for cell in record["cells"].values() if "losses" in cell["values"]]
    assert merges and all(found["Fisher normalized"] != found["Fisher"] for found in merges)
    assert any("Fisher counts a model by its information" in claim for claim in record["claims"])
    markdown = (tmp_path / "out" / "table1.md").read_text()
    assert "RegMean +full" in markdown and "Left out" in markdown
    monkeypatch.setattr(table1, "merged", None)  # would fail if anything were merged again
    shutil.rmtree(tmp_path / "work" / "language")  # finished cells need no models
    runner.main(*told, tiny)
    assert not (tmp_path / "work" / "language").exists()
    assert json.loads((tmp_path / "out" / "table1.json").read_text())["tables"] == record["tables"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::isomerge.merging.regression.StatisticsWarning")
def test_a_base_that_takes_long_has_fewer_seeds(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = language.BASES["reduced"]
    monkeypatch.setattr(language, "SEEDS", {("reduced", large): 1})
    monkeypatch.setitem(table1.SUITES, "reduced", table1.SUITES["reduced"][:1])
    runner.main("table1", "title", "paper", table1.script, [*tiny, "--seeds", "2"])
    record = json.loads((tmp_path / "out" / "table1.json").read_text())
    names = record["tables"][0]["columns"][1:]
    counts = {len([v for v in cell["values"] if v is not None]) if language.title(large) in name else 0
              for row in record["tables"][0]["rows"] for name, cell in zip(names, row[1:], strict=True)}  # fmt: skip
    assert counts == {0, 1}
    cells = record["cells"]
    assert any(f"{language.title(small)}, emotion, seed 1" in key for key in cells)
    assert not any(f"{language.title(large)}, emotion, seed 1" in key for key in cells)
    assert any(f"{language.title(large)}: 1 of 2 seeds" in note for note in record["notes"])


@pytest.mark.slow
def test_figure4_from_end_to_end(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure4, "STRIDES", {})
    runner.main("figure4", "title", "paper", figure4.script, [*tiny, "--seeds", "2"])
    record = json.loads((tmp_path / "out" / "figure4.json").read_text())
    assert [table["title"].split(":")[0] for table in record["tables"]] == [
        "all-MiniLM-L6-v2",
        "SmolLM2-135M-Instruct",
    ]
    for table, depth in zip(record["tables"], (2, 3), strict=True):
        assert [row[0] for row in table["rows"]] == [
            f"{name}, {reading}" for reading in (figure4.ACROSS, figure4.WITHIN) for name in ("CoLA", "STS-B")
        ]
        base = table["title"].split(":")[0]
        losses = record["cells"][f"{base}, {figure4.ACROSS}, seed 0"]["values"]["losses"]["STS-B"]
        assert losses["first"][str(depth)] == losses["last"][str(depth)]  # all layers
        assert losses["first"]["1"] == losses["single"]["0"]
        assert losses["last"]["1"] == losses["single"][str(depth - 1)]
    assert sum("First layers matter most" in claim for claim in record["claims"]) == 8


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (table1, ["FacebookAI/roberta-base", "ontonotes/conll2012_ontonotesv5", "eriktks/conll2003", corpora.UNIFIED]),
        (figure4, ["microsoft/deberta-v3-large on glue-cola", "nyu-mll/glue stsb", "20 epochs, rate 1e-05"]),
    ],
)
def test_a_dry_run_of_the_original_says_what_it_would_do(
    script: Any, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--scale", "original", "--dry-run", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    runner.main("dry", "title", "paper", script.script, argv)
    told = capsys.readouterr().out
    assert all(words in told for words in expected)
    assert "would compute" in told and not list(tmp_path.iterdir())


def test_other_bases_can_be_named(tiny: list[str], models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner.main("dry", "title", "paper", figure4.script, [*tiny, "--dry-run", "--bases", OLD])
    assert f"would fine-tune {models / language.title(OLD)} on CoLA" in capsys.readouterr().out
    runner.main("dry", "title", "paper", figure4.script, [*tiny, "--dry-run"])
    assert f"would fine-tune {models / language.title(language.BASES['reduced'][1])} on" in capsys.readouterr().out


def test_claims_count_what_rose_and_what_fell() -> None:
    suite = table1.Suite("emotion", ("one", "two"), ("three",))
    changes = {"Simple": 2.0, "Fisher": 0.0, "RegMean": -1.0}
    scores = {
        method + mark: {name: 50 + (change if mark else 0) for name in ("one", "two", "three")}
        for method, change in changes.items()
        for mark in table1_report.MARKS
    }
    cell = {"scores": scores, "distances": {"+match": [0.02, 0.01], "+full": [0.02, 0.02]}}
    cells = {f"{base}, emotion, seed {seed}, one+two": cell for base in ("small", "large") for seed in range(3)}
    found = table1_report.claims(["small", "large"], [suite], cells)
    assert (
        "Of 12 comparisons with at least three numbers 4 rose and 4 fell" in found[0]
        and "from -1.00 to +2.00" in found[0]
    )
    assert found[1].count("RegMean on emotion") == 4
    assert "2.000 % to 1.000 % (small)" in found[2]
    assert "Matching helps (+match (rotation, attention)): held in part." in found[0]
    assert "Larger models gain more: not to be told from noise" in found[-1]
    few = {key: cell for key, cell in cells.items() if "seed 0" in key}
    assert (
        "Of 0 comparisons with at least three numbers 0 rose and 0 fell"
        in table1_report.claims(["small", "large"], [suite], few)[0]
    )


def test_cells_side_by_side_are_those_of_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import crew

    class Now:
        """A pool that runs each job when it is handed in, so that no process has to start."""

        def submit(self, function: Any, *given: Any) -> Any:
            from concurrent.futures import Future

            future: Future[Any] = Future()
            try:
                future.set_result(function(*given))
            except ValueError as error:
                future.set_exception(error)
            return future

    asked: list[int] = []

    def double(number: int) -> dict[str, Any]:
        asked.append(number)
        if number < 0:
            raise ValueError("negative")
        return {"twice": 2 * number}

    run = runner.Run("x", "small", tmp_path, "cuda", 1, None, None, tmp_path)
    monkeypatch.setattr(crew, "_crew", lambda workers: contextlib.nullcontext(Now()))
    monkeypatch.setattr(crew, "shared", lambda: True)
    monkeypatch.setattr(crew, "_memory", lambda: 64 << 30)
    run.cell("b", lambda: {"twice": 4})
    assert crew.cells(run, double, {"a": 1, "b": 2, "c": 3}) == {
        "a": {"twice": 2},
        "b": {"twice": 4},
        "c": {"twice": 6},
    }
    assert asked == [1, 3]
    assert run.cells["a"]["seconds"] > 0
    assert crew.cells(run, double, {"a": 1, "c": 3}) == {"a": {"twice": 2}, "c": {"twice": 6}} and asked == [1, 3]
    with pytest.raises(ValueError, match="negative"):
        crew.cells(run, double, {"d": -1, "e": 5})
    assert run.known("e") and not run.known("d")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::isomerge.merging.regression.StatisticsWarning")
@pytest.mark.parametrize("script", [table1, figure4])
def test_with_finished_a_table_has_gaps_where_nothing_was_computed(
    script: Any, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figure4, "STRIDES", {})
    where = tmp_path / "out" / "x.json"

    def start(*more: str) -> dict[str, Any]:
        runner.main("x", "title", "paper", script.script, [*tiny, *more])
        return json.loads(where.read_text())  # type: ignore[no-any-return]

    assert start("--finished")["cells"] == {}
    whole = start()
    kept = tmp_path / "work" / "x.cells.json"
    half = {  # as if it had ended before the larger base
        key: cell for key, cell in json.loads(kept.read_text()).items() if not key.startswith('["SmolLM2')
    }
    kept.write_text(json.dumps(half))
    part = start("--finished")
    assert part["cells"] and set(part["cells"]) < set(whole["cells"])
    assert any("Not finished" in note for note in part["notes"])


def test_workers_are_no_more_than_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import crew

    run = runner.Run("x", "small", tmp_path, "cuda", 1, None, None, tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    counts = []
    for gigabytes in (8, 24, 80, 1000):
        monkeypatch.setattr(crew, "_memory", lambda size=gigabytes: size << 30)
        counts.append(crew._workers(run, 100))
    assert counts == [1, 1, 5, 8]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see whether a process runs")
def test_workers_end_with_a_script_that_was_killed(tmp_path: Path) -> None:
    """Else they would go on beside what is timed next."""
    program = tmp_path / "killed.py"
    program.write_text(
        f"import os, sys, time\nsys.path[:0] = {sys.path!r}\nimport crew\n"
        "def work(path):\n    open(path, 'w').write(str(os.getpid()))\n    time.sleep(600)\n"
        "if __name__ == '__main__':\n    crew._pool(1).submit(work, sys.argv[1]).result()\n"
    )
    told = tmp_path / "pid"
    script = subprocess.Popen([sys.executable, str(program), str(told)])
    until(lambda: told.exists() and told.read_text() != "")
    worker = int(told.read_text())
    assert running(worker)
    script.kill()
    script.wait()
    until(lambda: not running(worker))


def seen_by(job: int) -> tuple[int, int]:
    """In a process of its own: which one it is, and whether it knows what a job before it left."""
    import os

    before = int(os.environ.get("LEFT", "0"))
    os.environ["LEFT"] = str(job)
    if job == -1:
        raise ValueError("negative")
    if job < -1:
        os._exit(9)
    return os.getpid(), before


def kept_by(job: int) -> dict[str, Any]:
    return {"process": seen_by(job)[0]}


@pytest.mark.slow
def test_processes_stay_for_the_next_jobs_and_go_when_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    import crew

    run = runner.Run("x", "small", tmp_path, "cuda", 1, None, None, tmp_path)
    monkeypatch.setattr(crew, "_workers", lambda run, jobs: 2)
    monkeypatch.setattr(crew, "_pool", functools.lru_cache(maxsize=1)(lambda workers: crew_of_one()))

    def crew_of_one() -> Any:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    first = crew.side_by_side(run, seen_by, [1, 2])
    second = crew.side_by_side(run, seen_by, [3])
    assert [before for _, before in first + second] == [0, 1, 2]
    assert len({process for process, _ in first + second}) == 1 and first[0][0] != os.getpid()
    with pytest.raises(ValueError, match="negative"):
        crew.side_by_side(run, seen_by, [-1])
    third = crew.side_by_side(run, seen_by, [4])
    assert third[0][0] != first[0][0]
    monkeypatch.setattr(crew, "shared", lambda: True)
    with pytest.raises(BrokenProcessPool):
        crew.cells(run, kept_by, {"killed": -2})
    assert crew.cells(run, kept_by, {"lives": 5})["lives"]["process"] != third[0][0]


def until(happened: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


def running(process: int) -> bool:
    """Whether it is there and no mere entry of a process that ended."""
    status = Path(f"/proc/{process}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_merges_share_a_gpu_only_under_the_server_that_lets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import crew

    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not crew.shared()
    (tmp_path / "control").touch()
    assert crew.shared()
