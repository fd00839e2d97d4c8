"""GPT-2: LayerNorm in front, learned positions, transposed (`Conv1D`) weights, q, k and v in one tensor."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, KeyBias, Norm, Shift, ValueBias
from isomerge.symmetry.groups import Permutation, RotationFixingOnes

MODEL = "transformer."
LAYER = MODEL + "h.{i}."
QKV = "[head.{i} qk.{i} | head.{i} qk.{i}' | head.{i} vo.{i}]"
HEADS = ("score", "classifier", "qa_outputs")
OUTPUT, TABLE, POSITIONS = "lm_head.weight", MODEL + "wte.weight", MODEL + "wpe.weight"


@architecture("gpt2", summary="pre-LayerNorm decoder, learned positions", tied_by_default=True)
def gpt2(facts: Facts) -> Architecture:
    width, heads = facts["n_embd"], facts["n_head"]
    relu = facts.get("activation_function", "gelu_new") == "relu"
    return Architecture(
        prefix=MODEL,
        repeat={"i": facts["n_layer"]},
        spaces={
            "residual": Permutation(width) if facts.tied else RotationFixingOnes(width),
            **parts.head_spaces(heads, width // heads),
            "ffn.{i}": Permutation(facts.get("n_inner", 4 * width)),
            **parts.relu_units(relu),
        },
        tensors={
            TABLE: "_vocab residual",
            POSITIONS: "_positions residual",
            **parts.layer_norms(LAYER + "ln_1"),
            LAYER + "attn.c_attn.weight": "residual' " + QKV,
            LAYER + "attn.c_attn.bias": QKV,
            LAYER + "attn.c_proj.weight": "(head.{i} vo.{i}') residual",
            LAYER + "attn.c_proj.bias": "residual",
            **parts.layer_norms(LAYER + "ln_2"),
            LAYER + "mlp.c_fc.weight": "residual' " + parts.unit_axis(relu),
            LAYER + "mlp.c_fc.bias": parts.unit_axis(relu),
            LAYER + "mlp.c_proj.weight": parts.unit_axis(relu, dual=True) + " residual",
            LAYER + "mlp.c_proj.bias": "residual",
            **parts.layer_norms(MODEL + "ln_f"),
            **({} if facts.tied or facts.head != "lm" else {OUTPUT: "_vocab residual'"}),
            **{head + ".weight?": "_labels residual'" for head in HEADS},
            **{head + ".bias?": "_labels" for head in HEADS},
        },
        norms=[
            Norm(LAYER + "ln_1", (LAYER + "attn.c_attn.weight",)),
            Norm(LAYER + "ln_2", (LAYER + "mlp.c_fc.weight",)),
            Norm(MODEL + "ln_f", (OUTPUT, *(head + ".weight" for head in HEADS))),
        ],
        gauges=[
            KeyBias(LAYER + "attn.c_attn.bias", "qk.{i}"),
            ValueBias(LAYER + "attn.c_attn.bias", "vo.{i}", LAYER + "attn.c_proj.weight"),
            *([] if facts.tied else [Shift((POSITIONS, TABLE))]),
        ],
        writers=[
            *([] if facts.tied else [TABLE]), POSITIONS,
            LAYER + "attn.c_proj.weight", LAYER + "attn.c_proj.bias",
            LAYER + "mlp.c_proj.weight", LAYER + "mlp.c_proj.bias",
        ],
        tied={OUTPUT: (TABLE, 1.0)},
        untied_config=parts.UNTIED,
    )  # fmt: skip
