"""AdaMerging (Yang et al. 2024, arXiv 2310.02575): coefficients of task vectors, by gradient and without labels.

    min over λ of Σ_k E_{x of task k} H(p(x; W(λ))),    W(λ) = base + Σ_k λ_k (W_k − base)

with the entropy H of the predictions; or with their distance KL(p_k ‖ p) to those of model k, which is not low for a
model that always gives the same answer. Each data set counts alike.
"""

from __future__ import annotations

from isomerge.arguments import require_choice
from isomerge.merging.coefficient_objectives import entropy, prediction_distance
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.learned_coefficients import CoefficientMerge
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.methods.method import PerModel, each

OBJECTIVES = {"entropy": entropy, "predictions": prediction_distance}


@data_method(
    data="together",
    passes="the merged model once per step, with gradients; for predictions also the model whose data it is",
    least=1,
    base="required",
    reference="https://arxiv.org/abs/2310.02575",
)
def adamerging(
    inputs: MergeInputs,
    *,
    weight: PerModel[float] = each(0.3),
    by: str = "layer",
    objective: str = "predictions",
    steps: int = 200,
    rate: float = 0.02,
) -> MergedWeights:
    """Learn how much of each task vector, layer by layer and without labels.

    Options:
        weight: the first coefficients
        by: what has coefficients of its own: model (one for each model), layer, or tensor
        objective: predictions (their distance to those of each model on its own data), or entropy (of the merged model's predictions)
        steps: gradient steps, each on one batch of every data set
        rate: size of the first steps of a coefficient
    """  # noqa: E501
    require_choice("objective", objective, OBJECTIVES)
    merge = CoefficientMerge(inputs, weight, by)
    learned = merge.learn(OBJECTIVES[objective], steps, rate)
    notes = []
    if objective == "predictions" and len(inputs.models) > 1 and len(merge.data) == 1:
        notes.append("all models have the same data, so the distance is that to their mean prediction")
    return merge.result({"kind": objective, **learned}, notes)
