"""SWAD (Cha et al. 2021, arXiv 2102.08604): the mean of all steps from a minimum of the validation loss to its rise.

Helps where a long run begins to overfit, or the data to come are of another kind than those of the training: the window
is chosen on validation and needs no fixed start.
"""

from __future__ import annotations

import warnings
from collections import deque
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from isomerge.arguments import require_types
from isomerge.merging.data_methods.swad import Window, find_window, require_window
from isomerge.training.weights import RunningMean, weights_of, write_model


class ValidationWindow(TrainerCallback):
    """Averages the weights of every step in SWAD's window, and writes the average at the end.

    The window is chosen among evaluations of the Trainer (`eval_strategy="steps"`) by `metric`, a loss: it starts at
    the first that is the least of `optimum` and ends before the least of `overfit` is above `tolerance` times their
    mean. With an evaluation goes the mean of the steps since the one before it. `load` puts the average into the
    model at the end. A resumed run chooses a window of its own. Up to `optimum` or `overfit` + 2 copies of the
    weights are in memory, in float32 on the CPU.
    """

    def __init__(
        self,
        *,
        optimum: int = 3,
        overfit: int = 6,
        tolerance: float = 1.3,
        metric: str = "eval_loss",
        out: str | Path | None = None,
        load: bool = False,
    ) -> None:
        require_types(
            optimum=(optimum, int), overfit=(overfit, int), tolerance=(tolerance, float), metric=(metric, str)
        )
        require_window(optimum, overfit, tolerance)
        self.optimum, self.overfit, self.tolerance, self.metric = optimum, overfit, tolerance, metric
        self.out, self.load = out, load
        self.losses: list[float] = []
        """Of every evaluation."""
        self._begin()

    def _begin(self) -> None:
        self.losses = []
        self._window = Window(0, 0, found=False, ended=False)
        self._steps, self._inside = RunningMean(), RunningMean()
        self._last: deque[RunningMean] = deque()
        """Means of steps that are in the window, or not, depending on what comes."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._window.ended:
            self._steps.add(weights_of(kwargs["model"]))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loss = (kwargs.get("metrics") or {}).get(self.metric)
        if loss is None or self._window.ended or not self._steps.count:
            return
        if not self._window.found and len(self._last) == self.optimum:
            self._last.popleft()  # before any window that can still be found
        self.losses.append(float(loss))
        self._last.append(self._steps)
        self._steps = RunningMean()
        self._window = find_window(self.losses, self.optimum, self.overfit, self.tolerance)
        while self._window.found and len(self._last) > self.overfit:
            self._take(self._last.popleft())
        if self._window.ended:
            self._last.clear()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if not self._last and not self._inside.count:
            warnings.warn(
                f"ValidationWindow has nothing to average, so nothing is written: no evaluation gave '{self.metric}'. "
                "Set eval_strategy of the Trainer, or name another metric.",
                stacklevel=2,
            )
            return
        if not self._window.found:
            warnings.warn(
                f"ValidationWindow found no minimum of {self.metric} in {len(self.losses)} evaluations, so it writes "
                "the mean of the steps before the last one. Train longer, evaluate more often, or lower optimum.",
                stacklevel=2,
            )
        for segment in self._last if self._window.found else [self._last[-1]]:
            self._take(segment)
        write_model(
            kwargs["model"], self._inside.weights, self.out or Path(args.output_dir) / "averaged", load=self.load
        )

    def _take(self, segment: RunningMean) -> None:
        self._inside.add(segment.weights, segment.count)
