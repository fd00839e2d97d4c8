"""Architectures without a file: what can be inferred safely is used, the rest stays as it is, and the notes say why.

Names and shapes propose spaces: hidden units of a feed-forward, heads, their inner spaces. Each is used only if it is
proven on the stock class (`evaluation/symmetry_proof.py`), so a wrong guess costs time and never exactness.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from isomerge.checkpoint.base import Checkpoint
from isomerge.errors import SpecificationError
from isomerge.evaluation.symmetry_proof import Part, Prover, Unprovable
from isomerge.symmetry.architecture import LARGEST, Architecture
from isomerge.symmetry.binding import BoundModel, bind_model
from isomerge.symmetry.groups import Group, Invertible, Permutation, Rotary, Scale, SignedScale
from isomerge.symmetry.patterns import bind

# Inputs and output of a feed-forward, as they are called beside each other; a gate comes first.
FEED_FORWARD = (
    (("gate_proj", "up_proj"), "down_proj"), (("w1", "w3"), "w2"), (("wi_0", "wi_1"), "wo"),
    (("gate_up_proj",), "down_proj"), (("up_proj",), "down_proj"), (("fc1",), "fc2"), (("wi",), "wo"),
    (("Wi",), "Wo"), (("c_fc",), "c_proj"), (("lin1",), "lin2"), (("linear1",), "linear2"),
    (("fc_in",), "fc_out"), (("dense_h_to_4h",), "dense_4h_to_h"),
    (("intermediate.dense",), "output.dense"), (("intermediate_dense",), "output_dense"), (("ffn",), "ffn_output"),
    (("mlp.0",), "mlp.2"), (("w1",), "w2"),
)  # fmt: skip
SEPARATE = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"), ("wq", "wk", "wv"), ("to_q", "to_k", "to_v"),
    ("linear_q", "linear_k", "linear_v"),
)  # fmt: skip
FUSED = ("query_key_value", "qkv_proj", "qkv", "Wqkv", "c_attn")
OUTPUT = ("o_proj", "out_proj", "dense", "o", "out_lin", "proj", "c_proj", "wo", "Wo", "to_out.0", "linear_out",
          "output.dense", "output")  # fmt: skip
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads", "encoder_attention_heads")
LAYER = re.compile(r"^(.*?\.)?(\d+)\.(.+)\.weight$")
Shapes = Mapping[str, tuple[int, ...]]
Options = dict[str, tuple[Group, ...]]
Found = Iterator[tuple[list[str], list[Part]]]  # the names used, and the structures they may have


PROVEN: dict[str, Architecture] = {}  # a proof holds for every checkpoint with this config.json and these shapes


def describe_inferred(checkpoint: Checkpoint) -> BoundModel:
    """A model without a specification: the proven spaces of its parts, everything else free."""
    headers = [(name, info.shape, str(info.dtype)) for name, info in checkpoint.tensors.items()]
    key = json.dumps([checkpoint.config, headers], sort_keys=True, default=str)
    if key not in PROVEN:
        kind = checkpoint.config.get("model_type") or "?"
        notes = [f"'{kind}' has no specification: the residual stream stays as it is, since no one says who reads it"]
        if described := checkpoint.config.get("_class_name"):
            notes = [f"'{described}' is a class of diffusers, in which no symmetry is proven: nothing is moved"]
        spaces: dict[str, Group] = {}
        floats = {name: info for name, info in checkpoint.tensors.items() if info.dtype.is_floating_point}
        patterns = {name: " ".join("_" * len(info.shape)) for name, info in floats.items()}
        try:
            if described:
                raise Unprovable("alignment runs classes of transformers alone")
            for part, proven, reasons in prove(checkpoint):
                notes += reasons
                if proven:
                    spaces |= part.spaces(proven)
                    patterns |= dict(part.named())
        except Unprovable as error:
            notes.append(f"nothing else is moved either: {error}")
            return bind_model(checkpoint, Architecture(spaces={}, tensors=patterns, notes=notes, family=kind))
        PROVEN[key] = Architecture(spaces=spaces, tensors=patterns, notes=notes, family=kind)
    return bind_model(checkpoint, PROVEN[key])


def prove(checkpoint: Checkpoint) -> list[tuple[Part, dict[str, Group], list[str]]]:
    """For every recognised part its best structure, the spaces that are proven, and what was found out."""
    guesses = propose(checkpoint)
    if not guesses:
        raise Unprovable("no feed-forward or attention is recognised by its names")
    prover = Prover(checkpoint)
    return [prover.best(alternatives) for alternatives in guesses]


# --- proposing --------------------------------------------------------------------------------------------------------
def propose(checkpoint: Checkpoint) -> list[list[Part]]:
    """For every recognised part of the layers, its possible structures."""
    shapes = {name: tuple(info.shape) for name, info in checkpoint.tensors.items()}
    stems: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name, shape in shapes.items():
        if len(shape) == 2 and (match := LAYER.match(name)):
            stems[match[1] or ""][match[3]].add(int(match[2]))
    guesses = []
    for stem, rests in stems.items():
        parts = (*feed_forwards(stem, rests, shapes), *attentions(stem, rests, shapes, checkpoint.config))
        for used, alternatives in parts:
            for part in alternatives:
                part.layers = sorted(set.intersection(*(rests[rest] for rest in used)))
            guesses.append([part for part in alternatives if part.layers and _fits(part, shapes)])
    return _with_distinct_spaces([alternatives for alternatives in guesses if alternatives])


def feed_forwards(stem: str, rests: Mapping[str, set[int]], shapes: Shapes) -> Found:
    taken: set[str] = set()
    for inputs, output in FEED_FORWARD:
        for out in [r for r in rests if r == output or r.endswith("." + output)]:
            parent = out.removesuffix(output)
            used = [*(parent + x for x in inputs), out]
            if taken & set(used) or not all(r in rests for r in used):
                continue
            taken |= set(used)
            names = [f"{stem}{{i}}.{r}" for r in used]
            ways = (0, 1) if output == "c_proj" else (0,)  # a Conv1D is stored transposed
            yield used, [_feed_forward_part(f"{stem}*.{parent}", names, shapes, way) for way in ways]


def _feed_forward_part(where: str, names: Sequence[str], shapes: Shapes, read: int) -> Part:
    """`read` is the axis of the inputs that carries the hidden units."""
    rows, size = _sample(names[0], shapes)[read], _sample(names[-1], shapes)[1 - read]
    fused = len(names) == 2 and rows == 2 * size  # gate and up in one
    scale = "up.{i}" if fused or len(names) == 3 else "unit.{i}"
    scaled = f"(ffn.{{i}} {scale})"
    axes = [f"[ffn.{{i}} | ffn.{{i}} {scale}]"] if fused else ["ffn.{i}", scaled][3 - len(names) :]
    tensors: dict[str, str] = {}
    for name, axis in zip(names[:-1], axes, strict=True):
        tensors |= _patterns(name, axis, read, shapes)
    tensors |= _patterns(names[-1], f"(ffn.{{i}} {scale}')", 1 - read, shapes, bias=False)
    signed = SignedScale(1, per=("ffn.{i}",))
    scales: tuple[Group, ...] = (signed,) if scale == "up.{i}" else (signed, Scale(1, per=("ffn.{i}",)))
    return Part(where, tensors, {"ffn.{i}": (Permutation(size),), scale: scales})


def attentions(stem: str, rests: Mapping[str, set[int]], shapes: Shapes, config: Mapping[str, Any]) -> Found:
    for names in (*SEPARATE, *((fused,) for fused in FUSED)):
        for first in [r for r in rests if r == names[0] or r.endswith("." + names[0])]:
            parent = first.removesuffix(names[0])
            used = [parent + x for x in names]
            out = _output_of(parent, rests, used)
            if out is not None and all(r in rests for r in used):
                where, full = f"{stem}*.{parent}", [f"{stem}{{i}}.{r}" for r in (*used, out)]
                heads = sorted(_values(config, HEADS))
                yield [*used, out], [p for n in heads for p in _attention_parts(where, full, n, shapes, config)]


def _attention_parts(
    where: str, names: Sequence[str], heads: int, shapes: Shapes, config: Mapping[str, Any]
) -> Iterator[Part]:
    """Every layout that the sizes allow: separate or fused projections, one key for several query heads or not."""
    *projections, out = [_sample(name, shapes) for name in names]
    transposed = len(projections) == 1 and projections[0][1] == 3 * projections[0][0]  # Conv1D
    read, written = (1, 0) if transposed else (0, 1)
    inner = out[written] // heads
    if out[written] % heads or not inner:
        return
    rows = sum(p[read] for p in projections)
    groups = (rows // inner - heads) // 2
    if groups < 1 or (heads + 2 * groups) * inner != rows or heads % groups:
        return
    outer = "head.{i}" if groups == heads else "kv.{i}"
    query = "" if groups == heads else "query.{i} "
    options: Options = {outer: (Permutation(groups),)}
    if query:
        options["query.{i}"] = (Permutation(heads // groups, per=(outer,)),)
    options["vo.{i}"] = (Invertible(inner, per=(outer,)),)
    for key, extra in _inner_spaces(inner, outer, config):
        q, k, v = f"{outer} {query}{key}", f"{outer} {_dual(key)}", f"{outer} vo.{{i}}"
        layouts = (
            [[f"({q})", f"({k})", f"({v})"]]
            if len(projections) == 3
            else [[f"[{q} | {k} | {v}]"], [f"({outer} [{query}{key} | {_dual(key)} | vo.{{i}}])"]]
        )
        for axes in layouts:
            tensors: dict[str, str] = {}
            for name, axis in zip(names[:-1], axes, strict=True):
                tensors |= _patterns(name, axis, read, shapes)
            tensors |= _patterns(names[-1], f"({outer} {query}vo.{{i}}')", written, shapes, bias=False)
            yield Part(where, tensors, {**options, **extra})


def _inner_spaces(inner: int, outer: str, config: Mapping[str, Any]) -> list[tuple[str, Options]]:
    """What queries and keys may share: anything, or what commutes with rotary positions on all or part of the head."""
    per = (outer,)
    turning = tuple(Rotary(inner, per=per, layout=layout) for layout in ("half", "interleaved") if inner % 2 == 0)
    choices: list[tuple[str, Options]] = [("qk.{i}", {"qk.{i}": (Invertible(inner, per=per), *turning)})]
    widths = {int(inner * fraction) for fraction in _values(config, ("partial_rotary_factor", "rotary_pct"))}
    for width in sorted(widths | _values(config, ("rotary_dim",))):
        if 0 < width < inner and width % 2 == 0:
            turning = tuple(Rotary(width, per=per, layout=layout) for layout in ("half", "interleaved"))
            rest = {"rotary.{i}": turning, "qk.{i}": (Invertible(inner - width, per=per),)}
            choices.insert(0, ("[rotary.{i} | qk.{i}]", rest))
    return choices


def _dual(key: str) -> str:
    return re.sub(r"(\w+\.\{i\})", r"\1'", key)


def _output_of(parent: str, rests: Mapping[str, set[int]], used: Sequence[str]) -> str | None:
    """The projection behind the heads: beside the others, or one folder up."""
    above = re.sub(r"[^.]+\.$", "", parent)
    names = [folder + name for folder in (parent, *([above] if above else [])) for name in OUTPUT]
    return next((n for n in names if n in rests and n not in used), None)


def _patterns(name: str, axis: str, number: int, shapes: Shapes, *, bias: bool = True) -> dict[str, str]:
    """Patterns of a weight whose axis `number` carries spaces, and of its bias where that axis is the output."""
    patterns = {name + ".weight": f"{axis} _" if number == 0 else f"_ {axis}"}
    return patterns | ({name + ".bias": axis} if bias and _sample(name, shapes, "bias") else {})


def _sample(name: str, shapes: Shapes, kind: str = "weight") -> tuple[int, ...]:
    """The shape of a tensor in whichever layer comes first; () when there is none."""
    pattern = re.compile(re.escape(f"{name}.{kind}").replace(re.escape("{i}"), r"\d+"))
    return next((shape for other, shape in shapes.items() if pattern.fullmatch(other)), ())


def _fits(part: Part, shapes: Shapes) -> bool:
    spaces = part.spaces({})
    try:
        for name, pattern in part.named():
            bind(pattern, shapes[name], spaces, name)
    except (SpecificationError, KeyError):
        return False
    return True


def _with_distinct_spaces(guesses: list[list[Part]]) -> list[list[Part]]:
    """Two parts of one layer (an encoder's and a decoder's attention, say) get a word in front of their spaces."""
    owners: dict[str, set[str]] = defaultdict(set)
    for alternatives in guesses:
        for part in alternatives:
            for space in part.options:
                owners[space].add(part.where)
    for alternatives in guesses:
        for part in alternatives:
            if any(len(owners[space]) > 1 for space in part.options):
                word = re.sub(r"\W+", "_", part.where).strip("_") + "."
                part.tensors = {n: re.sub(r"(\w+\.\{i\})", rf"{word}\1", p) for n, p in part.tensors.items()}
                part.options = {
                    word + space: tuple(replace(g, per=tuple(word + p for p in g.per)) for g in groups)
                    for space, groups in part.options.items()
                }
    return guesses


def _values(config: Any, keys: Sequence[str]) -> set[Any]:
    """What config.json says under these names, at any depth (a text and an image part may differ)."""
    if not isinstance(config, Mapping):
        return set()
    here = {config[k] for k in keys if isinstance(config.get(k), int | float) and 0 < config[k] < LARGEST}
    return here.union(*(_values(value, keys) for value in config.values()))
