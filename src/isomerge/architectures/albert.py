"""ALBERT: one layer, or a few, used again and again; narrow tables, a norm behind them, and their projection."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, Gauge, KeyBias, Norm, Shift, StreamNorm, ValueBias
from isomerge.symmetry.groups import Group, Permutation, RotationFixingOnes, SignedPermutation

EMBEDDINGS = "albert.embeddings."
TABLES = tuple(EMBEDDINGS + f"{x}_embeddings.weight" for x in ("word", "position", "token_type"))
PROJECTION = "albert.encoder.embedding_hidden_mapping_in"
LAYER = "albert.encoder.albert_layer_groups.{g}.albert_layers.{j}."
TABLE = "embedding.residual"


@architecture(
    "albert", summary="post-LayerNorm encoder, shared layers, narrow tables", tied_by_default=True, can_untie=False
)
def albert(facts: Facts) -> Architecture:
    groups, inner = facts.get("num_hidden_groups", 1), facts.get("inner_group_num", 1)
    layers = [LAYER.format(g=g, j=j) for g in range(groups) for j in range(inner)]
    tensors = {name: f"_rows {TABLE}" for name in TABLES}
    norms: list[Norm | StreamNorm] = [Norm(EMBEDDINGS + "LayerNorm", (PROJECTION + ".weight",))]
    gauges: list[Gauge] = [Shift((TABLES[1], TABLES[0])), Shift((TABLES[2], TABLES[0]))]
    writers = [*(TABLES[1:] if facts.tied else TABLES)]
    for number, layer in enumerate(layers):
        attention, i = layer + "attention.", str(number)
        tensors |= {name: pattern.replace("{i}", i) for name, pattern in layer_tensors(layer, facts).items()}
        # Every layer comes after the projection as well, which has no norm: the other norm's bias stays.
        norms.append(StreamNorm(attention + "LayerNorm", (layer + "ffn.weight",), layer + "ffn_output.bias"))
        gauges.append(KeyBias(attention + "key.bias", f"qk.{i}"))
        gauges.append(ValueBias(attention + "value.bias", f"vo.{i}", attention + "dense.weight"))
        writers += [name + end for name in (attention + "dense", layer + "ffn_output") for end in (".weight", ".bias")]
    return Architecture(
        prefix="albert.",
        repeat={"i": len(layers)},
        spaces=spaces(facts),
        tensors={
            **tensors,
            **parts.layer_norms(EMBEDDINGS + "LayerNorm", space=TABLE),
            PROJECTION + ".weight": f"residual {TABLE}'",
            PROJECTION + ".bias": "residual",
            **task_heads(facts),
        },
        norms=norms,
        gauges=gauges,
        writers=writers,
        tied={"predictions.decoder.weight": (TABLES[0], 1.0)} if facts.tied else {},
    )


def uses_relu(facts: Facts) -> bool:
    return bool(facts.get("hidden_act", "gelu_new") == "relu")


def spaces(facts: Facts) -> dict[str, Group]:
    width, heads, narrow = facts["hidden_size"], facts["num_attention_heads"], facts.get("embedding_size", 128)
    return {
        # A tied table is read as it is written, and two norms see it: only orders are left.
        TABLE: Permutation(narrow) if facts.tied else RotationFixingOnes(narrow),
        "residual": Permutation(width),
        **parts.head_spaces(heads, width // heads),
        "ffn.{i}": Permutation(facts["intermediate_size"]),
        "pooler": SignedPermutation(width),  # tanh
        **({} if facts.tied else {"transform": Permutation(narrow)}),
        **parts.relu_units(uses_relu(facts)),
    }


def layer_tensors(layer: str, facts: Facts) -> dict[str, str]:
    attention = layer + "attention."
    return {
        **parts.query_key(attention + "query", attention + "key"),
        **parts.value_output(attention + "value", attention + "dense"),
        **parts.feed_forward(layer + "ffn", layer + "ffn_output", uses_relu(facts)),
        **parts.layer_norms(attention + "LayerNorm", layer + "full_layer_layer_norm"),
    }


def task_heads(facts: Facts) -> dict[str, str]:
    return {
        "albert.pooler.weight?": "pooler residual'",
        "albert.pooler.bias?": "pooler",
        **parts.dense_and_norm("predictions.dense", "predictions.LayerNorm", TABLE if facts.tied else "transform"),
        "predictions.bias?": "_vocab",
        "predictions.decoder.bias?": "_vocab",
        **({} if facts.tied else {"predictions.decoder.weight?": "_vocab transform'"}),
        **parts.labels("sop_classifier.classifier", "pooler'"),
        **parts.labels("classifier", "pooler'" if facts.head == "sequence" else "residual'"),
        **parts.labels("qa_outputs"),
    }
