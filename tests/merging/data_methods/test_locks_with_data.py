"""A merge with data is locked, made again bit for bit, and refused when the data is not what it was."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import said, verb
from isomerge.text import inert
from models import image_pair as pair
from samples import digits


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits(), tmp_path / "a place of its own" / "digits"))


FORMS: dict[str, list[Any]] = {
    "reconstruct": ["--method", "reconstruct", "--align", "--limit", 60, "--ridge", "0.1"],
    "fisher": ["--method", "fisher", "--fisher", "empirical", "--limit", 60],
    "linear": ["--align", "--evidence", "mix", "--repair"],
    "greedy_soup": ["--method", "greedy_soup"],
    "swad": ["--method", "swad", "--optimum", 1],
    "twa": ["--method", "twa", "--steps", 3],
    "learned_soup": ["--method", "learned_soup", "--by", "layer", "--steps", 5, "--limit", 60],
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_merge_with_data_is_made_again_bit_for_bit(form: str, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    record = said("merge", *pair(), *FORMS[form], "--data", images, "-o", out)
    lock = json.loads((out / "isomerge.lock.json").read_text())
    (data,) = lock["options"]["data"]
    assert data["sha256"] == record["data"][0]["sha256"] and data["name"] == "digits" and record["verified"]
    assert lock["versions"]["transformers"] == version("transformers")
    assert data["path"] == str(images) and lock["options"]["torch_threads"] == 1
    torch.set_num_threads(2)  # the lock knows in how many it was made
    try:
        again = said("reproduce", out)
    finally:
        torch.set_num_threads(1)
    assert again["verdict"] == "identical" and again["sha256"] == record["sha256"]
    assert said("verify", out)["verdict"] == "good"


def test_changed_or_missing_data_is_refused(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said("merge", *pair(), "--method", "reconstruct", "--data", images, "--limit", 40, "-o", out)
    extra = next(images.rglob("*.png"))
    moved = extra.with_name("9999.png")
    extra.rename(moved)
    next(p for p in images.rglob("*.png") if p != moved).unlink()
    told = verb("reproduce", out)
    assert told.exit_code == 1 and "inputs changed" in told.stdout and "its content has changed" in told.stdout
    shutil.rmtree(images)
    told = verb("reproduce", out)
    assert told.exit_code == 1 and "there is no such file or folder" in told.stdout


def test_the_card_names_the_data_and_no_place_on_this_machine(images: Path, tmp_path: Path) -> None:
    out, recipe = tmp_path / "out", tmp_path / "recipe.yml"
    a, b = pair()
    recipe.write_text(
        f"merge_method: regmean++\nmodels:\n- {{model: {a}, data: '{images}'}}\n"
        f"- {{model: {b}, data: {digits(40, 40)}}}\nalign: {{data: {{path: '{images}', limit: 30}}}}\n"
    )
    record = said("merge", recipe, "-o", out)
    card = (out / "README.md").read_text()
    assert str(images.parent) not in card and str(digits(40, 40)) not in card
    for data in record["data"]:
        assert f"| {inert(data['name'])} | {data['examples']} | `{data['sha256']}` |" in card
    assert "As regmean, layer after layer" in card and "data: {path" not in card and "path: digits" in card
    assert sorted(data["examples"] for data in record["data"]) == [30, 40, 90]


def test_data_is_never_written_over(images: Path) -> None:
    flags = ["--method", "reconstruct", "--data", images, "--force", "-o"]
    for out in (images, images / "merged"):
        told = verb("merge", *pair(), *flags, out)
        assert told.exit_code == 2 and "inputs are never modified" in told.stderr
    assert len(list(images.rglob("*.png"))) == 90


def test_data_given_as_an_object_cannot_be_opened_again(tmp_path: Path) -> None:
    import isomerge
    from isomerge.data import open_data

    merged = isomerge.merge(pair(), method="reconstruct", data=open_data(digits()))
    merged.save(tmp_path / "out")
    told = verb("reproduce", tmp_path / "out")
    assert told.exit_code == 1 and "given to Python as an object" in told.stdout
