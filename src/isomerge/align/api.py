"""`isomerge.align`: open, solve, hand back an `Alignment`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isomerge.align.alignment import Alignment, Progress
from isomerge.align.levels import Scope
from isomerge.align.pairwise import solve_pair
from isomerge.align.parallel import parallel
from isomerge.checkpoint import Checkpoint, open_checkpoint, parse_size, require_floating

DEFAULT_BUDGET = 8 << 30


def align(
    source: Any,
    anchor: Any = None,
    *,
    level: str = "full",
    scale: bool | None = None,
    layers: str | None = None,
    only: str | None = None,
    sweeps: int = 15,
    threads: int | None = None,
    device: str = "cpu",
    max_memory: int | str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Alignment:
    scope = Scope(level, scale, layers, only)
    start = time.perf_counter()
    checkpoints = [_open(m) for m in (source, anchor)]
    budget = parse_size(max_memory) if max_memory is not None else None
    with parallel(threads) as run:
        solution = solve_pair(
            *checkpoints, scope, run=run, sweeps=sweeps, device=device, budget=(budget or 2 * DEFAULT_BUDGET) // 2
        )
    return Alignment(solution, time.perf_counter() - start, threads, budget, progress)


def _open(model: Any) -> Checkpoint:
    checkpoint = open_checkpoint(model)
    require_floating(checkpoint)
    return checkpoint
