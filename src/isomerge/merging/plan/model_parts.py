"""The build of a model, read off its tensors' names: parts, layers, what comes before and after them.

Merging needs no table of architectures: layers are numbered, and config.json says how many there are.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isomerge.checkpoint import Checkpoint

DEPTH_KEYS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers",
)  # fmt: skip
VISION = re.compile(r"(?:^|\.)(?:visual|vision|image|img)")
AUDIO = re.compile(r"(?:^|\.)audio")
PROJECTOR = re.compile(r"projector|merger|connector")
BEFORE = re.compile(
    r"embed|wte|wpe|position|pos_emb|rotary|patch|feature_|cls_token|mask_token|token_type|project_in|pre_layrnorm|"
    r"(^|\.)(conv1|conv2|stem|shared)\."
)
AFTER = re.compile(r"head|embed_out|unembed|output|classifier|predictions")
TABLE = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings?|tok_embeddings|token_embedding|embed_in|shared|embeddings?)\.weight$"
)
HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_layer|output|proj_out|vocab_projector|decoder)\.weight$")
VOCABULARY = re.compile(r"embed|wte|head|vocab|shared|predictions|output|proj_out|(^|\.)decoder\.(weight|bias)$")
NOT_VOCABULARY = re.compile(r"position|pos_emb|token_type|wpe|norm|dense|patch|transform\.")
NUMBER = re.compile(r"(^|\.)\d+\.")
ALIASES = {"vision_model": "vision_tower", "language_model": "text_decoder"}


@dataclass
class ModelPart:
    """One module of a model: a stack of layers with what is around it."""

    name: str
    prefix: str = ""
    """'model.layers' of 'model.layers.0.mlp.weight'."""
    layers: list[list[str]] = field(default_factory=list)
    """For every layer, what follows the number in its tensors' names."""
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return len(self.layers)

    @property
    def beyond(self) -> list[str]:
        """Numbered like layers, but more than config.json counts: the layers that predict further tokens."""
        return [name for name in self.after if self.prefix and re.match(re.escape(self.prefix) + r"\.\d+\.", name)]

    def layer_tensor(self, layer: int, rest: str) -> str:
        return f"{self.prefix}.{layer}.{rest}" if self.prefix else f"{layer}.{rest}"


@dataclass
class ModelParts:
    """All parts of one checkpoint."""

    checkpoint: Checkpoint
    parts: dict[str, ModelPart]
    table: str | None
    """The input embedding."""

    def is_vocabulary(self, name: str) -> bool:
        """Whether axis 0 of this tensor counts the vocabulary."""
        info = self.checkpoint.tensors.get(name)
        if info is None or not info.shape or not VOCABULARY.search(name) or NOT_VOCABULARY.search(name):
            return False
        sizes = set(values_of(self.checkpoint.config, ("vocab_size",)))
        if self.table is not None:
            sizes.add(self.checkpoint.tensors[self.table].shape[0])
        return info.shape[0] in sizes

    def stand_in(self, name: str) -> str | None:
        """What a tensor that is not stored is tied to: a table to the input table, a head's bias to its twin."""
        if name.endswith(".decoder.bias") and (twin := name.replace(".decoder.", ".")) in self.checkpoint.tensors:
            return twin
        if NUMBER.search(name) or self.table is None:
            return None
        tied = TABLE.search(name) or (HEAD.search(name) and tie_flag(self.checkpoint.config) is not False)
        return self.table if tied else None


def read_build(checkpoint: Checkpoint, wanted: Sequence[str] = ()) -> ModelParts:
    """The parts of a checkpoint. Prefixes among the names `wanted`, those a recipe uses, become parts of their own."""
    names = list(checkpoint.tensors)
    stacks = numbered(names)
    roles = _roles(names, stacks)
    prefixes = [w for w in wanted if w not in set(roles.values()) and ALIASES.get(w) not in set(roles.values())]
    members: dict[str, list[str]] = defaultdict(list)
    for name in names:
        own = [p for p in prefixes if name.startswith(p + ".")]
        members[max(own, key=len) if own else roles[name]].append(name)
    depths = set(values_of(checkpoint.config, DEPTH_KEYS))
    extra = sum(values_of(checkpoint.config, ("num_nextn_predict_layers",)))
    parts = {}
    for part, inside in members.items():
        parts[part] = _part(part, inside, depths, extra)
    tables = [name for name in names if TABLE.search(name) and len(checkpoint.tensors[name].shape) == 2]
    tables = [name for name in tables if not NOT_VOCABULARY.search(name) and not VISION.search(name)]
    table = max(tables, key=lambda name: (checkpoint.tensors[name].shape[0], "shared" in name), default=None)
    return ModelParts(checkpoint, parts, table)


