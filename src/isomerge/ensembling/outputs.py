"""From a head's outputs to log-probabilities and back, so that one combination serves every task.

Labels that each apply or not are rows of two classes. Numbers are averaged as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from isomerge.data.task_heads import label_names
from isomerge.ensembling.combinations import COMBINATIONS, Combination, Shares
from isomerge.errors import RequestError, did_you_mean
from isomerge.evaluation.tasks import as_log_probabilities

Kind = Literal["classes", "labels", "numbers"]
WIDEST = 1 << 20
"""Numbers of a stack's matrix, which has members · classes² of them."""


def kind_of(task: str, config: Mapping[str, Any]) -> Kind:
    """What the outputs are: scores of classes (or tokens), of labels that may all hold, or plain numbers."""
    if task == "regression":
        return "numbers"
    several = task == "sequence" and config.get("problem_type") == "multi_label_classification"
    return "labels" if several else "classes"


def as_logs(logits: Tensor, kind: Kind) -> Tensor:
    """Log-probabilities over the last axis; numbers stay."""
    if kind == "labels":
        return torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], -1)
    return logits if kind == "numbers" else as_log_probabilities(logits)


def joined(logits: Sequence[Tensor], kind: Kind, combination: Combination, shares: Shares) -> Tensor:
    """What several heads say together, as logits: a softmax or sigmoid gives the combined probabilities."""
    logs = torch.stack([as_logs(one.to(logits[0].device), kind) for one in logits])
    if kind == "numbers":
        return (logs * shares.logs(logs).exp()).sum(0)
    together = combination(logs, shares)
    return together[..., 1] - together[..., 0] if kind == "labels" else together


def combination_for(name: str, task: str, config: Mapping[str, Any], members: int) -> Combination:
    """The combination of this name, unless it cannot serve this task."""
    if name not in COMBINATIONS:
        raise RequestError(f"combination cannot be '{name}'. {did_you_mean(name, COMBINATIONS)}", keys=("combination",))
    found, kind = COMBINATIONS[name], kind_of(task, config)
    why = ""
    if kind == "numbers" and not found.averages:
        why = "they predict numbers, which have no probabilities. Use probability, which is their mean"
    elif found.reads and task != "causal-lm":
        why = f"it weights models by the text before each token, and these are for '{task}'. Use weighted"
    elif found.finds == "stack":
        tokens = task in ("causal-lm", "masked-lm", "seq2seq")
        classes = int(config.get("vocab_size") or 0) if tokens else 2 if kind == "labels" else len(label_names(config))
        if tokens or members * classes**2 > WIDEST:
            why = f"they choose among {classes} outputs, too many for a linear model on all of them. Use weighted"
    if why:
        raise RequestError(f"Combining {members} models by '{name}': {why}.", keys=("combination",))
    return found
