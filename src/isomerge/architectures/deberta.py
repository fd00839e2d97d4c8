"""DeBERTa-v2 and v3: a BERT whose attention also scores relative positions, with many variants.

The relative table lives in the residual space: with `share_att_key` the content's own projections read it, so nothing
can be folded into them. (With projections of its own the table could turn freely, against those of all layers.)
"""

from collections.abc import Sequence

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, Gauge, KeyBias, Norm, Shift, StreamNorm, ValueBias
from isomerge.symmetry.groups import Group, Invertible, Permutation, SignedPermutation, Trivial

EMBEDDINGS = "deberta.embeddings."
ENCODER = "deberta.encoder."
LAYER = ENCODER + "layer.{i}."
SELF = LAYER + "attention.self."
OUTPUT = LAYER + "attention.output."
TABLES = tuple(EMBEDDINGS + f"{x}_embeddings.weight" for x in ("word", "position", "token_type"))
RELATIVE = ENCODER + "rel_embeddings.weight"
POSITIONS = (SELF + "pos_query_proj.weight", SELF + "pos_key_proj.weight")
QKV = tuple(SELF + f"{x}_proj.weight" for x in ("query", "key", "value"))


@architecture("deberta-v2", summary="post-LayerNorm encoder, relative positions", tied_by_default=True, can_untie=False)
def deberta(facts: Facts) -> Architecture:
    variant = Variant(facts)
    heads, head_readers = task_heads(facts, variant)
    return Architecture(
        prefix="deberta.",
        repeat={"i": facts["num_hidden_layers"]},
        spaces=spaces(facts, variant),
        tensors={
            TABLES[0]: f"_vocab {variant.embedding}",
            TABLES[1] + "?": f"_positions {variant.embedding}",
            TABLES[2] + "?": f"_types {variant.embedding}",
            EMBEDDINGS + "embed_proj.weight?": "residual embedding'",
            **parts.layer_norms(EMBEDDINGS + "LayerNorm"),
            RELATIVE + "?": "_buckets residual",
            **parts.layer_norms(ENCODER + "LayerNorm", optional="?"),
            ENCODER + "conv.conv.weight?": "residual residual' _kernel" if variant.groups == 1 else "_out _in _kernel",
            ENCODER + "conv.conv.bias?": "residual",
            **parts.layer_norms(ENCODER + "conv.LayerNorm", optional="?"),
            **parts.query_key(SELF + "query_proj", SELF + "key_proj"),
            **parts.query_key(SELF + "pos_query_proj", SELF + "pos_key_proj", optional="?"),
            **parts.value_output(SELF + "value_proj", OUTPUT + "dense"),
            **parts.layer_norms(OUTPUT + "LayerNorm"),
            **parts.feed_forward(LAYER + "intermediate.dense", LAYER + "output.dense", variant.relu),
            **parts.layer_norms(LAYER + "output.LayerNorm"),
            **heads,
            **UNREAD,
        },
        norms=[
            *stream_norms(facts, variant, head_readers),
            *([] if variant.shared else [Norm(ENCODER + "LayerNorm", POSITIONS)]),
        ],
        gauges=gauges(variant),
        writers=[
            *writers_below(variant),
            OUTPUT + "dense.weight", OUTPUT + "dense.bias", LAYER + "output.dense.weight", LAYER + "output.dense.bias",
        ],
        tied={"cls.predictions.decoder.weight": (TABLES[0], 1.0)} if facts.tied else {},
        notes=[] if variant.groups == 1 else ["a grouped convolution reads the residual stream, which therefore stays"],
    )  # fmt: skip


class Variant:
    """The choices of config.json, read once."""

    def __init__(self, facts: Facts) -> None:
        kinds = facts.config.get("pos_att_type") or []
        kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
        relative = facts.get("relative_attention", False)
        self.kinds = {str(x).strip() for x in kinds} if relative else set()
        self.shared = relative and facts.get("share_att_key", False)
        self.norm = "layer_norm" in facts.get("norm_rel_ebd", "none").lower()
        self.conv = facts.get("conv_kernel_size", 0) > 0
        self.groups = facts.get("conv_groups", 1) if self.conv else 1
        self.relu = facts.get("hidden_act", "gelu") == "relu"
        self.narrow = facts.get("embedding_size", facts["hidden_size"]) != facts["hidden_size"]
        self.embedding = "embedding" if self.narrow else "residual"  # the space of the input tables
        # The newer masked-LM head always reads the word table, whatever config.json says about ties.
        self.tied = facts.tied or (facts.head == "lm" and not facts.get("legacy", True))