def part_called(build: ModelParts, name: str) -> str | None:
    """The part a recipe means, by its own name or mergekit's."""
    return name if name in build.parts else ALIASES.get(name) if ALIASES.get(name) in build.parts else None


def numbered(names: Iterable[str]) -> dict[str, dict[int, list[str]]]:
    """Stacks by prefix: for every number, what follows it. Only the outermost number counts: experts are no layers."""
    stacks: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        words = name.split(".")
        at = next((i for i, word in enumerate(words[:-1]) if word.isdigit()), None)
        if at is not None:
            stacks[".".join(words[:at])][int(words[at])].append(".".join(words[at + 1 :]))
    return stacks


def _roles(names: list[str], stacks: Mapping[str, Any]) -> dict[str, str]:
    """mergekit's name for the part that each tensor belongs to."""
    prefixes = [prefix.split(".") for prefix in stacks]
    two_sided = any("encoder" in p for p in prefixes) and any("decoder" in p for p in prefixes)

    def role(name: str) -> str:
        component, slash, _ = name.partition("/")
        if slash:  # of a pipeline, whose components are merged each by itself
            return component
        words = name.split(".")
        start = ".".join(words[:3])
        if PROJECTOR.search(name):
            return "multi_modal_projector"
        if VISION.search(start):
            return "vision_tower"
        if AUDIO.search(start):
            return "audio_tower"
        if two_sided:
            return "encoder" if "encoder" in words else "decoder" if "decoder" in words[:-1] else "shared"
        return "text_decoder"

    roles = {name: role(name) for name in names}
    if two_sided and "vision_tower" in roles.values():  # the encoder is the image's: nothing else has one
        roles = {n: "text_decoder" if r in ("encoder", "decoder", "shared") else r for n, r in roles.items()}
    if len(set(roles.values()) - {"multi_modal_projector"}) == 1:
        return dict.fromkeys(names, "default")
    return roles


def _part(name: str, inside: list[str], depths: set[int], extra: int) -> ModelPart:
    stacks = {p: s for p, s in numbered(inside).items() if sorted(s) == list(range(len(s)))}

    def rank(prefix: str) -> tuple[bool, int]:
        stack = stacks[prefix]
        return len(stack) in depths or len(stack) - extra in depths, sum(map(len, stack.values()))

    chosen = max(stacks, key=rank, default=None)
    if chosen is not None and not rank(chosen)[0] and (depths or len(stacks[chosen]) < 2):
        chosen = None  # `classifier.0`, `mlp.0`: a sequence of modules, not the layers config.json counts
    part = ModelPart(name)
    if chosen is not None:
        count = len(stacks[chosen])
        depth = count - extra if count not in depths else count
        part.prefix = chosen
        part.layers = [stacks[chosen][i] for i in range(depth)]
    held = {part.layer_tensor(i, rest) for i, rests in enumerate(part.layers) for rest in rests}
    for tensor in inside:
        if tensor not in held:
            first = BEFORE.search(tensor) and not AFTER.search(tensor)
            (part.before if first else part.after).append(tensor)
    return part


def values_of(config: Any, keys: Sequence[str]) -> Iterator[int]:
    """The whole numbers that config.json has under these keys, at any depth."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key in keys and isinstance(value, int) and not isinstance(value, bool):
                yield value
            yield from values_of(value, keys)


def of_another_class(names: Iterable[str], held: Collection[str]) -> str | None:
    """Whether a model has such tensors under names of another class: a body has `norm` where a model with a head has
    `model.norm`. As words that go on after the model's name.

    >>> of_another_class(["lm_head.weight", "model.norm.weight"], {"norm.weight", "layers.0.up.weight"})
    "has 'norm.weight' for 'model.norm.weight', so it was saved by another class; save all with one, that of the head"
    """
    longer = {name.partition(".")[2]: name for name in held}
    for name in names:
        own = name.partition(".")[2] if name.partition(".")[2] in held else longer.get(name)
        if own and "." in own:
            return f"has '{own}' for '{name}', so it was saved by another class; save all with one, that of the head"
    return None


def tie_flag(config: Mapping[str, Any]) -> bool | None:
    """Whether the output table is the input table, if config.json says so."""
    for holder in (config, config.get("text_config") or {}):
        if holder.get("tie_word_embeddings") is not None:
            return bool(holder["tie_word_embeddings"])
    return None


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts layer 2 before layer 10."""
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"(\d+)", name) if word]
