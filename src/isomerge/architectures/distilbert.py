"""DistilBERT: a BERT without token types and pooler; its classification head is a ReLU layer of its own."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, KeyBias, Shift, ValueBias
from isomerge.symmetry.groups import Group, Permutation, Scale

EMBEDDINGS = "distilbert.embeddings."
LAYER = "distilbert.transformer.layer.{i}."
ATTENTION = LAYER + "attention."
WORDS = EMBEDDINGS + "word_embeddings.weight"
QKV = tuple(ATTENTION + f"{x}_lin.weight" for x in "qkv")


@architecture("distilbert", summary="post-LayerNorm encoder, learned positions", tied_by_default=True, can_untie=False)
def distilbert(facts: Facts) -> Architecture:
    relu = facts.get("activation", "gelu") == "relu"
    heads, head_readers = task_heads(facts)
    return Architecture(
        prefix="distilbert.",
        repeat={"i": facts["n_layers"]},
        spaces=spaces(facts, relu),
        tensors={
            WORDS: "_vocab residual",
            EMBEDDINGS + "position_embeddings.weight": "_positions residual",
            **parts.layer_norms(EMBEDDINGS + "LayerNorm"),
            **parts.query_key(ATTENTION + "q_lin", ATTENTION + "k_lin"),
            **parts.value_output(ATTENTION + "v_lin", ATTENTION + "out_lin"),
            **parts.layer_norms(LAYER + "sa_layer_norm"),
            **parts.feed_forward(LAYER + "ffn.lin1", LAYER + "ffn.lin2", relu),
            **parts.layer_norms(LAYER + "output_layer_norm"),
            **heads,
        },
        norms=parts.post_norm_chain(
            embeddings=EMBEDDINGS + "LayerNorm",
            depth=facts["n_layers"],
            attention=(QKV, ATTENTION + "out_lin.bias", LAYER + "sa_layer_norm"),
            ffn=((LAYER + "ffn.lin1.weight",), LAYER + "ffn.lin2.bias", LAYER + "output_layer_norm"),
            end=head_readers,
        ),
        gauges=[
            KeyBias(ATTENTION + "k_lin.bias", "qk.{i}"),
            ValueBias(ATTENTION + "v_lin.bias", "vo.{i}", ATTENTION + "out_lin.weight"),
            Shift((EMBEDDINGS + "position_embeddings.weight", WORDS)),
        ],
        writers=[
            *([] if facts.tied else [WORDS]),
            EMBEDDINGS + "position_embeddings.weight",
            ATTENTION + "out_lin.weight", ATTENTION + "out_lin.bias",
            LAYER + "ffn.lin2.weight", LAYER + "ffn.lin2.bias",
        ],
        tied={"vocab_projector.weight": (WORDS, 1.0)} if facts.tied else {},
    )  # fmt: skip


def spaces(facts: Facts, relu: bool) -> dict[str, Group]:
    width, heads = facts["dim"], facts["n_heads"]
    return {
        "residual": Permutation(width),
        **parts.head_spaces(heads, width // heads),
        "ffn.{i}": Permutation(facts["hidden_dim"]),
        "dense": Permutation(width),  # the classification head's ReLU layer
        "dense_unit": Scale(1, per=("dense",)),
        **parts.relu_units(relu),
        # A masked-LM head that is not tied has a space of its own.
        **({} if facts.tied else {"transform": Permutation(width)}),
    }


def task_heads(facts: Facts) -> tuple[dict[str, str], tuple[str, ...]]:
    """Tensors of every head class, and which of their weights read the last hidden state."""
    inner = "residual" if facts.tied else "transform"  # tied: the transform's output is read by the word table
    sequence = facts.head == "sequence"
    tensors = {
        "pre_classifier.weight?": "(dense dense_unit) residual'",
        "pre_classifier.bias?": "(dense dense_unit)",
        **parts.labels("classifier", "(dense dense_unit')" if sequence else "residual'"),
        **parts.labels("qa_outputs"),
        **parts.dense_and_norm("vocab_transform", "vocab_layer_norm", inner),
        "vocab_projector.bias?": "_vocab",
        **({} if facts.tied else {"vocab_projector.weight?": "_vocab transform'"}),
    }
    readers = ("pre_classifier.weight", "qa_outputs.weight", "vocab_transform.weight")
    return tensors, readers if sequence else (*readers, "classifier.weight")
