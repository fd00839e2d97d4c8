"""An alignment: the source moved next to the anchor, ready to be read, reported, written or applied elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from isomerge.alignment import reporting
from isomerge.alignment.compatible import require_compatible, require_same_spaces
from isomerge.alignment.move import Move
from isomerge.alignment.pairwise import AnchorGauge, Solution
from isomerge.alignment.reporting import Distance
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
from isomerge.checkpoint.saving import counted, dtype_entry
from isomerge.errors import RequestError
from isomerge.evaluation.probe import largest_difference
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.canonical import Canonical
from isomerge.symmetry.transform import Transform

Progress = Callable[[int, int, str], None]


@dataclass
class Alignment:
    """The result of `isomerge.align`. Nothing is written until `save`.

    `gauge` is the anchor's gauge where it was stored with a transform; otherwise it is read from the anchor itself.
    """

    solution: Solution
    seconds: float
    max_memory: int | None = None
    progress: Progress | None = None
    threads: int | None = None
    gauge: Mapping[str, Tensor] | None = None
    _distances: dict[str, Distance] = field(default_factory=dict)
    _lost: dict[str, CastReport] = field(default_factory=dict)
    _difference: tuple[float | None, str] = (None, "not measured: nothing has been written yet")

    def __repr__(self) -> str:
        anchor = "" if self.solution.anchor is None else f" next to {self.solution.anchor.name}"
        moved = f"{len(self.transform.elements)} of {len(self.transform.spaces)} spaces moved"
        return f"Alignment({self.solution.source.name}{anchor}, level {self.solution.scope.level}, {moved})"

    # --- what was found ---------------------------------------------------------------------------------------------
    @property
    def transform(self) -> Transform:
        return self.solution.transform

    @property
    def siblings(self) -> bool:
        """Nothing needs to move, though it could: the source is already next to the anchor."""
        return reporting.are_siblings(self.solution)

    @property
    def untied(self) -> bool:
        """An output table had to be separated from the input table, in the source or in the anchor."""
        return self.solution.untied

    @cached_property
    def fragile(self) -> list[str]:
        """Norms of the anchor whose gains are too small to write the source in the anchor's gauge."""
        if self.gauge is not None:
            return self._canonical(self.solution.source, self.gauge).fragile_gains()
        anchor = self.solution.anchor
        return self._canonical(anchor).fragile_gains() if anchor else []

    def _canonical(self, model: BoundModel, record: Mapping[str, Tensor] | None = None) -> Canonical:
        return Canonical(model, self.transform.elements, gauges=self.solution.scope.gauges, record=record)

    def move(self, model: BoundModel | None = None) -> Move:
        """The source (or another model of its architecture), moved."""
        model = model or self.solution.source
        own = self._canonical(model)
        if self.fragile:
            return Move(model, self.transform, own, None, self.threads)
        record = self.gauge
        if record is None:
            record = AnchorGauge(self._canonical(self._anchor()), own)
        return Move(model, self.transform, own, self._canonical(model, record), self.threads)

    def anchor_move(self) -> Move:
        """The anchor, untied or canonical as the source is written; its function does not change."""
        own = self._canonical(self._anchor())
        gauge = None if self.fragile else own
        return Move(self._anchor(), Transform(self.transform.spaces), own, gauge, self.threads)

    def anchor_gauge(self) -> dict[str, Tensor]:
        """Everything needed of the anchor to write other models in its gauge."""
        return dict(self.gauge) if self.gauge is not None else self._canonical(self._anchor()).record()

    def _anchor(self) -> BoundModel:
        if self.solution.anchor is None:
            raise RequestError(
                "Using the anchor of a stored transform: the file holds only its gauge. Name the anchor too."
            )
        return self.solution.anchor

    # --- using it ---------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Tensor]:
        """The moved source under its names on disk, in its stored dtypes."""
        move = self.move()
        return dict(move.produce(move.plan(None), lambda *_: None))

    def apply(self, model: Any) -> Any:
        """Move another checkpoint of the architecture by the same elements.

        A `nn.Module` gives a new module; a path, hub id or state_dict gives a state_dict with names as on disk.
        """
        checkpoint = open_checkpoint(model, config=self._config_for(model))
        bound = describe(checkpoint, untie=self.untied)
        require_compatible(checkpoint, self.solution.source.checkpoint)
        require_same_spaces(bound, self.solution.source)
        spaces = self.solution.source.architecture.spaces
        bound = replace(bound, architecture=replace(bound.architecture, spaces=spaces))
        move = self.move(bound)
        tensors = dict(move.produce(move.plan(None), lambda *_: None))
        if not isinstance(model, nn.Module):
            return tensors
        return _new_module(model, tensors, self.solution.source.architecture.untied_config)

    def _config_for(self, model: Any) -> dict[str, Any] | None:
        return self.solution.source.checkpoint.config if isinstance(model, Mapping) else None

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
    ) -> Written:
        """Write the moved source, in the anchor's gauge; with `anchor_out` the anchor too, as OUT averages with it."""
        source = self.solution.source.checkpoint
        if anchor_out is not None:
            self._anchor()  # refuse before anything is written
        inputs = [m.checkpoint for m in (self.solution.source, self.solution.anchor) if m is not None]
        targets = [Path(p) for p in (out, anchor_out) if p is not None]
        for target in targets:
            refuse_overwrite(target, inputs)
        if len(targets) == 2 and targets[0].resolve() == targets[1].resolve():
            raise RequestError(f"Writing the alignment: OUT and --anchor-out are both {out}. Name two folders.")
        written = self._write(self.move(), Path(out), shard_size, out_dtype, force, measure=True)
        if anchor_out is not None:
            self._write(self.anchor_move(), Path(anchor_out), shard_size, out_dtype, force, measure=False)
        if verify:
            self._difference = largest_difference(source, open_checkpoint(out), max_memory=self.max_memory)
        return written

    def save_transform(self, path: str | Path) -> None:
        """Store the group elements and the anchor's gauge, to move other checkpoints of this architecture later."""
        from isomerge.alignment.storage import save_transform

        save_transform(self, Path(path))

    def _write(
        self, move: Move, out: Path, shard_size: int | str, out_dtype: str | None, force: bool, *, measure: bool
    ) -> Written:
        dtype = parse_dtype(out_dtype) if out_dtype else None
        plan = move.plan(dtype)
        donor = move.model.checkpoint

        def record(file: str, lost: CastReport) -> None:
            if measure:
                self._lost[file] = lost

        changes = {**move.model.architecture.untied_config, **dtype_entry(donor.config, dtype)}
        return write_checkpoint(
            out, plan, move.produce(plan, record), config=changes, donor=donor, shard_size=shard_size, force=force,
            progress=counted(self.progress, plan, f"writing {out.name}"),
        )  # fmt: skip

    # --- saying it --------------------------------------------------------------------------------------------------
    def distances(self) -> dict[str, Distance]:
        """Per tensor: ‖source − anchor‖², ‖moved − anchor‖², ‖anchor‖², on the files as they stand."""
        anchor = self.solution.anchor
        if not self._distances and anchor is not None:
            move = self.move()
            as_stored = move.gauge is not None
            target = anchor.raw if as_stored else self.anchor_move().tensor
            self._distances = reporting.distances(
                self.solution.source, anchor, move.tensor, target, stays=lambda name: as_stored and move.stays(name)
            )
        return self._distances

    def report(self) -> dict[str, Any]:
        """The record of the alignment: distances, what moved and why the rest stays, exactness, time."""
        solution, distances = self.solution, self.distances()
        difference, reason = self._difference
        before, after = (reporting.relative(solution.source, distances, k) for k in (0, 1))
        return {
            "source": solution.source.name,
            "anchor": solution.anchor.name if solution.anchor else None,
            "family": solution.source.architecture.family,
            "level": solution.scope.level,
            "verdict": reporting.verdict(solution),
            "distance": {"before": before, "after": after},
            "spaces": reporting.spaces(solution, distances),
            "objective": solution.objective,
            "max_output_difference": difference,
            "max_output_difference_reason": reason or None,
            "gauge": "canonical" if self.fragile else "anchor",
            "untied": self.untied,
            "notes": self.notes(),
            "seconds": self.seconds,
        }

    def notes(self) -> list[str]:
        """What a reader of the result should know: what stayed and why, what was untied, what a cast lost."""
        notes = [*self.solution.notes, *reporting.warnings(self.untied, self.fragile, self._lost)]
        before, after = (reporting.relative(self.solution.source, self.distances(), k) for k in (0, 1))
        if before is not None and after is not None and after > before * (1 + 1e-9):
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
    return fresh
