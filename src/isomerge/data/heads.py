"""What a model's class is for, told from its name in config.json: the endings are the same for every family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ENDINGS = {
    "ForImageClassification": "image",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForPreTraining": "masked-lm",
    "ForConditionalGeneration": "seq2seq",
}


def task_of(config: Mapping[str, Any]) -> str | None:
    """
    >>> task_of({"architectures": ["XForSequenceClassification"], "id2label": {"0": "score"}})
    'regression'
    >>> task_of({"architectures": ["XModel"]}) is None
    True
    """
    names = config.get("architectures") or [""]
    found = next((task for ending, task in _ENDINGS.items() if str(names[0]).endswith(ending)), None)
    if found == "sequence" and (config.get("problem_type") == "regression" or len(label_names(config)) == 1):
        return "regression"
    return found


def label_names(config: Mapping[str, Any]) -> list[str]:
    """The names of the outputs in order. config.json leaves them out where there are two without a name."""
    named = config.get("id2label")
    if named:
        return [str(name) for _, name in sorted(named.items(), key=lambda item: int(item[0]))]
    return [f"LABEL_{number}" for number in range(int(config.get("num_labels") or 2))]
