"""ConvNeXt, both versions: stages of several widths, a stream each; depthwise convolutions let it only permute."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, BranchScale, Facts, Gauge, Norm
from isomerge.symmetry.groups import Group, Permutation


@architecture("convnext", "convnextv2", summary="depthwise convolutions in stages, classes of images")
def convnext(facts: Facts) -> Architecture:
    name = facts["model_type"] + "."
    widths, depths = facts.sizes("hidden_sizes", (96, 192, 384, 768)), facts.sizes("depths", (3, 3, 9, 3))
    streams = [f"stage{number}.residual" for number in range(len(widths))]
    relu = facts.get("hidden_act", "gelu") == "relu" and facts["model_type"] == "convnext"
    spaces: dict[str, Group] = {stream: Permutation(width) for stream, width in zip(streams, widths, strict=True)}
    patches = name + "embeddings.patch_embeddings"
    tensors = {
        patches + ".weight": f"{streams[0]} _channels _height _width",
        patches + ".bias": streams[0],
        **parts.layer_norms(name + "embeddings.layernorm", space=streams[0]),
        **parts.layer_norms(name + "layernorm", space=streams[-1]),
        **parts.labels("classifier", streams[-1] + "'"),
    }
    norms, gauges = [Norm(name + "layernorm", ("classifier.weight",))], list[Gauge]()
    writers = [patches + ".weight", patches + ".bias"]
    for number, width in enumerate(widths):
        letter, stage = f"layer{number}", f"{name}encoder.stages.{number}."
        layer = f"{stage}layers.{{{letter}}}."
        words = {word: f"stage{number}.{word}" for word in ("residual", "ffn", "unit")}
        own: dict[str, Group] = {"ffn.{i}": Permutation(4 * width), **parts.relu_units(relu)}
        spaces |= parts.renamed(own, words, letter)
        tensors |= parts.renamed(layer_tensors(layer, relu), words, letter)
        norms.append(Norm(layer + "layernorm", (layer + "pwconv1.weight",)))
        gauges.append(BranchScale(layer + "layer_scale_parameter", layer + "pwconv2.weight"))
        final = f"{stage}layers.{depths[number] - 1}.pwconv2"  # only a norm reads the stream after it
        writers += [layer + "dwconv.bias", final + ".weight", final + ".bias"]
        if number:
            norm, convolution = stage + "downsampling_layer.0", stage + "downsampling_layer.1"
            tensors |= parts.layer_norms(norm, space=streams[number - 1])
            tensors[convolution + ".weight"] = f"{streams[number]} {streams[number - 1]}' _height _width"
            tensors[convolution + ".bias"] = streams[number]
            norms.append(Norm(norm, (convolution + ".weight",)))
    return Architecture(
        prefix=name,
        repeat={f"layer{number}": depth for number, depth in enumerate(depths)},
        spaces=spaces,
        tensors=tensors,
        norms=norms,
        gauges=gauges,
        writers=writers,
    )


def layer_tensors(layer: str, relu: bool) -> dict[str, str]:
    return {
        layer + "dwconv.weight": "residual _one _height _width",
        layer + "dwconv.bias": "residual",
        **parts.layer_norms(layer + "layernorm"),
        **parts.feed_forward(layer + "pwconv1", layer + "pwconv2", relu),
        layer + "layer_scale_parameter?": "|residual|",
        layer + "grn.weight?": "_ _ _ ffn.{i}",
        layer + "grn.bias?": "_ _ _ ffn.{i}",
    }
