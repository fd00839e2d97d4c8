"""Averages of a training run, taken while it runs: SWA, EMA and LAWA."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_swa_avg_fn
from transformers import TrainerCallback

from isomerge.arguments import require_choice, require_types
from isomerge.checkpoint.memory import unwrapped
from isomerge.errors import RequestError
from isomerge.merging.state_dicts import merge_state_dicts

KINDS = ("swa", "ema", "lawa")


class AverageCheckpoints(TrainerCallback):
    """Averages the weights at every save of a Trainer (or every `every` steps) and writes the average at the end.

    `kind`: "swa", the mean of all; "ema", an exponential mean with `decay`; "lawa", the mean of the last `window`.
    `start` is the share of the training that is left out. `load` puts the average into the model at the end.
    The average is in memory once, in float32 on the CPU ("lawa": `window` times).
    """

    def __init__(
        self,
        kind: str = "swa",
        *,
        every: int | None = None,
        start: float = 0.0,
        decay: float = 0.99,
        window: int = 5,
        out: str | Path | None = None,
        load: bool = False,
    ) -> None:
        require_types(
            kind=(kind, str), start=(start, float), decay=(decay, float), window=(window, int), every=(every, int, None)
        )
        require_choice("kind", kind, KINDS)
        if not 0 <= start < 1 or not 0 < decay < 1 or window < 1 or (every is not None and every < 1):
            raise RequestError(
                f"Averaging checkpoints: start={start} must be in [0, 1), decay={decay} in (0, 1), window={window} and "
                f"every={every} at least 1."
            )
        self.kind, self.every, self.start, self.decay, self.window = kind, every, start, decay, window
        self.out, self.load = out, load
        self.count = 0
        """How many states are in the average."""
        self._running: AveragedModel | None = None
        self._last: deque[dict[str, Tensor]] = deque(maxlen=window)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count, self._running = 0, None  # another run's weights have no place in the average of this one
        self._last.clear()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every is None and self._started(state):
            self.add(unwrapped(kwargs["model"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every is not None and state.global_step % self.every == 0 and self._started(state):
            self.add(unwrapped(kwargs["model"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if not self.count:
            when = "no checkpoint was saved" if self.every is None else f"there were {state.global_step} steps"
            warnings.warn(
                f"AverageCheckpoints has nothing to average, so nothing is written: {when} (start={self.start}, "
                f"every={self.every}).",
                stacklevel=2,
            )
            return
        model = unwrapped(kwargs["model"])
        averaged = self.average(model)
        averaged.save_pretrained(Path(self.out or Path(args.output_dir) / "averaged"))
        if self.load:
            model.load_state_dict(averaged.state_dict())

    def _started(self, state: Any) -> bool:
        return bool(state.global_step >= self.start * state.max_steps)

    def add(self, model: nn.Module) -> None:
        """Take the model's present weights into the average."""
        self.count += 1
        present = copy.deepcopy(model).cpu()
        if self.kind == "lawa":
            self._last.append(dict(present.state_dict()))
            return
        if self._running is None:
            rule: Any = get_swa_avg_fn if self.kind == "swa" else partial(get_ema_avg_fn, self.decay)
            self._running = AveragedModel(present.float(), avg_fn=rule())
        self._running.update_parameters(present)

    def average(self, model: nn.Module) -> Any:
        """A copy of the model with the averaged weights, in the model's dtype, on the CPU."""
        result = copy.deepcopy(model).cpu()
        if self.kind == "lawa":
            result.load_state_dict(merge_state_dicts(list(self._last)))
        elif self._running is not None:
            result.load_state_dict(self._running.module.state_dict())  # copies into the model's own dtypes
        return result
