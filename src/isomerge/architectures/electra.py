"""ELECTRA: a BERT whose tables may be narrower than the stream; a norm stands between them and their projection."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, KeyBias, Norm, Shift, ValueBias
from isomerge.symmetry.groups import Group, Permutation, RotationFixingOnes

EMBEDDINGS = "electra.embeddings."
TABLES = tuple(EMBEDDINGS + f"{x}_embeddings.weight" for x in ("word", "position", "token_type"))
PROJECTION = "electra.embeddings_project"
LAYER = "electra.encoder.layer.{i}."
SELF, OUTPUT = LAYER + "attention.self.", LAYER + "attention.output."
QKV = tuple(SELF + f"{x}.weight" for x in ("query", "key", "value"))


@architecture("electra", summary="post-LayerNorm encoder, perhaps narrow tables", tied_by_default=True, can_untie=False)
def electra(facts: Facts) -> Architecture:
    narrow = facts.get("embedding_size", 128) != facts["hidden_size"]
    tied = facts.tied and facts.head == "lm"
    table = "embedding.residual" if narrow else "residual"
    relu = facts.get("hidden_act", "gelu") == "relu"
    heads, readers = task_heads(table if tied else "transform")
    chain = parts.post_norm_chain(
        embeddings=EMBEDDINGS + "LayerNorm",
        depth=facts["num_hidden_layers"],
        attention=(QKV, OUTPUT + "dense.bias", OUTPUT + "LayerNorm"),
        ffn=((LAYER + "intermediate.dense.weight",), LAYER + "output.dense.bias", LAYER + "output.LayerNorm"),
        end=readers,
    )
    return Architecture(
        prefix="electra.",
        repeat={"i": facts["num_hidden_layers"]},
        spaces=spaces(facts, narrow, tied, relu),
        tensors={
            **{name: f"_rows {table}" for name in TABLES},
            **parts.layer_norms(EMBEDDINGS + "LayerNorm", space=table),
            **({PROJECTION + ".weight": f"residual {table}'", PROJECTION + ".bias": "residual"} if narrow else {}),
            **parts.query_key(SELF + "query", SELF + "key"),
            **parts.value_output(SELF + "value", OUTPUT + "dense"),
            **parts.layer_norms(OUTPUT + "LayerNorm", LAYER + "output.LayerNorm"),
            **parts.feed_forward(LAYER + "intermediate.dense", LAYER + "output.dense", relu),
            **heads,
        },
        norms=[Norm(EMBEDDINGS + "LayerNorm", (PROJECTION + ".weight",)), *chain[1:]] if narrow else chain,
        gauges=[
            KeyBias(SELF + "key.bias", "qk.{i}"),
            ValueBias(SELF + "value.bias", "vo.{i}", OUTPUT + "dense.weight"),
            Shift((TABLES[1], TABLES[0])),
            Shift((TABLES[2], TABLES[0])),
        ],
        writers=[
            *(TABLES[1:] if tied else TABLES),
            *(name + kind for name in (OUTPUT, LAYER + "output.") for kind in ("dense.weight", "dense.bias")),
        ],
        tied={"generator_lm_head.weight": (TABLES[0], 1.0)} if tied else {},
    )


def spaces(facts: Facts, narrow: bool, tied: bool, relu: bool) -> dict[str, Group]:
    width, heads = facts["hidden_size"], facts["num_attention_heads"]
    size = facts.get("embedding_size", 128)
    # A tied table is read as it is written, and two norms see it: only orders are left.
    table: dict[str, Group] = {"embedding.residual": Permutation(size) if tied else RotationFixingOnes(size)}
    return {
        **(table if narrow else {}),
        "residual": Permutation(width),
        **parts.head_spaces(heads, width // heads),
        "ffn.{i}": Permutation(facts["intermediate_size"]),
        "dense": Permutation(width),  # the task heads' GELU layer
        **({} if tied else {"transform": Permutation(size)}),
        **parts.relu_units(relu),
    }


def task_heads(inner: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Tensors of every head class, and which of their weights read the last hidden state."""
    dense = ("discriminator_predictions.dense", "classifier.dense", "sequence_summary.summary")
    tensors = {
        **parts.dense_and_norm("generator_predictions.dense", "generator_predictions.LayerNorm", inner),
        "generator_lm_head.bias?": "_vocab",
        **({"generator_lm_head.weight?": "_vocab transform'"} if inner == "transform" else {}),
        **{name + ".weight?": "dense residual'" for name in dense},
        **{name + ".bias?": "dense" for name in dense},
        **parts.labels("discriminator_predictions.dense_prediction", "dense'"),
        **parts.labels("classifier.out_proj", "dense'"),
        **parts.labels("classifier"),
        **parts.labels("qa_outputs"),
    }
    readers = ("generator_predictions.dense", *dense, "classifier", "qa_outputs")
    return tensors, tuple(name + ".weight" for name in readers)
