"""`isomerge.make_ensemble`: from models and the name of a combination to an object that runs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from isomerge.arguments import require_shared_types, require_types
from isomerge.checkpoint.base import Progress
from isomerge.data.base import Data, DataSource
from isomerge.ensembling.combinations import Combination, Shares
from isomerge.ensembling.fitting import RIDGE, fitted, open_held_out
from isomerge.ensembling.members import load_member, open_members, unfolded
from isomerge.ensembling.module import Ensemble
from isomerge.ensembling.outputs import combination_for
from isomerge.errors import RequestError
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.running.stock import StockModel


@dataclass(frozen=True)
class EnsembleRequest:
    """What an ensemble is to be made of; the arguments of `make_ensemble`."""

    models: Sequence[Any]
    combination: str = "probability"
    weights: Sequence[float] | None = None
    held_out: DataSource = None
    ridge: float | None = None
    snapshots: int | None = None
    task: str | None = None
    tokenizer: Any = None
    batch_size: int | None = None
    limit: int | None = None
    seed: int = 0
    device: str | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        require_types(
            models=(self.models, Sequence), combination=(self.combination, str), ridge=(self.ridge, float, None),
            weights=(self.weights, Sequence, None), snapshots=(self.snapshots, int, None),
            device=(self.device, str, None), tokenizer=(self.tokenizer, str, os.PathLike, Callable, None),
        )  # fmt: skip
        require_shared_types(
            task=self.task, batch_size=self.batch_size, limit=self.limit, seed=self.seed, progress=self.progress
        )
        if isinstance(self.models, str):
            raise RequestError("Making an ensemble: models must be a list of models, not one text.", keys=("models",))
        if self.snapshots is not None and self.snapshots < 1:
            raise RequestError(
                f"Making an ensemble: snapshots={self.snapshots} must be at least 1.", keys=("snapshots",)
            )
        if self.ridge is not None and not self.ridge > 0:
            raise RequestError(f"Making an ensemble: ridge={self.ridge} must be above zero.", keys=("ridge",))
        if self.ridge is not None and self.combination != "stacked":
            raise RequestError(
                f"Making an ensemble: ridge is the penalty of a stacked ensemble, and this is one of combination "
                f"{self.combination!r}. Leave it out, or choose stacked.",
                keys=("ridge", "combination"),
            )

    def build(self, data: Data | None = None) -> Ensemble:
        """The ensemble, fitted where it has to be. `data` is what it will be run on, checked before models are read."""
        models = unfolded(self.models, self.snapshots)
        if not models:
            raise RequestError("Making an ensemble: name at least one model.", keys=("models",))
        if self.snapshots is not None and models == list(self.models):
            raise RequestError(
                f"Making an ensemble of the last {self.snapshots} snapshots: none of the models is a folder with "
                "checkpoint-N folders of a training run. Leave snapshots out.",
                keys=("snapshots",),
            )
        checkpoints, task = open_members(models, self.task, data)
        chosen = combination_for(self.combination, task, checkpoints[0].config, len(models))
        shares = given_shares(chosen, self.weights, len(models))
        held_out = self._held_out(chosen)
        stock = [load_member(model, one, self.device) for model, one in zip(models, checkpoints, strict=True)]
        ensemble = assembled(stock, task, chosen, shares, self.tokenizer)
        if len(models) != len(self.models):
            ensemble.notes.append(f"{len(models)} members: every snapshot of a training run is one")
        if held_out is not None:
            ensemble.shares = fitted(
                ensemble, held_out, self.ridge or RIDGE, batch_size=self.batch_size, limit=self.limit, seed=self.seed,
                progress=self.progress,
            )  # fmt: skip
            ensemble.fitted_on = held_out.describe()
            ensemble.notes.append(f"fitted on {held_out.name}")
        return ensemble

    def _held_out(self, chosen: Combination) -> Data | None:
        held_out = None if self.held_out is None else open_held_out(self.held_out, self.tokenizer)
        needed = chosen.finds == "stack" or (chosen.finds == "weights" and self.weights is None)
        if needed == (held_out is not None):
            return held_out
        where = " where weights are given" if chosen.finds else ""
        raise RequestError(
            f"Combining models by '{chosen.name}' needs labelled data that no model was trained on. Pass held_out, for "
            "example a path."
            if needed
            else f"Combining models by '{chosen.name}'{where} learns nothing from held-out data. Leave it out, or "
            "choose weighted or stacked.",
            keys=("held_out",),
        )


def given_shares(chosen: Combination, weights: Sequence[float] | None, members: int) -> Shares:
    """The weights that were given, or equal ones."""
    if weights is None:
        return Shares.of([1.0] * members)
    if not chosen.weighs:
        raise RequestError(f"Combining models by '{chosen.name}' has no weights. Leave them out.", keys=("weights",))
    fine = all(isinstance(one, (int, float)) and math.isfinite(one) and one >= 0 for one in weights)
    if not fine or len(weights) != members or not sum(weights):
        raise RequestError(
            f"Combining {members} models by the weights {list(weights)}: each needs one number, none "
            "below zero and not all zero.",
            keys=("weights",),
        )
    return Shares.of(weights)


def assembled(
    stock: Sequence[StockModel], task: str, chosen: Combination, shares: Shares, tokenizer: Any = None
) -> Ensemble:
    """The object itself; of causal language models one that generates."""
    if task != "causal-lm":
        return Ensemble(stock, task, chosen, shares)
    from isomerge.ensembling.language import LanguageEnsemble  # brings transformers

    return LanguageEnsemble(stock, task, chosen, shares, tokenizer)


@shows_progress
def make_ensemble(
    models: Sequence[Any],
    combination: str = "probability",
    *,
    weights: Sequence[float] | None = None,
    held_out: DataSource = None,
    ridge: float | None = None,
    snapshots: int | None = None,
    task: str | None = None,
    tokenizer: Any = None,
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str | None = None,
    progress: Shown = None,
) -> Ensemble:
    """Several models as one `nn.Module` with the stock interface: forward, and generate for language models.

    A training run's folder stands for the `checkpoint-N` folders in it, the last `snapshots` of them. `combination` is
    probability, logit, vote, weighted, stacked or posterior. `weights` has one number per model; weighted finds them on
    `held_out` data where they are not given, and stacked fits its linear model there, with the penalty `ridge` (0.1).
    Modules are used as they are, in evaluation mode; everything else is loaded, all at once.

    >>> isomerge.make_ensemble(["model-a", "model-b"], weights=[3, 1]).shares.weights.tolist()
    [0.75, 0.25]
    """
    return EnsembleRequest(
        models, combination, weights, held_out, ridge, snapshots, task, tokenizer, batch_size, limit, seed, device,
        callback(progress),
    ).build()  # fmt: skip
