"""Parts that several families share: attention, feed-forwards, norms, task heads. A family's own file holds its data.

Names of projections and norms are given without `.weight` and `.bias`; `optional` is "?" where a bias may be absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from isomerge.checkpoint.config_meaning import rope_parameters
from isomerge.errors import SpecificationError
from isomerge.symmetry.architecture import Architecture, Facts, Gauge, KeyBias, Norm, StreamNorm, ValueBias
from isomerge.symmetry.groups import (
    Group,
    Invertible,
    Permutation,
    Rotary,
    Rotation,
    RotationFixingOnes,
    Scale,
    SignedPermutation,
    SignedScale,
)

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


def rotary_width(facts: Facts, inner: int, share: float = 1.0) -> int:
    """How many coordinates of a head turn with the position; whole pairs. `share` is the family's default."""
    named = rope_parameters(facts.config).get("partial_rotary_factor", share)
    if not isinstance(named, (int, float)) or not 0 <= named <= 1:
        raise SpecificationError(f"Reading config.json: the rotary part of a head is {str(named)[:60]}, not 0 to 1.")
    return (int(inner * named) + 1) // 2 * 2


def inside_head(inner: int, rotary: int, per: str = "kv.{i}", layout: str = "half") -> dict[str, Group]:
    """Of queries and keys: complex numbers on the rotary part, anything invertible on the rest."""
    parts = {"rotary.{i}": Rotary(rotary, per=(per,), layout=layout), "qk.{i}": Invertible(inner - rotary, per=(per,))}
    return {name: group for name, group in parts.items() if group.size}


def inner_axes(spaces: Mapping[str, Group]) -> tuple[str, str]:
    """How a query and a key write what `inside_head` made."""
    names = [name for name in ("rotary.{i}", "qk.{i}") if name in spaces]
    sides = " | ".join(names), " | ".join(name + "'" for name in names)
    return sides if len(names) == 1 else (f"[{sides[0]}]", f"[{sides[1]}]")


