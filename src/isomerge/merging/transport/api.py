"""`fuse` and `transported`: open, solve the plans, carry the sources to the anchor, average."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isomerge.architectures import describe
from isomerge.checkpoint import Checkpoint, open_checkpoint, require_floating
from isomerge.checkpoint.base import Progress
from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.errors import RequestError
from isomerge.merging.reconstruct.parents import prepare
from isomerge.merging.reconstruct.result import Reconstructed
from isomerge.merging.transport.carry import carry, distance, finished, own_state, plan_of
from isomerge.merging.transport.pair import Request
from isomerge.merging.transport.solver import Solver
from isomerge.running.stock import require_device


def fuse(
    models: Sequence[Any],
    batches: Any = None,
    *,
    cost: str | None = None,
    solver: str = "emd",
    regularisation: float = 0.05,
    mass: str = "uniform",
    residual: str = "joint",
    heads: str = "matched",
    site: str = "post",
    only: str | None = None,
    align: bool | Mapping[str, Any] = False,
    weights: Sequence[float] | None = None,
    limit: int | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Reconstructed:
    """Carry every model to the units of the first by optimal transport, and average. Widths may differ.

    `cost` says what two units are compared by: "activations" on `batches` (a function that gives a fresh iterator, or
    data that `isomerge.data.open_data` reads) or their incoming "weights"; by default activations where there is data.
    `solver` is "emd" (hard) or "sinkhorn" (soft, `regularisation` relative to the mean cost); `mass` is "uniform" or
    "importance". `residual` says how the plans of the stream's writers become one: "joint", "averaging", "weighted",
    "weighted_units", "first" or "identity". `heads` is "matched" (heads, then units inside them), "fixed" (in their
    order) or "across" (units regardless of heads). `site` says whether feed-forward units are seen before ("pre") or
    after ("post") their activation function. `only` is "ffn", "attention" or "residual". `align` brings the models into
    one basis first: True is `{"level": "rotation"}`, a mapping holds options of `isomerge.align`.

    With equal widths, "emd", uniform masses and a stream that is not averaged, every plan is a permutation and a
    carried model computes what it did; otherwise it is an approximation, and the report says so.

    >>> fused = fuse(["model-a", "model-b"], batches)
    >>> written = fused.save("fused")

    Reference: Imfeld et al., "Transformer Fusion with Optimal Transport" (2024).
    """
    how = Solver(solver, regularisation, mass)
    request = Request(how, cost, residual, heads, only, site, batches, limit, device, progress)
    return _work(models, _shares(models, weights), request, align)


def transported(
    source: Any,
    anchor: Any,
    batches: Any = None,
    *,
    cost: str | None = None,
    solver: str = "emd",
    regularisation: float = 0.05,
    mass: str = "uniform",
    residual: str = "joint",
    heads: str = "matched",
    site: str = "post",
    only: str | None = None,
    align: bool | Mapping[str, Any] = False,
    limit: int | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Reconstructed:
    """Only the source, carried to the units of the anchor; the options are those of `fuse`.

    The result has the anchor's shape and config. Its report, like that of `fuse`, has the distance of the source from
    the anchor: as it was (`before`), in one basis (`aligned`, where that was asked for) and carried (`after`).
    """
    how = Solver(solver, regularisation, mass)
    request = Request(how, cost, residual, heads, only, site, batches, limit, device, progress)
    return _work([anchor, source], [0.0, 1.0], request, align)


def _work(
    models: Sequence[Any], shares: list[float], request: Request, align: bool | Mapping[str, Any]
) -> Reconstructed:
    """Σ share · (model in the units of the first)."""
    start = time.perf_counter()
    require_device(request.device)
    opened = [_open(model) for model in models]
    basis = _in_one_basis(opened, align, request)
    anchor = replace(describe(basis.models[0]), device=request.device)
    plan = plan_of(anchor)
    own = own_state(anchor.checkpoint, plan)
    total = {name: shares[0] * tensor if tensor.is_floating_point() else tensor for name, tensor in own.items()}
    records = []
    for source, original, share in zip(basis.models[1:], opened[1:], shares[1:], strict=True):
        moved, record = carry(source, anchor, request)
        for name in (n for n in plan if own[n].is_floating_point()):
            total[name] += share * moved.get(name, own[name])
        far = {"before": distance(own_state(original, original.tensors), own_state(opened[0], opened[0].tensors))}
        if source is not original:
            far["aligned"] = distance(own_state(source, source.tensors), own)
        records.append({**record, "distance": {**far, "after": distance(moved, own)}})
    said = [*anchor.architecture.notes, *anchor.notes, *basis.notes]
    notes = dict.fromkeys([*said, *(note for r in records for note in r.pop("notes"))])
    solver = request.solver
    record = {
        "method": "ot_fusion", "models": [c.name for c in opened], "weights": shares, "anchor": opened[0].name,
        "cost": request.cost, "solver": solver.kind, "mass": solver.mass, "residual": request.residual,
        "regularisation": solver.regularisation if solver.kind == "sinkhorn" else None, "heads": request.heads,
        "only": request.only, "aligned": basis.record, "exact": all(r["exact"] for r in records),
        "examples": max((r["examples"] for r in records), default=0), "sources": records, "notes": list(notes),
        "seconds": time.perf_counter() - start,
    }  # fmt: skip
    first = opened[0].config
    changes = {key: value for key, value in basis.config.items() if key not in first or first[key] != value}
    return Reconstructed(finished(total, anchor), plan, opened, changes, record, request.progress)


@dataclass(frozen=True)
class Basis:
    """The models that are carried: as they were given, or aligned first."""

    models: list[Checkpoint]
    config: Mapping[str, Any]
    notes: list[str]
    record: dict[str, Any] | None


def _in_one_basis(opened: list[Checkpoint], align: bool | Mapping[str, Any], request: Request) -> Basis:
    """Aligned models are not rounded before they are carried."""
    if align is False or len(opened) < 2:
        return Basis(opened, opened[0].config, [], None)
    options = {"level": "rotation"} if align is True else dict(align)
    parents, states = prepare(opened, options, request.device, request.progress)
    models = [MemoryCheckpoint(c.name, state, parents.config) for c, state in zip(opened, states, strict=True)]
    return Basis([*models], parents.config, list(parents.notes), parents.alignment)


def _open(model: Any) -> Checkpoint:
    checkpoint = open_checkpoint(model)
    require_floating(checkpoint)
    return checkpoint


def _shares(models: Sequence[Any], weights: Sequence[float] | None) -> list[float]:
    """Weights that sum to 1, or what is wrong with them."""
    if isinstance(models, (str, bytes)) or not models:
        raise RequestError("Fusing: `models` must list at least one model, the anchor first.")
    shares = [1.0] * len(models) if weights is None else [float(w) for w in weights]
    if len(shares) != len(models):
        raise RequestError(f"Fusing: there are {len(shares)} weights for {len(models)} models.")
    if not all(math.isfinite(w) for w in shares) or not sum(shares) > 0:
        raise RequestError(f"Fusing: the weights {shares} must be finite and have a positive sum.")
    return [w / sum(shares) for w in shares]
