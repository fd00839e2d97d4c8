"""ResNet: convolutions with batch norms in stages; every unit has a positive scale, since only ReLUs read it.

Stages of several widths have a stream each. A convolution's own size is a gauge of the batch norm behind it.
"""

import re
from dataclasses import dataclass

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, BatchNorm, Facts, Shift
from isomerge.symmetry.groups import Group, Permutation, Scale

STEM = "resnet.embedder.embedder."


@architecture("resnet", summary="convolutions with batch norms in stages, classes of images")
def resnet(facts: Facts) -> Architecture:
    build = Build(relu=facts.get("hidden_act", "relu") == "relu")
    widths, depths = facts.sizes("hidden_sizes", (256, 512, 1024, 2048)), facts.sizes("depths", (3, 4, 6, 3))
    stem, bottleneck = facts.get("embedding_size", 64), facts.get("layer_type", "bottleneck") == "bottleneck"
    # Without a projection the first stage goes on with the stream of the stem.
    joined = stem == widths[0] and not facts.get("downsample_in_first_stage", False)
    before = build.space("stage0.residual" if joined else "stem.residual", stem)
    build.convolution(STEM, before, "_channels")
    for number, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        stream = build.space(f"stage{number}.residual", width)
        for layer in range(depth):
            name = f"resnet.encoder.stages.{number}.layers.{layer}."
            source = before if layer == 0 else stream
            if layer == 0 and not (number == 0 and joined):
                build.convolution(name + "shortcut.", stream, build.read(source))
            inner = [width // 4] * 2 if bottleneck else [width]
            for place, units in enumerate(inner):
                # The second of two hidden spaces is solved beside the first, as a stream is beside its units.
                hidden = f"stage{number}.ffn.{layer}" if place == 0 else f"stage{number}.inner{layer}.residual"
                hidden = build.space(hidden, units)
                build.convolution(name + f"layer.{place}.", hidden, build.read(source))
                source = hidden
            last = name + f"layer.{len(inner)}."
            build.convolution(last, stream, build.read(source))
            build.shifts.append(Shift((name + "shortcut.normalization.bias", last + "normalization.bias")))
        before = stream
    return Architecture(
        prefix="resnet.",
        spaces=build.spaces,
        tensors={**build.tensors, **parts.labels("classifier.1", build.read(before))},
        gauges=[*build.gauges, *build.shifts],
    )


@dataclass
class Build:
    """The architecture as it is put together, one convolution after the other."""

    relu: bool

    def __post_init__(self) -> None:
        self.spaces: dict[str, Group] = {}
        self.tensors: dict[str, str] = {}
        self.gauges: list[BatchNorm] = []
        self.shifts: list[Shift] = []

    def space(self, name: str, units: int) -> str:
        """A space, with a positive scale per unit where a ReLU reads it."""
        self.spaces[name] = Permutation(units)
        if self.relu:
            self.spaces[scale_of(name)] = Scale(1, per=(name,))
        return name

    def read(self, space: str) -> str:
        return f"({space}' {scale_of(space)}')" if self.relu else f"{space}'"

    def convolution(self, name: str, space: str, read: str) -> None:
        """A convolution and its batch norm: what it reads, and the space it writes to."""
        written = f"({space} {scale_of(space)})" if self.relu else space
        norm = name + "normalization"
        self.tensors |= {
            name + "convolution.weight": f"{space} {read} _height _width",
            norm + ".weight": written,
            norm + ".bias": written,
            norm + ".running_mean": space,
            norm + ".running_var": space,
        }
        self.gauges.append(BatchNorm(norm, name + "convolution.weight"))


def scale_of(space: str) -> str:
    return re.sub(r"(residual|ffn)", r"\1_scale", space)
