"""isomerge.json of an aligned model: what moved, and how near the models came, by layer and by space."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isomerge.alignment.report import Distance, space_reports
from isomerge.checkpoint import Checkpoint, Written, open_checkpoint
from isomerge.evaluation.verify import verify
from isomerge.kinship import Relation, Rows, SampleSums, relation
from isomerge.reporting.measured import measured
from isomerge.reporting.moved_units import moved_units
from isomerge.reporting.page import write_report
from isomerge.reporting.record import read_record, record_text

if TYPE_CHECKING:
    from isomerge.alignment.family import AlignedFamily
    from isomerge.alignment.result import Alignment


def own_record(alignment: Alignment, out: Path, sha256: str | None) -> str:
    """Check a folder that was written, and say what to put beside its weights: no byte of it depends on the moment."""
    infos = open_checkpoint(out).tensors.values()
    run = {
        "tensors": len(infos),
        "bytes": sum(info.nbytes for info in infos),
        "checks": align_checks(alignment, out),
    }
    return record_text({**align_record(alignment, out), "sha256": sha256, "run": run})


def write_pages(
    alignment: Alignment | AlignedFamily, written: Written, request: Mapping[str, Any], took: Mapping[str, Any]
) -> tuple[list[Path | None], list[str]]:
    """Add to each record how it was asked for (`command`, `options`) and what the run took, and write its page.

    The pages (None without jinja2), and every check that failed.
    """
    pages, problems = [], []
    for folder, member in alignment.folders(written.out).items():
        record = read_record(folder)
        record["run"] |= {"solve_seconds": member.seconds, **took}
        pages.append(write_report(folder, {**record, "request": request}))
        failed = [check for check in record["run"]["checks"] if check["passed"] is False]
        problems += [f"{folder}: {check['name']}: {check['detail']}" for check in failed]
    return pages, problems


def align_checks(alignment: Alignment, out: Path) -> list[dict[str, Any]]:
    """The checks that a merge makes of a folder it has written, and whether the model still computes the same."""
    donor = alignment.source.checkpoint
    checks: list[dict[str, Any]] = verify(out, deep=False, same_structure_as=donor, threads=alignment.threads)["checks"]
    exactness = alignment.exactness
    return [
        *checks,
        {"name": "same function", "passed": exactness.same, "detail": exactness.detail or exactness.reason},
    ]


def align_record(alignment: Alignment, out: Path) -> dict[str, Any]:
    """What isomerge.json holds of an aligned model."""
    report = alignment.report()
    moves = [{**row, "gain": space.gain} for row, space in zip(space_moves(alignment), report.spaces, strict=True)]
    models = [m for m in (alignment.source, alignment.anchor) if m is not None]
    return {
        "kind": "align",
        "distance": report.distance.to_dict(),
        "objective": report.objective,
        **({} if report.learned is None else {"learned": report.learned}),
        "max_output_difference": report.max_output_difference,
        "max_output_difference_reason": report.max_output_difference_reason,
        "gauge": report.gauge,
        "untied": report.untied,
        "notes": report.notes,
        "inputs": [
            {"reference": model.name, "revision": model.checkpoint.revision, "role": role}
            for model, role in zip(models, ("source", "anchor"), strict=False)
        ],
        "alignment": {
            "anchor": report.anchor or "a stored transform",
            "level": report.level,
            "family": report.family,
            "models": [{"model": report.source, "verdict": report.verdict, "spaces": moves}],
        },
        "measured": _measured(alignment, open_checkpoint(out)),
    }


def space_moves(alignment: Alignment) -> list[dict[str, Any]]:
    """A row per space: group, how much of it moved, how far its units travelled and where to, or why it stays."""
    transform = alignment.transform
    rows = []
    for space in space_reports(alignment.source, transform, alignment.stays, None):
        element = transform.elements.get(space.name)
        order = None if element is None else transform.spaces[space.name].order(element)
        rows.append({
            "name": space.name,
            "group": space.group,
            "moved": space.moved,
            "reason": space.reason,
            "displacement": None if order is None else displacement(order),
            "units": moved_units(transform, space.name),
        })  # fmt: skip
    return rows


def displacement(order: Tensor) -> float:
    """How far a unit travels on average, as a share of the farthest it could: about a third for a random order.

    >>> displacement(torch.tensor([0, 1, 2])), displacement(torch.tensor([2, 1, 0]))
    (0.0, 0.6666666666666666)
    """
    size = order.shape[-1]  # orders within each of several parents come as rows
    if size < 2:
        return 0.0
    travelled = (order.cpu() - torch.arange(size)).abs().double().mean()
    return float(travelled) / (size - 1)


def _measured(alignment: Alignment, out: Checkpoint) -> dict[str, Any] | None:
    """Distances of whole tensors, as the alignment has measured them; angles and signs from samples of rows."""
    source, anchor = alignment.source, alignment.anchor
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
