"""What a model's class is for, and which of its outputs a label of the data means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from isomerge.checkpoint.base import name_some
from isomerge.errors import RequestError

CLASSIFIERS = ("image", "sequence", "token")
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
    task = next((task for ending, task in _ENDINGS.items() if str(names[0]).endswith(ending)), None)
    if task == "sequence" and (config.get("problem_type") == "regression" or len(label_names(config)) == 1):
        return "regression"
    return task


def label_names(config: Mapping[str, Any]) -> list[str]:
    """The names of the outputs in order. config.json leaves them out where there are two without a name."""
    named = config.get("id2label")
    if isinstance(named, Mapping) and named and all(str(number).isdecimal() for number in named):
        return [str(name) for _, name in sorted(named.items(), key=lambda item: int(item[0]))]
    count = config.get("num_labels")
    return [f"LABEL_{number}" for number in range(count if type(count) is int and count > 0 else 2)]


def heads_apart(first: Mapping[str, Any], second: Mapping[str, Any]) -> str | None:
    """How the task heads of two models differ; None where they do not, as far as their configs say.

    >>> heads = [{"architectures": ["XForTokenClassification"], "id2label": {0: name}} for name in ("O", "person")]
    >>> heads_apart(*heads), heads_apart(heads[0], heads[0])
    ("output 0 is 'O' in the first and 'person' in the second", None)
    """
    tasks = [task_of(config) for config in (first, second)]
    if None not in tasks and tasks[0] != tasks[1]:
        return f"the first is for {tasks[0]}, the second for {tasks[1]}"
    names = [label_names(config) for config in (first, second)]
    if tasks[0] not in CLASSIFIERS or any(nameless(own) for own in names):
        return None
    for number, (one, two) in enumerate(zip(*names, strict=False)):
        if _plain(one) != _plain(two):
            return f"output {number} is '{one}' in the first and '{two}' in the second"
    return None


def match_labels(classes: Sequence[str], config: Mapping[str, Any], data: str) -> tuple[dict[str, int], list[str]]:
    """Label of the data → number of the output, with notes; an error that lists both sides where they differ.

    By name, whatever the case; else by number; else, where the model's outputs have no names, in sorted order.

    >>> match_labels(["dog", "Cat"], {"id2label": {"0": "cat", "1": "DOG"}}, "pets")
    ({'dog': 1, 'Cat': 0}, [])
    """
    names = label_names(config)
    numbers = {_plain(name): number for number, name in enumerate(names)}
    if all(_plain(label) in numbers for label in classes):
        matched = {label: numbers[_plain(label)] for label in classes}
        return matched, _absent(matched, names)
    if all(label.isdecimal() and int(label) < len(names) for label in classes):
        matched = {label: int(label) for label in classes}
        note = [] if nameless(names) else [f"the labels of {data} are numbers; they were read as the model's outputs"]
        return matched, note + _absent(matched, names)
    if nameless(names) and len(classes) == len(names):
        matched = {label: number for number, label in enumerate(sorted(classes))}
        listed = ", ".join(f"{number} = {label}" for label, number in matched.items())
        return matched, [f"the model's outputs have no names; the labels were taken in sorted order: {listed}"]
    unknown = sorted(label for label in classes if _plain(label) not in numbers)
    raise RequestError(
        f"Matching the labels of {data} with the model's: the model has no {name_some(unknown, 8)}. The data has "
        f"{name_some(sorted(classes), 20)}; the model has {name_some(names, 20)}. Use data of this model's task, or "
        "name another column with the option label, or put the labels into id2label and label2id of config.json.",
        keys=("label",),
    )


def _absent(matched: Mapping[str, int], names: Sequence[str]) -> list[str]:
    absent = [name for number, name in enumerate(names) if number not in set(matched.values())]
    if len(matched) == 1:
        return [f"the data has one class only, '{next(iter(matched))}'"]
    return [f"the data has no example of {name_some(absent)}"] if absent else []


def nameless(names: Sequence[str]) -> bool:
    """Whether outputs are numbered only, as transformers does where nobody named them."""
    return all(re.fullmatch(r"LABEL_\d+", name) for name in names)


def _plain(label: str) -> str:
    return re.sub(r"[\s_]+", " ", label.strip()).casefold()
