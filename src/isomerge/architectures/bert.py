"""BERT and RoBERTa: LayerNorm *after* each sum, so the stream only permutes."""

from isomerge.architectures import architecture
from isomerge.symmetry.architecture import Architecture, Facts, KeyBias, Shift, StreamNorm, ValueBias
from isomerge.symmetry.groups import Group, Invertible, Permutation, Scale, SignedPermutation


@architecture(
    "bert", "roberta", "xlm-roberta", "camembert",
    summary="post-LayerNorm encoder, learned positions", tied_by_default=True, can_untie=False,
)  # fmt: skip
def bert(facts: Facts) -> Architecture:
    depth = facts["num_hidden_layers"]
    name = "bert." if facts["model_type"] == "bert" else "roberta."
    embeddings, layer = name + "embeddings.", name + "encoder.layer.{i}."
    heads, head_readers = task_heads(facts, name)
    ffn = ffn_pattern(facts)
    tensors = {
        embeddings + "word_embeddings.weight": "_vocab residual",
        embeddings + "position_embeddings.weight": "_positions residual",
        embeddings + "token_type_embeddings.weight?": "_types residual",
        embeddings + "LayerNorm.weight": "|residual|",
        embeddings + "LayerNorm.bias": "residual",
        layer + "attention.self.query.weight": "(head.{i} qk.{i}) residual'",
        layer + "attention.self.query.bias": "(head.{i} qk.{i})",
        layer + "attention.self.key.weight": "(head.{i} qk.{i}') residual'",
        layer + "attention.self.key.bias": "(head.{i} qk.{i}')",
        layer + "attention.self.value.weight": "(head.{i} vo.{i}) residual'",
        layer + "attention.self.value.bias": "(head.{i} vo.{i})",
        layer + "attention.output.dense.weight": "residual (head.{i} vo.{i}')",
        layer + "attention.output.dense.bias": "residual",
        layer + "attention.output.LayerNorm.weight": "|residual|",
        layer + "attention.output.LayerNorm.bias": "residual",
        layer + "intermediate.dense.weight": f"{ffn} residual'",
        layer + "intermediate.dense.bias": ffn,
        layer + "output.dense.weight": "residual " + ffn.replace("unit.{i}", "unit.{i}'"),
        layer + "output.dense.bias": "residual",
        layer + "output.LayerNorm.weight": "|residual|",
        layer + "output.LayerNorm.bias": "residual",
    }
    return Architecture(
        prefix=name,
        repeat={"i": depth},
        spaces=spaces(facts),
        tensors=tensors | heads,
        norms=stream_norms(name, depth, head_readers),
        gauges=[
            KeyBias(layer + "attention.self.key.bias", "qk.{i}"),
            ValueBias(layer + "attention.self.value.bias", "vo.{i}", layer + "attention.output.dense.weight"),
            Shift((embeddings + "position_embeddings.weight", embeddings + "word_embeddings.weight")),
            Shift((embeddings + "token_type_embeddings.weight", embeddings + "word_embeddings.weight")),
        ],
        writers=[
            *([] if facts.tied else [embeddings + "word_embeddings.weight"]),
            embeddings + "position_embeddings.weight", embeddings + "token_type_embeddings.weight",
            layer + "attention.output.dense.weight", layer + "attention.output.dense.bias",
            layer + "output.dense.weight", layer + "output.dense.bias",
        ],
        tied={head: (embeddings + "word_embeddings.weight", 1.0) for head in DECODERS} if facts.tied else {},
    )  # fmt: skip


DECODERS = ("cls.predictions.decoder.weight", "lm_head.decoder.weight")


def ffn_pattern(facts: Facts) -> str:
    return "(ffn.{i} unit.{i})" if facts.get("hidden_act", "gelu") == "relu" else "ffn.{i}"


def spaces(facts: Facts) -> dict[str, Group]:
    width, heads = facts["hidden_size"], facts["num_attention_heads"]
    found: dict[str, Group] = {
        "residual": Permutation(width),
        "head.{i}": Permutation(heads),
        "qk.{i}": Invertible(width // heads, per=("head.{i}",)),
        "vo.{i}": Invertible(width // heads, per=("head.{i}",)),
        "ffn.{i}": Permutation(facts["intermediate_size"]),
        "pooler": SignedPermutation(width),  # tanh
        "dense": SignedPermutation(width),  # the classification head's tanh layer
    }
    if facts.get("hidden_act", "gelu") == "relu":
        found["unit.{i}"] = Scale(1, per=("ffn.{i}",))
    if not facts.tied:
        found["transform"] = Permutation(width)  # a masked-LM head that is not tied has a space of its own
    return found


def task_heads(facts: Facts, name: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Tensors of every head class, and which of their weights read the last hidden state."""
    inner = "residual" if facts.tied else "transform"  # tied: the transform's output is read by the word table
    tensors = {
        name + "pooler.dense.weight?": "pooler residual'",
        name + "pooler.dense.bias?": "pooler",
        "cls.seq_relationship.weight?": "_labels pooler'",
        "cls.seq_relationship.bias?": "_labels",
        "qa_outputs.weight?": "_labels residual'",
        "qa_outputs.bias?": "_labels",
        "classifier.dense.weight?": "dense residual'",
        "classifier.dense.bias?": "dense",
        "classifier.out_proj.weight?": "_labels dense'",
        "classifier.out_proj.bias?": "_labels",
        "classifier.weight?": "_labels " + ("pooler'" if facts.head == "sequence" else "residual'"),
        "classifier.bias?": "_labels",
    }
    readers = [name + "pooler.dense.weight", "qa_outputs.weight", "classifier.dense.weight"]
    readers += ["classifier.weight"] if facts.head != "sequence" else []
    for dense, norm, decoder in (
        ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder"),
        ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
    ):
        tensors |= {
            dense + ".weight?": f"{inner} residual'",
            dense + ".bias?": inner,
            norm + ".weight?": f"|{inner}|",
            norm + ".bias?": inner,
            decoder + ".bias?": "_vocab",
            **({} if facts.tied else {decoder + ".weight?": "_vocab transform'"}),
        }
        readers.append(dense + ".weight")
    tensors |= {"cls.predictions.bias?": "_vocab", "lm_head.bias?": "_vocab"}
    return tensors, tuple(readers)


def stream_norms(name: str, depth: int, head_readers: tuple[str, ...]) -> list[StreamNorm]:
    """Each norm's bias can move to the readers of the stream and to the next bias written to it."""

    def attention(i: int) -> tuple[tuple[str, ...], str]:
        layer = f"{name}encoder.layer.{i}."
        readers = tuple(f"{layer}attention.self.{x}.weight" for x in ("query", "key", "value"))
        return readers, layer + "attention.output.dense.bias"

    norms = [StreamNorm(name + "embeddings.LayerNorm", *attention(0))]
    for i in range(depth):
        layer = f"{name}encoder.layer.{i}."
        middle = (layer + "intermediate.dense.weight",)
        norms.append(StreamNorm(layer + "attention.output.LayerNorm", middle, layer + "output.dense.bias"))
        following = attention(i + 1) if i + 1 < depth else (head_readers, None)
        norms.append(StreamNorm(layer + "output.LayerNorm", *following))
    return norms
