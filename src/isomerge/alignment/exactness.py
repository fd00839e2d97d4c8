"""Does what was written compute what the source computes? The answer tells rounding from a mistake.

The written model is compared with the source on random inputs. A difference above `UNCHANGED` has two possible causes:
the moved weights were rounded to a dtype with few digits, or the move was no symmetry. So the moved weights are
compared again before they are rounded, in float64: what is left there is a mistake, whatever the dtype.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.errors import AlignmentError
from isomerge.evaluation.probe import largest_difference
from isomerge.symmetry.moved import MovedModel

UNCHANGED = 1e-3  # of the largest output: float32 through every layer, with invertible elements of condition 4


@dataclass(frozen=True)
class Exactness:
    """The largest difference of outputs, relative to the largest output, and whether it is one of rounding only."""

    difference: float | None = None
    reason: str = "not measured: nothing has been written yet"
    """Why there is no difference."""
    same: bool | None = None
    """None where it could not be found out."""
    detail: str = ""


def compare_outputs(
    source: Checkpoint, moved: MovedModel, out: Checkpoint, *, overflowed: int, max_memory: int | None
) -> Exactness:
    """Run the source and what was written; and what was moved, before rounding, where that is needed to decide.

    `overflowed` weights were written as infinite, which attention may hide from a look at outputs.
    """
    if _copies(moved, out):
        return Exactness(0.0, "", True, "nothing moved: the weights are the source's, bit for bit")
    difference, reason = largest_difference(source, out, max_memory=max_memory)
    if overflowed:
        return Exactness(difference, reason, False, f"{overflowed} weights are too large for the written dtype")
    if difference is None:
        return Exactness(None, reason, None, f"not checked: {reason}")
    detail = f"random inputs: the largest difference is {difference:.1e} of the largest output"
    if difference <= UNCHANGED:
        return Exactness(difference, "", True, detail)
    if not math.isfinite(difference):
        return Exactness(difference, "", False, "random inputs: the outputs are not finite where the source's are")
    unrounded = open_checkpoint(moved.state_dict(torch.float64), config=out.config)
    exact, why = largest_difference(source, unrounded, max_memory=max_memory, dtype=torch.float64)
    if exact is None:
        return Exactness(difference, "", None, f"{detail}; not compared before rounding: {why}")
    dtypes = sorted({str(info.dtype).removeprefix("torch.") for info in out.tensors.values()})
    if exact <= UNCHANGED:
        return Exactness(difference, "", True, f"{detail}, by rounding to {', '.join(dtypes)} ({exact:.1e} without it)")
    return Exactness(difference, "", False, f"{detail}, and {exact:.1e} before the weights are rounded")


def _copies(moved: MovedModel, out: Checkpoint) -> bool:
    """Every tensor was copied, in its own dtype."""
    stored = moved.model.checkpoint.tensors
    same = stored.keys() == out.tensors.keys() and all(stored[name] == out.tensors[name] for name in stored)
    return same and all(moved.stays(name) for name in moved.model.layouts)


def require_same_function(name: str, out: Path, exactness: Exactness) -> None:
    """Raise where the outputs differ by more than rounding."""
    if exactness.same is False:
        raise AlignmentError(
            f"Aligning {name}: the moved model would compute something else ({exactness.detail}), so {out} was not "
            "written. Use a transform made for this model, or out_dtype float32; or write it all the same with force.",
            keys=("force", "out_dtype"),
        )


@contextlib.contextmanager
def nothing_left_on_failure(*folders: Path) -> Iterator[None]:
    """A failed check leaves no file that was not there before."""
    before = {folder: {folder, *folder.rglob("*")} if folder.exists() else set() for folder in folders}
    try:
        yield
    except AlignmentError:
        for folder, known in before.items():
            for path in sorted([folder, *folder.rglob("*")], reverse=True):
                if path not in known and path.exists():
                    path.rmdir() if path.is_dir() else path.unlink()
        raise
