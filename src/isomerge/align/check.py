"""`isomerge check`: what are these models to each other, and would alignment help? In seconds, from samples."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch

from isomerge.align.compatible import problems_between
from isomerge.align.evidence import Pair, common_part, unit_blocks
from isomerge.align.levels import Scope
from isomerge.align.nested import Unit
from isomerge.architectures import FAMILIES, describe
from isomerge.checkpoint import Checkpoint, open_checkpoint, require_floating
from isomerge.errors import IsomergeError, RequestError
from isomerge.symmetry.architecture import RESIDUAL, layer_of
from isomerge.symmetry.groups import Group
from isomerge.symmetry.transform import Transform

LARGEST_UNIT = 64_000_000  # parameters; larger units are judged by their tensors' distance alone
STRANGERS = 0.9  # relative distance from which two models share no more than their architecture


def check(*models: Any) -> dict[str, Any]:
    """Verdict over two or more models: incompatible, identical, siblings or strangers; reasons and a suggestion."""
    if len(models) < 2:
        raise RequestError("Checking: name at least two models to compare.")
    start = time.perf_counter()
    checkpoints = [open_checkpoint(m) for m in models]
    reasons = _incompatibilities(checkpoints)
    report: dict[str, Any] = {"models": [c.name for c in checkpoints]}
    if reasons:
        report |= {"verdict": "incompatible", "reasons": reasons, "distance": None, "spaces": [], "pairs": []}
        report["suggestion"] = "pick checkpoints of one architecture and size; nothing can be aligned or averaged here"
        return report | {"seconds": time.perf_counter() - start}
    pairs = [_compare(a, b) for a, b in combinations(checkpoints, 2)]
    worst = max(pairs, key=lambda p: ("identical", "siblings", "strangers").index(p["verdict"]))
    report |= {
        "verdict": worst["verdict"],
        "reasons": list(dict.fromkeys(r for p in pairs for r in p["reasons"])),
        "distance": max(p["distance"] for p in pairs),
        "sign_conflict": max(p["sign_conflict"] for p in pairs),
        "alignment_helps": any(p["alignment_helps"] for p in pairs),
        "spaces": worst["spaces"],
        "pairs": pairs if len(pairs) > 1 else [],
        "suggestion": _suggestion(worst, checkpoints),
    }
    return report | {"seconds": time.perf_counter() - start}


def _incompatibilities(checkpoints: list[Checkpoint]) -> list[str]:
    found = []
    for checkpoint in checkpoints:
        try:
            require_floating(checkpoint)
        except IsomergeError as error:
            found.append(str(error))
    for other in checkpoints[1:]:
        found += [f"{checkpoints[0].name} and {other.name}: {p}" for p in problems_between(checkpoints[0], other)]
    if not found:
        for other in checkpoints[1:]:
            found += _shape_problems(checkpoints[0], other)
    return found


def _shape_problems(first: Checkpoint, second: Checkpoint) -> list[str]:
    """Tensors that differ in more than the length of a table."""
    found = []
    for name in sorted(set(first.tensors) & set(second.tensors)):
        a, b = first.tensors[name].shape, second.tensors[name].shape
        if len(a) != len(b) or (a != b and a[1:] != b[1:]):
            found.append(f"{name} has shape {tuple(a)} and {tuple(b)}")
    return found[:10]


def _compare(first: Checkpoint, second: Checkpoint) -> dict[str, Any]:
    names = _sampled(first, second)
    before, size, conflict, count = 0.0, 0.0, 0, 0
    for name in names:
        a, b = common_part(first.read(name).double(), second.read(name).double())
        before += float((a - b).square().sum())
        size += float(a.square().sum()) + float(b.square().sum())
        conflict += int((a * b < 0).sum())
        count += a.numel()
    distance = (2 * before / size) ** 0.5 if size else 0.0
    spaces, reasons = _spaces(first, second, names) if before > 0 else ([], [])
    moved = [s for s in spaces if s["moved"]]
    if before == 0:
        verdict, reasons = "identical", ["every sampled tensor is the same, bit for bit"]
    elif not moved and distance < STRANGERS:
        verdict = "siblings"
        reasons = [f"relative distance {distance:.3g}; every sampled unit is already in its best place", *reasons]
    else:
        verdict = "strangers"
        wish = f"{len(moved)} of {len(spaces)} sampled spaces want to move"
        reasons = [f"relative distance {distance:.3g}; {wish}", *reasons]
    return {
        "models": [first.name, second.name], "verdict": verdict, "distance": distance, "reasons": reasons,
        "sign_conflict": conflict / count if count else 0.0, "alignment_helps": verdict == "strangers",
        "spaces": spaces,
    }  # fmt: skip


def _sampled(first: Checkpoint, second: Checkpoint) -> list[str]:
    """Tensors of the first, middle and last layer, and everything outside the layers."""
    shared = [n for n in first.tensors if n in second.tensors and first.tensors[n].dtype.is_floating_point]
    numbers = sorted({k for n in shared for k in _numbers(n)[:1]})
    wanted = {numbers[0], numbers[len(numbers) // 2], numbers[-1]} if numbers else set()
    return [n for n in shared if not _numbers(n) or _numbers(n)[0] in wanted]


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdigit()]


def _spaces(first: Checkpoint, second: Checkpoint, names: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Distance per sampled space, and whether its units would change places, on the raw weights."""
    kind = first.config.get("model_type")
    if kind not in FAMILIES:
        return [], [f"no specification for '{kind}': judged by the distance of the tensors alone"]
    try:
        source, anchor = (describe(c) for c in (first, second))
    except IsomergeError as error:
        return [], [str(error)]
    scope = Scope("permutation")
    spaces = scope.restrict(source.architecture).spaces
    architecture = source.architecture.restricted(lambda n, g: spaces[n])
    layouts = {name: layout for name, layout in source.layouts.items() if name in anchor.layouts}
    pair = Pair(source.raw, anchor.raw, layouts, architecture)
    layers = {k for n in names for k in _numbers(n)[:1]}
    rows = []
    for root in sorted(s for s, g in spaces.items() if not g.per):
        if root != RESIDUAL and layer_of(root) is not None and layer_of(root) not in layers:
            continue
        group = source.architecture.spaces[root].name
        rows.append({"name": root, "group": group, **_judge(root, pair, spaces)})
    return rows, []


