"""What can be aligned in a model type, as one row: by its own file where it has one, inferred otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from isomerge.architectures import FAMILIES, describe
from isomerge.architectures.inferring.infer import first_tiny, infer, scrambled_difference
from isomerge.architectures.inferring.proof import EXACT
from isomerge.errors import IsomergeError
from isomerge.evaluation.symmetry_proof import Unprovable
from isomerge.symmetry.architecture import RESIDUAL, Architecture
from isomerge.symmetry.groups import Group

PARTS = {
    "feed-forward": re.compile(r"(^|\.)(ffn|up|unit|expert)(\.|$)"),
    "heads": re.compile(r"(^|\.)(head|kv|query)(\.|$)"),
    "queries and keys": re.compile(r"(^|\.)(qk|rotary)(\.|$)"),
    "values and outputs": re.compile(r"(^|\.)vo(\.|$)"),
    "residual stream": re.compile(rf"^{RESIDUAL}$"),
}


def coverage_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The row of one model type: what is proven on a tiny model made from this config."""
    try:
        sandbox = first_tiny(config)
    except Unprovable as error:
        return {"failed": str(error)}
    if config["model_type"] in FAMILIES:
        try:
            model = describe(sandbox.checkpoint)
        except IsomergeError as error:
            return {"failed": f"its file does not fit the tiny model: {str(error)[:120]}"}
        difference = scrambled_difference(sandbox, model.architecture, None)
        if difference <= 10 * EXACT:
            return {"by": "hand", "spaces": parts(model.architecture, True)}
    found = infer(sandbox)
    spaces = parts(found.architecture, found.attentions > 0)
    row = {"by": "inferred", "spaces": spaces}
    reasons = [note for note in found.notes if "identity" in note and "as a rotation" not in note] + [
        note for note in found.notes if "no known way" in note or "all spaces" in note or "shares a tensor" in note
    ]
    missing = [part for part, group in spaces.items() if group == "identity"]
    return row | ({"reason": "; ".join(_short(reasons, missing))} if missing else {})


def parts(architecture: Architecture, attention: bool) -> dict[str, str | None]:
    """For every part of a model the groups that move it; None for one it does not have."""
    row: dict[str, str | None] = {}
    for part, pattern in PARTS.items():
        spaces = {name: group for name, group in architecture.spaces.items() if pattern.search(name)}
        moved = sorted({_named(group) for group in spaces.values() if group.movable})
        absent = part in ("heads", "queries and keys", "values and outputs") and not attention and not spaces
        row[part] = ", ".join(moved) if moved else None if absent else "identity"
    return row


def _named(group: Group) -> str:
    """A group in a table: rotary ones with their layout."""
    layout, phase = getattr(group, "layout", ""), getattr(group, "phase", "")
    words = [group.name, *([layout] if layout else []), *(["signs"] if phase == "sign" else [])]
    return " ".join(words)


def _short(reasons: Iterable[str], missing: Iterable[str]) -> list[str]:
    kept = [re.sub(r"\b\d+\b", "N", reason)[:160] for reason in reasons]
    return list(dict.fromkeys(kept))[:3] or [f"{part}: nothing was found to propose" for part in missing]
