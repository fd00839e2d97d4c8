"""What a recipe may say. The same definitions check it, write it back and make the schema for editors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    InstanceOf,
    PlainSerializer,
    PrivateAttr,
    Strict,
    Tag,
    WithJsonSchema,
    model_validator,
)

from isomerge.checkpoint.dtypes import parse_dtype
from isomerge.choices import LayerScale
from isomerge.merging.recipe.document import as_data, dump
from isomerge.merging.recipe.entries import walk
from isomerge.merging.recipe.fields import (
    OPTIONS,
    TAG,
    Count,
    Definition,
    Dtype,
    Reference,
    Settings,
    Switch,
    Text,
    as_text,
    kind_of,
    read_reference,
)
from isomerge.merging.recipe.model_reference import ModelReference
from isomerge.merging.recipe.problem_list import Places
from isomerge.merging.recipe.settings import (
    AlignSettings,
    CalibrateSettings,
    DataEntry,
    DataSettings,
    RepairSettings,
    read_switch,
)


# --- models, slices, modules ------------------------------------------------------------------------------------------
class ModelEntry(Definition):
    """One of the models."""

    model: Reference
    parameters: Settings | None = Field(None, description=OPTIONS)
    data: DataEntry | None = Field(
        None, description="The data of this model, for methods that measure each on its own."
    )


def _read_range(value: Any) -> Any:
    numbers = isinstance(value, (list, tuple)) and [type(v) for v in value] == [int, int]
    if not numbers or not 0 <= value[0] < value[1]:
        raise ValueError(
            f"layer_range is [first, end) as in [0, 16], the end not included, and this is {kind_of(value)}"
            if not numbers
            else f"layer_range {list(value)} holds no layer: it is [first, end), the end not included"
        )
    return tuple(value)


class SliceSource(Definition):
    """Layers of one model."""

    model: Reference
    layer_range: Annotated[tuple[int, int], BeforeValidator(_read_range)] = Field(
        description="[first, end): the layers to take, the end not included."
    )
    parameters: Settings | None = Field(None, description=OPTIONS)


class OutputSlice(Definition):
    """Layers of the output: as many as each of its sources has."""

    sources: tuple[SliceSource, ...] = Field(min_length=1)
    base_model: Reference | None = Field(None, description="The base of this slice, if not the recipe's.")
    parameters: Settings | None = Field(None, description=OPTIONS)


class Module(Definition):
    """One part of a model with several: text_decoder, vision_tower, encoder, decoder…"""

    models: Annotated[tuple[ModelEntry, ...], Field(min_length=1)] | None = None
    slices: Annotated[tuple[OutputSlice, ...], Field(min_length=1)] | None = None
    parameters: Settings | None = Field(None, description=OPTIONS)


# --- experts ----------------------------------------------------------------------------------------------------------
Prompts = Annotated[tuple[Annotated[str, Strict()], ...], Field(min_length=1)]


def _read_factor(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 3.4e38:
        raise ValueError(f"this is a number, and here is {kind_of(value)}")
    return float(value)


Factor = Annotated[float, BeforeValidator(_read_factor)]


class ExpertEntry(Definition):
    """One expert of a mixture: the feed-forwards of a model, and the texts that are to be sent to it."""

    source_model: Reference
    positive_prompts: Prompts | None = Field(None, description="Texts that should be sent to this expert.")
    negative_prompts: Prompts | None = Field(None, description="Texts that should not.")
    noise_scale: Factor | None = Field(None, description="Add normal noise of this size to its weights.")
    residual_scale: Factor | None = Field(None, description="Multiply what it adds to the stream by this.")


# --- tokenizer --------------------------------------------------------------------------------------------------------
class ZeroToken(Definition):
    """A row of zeros."""

    kind: Literal["zero"]


class ModelToken(Definition):
    """The row of some token of some model."""

    kind: Literal["model_token"]
    model: Reference
    token: Text | None = None
    token_id: Annotated[int, Strict(), Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _one_of(self) -> ModelToken:
        if problem := not_exactly_one({"token": self.token, "token_id": self.token_id}, ("token", "token_id")):
            raise ValueError(problem)
        return self


def _token_form(value: Any) -> str | None:
    """Which of the three ways to name a token's row this is; None if it is no known one."""
    if isinstance(value, dict):
        return {"zero": TAG + "zero", "model_token": TAG + "model token"}.get(str(value.get("kind")))
    if isinstance(value, ZeroToken):
        return TAG + "zero"
    return TAG + ("model token" if isinstance(value, ModelToken) else "model")


class TokenSettings(Definition):
    """Where one token's row comes from."""

    source: (
        Annotated[
            Annotated[ZeroToken, Tag(TAG + "zero")]
            | Annotated[ModelToken, Tag(TAG + "model token")]
            | Annotated[Reference, Tag(TAG + "model")],
            Discriminator(_token_form),
        ]
        | None
    ) = Field(None, description="A model, {kind: zero}, or {kind: model_token, model, token or token_id}.")
    force: Switch = Field(False, description="Use it also in the models that have a row of their own for this token.")


def _read_tokenizer_source(value: Any) -> Any:
    return value if isinstance(value, str) and value in ("union", "base") else read_reference(value)


TokenizerSource = Annotated[
    InstanceOf[ModelReference] | Literal["union", "base"],
    BeforeValidator(_read_tokenizer_source),
    PlainSerializer(as_text),
    WithJsonSchema(
        {"type": "string", "minLength": 1, "description": "union, base, or the model whose tokenizer the output gets."}
    ),
]


