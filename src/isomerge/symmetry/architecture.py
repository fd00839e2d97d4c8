"""The specification of an architecture: data, not code.

It names the spaces with their groups, gives one axis pattern per checkpoint tensor, and declares the gauges: changes of
the weights that change nothing and are not group elements (a norm's gain that could as well stand in its readers, a
bias that softmax drops). Names are those on disk.

Conventions for space names, read by `--only` and `--layers`: the number at the end is the layer, and the word before
it says the part of the model: `head`, `kv`, `cross`, `gain`, `latent`, `rotary`, and `channel` and `state` of what
stands in for it, are attention, `ffn`, `expert` feed-forward, `residual` a residual stream. Most models have one
stream, called just that; two towers or stages of several widths have one each (`vision.residual`, `stage0.residual`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import Formatter
from typing import Any

from isomerge.errors import SpecificationError
from isomerge.symmetry.groups import Group

RESIDUAL = "residual"
LARGEST = 2**31  # no size of a model is as large
ATTENTION_WORDS = {"head", "kv", "cross", "gain", "latent", "rotary", "channel", "state"}
FFN_WORDS = {"ffn", "expert"}


@dataclass(frozen=True)
class Norm:
    """A norm in front of its readers: gain and bias can be folded into them, exactly.

    `offset` is added to the stored gain (Gemma stores w for a gain of 1 + w). `space` is the stream, or a space inside
    a layer that has a norm of its own.
    """

    name: str
    readers: tuple[str, ...]
    kind: str = "layer"  # or "rms"
    offset: float = 0.0
    space: str = RESIDUAL


@dataclass(frozen=True)
class StreamNorm:
    """A LayerNorm *on* the residual stream (post-norm models): its bias alone is a gauge.

    It can move into the biases of the readers and of `writer`, the next bias added to the stream (None at the end).
    """

    name: str
    readers: tuple[str, ...]
    writer: str | None = None


@dataclass(frozen=True)
class BranchScale:
    """A gain per unit of the stream on what a branch adds to it (LayerScale): it can be folded into the branch's last
    layer."""

    name: str  # the tensor
    writer: str  # weight of the layer whose output it scales; its bias is scaled too


@dataclass(frozen=True)
class BatchNorm:
    """A norm with running statistics behind a convolution without bias: any factor per unit, of either sign, can stand
    in the convolution and its statistics alike."""

    name: str
    writer: str  # weight of the convolution in front
    eps: float = 1e-5


@dataclass(frozen=True)
class KeyBias:
    """The part of a key bias that softmax drops: the segments of `bias` that end in the dual of `space`."""

    bias: str
    space: str


@dataclass(frozen=True)
class ValueBias:
    """A value bias, which passes through attention unchanged and can stand in the output bias."""

    bias: str
    space: str
    output: str  # weight of the output projection; its bias takes the value bias


@dataclass(frozen=True)
class Shift:
    """A vector that can move between two embedding tables that are always added (declared; not fixed)."""

    tables: tuple[str, str]


@dataclass(frozen=True)
class RowShift:
    """A vector that can be added to every row of a router or of a table of position biases (declared; not fixed)."""

    weight: str


Gauge = KeyBias | ValueBias | Shift | RowShift | BranchScale | BatchNorm


@dataclass(frozen=True)
class Architecture:
    """Spaces, tensors and gauges of one model; made by a function of its `Facts`.

    Keys and names may be templates: `{i}` is repeated over `repeat["i"]`, a count or the numbers themselves where only
    some layers have a part; a letter of `stack` stays, and the tensors
    it numbers on disk are read as one, laid one after the other along the axis that starts with the stack's space. A
    tensor name that ends in `?` may be absent.
    """

    spaces: Mapping[str, Group]
    tensors: Mapping[str, str]
    norms: Sequence[Norm | StreamNorm] = ()
    gauges: Sequence[Gauge] = ()
    writers: Sequence[str] = ()  # LayerNorm models: tensors whose mean over the stream's units never arrives anywhere
    repeat: Mapping[str, int | Sequence[int]] = field(default_factory=dict)
    stack: Mapping[str, str] = field(
        default_factory=dict
    )  # letter -> the space it numbers, or several, outermost first
    prefix: str = ""  # files in the wild may omit it
    other_prefixes: Sequence[str] = ()  # … or some head classes have one of these instead
    tied: Mapping[str, tuple[str, float]] = field(default_factory=dict)  # absent tensor -> (its source, factor)
    untied_config: Mapping[str, Any] = field(default_factory=dict)  # what config.json must say once untied
    added: Mapping[str, float] = field(default_factory=dict)  # tensor -> what its value is above what is stored
    elsewhere: Sequence[str] = ()  # prefixes of tensors that never meet the stream: towers for other kinds of data
    notes: Sequence[str] = ()
    family: str = ""

    def expanded(self) -> Architecture:
        """Every template written out."""
        spaces: dict[str, Group] = {}
        for template, group in self.spaces.items():
            for values in self._values(template):
                name = template.format_map(values)
                spaces[name] = replace(group, per=tuple(p.format_map(values) for p in group.per))
        tensors = {
            _fill(template, values): _fill(pattern, values)
            for template, pattern in self.tensors.items()
            for values in self._values(template, pattern)
        }
        norms = [self._norm(norm, values) for norm in self.norms for values in self._values(norm.name)]
        gauges = [_fill_gauge(g, v) for g in self.gauges for v in self._values(_first_name(g))]
        return replace(
            self, spaces=spaces, tensors=tensors, norms=norms, gauges=gauges, writers=self._all(self.writers, {}),
            added={_fill(name, values): a for name, a in self.added.items() for values in self._values(name)},
            repeat={},
        )  # fmt: skip

    def _values(self, *templates: str, fixed: Collection[str] = ()) -> list[dict[str, int]]:
        letters = [x for x in self.repeat if x not in fixed and any(x in _letters(t) for t in templates)]
        return [
            dict(zip(letters, numbers, strict=True))
            for numbers in itertools.product(*(self._numbers(x) for x in letters))
        ]

    def _numbers(self, letter: str) -> Sequence[int]:
        numbers = self.repeat[letter]
        return range(numbers) if isinstance(numbers, int) else numbers

    def _norm(self, norm: Norm | StreamNorm, values: Mapping[str, int]) -> Norm | StreamNorm:
        name, readers = norm.name.format_map(values), self._all(norm.readers, values)
        if isinstance(norm, StreamNorm) and norm.writer:
            return replace(norm, name=name, readers=readers, writer=_fill(norm.writer, values))
        if isinstance(norm, Norm):
            return replace(norm, name=name, readers=readers, space=_fill(norm.space, values))
        return replace(norm, name=name, readers=readers)

    def _all(self, templates: Iterable[str], fixed: Mapping[str, int]) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(_fill(t, {**values, **fixed}) for t in templates for values in self._values(t, fixed=fixed))
        )

    def restricted(self, rule: Callable[[str, Group], Group], note: str = "") -> Architecture:
        """The same architecture with smaller groups, `rule(space, group)` saying which."""
        spaces = {name: rule(name, group) for name, group in self.spaces.items()}
        return replace(self, spaces=spaces, notes=[*self.notes, *([note] if note else [])])

    def frozen(self, names: Iterable[str], note: str = "") -> Architecture:
        """The same architecture with some spaces held at the identity."""
        held = set(names)
        return self.restricted(lambda n, g: g.restricted(None) if n in held else g, note)

    @property
    def streams(self) -> list[str]:
        """The residual streams that may move, from the first to the last."""
        return [name for name, group in self.spaces.items() if is_stream(name) and not group.per and group.movable]

    def root(self, space: str) -> str:
        """The outermost space this one is nested in: spaces with one root are solved together."""
        parents = self.spaces[space].per
        return self.root(parents[0]) if parents else space

    def movable(self) -> list[str]:
        return sorted(name for name, group in self.spaces.items() if group.movable)

    def moves(self, space: str) -> bool:
        """Whether the model has this space and it may move."""
        return space in self.spaces and self.spaces[space].movable


def is_stream(space: str) -> bool:
    """Whether a space is a residual stream, of the whole model or of a part of it.

    >>> is_stream("residual"), is_stream("text.residual"), is_stream("text.ffn.0")
    (True, True, False)
    """
    return space.split(".")[-1] == RESIDUAL


def part_of(space: str) -> str:
    """attention, ffn, residual, or "head" (task heads, embedding factors).

    >>> part_of("decoder.cross.3"), part_of("ffn.0"), part_of("pooler")
    ('attention', 'ffn', 'head')
    """
    words = set(space.split("."))
    if is_stream(space):
        return RESIDUAL
    if words & ATTENTION_WORDS:
        return "attention"
    return "ffn" if words & FFN_WORDS else "head"


def layer_of(space: str) -> int | None:
    number = re.search(r"\.(\d+)$", space)
    return int(number.group(1)) if number else None


def _letters(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def _fill(template: str, values: Mapping[str, int]) -> str:
    for letter, number in values.items():
        template = template.replace("{" + letter + "}", str(number))
    return template


def _first_name(gauge: Gauge) -> str:
    if isinstance(gauge, RowShift):
        return gauge.weight
    if isinstance(gauge, BranchScale | BatchNorm):
        return gauge.name
    return gauge.tables[0] if isinstance(gauge, Shift) else gauge.bias


def _fill_gauge(gauge: Gauge, values: Mapping[str, int]) -> Gauge:
    if isinstance(gauge, Shift):
        return Shift((_fill(gauge.tables[0], values), _fill(gauge.tables[1], values)))
    if isinstance(gauge, RowShift):
        return RowShift(_fill(gauge.weight, values))
    if isinstance(gauge, BranchScale | BatchNorm):
        return replace(gauge, name=_fill(gauge.name, values), writer=_fill(gauge.writer, values))
    if isinstance(gauge, KeyBias):
        return KeyBias(_fill(gauge.bias, values), _fill(gauge.space, values))
    return ValueBias(_fill(gauge.bias, values), _fill(gauge.space, values), _fill(gauge.output, values))


@dataclass(frozen=True)
class Facts:
    """What a family's function may look at: config.json, the task head, and whether input and output table are tied."""

    config: Mapping[str, Any]
    head: str  # lm, sequence, token, question, image, pretraining, bare
    tied: bool  # the output table is the input table, and stays so

    def __getitem__(self, key: str) -> Any:
        """What the family cannot do without: `model_type`, and sizes, which are positive whole numbers."""
        value = self.config.get(key)
        if key == "model_type" and isinstance(value, str):
            return value
        if type(value) is not int or not 0 < value < LARGEST:
            raise self._wrong(key, "is missing" if value is None else f"is {str(value)[:60]!r}, and must be a size")
        return value

    def get(self, key: str, default: Any) -> Any:
        """What the family can do without: a value of the kind that its default is."""
        value = self.config.get(key)
        if value is None:
            return default
        wanted: Any = (int, float) if type(default) is float else type(default)
        good = isinstance(value, wanted) and isinstance(value, bool) == isinstance(default, bool)
        if not good or (type(default) is int and not min(default, 1) <= value < LARGEST):
            raise self._wrong(key, f"is {str(value)[:60]!r}, and must be like {default!r}")
        return value

    def sizes(self, key: str, default: Sequence[int]) -> tuple[int, ...]:
        """A size for each of several stages."""
        value = self.config.get(key)
        value = default if value is None else value
        if (
            not isinstance(value, Sequence)
            or not value
            or any(type(n) is not int or not 0 < n < LARGEST for n in value)
        ):
            raise self._wrong(key, f"is {str(value)[:60]!r}, and must be a list of sizes")
        return tuple(value)

    def part(self, key: str) -> Facts:
        """The facts of one part of a model of several, as far as config.json has them."""
        value = self.config.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, f"is {str(value)[:60]!r}, and must be an object")
        return replace(self, config={"model_type": self.config.get("model_type"), **value})

    def _wrong(self, key: str, why: str) -> SpecificationError:
        return SpecificationError(
            f"Reading config.json of a '{self.config.get('model_type')}' model: {key} {why}. Copy the model's own "
            "config.json again."
        )
