"""Parts that several families share: attention, feed-forwards, norms, task heads. A family's own file holds its data.

Names of projections and norms are given without `.weight` and `.bias`; `optional` is "?" where a bias may be absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from isomerge.symmetry.architecture import Architecture, Facts, Gauge, Norm, StreamNorm, ValueBias
from isomerge.symmetry.groups import Group, Invertible, Permutation, Rotary, Scale, SignedScale

UNTIED = {"tie_word_embeddings": False}


# --- heads with queries, keys and values of their own -----------------------------------------------------------------
def head_spaces(heads: int, inner: int) -> dict[str, Group]:
    return {
        "head.{i}": Permutation(heads),
        "qk.{i}": Invertible(inner, per=("head.{i}",)),
        "vo.{i}": Invertible(inner, per=("head.{i}",)),
    }


def query_key(query: str, key: str, optional: str = "", bias: str = "") -> dict[str, str]:
    return {
        query + ".weight" + optional: "(head.{i} qk.{i}) residual'",
        query + ".bias" + (bias or optional): "(head.{i} qk.{i})",
        key + ".weight" + optional: "(head.{i} qk.{i}') residual'",
        key + ".bias" + (bias or optional): "(head.{i} qk.{i}')",
    }


def value_output(value: str, output: str, bias: str = "") -> dict[str, str]:
    return {
        value + ".weight": "(head.{i} vo.{i}) residual'",
        value + ".bias" + bias: "(head.{i} vo.{i})",
        output + ".weight": "residual (head.{i} vo.{i}')",
        output + ".bias": "residual",
    }


def renamed(of: Mapping[str, Any], words: Mapping[str, str], letter: str = "i") -> dict[str, Any]:
    """Spaces or tensors of a part with other words for its spaces, and another letter for its layers.

    >>> renamed({"q.weight": "(head.{i} qk.{i}) residual'"}, {"head": "cross", "residual": "text.residual"}, "j")
    {'q.weight': "(cross.{j} qk.{j}) text.residual'"}
    """

    def one(text: str) -> str:
        return re.sub(r"\w+", lambda m: words.get(m[0], m[0]), text).replace("{i}", "{" + letter + "}")

    return {
        name if isinstance(value, str) else one(name): one(value) if isinstance(value, str)
        else replace(value, per=tuple(one(parent) for parent in value.per))
        for name, value in of.items()
    }  # fmt: skip


# --- feed-forwards, norms, task heads ---------------------------------------------------------------------------------
def relu_units(relu: bool, units: str = "ffn.{i}", scale: str = "unit.{i}") -> dict[str, Group]:
    """A ReLU leaves a positive factor per unit free."""
    return {scale: Scale(1, per=(units,))} if relu else {}


def unit_axis(relu: bool, dual: bool = False) -> str:
    return ("(ffn.{i} unit.{i}')" if dual else "(ffn.{i} unit.{i})") if relu else "ffn.{i}"


def feed_forward(up: str, down: str, relu: bool, optional: str = "") -> dict[str, str]:
    return {
        up + ".weight": unit_axis(relu) + " residual'",
        up + ".bias" + optional: unit_axis(relu),
        down + ".weight": "residual " + unit_axis(relu, dual=True),
        down + ".bias" + optional: "residual",
    }


def layer_norms(*names: str, optional: str = "", space: str = "residual") -> dict[str, str]:
    tensors: dict[str, str] = {}
    for name in names:
        tensors |= {name + ".weight" + optional: f"|{space}|", name + ".bias" + optional: space}
    return tensors


def labels(name: str, read: str = "residual'") -> dict[str, str]:
    """A classifier that may be there."""
    return {name + ".weight?": "_labels " + read, name + ".bias?": "_labels"}


def dense_and_norm(dense: str, norm: str, space: str) -> dict[str, str]:
    """The layer in front of a masked-LM decoder, where there is one."""
    return {
        dense + ".weight?": f"{space} residual'",
        dense + ".bias?": space,
        **layer_norms(norm, optional="?", space=space),
    }


Step = tuple[tuple[str, ...], str, str]  # who reads the stream, the bias they write back, the norm after it


def post_norm_chain(embeddings: str, depth: int, attention: Step, ffn: Step, end: Sequence[str]) -> list[StreamNorm]:
    """Post-norm models: the norms in order, each with the readers and the writer that come after it.

    Each norm's bias can move to the readers of the stream and to the next bias written to it.
    """
    steps = [
        (tuple(r.format(i=i) for r in readers), bias.format(i=i), norm.format(i=i))
        for i in range(depth)
        for readers, bias, norm in (attention, ffn)
    ]
    names = [embeddings, *(norm for _, _, norm in steps)]
    following: list[tuple[tuple[str, ...], str | None]] = [(readers, bias) for readers, bias, _ in steps]
    following.append((tuple(end), None))
    return [StreamNorm(name, readers, bias) for name, (readers, bias) in zip(names, following, strict=True)]


# --- decoders with RMSNorm, rotary positions and grouped queries (Llama and its kin) ----------------------------------
LAYER = "model.layers.{i}."
ATTENTION = LAYER + "self_attn."
MLP = LAYER + "mlp."
QKV = tuple(ATTENTION + f"{x}_proj.weight" for x in "qkv")
GATE_AND_UP = (MLP + "gate_proj.weight", MLP + "up_proj.weight")
TIED = {"lm_head.weight": ("model.embed_tokens.weight", 1.0)}
FINAL_READERS = ("lm_head.weight", "score.weight", "qa_outputs.weight")


def head_width(facts: Facts) -> int:
    return int(facts.get("head_dim", facts["hidden_size"] // facts["num_attention_heads"]))


def attention_spaces(facts: Facts) -> dict[str, Group]:
    heads, inner = facts["num_attention_heads"], head_width(facts)
    groups = facts.get("num_key_value_heads", heads)
    return {
        "kv.{i}": Permutation(groups),
        "query.{i}": Permutation(heads // groups, per=("kv.{i}",)),
        "qk.{i}": Rotary(inner, per=("kv.{i}",)),
        "vo.{i}": Invertible(inner, per=("kv.{i}",)),
    }


def attention_tensors() -> dict[str, str]:
    return {
        ATTENTION + "q_proj.weight": "(kv.{i} query.{i} qk.{i}) residual'",
        ATTENTION + "q_proj.bias?": "(kv.{i} query.{i} qk.{i})",
        ATTENTION + "k_proj.weight": "(kv.{i} qk.{i}') residual'",
        ATTENTION + "k_proj.bias?": "(kv.{i} qk.{i}')",
        ATTENTION + "v_proj.weight": "(kv.{i} vo.{i}) residual'",
        ATTENTION + "v_proj.bias?": "(kv.{i} vo.{i})",
        ATTENTION + "o_proj.weight": "residual (kv.{i} query.{i} vo.{i}')",
        ATTENTION + "o_proj.bias?": "residual",
    }


def gated_spaces(facts: Facts) -> dict[str, Group]:
    return {"ffn.{i}": Permutation(facts["intermediate_size"]), "up.{i}": SignedScale(1, per=("ffn.{i}",))}


def gated_tensors() -> dict[str, str]:
    return {
        MLP + "gate_proj.weight": "ffn.{i} residual'",
        MLP + "gate_proj.bias?": "ffn.{i}",
        MLP + "up_proj.weight": "(ffn.{i} up.{i}) residual'",
        MLP + "up_proj.bias?": "(ffn.{i} up.{i})",
        MLP + "down_proj.weight": "residual (ffn.{i} up.{i}')",
        MLP + "down_proj.bias?": "residual",
    }


def rotary_decoder(
    facts: Facts,
    spaces: Mapping[str, Group],
    tensors: Mapping[str, str],
    *,
    norms: Mapping[str, tuple[str, ...]],
    after: Sequence[str] = (),
    offset: float = 0.0,
    gauges: Sequence[Gauge] = (),
    **fields: Any,
) -> Architecture:
    """`norms` of a layer with their readers, and those `after` a branch, which have none; a gain is `offset` + stored.

    A tied output table is not a tensor of its own.
    """
    output = {} if facts.tied or facts.head != "lm" else {"lm_head.weight": "_vocab residual'"}
    known: dict[str, Any] = {
        "prefix": "model.",
        "repeat": {"i": facts["num_hidden_layers"]},
        "tied": TIED,
        "untied_config": UNTIED,
    }
    return Architecture(
        spaces=spaces,
        tensors={
            **tensors,
            "model.embed_tokens.weight": "_vocab residual",
            **labels("score"),
            **labels("qa_outputs"),
            **output,
            **{LAYER + norm + ".weight": "|residual|" for norm in (*norms, *after)},
            "model.norm.weight": "|residual|",
        },
        norms=[
            *(Norm(LAYER + norm, readers, kind="rms", offset=offset) for norm, readers in norms.items()),
            Norm("model.norm", FINAL_READERS, kind="rms", offset=offset),
        ],
        gauges=[ValueBias(ATTENTION + "v_proj.bias", "vo.{i}", ATTENTION + "o_proj.weight"), *gauges],
        **{**known, **fields},
    )
