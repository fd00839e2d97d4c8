"""The record and the page of merged adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from torch import Tensor

from isomerge.adapters.adapter import Adapter, open_adapter
from isomerge.checkpoint.hashing import hash_file
from isomerge.kinship import cosine_of, place_of
from isomerge.reporting.measured import rounded
from isomerge.reporting.page import write_report

ADAPTER_KEYS = ("method", "relative_error", "notes", "sha256")
ADAPTER_RUN_KEYS = ("seconds", "tensors", "bytes")


def write_adapter_report(out: Path, adapters: Sequence[str], result: Mapping[str, Any]) -> Path | None:
    """`result` is that of the merge of these adapters; None where jinja2 is missing."""
    opened = [open_adapter(adapter) for adapter in adapters]
    angles = update_cosines(opened)
    record = {
        **{key: result[key] for key in ADAPTER_KEYS},
        "kind": "adapters",
        "inputs": [_input(reference, adapter) for reference, adapter in zip(adapters, opened, strict=True)],
        "targets": [
            {**row, "layer": place_of(row["name"])[1], "cosine": rounded(angles.get(row["name"]))}
            for row in result["targets"]
        ],
        "run": {key: result[key] for key in ADAPTER_RUN_KEYS},
    }
    return write_report(out, record)


def update_cosines(adapters: Sequence[Adapter]) -> dict[str, float]:
    """The mean cosine between the updates ΔW of every two adapters, by layer; exact, and no ΔW is ever formed. DoRA's
    updates are no products of factors, so they are left out."""
    cosines: dict[str, list[float]] = {}
    for one, other in combinations(adapters, 2):
        for module in sorted(one.targets.keys() & other.targets.keys()):
            if any(adapter.targets[module].magnitude for adapter in (one, other)):
                continue
            pair = [adapter.factors(adapter.targets[module]) for adapter in (one, other)]
            cosine = cosine_of(_inner(*pair), _inner(pair[0], pair[0]), _inner(pair[1], pair[1]))
            if cosine is not None:
                cosines.setdefault(module, []).append(cosine)
    return {module: sum(values) / len(values) for module, values in cosines.items()}


def _inner(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> float:
    """⟨B A, D C⟩ = ⟨Dᵀ B, C Aᵀ⟩, with matrices no larger than the ranks."""
    (b, a), (d, c) = one, other
    return float(((d.T.double() @ b.double()) * (c.double() @ a.double().T)).sum())


def _input(reference: str, adapter: Adapter) -> dict[str, Any]:
    folder = adapter.checkpoint.folder
    weights = sorted(folder.glob("adapter_model*")) if folder else []
    return {
        "reference": reference,
        "revision": adapter.checkpoint.revision,
        "role": "adapter",
        "tensors": len(adapter.checkpoint.tensors),
        "sha256": hash_file(weights[0]) if len(weights) == 1 else None,
    }
