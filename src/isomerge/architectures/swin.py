"""Swin: stages of several widths, a stream each; merged patches read four copies of the stream at once.

A norm stands on the first stream, which only permutes; the later ones turn about the ones vector.
"""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, Gauge, KeyBias, Norm, RowShift, ValueBias
from isomerge.symmetry.groups import Group, Permutation, RotationFixingOnes

EMBEDDINGS = "swin.embeddings."
PATCHES = EMBEDDINGS + "patch_embeddings.projection"


@architecture("swin", summary="pre-LayerNorm encoder in stages, windows, position bias, classes of images")
def swin(facts: Facts) -> Architecture:
    depths, width = facts.sizes("depths", (2, 2, 6, 2)), facts.get("embed_dim", 96)
    heads = facts.sizes("num_heads", (3, 6, 12, 24))
    last = f"stage{len(depths) - 1}.residual"
    spaces: dict[str, Group] = {}
    tensors = {
        PATCHES + ".weight": "stage0.residual _channels _height _width",
        PATCHES + ".bias": "stage0.residual",
        EMBEDDINGS + "mask_token?": "_ _ stage0.residual",
        EMBEDDINGS + "position_embeddings?": "_ _positions stage0.residual",
        **parts.layer_norms(EMBEDDINGS + "norm", space="stage0.residual"),
        **parts.layer_norms("swin.layernorm", space=last),
        **parts.labels("classifier", last + "'"),
    }
    norms, gauges = list[Norm](), list[Gauge]()
    # A norm reads the patches as they are projected.
    writers = [PATCHES + ".weight", PATCHES + ".bias", EMBEDDINGS + "norm.bias"]
    for number, depth in enumerate(depths):
        stage = WindowStage(number, depth, width * 2**number, heads[number], facts)
        spaces |= stage.spaces()
        tensors |= stage.tensors() | (stage.merging() if number + 1 < len(depths) else {})
        norms += stage.norms()
        gauges += stage.gauges()
        writers += stage.writers(last=number + 1 == len(depths))
    norms.append(Norm("swin.layernorm", ("classifier.weight",)))
    return Architecture(
        prefix="swin.",
        repeat={f"block{number}": depth for number, depth in enumerate(depths)},
        spaces=spaces,
        tensors=tensors,
        norms=norms,
        gauges=gauges,
        writers=writers,
    )


class WindowStage:
    """One stage: its sizes, and the names of its tensors."""

    def __init__(self, number: int, depth: int, width: int, heads: int, facts: Facts) -> None:
        self.number, self.width, self.heads = number, width, heads
        self.units = int(facts.get("mlp_ratio", 4.0) * width)
        self.relu = facts.get("hidden_act", "gelu") == "relu"
        self.letter, self.stream = f"block{number}", f"stage{number}.residual"
        self.base = f"swin.encoder.layers.{number}."
        self.block = f"{self.base}blocks.{{{self.letter}}}."
        self.attention, self.output = self.block + "attention.self.", self.block + "attention.output.dense"
        self.words = {word: f"stage{number}.{word}" for word in ("residual", "head", "qk", "vo", "ffn", "unit")}

    def spaces(self) -> dict[str, Group]:
        own: dict[str, Group] = {
            "residual": RotationFixingOnes(self.width) if self.number else Permutation(self.width),
            **parts.head_spaces(self.heads, self.width // self.heads),
            "ffn.{i}": Permutation(self.units),
            **parts.relu_units(self.relu),
        }
        return parts.renamed(own, self.words, self.letter)

    def tensors(self) -> dict[str, str]:
        own = {
            **parts.query_key(self.attention + "query", self.attention + "key", bias="?"),
            **parts.value_output(self.attention + "value", self.output, bias="?"),
            self.attention + "relative_position_bias_table": "_positions head.{i}",
            **parts.feed_forward(self.block + "intermediate.dense", self.block + "output.dense", self.relu),
            **parts.layer_norms(self.block + "layernorm_before", self.block + "layernorm_after"),
        }
        return parts.renamed(own, self.words, self.letter)

    def merging(self) -> dict[str, str]:
        """Four patches become one of twice the width."""
        norm = self.base + "downsample.norm"
        return {
            norm + ".weight": f"(_four |{self.stream}|)",
            norm + ".bias": f"(_four {self.stream})",
            self.base + "downsample.reduction.weight": f"stage{self.number + 1}.residual (_four {self.stream}')",
        }

    def norms(self) -> list[Norm]:
        readers = tuple(self.attention + f"{x}.weight" for x in ("query", "key", "value"))
        return [
            Norm(self.block + "layernorm_before", readers),
            Norm(self.block + "layernorm_after", (self.block + "intermediate.dense.weight",)),
            Norm(self.base + "downsample.norm", (self.base + "downsample.reduction.weight",)),
        ]

    def gauges(self) -> list[Gauge]:
        qk, vo = (f"stage{self.number}.{word}.{{{self.letter}}}" for word in ("qk", "vo"))
        return [
            KeyBias(self.attention + "key.bias", qk),
            ValueBias(self.attention + "value.bias", vo, self.output + ".weight"),
            RowShift(self.attention + "relative_position_bias_table"),
        ]

    def writers(self, last: bool) -> list[str]:
        """Where patches are merged, the mean over one is seen beside those of its neighbours, unless all have it."""
        branches = (self.output, self.block + "output.dense")
        merged = f"swin.encoder.layers.{self.number - 1}.downsample.reduction.weight"
        return [
            *(name + ".bias" for name in branches),
            *([*(name + ".weight" for name in branches), merged] if last else []),
        ]
