"""An accelerator gives what the CPU gives. Needs one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import isomerge
from isomerge.connectivity.barrier import barrier
from isomerge.evaluation.evaluate import evaluate
from models import llama, vit
from samples import DIGITS, SENTENCES, write_digits

pytestmark = pytest.mark.cuda


def test_the_device_does_not_change_the_numbers(tmp_path: Path) -> None:
    write_digits(tmp_path / "digits")
    (tmp_path / "book.txt").write_text("\n".join(SENTENCES))
    for seed, name in enumerate("ab"):
        vit(tmp_path / name, DIGITS, seed=seed)
    llama(tmp_path / "llama")
    for device in ("cpu", "cuda"):
        curve = isomerge.curve(
            tmp_path / "a", tmp_path / "b", data=tmp_path / "digits", steps=4, points=3, device=device, noise=0.1
        )
        curve.save(1, tmp_path / device)
        assert all(
            torch.equal(tensor, load_file(tmp_path / "b" / "model.safetensors")[name])
            for name, tensor in load_file(tmp_path / device / "model.safetensors").items()
        )
    lines = [
        barrier(tmp_path / "a", tmp_path / "b", data=tmp_path / "digits", align=True, device=d) for d in ("cpu", "cuda")
    ]
    for one, two in zip(lines[0]["aligned"]["points"], lines[1]["aligned"]["points"], strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-3)
    losses = [evaluate(tmp_path / "llama", tmp_path / "book.txt", device=d)["loss"] for d in ("cpu", "cuda")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
