"""`isomerge selftest`: scramble a model, show that its function is unchanged, align it back."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from isomerge.adapters.adapter import require_model
from isomerge.alignment.api import align
from isomerge.alignment.exactness import UNCHANGED
from isomerge.alignment.scope import Scope
from isomerge.architectures import describe
from isomerge.arguments import require_shared_types, require_types
from isomerge.checkpoint import open_checkpoint, require_floating, write_checkpoint
from isomerge.checkpoint.dtypes import dtype_entry
from isomerge.checkpoint.open import with_config
from isomerge.errors import RequestError
from isomerge.evaluation.probe import largest_difference
from isomerge.results import Result
from isomerge.symmetry.moved import scrambled


@dataclass
class SelftestReport(Result):
    """What `isomerge.selftest` returns; distances are relative to the original model."""

    model: str
    family: str
    level: str
    seed: int
    spaces: int
    unchanged: bool | None
    max_output_difference: float | None
    max_output_difference_reason: str | None
    scrambled_distance: float | None
    recovered_distance: float | None
    notes: list[str]
    seconds: float


def selftest(
    model: Any,
    *,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    level: str = "full",
    threads: int | None = None,
) -> SelftestReport:
    """Scramble `model` by random symmetries, compare outputs in the stock class, and recover it by alignment.

    `config` is the config.json of a state_dict, as a dict.
    """
    start = time.perf_counter()
    require_types(level=(level, str))
    require_shared_types(seed=seed, threads=threads)
    checkpoint = open_checkpoint(*with_config([model], config))
    require_model(checkpoint)
    if not checkpoint.config:
        raise RequestError(
            f"Testing the symmetries of {checkpoint.name}: without a config.json none is known. Pass config=… for a "
            "state_dict, or copy config.json beside the weights.",
            keys=("config",),
        )
    require_floating(checkpoint)
    bound = describe(checkpoint, untie=False)
    scope = Scope(level)
    bound = replace(bound, architecture=scope.restrict(bound.architecture))
    moved = scrambled(bound, seed, gauges=scope.gauges)
    dtypes = {i.dtype for i in checkpoint.tensors.values()}
    # Half precision would round the scrambled weights, and the test is about the symmetries.
    dtype = None if dtypes <= {torch.float32, torch.float64} else torch.float32
    with tempfile.TemporaryDirectory(prefix="isomerge-selftest-") as folder:
        out = Path(folder) / "scrambled"
        plan = moved.plan(dtype)
        changes = dtype_entry(checkpoint.config, dtype)
        write_checkpoint(out, plan, moved.produce(plan, lambda *_: None), config=changes, donor=checkpoint)
        difference, reason = largest_difference(checkpoint, open_checkpoint(out))
        report = align(out, checkpoint, level=level, threads=threads).report()
    return SelftestReport(
        model=checkpoint.name,
        family=bound.architecture.family,
        level=level,
        seed=seed,
        spaces=len(moved.transform.elements),
        unchanged=None if difference is None else difference <= UNCHANGED,
        max_output_difference=difference,
        max_output_difference_reason=reason or None,
        scrambled_distance=report.distance.before,
        recovered_distance=report.distance.after,
        notes=report.notes,
        seconds=time.perf_counter() - start,
    )
