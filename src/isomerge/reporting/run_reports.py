"""The records and pages of an alignment and of merged adapters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from torch import Tensor

from isomerge.adapters.adapter import Adapter, open_adapter
from isomerge.alignment.alignment import Alignment
from isomerge.alignment.family import AlignedFamily
from isomerge.alignment.reporting import Distance
from isomerge.alignment.selftest import UNCHANGED
from isomerge.checkpoint import Checkpoint, Written, open_checkpoint
from isomerge.checkpoint.lock import hash_file
from isomerge.evaluation.verify import verify
from isomerge.kinship import Relation, Rows, SampleSums, cosine_of, place_of, relation
from isomerge.reporting.measured import measured, rounded
from isomerge.reporting.moves import space_moves
from isomerge.reporting.page import write_report

HALF = {"float16", "bfloat16"}
ALIGN_KEYS = (
    "distance", "objective", "max_output_difference", "max_output_difference_reason", "gauge", "untied", "notes",
)  # fmt: skip
ADAPTER_KEYS = ("method", "relative_error", "notes", "sha256")
ADAPTER_RUN_KEYS = ("seconds", "tensors", "bytes")


@dataclass
class AlignRun:
    """An alignment with how it was asked for and what it took, and what was found wrong with what it wrote."""

    alignment: Alignment | AlignedFamily
    request: Mapping[str, Any]
    """`command`, and `options` as they were in the end."""
    took: Mapping[str, Any]
    """`seconds`, `peak_memory_bytes`, `threads`, `device`."""
    problems: list[str] = field(default_factory=list)


def write_align_reports(done: AlignRun, written: Written) -> list[Path | None]:
    """Look at each folder that was written, and write its page; None for each page without jinja2."""
    if isinstance(done.alignment, Alignment):
        members = {str(written.out): done.alignment}
    else:
        members = done.alignment.folders(written.out)
    pages = []
    for folder, member in members.items():
        record = align_record(member, Path(folder), written.sha256 if len(members) == 1 else None)
        checks = align_checks(member, Path(folder))
        done.problems += [
            f"{folder}: {check['name']}: {check['detail']}" for check in checks if check["passed"] is False
        ]
        infos = open_checkpoint(folder).tensors.values()
        record["run"] |= {
            **done.took, "tensors": len(infos), "bytes": sum(info.nbytes for info in infos), "checks": checks,
        }  # fmt: skip
        pages.append(write_report(Path(folder), {**record, "request": done.request}))
    return pages


def align_checks(alignment: Alignment, out: Path) -> list[dict[str, Any]]:
    """What a merge asks of a folder it has written, and whether the model still computes the same."""
    donor = alignment.solution.source.checkpoint
    checks: list[dict[str, Any]] = verify(out, deep=False, same_structure_as=donor, threads=alignment.threads)["checks"]
    return [*checks, _same_function(alignment, open_checkpoint(out))]


def _same_function(alignment: Alignment, out: Checkpoint) -> dict[str, Any]:
    report = alignment.report()
    difference, passed = report["max_output_difference"], None
    if difference is None:
        detail = f"not checked: {report['max_output_difference_reason']}"
    else:
        detail = f"random inputs: the largest difference is {difference:.1e} of the largest output"
        half = sorted({str(info.dtype).removeprefix("torch.") for info in out.tensors.values()} & HALF)
        if half and difference > UNCHANGED:
            detail += f"; {', '.join(half)} rounds the moved weights, so no limit is held against it"
        else:
            passed = difference <= UNCHANGED
    return {"name": "same function", "passed": passed, "detail": detail}


def align_record(alignment: Alignment, out: Path, sha256: str | None) -> dict[str, Any]:
    """What isomerge.json holds of an aligned model."""
    report = alignment.report()
    gains = {row["name"]: row["gain"] for row in report["spaces"]}
    moves = [{**row, "gain": gains[row["name"]]} for row in space_moves(alignment.solution)]
    models = [m for m in (alignment.solution.source, alignment.solution.anchor) if m is not None]
    return {
        **{key: report[key] for key in ALIGN_KEYS},
        "kind": "align",
        "inputs": [
            {"reference": model.name, "revision": model.checkpoint.revision, "role": role}
            for model, role in zip(models, ("source", "anchor"), strict=False)
        ],
        "alignment": {
            "anchor": report["anchor"] or "a stored transform",
            "level": report["level"],
            "family": report["family"],
            "models": [{"model": report["source"], "verdict": report["verdict"], "spaces": moves}],
        },
        "measured": _measured(alignment, open_checkpoint(out)),
        "sha256": sha256,
        "run": {"seconds": report["seconds"], "solve_seconds": report["seconds"]},
    }


def _measured(alignment: Alignment, out: Checkpoint) -> dict[str, Any] | None:
    """Distances of whole tensors, as the alignment has measured them; angles and signs from samples of rows."""
    source, anchor = alignment.solution.source, alignment.solution.anchor
    if anchor is None:
        return None
    # Two models may have one name: a scrambled copy beside its original.
    name, goal = source.name, anchor.name if anchor.name != source.name else f"{anchor.name} (anchor)"
    relations: dict[str, Relation] = {}
    for tensor, distance in alignment.distances().items():
        files = source.files.get(tensor, ())
        sample = None
        if len(files) == 1 and anchor.files.get(tensor) == files:
            sample = _sampled(files[0], name, goal, source.checkpoint, anchor.checkpoint, out)
        relations[tensor] = _exact(distance, sample, name, source.layouts[tensor].shape)
    spaces = {space: source.touching(space) for space in source.architecture.spaces}
    return measured(relations, models=[name, goal], reference=goal, base=None, spaces=spaces)


def _sampled(
    file: str, name: str, goal: str, source: Checkpoint, anchor: Checkpoint, out: Checkpoint
) -> Relation | None:
    infos = [checkpoint.tensors.get(file) for checkpoint in (source, anchor, out)]
    shapes = {info.shape if info is not None else None for info in infos}
    if len(shapes) > 1 or infos[0] is None:
        return None
    before: Mapping[str, Rows] = {name: _reader(source, file), goal: _reader(anchor, file)}
    after: Mapping[str, Rows] = {name: _reader(out, file), goal: _reader(anchor, file)}
    return relation(file, infos[0].shape, before, after, reference=goal)


def _exact(distance: Distance, sample: Relation | None, name: str, shape: tuple[int, ...]) -> Relation:
    """The sampled sums, brought to the size of the tensor, with the distances of all its elements."""
    elements = math.prod(shape)
    empty = SampleSums({}, 0, {}, 0.0)
    sides = []
    for place, sums in enumerate((sample.before, sample.after) if sample else (None, None)):
        share = sample.elements / sample.sampled if sample and sample.sampled else 0.0
        whole = empty if sums is None else replace(
            sums,
            products={pair: value * share for pair, value in sums.products.items()},
            conflicts=round(sums.conflicts * share),
        )  # fmt: skip
        sides.append(replace(whole, apart={name: distance[place]}, size=distance[2]))
    return Relation(elements, elements, sides[0], sides[1], len(shape) > 1)


def _reader(checkpoint: Checkpoint, file: str) -> Rows:
    return lambda start, stop: checkpoint.read_rows(file, start, stop)


# --- adapters ---------------------------------------------------------------------------------------------------------
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
    """The mean cosine between the updates ΔW of every two adapters, by layer; exact, and no ΔW is ever formed."""
    cosines: dict[str, list[float]] = {}
    for one, other in combinations(adapters, 2):
        for module in sorted(one.targets.keys() & other.targets.keys()):
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
