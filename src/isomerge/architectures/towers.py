"""Language models inside models that also see images: the same families under longer names, with a projector.

The towers for images stay as they are: nothing of the language model reaches them, and a projector writes what they see
to the stream as an embedding table does.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from isomerge.architectures import architecture, gemma2, llama
from isomerge.errors import SpecificationError
from isomerge.symmetry.architecture import Architecture, Facts, Gauge, Norm, StreamNorm

PROJECTOR = "multi_modal_projector."


def text_facts(facts: Facts) -> Facts:
    """What config.json says of the language model, which has a table of its own there."""
    text = facts.config.get("text_config")
    if not isinstance(text, Mapping):
        raise SpecificationError(
            f"Reading config.json of a '{facts.config.get('model_type')}' model: text_config is missing. Copy the "
            "model's own config.json again."
        )
    return replace(facts, config=text)


def under_prefix(
    model: Architecture, prefix: str, elsewhere: tuple[str, ...], writers: Mapping[str, str]
) -> Architecture:
    """A language model whose names start with `prefix`, beside tensors `elsewhere` and more `writers` to its stream."""

    def name(own: str) -> str:
        return prefix + own if own.startswith(("model.", "lm_head.")) else own

    def each(names: Any) -> tuple[str, ...]:
        return tuple(name(own) for own in names)

    return replace(
        model,
        tensors={name(own): pattern for own, pattern in model.tensors.items()} | dict(writers),
        norms=[_renamed_norm(norm, name) for norm in model.norms],
        gauges=[_renamed_gauge(gauge, name) for gauge in model.gauges],
        writers=each(model.writers),
        tied={name(own): (name(source), factor) for own, (source, factor) in model.tied.items()},
        added={name(own): value for own, value in model.added.items()},
        elsewhere=elsewhere,
        prefix=prefix + model.prefix,
        other_prefixes=("model.language_model.",),
    )


def _renamed_norm(norm: Norm | StreamNorm, name: Callable[[str], str]) -> Norm | StreamNorm:
    return replace(norm, name=name(norm.name), readers=tuple(name(reader) for reader in norm.readers))


def _renamed_gauge(gauge: Gauge, name: Callable[[str], str]) -> Gauge:
    changed: dict[str, Any] = {}
    for part in fields(gauge):
        value = getattr(gauge, part.name)
        if part.name != "space":
            changed[part.name] = name(value) if isinstance(value, str) else tuple(name(v) for v in value)
    return replace(gauge, **changed)


@architecture(
    "gemma3", summary="the text model behind an image tower and a projector", tied_by_default=True, can_untie=False
)
def gemma3_with_images(facts: Facts) -> Architecture:
    weight = PROJECTOR + "mm_input_projection_weight"
    writers = {weight: "_seen residual", PROJECTOR + "mm_soft_emb_norm.weight": "_seen"}
    return under_prefix(gemma2.gemma3(text_facts(facts)), "language_model.", ("vision_tower.",), writers)


@architecture("mistral3", summary="the text model behind an image tower and a projector", tied_by_default=True)
def mistral3_with_images(facts: Facts) -> Architecture:
    writers = {
        PROJECTOR + "linear_1.weight": "_units _seen",
        PROJECTOR + "linear_1.bias?": "_units",
        PROJECTOR + "linear_2.weight": "residual _units",
        PROJECTOR + "linear_2.bias?": "residual",
        PROJECTOR + "norm.weight": "_seen",
        PROJECTOR + "patch_merger.merging_layer.weight": "_merged _patches",
    }
    return under_prefix(llama.llama(text_facts(facts)), "language_model.", ("vision_tower.",), writers)
