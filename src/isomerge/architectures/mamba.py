"""Mamba: a selective state space in every layer, behind one RMSNorm.

Channels change places with everything that is theirs; states change places and share out a factor between what writes
and what reads them; the narrow step size is a product of two maps, so anything invertible may stand between. A factor
of a whole layer, which its reading side and its skip could hand to the output projection, stays where it is.
"""

import math

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, Norm
from isomerge.symmetry.groups import Invertible, Permutation, SignedScale

MODEL = "backbone."
LAYER = MODEL + "layers.{i}."
MIXER = LAYER + "mixer."
TABLE, OUTPUT = MODEL + "embeddings.weight", "lm_head.weight"
BOTH = "[channel.{i} row.{i} | channel.{i}]"


@architecture("mamba", summary="pre-RMSNorm, selective state space", tied_by_default=True)
def mamba(facts: Facts) -> Architecture:
    width = facts["hidden_size"]
    automatic = facts.config.get("time_step_rank", "auto") == "auto"
    rank = math.ceil(width / 16) if automatic else facts["time_step_rank"]
    return Architecture(
        prefix=MODEL,
        repeat={"i": facts["num_hidden_layers"]},
        spaces={
            "residual": parts.stream(facts),
            "channel.{i}": Permutation(facts.get("intermediate_size", facts.get("expand", 2) * width)),
            "row.{i}": SignedScale(1, per=("channel.{i}",)),  # a row of the projection and of the convolution after it
            "state.{i}": Permutation(facts["state_size"]),
            "state.scale.{i}": SignedScale(1, per=("state.{i}",)),
            "latent.step.{i}": Invertible(rank),
        },
        tensors={
            TABLE: "_vocab residual",
            MIXER + "in_proj.weight": BOTH + " residual'",
            MIXER + "in_proj.bias?": BOTH,
            MIXER + "conv1d.weight": "(channel.{i} row.{i}') _one _kernel",
            MIXER + "conv1d.bias?": "channel.{i}",
            MIXER
            + "x_proj.weight": "[latent.step.{i} | state.{i} state.scale.{i} | state.{i} state.scale.{i}'] channel.{i}",
            MIXER + "dt_proj.weight": "channel.{i} latent.step.{i}'",
            MIXER + "dt_proj.bias": "channel.{i}",
            MIXER + "A_log": "channel.{i} state.{i}",
            MIXER + "D": "channel.{i}",
            MIXER + "out_proj.weight": "residual channel.{i}",
            MIXER + "out_proj.bias?": "residual",
            LAYER + "norm.weight": "|residual|",
            MODEL + "norm_f.weight": "|residual|",
            **({} if facts.tied or facts.head != "lm" else {OUTPUT: "_vocab residual'"}),
        },
        norms=[
            Norm(LAYER + "norm", (MIXER + "in_proj.weight",), kind="rms"),
            Norm(MODEL + "norm_f", (OUTPUT,), kind="rms"),
        ],
        tied={OUTPUT: (TABLE, 1.0)},
        untied_config=parts.UNTIED,
    )
