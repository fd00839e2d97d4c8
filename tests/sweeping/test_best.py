"""`isomerge.best`: which ways of merging are tried for which models, and what it says at the end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import isomerge
from isomerge.cli.app import app
from isomerge.errors import RequestError
from models import noisy, vit
from samples import DIGITS, write_digits


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with two fine-tunes, a stranger, and digits in two parts."""
    folder = tmp_path_factory.mktemp("family")
    vit(folder / "base", DIGITS, seed=0)
    vit(folder / "stranger", DIGITS, seed=5)
    for seed, name in enumerate("ab"):
        shutil.copytree(noisy(folder / "base", 0.3, seed=seed), folder / name)
    write_digits(folder / "digits", 30)
    (folder / "digits" / "test").rename(folder / "digits" / "validation")
    write_digits(folder / "digits", 21)
    return folder


def found_for(folder: Path, *models: str, **more: Any) -> isomerge.Sweep:
    given = {"data": folder / "digits", "algorithm": "random", "evaluations": 9, **more}
    return isomerge.best(*(folder / model for model in models), **given)


def test_siblings_with_a_base_are_added_up_first(family: Path, tmp_path: Path) -> None:
    found = found_for(family, "a", "b", base=family / "base", out=tmp_path / "out")
    assert found.candidates is not None and found.controls is not None and found.test is not None
    assert [row.name for row in found.candidates[:4]] == ["task arithmetic", "TIES", "mean", "slerp"]
    assert sum(row.evaluations for row in found.candidates) == 9
    assert found.best.loss == min(row.loss for row in found.candidates if row.loss is not None)
    assert [row.gain for row in found.candidates if row.loss == found.best.loss] == [0.0]
    assert [Path(one.name).name for one in found.controls] == ["a", "b", "base"]
    assert [one.role for one in found.controls] == ["model", "model", "base"]
    assert (found.examples, found.test.examples) == (30, 21)
    assert found.says is not None and (found.keep is None) == (found.model is not None)
    again = found_for(family, "a", "b", base=family / "base", out=tmp_path / "out", force=True)
    assert again.kept == 9 and again.best.loss == found.best.loss


def test_a_list_of_models_is_chosen_from_and_searched_as_well(family: Path) -> None:
    models, given = [family / "a", family / "b"], {"data": family / "digits", "algorithm": "random", "evaluations": 4}
    apart, listed = isomerge.best(*models, **given), isomerge.best(models, **given)
    assert listed.best.to_dict() | {"seconds": 0} == apart.best.to_dict() | {"seconds": 0}
    assert any(f"({row.name}" in (apart.says or "") for row in apart.candidates or ()), "the way is named"
    mean = {"merge_method": "linear", "models": [{"model": str(model)} for model in models]}
    found, expected = isomerge.search(models, **given), isomerge.search(mean, **given)
    assert [point.loss for point in found.points] == [point.loss for point in expected.points]


def test_strangers_are_aligned(family: Path) -> None:
    found = found_for(family, "a", "stranger", evaluations=4)
    assert found.candidates is not None
    assert [row.name for row in found.candidates] == ["mean", "aligned mean"]
    assert any("reconstruct was left out" in note for note in found.notes)


def test_a_part_called_train_is_for_methods_that_need_data(family: Path, tmp_path: Path) -> None:
    shutil.copytree(family / "digits", tmp_path / "digits")
    write_digits(tmp_path / "more", 40)
    (tmp_path / "more" / "test").rename(tmp_path / "digits" / "train")
    found = found_for(family, "a", "stranger", data=tmp_path / "digits", evaluations=4)
    assert found.candidates is not None
    assert [row.name for row in found.candidates] == ["mean", "aligned mean", "reconstruct"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("best a --data digits", "at least two models"),
        ("best a b", "--data PATH"),
        ("best a a --data digits", "nothing to merge"),
        ("best a nowhere --data digits", "nowhere"),
        ("best a b --data digits --evaluations 1", "at least 3"),
        ("best a b --data digits --test digits --split validation --test-split validation", "the same data"),
    ],
)
def test_mistakes_are_told_in_a_paragraph(family: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: str) -> None:
    monkeypatch.chdir(family)
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 2 and words in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_models_of_two_kinds_are_refused(family: Path, tmp_path: Path) -> None:
    vit(tmp_path / "other", [*DIGITS, "three"], seed=1)
    with pytest.raises(RequestError, match="cannot be merged"):
        found_for(family, "a", str(tmp_path / "other"))


def test_the_table_has_every_way_beside_the_models(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(family)
    line = "best a b --data digits --algorithm random --evaluations 4"
    shown = CliRunner().invoke(app, line.split())
    assert shown.exit_code == 0, shown.stderr
    rows = [row.split("  ")[0] for row in shown.stdout.splitlines()]
    assert any(row.startswith("mean:") for row in rows) and "a (model)" in rows and "b (model)" in rows
    record = json.loads(CliRunner().invoke(app, [*line.split(), "--json"]).stdout)
    page = (Path(__file__).parents[2] / "docs" / "search.md").read_text()
    assert all(f"`{key}`" in page for key in {*record, *record["candidates"][0]})
