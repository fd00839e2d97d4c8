"""An output is not more readable than its inputs: a private model gives a private merge."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

import isomerge
from commands import verb
from isomerge.calibration.statistics import open_statistics
from models import gpt2, model, noisy


@pytest.fixture(autouse=True)
def _usual_mask() -> Iterator[None]:
    """With which everybody may read what is written."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    first = model("llama")
    places = tmp_path / "a", tmp_path / "b"
    for source, place in zip((first, noisy(first)), places, strict=True):
        shutil.copytree(source, place)
        place.chmod(0o755)
        for file in place.iterdir():
            file.chmod(0o644)
    return places


def others_rights(folder: Path) -> dict[str, int]:
    """What group and others may do, with the folder and with everything in it."""
    every = [folder, *folder.rglob("*")]
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) & 0o077 for path in every}


def outputs(pair: tuple[Path, Path], place: Path) -> list[Path]:
    """All kinds of folders that are made of two models, through the command line."""
    commands = {
        "merged": ["merge", *pair],
        "aligned": ["align", *pair],
        "adapter": ["extract", *pair, "--rank", "1"],
    }
    for name, words in commands.items():
        done = verb(*words, "-o", place / name)
        assert done.exit_code == 0, done.output
    return [place / name for name in commands]


def test_public_inputs_give_public_outputs(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for folder in outputs(pair, tmp_path):
        rights = others_rights(folder)
        assert rights.pop(".") == 0o055 and set(rights.values()) == {0o044}


@pytest.mark.parametrize("private", ["weights", "folder", "tokenizer"])
@pytest.mark.parametrize("which", [0, 1])
def test_one_private_input_makes_the_output_private(
    pair: tuple[Path, Path], tmp_path: Path, private: str, which: int
) -> None:
    if private == "weights":
        (pair[which] / "model.safetensors").chmod(0o600)
    elif private == "folder":
        pair[which].chmod(0o700)
    else:
        (pair[0] / "tokenizer.json").write_text("{}", encoding="utf-8")
        (pair[0] / "tokenizer.json").chmod(0o600)
    folders = [tmp_path / "merged"] if private == "tokenizer" else outputs(pair, tmp_path)
    if private == "tokenizer":
        isomerge.merge([str(one) for one in pair]).save(tmp_path / "merged")
    for folder in folders:
        assert set(others_rights(folder).values()) == {0}, folder


def test_the_group_may_read_what_it_could_read(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (pair[1] / "model.safetensors").chmod(0o640)
    isomerge.merge([str(one) for one in pair]).save(tmp_path / "merged")
    rights = others_rights(tmp_path / "merged")
    assert rights.pop(".") == 0o050 and set(rights.values()) == {0o040}


def test_a_folder_that_was_there_keeps_its_rights_and_its_files_get_none(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    (pair[1] / "model.safetensors").chmod(0o600)
    (tmp_path / "merged").mkdir()
    isomerge.merge([str(one) for one in pair]).save(tmp_path / "merged")
    rights = others_rights(tmp_path / "merged")
    assert rights.pop(".") == 0o055 and set(rights.values()) == {0}


def test_what_is_staged_is_never_readable_either(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at while it is written: rights that are taken away at the end come too late."""
    from isomerge.checkpoint.writer import CheckpointWriter

    (pair[1] / "model.safetensors").chmod(0o600)
    seen: list[int] = []
    finish = CheckpointWriter.finish

    def look(writer: CheckpointWriter, *args: object, **more: object) -> None:
        rights = others_rights(writer.out)
        seen.extend(rights[name] for name in (".", ".isomerge-partial", ".isomerge-partial/model.safetensors"))
        finish(writer, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointWriter, "finish", look)
    isomerge.merge([str(one) for one in pair]).save(tmp_path / "merged")
    assert seen and set(seen) == {0}


@pytest.mark.parametrize("private", ["model", "data", "nothing"])
def test_statistics_of_a_private_model_or_of_private_data_are_private(
    tmp_path: Path, private: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold means and products of what the model computes on the data."""

    def usual(tensors: Any, path: Path, metadata: Any = None) -> None:
        """As safetensors before 0.8 writes a file, which others may read unless somebody sees to it."""
        path.write_bytes(safetensors.torch.save(tensors, metadata))

    folder, data = tmp_path / "a", tmp_path / "texts.txt"
    gpt2(folder)
    monkeypatch.setattr("safetensors.torch.save_file", usual)
    data.write_text("the cat sat on the mat\n" * 4)
    for path in (data, *folder.iterdir()):
        path.chmod(0o644)
    if private != "nothing":
        (data if private == "data" else folder / "model.safetensors").chmod(0o600)
    isomerge.calibrate(folder, data).save(tmp_path / "statistics.safetensors")
    open_statistics(tmp_path / "statistics.safetensors").save(tmp_path / "copy.safetensors")
    rights = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*.safetensors")}
    expected = 0o644 if private == "nothing" else 0o600
    assert rights == {"statistics.safetensors": expected, "copy.safetensors": expected}
