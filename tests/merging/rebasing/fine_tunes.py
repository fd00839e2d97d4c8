"""A base, a fine-tune of it, and new bases whose relation to it is known."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

import models as tiny
from isomerge.architectures import describe
from isomerge.checkpoint import open_checkpoint
from isomerge.symmetry.moved import scrambled


def fine_tune(base: Path, share: float = 0.2, seed: int = 5, only: str = "") -> Path:
    """Every tensor (or those with `only` in their names) with something added."""
    generator = torch.Generator().manual_seed(seed)
    changed: dict[str, Tensor] = {}
    for name, tensor in sorted(tiny.tensors(base).items()):
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if only in name:
            changed[name] = (tensor + share * noise * tensor.double().square().mean().sqrt()).to(tensor.dtype)
    return tiny.variant(base, changed, f"tuned-{share}-{seed}-{only}")


def disguised(base: Path, seed: int = 9, *, untie: bool | None = None) -> Path:
    """The same function with other weights: a random element of every symmetry."""
    move = scrambled(describe(open_checkpoint(base), untie=bool(untie)), seed)
    return tiny.variant(base, dict(move.produce(move.plan(None), lambda *_: None)), f"disguised-{seed}")


def reordered(base: Path, seed: int = 3) -> Path:
    """A Llama whose feed-forward units have changed places, by hand."""
    found = tiny.tensors(base)
    layers = {name.split(".")[2] for name in found if name.startswith("model.layers.")}
    changed = {}
    for layer in sorted(layers):
        place = f"model.layers.{layer}.mlp."
        order = torch.randperm(
            found[f"{place}up_proj.weight"].shape[0], generator=torch.Generator().manual_seed(seed + int(layer))
        )
        for part in ("up", "gate"):
            changed[f"{place}{part}_proj.weight"] = found[f"{place}{part}_proj.weight"][order]
        changed[f"{place}down_proj.weight"] = found[f"{place}down_proj.weight"][:, order]
    return tiny.variant(base, changed, f"reordered-{seed}")


def added(onto: Path, tuned: Path, base: Path) -> dict[str, Tensor]:
    """new base + τ, as other tools do it."""
    three = [tiny.tensors(folder) for folder in (onto, tuned, base)]
    return {name: three[0][name] + three[1][name] - three[2][name] for name in three[0]}


def record_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "isomerge.json").read_text())
