"""CLIP and SigLIP: a tower for text and one for images, a stream each.

Where they meet, embeddings are the output: the joint space stays.
"""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, Gauge, KeyBias, Norm, Shift, StreamNorm, ValueBias
from isomerge.symmetry.groups import Group, Permutation, RotationFixingOnes

TEXT, VISION = "text", "vision"
LETTERS = {TEXT: "i", VISION: "j"}
TABLES = {
    TEXT: ("token_embedding.weight", "position_embedding.weight"),
    VISION: ("patch_embedding.weight", "position_embedding.weight"),
}
SIZES = {"hidden_size": (512, 768), "intermediate_size": (2048, 3072), "num_hidden_layers": (12, 12),
         "num_attention_heads": (8, 12)}  # fmt: skip
"""What a part of config.json does not say, of CLIP's text and vision tower."""
SIGLIP_SIZES = {**SIZES, "hidden_size": (768, 768), "intermediate_size": (3072, 3072), "num_attention_heads": (12, 12)}


@architecture("clip", "clip_text_model", "clip_vision_model", summary="two pre-LayerNorm towers, joint space held")
def clip(facts: Facts) -> Architecture:
    towers = [Tower(part, facts, SIZES, rotates=part == TEXT) for part in parts_of(facts, "clip")]
    tensors: dict[str, str] = {
        "logit_scale?": "",
        "text_projection.weight?": "_joint text.residual'",
        "visual_projection.weight?": "_joint vision.residual'",
        "vision_model.embeddings.class_embedding?": "vision.residual",
        **parts.labels("classifier", "vision.residual'"),
    }
    norms: list[Norm | StreamNorm] = []
    for tower in towers:
        if tower.part == TEXT:
            norms.append(Norm(tower.base + "final_layer_norm", ("text_projection.weight",)))
            tensors |= parts.layer_norms(tower.base + "final_layer_norm", space=tower.stream)
        else:
            norms.append(Norm(tower.base + "post_layernorm", ("visual_projection.weight",)))
            stream_norms = (tower.base + "pre_layrnorm", tower.base + "post_layernorm")
            tensors |= parts.layer_norms(*stream_norms, space=tower.stream)
    # The classifier of images reads the stream as it is, so the mean of what is written there arrives.
    centred = [tower for tower in towers if not (tower.part == VISION and facts.head == "image")]
    return both(towers, facts, tensors, norms, [name for tower in centred for name in tower.writers()])


@architecture(
    "siglip", "siglip_text_model", "siglip_vision_model", summary="two pre-LayerNorm towers, joint space held"
)
def siglip(facts: Facts) -> Architecture:
    # The pooling head's one matrix reads both its own probe and the normed stream: gains cannot be folded into it.
    pooled = facts.part("vision_config" if facts["model_type"] == "siglip" else "").get("vision_use_head", True)
    towers = [
        Tower(part, facts, SIGLIP_SIZES, rotates=part == TEXT or not pooled) for part in parts_of(facts, "siglip")
    ]
    tensors: dict[str, str] = {
        "logit_scale?": "_",
        "logit_bias?": "_",
        **parts.labels("classifier", "vision.residual'"),
    }
    norms: list[Norm | StreamNorm] = []
    spaces: dict[str, Group] = {}
    for tower in towers:
        if tower.part == TEXT:
            head, last = tower.base + "head", tower.base + "final_layer_norm"
            tensors |= {head + ".weight": "_joint text.residual'", head + ".bias": "_joint"}
            norms.append(Norm(last, (head + ".weight",)))
        else:
            last = tower.base + "post_layernorm"
            tensors |= pooling_head(tower.base + "head.") if pooled else {}
            spaces |= pooling_spaces(tower) if pooled else {}
            norms += [] if pooled else [Norm(last, ("classifier.weight",))]
            tensors[tower.base + "embeddings.patch_embedding.bias"] = tower.stream
        tensors |= parts.layer_norms(last, space=tower.stream)
    writers = [name for tower in towers for name in tower.writers()]
    return both(towers, facts, tensors, norms, writers, spaces)


def parts_of(facts: Facts, whole: str) -> list[str]:
    """The towers that a model has."""
    if facts["model_type"] != whole:
        return [TEXT if "text" in facts["model_type"] else VISION]
    return [VISION] if facts.head == "image" else [TEXT, VISION]


