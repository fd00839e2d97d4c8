"""A move that would change what the model computes is an error, and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import isomerge
from isomerge.cli.app import app
from isomerge.errors import AlignmentError, CheckpointError
from models import difference, logits, model, tensors

Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "transform.safetensors"
    isomerge.align(model("llama", 1), model("llama", 0)).save_transform(path)
    return path


def forge(path: Path, edit: Edit) -> None:
    """Change the spaces (their groups) and the elements of a stored transform."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    spaces, elements = json.loads(metadata["spaces"]), load_file(path)
    edit(spaces, elements)
    save_file(elements, path, metadata={**metadata, "spaces": json.dumps(spaces)})


def matrix_for_units(spaces: dict[str, Any], elements: dict[str, torch.Tensor]) -> None:
    """Hidden units of a SiLU may only change places; the file says that they rotate."""
    spaces["ffn.0"]["group"] = "rotation"
    size = spaces["ffn.0"]["size"]
    elements["element:ffn.0"] = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0].contiguous()


def any_matrix_for_the_stream(spaces: dict[str, Any], elements: dict[str, torch.Tensor]) -> None:
    spaces["residual"]["group"] = "invertible"
    elements["element:residual"] = elements["element:residual"] * 2


def another_pairing(spaces: dict[str, Any], elements: dict[str, torch.Tensor]) -> None:
    """Numbers that commute with rotary positions in another layout than the model's."""
    spaces["qk.0"]["layout"] = "interleaved"


def signs(spaces: dict[str, Any], elements: dict[str, torch.Tensor]) -> None:
    """Units of a SiLU with a sign each."""
    spaces["ffn.1"]["group"] = "signed permutation"
    elements["element:ffn.1"] = -(torch.arange(spaces["ffn.1"]["size"]) + 1)


def larger_than_the_space(spaces: dict[str, Any], elements: dict[str, torch.Tensor]) -> None:
    elements["element:ffn.0"] = torch.arange(spaces["ffn.0"]["size"]).repeat(2, 1)


def a_space_of_its_own(spaces: dict[str, Any], elements: dict[str, torch.Tensor]) -> None:
    elements["element:other"] = torch.arange(3)


FORGERIES = [
    matrix_for_units, any_matrix_for_the_stream, another_pairing, signs, larger_than_the_space, a_space_of_its_own,
]  # fmt: skip


@pytest.mark.parametrize("edit", FORGERIES, ids=lambda edit: edit.__name__)
def test_a_forged_transform_is_refused_and_nothing_written(edit: Edit, stored: Path, tmp_path: Path) -> None:
    forge(stored, edit)
    with pytest.raises(AlignmentError):
        isomerge.align(model("llama", 1), transform=stored)
    line = ["align", str(model("llama", 1)), "--transform", str(stored), "-o", str(tmp_path / "out")]
    for more in ([], ["--force"]):  # a forgery is refused whoever asks
        assert CliRunner().invoke(app, [*line, *more]).exit_code == 1
    assert not (tmp_path / "out").exists()


def changed_by(monkeypatch: pytest.MonkeyPatch, share: float, dtype: torch.dtype = torch.float32) -> isomerge.Alignment:
    """An alignment with a mistake that no membership test could see: one moved tensor is off by a share of itself."""
    from isomerge.symmetry.moved import MovedModel

    alignment = isomerge.align(model("llama", 1, dtype), model("llama", 0, dtype))
    right = MovedModel.tensor
    name = "model.layers.0.mlp.down_proj.weight"
    assert name in tensors(model("llama", 1, dtype))

    def wrong(self: MovedModel, asked: str) -> torch.Tensor:
        moved = right(self, asked)
        return moved * (1 + share) if asked == name else moved

    monkeypatch.setattr(MovedModel, "tensor", wrong)
    return alignment


def test_a_changed_function_is_an_error_that_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alignment = changed_by(monkeypatch, 0.3)
    (tmp_path / "there").mkdir()
    for out in (tmp_path / "out", tmp_path / "there"):
        with pytest.raises(AlignmentError, match="would compute something else") as caught:
            alignment.save(out)
        assert "force" in caught.value.keys
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]
    assert not list((tmp_path / "there").iterdir())


def test_force_writes_a_changed_function_and_heads_the_result_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alignment = changed_by(monkeypatch, 0.3)
    alignment.save(tmp_path / "out", force=True)
    report = alignment.report()
    assert report["verdict"].startswith("changed")
    assert report["max_output_difference"] > 0.01
    assert difference(logits(alignment.source.checkpoint.folder), logits(tmp_path / "out")) > 0.01
    checks = json.loads((tmp_path / "out" / "isomerge.json").read_text())["run"]["checks"]
    assert [check["passed"] for check in checks if check["name"] == "same function"] == [False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_mistake_is_told_from_rounding_in_every_dtype(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 0.02, which a bfloat16 model could show by rounding alone."""
    honest = isomerge.align(model("llama", 1, dtype), model("llama", 0, dtype))
    honest.save(tmp_path / "honest")
    assert honest.exactness.same is True
    alignment = changed_by(monkeypatch, 0.02, dtype)
    with pytest.raises(AlignmentError):
        alignment.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("level", ["permutation", "rotation", "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "vit", "bert", "t5"])
def test_honest_alignments_pass(family: str, dtype: torch.dtype, level: str, tmp_path: Path) -> None:
    alignment = isomerge.align(model(family, 1, dtype), model(family, 0, dtype), level=level)
    alignment.save(tmp_path / "out")
    assert alignment.exactness.same is True


def test_a_model_whose_written_dtype_overflows_is_refused(tmp_path: Path) -> None:
    """Infinite weights would be read back as NaN: rounding is no excuse for that."""
    from alignment.test_align_dtypes import with_gain

    anchor = with_gain(model("vit", 0, torch.float16), 0.01, "small")
    source = with_gain(model("vit", 1, torch.float16), 4000.0, "large")
    with pytest.raises(AlignmentError, match="too large for the written dtype"):
        isomerge.align(source, anchor=anchor).save(tmp_path / "out")
    isomerge.align(source, anchor=anchor).save(tmp_path / "out", out_dtype="float32")


def test_a_family_with_one_changed_model_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed_by(monkeypatch, 0.3)
    family = isomerge.align_family([model("llama", k, torch.float32) for k in (1, 2)], anchor=model("llama", 0))
    with pytest.raises(AlignmentError):
        family.save(tmp_path / "out", anchor_out=tmp_path / "anchor")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_weights_that_cannot_be_read_back_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a reason to leave the check out: what was written could be anything."""
    from isomerge.evaluation.probe import largest_difference

    first, second = isomerge.open_checkpoint(model("llama", 0)), isomerge.open_checkpoint(model("llama", 1))
    assert largest_difference(first, second)[0] is not None

    def fails(name: str) -> torch.Tensor:
        raise CheckpointError(f"While reading {name}: Input/output error.")

    monkeypatch.setattr(second, "read", fails)
    with pytest.raises(CheckpointError, match="Input/output error"):
        largest_difference(first, second)