def spaces(facts: Facts, variant: Variant) -> dict[str, Group]:
    width, heads = facts["hidden_size"], facts["num_attention_heads"]
    inner = facts.get("attention_head_size", width // heads)
    narrow = facts.get("embedding_size", width)
    pooler = facts.get("pooler_hidden_act", "gelu")
    return {
        "residual": Permutation(width) if variant.groups == 1 else Trivial(width),
        **parts.head_spaces(heads, inner),
        "ffn.{i}": Permutation(facts["intermediate_size"]),
        # Tables, then a projection; a tied masked-LM head comes back to it through a norm.
        "embedding": Permutation(narrow) if variant.tied else Invertible(narrow),
        "transform": Permutation(narrow),
        "pooler": SignedPermutation(width) if pooler == "tanh" else Permutation(width),
        **parts.relu_units(pooler == "relu", "pooler", "pooler_unit"),
        **parts.relu_units(variant.relu),
    }


def task_heads(facts: Facts, variant: Variant) -> tuple[dict[str, str], tuple[str, ...]]:
    """Tensors of every head class, and which of their weights read the last hidden state."""
    inner = variant.embedding if variant.tied else "transform"
    pooler = "(pooler pooler_unit)" if facts.get("pooler_hidden_act", "gelu") == "relu" else "pooler"
    sequence = facts.head == "sequence"
    tensors = {
        "pooler.dense.weight?": f"{pooler} residual'",
        "pooler.dense.bias?": pooler,
        **parts.labels("classifier", pooler.replace("_unit", "_unit'") if sequence else "residual'"),
        **parts.labels("qa_outputs"),
        "cls.predictions.bias?": "_vocab",
        "cls.predictions.decoder.bias?": "_vocab",
        **({} if variant.tied else {"cls.predictions.decoder.weight?": "_vocab transform'"}),
        "lm_predictions.lm_head.bias?": "_vocab",
    }
    readers = ["pooler.dense.weight", "qa_outputs.weight", *([] if sequence else ["classifier.weight"])]
    for head in ("cls.predictions.transform.", "lm_predictions.lm_head."):
        tensors |= parts.dense_and_norm(head + "dense", head + "LayerNorm", inner)
        readers.append(head + "dense.weight")
    return tensors, tuple(readers)


def stream_norms(facts: Facts, variant: Variant, head_readers: Sequence[str]) -> list[StreamNorm]:
    """The norms whose bias can move on.

    It cannot where padding is set to zero after the norm (the embeddings' and the convolution's), where query and key
    also project the relative table, and where the convolution's activation, not a bias, is added to it.
    """
    chain = parts.post_norm_chain(
        embeddings=EMBEDDINGS + "LayerNorm",
        depth=facts["num_hidden_layers"],
        attention=(QKV, OUTPUT + "dense.bias", OUTPUT + "LayerNorm"),
        ffn=((LAYER + "intermediate.dense.weight",), LAYER + "output.dense.bias", LAYER + "output.LayerNorm"),
        end=head_readers,
    )
    kept = [chain[1], *chain[3:]] if variant.conv else chain[1:]
    before_attention = {norm.name for norm in chain[::2][:-1]}
    return [norm for norm in kept if not (variant.shared and norm.name in before_attention)]


def gauges(variant: Variant) -> list[Gauge]:
    """With position-to-content attention the key bias meets position queries, so softmax does not drop it."""
    gauges: list[Gauge] = [
        ValueBias(SELF + "value_proj.bias", "vo.{i}", OUTPUT + "dense.weight"),
        KeyBias(SELF + "pos_key_proj.bias", "qk.{i}"),
        Shift((TABLES[1], TABLES[0])),
        Shift((TABLES[2], TABLES[0])),
    ]
    return gauges if "p2c" in variant.kinds else [KeyBias(SELF + "key_proj.bias", "qk.{i}"), *gauges]


def writers_below(variant: Variant) -> list[str]:
    """What a norm reads first: the tables, or the projection of narrower tables; and the relative table."""
    relative = [RELATIVE] if variant.norm else []
    if variant.narrow:
        return [EMBEDDINGS + "embed_proj.weight", *relative]
    return [*(TABLES[1:] if variant.tied else TABLES), *relative]


# Left over from pre-training in published files; no class of the library reads them.
UNREAD = {
    f"mask_predictions.{name}?": pattern
    for name, pattern in {
        "dense.weight": "_ _", "dense.bias": "_", "LayerNorm.weight": "_", "LayerNorm.bias": "_",
        "classifier.weight": "_ _", "classifier.bias": "_",
    }.items()
}  # fmt: skip
