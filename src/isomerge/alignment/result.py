"""An alignment: the source moved next to the anchor, ready to be read, reported, written or applied elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from isomerge.alignment.compatibility import require_compatible, require_same_spaces
from isomerge.alignment.record import write_record
from isomerge.alignment.report import (
    AlignmentReport,
    BeforeAndAfter,
    Distance,
    SpaceReport,
    distances_between,
    relative,
    space_reports,
    warnings,
)
from isomerge.alignment.scope import Scope
from isomerge.alignment.storage import save_transform
from isomerge.architectures import describe
from isomerge.checkpoint import (
    CastReport,
    Written,
    load_into_module,
    open_checkpoint,
    parse_dtype,
    refuse_overwrite,
    write_checkpoint,
)
from isomerge.checkpoint.base import Progress
from isomerge.checkpoint.dtypes import dtype_entry
from isomerge.checkpoint.writer import counted
from isomerge.errors import RequestError
from isomerge.evaluation.probe import largest_difference
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.canonical import AnchorGauge, Canonical
from isomerge.symmetry.moved import MovedModel
from isomerge.symmetry.transform import Transform


@dataclass
class Alignment:
    """The result of `isomerge.align`: the group element of every space that moves. Nothing is written until `save`.

    `transform` is in canonical, unbalanced coordinates. `gauge` is the anchor's gauge where it was stored with a
    transform; otherwise it is read from the anchor itself.
    """

    source: BoundModel
    anchor: BoundModel | None
    """None: known only by the gauge stored with a transform."""
    scope: Scope
    transform: Transform
    stays: dict[str, str] = field(default_factory=dict)
    """Why a space that could move does not."""
    objective: list[float] = field(default_factory=list)
    solver_notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    max_memory: int | None = None
    progress: Progress | None = None
    threads: int | None = None
    gauge: Mapping[str, Tensor] | None = None
    _distances: dict[str, Distance] = field(default_factory=dict)
    _lost: dict[str, CastReport] = field(default_factory=dict)
    output_difference: tuple[float | None, str] = (None, "not measured: nothing has been written yet")
    """The largest difference between the outputs of the source and of what was written, or why there is none."""

    def __repr__(self) -> str:
        anchor = "" if self.anchor is None else f" next to {self.anchor.name}"
        moved = f"{len(self.transform.elements)} of {len(self.transform.spaces)} spaces moved"
        return f"Alignment({self.source.name}{anchor}, level {self.scope.level}, {moved})"

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the progress callback, which belongs to the process that made it."""
        return {**self.__dict__, "progress": None}

    # --- what was solved --------------------------------------------------------------------------------------------
    @property
    def siblings(self) -> bool:
        """Nothing needs to move, though it could: the source is already next to the anchor."""
        return not self.transform.elements and bool(self.source.architecture.movable())

    @property
    def untied(self) -> bool:
        """An output table had to be separated from the input table, in the source or in the anchor."""
        models = [m for m in (self.source, self.anchor) if m is not None]
        return any(m.architecture.untied_config for m in models)

    @property
    def verdict(self) -> str:
        """One line."""
        if self.siblings:
            return "siblings: nothing needs to move; the output is the source, bit for bit"
        if not self.transform.elements:
            return (
                "unmoved: no space of this model may move here (see the notes); the output is the source, bit for bit"
            )
        return f"aligned: {len(self.transform.elements)} of {len(self.source.architecture.spaces)} spaces moved"

    @cached_property
    def fragile(self) -> list[str]:
        """Norms of the anchor whose gains are too small to write the source in the anchor's gauge."""
        if self.gauge is not None:
            return self._canonical(self.source, self.gauge).fragile_gains()
        return self._canonical(self.anchor).fragile_gains() if self.anchor else []

    def _canonical(self, model: BoundModel, record: Mapping[str, Tensor] | None = None) -> Canonical:
        return Canonical(model, self.transform.elements, gauges=self.scope.gauges, record=record)

    def moved(self, model: BoundModel | None = None) -> MovedModel:
        """The source (or another model of its architecture), moved."""
        model = model or self.source
        own = self._canonical(model)
        if self.fragile:
            return MovedModel(model, self.transform, own, None, self.threads)
        record = self.gauge
        if record is None:
            record = AnchorGauge(self._canonical(self._known_anchor()), own)
        return MovedModel(model, self.transform, own, self._canonical(model, record), self.threads)

    def moved_anchor(self) -> MovedModel:
        """The anchor, untied or canonical as the source is written; its function does not change."""
        anchor = self._known_anchor()
        own = self._canonical(anchor)
        gauge = None if self.fragile else own
        return MovedModel(anchor, Transform(self.transform.spaces), own, gauge, self.threads)

    def anchor_gauge(self) -> dict[str, Tensor]:
        """Everything needed of the anchor to write other models in its gauge."""
        return dict(self.gauge) if self.gauge is not None else self._canonical(self._known_anchor()).record()

    def _known_anchor(self) -> BoundModel:
        if self.anchor is None:
            raise RequestError(
                "Using the anchor of a stored transform: the file holds only its gauge. Pass the anchor to align() too."
            )
        return self.anchor

    # --- using it ---------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Tensor]:
        """The moved source under its names on disk, in its stored dtypes."""
        return self.moved().state_dict()

    def apply(self, model: Any) -> Any:
        """Move another checkpoint of the architecture by the same elements.

        A `nn.Module` gives a new module; a path, hub id or state_dict gives a state_dict with names as on disk.
        """
        config = self.source.checkpoint.config if isinstance(model, Mapping) else None
        checkpoint = open_checkpoint(model, config=config)
        bound = describe(checkpoint, untie=self.untied)
        require_compatible(checkpoint, self.source.checkpoint)
        require_same_spaces(bound, self.source)
        spaces = self.source.architecture.spaces
        bound = replace(bound, architecture=replace(bound.architecture, spaces=spaces))
        tensors = self.moved(bound).state_dict()
        if not isinstance(model, nn.Module):
            return tensors
        return _new_module(model, tensors, self.source.architecture.untied_config)

    # --- writing it -------------------------------------------------------------------------------------------------
    def save(
        self,
        out: str | Path,
        *,
        shard_size: int | str = "5GB",
        out_dtype: str | None = None,
        force: bool = False,
        anchor_out: str | Path | None = None,
        verify: bool = True,
        report: bool = True,
    ) -> Written:
        """Write the moved source, in the anchor's gauge; with `anchor_out` the anchor too, as OUT averages with it.

        `verify` compares the outputs of both models on random inputs; `report` writes what `isomerge report` needs
        into isomerge.json.
        """
        if anchor_out is not None:
            self._known_anchor()  # refuse before anything is written
        inputs = [m.checkpoint for m in (self.source, self.anchor) if m is not None]
        targets = [Path(p) for p in (out, anchor_out) if p is not None]
        for target in targets:
            refuse_overwrite(target, inputs)
        if len(targets) == 2 and targets[0].resolve() == targets[1].resolve():
            raise RequestError(f"Writing the alignment: out and anchor_out are both {out}. Name two folders.")
        written = self._write(self.moved(), Path(out), shard_size, out_dtype, force, measure=True)
        if anchor_out is not None:
            self._write(self.moved_anchor(), Path(anchor_out), shard_size, out_dtype, force, measure=False)
        if verify:
            checkpoint = self.source.checkpoint
            self.output_difference = largest_difference(checkpoint, open_checkpoint(out), max_memory=self.max_memory)
        if report:
            write_record(self, written)
        return written

    def folders(self, out: Path) -> dict[Path, Alignment]:
        """Where `save` writes what."""
        return {out: self}

    def save_transform(self, path: str | Path) -> None:
        """Store the group elements and the anchor's gauge, to move other checkpoints of this architecture later."""
        save_transform(self, Path(path))

    def _write(
        self, moved: MovedModel, out: Path, shard_size: int | str, out_dtype: str | None, force: bool, *, measure: bool
    ) -> Written:
        dtype = parse_dtype(out_dtype) if out_dtype else None
        plan = moved.plan(dtype)
        donor = moved.model.checkpoint

        def record(file: str, lost: CastReport) -> None:
            if measure:
                self._lost[file] = lost

        changes = {**moved.model.architecture.untied_config, **dtype_entry(donor.config, dtype)}
        return write_checkpoint(
            out, plan, moved.produce(plan, record), config=changes, donor=donor, shard_size=shard_size, force=force,
            progress=counted(self.progress, plan, f"writing {out.name}"),
        )  # fmt: skip

    # --- reporting it -----------------------------------------------------------------------------------------------
    def distances(self) -> dict[str, Distance]:
        """Per tensor: ‖source − anchor‖², ‖moved − anchor‖², ‖anchor‖², on the stored tensors."""
        if not self._distances and self.anchor is not None:
            moved = self.moved()
            as_stored = moved.gauge is not None
            target = self.anchor.raw if as_stored else self.moved_anchor().tensor
            self._distances = distances_between(
                self.source, self.anchor, moved.tensor, target, stays=lambda name: as_stored and moved.stays(name)
            )
        return self._distances

    def spaces(self) -> list[SpaceReport]:
        """A row per space: how much of it moved, what that gained, or why it stays."""
        return space_reports(self.source, self.transform, self.stays, self.distances() if self.anchor else None)

    def report(self) -> AlignmentReport:
        """Distances, what moved and why the rest stays, exactness, time."""
        difference, reason = self.output_difference
        return AlignmentReport(
            source=self.source.name,
            anchor=self.anchor.name if self.anchor else None,
            family=self.source.architecture.family,
            level=self.scope.level,
            verdict=self.verdict,
            distance=self._distance(),
            spaces=self.spaces(),
            objective=self.objective,
            max_output_difference=difference,
            max_output_difference_reason=reason or None,
            gauge="canonical" if self.fragile else "anchor",
            untied=self.untied,
            notes=self.notes(),
            seconds=self.seconds,
        )

    def _distance(self) -> BeforeAndAfter:
        distances = self.distances()
        return BeforeAndAfter(relative(self.source, distances, 0), relative(self.source, distances, 1))

    def notes(self) -> list[str]:
        """What a reader of the result should know: what stayed and why, what was untied, what a cast lost."""
        notes = [*self.solver_notes, *warnings(self.untied, self.fragile, self._lost)]
        distance = self._distance()
        if distance.before is not None and distance.after is not None and distance.after > distance.before * (1 + 1e-9):
            notes.append(
                "as files the models are now farther apart: every unit counts the same in the objective, so that a "
                "large table does not decide for all layers"
            )
        return notes


def _new_module(model: nn.Module, tensors: Mapping[str, Tensor], changes: Mapping[str, Any]) -> nn.Module:
    """A fresh module of the same class with other weights (and an untied head where that was needed)."""
    fresh: Any = copy.deepcopy(model)
    if changes and hasattr(fresh, "config"):
        config = copy.deepcopy(fresh.config)
        for key, value in changes.items():
            setattr(config, key, value)
        fresh = type(model)(config)
        fresh.train(model.training)
    load_into_module(fresh, tensors)
    return fresh  # type: ignore[no-any-return]
