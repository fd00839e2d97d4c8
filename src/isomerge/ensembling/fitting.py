"""What a combination has to learn, from predictions on held-out data that no member was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint.base import Progress
from isomerge.data.base import Data, DataSource
from isomerge.data.open import open_data
from isomerge.data.splits import same_split
from isomerge.ensembling.combinations import Shares
from isomerge.ensembling.combinations.stacked import find_stack
from isomerge.ensembling.combinations.weighted import find_weights
from isomerge.ensembling.module import Ensemble
from isomerge.ensembling.outputs import as_logs
from isomerge.errors import RequestError
from isomerge.evaluation.evaluate import require_classes
from isomerge.evaluation.measure import labels_of
from isomerge.evaluation.tasks import IGNORED
from isomerge.running.passes import examples_in

RIDGE = 0.1
"""The best of 0.001 to 10 in five folds of held-out predictions of digits."""


def open_held_out(source: DataSource, tokenizer: Any) -> Data:
    """Held-out data, with labels; the part called test is for measuring."""
    if isinstance(source, Mapping) and same_split(str(source.get("split"))) == "test":
        raise RequestError(
            "Fitting a combination on the part called test: what is measured there afterwards would mean nothing. Use "
            "validation, or other data.",
            keys=("held_out",),
        )
    opened = open_data(source, tokenizer=tokenizer, prefer="validation")
    require_classes(opened, source)
    return opened


def fitted(
    ensemble: Ensemble,
    data: Data,
    ridge: float,
    *,
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Shares:
    """The weights or the stack that fit held-out data best."""
    stacking = ensemble.combination.finds == "stack"
    logs, targets = [], []
    examples, total = 0, data.used(limit)
    for batches in ensemble.read(data, batch_size=batch_size, limit=limit, seed=seed):
        own, right = _rows(ensemble, ensemble.member_logits(batches), labels_of(batches[0], data))
        # Weights need no more of a prediction than the probability of what was right.
        logs.append(own if stacking else own.gather(-1, right[None, :, None].expand(len(own), -1, 1))[..., 0])
        targets.append(right)
        examples += examples_in(batches[0])
        if progress:
            progress(examples, max(examples, total), "fitting on held-out data")
    everything, right = torch.cat(logs, 1), torch.cat(targets)
    if not stacking:
        return Shares(find_weights(everything))
    return Shares(ensemble.shares.weights, find_stack(everything, right, ridge))


def _rows(ensemble: Ensemble, logits: list[Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities (members, rows, classes) and the right class of each row, on the CPU."""
    if ensemble.kind == "labels":
        logs = torch.stack([as_logs(one.cpu(), "labels").flatten(0, -2) for one in logits])
        return logs, labels.cpu().long().flatten()
    task = ensemble.new_task()
    pairs = [task.predict({"logits": one}, labels.to(one.device)) for one in logits]
    right = pairs[0][1].cpu().flatten()
    asked = right != IGNORED
    logs = torch.stack([said.cpu().flatten(0, -2)[asked] for said, _ in pairs])
    return logs, right[asked]
