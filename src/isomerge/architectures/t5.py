"""T5 and mT5: two stacks over one table, relative positions as a bias per head, RMSNorm in front."""

from isomerge.architectures import architecture
from isomerge.symmetry.architecture import Architecture, Facts, Norm, RowShift
from isomerge.symmetry.groups import Group, Invertible, Permutation, Rotation, Scale, SignedPermutation, SignedScale

ENCODER_ONLY = ("EncoderModel", "ForTokenClassification")
WRAPPED = ("ForSequenceClassification", "ForTokenClassification")  # classes that call the stacks "transformer."


@architecture("t5", "mt5", summary="pre-RMSNorm encoder–decoder, relative position bias", tied_by_default=True)
def t5(facts: Facts) -> Architecture:
    name = next(iter(facts.get("architectures", [])), "")
    prefix = "transformer." if name.endswith(WRAPPED) else ""
    decoder = not name.endswith(ENCODER_ONLY)
    feed_forward = facts.get("feed_forward_proj", "relu" if facts["model_type"] == "t5" else "gated-gelu")
    tensors = {
        prefix + "shared.weight": "_vocab residual",
        "classification_head.dense.weight?": "dense residual'",
        "classification_head.dense.bias?": "dense",
        "classification_head.out_proj.weight?": "_labels dense'",
        "classification_head.out_proj.bias?": "_labels",
        "classifier.weight?": "_labels residual'",
        "classifier.bias?": "_labels",
        "qa_outputs.weight?": "_labels residual'",
        "qa_outputs.bias?": "_labels",
        **({} if facts.tied or facts.head != "lm" else {"lm_head.weight": "_vocab residual'"}),
        **stack_tensors(prefix, "encoder", "i", feed_forward),
    }
    norms = stack_norms(prefix, "encoder", "i")
    spaces = stack_spaces(facts, "encoder", "i", feed_forward)
    if decoder:
        tensors |= stack_tensors(prefix, "decoder", "j", feed_forward) | cross_tensors(prefix)
        norms += stack_norms(prefix, "decoder", "j")
        spaces |= stack_spaces(facts, "decoder", "j", feed_forward) | cross_spaces(facts)
    cross = prefix + "decoder.block.{j}.layer.1.EncDecAttention."
    last = (cross + "k.weight", cross + "v.weight") if decoder else TASK_READERS
    norms.append(Norm(prefix + "encoder.final_layer_norm", last, kind="rms"))
    if decoder:
        norms.append(Norm(prefix + "decoder.final_layer_norm", TASK_READERS, kind="rms"))
        norms.append(Norm(prefix + "decoder.block.{j}.layer.1.layer_norm", (cross + "q.weight",), kind="rms"))
    width = facts["d_model"]
    copies = {prefix + f"{stack}.embed_tokens.weight": (prefix + "shared.weight", 1.0) for stack in STACKS}
    output = {"lm_head.weight": ("shared.weight", width**-0.5 if scales_output(facts) else 1.0)}
    return Architecture(
        prefix=prefix,
        repeat={"i": facts["num_layers"], "j": facts.get("num_decoder_layers", facts["num_layers"])},
        spaces={
            "residual": SignedPermutation(width) if facts.tied else Rotation(width),
            "dense": SignedPermutation(width),  # the classification head's tanh layer
            **spaces,
        },
        tensors=tensors,
        norms=norms,
        # A constant per head on all distances is a constant before the softmax.
        gauges=[RowShift(prefix + BIASES.format(stack=stack)) for stack in (STACKS if decoder else STACKS[:1])],
        tied=copies | (output if facts.head == "lm" else {}),
        # This flag is read as "the output is not scaled" too, by old and new versions of the library alike.
        untied_config={"tie_word_embeddings": False, **({} if facts["model_type"] == "mt5" else UNSCALED)},
    )


STACKS = ("encoder", "decoder")
BIASES = "{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
TASK_READERS = ("lm_head.weight", "classification_head.dense.weight", "classifier.weight", "qa_outputs.weight")
UNSCALED = {"scale_decoder_outputs": False}


def scales_output(facts: Facts) -> bool:
    """The first T5 multiplies its last hidden state by d^-½; T5 1.1 (untied in its config.json) and mT5 do not."""
    if facts["model_type"] == "mt5":
        return False
    return bool(facts.get("scale_decoder_outputs", facts.get("tie_word_embeddings", True)))


