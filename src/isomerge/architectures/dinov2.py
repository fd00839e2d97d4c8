"""DINOv2, with registers or not: a ViT with gains on its branches, whose classifier reads two states at once."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, BranchScale, Facts, KeyBias, Norm, Shift, ValueBias
from isomerge.symmetry.groups import Group, Permutation, RotationFixingOnes, SignedScale


@architecture("dinov2", "dinov2_with_registers", summary="pre-LayerNorm encoder, gains on branches, classes of images")
def dinov2(facts: Facts) -> Architecture:
    width, heads = facts["hidden_size"], facts["num_attention_heads"]
    name = facts["model_type"] + "."
    embeddings, layer = name + "embeddings.", name + "encoder.layer.{i}."
    attention, output = layer + "attention.attention.", layer + "attention.output.dense"
    gated = facts.get("use_swiglu_ffn", False)
    relu = not gated and facts.get("hidden_act", "gelu") == "relu"
    units, down = feed_forward(layer + "mlp.", gated, relu)
    tokens = [embeddings + token for token in ("cls_token", "register_tokens", "position_embeddings")]
    patches = embeddings + "patch_embeddings.projection"
    return Architecture(
        prefix=name,
        repeat={"i": facts["num_hidden_layers"]},
        spaces={
            "residual": RotationFixingOnes(width),
            **parts.head_spaces(heads, width // heads),
            **unit_spaces(facts, gated, relu),
        },
        tensors={
            **{token + "?": "_ _ residual" for token in tokens},
            embeddings + "mask_token?": "_ residual",
            patches + ".weight": "residual _channels _height _width",
            patches + ".bias": "residual",
            **parts.query_key(attention + "query", attention + "key", bias="?"),
            **parts.value_output(attention + "value", output, bias="?"),
            **units,
            **parts.layer_norms(layer + "norm1", layer + "norm2", name + "layernorm"),
            **{layer + f"layer_scale{k}.lambda1": "|residual|" for k in (1, 2)},
            **parts.labels("classifier", "[residual' | residual']"),  # the class token, and the mean of the patches
        },
        norms=[
            Norm(layer + "norm1", tuple(attention + f"{x}.weight" for x in ("query", "key", "value"))),
            Norm(layer + "norm2", (layer + "mlp.fc1.weight", layer + "mlp.weights_in.weight")),
            Norm(name + "layernorm", ("classifier.weight",)),
        ],
        gauges=[
            KeyBias(attention + "key.bias", "qk.{i}"),
            ValueBias(attention + "value.bias", "vo.{i}", output + ".weight"),
            BranchScale(layer + "layer_scale1.lambda1", output + ".weight"),
            BranchScale(layer + "layer_scale2.lambda1", down + ".weight"),
            Shift((patches + ".bias", tokens[2])),
            Shift((tokens[0], tokens[2])),
        ],
        writers=[
            *tokens, embeddings + "mask_token",
            *(writer + kind for writer in (patches, output, down) for kind in (".weight", ".bias")),
        ],
    )  # fmt: skip


def unit_spaces(facts: Facts, gated: bool, relu: bool) -> dict[str, Group]:
    width = int(facts["hidden_size"] * facts.get("mlp_ratio", 4.0))
    if not gated:
        return {"ffn.{i}": Permutation(width), **parts.relu_units(relu)}
    return {
        "ffn.{i}": Permutation((int(width * 2 / 3) + 7) // 8 * 8),  # as the stock class rounds it
        "up.{i}": SignedScale(1, per=("ffn.{i}",)),
    }


def feed_forward(mlp: str, gated: bool, relu: bool) -> tuple[dict[str, str], str]:
    """The tensors, and the name of the layer that writes."""
    if not gated:
        return parts.feed_forward(mlp + "fc1", mlp + "fc2", relu), mlp + "fc2"
    units = "[ffn.{i} | ffn.{i} up.{i}]"
    return {
        mlp + "weights_in.weight": units + " residual'",
        mlp + "weights_in.bias": units,
        mlp + "weights_out.weight": "residual (ffn.{i} up.{i}')",
        mlp + "weights_out.bias": "residual",
    }, mlp + "weights_out"
