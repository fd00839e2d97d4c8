"""Results stay what they were: every merge, alignment and measure on tiny models against what was recorded.

Numbers are compared everywhere. Bits are compared where processor and libraries are those of the recording; elsewhere
a warning says that they were not. A result that was meant to change is recorded anew: python tests/recorded/record.py
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from recorded.fingerprint import difference, fingerprint, tolerance
from recorded.running import PARTS, SLOW, computed, recorded

AGAIN = "\nIf this is meant: python tests/recorded/record.py"


def complaints(found: dict[str, Any], expected: dict[str, Any], *, bits: bool) -> list[str]:
    """What is not as it was recorded, a line for each result."""
    told = [f"{name}: was recorded, and is not computed any more" for name in sorted(expected.keys() - found.keys())]
    for name, one in found.items():
        known = expected.get(name)
        if "error" in one:
            told.append(f"{name}: {one['error']}")
        elif known is None:
            told.append(f"{name}: is new, and was not recorded")
        elif (one["words"], one["values"]) != (known["words"], known["values"]):
            told.append(f"{name}: other names, shapes, dtypes or words")
        elif (apart := difference(one, known)) > tolerance(name):
            told.append(f"{name}: differs by {apart:.1e} of its norm, and {tolerance(name):.0e} is allowed")
        elif bits and one["sha256"] != known["sha256"]:
            told.append(f"{name}: other bits ({apart:.1e} of its norm apart)")
    return told


@pytest.mark.parametrize("part", [pytest.param(p, marks=[pytest.mark.slow] if p in SLOW else []) for p in PARTS])
def test_results_are_what_was_recorded(part: str) -> None:
    record = recorded()
    expected = {name: one for name, one in record["results"].items() if name.partition("/")[0] == part}
    found = computed([part])
    other = {key: value for key, value in found["machine"].items() if record["machine"].get(key) != value}
    if other:
        warnings.warn(
            f"{part}: numbers are compared, but not bits, which were recorded elsewhere: {other}", stacklevel=1
        )
    told = complaints(found["results"], expected, bits=not other)
    assert found["results"], "nothing was computed"
    assert not told, f"{len(told)} of {len(expected)} results of '{part}' changed:\n" + "\n".join(told) + AGAIN


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(20, 30, generator=generator), "b": torch.randn(40, generator=generator)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s["a"][3].mul_(1.01), "differs by"),
        (lambda s: s["a"].copy_(s["a"].flip(0).clone()), "differs by"),
        (lambda s: s["a"].mul_(1 + 1e-7), "other bits"),
        (lambda s: s.update(a=s["a"].double()), "other names"),
        (lambda s: s.update(c=s.pop("b")), "other names"),
    ],
)
def test_a_change_is_told(state: dict[str, torch.Tensor], change: Any, said: str) -> None:
    """The net itself holds: rows in another order have the norm and sum they had, but not the projection."""
    expected = {"result": fingerprint(copy.deepcopy(state))}
    assert not complaints({"result": fingerprint(state)}, expected, bits=True)
    change(state)
    (told,) = complaints({"result": fingerprint(state)}, expected, bits=True)
    assert said in told


def test_results_that_come_go_or_fail_are_told(state: dict[str, torch.Tensor]) -> None:
    known = {"result": fingerprint(state)}
    assert "not computed any more" in complaints({}, known, bits=True)[0]
    assert "was not recorded" in complaints(known, {}, bits=True)[0]
    assert "lost" in complaints({"result": {"error": "ValueError: lost"}}, known, bits=False)[0]
