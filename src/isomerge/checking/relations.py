"""Who may be whose ancestor: by what the cards say, and by the triangle that two models and their base make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from isomerge.checkpoint import Checkpoint

RIGHT_ANGLE = 0.15  # what two fine-tunes learned is nearly orthogonal, up to this share


def stated_base(checkpoints: Sequence[Checkpoint]) -> str | None:
    """The one base that the model cards of all these name."""
    named = [_card(c).get("base_model") for c in checkpoints]
    found = {tuple(n) if isinstance(n, list) else (n,) for n in named}
    if len(found) != 1:
        return None
    (only,) = found
    return str(only[0]) if len(only) == 1 and only[0] else None


def _card(checkpoint: Checkpoint) -> dict[str, Any]:
    """The head of README.md."""
    if checkpoint.folder is None:
        return {}
    path = checkpoint.folder / "README.md"
    try:
        text = path.read_text(encoding="utf-8")
        parts = text.split("---\n", 2) if text.startswith("---\n") else []
        head = yaml.safe_load(parts[1]) if len(parts) == 3 else {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return head if isinstance(head, dict) else {}


def likely_base(count: int, apart: Mapping[tuple[int, int], float]) -> int | None:
    """The model that lies where the base of all others would: `apart` are squared distances.

    Fine-tunes of one base move in directions of their own, so |A − B|² ≈ |A − base|² + |B − base|².

    >>> likely_base(3, {(0, 1): 1.0, (0, 2): 1.0, (1, 2): 2.0})
    0
    >>> likely_base(3, {(0, 1): 2.0, (0, 2): 2.0, (1, 2): 2.0}) is None
    True
    """
    if count < 3:
        return None
    fits = [k for k in range(count) if all(_right_angle(k, pair, apart) for pair in apart if k not in pair)]
    return fits[0] if len(fits) == 1 else None


def _right_angle(k: int, pair: tuple[int, int], apart: Mapping[tuple[int, int], float]) -> bool:
    i, j = pair
    legs = apart[min(i, k), max(i, k)] + apart[min(j, k), max(j, k)]
    return legs > 0 and abs(apart[pair] - legs) <= RIGHT_ANGLE * legs
