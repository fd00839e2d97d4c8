"""Both programs in 16 bits, as people merge: how many weights are the same, and whose differ from the exact result.

    MERGEKIT_PYTHON=.venv-peers/bin/python PYTHONPATH=tests python -m peers.rounding    # the table of docs/peers.md

mergekit computes in the models' dtype and rounds at every step; isomerge computes in float32 and rounds once. What
mergekit makes of the same models in float64 decides.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models import tensors, write_family
from peers.recipes import METHODS
from peers.side_by_side import Mergekit, isomerge, write_recipe

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PLAIN = [name for name in METHODS if "," not in name]


@dataclass(frozen=True)
class Agreement:
    """Of all weights of a model: shares, and errors beside the exact result in units of the last place."""

    equal: float
    """Bit for bit the same in both programs."""
    ours_apart: float
    theirs_apart: float
    """Not the exact result within roundings: another choice, as of what is kept."""
    ours: float
    """The root of the mean squared error where both choose alike, in units of the last place of a typical weight."""
    theirs: float


def agreement(mergekit: Mergekit, models: Path, method: str, dtype: torch.dtype, scratch: Path) -> Agreement:
    recipe = write_recipe(METHODS[method], models, scratch / "recipe.yml")
    exact = write_recipe(METHODS[method] + "dtype: float64\n", models, scratch / "exact.yml")
    ours, theirs = tensors(isomerge(recipe, scratch / "ours")), tensors(mergekit.merge(recipe, scratch / "theirs"))
    truth = tensors(mergekit.merge(exact, scratch / "truth"))
    assert ours.keys() == theirs.keys() == truth.keys()
    assert {tensor.dtype for tensor in ours.values()} == {dtype}
    parts = [compared(ours[name], theirs[name].to(dtype), truth[name]) for name in truth]
    equal, ours_apart, theirs_apart, mine, other = (torch.cat(column).double() for column in zip(*parts, strict=True))
    alike = (ours_apart == 0) & (theirs_apart == 0)
    errors = [one[alike].square().mean().sqrt().item() for one in (mine, other)]
    return Agreement(equal.mean().item(), ours_apart.mean().item(), theirs_apart.mean().item(), *errors)


def compared(ours: Tensor, theirs: Tensor, truth: Tensor) -> tuple[Tensor, ...]:
    """Elementwise: equal?, our and their other choices, our error, their error."""
    eps, largest = torch.finfo(ours.dtype).eps, truth.abs().max()
    mine, other = ((one.double() - truth).abs() for one in (ours, theirs))
    # One rounding is half a last place, and sums in float32 add to it. Each of those that mergekit makes on the way is
    # at most half a last place of a number not much larger than the tensor's largest.
    ours_apart, theirs_apart = mine > 0.51 * eps * truth.abs() + 1e-6 * largest, other > 4 * eps * largest
    typical = eps * truth.square().mean().sqrt()
    return tuple(one.flatten() for one in (ours == theirs, ours_apart, theirs_apart, mine / typical, other / typical))


def rows(mergekit: Mergekit) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for name, dtype in DTYPES.items():
            write_family("llama", place / name, dtype=dtype)
        for method in PLAIN:
            cells = []
            for name, dtype in DTYPES.items():
                found = agreement(mergekit, place / name, method, dtype, place / f"{method}-{name}")
                cells += [
                    f"{found.equal:.1%}",
                    f"{found.ours_apart:.2%} / {found.theirs_apart:.2%}",
                    f"{found.ours:.2f} / {found.theirs:.2f}",
                ]
            yield f"| `{method}` | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    peer = Mergekit()
    for row in rows(peer):
        print(row, flush=True)
    peer.close()
