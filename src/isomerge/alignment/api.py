"""`isomerge.align`: open, solve, hand back an `Alignment` (or several)."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from isomerge.alignment.activations import Request
from isomerge.alignment.alignment import Alignment, Progress
from isomerge.alignment.family import AlignedFamily
from isomerge.alignment.levels import Scope
from isomerge.alignment.many import nearest_to_mean, solve_universe
from isomerge.alignment.pairwise import solve_pair, solve_to_anchor
from isomerge.alignment.parallel import parallel
from isomerge.alignment.storage import load_solution
from isomerge.alignment.sweep import Tick
from isomerge.checkpoint import Checkpoint, open_checkpoint, parse_size, require_floating
from isomerge.errors import RequestError, did_you_mean
from isomerge.running.stock import require_device

KEPT_BETWEEN_SWEEPS = 8 << 30  # bytes, where --max-memory says nothing
MANY = ("anchor", "universe")


def align(
    source: Any,
    anchor: Any = None,
    *,
    others: Sequence[Any] = (),
    level: str = "full",
    scale: bool | None = None,
    layers: str | None = None,
    only: str | None = None,
    sweeps: int = 15,
    many: str = "anchor",
    transform: str | Path | None = None,
    data: Any = None,
    evidence: str | Mapping[str, str] | None = None,
    measure: str = "covariance",
    site: str = "post",
    limit: int | None = None,
    threads: int | None = None,
    device: str = "cpu",
    max_memory: int | str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Alignment | AlignedFamily:
    """Move `source` next to `anchor` without changing what it computes.

    Models are folders, files, hub ids, state_dicts or modules. With `others` (or without an anchor) all models are
    aligned: to the anchor, by default the one nearest to their mean, or with `many="universe"` to a common mean.
    `transform` applies a stored transform instead of solving.

    With `data` (a path, an opened `Data`, batches, or a function that gives them) activations decide for the residual
    stream and weights for the rest. `evidence` is "weights", "activations" or "mix" for all spaces, or by space:
    `{"residual": "mix", "ffn": "activations"}`. `measure` is "covariance", "correlation" or "l2" (not centred), `site`
    says whether feed-forward units are seen before ("pre") or after ("post") their activation function, and `limit` is
    the number of examples.

    What may move: `level` ("permutation", "rotation" or "full"), `layers` ("0-4,7", "first 3", "last 2"), `only`
    ("attention", "ffn" or "residual") and `scale`, whether heads are rescaled too. How it is solved: at most `sweeps`
    rounds, on `device`, by `threads` workers, with half of `max_memory` kept between sweeps. `progress` is called with
    what is done, how much there is, and a word for it. Nothing is random: `seed` changes nothing.

    >>> alignment = isomerge.align("model-b", anchor="model-a")          # doctest: +SKIP
    >>> alignment.save("model-b-next-to-a")                              # doctest: +SKIP
    """
    scope = Scope(level, scale, layers, only)
    if many not in MANY:
        raise RequestError(f"Aligning: '{many}' is not a way to align many models. {did_you_mean(many, MANY)}")
    if sweeps < 1:
        raise RequestError(f"Aligning with {sweeps} sweeps: at least one is needed. Try --sweeps 15.")
    request = Request(data, evidence, measure, site, limit, progress)
    start = time.perf_counter()
    memory = parse_size(max_memory) if max_memory is not None else None
    require_device(device)
    if transform is not None:
        if data is not None:
            raise RequestError("Applying a stored transform: nothing is solved, so there is no use for data.")
        if scope != Scope():
            raise RequestError("Applying a stored transform: it has its own level and parts. Leave those options out.")
        return _stored(transform, source, anchor, others, memory, progress)
    if isinstance(others, (str, Path)):
        raise RequestError("Aligning: others is one model, and a list of them is wanted, as in others=[c, d].")
    models = [_open(m) for m in (source, *([] if anchor is None else [anchor]), *others)]
    if len(models) < 2:
        raise RequestError(f"Aligning {models[0].name}: there is nothing to align it to. Name an anchor.")
    if many == "universe" and data is not None:
        raise RequestError(
            "Aligning to a common mean by activations: the mean of models is no model that data could run through. "
            "Name an anchor, or leave the data out."
        )
    budget = memory // 2 if memory is not None else KEPT_BETWEEN_SWEEPS
    _wake(device)
    with parallel(threads) as run:
        kwargs: dict[str, Any] = {"run": run, "sweeps": sweeps, "budget": budget, "device": device}
        kwargs["tick"] = _ticker(progress)
        if data is not None and evidence != "weights":
            kwargs["request"] = request
        if len(models) == 2 and anchor is not None and many == "anchor":
            solution = solve_pair(models[0], models[1], scope, **kwargs)
            return Alignment(solution, time.perf_counter() - start, memory, progress, threads)
        if many == "universe":
            chosen, solutions = solve_universe(models, scope, **kwargs)
        else:
            chosen = 1 if anchor is not None else nearest_to_mean(models)
            rest = [m for k, m in enumerate(models) if k != chosen]
            solutions = solve_to_anchor(rest, models[chosen], scope, **kwargs)
    seconds = time.perf_counter() - start
    members = [Alignment(s, seconds, memory, progress, threads) for s in solutions]
    if len(members) == 1:
        return members[0]
    return AlignedFamily(members, models[chosen], many, seconds)


def _open(model: Any) -> Checkpoint:
    checkpoint = open_checkpoint(model)
    require_floating(checkpoint)
    return checkpoint


def _wake(device: str) -> None:
    """Load the linear algebra of an accelerator from one thread: torch does so on first use, and not thread-safely."""
    if device == "cpu":
        return
    eye = torch.eye(4, dtype=torch.float64, device=device)
    for function in (torch.linalg.cholesky, torch.linalg.qr, torch.linalg.svd, torch.linalg.inv, torch.linalg.eigh):
        function(eye)
    torch.cholesky_inverse(torch.linalg.cholesky(eye))
    torch.linalg.solve_triangular(eye, eye, upper=True)


def _stored(
    path: str | Path, source: Any, anchor: Any, others: Sequence[Any], memory: int | None, progress: Progress | None
) -> Alignment:
    if others:
        raise RequestError("Applying a stored transform: it moves one model at a time. Leave the others out.")
    start = time.perf_counter()
    opened = [None if m is None else _open(m) for m in (source, anchor)]
    assert opened[0] is not None
    solution, gauge = load_solution(Path(path), opened[0], opened[1])
    return Alignment(solution, time.perf_counter() - start, memory, progress, gauge=gauge)


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
