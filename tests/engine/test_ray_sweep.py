"""A sweep on a cluster measures what threads measure, and keeps each point as soon as it is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import isomerge
from isomerge.errors import RequestError
from models import vit
from samples import DIGITS, write_digits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for seed, name in enumerate("ab"):
        vit(folder / name, DIGITS, seed=seed)
    write_digits(folder / "digits", 24)
    write_digits(folder / "others", 36)
    return folder


def measured(swept: isomerge.Sweep) -> list[Any]:
    return [(point.parameters, point.loss, point.metric, point.parent) for point in swept.points]


def test_points_are_those_of_the_threads_and_are_not_measured_twice(cluster, images: Path, tmp_path: Path) -> None:
    over = {"t": [0.0, 0.25, 0.5]}
    given: dict[str, Any] = {"method": "slerp", "base": images / "a", "data": images / "digits"}
    models = [images / "a", images / "b"]
    here = isomerge.sweep(models, over, **given)
    there = isomerge.sweep(models, over, engine="ray", out=tmp_path / "swept", **given)
    assert measured(there) == measured(here)
    assert there.points[0].parent == str(images / "a")
    more = isomerge.sweep(models, {"t": [0.0, 0.25, 0.5, 0.75]}, engine="ray", out=tmp_path / "swept", **given)
    assert [point.kept for point in more.points] == [True, True, True, False]
    assert len((tmp_path / "swept" / "points.jsonl").read_text().splitlines()) == 4


def test_a_search_finds_the_same(cluster, images: Path) -> None:
    recipe = {"merge_method": "linear", "models": [{"model": str(images / name)} for name in "ab"]}
    given: dict[str, Any] = {
        "data": images / "digits", "test": images / "others", "algorithm": "random", "evaluations": 5,
    }  # fmt: skip
    here = isomerge.search(recipe, {"a.weight": "0:1"}, workers=2, **given)
    there = isomerge.search(recipe, {"a.weight": "0:1"}, engine="ray", **given)
    assert measured(there) == measured(here)
    assert there.best.parameters == here.best.parameters and there.test == here.test


def test_data_in_memory_is_refused(cluster, images: Path) -> None:
    recipe = {"merge_method": "linear", "models": [{"model": str(images / name)} for name in "ab"]}
    with pytest.raises(RequestError, match="files that workers open themselves.*Leave engine out"):
        isomerge.sweep(recipe, {"a.weight": [0, 1]}, data=isomerge.open_data(images / "digits"), engine="ray")
