"""OPT: LayerNorm in front, ReLU, learned positions; the 350m variant has norms *on* the stream and a narrow table."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, Gauge, KeyBias, Norm, Shift, StreamNorm, ValueBias
from isomerge.symmetry.groups import Group, Invertible, Permutation, Rotation, RotationFixingOnes

MODEL = "model.decoder."
LAYER = MODEL + "layers.{i}."
ATTENTION = LAYER + "self_attn."
OUTPUT, TABLE, POSITIONS = "lm_head.weight", MODEL + "embed_tokens.weight", MODEL + "embed_positions.weight"
PROJECT_IN, PROJECT_OUT = MODEL + "project_in.weight", MODEL + "project_out.weight"
FINAL_NORM = MODEL + "final_layer_norm"
HEADS = (OUTPUT, "score.weight", "qa_outputs.weight")


@architecture("opt", summary="pre-LayerNorm decoder, ReLU, learned positions", tied_by_default=True)
def opt(facts: Facts) -> Architecture:
    width, heads = facts["hidden_size"], facts["num_attention_heads"]
    before = facts.get("do_layer_norm_before", True)
    narrow = facts.get("word_embed_proj_dim", width) != width
    relu = facts.get("activation_function", "relu") == "relu"
    last = (PROJECT_OUT,) if narrow else () if facts.tied else HEADS  # what reads the last hidden state, and only that
    free = before and (narrow or not facts.tied)  # a narrow table does not live in the stream, so it may stay tied
    return Architecture(
        prefix="model.",
        repeat={"i": facts["num_hidden_layers"]},
        spaces={
            "residual": RotationFixingOnes(width) if free else Permutation(width),
            **parts.head_spaces(heads, width // heads),
            "ffn.{i}": Permutation(facts["ffn_dim"]),
            **parts.relu_units(relu),
            **(table_spaces(facts) if narrow else {}),
        },
        tensors={
            POSITIONS: "_positions residual",
            **{ATTENTION + f"{x}_proj.weight": f"{p} residual'" for x, p in QKV.items()},
            **{ATTENTION + f"{x}_proj.bias?": p for x, p in QKV.items()},
            ATTENTION + "out_proj.weight": "residual (head.{i} vo.{i}')",
            ATTENTION + "out_proj.bias?": "residual",
            **parts.feed_forward(LAYER + "fc1", LAYER + "fc2", relu, optional="?"),
            **{norm + ".weight?": "|residual|" for norm in NORMS},
            **{norm + ".bias?": "residual" for norm in NORMS},
            **ends(facts, narrow),
        },
        norms=norms_in_front(last) if before else norms_on_the_stream(facts["num_hidden_layers"], last),
        gauges=[
            KeyBias(ATTENTION + "k_proj.bias", "qk.{i}"),
            ValueBias(ATTENTION + "v_proj.bias", "vo.{i}", ATTENTION + "out_proj.weight"),
            *shift(facts, narrow),
        ],
        writers=writers(facts, before, narrow),
        tied={OUTPUT: (TABLE, 1.0)},
        untied_config=parts.UNTIED,
    )


QKV = {"q": "(head.{i} qk.{i})", "k": "(head.{i} qk.{i}')", "v": "(head.{i} vo.{i})"}
NORMS = (LAYER + "self_attn_layer_norm", LAYER + "final_layer_norm", FINAL_NORM)


def table_spaces(facts: Facts) -> dict[str, Group]:
    """Between a narrow table and its projections anything invertible may stand; untied, at either end by itself.

    A few labels do not span the narrow space, so its two factors cannot be balanced: there we ask for a rotation only.
    """
    embed = Invertible(facts["word_embed_proj_dim"])
    output = embed if facts.head == "lm" else Rotation(embed.size)
    return {"embed": embed} if facts.tied else {"embed": embed, "output": output}


def ends(facts: Facts, narrow: bool) -> dict[str, str]:
    """The input table, the task heads, and the projections around a narrow table."""
    read = ("_ output'" if not facts.tied else "") if narrow else "_ residual'"
    heads = {name + "?": read for name in HEADS[1:]} if read else {}
    output = {} if facts.tied or facts.head != "lm" else {OUTPUT: read}
    projections = {
        PROJECT_IN: "residual embed'",
        PROJECT_OUT: "embed' residual'" if facts.tied else "output residual'",
    }
    table = {TABLE: "_vocab embed" if narrow else "_vocab residual"}
    return {**table, **(projections if narrow else {}), **heads, **output, "qa_outputs.bias?": "_labels"}


def shift(facts: Facts, narrow: bool) -> list[Gauge]:
    return [] if facts.tied or narrow else [Shift((POSITIONS, TABLE))]


def writers(facts: Facts, before: bool, narrow: bool) -> list[str]:
    """What only LayerNorms read. Norms on the stream leave the embeddings to the first attention as they are; without a
    last norm the head reads the whole stream."""
    branches = [ATTENTION + "out_proj.weight", ATTENTION + "out_proj.bias", LAYER + "fc2.weight", LAYER + "fc2.bias"]
    if not before:
        return branches
    if facts.get("_remove_final_layer_norm", False):
        return []
    table = [PROJECT_IN] if narrow else [] if facts.tied else [TABLE]
    return [*table, POSITIONS, *branches]


def norms_in_front(last: tuple[str, ...]) -> list[Norm | StreamNorm]:
    return [
        Norm(LAYER + "self_attn_layer_norm", tuple(ATTENTION + f"{x}_proj.weight" for x in "qkv")),
        Norm(LAYER + "final_layer_norm", (LAYER + "fc1.weight",)),
        Norm(FINAL_NORM, last),
    ]


def norms_on_the_stream(depth: int, last: tuple[str, ...]) -> list[Norm | StreamNorm]:
    """Each norm's bias can move to the readers of the stream and to the next bias written to it."""
    norms: list[Norm | StreamNorm] = []
    for i in range(depth):
        layer, following = f"{MODEL}layers.{i}.", f"{MODEL}layers.{i + 1}.self_attn."
        norms.append(StreamNorm(layer + "self_attn_layer_norm", (layer + "fc1.weight",), layer + "fc2.bias"))
        if i + 1 < depth:
            readers = tuple(following + f"{x}_proj.weight" for x in "qkv")
            norms.append(StreamNorm(layer + "final_layer_norm", readers, following + "out_proj.bias"))
        elif last:
            norms.append(StreamNorm(layer + "final_layer_norm", last))
    return norms
