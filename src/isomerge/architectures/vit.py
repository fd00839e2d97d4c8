"""ViT and DeiT: LayerNorm in front, learned positions, a class token (DeiT: a distillation token too)."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, KeyBias, Norm, Shift, ValueBias
from isomerge.symmetry.groups import Permutation, RotationFixingOnes, SignedPermutation


@architecture("vit", "deit", summary="pre-LayerNorm encoder, learned positions, image classification")
def vit(facts: Facts) -> Architecture:
    width, heads = facts["hidden_size"], facts["num_attention_heads"]
    name = facts["model_type"]
    layer = name + ".encoder.layer.{i}."
    attention = layer + "attention.attention."
    output = layer + "attention.output.dense"
    embeddings = name + ".embeddings."
    relu = facts.get("hidden_act", "gelu") == "relu"
    return Architecture(
        prefix=name + ".",
        repeat={"i": facts["num_hidden_layers"]},
        spaces={
            "residual": RotationFixingOnes(width),
            **parts.head_spaces(heads, width // heads),
            "ffn.{i}": Permutation(facts["intermediate_size"]),
            **parts.relu_units(relu),
            "pooler": SignedPermutation(width) if facts.get("pooler_act", "tanh") == "tanh" else Permutation(width),
        },
        tensors={
            embeddings + "cls_token": "_ _ residual",
            embeddings + "distillation_token?": "_ _ residual",
            embeddings + "mask_token?": "_ _ residual",
            embeddings + "position_embeddings": "_ _positions residual",
            embeddings + "patch_embeddings.projection.weight": "residual _channels _height _width",
            embeddings + "patch_embeddings.projection.bias": "residual",
            **parts.query_key(attention + "query", attention + "key", bias="?"),
            **parts.value_output(attention + "value", output, bias="?"),
            **parts.feed_forward(layer + "intermediate.dense", layer + "output.dense", relu),
            **parts.layer_norms(layer + "layernorm_before", layer + "layernorm_after", name + ".layernorm"),
            name + ".pooler.dense.weight?": "pooler residual'",
            name + ".pooler.dense.bias?": "pooler",
            **{head + ".weight?": "_labels residual'" for head in CLASSIFIERS},
            **{head + ".bias?": "_labels" for head in CLASSIFIERS},
        },
        norms=[
            Norm(layer + "layernorm_before", tuple(attention + f"{x}.weight" for x in ("query", "key", "value"))),
            Norm(layer + "layernorm_after", (layer + "intermediate.dense.weight",)),
            Norm(name + ".layernorm", (*(head + ".weight" for head in CLASSIFIERS), name + ".pooler.dense.weight")),
        ],
        gauges=[
            KeyBias(attention + "key.bias", "qk.{i}"),
            ValueBias(attention + "value.bias", "vo.{i}", output + ".weight"),
            Shift((embeddings + "patch_embeddings.projection.bias", embeddings + "position_embeddings")),
            Shift((embeddings + "cls_token", embeddings + "position_embeddings")),
            Shift((embeddings + "distillation_token", embeddings + "position_embeddings")),
        ],
        writers=[
            embeddings + "cls_token", embeddings + "distillation_token", embeddings + "mask_token",
            embeddings + "position_embeddings", embeddings + "patch_embeddings.projection.weight",
            embeddings + "patch_embeddings.projection.bias",
            output + ".weight", output + ".bias", layer + "output.dense.weight", layer + "output.dense.bias",
        ],
    )  # fmt: skip


CLASSIFIERS = ("classifier", "cls_classifier", "distillation_classifier")
