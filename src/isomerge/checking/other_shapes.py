"""Models that cannot be averaged, as their shapes or vocabularies differ: can their features be merged?"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from isomerge.checking.advice import EXAMPLES
from isomerge.checkpoint import Checkpoint
from isomerge.errors import IsomergeError
from isomerge.merging.layerwise.shapes import require_mergeable, require_one_task
from isomerge.merging.layerwise.token_matching import of_other_tokens


def joins_features(models: Sequence[Checkpoint]) -> bool:
    """Whether `reconstruct` brings them to the shape and the vocabulary of the first."""
    if len({model.config.get("model_type") for model in models}) > 1:
        return False
    try:
        require_one_task(models)
        require_mergeable(models, of_other_tokens(models))
    except IsomergeError:
        return False
    return True


def by_features(names: Sequence[str], data: Sequence[str]) -> str:
    """What to do with them: the command, with `data` where these were given."""
    command = ["isomerge", "merge", *names, "--method", "reconstruct"]
    for path in data or ["DATA"]:
        command += ["--data", path]
    return shlex.join([*command, "--limit", str(EXAMPLES), "-o", "merged"])


def why_by_features(first: str, has_data: bool) -> str:
    needed = "" if has_data else "; DATA are images or texts like those they were trained on, without labels"
    return f"their weights cannot be averaged, but their features can be merged into the shape of {first}{needed}"
