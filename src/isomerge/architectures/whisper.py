"""Whisper: two stacks with a stream each; convolutions start the encoder's, which therefore only permutes."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, Gauge, KeyBias, Norm, Shift, ValueBias
from isomerge.symmetry.groups import Group, Permutation, Rotation, RotationFixingOnes

ENCODER, DECODER = "encoder", "decoder"
LETTERS = {ENCODER: "i", DECODER: "j"}
OUTPUT = "proj_out.weight"


@architecture("whisper", summary="pre-LayerNorm encoder–decoder of sound, learned positions", tied_by_default=True)
def whisper(facts: Facts) -> Architecture:
    name = next(iter(facts.get("architectures", [])), "")
    sound = facts.head == "audio"
    stacks = [ENCODER] if sound else [DECODER] if name.endswith("ForCausalLM") else [ENCODER, DECODER]
    base = "" if sound else "model."
    spaces, tensors = starts(base, stacks, facts)
    norms, gauges, writers = list[Norm](), list[Gauge](), list[str]()
    for stack in stacks:
        spaces |= stack_spaces(stack, facts)
        tensors |= stack_tensors(base, stack, facts)
        norms += stack_norms(base, stack)
        gauges += attention_gauges(base, stack)
        branches = [*attentions(base, stack), layer_of(base, stack) + "fc2"]
        ends = [name + "out_proj" if name.endswith(".") else name for name in branches]
        writers += [
            f"{base}{stack}.embed_positions.weight",
            *(end + kind for end in ends for kind in (".weight", ".bias")),
        ]
    table = base + "decoder.embed_tokens.weight"
    weighted = sound and facts.get("use_weighted_layer_sum", False)  # all hidden states are read, and no norm of them
    if sound and not weighted:
        norms.append(Norm(base + "encoder.layer_norm", ("projector.weight",)))
    return Architecture(
        prefix=base,
        repeat={LETTERS[stack]: facts[f"{stack}_layers"] for stack in stacks},
        spaces=spaces,
        tensors=tensors,
        norms=norms,
        gauges=[*gauges, *([Shift((base + "decoder.embed_positions.weight", table))] if not facts.tied else [])],
        writers=[] if weighted else [*writers, *([] if facts.tied else [table])],
        tied={OUTPUT: (table, 1.0)} if DECODER in stacks else {},
        untied_config=parts.UNTIED,
    )


def starts(base: str, stacks: list[str], facts: Facts) -> tuple[dict[str, Group], dict[str, str]]:
    """Where the streams start and end, and the streams themselves."""
    width = facts["d_model"]
    spaces: dict[str, Group] = {"encoder.residual": Permutation(width)}
    tensors: dict[str, str] = {}
    if ENCODER in stacks:
        spaces["conv"] = Permutation(width)
        tensors |= {
            base + "encoder.conv1.weight": "conv _mels _kernel",
            base + "encoder.conv1.bias": "conv",
            base + "encoder.conv2.weight": "encoder.residual conv _kernel",
            base + "encoder.conv2.bias": "encoder.residual",
        }
    if DECODER in stacks:
        spaces["decoder.residual"] = Permutation(width) if facts.tied else RotationFixingOnes(width)
        output = {} if facts.tied or facts.head != "lm" else {OUTPUT: "_vocab decoder.residual'"}
        tensors |= {base + "decoder.embed_tokens.weight": "_vocab decoder.residual", **output}
    else:  # two linear layers, one after the other
        spaces["projector"] = Rotation(facts.get("classifier_proj_size", 256))
        tensors |= {"projector.weight": "projector encoder.residual'", "projector.bias": "projector"}
        tensors |= {**parts.labels("classifier", "projector'"), "layer_weights?": "_"}
    return spaces, tensors


def layer_of(base: str, stack: str) -> str:
    return f"{base}{stack}.layers.{{{LETTERS[stack]}}}."


def attentions(base: str, stack: str) -> dict[str, dict[str, str]]:
    """The attentions of a layer, with the words of their spaces."""
    words = {word: f"{stack}.{word}" for word in ("residual", "head", "qk", "vo", "ffn", "unit")}
    own = {layer_of(base, stack) + "self_attn.": words}
    cross = {
        "residual": "decoder.residual",
        "head": "decoder.cross",
        "qk": "decoder.cross_qk",
        "vo": "decoder.cross_vo",
    }
    return own if stack == ENCODER else {**own, layer_of(base, stack) + "encoder_attn.": cross}


def uses_relu(facts: Facts) -> bool:
    return bool(facts.get("activation_function", "gelu") == "relu")


def stack_spaces(stack: str, facts: Facts) -> dict[str, Group]:
    heads = facts[f"{stack}_attention_heads"]
    own: dict[str, Group] = {
        **parts.head_spaces(heads, facts["d_model"] // heads),
        "ffn.{i}": Permutation(facts[f"{stack}_ffn_dim"]),
        **parts.relu_units(uses_relu(facts)),
    }
    found: dict[str, Group] = {}
    for words in attentions("", stack).values():
        found |= parts.renamed({s: g for s, g in own.items() if s.split(".")[0] in words}, words, LETTERS[stack])
    return found


def stack_tensors(base: str, stack: str, facts: Facts) -> dict[str, str]:
    layer, letter = layer_of(base, stack), LETTERS[stack]
    stream = f"{stack}.residual"
    cross = [layer + "encoder_attn_layer_norm"] if stack == DECODER else []
    norms = (layer + "self_attn_layer_norm", *cross, layer + "final_layer_norm", f"{base}{stack}.layer_norm")
    both = attentions(base, stack)
    feed_forward = parts.feed_forward(layer + "fc1", layer + "fc2", uses_relu(facts))
    tensors = {
        f"{base}{stack}.embed_positions.weight": f"_positions {stream}",
        **parts.layer_norms(*norms, space=stream),
        **parts.renamed(feed_forward, both[layer + "self_attn."], letter),
    }
    for name, words in both.items():
        own = {
            **parts.query_key(name + "q_proj", name + "k_proj"),
            **parts.value_output(name + "v_proj", name + "out_proj"),
        }
        del own[name + "k_proj.bias"]
        tensors |= parts.renamed(own, words, letter)
    if stack == DECODER:  # keys and values are read from the encoder
        for kind in ("k_proj.weight", "v_proj.weight"):
            read = layer + "encoder_attn." + kind
            tensors[read] = tensors[read].replace("decoder.residual'", "encoder.residual'")
    return tensors


def stack_norms(base: str, stack: str) -> list[Norm]:
    layer = layer_of(base, stack)
    memory = tuple(layer_of(base, DECODER) + f"encoder_attn.{x}_proj.weight" for x in "kv")
    cross = [Norm(layer + "encoder_attn_layer_norm", (layer + "encoder_attn.q_proj.weight",))]
    return [
        Norm(layer + "self_attn_layer_norm", tuple(layer + f"self_attn.{x}_proj.weight" for x in "qkv")),
        *(cross if stack == DECODER else []),
        Norm(layer + "final_layer_norm", (layer + "fc1.weight",)),
        Norm(f"{base}{stack}.layer_norm", memory if stack == ENCODER else (OUTPUT,)),
    ]


def attention_gauges(base: str, stack: str) -> list[Gauge]:
    found: list[Gauge] = []
    for name, words in attentions(base, stack).items():
        qk, vo = (words[word] + f".{{{LETTERS[stack]}}}" for word in ("qk", "vo"))
        found += [KeyBias(name + "k_proj.bias", qk), ValueBias(name + "v_proj.bias", vo, name + "out_proj.weight")]
    return found
