"""Lookahead (Zhang et al. 2019, arXiv 1907.08610): slow weights that follow the optimiser's from a distance.

    every k steps:  φ ← φ + α (θ − φ),  θ ← φ

Helps where the optimiser's steps are large or noisy; at a small or well decayed learning rate there is little to gain.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from isomerge.arguments import require_types
from isomerge.errors import RequestError
from isomerge.training.weights import Weights, put_weights, weights_of


class Lookahead(TrainerCallback):
    """Every `every` steps moves slow weights a `share` of the way to the model's, and sets the model back to them.

    The optimiser's own state goes on unchanged. At the end the model has the slow weights, which are those to use
    (with `load_best_model_at_end` those of that checkpoint). A run that is resumed from a checkpoint goes on with its
    weights as slow weights: save every multiple of `every` steps, where the two are the same. One more copy of the
    weights is in memory, on the CPU.
    """

    def __init__(self, *, every: int = 5, share: float = 0.5) -> None:
        require_types(every=(every, int), share=(share, float))
        if every < 1 or not 0 < share <= 1:
            raise RequestError(f"Lookahead: every={every} must be at least 1 and share={share} in (0, 1].")
        self.every, self.share = every, share
        self._slow: Weights = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._slow = weights_of(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            for name, fast in weights_of(kwargs["model"]).items():
                self._slow[name].lerp_(fast, self.share)
            put_weights(kwargs["model"], self._slow)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not args.load_best_model_at_end:  # the Trainer has loaded that by now
            put_weights(kwargs["model"], self._slow)
