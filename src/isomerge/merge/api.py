"""`isomerge.merge`: models in, one model out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from isomerge.align.alignment import Alignment, Progress
from isomerge.align.api import align as align_models
from isomerge.align.move import Move
from isomerge.checkpoint import Checkpoint, is_harmless_buffer, open_checkpoint, require_floating
from isomerge.errors import RequestError, did_you_mean
from isomerge.merge.merged import Merged, Output
from isomerge.merge.methods import METHODS


def merge(
    models: Sequence[Any],
    *,
    method: str = "linear",
    weights: Sequence[float] | None = None,
    base: Any = None,
    align: bool = False,
    level: str = "full",
    scale: bool | None = None,
    sweeps: int = 15,
    threads: int | None = None,
    device: str = "cpu",
    max_memory: int | str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Merged:
    """Merge models of one architecture; with `align`, each is first moved next to the anchor, unrounded.

    The anchor, and the donor of config and side files, is `base` if given, else the first model.

    >>> isomerge.merge(["model-a", "model-b"], align=True).save("merged")     # doctest: +SKIP
    """
    start = time.perf_counter()
    if method not in METHODS:
        raise RequestError(f"Merging: '{method}' is not a merge method. {did_you_mean(method, METHODS)}")
    checkpoints = [open_checkpoint(m) for m in models]
    if len(checkpoints) < 2:
        raise RequestError("Merging: at least two models are needed.")
    for checkpoint in checkpoints:
        require_floating(checkpoint)
    shares = _weights(weights, len(checkpoints))
    donor = open_checkpoint(base) if base is not None else checkpoints[0]
    notes: list[str] = []
    if align:
        options = {"level": level, "scale": scale, "sweeps": sweeps, "threads": threads, "device": device}
        outputs, changes, notes, donor = _aligned(checkpoints, donor, {**options, "max_memory": max_memory})
    else:
        outputs, changes = _plain(checkpoints), {}
    return Merged(
        donor=donor, method=method, weights=shares, outputs=outputs, config_changes=changes, aligned=align,
        notes=notes, started=start, progress=progress, inputs=checkpoints,
    )  # fmt: skip


def _weights(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1 / count] * count
    found = [float(w) for w in weights]
    if len(found) != count or not all(map(math.isfinite, found)) or abs(sum(found)) < 1e-12:
        wanted = f"give {count} finite numbers with a non-zero sum"
        raise RequestError(f"Merging {count} models with weights {found}: {wanted}.")
    return found


def _plain(checkpoints: list[Checkpoint]) -> list[Output]:
    """No specification needed: tensors by name. Everything that does not fit is listed at once, before any is read."""
    first = checkpoints[0]
    problems = []
    for other in checkpoints[1:]:
        missing = sorted(n for n in set(first.tensors) ^ set(other.tensors) if not is_harmless_buffer(n))
        if missing:
            shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
            problems.append(f"{first.name} and {other.name} do not hold the same tensors ({shown})")
        for name in sorted(set(first.tensors) & set(other.tensors)):
            a, b = first.tensors[name], other.tensors[name]
            if a.shape != b.shape:
                shapes = tuple(a.shape), tuple(b.shape)
                problems.append(f"{name} has shape {shapes[0]} in {first.name} and {shapes[1]} in {other.name}")
    if problems:
        shown = "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise RequestError(f"Merging: {shown}. Merge models of one architecture, head class and vocabulary.")
    outputs = []
    for name, info in first.tensors.items():
        shared = info.dtype.is_floating_point and all(name in c.tensors for c in checkpoints)
        outputs.append(Output({name: info}, [_reader(c, name) for c in (checkpoints if shared else [first])]))
    return outputs


def _reader(checkpoint: Checkpoint, name: str) -> Callable[[], dict[str, Tensor]]:
    def read() -> dict[str, Tensor]:
        tensor = checkpoint.read(name)
        return {name: tensor.double() if tensor.is_floating_point() else tensor}

    return read


@dataclass(frozen=True)
class _Named:
    """A moved model's tensor, under the names the anchor has on disk."""

    move: Move
    names: Move
    tensor: str

    def __call__(self) -> dict[str, Tensor]:
        return self.names.model.split(self.tensor, self.move.tensor(self.tensor))


def _aligned(
    checkpoints: list[Checkpoint], anchor: Checkpoint, options: dict[str, Any]
) -> tuple[list[Output], dict[str, Any], list[str], Checkpoint]:
    """Every model moved next to the anchor; nothing is rounded before it is merged."""
    others = [c for c in checkpoints if c is not anchor]
    if not others:
        return _plain(checkpoints), {}, [], anchor
    found = align_models(others[0], anchor, others=others[1:], **options)
    known = [found] if isinstance(found, Alignment) else found.members
    waiting = iter(known)
    alignments = [None if c is anchor else next(waiting) for c in checkpoints]
    if any(bool(a.fragile) != bool(known[0].fragile) for a in known):
        raise RequestError(
            "Merging with --align: the gains of the anchor are too small to bring some of the models to it. "
            "Name another one with --base."
        )
    own = max(known, key=lambda a: len(a.transform.elements)).anchor_move()
    moves = [own if a is None else a.move() for a in alignments]
    problems = _shape_mismatches(moves, own)
    if problems:
        raise RequestError(
            f"Merging: {'; '.join(problems[:6])}. Only tensors of one shape can be averaged; give the models the same "
            "head, vocabulary and position table first."
        )
    plan = own.plan(None)
    outputs = []
    for name in sorted(own.model.layouts):
        files = own.model.files.get(name, (name,))
        outputs.append(Output({f: plan[f] for f in files}, [_Named(m, own, name) for m in moves]))
    for name in own.model.extra:
        outputs.append(Output({name: plan[name]}, [_reader(own.model.checkpoint, name)]))
    notes = list(dict.fromkeys(n for a in known for n in a.solution.notes))
    if own.model.architecture.untied_config:
        notes.append("input and output table were tied and are now separate, since the stream was rotated")
    return outputs, dict(own.model.architecture.untied_config), notes, anchor


def _shape_mismatches(moves: list[Move], own: Move) -> list[str]:
    found = []
    for move in moves:
        for name, layout in own.model.layouts.items():
            other = move.model.layouts.get(name)
            if other is None or other.shape != layout.shape:
                state = "missing" if other is None else str(other.shape)
                found.append(f"{name} is {layout.shape} in {own.model.name} and {state} in {move.model.name}")
    return found