def attention_spaces(facts: Facts, *, rotary: int | None = None, layout: str = "half") -> dict[str, Group]:
    """Heads of grouped queries, of which `rotary` coordinates turn with the position: all by default."""
    heads, inner = facts["num_attention_heads"], head_width(facts)
    groups = facts.get("num_key_value_heads", heads)
    whole = rotary in (None, inner)
    return {
        "kv.{i}": Permutation(groups),
        "query.{i}": Permutation(heads // groups, per=("kv.{i}",)),
        **({"qk.{i}": Rotary(inner, per=("kv.{i}",), layout=layout)} if whole else {}),
        **({} if whole else inside_head(inner, rotary or 0, layout=layout)),
        "vo.{i}": Invertible(inner, per=("kv.{i}",)),
    }


def attention_tensors(query: str = "qk.{i}", key: str = "qk.{i}'", output: str = "o_proj") -> dict[str, str]:
    """`query` and `key` are the inner axes of a head."""
    return {
        ATTENTION + "q_proj.weight": f"(kv.{{i}} query.{{i}} {query}) residual'",
        ATTENTION + "q_proj.bias?": f"(kv.{{i}} query.{{i}} {query})",
        ATTENTION + "k_proj.weight": f"(kv.{{i}} {key}) residual'",
        ATTENTION + "k_proj.bias?": f"(kv.{{i}} {key})",
        ATTENTION + "v_proj.weight": "(kv.{i} vo.{i}) residual'",
        ATTENTION + "v_proj.bias?": "(kv.{i} vo.{i})",
        ATTENTION + output + ".weight": "residual (kv.{i} query.{i} vo.{i}')",
        ATTENTION + output + ".bias?": "residual",
    }


def normed_spaces(facts: Facts) -> dict[str, Group]:
    """Norms on queries and keys, the same for all heads, leave a sign per rotary pair, and a gain that can move."""
    inner = head_width(facts)
    return {
        "qk.{i}": Rotary(inner, per=("kv.{i}",), phase="sign", scale=False),
        "gain.{i}": Rotary(inner, phase="none"),
    }


NORMED = {ATTENTION + "q_norm.weight": "gain.{i}", ATTENTION + "k_norm.weight": "gain.{i}'"}


def key_bias(spaces: Mapping[str, Group]) -> list[Gauge]:
    """Softmax drops the part of a key bias that no position turns."""
    free = "qk.{i}" in spaces and spaces["qk.{i}"].element == "matrix"
    return [KeyBias(ATTENTION + "k_proj.bias", "qk.{i}")] if free else []


def numbered(templates: Mapping[str, str], letter: str) -> dict[str, str]:
    """Templates over `{i}` as templates over another letter, which may run over only some of the layers."""
    new = "{" + letter + "}"
    return {name.replace("{i}", new): pattern.replace("{i}", new) for name, pattern in templates.items()}


def layer_list(facts: Facts, key: str, default: Sequence[Any]) -> list[Any]:
    """What config.json says of every layer, one entry each; shorter lists are damage."""
    depth = facts["num_hidden_layers"]
    given: list[Any] = facts.get(key, list(default))
    if len(given) < depth:
        raise SpecificationError(
            f"Reading config.json: {key} has {len(given)} entries for {depth} layers. Copy the model's own config.json "
            "again."
        )
    return given[:depth]


def some_turn(facts: Facts, turning: Sequence[bool], layout: str = "half") -> tuple[dict[str, Group], dict[str, Any]]:
    """Rotary positions in some layers (letter `r`) and none in the others (`n`): the spaces, and which."""
    inner = head_width(facts)
    spaces = attention_spaces(facts)
    del spaces["qk.{i}"]
    spaces["qk.{r}"] = Rotary(inner, per=("kv.{r}",), layout=layout)
    spaces["qk.{n}"] = Invertible(inner, per=("kv.{n}",))
    numbers = {letter: [i for i, turns in enumerate(turning) if turns == (letter == "r")] for letter in "rn"}
    return spaces, {"i": len(turning), **numbers}


UNTURNED_KEY_BIAS = KeyBias(ATTENTION.replace("{i}", "{n}") + "k_proj.bias", "qk.{n}")


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


def gated_in_one() -> dict[str, str]:
    """Gate and up in one projection, the gate first."""
    return {
        MLP + "gate_up_proj.weight": "[ffn.{i} | ffn.{i} up.{i}] residual'",
        MLP + "down_proj.weight": "residual (ffn.{i} up.{i}')",
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
    kind: str = "rms",
    final: str = "model.norm",
    inner_norms: Sequence[Norm] = (),
    values_into: str | None = ATTENTION + "o_proj.weight",
    **fields: Any,
) -> Architecture:
    """`norms` of a layer with their readers, under whole names where only some layers have them, and those `after` a
    branch, which have none; a gain is `offset` + stored.

    A value bias can move on `values_into` the output bias. A tied output table is not a tensor of its own. Under
    LayerNorm (`kind` "layer") the writers are the tensors whose first axis is the stream.
    """
    output = {} if facts.tied or facts.head != "lm" else {"lm_head.weight": "_vocab residual'"}
    branches = [name.removesuffix("?") for name, pattern in tensors.items() if pattern.split()[0] == "residual"]
    places = {norm if norm.startswith("model.") else LAYER + norm: readers for norm, readers in norms.items()}
    every = [*places, *(LAYER + norm for norm in after), final]
    known: dict[str, Any] = {
        "prefix": "model.",
        "repeat": {"i": facts["num_hidden_layers"]},
        "tied": TIED,
        "untied_config": UNTIED,
        "writers": [] if kind == "rms" else [*([] if facts.tied else ["model.embed_tokens.weight"]), *branches],
    }
    return Architecture(
        spaces=spaces,
        tensors={
            **tensors,
            "model.embed_tokens.weight": "_vocab residual",
            **labels("score"),
            **labels("qa_outputs"),
            **output,
            **{norm + ".weight": "|residual|" for norm in every},
            **({} if kind == "rms" else {norm + ".bias?": "residual" for norm in every}),
        },
        norms=[
            *(Norm(norm, readers, kind=kind, offset=offset) for norm, readers in places.items()),
            Norm(final, FINAL_READERS, kind=kind, offset=offset),
            *inner_norms,
        ],
        gauges=[*([ValueBias(ATTENTION + "v_proj.bias", "vo.{i}", values_into)] if values_into else []), *gauges],
        **{**known, **fields},
    )


def stream(facts: Facts, *, layer_norm: bool = False) -> Group:
    """Rotations between norms in front of their readers; a tied table is both writer and reader, and keeps the axes."""
    width = facts["hidden_size"]
    if layer_norm:
        return Permutation(width) if facts.tied else RotationFixingOnes(width)
    return SignedPermutation(width) if facts.tied else Rotation(width)
