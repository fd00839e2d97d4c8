"""A sweep whose best point is one of the parents says so: that number is no merit of the merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isomerge
from commands import verb
from models import model, noisy, tensors, variant

NOTE = "the best point is one of the parents"


def parents_of(recipe: dict[str, Any], over: dict[str, Any], **options: Any) -> list[str | None]:
    swept = isomerge.sweep(recipe, over, loss=lambda module: 0.0, **options)
    return [point.parent for point in swept.points]


def slerp(a: Path, b: Path, **more: Any) -> dict[str, Any]:
    models = [{"model": str(a)}, {"model": str(b)}]
    return {"merge_method": "slerp", "base_model": str(a), "models": models, "parameters": {"t": 0.5}, **more}


def like(folder: Path) -> Any:
    """A loss that is least for one model: how far a module's weights are from it."""
    wanted = torch.cat([tensor.flatten() for _, tensor in sorted(tensors(folder).items())]).norm()

    def loss(module: nn.Module) -> float:
        own = torch.cat([tensor.detach().flatten() for _, tensor in sorted(module.named_parameters())]).norm()
        return float((own - wanted).abs())

    return loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ends_of_a_line_are_parents_and_the_points_between_are_not(dtype: torch.dtype) -> None:
    a, b = model("llama", 0, dtype), model("llama", 1, dtype)
    assert parents_of(slerp(a, b), {"t": [0, 0.001, 0.5, 1]}) == [str(a), None, None, str(b)]


def test_siblings_are_told_apart_from_their_mean() -> None:
    a = model("llama", 0, torch.bfloat16)
    b = noisy(a, 0.01)
    assert parents_of(slerp(a, b), {"t": [0, 0.05, 0.95, 1]}) == [str(a), None, None, str(b)]


def test_an_aligned_parent_is_a_parent() -> None:
    a, b = model("vit", 0, torch.float32), model("vit", 1, torch.float32)
    found = parents_of(slerp(a, b, align={"level": "permutation"}), {"t": [0, 0.5, 1]})
    assert found == [str(a), None, str(b)]


def test_nothing_added_to_a_base_is_the_base() -> None:
    base, a = model("llama", 0, torch.float32), model("llama", 1, torch.float32)
    recipe = {"merge_method": "task_arithmetic", "base_model": str(base), "models": [{"model": str(a)}]}
    assert parents_of(recipe, {"weight": [0.0, 0.3, 1.0]}) == [str(base), None, str(a)]


def test_tables_of_different_length_hide_no_parent() -> None:
    a, b = (model("bert", seed, torch.float32, max_position_embeddings=19 + 4 * seed) for seed in (0, 1))
    assert parents_of(slerp(a, b), {"t": [0.5, 1]}) == [None, str(b)]


def test_the_same_model_twice_names_no_parent() -> None:
    a = model("llama", 0, torch.float32)
    assert parents_of(slerp(a, variant(a, {}, "copy")), {"t": [0.5]}) == [None]


def test_the_best_point_says_that_it_is_a_parent(tmp_path: Path) -> None:
    a, b = model("llama", 0, torch.float32), model("llama", 1, torch.float32)
    swept = isomerge.sweep(slerp(a, b), {"t": "0:1:0.5"}, loss=like(b))
    assert swept.best.parent == str(b) and swept.to_dict()["best"]["parent"] == str(b)
    assert NOTE in swept.notes[0] and f"t=1 gives {b} itself" in swept.notes[0]
    between = isomerge.sweep(slerp(a, b), {"t": [0.4, 0.6]}, loss=like(b))
    assert between.best.parent is None and not any(NOTE in note for note in between.notes)


def test_the_command_line_and_a_resumed_sweep_say_it_too(tmp_path: Path) -> None:
    from samples import digits

    a, b = model("vit", 0, torch.float32), model("vit", 1, torch.float32)
    line = ["sweep", a, b, "--method", "slerp", "--base", a, "--over", "t=0,1", "--data", digits(), "--limit", 9,
            "-o", tmp_path / "swept"]  # fmt: skip
    first, again = verb(*line), verb(*line, "--json")
    assert first.exit_code == again.exit_code == 0, first.output + again.output
    record = json.loads(again.stdout)
    assert [point["parent"] for point in record["points"]] == [str(a), str(b)] and record["kept"] == 2
    assert record["best"]["parent"] in (str(a), str(b)) and NOTE in record["notes"][0]
    assert f"note: {NOTE}" in " ".join(first.stdout.split())
