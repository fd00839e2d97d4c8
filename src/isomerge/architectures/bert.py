"""BERT and RoBERTa: LayerNorm *after* each sum, so the stream only permutes."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, KeyBias, Shift, ValueBias
from isomerge.symmetry.groups import Group, Permutation, SignedPermutation


@architecture(
    "bert", "roberta", "xlm-roberta", "camembert",
    summary="post-LayerNorm encoder, learned positions", tied_by_default=True, can_untie=False,
)  # fmt: skip
def bert(facts: Facts) -> Architecture:
    name = "bert." if facts["model_type"] == "bert" else "roberta."
    embeddings, layer = name + "embeddings.", name + "encoder.layer.{i}."
    heads, head_readers = task_heads(facts, name)
    relu = facts.get("hidden_act", "gelu") == "relu"
    self, output = layer + "attention.self.", layer + "attention.output."
    tensors = {
        embeddings + "word_embeddings.weight": "_vocab residual",
        embeddings + "position_embeddings.weight": "_positions residual",
        embeddings + "token_type_embeddings.weight?": "_types residual",
        **parts.layer_norms(embeddings + "LayerNorm"),
        **parts.query_key(self + "query", self + "key"),
        **parts.value_output(self + "value", output + "dense"),
        **parts.layer_norms(output + "LayerNorm"),
        **parts.feed_forward(layer + "intermediate.dense", layer + "output.dense", relu),
        **parts.layer_norms(layer + "output.LayerNorm"),
    }
    return Architecture(
        prefix=name,
        repeat={"i": facts["num_hidden_layers"]},
        spaces=spaces(facts, relu),
        tensors=tensors | heads,
        norms=parts.post_norm_chain(
            embeddings=embeddings + "LayerNorm",
            depth=facts["num_hidden_layers"],
            attention=(
                tuple(f"{self}{x}.weight" for x in ("query", "key", "value")),
                output + "dense.bias", output + "LayerNorm",
            ),
            ffn=((layer + "intermediate.dense.weight",), layer + "output.dense.bias", layer + "output.LayerNorm"),
            end=head_readers,
        ),
        gauges=[
            KeyBias(self + "key.bias", "qk.{i}"),
            ValueBias(self + "value.bias", "vo.{i}", output + "dense.weight"),
            Shift((embeddings + "position_embeddings.weight", embeddings + "word_embeddings.weight")),
            Shift((embeddings + "token_type_embeddings.weight", embeddings + "word_embeddings.weight")),
        ],
        writers=[
            *([] if facts.tied else [embeddings + "word_embeddings.weight"]),
            embeddings + "position_embeddings.weight", embeddings + "token_type_embeddings.weight",
            output + "dense.weight", output + "dense.bias",
            layer + "output.dense.weight", layer + "output.dense.bias",
        ],
        tied={head: (embeddings + "word_embeddings.weight", 1.0) for head in DECODERS} if facts.tied else {},
    )  # fmt: skip


DECODERS = ("cls.predictions.decoder.weight", "lm_head.decoder.weight")


def spaces(facts: Facts, relu: bool) -> dict[str, Group]:
    width, heads = facts["hidden_size"], facts["num_attention_heads"]
    return {
        "residual": Permutation(width),
        **parts.head_spaces(heads, width // heads),
        "ffn.{i}": Permutation(facts["intermediate_size"]),
        "pooler": SignedPermutation(width),  # tanh
        "dense": SignedPermutation(width),  # the classification head's tanh layer
        **parts.relu_units(relu),
        # A masked-LM head that is not tied has a space of its own.
        **({} if facts.tied else {"transform": Permutation(width)}),
    }


def task_heads(facts: Facts, name: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Tensors of every head class, and which of their weights read the last hidden state."""
    inner = "residual" if facts.tied else "transform"  # tied: the transform's output is read by the word table
    tensors = {
        name + "pooler.dense.weight?": "pooler residual'",
        name + "pooler.dense.bias?": "pooler",
        **parts.labels("cls.seq_relationship", "pooler'"),
        **parts.labels("qa_outputs"),
        "classifier.dense.weight?": "dense residual'",
        "classifier.dense.bias?": "dense",
        **parts.labels("classifier.out_proj", "dense'"),
        **parts.labels("classifier", "pooler'" if facts.head == "sequence" else "residual'"),
    }
    readers = [name + "pooler.dense.weight", "qa_outputs.weight", "classifier.dense.weight"]
    readers += ["classifier.weight"] if facts.head != "sequence" else []
    for dense, norm, decoder in (
        ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder"),
        ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
    ):
        tensors |= {
            **parts.dense_and_norm(dense, norm, inner),
            decoder + ".bias?": "_vocab",
            **({} if facts.tied else {decoder + ".weight?": "_vocab transform'"}),
        }
        readers.append(dense + ".weight")
    tensors |= {"cls.predictions.bias?": "_vocab", "lm_head.bias?": "_vocab"}
    return tensors, tuple(readers)
