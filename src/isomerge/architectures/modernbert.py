"""ModernBERT: a norm *on* the stream behind the table, norms in front after that, rotary positions, gated units.

The first layer reads the table's norm as it is: that norm's gain is part of the stream, which therefore only permutes.
"""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, Norm, StreamNorm, ValueBias
from isomerge.symmetry.groups import Group, Permutation, Rotary, SignedScale

TABLE, FIRST_NORM = "model.embeddings.tok_embeddings.weight", "model.embeddings.norm"
LAYER = "model.layers.{i}."
QKV, OUTPUT = LAYER + "attn.Wqkv", LAYER + "attn.Wo"
UP, DOWN = LAYER + "mlp.Wi", LAYER + "mlp.Wo"
HEADS = "[head.{i} qk.{i} | head.{i} qk.{i}' | head.{i} vo.{i}]"
UNITS = "[ffn.{i} | ffn.{i} up.{i}]"


@architecture("modernbert", summary="pre-LayerNorm encoder, rotary, gated units", tied_by_default=True, can_untie=False)
def modernbert(facts: Facts) -> Architecture:
    width, heads = facts["hidden_size"], facts["num_attention_heads"]
    tied_head = facts.tied and facts.head == "lm"
    inner = "residual" if tied_head else "transform"  # tied: the head's output is read by the table
    norms = [*(f"model.layers.{i}.attn_norm" for i in range(1, facts["num_hidden_layers"])), LAYER + "mlp_norm"]
    spaces: dict[str, Group] = {
        "residual": Permutation(width),
        "head.{i}": Permutation(heads),
        "qk.{i}": Rotary(width // heads, per=("head.{i}",)),
        "vo.{i}": parts.head_spaces(heads, width // heads)["vo.{i}"],
        "ffn.{i}": Permutation(facts["intermediate_size"]),
        "up.{i}": SignedScale(1, per=("ffn.{i}",)),
        **({} if tied_head else {"transform": Permutation(width)}),
    }
    return Architecture(
        prefix="model.",
        repeat={"i": facts["num_hidden_layers"]},
        spaces=spaces,
        tensors={
            TABLE: "_vocab residual",
            QKV + ".weight": HEADS + " residual'",
            QKV + ".bias?": HEADS,
            OUTPUT + ".weight": "residual (head.{i} vo.{i}')",
            OUTPUT + ".bias?": "residual",
            UP + ".weight": UNITS + " residual'",
            UP + ".bias?": UNITS,
            DOWN + ".weight": "residual (ffn.{i} up.{i}')",
            DOWN + ".bias?": "residual",
            **parts.layer_norms(FIRST_NORM, *norms, "model.final_norm", optional="?"),
            **parts.dense_and_norm("head.dense", "head.norm", inner),
            "decoder.weight?": f"_vocab {inner}'",
            "decoder.bias?": "_vocab",
            **parts.labels("classifier", "transform'"),
        },
        norms=[
            StreamNorm(FIRST_NORM, (QKV.format(i=0) + ".weight",), OUTPUT.format(i=0) + ".bias"),
            *(Norm(norm, (norm.replace("attn_norm", "attn.Wqkv") + ".weight",)) for norm in norms[:-1]),
            Norm(norms[-1], (UP + ".weight",)),
            Norm("model.final_norm", ("head.dense.weight",)),
        ],
        gauges=[ValueBias(QKV + ".bias", "vo.{i}", OUTPUT + ".weight")],
        writers=[
            *([] if facts.tied else [TABLE]),
            *(name + kind for name in (OUTPUT, DOWN) for kind in (".weight", ".bias")),
        ],
        tied={"decoder.weight": (TABLE, 1.0)} if facts.tied else {},
    )