class TokenizerSettings(Definition):
    """Which tokens the output has and where their rows come from."""

    source: TokenizerSource = "union"
    tokens: dict[str, TokenSettings] | None = None
    pad_to_multiple_of: Count | None = Field(None, description="Add unused rows up to a multiple of this number.")


def _read_name(value: Any) -> Any:
    if isinstance(value, str) and (value.startswith(("/", "~")) or ".." in value.split("/") or "\\" in value):
        raise ValueError(f"the name '{value}' leads out of the folder of intermediate models; use a plain word")
    return value


# --- the recipe -------------------------------------------------------------------------------------------------------
class Recipe(Definition):
    """One model to be made. Read it with `load_recipe`, or make it with `recipe_of`."""

    name: Annotated[Text, BeforeValidator(_read_name)] | None = Field(
        None, description="How later documents of the same file call the result."
    )
    merge_method: Text = Field(description="How tensors are merged.")
    base_model: Reference | None = Field(
        None, description="The common ancestor, and the donor of config and tokenizer."
    )
    models: Annotated[tuple[ModelEntry, ...], Field(min_length=1)] | None = Field(
        None, description="The models, all layers of each."
    )
    slices: Annotated[tuple[OutputSlice, ...], Field(min_length=1)] | None = Field(
        None, description="The output's layers, from the first to the last."
    )
    modules: Annotated[dict[str, Module], Field(min_length=1)] | None = Field(
        None, description="Models or slices for each part of a model with several parts."
    )
    parameters: Settings | None = Field(None, description=OPTIONS)
    experts: Annotated[tuple[ExpertEntry, ...], Field(min_length=1)] | None = Field(
        None, description="The experts of a mixture (merge_method: moe), as in mergekit-moe."
    )
    shared_experts: Annotated[tuple[ExpertEntry, ...], Field(min_length=1, max_length=1)] | None = Field(
        None, description="The expert that every token is sent to, where the class has one."
    )
    dtype: Dtype | None = Field(None, description="The dtype of the output, if out_dtype does not say otherwise.")
    out_dtype: Dtype | None = Field(None, description="The dtype of the output.")
    tokenizer: TokenizerSettings | None = None
    chat_template: Text | None = Field(None, description="auto, the name of a known template, or a Jinja template.")
    align: Annotated[AlignSettings | None, BeforeValidator(read_switch)] = Field(
        None, description="Align the models first: true, or what to align and how."
    )
    layer_scale: LayerScale | None = Field(
        None, description="Scale each model's change in each layer before merging: larv, by what the weights say of it."
    )
    data: DataEntry | None = Field(None, description="Data to run the models on: a path, or a path and how to read it.")
    calibrate: CalibrateSettings | None = Field(None, description="How models are measured on the data.")
    repair: Annotated[RepairSettings | None, BeforeValidator(read_switch)] = Field(
        None, description="After merging, give the units the mean and spread they have in the models: true, or where."
    )
    seed: Annotated[int, Strict(), Field(ge=0)] = Field(0, description="Names the random numbers of random methods.")

    _places: Places = PrivateAttr(default_factory=Places)

    @property
    def places(self) -> Places:
        """Where each part was written."""
        return self._places

    def placed(self, places: Places) -> Recipe:
        """This recipe, with the lines it was read from."""
        copy = self.model_copy()
        copy._places = places
        return copy

    def referenced_models(self) -> list[ModelReference]:
        """Every model whose weights are used: the base first, then in the order of the file."""
        models = [self.base_model] if self.base_model else []
        for entry in walk(self):
            if entry.kind == "model":
                models.append(entry.content.model)
            elif entry.kind == "slice":
                models += [source.model for source in entry.content.sources]
                models += [entry.content.base_model] if entry.content.base_model else []
        return list(dict.fromkeys(models))

    def entries(self) -> list[ModelEntry]:
        """The entries of `models`, of the recipe or of its modules."""
        return [entry.content for entry in walk(self) if entry.kind == "model"]

    def data_of(self, model: ModelReference) -> DataSettings | None:
        """The data that a model is measured on: its own, or the recipe's."""
        return next((e.data for e in self.entries() if e.model == model and e.data is not None), self.data)

    @property
    def asked_dtype(self) -> torch.dtype | None:
        """What the result is written in; None: what its models are stored in."""
        asked = self.out_dtype or self.dtype
        return parse_dtype(asked) if asked else None

    def to_yaml(self) -> str:
        """The recipe as YAML, with every abbreviation written out. Reading it gives an equal recipe."""
        return dump(as_data(self))

    def mergekit_yaml(self) -> str | None:
        """The recipe as mergekit understands it, or None if it uses what mergekit has not."""
        from isomerge.merging.recipe.mergekit import mergekit_yaml

        return mergekit_yaml(self)


def not_exactly_one(data: Mapping[str, Any], keys: Sequence[str]) -> str:
    """What is wrong when not exactly one of the keys is given; nothing if it is."""
    given = [key for key in keys if data.get(key) is not None]
    if len(given) == 1:
        return ""
    names = ", ".join(f"'{key}'" for key in keys[:-1]) + f" or '{keys[-1]}'"
    state = "none of them is here" if not given else "here are " + " and ".join(f"'{key}'" for key in given)
    return f"exactly one of {names} is needed, and {state}"