def _judge(root: str, pair: Pair, spaces: Mapping[str, Group]) -> dict[str, Any]:
    touched = pair.touching([root])
    if root == RESIDUAL:  # the outer tables tell whether the stream keeps its order
        touched = [n for n in touched if pair.layouts[n].spaces() == {RESIDUAL} and len(pair.layouts[n].shape) > 1]
    if not touched:
        return {"distance": 0.0, "moved": 0.0}
    tensors = [pair.tensors(n) for n in touched]
    before = sum(float((a - b).square().sum()) for a, b in tensors)
    size = sum(float(a.square().sum()) + float(b.square().sum()) for a, b in tensors)
    row: dict[str, Any] = {"distance": (2 * before / size) ** 0.5 if size else 0.0, "moved": 0.0}
    if sum(a.numel() for a, _ in tensors) <= LARGEST_UNIT:
        small = Pair(pair.source, pair.anchor, {n: pair.layouts[n] for n in touched}, pair.architecture)
        unit = Unit(root, spaces)
        elements, _ = unit.solve(unit_blocks(small, unit.members, Transform(spaces), diagonal=unit.diagonal))
        order = spaces[root].order(elements[root]) if root in elements else None
        if order is not None:
            row["moved"] = float((order != torch.arange(spaces[root].size)).double().mean())
    return row


def _suggestion(pair: dict[str, Any], checkpoints: list[Checkpoint]) -> str:
    if pair["verdict"] == "identical":
        return "nothing to merge: the models are the same"
    if pair["verdict"] == "siblings":
        return "merge them directly (isomerge merge … --method linear); alignment would change nothing worth having"
    known = checkpoints[0].config.get("model_type") in FAMILIES
    if not known:
        return "averaging strangers destroys both; their architecture has no specification, so little can be aligned"
    return "align before merging: isomerge merge … --align (level full); the plain average of strangers is noise"
