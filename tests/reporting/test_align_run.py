"""What the report of an alignment says of the run: the command, what it took, and what was asked of the output."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from isomerge.choices import STAGING
from reporting.outputs import made, page_of, record_of, said, verb


def test_the_command_of_the_record_writes_the_same_weights_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    said("align", "second", "first", "-o", out, "--level", "rotation", "--no-scale", "--sweeps", "3", "--quiet")
    record = record_of(out)
    assert record["request"]["command"] == (
        f"isomerge align second first -o {out} --level rotation --no-scale --sweeps 3"
    )
    again = shlex.split(record["request"]["command"].replace(str(out), str(tmp_path / "again")))
    assert again[:2] == ["isomerge", "align"]
    assert said(*again[1:])["sha256"] == record["sha256"]
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_the_request_has_every_option_in_force_and_the_page_shows_it() -> None:
    request = record_of(made("align"))["request"]
    assert {"level": "full", "sweeps": 15, "many": "anchor", "seed": 0, "device": "cpu"}.items() <= (
        request["options"].items()
    )
    assert not {"json", "quiet", "force", "report"} & request["options"].keys()
    words = page_of(made("align")).words
    assert request["command"] in "".join(words) and "sweeps" in words


def test_a_stored_transform_is_told_and_not_what_would_have_solved_it(tmp_path: Path) -> None:
    said("align", "second", "first", "-o", tmp_path / "out", "--save-transform", tmp_path / "t.safetensors")
    said("align", "second", "-o", tmp_path / "again", "--transform", tmp_path / "t.safetensors")
    record = record_of(tmp_path / "again")
    assert record["request"]["options"].keys() == {"transform", "seed", "device", "shard_size"}
    found = [record_of(tmp_path / name)["alignment"]["models"][0]["spaces"] for name in ("out", "again")]
    assert [row["units"] for row in found[0]] == [row["units"] for row in found[1]] != []
    assert any(words.startswith("Which units of second moved") for words in page_of(tmp_path / "again").words)


def test_where_data_lies_is_not_told(tmp_path: Path) -> None:
    from samples import digits

    said("align", "second", "first", "--data", digits(), "--limit", "8", "-o", tmp_path / "out")
    request = record_of(tmp_path / "out")["request"]
    assert request["options"]["data"] == Path(digits()).name
    assert f"--data {Path(digits()).name} --limit 8" in request["command"]


def test_time_memory_and_what_was_written_are_told() -> None:
    run = record_of(made("align"))["run"]
    assert run["seconds"] >= run["solve_seconds"] > 0 and run["peak_memory_bytes"] > 1e6 and run["threads"] >= 1
    state = load_file(made("align") / "model.safetensors")
    assert run["tensors"] == len(state) and run["bytes"] == sum(t.numel() * t.element_size() for t in state.values())


def test_the_output_is_looked_at_as_a_merge_looks_at_its_own() -> None:
    checks = {check["name"]: check for check in record_of(made("align"))["run"]["checks"]}
    merged = {check["name"] for check in record_of(made("aligned-merge"))["run"]["checks"]}
    assert checks.keys() == merged | {"same function"}
    assert checks["structure"]["passed"] is True and checks["same function"]["passed"] is True
    rows = {row[0]: row[1:] for row in page_of(made("align")).tables["Asked right after writing"][1:]}
    answers = {True: "yes", False: "NO", None: "not asked"}
    assert rows == {name: [answers[check["passed"]], check["detail"]] for name, check in checks.items()}
    assert any("align writes no lock file" in words for words in page_of(made("align")).words)


def test_every_one_of_several_models_has_its_own_page_and_checks(tmp_path: Path) -> None:
    said("align", "second", "first", "third", "-o", tmp_path / "out")
    records = [record_of(tmp_path / "out" / name) for name in ("second", "third")]
    assert records[0]["request"] == records[1]["request"]
    assert "align second first third" in records[0]["request"]["command"]
    assert all(record["run"]["tensors"] == 40 and record["run"]["checks"] for record in records)


def test_half_precision_is_not_held_against_the_alignment(tmp_path: Path) -> None:
    said("align", "second", "first", "-o", tmp_path / "out", "--out-dtype", "bfloat16")
    check = next(c for c in record_of(tmp_path / "out")["run"]["checks"] if c["name"] == "same function")
    assert check["passed"] is True and "by rounding to bfloat16" in check["detail"]


def test_what_is_wrong_with_the_output_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output whose function changed: the alignment says so itself."""
    monkeypatch.setattr("isomerge.alignment.exactness.largest_difference", lambda *_, **__: (0.5, ""))
    told = said("align", "second", "first", "-o", tmp_path / "out", "--force")
    assert told["verdict"].startswith("changed")
    assert any(note.startswith("Verification failed") and "same function" in note for note in told["notes"])
    assert "NO" in page_of(tmp_path / "out").words


def test_an_interrupted_alignment_continues_from_what_it_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isomerge.symmetry.moved import MovedModel

    make = MovedModel.made
    made_now: list[str] = []

    def stopped(move: MovedModel, name: str, plan: Any) -> Any:
        if made_now:
            raise KeyboardInterrupt
        made_now.append(name)
        return make(move, name, plan)

    line = ("align", "second", "first", "-o", tmp_path / "out", "--threads", "1")
    with monkeypatch.context() as patch:
        patch.setattr(MovedModel, "made", stopped)
        told = verb(*line)
    assert told.exit_code == 130 and "the same command continues from there" in told.stderr
    assert len((tmp_path / "out" / STAGING / "journal.jsonl").read_text().splitlines()) == 2, "one tensor"
    assert list((tmp_path / "out" / STAGING / ".solved").glob("*align-0.safetensors")), "and the solution"
    assert said(*line)["sha256"] == record_of(made("align"))["sha256"]