class Tower:
    """One of the two: its sizes, and the names of its tensors."""

    def __init__(self, part: str, facts: Facts, sizes: dict[str, tuple[int, int]], rotates: bool) -> None:
        own = facts.part(f"{part}_config") if f"{part}_config" in facts.config else facts
        sized = {key: own.get(key, default[part == VISION]) for key, default in sizes.items()}
        self.part, self.rotates = part, rotates
        self.width, self.units, self.layers, self.heads = sized.values()
        self.relu = own.get("hidden_act", "quick_gelu") == "relu"
        self.stream, self.letter = f"{part}.residual", LETTERS[part]
        self.base = f"{part}_model."
        self.layer = f"{self.base}encoder.layers.{{{self.letter}}}."
        self.words = {word: f"{part}.{word}" for word in ("residual", "head", "qk", "vo", "ffn", "unit")}

    def spaces(self) -> dict[str, Group]:
        own: dict[str, Group] = {
            "residual": RotationFixingOnes(self.width) if self.rotates else Permutation(self.width),
            **parts.head_spaces(self.heads, self.width // self.heads),
            "ffn.{i}": Permutation(self.units),
            **parts.relu_units(self.relu),
        }
        return parts.renamed(own, self.words, self.letter)

    def tensors(self) -> dict[str, str]:
        attention, mlp = self.layer + "self_attn.", self.layer + "mlp."
        own = {
            **parts.query_key(attention + "q_proj", attention + "k_proj"),
            **parts.value_output(attention + "v_proj", attention + "out_proj"),
            **parts.feed_forward(mlp + "fc1", mlp + "fc2", self.relu),
            **parts.layer_norms(self.layer + "layer_norm1", self.layer + "layer_norm2"),
        }
        table, positions = (self.base + "embeddings." + name for name in TABLES[self.part])
        return {
            table: "_vocab text.residual" if self.part == TEXT else "vision.residual _channels _height _width",
            positions: f"_positions {self.stream}",
            **parts.renamed(own, self.words, self.letter),
        }

    def norms(self) -> list[Norm]:
        attention = self.layer + "self_attn."
        return [
            Norm(self.layer + "layer_norm1", tuple(attention + f"{x}_proj.weight" for x in "qkv")),
            Norm(self.layer + "layer_norm2", (self.layer + "mlp.fc1.weight",)),
        ]

    def gauges(self) -> list[Gauge]:
        attention, letter = self.layer + "self_attn.", "{" + self.letter + "}"
        return [
            KeyBias(attention + "k_proj.bias", f"{self.part}.qk.{letter}"),
            ValueBias(attention + "v_proj.bias", f"{self.part}.vo.{letter}", attention + "out_proj.weight"),
            *([Shift(self.tables())] if self.part == TEXT else []),
        ]

    def tables(self) -> tuple[str, str]:
        first, second = TABLES[self.part]
        return self.base + "embeddings." + first, self.base + "embeddings." + second

    def writers(self) -> list[str]:
        """What only norms read."""
        more = ["embeddings.class_embedding", "embeddings.patch_embedding.bias"]
        branches = [self.layer + name for name in ("self_attn.out_proj", "mlp.fc2")]
        return [
            *self.tables(),
            *(self.base + name for name in more),
            *(branch + kind for branch in branches for kind in (".weight", ".bias")),
        ]


def both(
    towers: list[Tower],
    facts: Facts,
    tensors: dict[str, str],
    norms: list[Norm | StreamNorm],
    writers: list[str],
    spaces: dict[str, Group] | None = None,
) -> Architecture:
    """The towers with what joins them; alone, a tower may be saved without its name in front."""
    return Architecture(
        prefix="" if len(towers) > 1 or facts.head == "image" else towers[0].base,
        repeat={tower.letter: tower.layers for tower in towers},
        spaces={**{s: g for tower in towers for s, g in tower.spaces().items()}, **(spaces or {})},
        tensors={**{n: p for tower in towers for n, p in tower.tensors().items()}, **tensors},
        norms=[*(norm for tower in towers for norm in tower.norms()), *norms],
        gauges=[gauge for tower in towers for gauge in tower.gauges()],
        writers=writers,
    )


# --- SigLIP's pooling head: one query of its own, and a feed-forward in the joint space -------------------------------
def pooling_spaces(tower: Tower) -> dict[str, Group]:
    own = parts.head_spaces(tower.heads, tower.width // tower.heads)
    named = {"pool." + space.removesuffix(".{i}"): group for space, group in own.items()}
    units = {"pool.ffn": Permutation(tower.units), **parts.relu_units(tower.relu, "pool.ffn", "pool.unit")}
    head = {s: type(g)(g.size, ("pool.head",)) if g.per else g for s, g in named.items()}
    return {**head, **units}


def pooling_head(name: str) -> dict[str, str]:
    axes = "[pool.head pool.qk | pool.head pool.qk' | pool.head pool.vo]"
    return {
        name + "probe": "_ _ vision.residual",
        name + "attention.in_proj_weight": axes + " vision.residual'",
        name + "attention.in_proj_bias": axes,
        name + "attention.out_proj.weight": "_joint (pool.head pool.vo')",
        name + "attention.out_proj.bias": "_joint",
        name + "layernorm.weight": "_joint",
        name + "layernorm.bias": "_joint",
        name + "mlp.fc1.weight": "pool.ffn _joint",
        name + "mlp.fc1.bias": "pool.ffn",
        name + "mlp.fc2.weight": "_joint pool.ffn",
        name + "mlp.fc2.bias": "_joint",
    }
