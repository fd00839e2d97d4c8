"""DistilBERT: a BERT without token types and pooler; its classification head is a ReLU layer of its own."""

from collections.abc import Sequence

from isomerge.architectures import architecture
from isomerge.symmetry.architecture import Architecture, Facts, KeyBias, Shift, StreamNorm, ValueBias
from isomerge.symmetry.groups import Group, Invertible, Permutation, Scale

EMBEDDINGS = "distilbert.embeddings."
LAYER = "distilbert.transformer.layer.{i}."
WORDS = EMBEDDINGS + "word_embeddings.weight"
QKV = tuple(LAYER + f"attention.{x}_lin.weight" for x in "qkv")


@architecture("distilbert", summary="post-LayerNorm encoder, learned positions", tied_by_default=True, can_untie=False)
def distilbert(facts: Facts) -> Architecture:
    ffn = "(ffn.{i} unit.{i})" if facts.get("activation", "gelu") == "relu" else "ffn.{i}"
    heads, head_readers = task_heads(facts)
    return Architecture(
        prefix="distilbert.",
        repeat={"i": facts["n_layers"]},
        spaces=spaces(facts),
        tensors={
            WORDS: "_vocab residual",
            EMBEDDINGS + "position_embeddings.weight": "_positions residual",
            EMBEDDINGS + "LayerNorm.weight": "|residual|",
            EMBEDDINGS + "LayerNorm.bias": "residual",
            LAYER + "attention.q_lin.weight": "(head.{i} qk.{i}) residual'",
            LAYER + "attention.q_lin.bias": "(head.{i} qk.{i})",
            LAYER + "attention.k_lin.weight": "(head.{i} qk.{i}') residual'",
            LAYER + "attention.k_lin.bias": "(head.{i} qk.{i}')",
            LAYER + "attention.v_lin.weight": "(head.{i} vo.{i}) residual'",
            LAYER + "attention.v_lin.bias": "(head.{i} vo.{i})",
            LAYER + "attention.out_lin.weight": "residual (head.{i} vo.{i}')",
            LAYER + "attention.out_lin.bias": "residual",
            LAYER + "sa_layer_norm.weight": "|residual|",
            LAYER + "sa_layer_norm.bias": "residual",
            LAYER + "ffn.lin1.weight": f"{ffn} residual'",
            LAYER + "ffn.lin1.bias": ffn,
            LAYER + "ffn.lin2.weight": "residual " + ffn.replace("unit.{i}", "unit.{i}'"),
            LAYER + "ffn.lin2.bias": "residual",
            LAYER + "output_layer_norm.weight": "|residual|",
            LAYER + "output_layer_norm.bias": "residual",
            **heads,
        },
        norms=post_norm_chain(
            embeddings=EMBEDDINGS + "LayerNorm",
            depth=facts["n_layers"],
            attention=(QKV, LAYER + "attention.out_lin.bias", LAYER + "sa_layer_norm"),
            ffn=((LAYER + "ffn.lin1.weight",), LAYER + "ffn.lin2.bias", LAYER + "output_layer_norm"),
            end=head_readers,
        ),
        gauges=[
            KeyBias(LAYER + "attention.k_lin.bias", "qk.{i}"),
            ValueBias(LAYER + "attention.v_lin.bias", "vo.{i}", LAYER + "attention.out_lin.weight"),
            Shift((EMBEDDINGS + "position_embeddings.weight", WORDS)),
        ],
        writers=[
            *([] if facts.tied else [WORDS]),
            EMBEDDINGS + "position_embeddings.weight",
            LAYER + "attention.out_lin.weight", LAYER + "attention.out_lin.bias",
            LAYER + "ffn.lin2.weight", LAYER + "ffn.lin2.bias",
        ],
        tied={"vocab_projector.weight": (WORDS, 1.0)} if facts.tied else {},
    )  # fmt: skip


def spaces(facts: Facts) -> dict[str, Group]:
    width, heads = facts["dim"], facts["n_heads"]
    found: dict[str, Group] = {
        "residual": Permutation(width),
        "head.{i}": Permutation(heads),
        "qk.{i}": Invertible(width // heads, per=("head.{i}",)),
        "vo.{i}": Invertible(width // heads, per=("head.{i}",)),
        "ffn.{i}": Permutation(facts["hidden_dim"]),
        "dense": Permutation(width),  # the classification head's ReLU layer
        "dense_unit": Scale(1, per=("dense",)),
    }
    if facts.get("activation", "gelu") == "relu":
        found["unit.{i}"] = Scale(1, per=("ffn.{i}",))
    if not facts.tied:
        found["transform"] = Permutation(width)  # a masked-LM head that is not tied has a space of its own
    return found


def task_heads(facts: Facts) -> tuple[dict[str, str], tuple[str, ...]]:
    """Tensors of every head class, and which of their weights read the last hidden state."""
    inner = "residual" if facts.tied else "transform"  # tied: the transform's output is read by the word table
    sequence = facts.head == "sequence"
    tensors = {
        "pre_classifier.weight?": "(dense dense_unit) residual'",
        "pre_classifier.bias?": "(dense dense_unit)",
        "classifier.weight?": "_labels (dense dense_unit')" if sequence else "_labels residual'",
        "classifier.bias?": "_labels",
        "qa_outputs.weight?": "_labels residual'",
        "qa_outputs.bias?": "_labels",
        "vocab_transform.weight?": f"{inner} residual'",
        "vocab_transform.bias?": inner,
        "vocab_layer_norm.weight?": f"|{inner}|",
        "vocab_layer_norm.bias?": inner,
        "vocab_projector.bias?": "_vocab",
        **({} if facts.tied else {"vocab_projector.weight?": "_vocab transform'"}),
    }
    readers = ("pre_classifier.weight", "qa_outputs.weight", "vocab_transform.weight")
    return tensors, readers if sequence else (*readers, "classifier.weight")


Step = tuple[tuple[str, ...], str, str]  # who reads the stream, the bias they write back, the norm after it


def post_norm_chain(embeddings: str, depth: int, attention: Step, ffn: Step, end: Sequence[str]) -> list[StreamNorm]:
    """Post-norm models: the norms in order, each with the readers and the writer that come after it."""
    steps = [
        (tuple(r.format(i=i) for r in readers), bias.format(i=i), norm.format(i=i))
        for i in range(depth)
        for readers, bias, norm in (attention, ffn)
    ]
    names = [embeddings, *(norm for _, _, norm in steps)]
    following: list[tuple[tuple[str, ...], str | None]] = [(readers, bias) for readers, bias, _ in steps]
    following.append((tuple(end), None))
    return [StreamNorm(name, readers, bias) for name, (readers, bias) in zip(names, following, strict=True)]
