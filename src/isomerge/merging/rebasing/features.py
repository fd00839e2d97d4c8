"""A carried change, fitted to what the new base makes of the data: its features change as those of the old base did.

Every linear map of the result is solved again, in the order in which they run, on the inputs that it has there:

    W = argmin ‖X W − (f_new + s (f_tuned − f_base))‖² + ridge towards W_new + s τ'

with the features f of the three models on the same examples, the old ones moved to the new base. This is merging by
features (`reconstruct`) of three models with the weights 1, s and −s. No labels are needed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from isomerge.data.base import Batches
from isomerge.merging.layerwise.candidates import Candidates
from isomerge.merging.layerwise.goals import GoalData
from isomerge.merging.layerwise.layerwise_merge import LayerwiseMerge
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.rebasing.moved_change import MovedChange

FLOOR = 1e-6


def fitted_to_features(
    inputs: MergeInputs, change: MovedChange, data: Batches, scale: float, ridge: float | None, cache: str
) -> MergedWeights:
    """The new base with the change, map by map."""
    three = replace(inputs, models=[change.onto, change.tuned, change.base], base=None, align=lambda: change.aligned)
    run = LayerwiseMerge(three, [1.0, scale, -scale], [data], cache)
    candidates = Candidates(run, False, ridge, FLOOR, 0, False)
    record: dict[str, Any] = candidates.merge(run.shares, GoalData(run.examples[0], None))
    return run.result(record)
