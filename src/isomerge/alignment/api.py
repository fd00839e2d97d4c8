"""`isomerge.align` and `isomerge.align_family`: open the models, solve, hand back the result."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from isomerge.alignment.activations import ActivationRequest
from isomerge.alignment.family import AlignedFamily
from isomerge.alignment.result import Alignment
from isomerge.alignment.rounds import Tick
from isomerge.alignment.scope import Scope
from isomerge.alignment.solve_pair import solve_to_anchor
from isomerge.alignment.solve_universe import nearest_to_mean, solve_universe
from isomerge.alignment.storage import load_transform
from isomerge.arguments import require_choice, require_shared_types, require_types
from isomerge.checkpoint import Checkpoint, open_checkpoint, parse_size, require_floating
from isomerge.checkpoint.base import Progress
from isomerge.choices import MANY
from isomerge.errors import RequestError
from isomerge.running.stock import require_device
from isomerge.threads import parallel

KEPT_BETWEEN_SWEEPS = 8 << 30  # bytes, where max_memory says nothing


def align(
    source: Any,
    anchor: Any = None,
    *,
    level: str = "full",
    scale: bool | None = None,
    layers: str | None = None,
    only: str | None = None,
    sweeps: int = 15,
    transform: str | Path | None = None,
    data: Any = None,
    evidence: str | Mapping[str, str] | None = None,
    measure: str = "covariance",
    site: str = "post",
    limit: int | None = None,
    threads: int | None = None,
    device: str = "cpu",
    max_memory: int | str | None = None,
    progress: Progress | None = None,
) -> Alignment:
    """Move `source` next to `anchor` without changing what it computes.

    Models are folders, files, hub ids, state_dicts or modules. `transform` applies a stored transform instead of
    solving; only then the anchor may be left out. For more than two models see `align_family`.

    With `data` (a path, an opened `Data`, batches, or a function that gives them) activations decide for the residual
    stream and weights for the rest. `evidence` is "weights", "activations" or "mix" for all spaces, or by space:
    `{"residual": "mix", "ffn": "activations"}`. `measure` is "covariance", "correlation" or "l2" (not centred), `site`
    says whether feed-forward units are seen before ("pre") or after ("post") their activation function, and `limit` is
    the number of examples.

    What may move: `level` ("permutation", "rotation" or "full"), `layers` ("0-4,7", "first 3", "last 2"), `only`
    ("attention", "ffn" or "residual") and `scale`, whether heads are rescaled too. How it is solved: at most `sweeps`
    rounds, on `device`, by `threads` workers, with half of `max_memory` kept between sweeps. `progress` is called with
    what is done, how much there is, and a word for it. Nothing is random.

    >>> alignment = isomerge.align("model-b", anchor="model-a")
    >>> written = alignment.save("model-b-next-to-a")
    """
    if transform is not None:
        require_types(transform=(transform, str, os.PathLike))
        require_shared_types(threads=threads, progress=progress)
        if data is not None:
            raise RequestError(
                "Applying a stored transform: nothing is solved, so data has no use. Leave it out.", keys=("data",)
            )
        if (level, scale, layers, only) != ("full", None, None, None):
            raise RequestError(
                "Applying a stored transform: it has its own level and parts. Leave out level, scale, layers and only.",
                keys=("level", "scale", "layers", "only"),
            )
        return _stored_alignment(Path(transform), source, anchor, _bytes(max_memory), threads, progress)
    if anchor is None:
        raise RequestError(f"Aligning {_open(source).name}: there is nothing to align it to. Name an anchor.")
    family = align_family(
        [source], anchor=anchor, level=level, scale=scale, layers=layers, only=only, sweeps=sweeps, data=data,
        evidence=evidence, measure=measure, site=site, limit=limit, threads=threads, device=device,
        max_memory=max_memory, progress=progress,
    )  # fmt: skip
    return family.members[0]


def align_family(
    models: Sequence[Any],
    *,
    anchor: Any = None,
    many: str = "anchor",
    level: str = "full",
    scale: bool | None = None,
    layers: str | None = None,
    only: str | None = None,
    sweeps: int = 15,
    data: Any = None,
    evidence: str | Mapping[str, str] | None = None,
    measure: str = "covariance",
    site: str = "post",
    limit: int | None = None,
    threads: int | None = None,
    device: str = "cpu",
    max_memory: int | str | None = None,
    progress: Progress | None = None,
) -> AlignedFamily:
    """Move several models next to each other without changing what they compute.

    `many="anchor"` moves all `models` to `anchor`; without one, to the model nearest to their mean, which stays.
    `many="universe"` moves all of them to a common mean, which does not depend on their order. All other arguments are
    those of `align`.

    >>> family = isomerge.align_family(["model-b", "model-c"], anchor="model-a")
    >>> written = family.save("aligned")
    """
    start = time.perf_counter()
    require_types(
        level=(level, str), scale=(scale, bool, None), layers=(layers, str, None), only=(only, str, None),
        sweeps=(sweeps, int), evidence=(evidence, str, Mapping, None), measure=(measure, str), site=(site, str),
    )  # fmt: skip
    require_shared_types(limit=limit, threads=threads, device=device, progress=progress)
    require_choice("many", many, MANY)
    scope = Scope(level, scale, layers, only)
    if sweeps < 1:
        raise RequestError(f"Aligning: sweeps is {sweeps}, but at least one is needed.", keys=("sweeps",))
    request = ActivationRequest(data, evidence, measure, site, limit, progress)
    memory = _bytes(max_memory)
    require_device(device)
    if isinstance(models, (str, Path, Mapping)) or not isinstance(models, Sequence):
        raise RequestError("Aligning: models must be a list of models, as in align_family([a, b]).")
    if many == "universe" and anchor is not None:
        raise RequestError("Aligning to a common mean: many='universe' has no anchor. Put that model into models.")
    if many == "universe" and data is not None:
        raise RequestError(
            "Aligning by activations: many='universe' has no anchor model to run on data. Leave data out, or name an "
            "anchor.",
            keys=("many", "data"),
        )
    opened = [_open(model) for model in models]
    target = None if anchor is None else _open(anchor)
    if len(opened) + (target is not None) < 2:
        raise RequestError(f"Aligning {len(opened)} model(s): at least two are needed. Name more models or an anchor.")
    _load_linear_algebra(device)
    budget = memory // 2 if memory is not None else KEPT_BETWEEN_SWEEPS
    with parallel(threads) as run:
        options: dict[str, Any] = {"run": run, "sweeps": sweeps, "budget": budget, "device": device}
        options["tick"] = _ticker(progress)
        if many == "universe":
            chosen, alignments = solve_universe(opened, scope, **options)
            target = opened[chosen]
        else:
            if data is not None and evidence != "weights":
                options["request"] = request
            if target is None:
                target = opened.pop(nearest_to_mean(opened))
            alignments = solve_to_anchor(opened, target, scope, **options)
    seconds = time.perf_counter() - start
    members = [
        replace(alignment, seconds=seconds, max_memory=memory, progress=progress, threads=threads)
        for alignment in alignments
    ]
    return AlignedFamily(members, target, many, seconds)


def _bytes(max_memory: int | str | None) -> int | None:
    require_types(max_memory=(max_memory, int, str, None))
    return parse_size(max_memory) if max_memory is not None else None


def _open(model: Any) -> Checkpoint:
    checkpoint = open_checkpoint(model)
    require_floating(checkpoint)
    return checkpoint


def _load_linear_algebra(device: str) -> None:
    """Load the linear algebra of an accelerator from one thread: torch does so on first use, and not thread-safely."""
    if device == "cpu":
        return
    eye = torch.eye(4, dtype=torch.float64, device=device)
    for function in (torch.linalg.cholesky, torch.linalg.qr, torch.linalg.svd, torch.linalg.inv, torch.linalg.eigh):
        function(eye)
    torch.cholesky_inverse(torch.linalg.cholesky(eye))
    torch.linalg.solve_triangular(eye, eye, upper=True)


def _stored_alignment(
    path: Path, source: Any, anchor: Any, memory: int | None, threads: int | None, progress: Progress | None
) -> Alignment:
    start = time.perf_counter()
    stored = load_transform(path, _open(source), None if anchor is None else _open(anchor))
    return Alignment(
        stored.source, stored.anchor, stored.scope, stored.transform, gauge=stored.gauge,
        solver_notes=[f"transform read from {path.name}"], seconds=time.perf_counter() - start, max_memory=memory,
        progress=progress, threads=threads,
    )  # fmt: skip


def _ticker(progress: Progress | None) -> Tick:
    """Bytes of units solved so far, out of the most that all sweeps could take."""
    done = 0
    lock = threading.Lock()

    def tick(count: int, most: int) -> None:
        nonlocal done
        with lock:
            done += count
            if progress:
                progress(min(done, most), most, "solving")

    return tick
