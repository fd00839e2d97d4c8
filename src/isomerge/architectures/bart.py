"""BART: two stacks over one table, LayerNorm *after* each sum, so their one stream only permutes."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, Gauge, KeyBias, Shift, StreamNorm, ValueBias
from isomerge.symmetry.groups import Group, Permutation, SignedPermutation

TABLE = "model.shared.weight"
STACKS = {"encoder": "i", "decoder": "j"}
COPIES = tuple(f"model.{stack}.embed_tokens.weight" for stack in STACKS)
READERS = ("lm_head.weight", "classification_head.dense.weight", "qa_outputs.weight")
SELF = {word: "{stack}." + word for word in ("head", "qk", "vo", "ffn", "unit")}
CROSS = {"head": "decoder.cross", "qk": "decoder.cross_qk", "vo": "decoder.cross_vo"}
QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


@architecture(
    "bart", summary="post-LayerNorm encoder–decoder, learned positions", tied_by_default=True, can_untie=False
)
def bart(facts: Facts) -> Architecture:
    spaces: dict[str, Group] = {
        "residual": Permutation(facts["d_model"]),
        "dense": SignedPermutation(facts["d_model"]),  # tanh
    }
    shared = facts.get("tie_word_embeddings", True)
    name = next(iter(facts.get("architectures", [])), "")
    alone = name.endswith("ForCausalLM")  # a decoder alone, which keeps its attention to an encoder
    table = COPIES[1] if alone else TABLE
    tables = [table] if shared else [TABLE + "?", *COPIES]
    tensors = {**dict.fromkeys(tables, "_vocab residual"), **task_heads(facts)}
    norms, gauges, writers = list[StreamNorm](), list[Gauge](), list[str]()
    for stack in ["decoder"] if alone else STACKS:
        spaces |= stack_spaces(stack, facts)
        tensors |= stack_tensors(stack, facts)
        norms += stream_norms(stack, facts)
        positions = f"model.{stack}.embed_positions.weight"
        gauges += [Shift((positions, table)), *attention_gauges(stack)]
        writers += [positions, *(name + end for name in branches(stack) for end in (".weight", ".bias"))]
    return Architecture(
        prefix="model.",
        repeat={letter: facts[f"{stack}_layers"] for stack, letter in STACKS.items()},
        spaces=spaces,
        tensors=tensors,
        norms=norms,
        gauges=gauges,
        writers=writers if facts.head == "lm" and shared else [*writers, *([table] if shared else COPIES)],
        tied={name: (table, 1.0) for name in ("lm_head.weight", *COPIES) if name != table} if shared else {},
    )


def layer_of(stack: str) -> str:
    return f"model.{stack}.layers.{{{STACKS[stack]}}}."


def attentions(stack: str) -> dict[str, dict[str, str]]:
    """The attentions of a layer, with the words of their spaces."""
    own = {layer_of(stack) + "self_attn.": {word: name.format(stack=stack) for word, name in SELF.items()}}
    return own if stack == "encoder" else {**own, layer_of(stack) + "encoder_attn.": CROSS}


def branches(stack: str) -> list[str]:
    """The layers that write to the stream."""
    return [*(name + "out_proj" for name in attentions(stack)), layer_of(stack) + "fc2"]


def uses_relu(facts: Facts) -> bool:
    return bool(facts.get("activation_function", "gelu") == "relu")


def stack_spaces(stack: str, facts: Facts) -> dict[str, Group]:
    heads = facts[f"{stack}_attention_heads"]
    own = {
        **parts.head_spaces(heads, facts["d_model"] // heads),
        "ffn.{i}": Permutation(facts[f"{stack}_ffn_dim"]),
        **parts.relu_units(uses_relu(facts)),
    }
    found: dict[str, Group] = {}
    for words in attentions(stack).values():
        found |= parts.renamed({s: g for s, g in own.items() if s.split(".")[0] in words}, words, STACKS[stack])
    return found


def stack_tensors(stack: str, facts: Facts) -> dict[str, str]:
    base, layer, letter = f"model.{stack}.", layer_of(stack), STACKS[stack]
    cross = [layer + "encoder_attn_layer_norm"] if stack == "decoder" else []
    feed_forward = parts.feed_forward(layer + "fc1", layer + "fc2", uses_relu(facts))
    tensors = {
        base + "embed_positions.weight": "_positions residual",
        **parts.layer_norms(base + "layernorm_embedding", layer + "self_attn_layer_norm", *cross),
        **parts.layer_norms(layer + "final_layer_norm"),
        **parts.renamed(feed_forward, attentions(stack)[layer + "self_attn."], letter),
    }
    for name, words in attentions(stack).items():
        own = {
            **parts.query_key(name + "q_proj", name + "k_proj"),
            **parts.value_output(name + "v_proj", name + "out_proj"),
        }
        tensors |= parts.renamed(own, words, letter)
    return tensors


def attention_gauges(stack: str) -> list[Gauge]:
    found: list[Gauge] = []
    for name, words in attentions(stack).items():
        qk, vo = (words[word] + f".{{{STACKS[stack]}}}" for word in ("qk", "vo"))
        found += [KeyBias(name + "k_proj.bias", qk), ValueBias(name + "v_proj.bias", vo, name + "out_proj.weight")]
    return found


def stream_norms(stack: str, facts: Facts) -> list[StreamNorm]:
    """The norms in order, each with the readers and the writer that come after it."""
    base = f"model.{stack}."
    steps: list[tuple[str, tuple[str, ...], str]] = []  # the norm, who reads before it, the bias written there
    for number in range(facts[f"{stack}_layers"]):
        layer = f"{base}layers.{number}."
        cross = layer + "encoder_attn"
        own = tuple(layer + "self_attn." + name for name in QKV)
        steps.append((layer + "self_attn_layer_norm", own, layer + "self_attn.out_proj.bias"))
        if stack == "decoder":
            steps.append((cross + "_layer_norm", (cross + ".q_proj.weight",), cross + ".out_proj.bias"))
        steps.append((layer + "final_layer_norm", (layer + "fc1.weight",), layer + "fc2.bias"))
    memory = tuple(layer_of("decoder") + f"encoder_attn.{name}" for name in QKV[1:])
    names = [base + "layernorm_embedding", *(norm for norm, _, _ in steps)]
    following = [*((readers, bias) for _, readers, bias in steps), (memory if stack == "encoder" else READERS, None)]
    return [StreamNorm(name, readers, bias) for name, (readers, bias) in zip(names, following, strict=True)]


def task_heads(facts: Facts) -> dict[str, str]:
    output = {} if facts.tied or facts.head != "lm" else {"lm_head.weight": "_vocab residual'"}
    return {
        **output,
        "final_logits_bias?": "_ _vocab",
        "classification_head.dense.weight?": "dense residual'",
        "classification_head.dense.bias?": "dense",
        **parts.labels("classification_head.out_proj", "dense'"),
        **parts.labels("qa_outputs"),
    }
