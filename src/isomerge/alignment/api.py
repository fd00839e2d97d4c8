"""`isomerge.align` and `isomerge.align_family`: open the models, solve, hand back the result."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from isomerge.alignment.activations import ActivationRequest
from isomerge.alignment.estimate import fitting_workers
from isomerge.alignment.family import AlignedFamily
from isomerge.alignment.learning.steps import LearnRequest, learned
from isomerge.alignment.result import Alignment
from isomerge.alignment.rounds import Tick
from isomerge.alignment.scope import Scope
from isomerge.alignment.solve_pair import keep_alignment, kept_alignment, solve_to_anchor
from isomerge.alignment.solve_universe import nearest_to_mean, solve_universe
from isomerge.alignment.storage import load_transform
from isomerge.arguments import require_choice, require_shared_types, require_types
from isomerge.checkpoint import Checkpoint, open_checkpoint, parse_size, require_floating
from isomerge.checkpoint.base import Progress
from isomerge.checkpoint.kept import KeptWork, work_key
from isomerge.checkpoint.lock import current_versions
from isomerge.checkpoint.open import with_config
from isomerge.choices import LEARN_TOWARDS, MANY, ORDER_SOLVERS
from isomerge.data import open_data
from isomerge.engine import Engine, Threads, engine_of, require_threads
from isomerge.errors import RequestError
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.running.stock import require_device
from isomerge.threads import thread_count

KEPT_BETWEEN_SWEEPS = 8 << 30  # bytes, where max_memory says nothing


@shows_progress
def align(
    source: Any,
    anchor: Any = None,
    *,
    config: Mapping[str, Any] | None = None,
    level: str = "full",
    scale: bool | None = None,
    layers: str | None = None,
    only: str | None = None,
    sweeps: int = 15,
    solver: str = "assignment",
    transform: str | Path | None = None,
    data: Any = None,
    evidence: str | Mapping[str, str] | None = None,
    measure: str = "covariance",
    site: str = "post",
    limit: int | None = None,
    learn: int = 0,
    learn_towards: str = "predictions",
    seed: int = 0,
    threads: int | None = None,
    engine: str | Engine = "threads",
    address: str | None = None,
    device: str = "cpu",
    max_memory: int | str | None = None,
    resume: str | os.PathLike[str] | KeptWork | None = None,
    progress: Shown = None,
) -> Alignment:
    """Move `source` next to `anchor` without changing what it computes.

    Models are folders, files, hub ids, state_dicts or modules. `config` is the config.json of state_dicts, as a dict:
    names and shapes alone do not say which activation functions and norms there are. `transform` applies a stored
    transform instead of solving; only then the anchor may be left out. For more than two models see `align_family`.

    With `data` (a path, an opened `Data`, batches, or a function that gives them) activations decide for the residual
    stream and weights for the rest. `evidence` is "weights", "activations" or "mix" for all spaces, or by space:
    `{"residual": "mix", "ffn": "activations"}`. `measure` is "covariance", "correlation", "information" (mutual) or
    "l2" (not centred), `site` says whether feed-forward units are seen before ("pre") or after ("post") their
    activation function, and `limit` is the number of examples.

    `learn` takes so many gradient steps after that, without labels: they change the elements of the symmetry, and lower
    the distance between the midpoint's predictions and those of the two models on `data`; with `learn_towards="labels"`
    its loss on the labels of the data. The midpoint is judged on one part of the data that no step sees; if that is no
    better, what was solved is kept. `seed` names the order of the data.

    What may move: `level` ("permutation", "rotation" or "full"), `layers` ("0-4,7", "first 3", "last 2"), `only`
    ("attention", "ffn" or "residual") and `scale`, whether heads are rescaled too. How it is solved: at most `sweeps`
    rounds, the orders of units by `solver` ("assignment", which is exact, "sinkhorn", "annealing" or "graph"), on
    `device`, by `threads` workers, with half of `max_memory` kept between sweeps and no more workers than fit into the
    rest (at least one); with `engine="ray"` by the cluster at `address` (see docs/cluster.md), with the same result.
    `progress` is called with what is done, how much there is, and a word for it. The same call gives the same result;
    what `learn` and "annealing" draw has a fixed seed.

    `resume` names the folder that `save` will be given: what is solved is kept there, and the same call, made again
    after a kill, does not solve it again.

    >>> alignment = isomerge.align("model-b", anchor="model-a")
    >>> written = alignment.save("model-b-next-to-a")
    """
    progress = callback(progress)
    source, *others = with_config([source] if anchor is None else [source, anchor], config)
    anchor = others[0] if others else None
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
        solving = (sweeps, solver, evidence, measure, site, limit, learn, learn_towards, device)
        if solving != (15, "assignment", None, "covariance", "post", None, 0, "predictions", "cpu"):
            raise RequestError(
                "Applying a stored transform: nothing is solved. Leave out sweeps, solver, evidence, measure, site, "
                "limit, learn, learn_towards and device.",
                keys=("sweeps", "solver", "evidence", "measure", "limit", "learn", "learn_towards", "device"),
            )
        spread = engine_of(engine, address)
        return _stored_alignment(Path(transform), source, anchor, _bytes(max_memory), threads, spread, progress)
    if anchor is None:
        raise RequestError(f"Aligning {_open(source).name}: there is nothing to align it to. Name an anchor.")
    family = align_family(
        [source], anchor=anchor, level=level, scale=scale, layers=layers, only=only, sweeps=sweeps, solver=solver,
        data=data, evidence=evidence, measure=measure, site=site, limit=limit, learn=learn, learn_towards=learn_towards,
        seed=seed, threads=threads, engine=engine, address=address, device=device, max_memory=max_memory, resume=resume,
        progress=progress,
    )  # fmt: skip
    return family.members[0]


@shows_progress
def align_family(
    models: Sequence[Any],
    *,
    anchor: Any = None,
    many: str = "anchor",
    config: Mapping[str, Any] | None = None,
    level: str = "full",
    scale: bool | None = None,
    layers: str | None = None,
    only: str | None = None,
    sweeps: int = 15,
    solver: str = "assignment",
    data: Any = None,
    evidence: str | Mapping[str, str] | None = None,
    measure: str = "covariance",
    site: str = "post",
    limit: int | None = None,
    learn: int = 0,
    learn_towards: str = "predictions",
    seed: int = 0,
    threads: int | None = None,
    engine: str | Engine = "threads",
    address: str | None = None,
    device: str = "cpu",
    max_memory: int | str | None = None,
    resume: str | os.PathLike[str] | KeptWork | None = None,
    progress: Shown = None,
) -> AlignedFamily:
    """Move several models next to each other without changing what they compute.

    `many="anchor"` moves all `models` to `anchor`; without one, to the model nearest to their mean, which stays.
    `many="universe"` moves all of them to a common mean, and `many="cycle"` to each other, so that they lie as near
    together as can be found; neither depends on their order. All other arguments are those of `align`.

    >>> family = isomerge.align_family(["model-b", "model-c"], anchor="model-a")
    >>> written = family.save("aligned")
    """
    progress = callback(progress)
    start = time.perf_counter()
    require_types(
        level=(level, str), scale=(scale, bool, None), layers=(layers, str, None), only=(only, str, None),
        sweeps=(sweeps, int), solver=(solver, str), evidence=(evidence, str, Mapping, None), measure=(measure, str),
        site=(site, str), learn=(learn, int), learn_towards=(learn_towards, str),
        resume=(resume, str, os.PathLike, KeptWork, None),
    )  # fmt: skip
    require_shared_types(limit=limit, seed=seed, threads=threads, device=device, progress=progress)
    require_choice("many", many, MANY)
    require_choice("solver", solver, ORDER_SOLVERS)
    require_choice("learn_towards", learn_towards, LEARN_TOWARDS)
    scope = Scope(level, scale, layers, only)
    if sweeps < 1:
        raise RequestError(f"Aligning: sweeps is {sweeps}, but at least one is needed.", keys=("sweeps",))
    if learn < 0 or (learn and data is None):
        cause = "there is no data to learn from. Pass data" if learn > 0 else "it is a number of steps. Leave it out"
        raise RequestError(f"Aligning with learn={learn}: {cause}.", keys=("learn", "data"))
    if learn_towards != "predictions" and not learn:
        raise RequestError(
            f"Aligning with learn_towards='{learn_towards}': nothing is learned. Give learn a number of steps, or "
            "leave learn_towards out.",
            keys=("learn", "learn_towards"),
        )
    if data is not None and evidence == "weights" and not learn:
        raise RequestError(
            "Aligning by weights alone: data has no use then. Leave data out, or choose other evidence.",
            keys=("data", "evidence"),
        )
    request = ActivationRequest(data, evidence, measure, site, limit, progress)
    memory = _bytes(max_memory)
    require_device(device)
    if isinstance(models, (str, Path, Mapping)) or not isinstance(models, Sequence):
        raise RequestError("Aligning: models must be a list of models, as in align_family([a, b]).")
    if many != "anchor" and anchor is not None:
        raise RequestError(f"Aligning without an anchor: many='{many}' moves all models. Put that model into models.")
    if many != "anchor" and data is not None:
        raise RequestError(
            f"Aligning by activations: many='{many}' has no anchor model to run on data. Leave data out, or name an "
            "anchor.",
            keys=("many", "data"),
        )
    given = with_config(models if anchor is None else [*models, anchor], config)
    opened = [_open(model) for model in given[: len(models)]]
    target = None if anchor is None else _open(given[-1])
    if len(opened) + (target is not None) < 2:
        raise RequestError(f"Aligning {len(opened)} model(s): at least two are needed. Name more models or an anchor.")
    _load_linear_algebra(device)
    asked = [many, level, scale, layers, only, sweeps, evidence, measure, site, limit, learn, seed, device]
    asked += [learn_towards] if learn else []
    asked += [solver] if solver != "assignment" else []
    kept = _kept(resume, [*opened, *([] if target is None else [target])], data, asked)
    budget = memory // 2 if memory is not None else KEPT_BETWEEN_SWEEPS
    spread = engine_of(engine, address)
    every = [*opened, *([] if target is None else [target])]
    _require_spreadable(spread, every, many, device)
    if memory is not None and isinstance(spread, Threads):
        threads = fitting_workers(every[-1], scope, threads=thread_count(threads), memory=memory, budget=budget)
    folders = [model.folder for model in every if model.folder is not None]
    mapping = spread.parallel(threads, visible=folders)
    with kept.unless_it_fails() if kept is not None else nullcontext(), mapping as run:
        options: dict[str, Any] = {"run": run, "sweeps": sweeps, "solver": solver, "budget": budget, "device": device}
        options["tick"] = _ticker(progress)
        if many != "anchor":
            chosen, alignments = solve_universe(opened, scope, many=many, **options)
            target = opened[chosen]
        else:
            if data is not None and evidence != "weights":
                options["request"] = request
            if target is None:
                target = opened.pop(nearest_to_mean(opened))
            alignments = solve_to_anchor(opened, target, scope, kept=kept, **options)
    if learn:
        steps = LearnRequest(learn, data, limit, seed, device, threads, progress, learn_towards)
        alignments = _learned(alignments, kept, steps)
    seconds = time.perf_counter() - start
    members = [
        replace(
            alignment, seconds=seconds, max_memory=memory, progress=progress, threads=threads, engine=spread, kept=kept
        )
        for alignment in alignments
    ]
    return AlignedFamily(members, target, many, seconds)


def _learned(alignments: Sequence[Alignment], kept: KeptWork | None, request: LearnRequest) -> list[Alignment]:
    """Every alignment learned further, unless an interrupted run has done it."""
    found = []
    for number, alignment in enumerate(alignments):
        known = _known(kept, f"learn-{number}", alignment)
        if known is None:
            known = learned(alignment, request)
            if kept is not None:
                keep_alignment(kept, f"learn-{number}", known)
        found.append(known)
    return found


def _known(kept: KeptWork | None, name: str, alignment: Alignment) -> Alignment | None:
    assert alignment.anchor is not None
    source, anchor = alignment.source, alignment.anchor
    return kept_alignment(kept, name, source.checkpoint, anchor.checkpoint, alignment.scope, source.device)


def _kept(
    resume: str | os.PathLike[str] | KeptWork | None, models: Sequence[Checkpoint], data: Any, options: Sequence[Any]
) -> KeptWork | None:
    """Where to keep what is solved; None where a model or data cannot be told from a changed one."""
    if resume is None or isinstance(resume, KeptWork):
        return resume
    identities = [model.identity() for model in models]
    if None in identities or callable(data):
        return None
    seen = None if data is None else [open_data(data).sha256, torch.get_num_threads()]
    key = work_key(work="align", versions=current_versions(), models=identities, options=list(options), data=seen)
    return KeptWork(resume, key)


def _require_spreadable(engine: Engine, models: Sequence[Checkpoint], many: str, device: str) -> None:
    """What other processes can align: files, to a model that is one, on processors."""
    for model in models:
        if model.in_memory:
            require_threads(
                engine, "Aligning", f"{model.name} is in the memory of this process, and workers read files"
            )
    if many != "anchor":
        require_threads(engine, "Aligning", f"the common mean of many='{many}' is in the memory of this process")
    if device != "cpu":
        require_threads(engine, "Aligning", f"workers use no accelerator, and device is {device}")


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
    path: Path,
    source: Any,
    anchor: Any,
    memory: int | None,
    threads: int | None,
    engine: Engine,
    progress: Progress | None,
) -> Alignment:
    start = time.perf_counter()
    stored = load_transform(path, _open(source), None if anchor is None else _open(anchor))
    return Alignment(
        stored.source, stored.anchor, stored.scope, stored.transform, gauge=stored.gauge,
        solver_notes=[f"transform read from {path.name}"], seconds=time.perf_counter() - start, max_memory=memory,
        progress=progress, threads=threads, engine=engine,
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
