"""Several models aligned together: one `Alignment` each, one folder each."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isomerge.alignment.evidence import common_part
from isomerge.alignment.exactness import nothing_left_on_failure
from isomerge.alignment.record import space_moves
from isomerge.alignment.report import BeforeAndAfter, FamilyReport
from isomerge.alignment.result import Alignment
from isomerge.checkpoint import Checkpoint, Written, refuse_overwrite
from isomerge.errors import RequestError
from isomerge.kinship import counted, relative_distance
from isomerge.symmetry.moved import MovedModel


@dataclass
class AlignedFamily:
    """The result of `isomerge.align_family`. All outputs share the gauge of `anchor`, so any of them average.

    With `many="anchor"` there is one member per model beside the anchor, which itself stays; with
    "universe" and "cycle" the model whose gauge is used moves too and is a member like the others.
    """

    members: list[Alignment]
    anchor: Checkpoint
    many: str
    seconds: float

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    @property
    def siblings(self) -> bool:
        return all(member.siblings for member in self.members)

    def require_one_gauge(self) -> None:
        """Refuse models of which only some can be written in the anchor's gauge: they would not average."""
        if len({bool(member.fragile) for member in self.members}) > 1:
            raise RequestError(
                f"Aligning to {self.anchor.name}: its gains are too small to bring some of the models to it. "
                "Name another anchor (in a merge: align: {anchor: …}, or the base).",
                keys=("anchor", "base"),
            )

    def solver_notes(self) -> list[str]:
        """What the solver noted of any member, each note once."""
        notes = [note for member in self.members for note in member.solver_notes]
        if not any(member.source.architecture.movable() for member in self.members):
            notes.insert(0, "NOT ALIGNED: no space of these models may move, so they are merged as they are")
        return list(dict.fromkeys(notes))

    def record(self) -> dict[str, Any]:
        """What the record of a merge says of the members: what moved, and where to."""
        models = [
            {
                "model": member.source.name,
                "verdict": member.verdict,
                "moved": len(member.transform.elements),
                "spaces": space_moves(member),
                **({} if member.learned is None else {"learned": member.learned}),
            }
            for member in self.members
        ]
        return {"level": self.members[0].scope.level, "models": models}

    def moved(self, model: Checkpoint) -> MovedModel:
        """One of the models, moved; the anchor in the form that the others are written in."""
        for member in self.members:
            if member.source.checkpoint is model:
                return member.moved()
        return max(self.members, key=lambda member: len(member.transform.elements)).moved_anchor()

    def folders(self, out: Path) -> dict[Path, Alignment]:
        """A folder for each model, by its own name; equal names are numbered."""
        folders: dict[Path, Alignment] = {}
        for member in self.members:
            stem = Path(member.source.name).name or "model"
            name, number = stem, 2
            while out / name in folders:
                name, number = f"{stem}-{number}", number + 1
            folders[out / name] = member
        return folders

    def save(
        self,
        out: str | Path,
        *,
        shard_size: int | str = "5GB",
        out_dtype: str | torch.dtype | None = None,
        force: bool = False,
        anchor_out: str | Path | None = None,
        verify: bool = True,
        report: bool = True,
        finish: bool = True,
    ) -> Written:
        """Write every moved model into its own folder below `out`, as `Alignment.save` does."""
        folders = self.folders(Path(out))
        inputs = [self.anchor, *(member.source.checkpoint for member in self.members)]
        # All of them first: a later input must not be overwritten by an earlier output.
        for target in (*folders, *([] if anchor_out is None else [anchor_out])):
            refuse_overwrite(target, inputs)
        self.require_one_gauge()
        kept = self.members[0].kept
        if kept is not None and kept.out == Path(out).expanduser():
            kept.store("family", {})  # until all are written, the folder is that of an unfinished run
        anchor_path = [] if anchor_out is None else [Path(anchor_out)]
        with contextlib.nullcontext() if force else nothing_left_on_failure(*folders, *anchor_path):
            written = [
                member.save(
                    folder, shard_size=shard_size, out_dtype=out_dtype, force=force, verify=verify, report=report,
                    anchor_out=anchor_out if number == 0 else None, finish=False,
                )
                for number, (folder, member) in enumerate(folders.items())
            ]  # fmt: skip
        files = tuple(f for w in written for f in w.files)
        digest = written[0].sha256
        if len(written) > 1:
            digest = hashlib.sha256("".join(str(w.sha256) for w in written).encode()).hexdigest()
        whole = Written(Path(out), files, sum(w.tensors for w in written), sum(w.bytes for w in written), digest)
        if finish:
            whole.finish()
        return whole

    def save_transform(self, path: str | Path) -> None:
        raise RequestError(
            f"Writing the transform {path}: several models were aligned and each has its own. Align two at a time to "
            "store one."
        )

    def report(self) -> FamilyReport:
        """One report per model, and the means over them."""
        reports = [member.report() for member in self.members]
        distance = BeforeAndAfter(
            _mean([r.distance.before for r in reports]), _mean([r.distance.after for r in reports])
        )
        if self.many != "anchor":
            distance = BeforeAndAfter(
                self._spread([member.source.raw for member in self.members]),
                self._spread([member.moved().tensor for member in self.members]),
            )
        differences = [r.max_output_difference for r in reports]
        known = [d for d in differences if d is not None]
        goal = self.anchor.name if self.many == "anchor" else "their mean"
        rows = [(Path(r.source).name, row) for r in reports for row in r.spaces]
        return FamilyReport(
            anchor=self.anchor.name,
            many=self.many,
            verdict=next(
                (member.verdict for member in self.members if member.exactness.same is False),
                f"{len(reports)} models aligned to {goal}",
            ),
            distance=distance,
            spaces=[replace(row, name=f"{model}:{row.name}") for model, row in rows],
            models=reports,
            max_output_difference=max(known) if len(known) == len(differences) else None,
            max_output_difference_reason=next(
                (r.max_output_difference_reason for r in reports if r.max_output_difference is None), None
            ),
            notes=list(dict.fromkeys(note for r in reports for note in r.notes)),
            seconds=self.seconds,
        )

    def _spread(self, tensors: list[Callable[[str], Tensor]]) -> float | None:
        """How far the models are from their mean: √(Σ‖W_k − W̄‖² / K‖W̄‖²)."""
        layouts = [member.source.layouts for member in self.members]
        apart = size = 0.0
        common = sorted(set(layouts[0]).intersection(*layouts[1:]))
        for name in counted({name: len(layouts[0][name].shape) for name in common}):
            models = torch.stack(common_part(*(read(name).double() for read in tensors)))
            mean = models.mean(0)
            apart += float((models - mean).square().sum())
            size += len(models) * float(mean.square().sum())
        return relative_distance(apart, size)


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
