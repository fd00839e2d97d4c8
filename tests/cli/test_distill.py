"""`isomerge distill` on tiny models: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from commands import said, verb
from models import model, read_config
from samples import digits

DATA = ("--data", digits(count=24), "--batch-size", "8", "--steps", "4", "--goals", "mean")


def teachers() -> list[Path]:
    return [model("vit", seed, torch.float32) for seed in (0, 1)]


def test_the_table_has_the_controls_and_the_folder_is_a_model(tmp_path: Path) -> None:
    student = model("vit", 2, torch.float32)
    done = verb("distill", *teachers(), "--student", student, *DATA, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    for words in ("student before", "ensemble", "student after", "distance", "accuracy", "config from"):
        assert words in done.stdout
    for file in ("model.safetensors", "README.md", "isomerge.json", "isomerge.lock.json", "report.html"):
        assert (tmp_path / "out" / file).is_file()
    assert "by 4 gradient steps without labels" in (tmp_path / "out" / "README.md").read_text()
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Distance to the goals on held-out examples" in page and "4 steps" in page
    record = json.loads((tmp_path / "out" / "isomerge.json").read_text())
    assert record["method"] == "distill" and record["donor"] == str(student)
    assert {entry["reference"]: entry["role"] for entry in record["inputs"]}[str(student)] == "base"
    again = verb("distill", *teachers(), "--student", student, *DATA, "-o", tmp_path / "out")
    assert again.exit_code == 2 and "--force" in again.stderr
    assert verb("verify", tmp_path / "out").exit_code == 0


def test_flags_say_whose_data_and_how_long(tmp_path: Path) -> None:
    folders, data = teachers(), [digits(count=24), digits(first=24, count=24)]
    record = said(
        "distill", *folders, "--data", data[0], "--data", data[1], "--weights", "1,3", "--steps", "2", "--rate", "0.01",
        "--temperature", "2", "--limit", "16", "-o", tmp_path / "out", "--no-report",
    )  # fmt: skip
    about = record["distilled"]
    assert (about["steps"], about["rate"], about["temperature"], about["fresh"]) == (2, 0.01, 2.0, False)
    assert record["goals"] == {"kind": "own", "examples": [14.0, 14.0]}
    assert record["weights"] == [0.25, 0.75] and record["verified"]
    assert len(about["held_out"]) == 5 and not (tmp_path / "out" / "report.html").exists()


def test_a_fresh_student_of_a_config_alone(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps({**read_config(teachers()[0]), "num_hidden_layers": 1}))
    record = said("distill", *teachers(), "--student", small, "--fresh", *DATA, "--seed", "3", "-o", tmp_path / "out")
    assert record["distilled"]["fresh"] and record["distilled"]["rate"] == 0.05
    assert said("reproduce", tmp_path / "out")["verdict"] == "identical"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "Add --data PATH"),
        (("--data", "nowhere.txt"), "no such file"),
        ((*DATA, "--goals", "al"), "--goals cannot be 'al'"),
        ((*DATA, "--fresh"), "--student"),
        ((*DATA, "--weights", "1"), "--weights has 1 number for 2 models"),
        ((*DATA, "--temperature", "0"), "temperature is 0"),
        (("--data", "x", "--steps", "0"), "--steps"),
    ],
)
def test_a_mistake_is_one_paragraph(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    done = verb("distill", *teachers(), *flags, "-o", tmp_path / "out")
    assert done.exit_code == 2 and words in " ".join(done.stderr.split()), done.stderr
    assert not (tmp_path / "out").exists()
