"""GPT-2: LayerNorm in front, learned positions, transposed (`Conv1D`) weights, q, k and v in one tensor."""

from isomerge.architectures import architecture
from isomerge.symmetry.architecture import Architecture, Facts, KeyBias, Norm, Shift, ValueBias
from isomerge.symmetry.groups import Invertible, Permutation, RotationFixingOnes, Scale

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
            "head.{i}": Permutation(heads),
            "qk.{i}": Invertible(width // heads, per=("head.{i}",)),
            "vo.{i}": Invertible(width // heads, per=("head.{i}",)),
            "ffn.{i}": Permutation(facts.get("n_inner", 4 * width)),
            **({"unit.{i}": Scale(1, per=("ffn.{i}",))} if relu else {}),
        },
        tensors={
            TABLE: "_vocab residual",
            POSITIONS: "_positions residual",
            LAYER + "ln_1.weight": "|residual|",
            LAYER + "ln_1.bias": "residual",
            LAYER + "attn.c_attn.weight": "residual' " + QKV,
            LAYER + "attn.c_attn.bias": QKV,
            LAYER + "attn.c_proj.weight": "(head.{i} vo.{i}') residual",
            LAYER + "attn.c_proj.bias": "residual",
            LAYER + "ln_2.weight": "|residual|",
            LAYER + "ln_2.bias": "residual",
            LAYER + "mlp.c_fc.weight": "residual' (ffn.{i} unit.{i})" if relu else "residual' ffn.{i}",
            LAYER + "mlp.c_fc.bias": "(ffn.{i} unit.{i})" if relu else "ffn.{i}",
            LAYER + "mlp.c_proj.weight": "(ffn.{i} unit.{i}') residual" if relu else "ffn.{i} residual",
            LAYER + "mlp.c_proj.bias": "residual",
            MODEL + "ln_f.weight": "|residual|",
            MODEL + "ln_f.bias": "residual",
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
        untied_config={"tie_word_embeddings": False},
    )  # fmt: skip
