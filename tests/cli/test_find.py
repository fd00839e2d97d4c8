"""`isomerge describe` and `isomerge find` on tiny models: what they print, write and refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from commands import said, verb
from isomerge.zoo.description import NAME
from models import image_pair, model
from samples import digits

DATA = ("--data", digits())


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    for name, folder in zip("ab", image_pair(), strict=True):
        shutil.copytree(folder, tmp_path / "zoo" / name)
    return tmp_path / "zoo"


def test_a_description_is_written_and_shown(zoo: Path) -> None:
    done = verb("describe", zoo / "a", *DATA, "--points", "4")
    assert done.exit_code == 0, done.output
    for words in ("90 examples in 4 points (image-1)", "accuracy", NAME):
        assert words in done.stdout
    again = verb("describe", zoo / "a", *DATA)
    assert again.exit_code == 2 and "--force" in again.stderr
    record = said("describe", zoo / "a", *DATA, "--points", "4", "--no-score", "--force")
    assert (record["points"], record["metric"]) == (4, None)


def test_models_are_ranked_and_the_best_merged(zoo: Path, tmp_path: Path) -> None:
    said("describe", zoo / "b", *DATA, "--no-score", "-o", zoo / "b.json")
    record = said("find", digits(), zoo, "--merge", "2", "-o", tmp_path / "out")
    assert [Path(one["name"]).name for one in record["models"]][-1] == "b.json"
    assert record["by"] == "leep" and record["merged"]["verified"]
    inputs = json.loads((tmp_path / "out" / "isomerge.json").read_text())["inputs"]
    assert {Path(one["reference"]).name for one in inputs} == {"a", "b"}
    done = verb("find", digits(), zoo, "--by", "distance", "--limit", "40")
    assert done.exit_code == 0 and "ranked by distance on 40 examples" in done.stdout
    first = done.stdout.splitlines()[1]
    assert first.startswith("1") and "b.json" in first


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--merge", "2"), "--merge 3 -o merged"),
        (("-o", "out"), "--merge 3 -o merged"),
        (("--method", "linear"), "--merge 3 -o merged"),
        (("--by", "leeep"), "leep"),
        (("--by", "distance"), "--by"),
        (("--merge", "3", "-o", "out"), "--merge"),
        (("--merge", "1", "-o", "out"), "--merge"),
    ],
)
def test_mistakes_are_told_by_their_flags(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = verb("find", digits(), zoo, *words)
    assert done.exit_code == 2 and named in done.stderr
    assert not (tmp_path / "out").exists()


def test_describe_wants_data_and_enough_of_it() -> None:
    folder = model("vit", 0)
    assert "--data" in verb("describe", folder).stderr
    few = verb("describe", folder, *DATA, "--limit", "30", "--points", "9", "-o", "about.json")
    assert few.exit_code == 2 and "--points" in few.stderr
