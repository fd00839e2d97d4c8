"""A LoRA adapter as one of another base: ΔW' = g(W + ΔW) − g(W), which has the rank of ΔW, as g is linear in W."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isomerge.adapters import Adapter, apply_adapter, open_adapter
from isomerge.adapters.extract import ExtractedAdapter, Extraction, common_layout, written_adapter
from isomerge.checkpoint import Checkpoint, TensorInfo, refuse_overwrite
from isomerge.checkpoint.base import Progress, name_some
from isomerge.errors import RequestError
from isomerge.merging.merge_inputs import MergeInputs
from isomerge.merging.rebasing.moved_change import MovedChange, moved_change, require_fitting, when_unmeasured

KEPT = ("task_type", "auto_mapping")
LOSSY = 1e-4
ROUNDING = 1e-12
"""A change below this share of a tensor is what moving it in float64 leaves, and no change."""


class InFloat64(Checkpoint):
    """The same numbers in float64, so that what is added to them is not rounded away."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._own = checkpoint
        self.name, self.config = checkpoint.name, checkpoint.config
        self.folder, self.revision = checkpoint.folder, checkpoint.revision
        self.tensors = {
            name: TensorInfo(info.shape, torch.float64 if info.dtype.is_floating_point else info.dtype)
            for name, info in checkpoint.tensors.items()
        }

    def read(self, name: str) -> Tensor:
        tensor = self._own.read(name)
        return tensor.double() if tensor.is_floating_point() else tensor

    def side_files(self) -> list[Path]:
        return self._own.side_files()


class ChangedBase(InFloat64):
    """The new base with scale · τ', unrounded, under the names that it has itself."""

    def __init__(self, change: MovedChange, scale: float) -> None:
        super().__init__(change.onto)
        self._change, self._scale = change, scale

    def read(self, name: str) -> Tensor:
        own = super().read(name)
        if not own.is_floating_point():
            return own
        added = self._scale * self._change.of(name)
        is_rounding = float(added.abs().max()) <= ROUNDING * float(own.abs().max()) if own.numel() else True
        return own if is_rounding else own + added


def carried_adapter(
    adapter: Any, base: Checkpoint, onto: Checkpoint, out: str | os.PathLike[str], *, scale: float, level: str,
    force: bool, device: str, progress: Progress | None, start: float,
) -> ExtractedAdapter:  # fmt: skip
    opened = open_adapter(adapter)
    refuse_overwrite(out, [opened.checkpoint, base, onto])
    _require_linear(opened)
    wide = InFloat64(base)
    tuned = apply_adapter(wide, opened)
    if parted := sorted(tuned.tensors.keys() - wide.tensors.keys()):
        raise RequestError(
            f"Carrying {opened.name} to {onto.name}: it changes one of two tables that {base.name} stores as one. "
            f"That makes {name_some(parted)} a tensor of its own. Merge it into its base, and carry that as a model."
        )
    if require_fitting(tuned, wide, onto):
        raise RequestError(
            f"Carrying {opened.name} to {onto.name}: it is of another shape than {base.name}. Carry the adapter as a "
            "model (BASE+ADAPTER) with data, and extract an adapter from the result.",
            keys=("onto",),
        )
    change = moved_change(MergeInputs([tuned, wide], [], base=onto, device=device, progress=progress), level)
    changed = ChangedBase(change, scale)
    layout = common_layout(onto, changed)
    modules = {name.removesuffix(".weight") for name in opened.replaced} - opened.targets.keys()
    trained = [name for name in opened.replaced if name.rpartition(".")[0] in modules]
    whole = frozenset(disk for name in trained if (disk := layout.find(name)) is not None)
    _require_place(change)
    about = {key: opened.config.get(key) for key in KEPT}
    ranks = [target.rank for target in opened.targets.values()]
    stored = {info.dtype for info in opened.checkpoint.tensors.values()}
    extraction = Extraction(
        onto, changed, layout, None, max(ranks, default=1), None, kept_whole=whole, about=about,
        factors=torch.float64 if torch.float64 in stored else torch.float32,
    )  # fmt: skip
    written = written_adapter(extraction, out, force=force, progress=progress, start=start)
    if written.relative_error > LOSSY:
        written.notes.append(
            f"{100 * written.relative_error:.2g} % of the change is lost, as it has more than the adapter's rank here: "
            "trained norms are folded into the maps behind them. At `level` permutation they stay norms; or carry base "
            "and adapter as a model"
        )
    written.notes += [*when_unmeasured(change), *change.aligned.notes]
    return written


def _require_linear(adapter: Adapter) -> None:
    if any(target.magnitude for target in adapter.targets.values()):
        raise RequestError(
            f"Carrying {adapter.name} to another base: it is a DoRA adapter, whose update has no low rank. Name "
            f"BASE+{adapter.name} to carry it as a model, and extract an adapter from the result."
        )


def _require_place(change: MovedChange) -> None:
    """An adapter is added to the new base as it is stored, so nothing may change that it has no place for."""
    aligned, onto = change.aligned, change.onto
    lost = [
        file for file in aligned.plan if file not in onto.tensors and bool((change.of(file) != 0).any())
    ]  # fmt: skip
    if lost:
        raise RequestError(
            f"Carrying the adapter to {onto.name}: it changes {name_some(lost)}, which {onto.name} stores as one with "
            "its input table and the alignment has to separate. Carry it as a model (BASE+ADAPTER), or choose level "
            "'permutation'.",
            keys=("level",),
        )
    if any(member.fragile for member in aligned.family.members):
        raise RequestError(
            f"Carrying the adapter to {onto.name}: some of its norms have gains too small to divide by, so the change "
            "cannot be written for the weights as they are stored. Carry it as a model (BASE+ADAPTER).",
        )
