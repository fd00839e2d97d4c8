"""The base given as a model too: it counts once, and a note says so where something set for it has no effect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from commands import said
from models import model, noisy

NAME = "model.layers.0.mlp.up_proj.weight"


def both(out: Path, method: str, *flags: str) -> tuple[list[str], list[np.ndarray]]:
    """The notes that speak of the base, and one tensor of base, fine-tune and result."""
    base = model("llama", 0, torch.float32)
    tuned = noisy(base, 0.05)
    notes = said("merge", base, tuned, "--base", base, "--method", method, *flags, "-o", out)["notes"]
    stored = [load_file(folder / "model.safetensors")[NAME] for folder in (base, tuned, out)]
    return [note for note in notes if f"{base} is the base and also one of the models" in note], stored


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_a_weight_of_the_base_has_no_effect_and_that_is_said(method: str, tmp_path: Path) -> None:
    notes, (_, tuned, merged) = both(tmp_path / "out", method, "--weights", "0.5,1")
    assert len(notes) == 1 and "has no effect" in notes[0]
    np.testing.assert_allclose(merged, tuned, rtol=0, atol=1e-6)  # base + 1 · (tuned − base), and no half of anything


@pytest.mark.parametrize(("method", "flags"), [("linear", ()), ("slerp", ("--t", "0.5"))])
def test_where_it_is_one_of_the_models_there_is_nothing_to_say(
    method: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    notes, (base, tuned, merged) = both(tmp_path / "out", method, *flags)
    assert notes == []
    np.testing.assert_allclose(merged, (base + tuned) / 2, rtol=0, atol=1e-3)
