"""Several models aligned together: one `Alignment` each, one folder each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isomerge.alignment.alignment import Alignment
from isomerge.alignment.evidence import common_part
from isomerge.checkpoint import Checkpoint, Written, refuse_overwrite
from isomerge.errors import RequestError
from isomerge.kinship import counted, relative_distance


@dataclass
class AlignedFamily:
    """The result of aligning more than two models. All outputs share the gauge of `anchor`, so any of them average."""

    members: list[Alignment]
    anchor: Checkpoint
    many: str
    seconds: float

    @property
    def siblings(self) -> bool:
        return all(member.siblings for member in self.members)

    def folders(self, out: Path) -> dict[str, Alignment]:
        """A folder for each model, by its own name; equal names are numbered."""
        names: dict[str, Alignment] = {}
        for member in self.members:
            stem = Path(member.solution.source.name).name or "model"
            name, number = stem, 2
            while str(out / name) in names:
                name, number = f"{stem}-{number}", number + 1
            names[str(out / name)] = member
        return names

    def save(self, out: str | Path, *, anchor_out: str | Path | None = None, **options: Any) -> Written:
        """Write every moved model into its own folder below `out`."""
        folders = self.folders(Path(out))
        inputs = [self.anchor, *(member.solution.source.checkpoint for member in self.members)]
        for target in (*folders, *([] if anchor_out is None else [anchor_out])):
            refuse_overwrite(
                target, inputs
            )  # all of them first: a later input must not be overwritten by an earlier output
        if len({bool(member.fragile) for member in self.members}) > 1:
            raise RequestError(
                "Writing the aligned models: the gains of the anchor are too small to write some of them in its gauge. "
                "Name another anchor."
            )
        written = []
        for number, (folder, member) in enumerate(folders.items()):
            written.append(member.save(folder, anchor_out=anchor_out if number == 0 else None, **options))
        files = tuple(f for w in written for f in w.files)
        digest = written[0].sha256 if len(written) == 1 else _joined(w.sha256 for w in written)
        return Written(Path(out), files, sum(w.tensors for w in written), sum(w.bytes for w in written), digest)

    def save_transform(self, path: str | Path) -> None:
        raise RequestError(
            f"Writing the transform {path}: several models were aligned and each has its own. Align two at a time to "
            "store one."
        )

    def report(self) -> dict[str, Any]:
        """The JSON record: one report per model, and the means over them."""
        reports = [member.report() for member in self.members]
        before, after = (_mean([r["distance"][k] for r in reports]) for k in ("before", "after"))
        if self.many == "universe":
            before = self._spread([member.solution.source.raw for member in self.members])
            after = self._spread([member.move().tensor for member in self.members])
        differences = [r["max_output_difference"] for r in reports]
        known = [d for d in differences if d is not None]
        goal = self.anchor.name if self.many == "anchor" else "their mean"
        rows = [(Path(r["source"]).name, row) for r in reports for row in r["spaces"]]
        return {
            "anchor": self.anchor.name,
            "many": self.many,
            "verdict": f"{len(reports)} models aligned to {goal}",
            "distance": {"before": before, "after": after},
            "spaces": [{**row, "name": f"{model}:{row['name']}"} for model, row in rows],
            "models": reports,
            "max_output_difference": max(known) if len(known) == len(differences) else None,
            "max_output_difference_reason": next((r["max_output_difference_reason"] for r in reports), None),
            "notes": list(dict.fromkeys(note for r in reports for note in r["notes"])),
            "seconds": self.seconds,
        }

    def _spread(self, tensors: list[Callable[[str], Tensor]]) -> float | None:
        """How far the models are from their mean: √(Σ‖W_k − W̄‖² / K‖W̄‖²)."""
        layouts = [member.solution.source.layouts for member in self.members]
        apart = size = 0.0
        common = sorted(set(layouts[0]).intersection(*layouts[1:]))
        for name in counted({name: len(layouts[0][name].shape) for name in common}):
            found = torch.stack(common_part(*(read(name).double() for read in tensors)))
            mean = found.mean(0)
            apart += float((found - mean).square().sum())
            size += len(found) * float(mean.square().sum())
        return relative_distance(apart, size)


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _joined(digests: Any) -> str:
    import hashlib

    return hashlib.sha256("".join(digests).encode()).hexdigest()
