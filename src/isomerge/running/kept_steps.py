"""Gradient steps that are kept on the way: a run that was killed goes on from the last of them, to the same bytes.

The weights, the two moments of Adam and the number of steps are one file, complete or not there. There is nothing else:
the number of the step says which batch comes next and how long the step is, and no random numbers are drawn, as models
run without dropout.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from isomerge.checkpoint.kept import KeptWork

SECONDS = 60.0
"""How often they are kept: what is lost in a kill. Large models are kept less often, for a twentieth of the time."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class KeptSteps:
    """The steps of one descent, under `name` among the kept parts of a run; without a place to keep them, none."""

    def __init__(self, kept: KeptWork | None, name: str) -> None:
        self._kept, self._name, self._due = kept, name, time.monotonic() + SECONDS

    def restore(self, parameters: Sequence[Tensor], optimiser: torch.optim.Optimizer) -> int:
        """Put the weights and the moments of the last kept step in place; how many steps that is, 0 where there are
        none."""
        part = self._kept.load(self._name) if self._kept is not None else None
        if part is None:
            return 0
        tensors, record = part
        steps = int(record["steps"])
        with torch.no_grad():
            for number, parameter in enumerate(parameters):
                parameter.copy_(tensors[f"weight {number}"])
                if f"{MOMENTS[0]} {number}" in tensors:  # some parameters have no part in what a model gives
                    state = {key: tensors[f"{key} {number}"].to(parameter.device) for key in MOMENTS}
                    optimiser.state[parameter] = {"step": torch.tensor(float(steps)), **state}
        return steps

    def store(self, steps: int, parameters: Sequence[Tensor], optimiser: torch.optim.Optimizer) -> None:
        """From time to time."""
        begun = time.monotonic()
        if self._kept is None or begun < self._due:
            return
        tensors = {f"weight {number}": parameter for number, parameter in enumerate(parameters)}
        for number, parameter in enumerate(parameters):
            state = optimiser.state.get(parameter, {})
            tensors |= {f"{key} {number}": state[key] for key in MOMENTS if key in state}
        self._kept.store(self._name, tensors, {"steps": steps})
        self._due = (now := time.monotonic()) + max(SECONDS, 20 * (now - begun) if SECONDS else 0)