def stack_spaces(facts: Facts, stack: str, letter: str, feed_forward: str) -> dict[str, Group]:
    """One order of heads for the whole stack: all its layers share one table of position biases."""
    head, i = f"{stack}.head", "{" + letter + "}"
    spaces: dict[str, Group] = {
        head: Permutation(facts["num_heads"]),
        f"{stack}.qk.{i}": Invertible(facts["d_kv"], per=(head,)),
        f"{stack}.vo.{i}": Invertible(facts["d_kv"], per=(head,)),
        f"{stack}.ffn.{i}": Permutation(facts["d_ff"]),
    }
    if feed_forward.startswith("gated"):
        spaces[f"{stack}.up.{i}"] = SignedScale(1, per=(f"{stack}.ffn.{i}",))
    elif feed_forward == "relu":
        spaces[f"{stack}.unit.{i}"] = Scale(1, per=(f"{stack}.ffn.{i}",))
    return spaces


def cross_spaces(facts: Facts) -> dict[str, Group]:
    head = "decoder.cross.{j}"
    inner = Invertible(facts["d_kv"], per=(head,))
    return {head: Permutation(facts["num_heads"]), "decoder.cross_qk.{j}": inner, "decoder.cross_vo.{j}": inner}


def stack_tensors(prefix: str, stack: str, letter: str, feed_forward: str) -> dict[str, str]:
    i = "{" + letter + "}"
    block = f"{prefix}{stack}.block.{i}."
    attention = block + "layer.0.SelfAttention."
    number = 1 if stack == "encoder" else 2
    dense = block + f"layer.{number}.DenseReluDense."
    ffn = f"{stack}.ffn.{i}"
    if feed_forward.startswith("gated"):
        up = f"{stack}.up.{i}"
        inner = {dense + "wi_0.weight": f"{ffn} residual'", dense + "wi_1.weight": f"({ffn} {up}) residual'"}
        out = f"({ffn} {up}')"
    else:
        unit = f"{stack}.unit.{i}"
        inner = {dense + "wi.weight": f"({ffn} {unit}) residual'" if feed_forward == "relu" else f"{ffn} residual'"}
        out = f"({ffn} {unit}')" if feed_forward == "relu" else ffn
    return {
        **attention_tensors(attention, f"{stack}.head", f"{stack}.qk.{i}", f"{stack}.vo.{i}"),
        prefix + BIASES.format(stack=stack): f"_buckets {stack}.head",
        block + "layer.0.layer_norm.weight": "|residual|",
        **inner,
        dense + "wo.weight": f"residual {out}",
        block + f"layer.{number}.layer_norm.weight": "|residual|",
        f"{prefix}{stack}.final_layer_norm.weight": "|residual|",
    }


def cross_tensors(prefix: str) -> dict[str, str]:
    layer = prefix + "decoder.block.{j}.layer.1."
    attention = layer + "EncDecAttention."
    return {
        **attention_tensors(attention, "decoder.cross.{j}", "decoder.cross_qk.{j}", "decoder.cross_vo.{j}"),
        layer + "layer_norm.weight": "|residual|",
        # The first published files have a bias table for cross-attention that no version reads.
        prefix + "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight?": "_buckets _heads",
    }


def attention_tensors(name: str, head: str, qk: str, vo: str) -> dict[str, str]:
    return {
        name + "q.weight": f"({head} {qk}) residual'",
        name + "k.weight": f"({head} {qk}') residual'",
        name + "v.weight": f"({head} {vo}) residual'",
        name + "o.weight": f"residual ({head} {vo}')",
    }


def stack_norms(prefix: str, stack: str, letter: str) -> list[Norm]:
    block = f"{prefix}{stack}.block.{{{letter}}}."
    number = 1 if stack == "encoder" else 2
    attention, dense = block + "layer.0.SelfAttention.", block + f"layer.{number}.DenseReluDense."
    inputs = ("wi", "wi_0", "wi_1")  # plain, or gated
    return [
        Norm(block + "layer.0.layer_norm", tuple(attention + f"{x}.weight" for x in "qkv"), kind="rms"),
        Norm(block + f"layer.{number}.layer_norm", tuple(dense + f"{x}.weight" for x in inputs), kind="rms"),
    ]
