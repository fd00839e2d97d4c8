"""An alignment: the source moved next to the anchor, ready to be read, reported, written or applied elsewhere."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.addresses import is_url
from isomerge.alignment.compatibility import require_compatible, require_same_spaces
from isomerge.alignment.exactness import (
    Exactness,
    compare_outputs,
    nothing_left_on_failure,
    require_same_function,
)
from isomerge.alignment.record import own_record
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
from isomerge.alignment.writing import MovedTensors, WrittenTensor
from isomerge.architectures import describe
from isomerge.checkpoint import (
    CastReport,
    Checkpoint,
    Written,
    load_into_module,
    open_checkpoint,
    parse_dtype,
    refuse_overwrite,
)
from isomerge.checkpoint.base import Progress
from isomerge.checkpoint.dtypes import dtype_entry, dtype_name
from isomerge.checkpoint.hashing import raw_bytes
from isomerge.checkpoint.identity import require_unchanged
from isomerge.checkpoint.kept import KeptWork, work_key
from isomerge.checkpoint.lock import current_versions
from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.checkpoint.writer import CheckpointWriter, counted
from isomerge.engine import Engine, Threads
from isomerge.errors import RequestError
from isomerge.progress_bars import stops_bar
from isomerge.reporting.record import RECORD
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
    engine: Engine = field(default_factory=Threads)
    gauge: Mapping[str, Tensor] | None = None
    learned: dict[str, Any] | None = None
    """Steps that were learned after the sweep, and the midpoint's loss before and after them."""
    kept: KeptWork | None = None
    """Where the solution was kept for a call that is made again."""
    _distances: dict[str, Distance] = field(default_factory=dict)
    _lost: dict[str, CastReport] = field(default_factory=dict)
    exactness: Exactness = field(default_factory=Exactness)
    """Whether what was written computes what the source computes."""

    def __repr__(self) -> str:
        anchor = "" if self.anchor is None else f" next to {self.anchor.name}"
        moved = f"{len(self.transform.elements)} of {len(self.transform.spaces)} spaces moved"
        return f"Alignment({self.source.name}{anchor}, level {self.scope.level}, {moved})"

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

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
        if self.exactness.same is False:
            return f"changed: the output computes something else than the source ({self.exactness.detail})"
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

    def as_checkpoint(self) -> Checkpoint:
        """The moved source, in memory, with the tokenizer and image settings of the source."""
        own = self.source.checkpoint
        config = {**own.config, **self.moved().model.architecture.untied_config}
        return MemoryCheckpoint(f"{own.name}, aligned", self.state_dict(), config, beside=own)

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
    @stops_bar
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
        """Write the moved source, in the anchor's gauge; with `anchor_out` the anchor too, as OUT averages with it.
        `out` is a folder, or a URL (s3://, gs://) that one is uploaded to.

        `verify` compares the outputs of both models on random inputs. If they differ by more than rounding, that is an
        error and nothing is written, unless `force`, which also replaces what is there. `report` writes what `isomerge
        report` needs into isomerge.json. Both happen before the folder becomes a model. A call that was killed or
        interrupted continues from its finished tensors when it is made again; `finish` as in `Merged.save`.
        """
        if anchor_out is not None:
            self._known_anchor()  # refuse before anything is written
        inputs = [m.checkpoint for m in (self.source, self.anchor) if m is not None]
        targets = [Path(p) for p in (out, anchor_out) if p is not None]
        for target in targets:
            refuse_overwrite(target, inputs)
        if is_url(out):
            from isomerge.checkpoint.upload import save_to_url

            return save_to_url(
                self.save, out, force=force, progress=self.progress, shard_size=shard_size, out_dtype=out_dtype,
                anchor_out=anchor_out, verify=verify, report=report,
            )  # fmt: skip
        if len(targets) == 2 and targets[0].resolve() == targets[1].resolve():
            raise RequestError(f"Writing the alignment: out and anchor_out are both {out}. Name two folders.")
        settings = {
            "shard_size": str(shard_size),
            "out_dtype": dtype_name(out_dtype),
            "verify": verify,
            "report": report,
        }
        # The folder that comes first stays open for the same call until the other one is complete too.
        with contextlib.nullcontext() if force else nothing_left_on_failure(Path(out)):
            written = self._write(Path(out), settings, force)
        if anchor_out is not None:
            self._write_anchor(Path(anchor_out), settings, force).finish()
        if finish:
            written.finish()
            self._forget_solved(Path(out))
        return written

    def folders(self, out: Path) -> dict[Path, Alignment]:
        """Where `save` writes what."""
        return {out: self}

    def save_transform(self, path: str | Path) -> None:
        """Store the group elements and the anchor's gauge, to move other checkpoints of this architecture later."""
        save_transform(self, Path(path))

    def _write(self, out: Path, settings: Mapping[str, Any], force: bool) -> Written:
        """The moved source, checked where it is staged and recorded before it becomes a model."""
        moved = self.moved()
        with self._writer(moved, out, settings, force, self._key(moved, settings)) as writer:
            if writer.written is None:
                self._write_tensors(writer, moved)
            self._lost = {file: writer.lost[file] for file in writer.plan if file in writer.lost}
            folder = writer.stage() if writer.written is None else out
            if settings["verify"]:
                self.exactness = compare_outputs(
                    self.source.checkpoint, moved, open_checkpoint(folder), max_memory=self.max_memory,
                    overflowed=sum(lost.overflow for lost in self._lost.values()),
                )  # fmt: skip
            if not force:
                require_same_function(self.source.name, out, self.exactness)
            if writer.written is not None:
                return writer.written
            if settings["report"]:
                writer.add(RECORD, own_record(self, folder, writer.sha256()).encode())
            return self._commit(writer)

    def _write_anchor(self, out: Path, settings: Mapping[str, Any], force: bool) -> Written:
        moved = self.moved_anchor()
        key = self._key(moved, {**settings, "anchor": True})
        with self._writer(moved, out, settings, force, key) as writer:
            if writer.written is None:
                self._write_tensors(writer, moved)
            return writer.written or self._commit(writer)

    def _writer(
        self, moved: MovedModel, out: Path, settings: Mapping[str, Any], force: bool, key: str | None
    ) -> CheckpointWriter:
        dtype = parse_dtype(settings["out_dtype"]) if settings["out_dtype"] else None
        donor = moved.model.checkpoint
        changes = {**moved.model.architecture.untied_config, **dtype_entry(donor.config, dtype)}
        own = self.kept is not None and self.kept.out == out.expanduser()
        return CheckpointWriter(
            out, moved.plan(dtype), config=changes, donor=donor, shard_size=settings["shard_size"], force=force,
            key=key, solved=self.kept.key if own and self.kept else None, finish=False, inputs=self.checkpoints(),
        )  # fmt: skip

    def _write_tensors(self, writer: CheckpointWriter, moved: MovedModel) -> None:
        """Those that an interrupted run has not finished."""
        tell = counted(self.progress, writer.plan, f"writing {writer.out.name}")
        tell(sum(writer.plan[name].nbytes for name in writer.finished))
        left = [name for name in writer.plan if name not in writer.finished]
        maker = MovedTensors(moved, writer.plan, frozenset(left), writer)

        def finish(place: int, made: list[WrittenTensor]) -> None:
            for tensor in made:
                writer.finish(tensor.name, tensor.sha256, tensor.lost)
                tell(writer.plan[tensor.name].nbytes)

        folders = [model.folder for model in self.checkpoints() if model.folder is not None]
        self.engine.each(maker, maker.units(), finish, threads=self.threads, visible=[*folders, writer.folder])

    def _commit(self, writer: CheckpointWriter) -> Written:
        writer.stage()
        require_unchanged(self.checkpoints(), writer.out)
        return writer.commit()

    def _key(self, moved: MovedModel, settings: Mapping[str, Any]) -> str | None:
        """All that decides a byte of what is written; None where an input cannot be told from a changed one."""
        inputs = [m.checkpoint.identity() for m in (self.source, self.anchor) if m is not None]
        if None in inputs:
            return None
        elements = {name: _digest(element) for name, element in moved.transform.elements.items()}
        gauge = {name: _digest(tensor) for name, tensor in (self.gauge or {}).items()}
        solved = [repr(self.scope), self.stays, self.objective, self.solver_notes, moved.gauge is None]
        return work_key(
            versions=current_versions(), inputs=inputs, elements=elements, gauge=gauge, solved=solved,
            config=moved.model.architecture.untied_config, settings=dict(settings),
        )  # fmt: skip

    def _forget_solved(self, out: Path) -> None:
        if self.kept is not None and self.kept.out != out.expanduser():
            self.kept.discard()

    def checkpoints(self) -> list[Checkpoint]:
        """The source, and the anchor if there is one."""
        return [model.checkpoint for model in (self.source, self.anchor) if model is not None]

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
        return AlignmentReport(
            source=self.source.name,
            anchor=self.anchor.name if self.anchor else None,
            family=self.source.architecture.family,
            level=self.scope.level,
            verdict=self.verdict,
            distance=self._distance(),
            spaces=self.spaces(),
            objective=self.objective,
            max_output_difference=self.exactness.difference,
            max_output_difference_reason=self.exactness.reason or None,
            gauge="canonical" if self.fragile else "anchor",
            untied=self.untied,
            notes=self.notes(),
            seconds=self.seconds,
            learned=self.learned,
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


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(raw_bytes(torch.view_as_real(tensor) if tensor.is_complex() else tensor)).hexdigest()


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
