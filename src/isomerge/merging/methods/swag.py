"""A draw from the Gaussian that the checkpoints of a run at a constant learning rate look like."""

from __future__ import annotations

import math

from torch import Tensor

from isomerge.merging.methods.method import OptionError, method
from isomerge.merging.random_numbers import normal, normal_for_all
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup


@method(reference="https://arxiv.org/abs/1902.02476")
def swag(group: TensorGroup, *, rank: int = 20, scale: float = 1.0) -> Combine:
    """Draw a model around the mean of the checkpoints, as far as they vary: SWA with Gaussian noise.

    W̄ + √scale (√(v / 2) z + D y / √(2 (r − 1))), v the variance of each weight and D the last r deviations from the
    mean so far; z is drawn for each weight, y once for the whole model. Another seed is another model.

    Options:
        rank: of how many last checkpoints the deviations count
        scale: how much variance; 0 is the mean
    """
    if rank < 1 or not 0 <= scale < math.inf:
        raise OptionError(
            f"swag cannot draw with rank {rank} and scale {scale}. The rank is 1 or more, the scale not negative.",
            "rank", "scale",
        )  # fmt: skip
    last = range(max(0, group.models - rank), group.models)
    common = normal_for_all(group.seed, len(last))

    def combine(block: RowBlock) -> Tensor:
        models = block.tensors
        mean = models.mean(0)
        spread = (models.double() - mean).square_().mean(0).div_(2).sqrt_().to(mean.dtype)
        result = spread.mul_(normal(group, block, stream=0).to(models.dtype))
        so_far = models[: last.start].sum(0)
        for place, draw in zip(last, common, strict=True):
            so_far += models[place]
            if len(last) > 1:
                result += (models[place] - so_far / (place + 1)) * (draw / math.sqrt(2 * (len(last) - 1)))
        return result.mul_(math.sqrt(scale)).add_(mean)

    return combine
