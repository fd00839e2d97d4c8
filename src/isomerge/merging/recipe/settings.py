"""What a recipe says about alignment, data, measuring and repair."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, Strict, WithJsonSchema, model_validator

from isomerge.alignment.scope import parse_layers
from isomerge.choices import (
    EVIDENCE,
    FISHER_KINDS,
    DataKind,
    Evidence,
    FisherKind,
    Goals,
    LearnTowards,
    Level,
    Many,
    Measure,
    OrderSolver,
    Part,
    Site,
)
from isomerge.errors import RequestError
from isomerge.merging.recipe.fields import Count, Definition, Reference, Switch, Text, kind_of
from isomerge.name_patterns import NamePattern


def _read_column(value: Any) -> Any:
    """A column's name, or its position from 0."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise ValueError(f"a column is a name or a position from 0, and this is {kind_of(value)}")
    return value


Column = Annotated[
    str,
    BeforeValidator(_read_column),
    WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {"type": "integer"}]}),
]


def _read_pattern(value: str) -> str:
    try:
        NamePattern(value)
    except ValueError as error:
        raise ValueError(
            f"'{value}' is no regular expression ({error}). A part of the name is enough, as in q_proj"
        ) from None
    return value


Pattern = Annotated[Text, AfterValidator(_read_pattern)]


class DataSettings(Definition):
    """Data that models are run on."""

    path: Text = Field(
        description="A folder or archive of images; .txt, .csv, .tsv, .jsonl or CoNLL; a folder of those."
    )
    split: Text | None = Field(None, description="train, validation or test, where the data has parts.")
    limit: Count | None = Field(None, description="Use this many examples, drawn evenly over the data.")
    kind: DataKind | None = Field(None, description="What the data is, where it cannot be seen.")
    text: Column | None = Field(None, description="The column of the texts; two with a comma between.")
    label: Column | None = Field(None, description="The column of the labels.")
    length: Annotated[int, Strict(), Field(ge=2)] | None = Field(None, description="Cut texts to this many tokens.")
    seed: Annotated[int, Strict(), Field(ge=0)] = Field(
        0, description="Names the draw of the examples and their order."
    )
    batch_size: Count = Field(64, description="Examples at once.")

    def opening(self) -> dict[str, Any]:
        """The arguments of `open_data` beside the path."""
        return {key: getattr(self, key) for key in ("kind", "split", "text", "label", "length")}


def read_data(value: Any) -> Any:
    """`data: PATH` is short for `data: {path: PATH}`."""
    return {"path": os.fspath(value)} if isinstance(value, (str, os.PathLike)) else value


DataEntry = Annotated[DataSettings, BeforeValidator(read_data)]


def _read_fisher(value: Any) -> Any:
    return "true" if value is True else value


class CalibrateSettings(Definition):
    """How the models are measured on the data, for methods that weigh by what was measured."""

    fisher: Annotated[
        FisherKind,
        BeforeValidator(_read_fisher),
        WithJsonSchema({"enum": [*FISHER_KINDS, True]}),
    ] = Field("true", description="Labels as each model predicts them, or those of the data.")
    limit: Count | None = Field(None, description="Measure on this many examples; the data's own limit if not named.")
    samples: Count = Field(1, description="Draws of a label per example, where labels are too many to sum over.")
    only: Pattern | None = Field(
        None, description="Measure only linear maps whose name contains this; average the others."
    )


class RepairSettings(Definition):
    """Give the units of the merged model the mean and spread they have in its parents."""

    only: Pattern | None = Field(
        None, description="Only maps whose name contains this; by default those into feed-forward units."
    )
    goals: Goals = Field(
        "auto",
        description="Whose units count on an example: those of all models, of the model whose data it is, or of the "
        "expert. auto is own where every model has data, else mean.",
    )
    temperature: Annotated[float, Field(gt=0)] = Field(1.0, description="Of the expert's posterior.")


def read_switch(value: Any) -> Any:
    """true is all defaults, false is nothing."""
    return ({} if value else None) if isinstance(value, bool) else value


def _read_layers(value: Any) -> Any:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str):
        raise ValueError(f'layers are written as in "0-4,7", and this is {kind_of(value)}')
    try:
        parse_layers(text, 10**6)
    except RequestError as error:
        raise ValueError(str(error)) from None
    return text


def _read_evidence(value: Any) -> Any:
    """One word for all spaces, or one for each; told here, so that there is one sentence for both forms."""
    words = list(value.values()) if isinstance(value, dict) else [value]
    wrong = [word for word in words if word not in EVIDENCE]
    if wrong or not words:
        raise ValueError(
            f"evidence is weights, activations or mix, or one of these by space as in {{residual: mix}}, and this is "
            f"{kind_of(wrong[0] if wrong else value)}"
        )
    return value


class AlignSettings(Definition):
    """Align the models before they are merged."""

    level: Level = Field("full", description="How much may move.")
    anchor: Reference | None = Field(None, description="The model the others are moved to: base_model, or the first.")
    many: Many = Field("anchor", description="Move all to the anchor, to a common mean, or to each other.")
    layers: Annotated[str, BeforeValidator(_read_layers)] | None = Field(None, description='Layers, as in "0-4,7".')
    scale: Switch | None = Field(None, description="Rescale heads too; by default only level full does.")
    sweeps: Count = Field(15, description="At most this many rounds over all spaces.")
    solver: OrderSolver = Field("assignment", description="How the orders of units are found.")
    only: Part | None = Field(None, description="Move only this part.")
    evidence: Annotated[Evidence | dict[str, Evidence], BeforeValidator(_read_evidence)] | None = Field(
        None, description="What decides: with data, activations for the residual stream and weights elsewhere."
    )
    measure: Measure = Field("covariance", description="How activations are compared.")
    site: Site = Field("post", description="Feed-forward units before or after their activation.")
    learn: Annotated[int, Field(ge=0)] = Field(
        0, description="Then learn the alignment for this many gradient steps on the data; no labels are needed."
    )
    learn_towards: LearnTowards = Field(
        "predictions", description="What is learned towards: the predictions of the models, or the labels of the data."
    )
    data: DataEntry | None = Field(
        None, description="The data to see activations on, and to learn from; the recipe's if not named."
    )

    @model_validator(mode="after")
    def _fits(self) -> AlignSettings:
        if self.level == "permutation" and self.scale:
            raise ValueError("nothing can be rescaled at level permutation: leave 'scale' out")
        if self.learn_towards != "predictions" and not self.learn:
            raise ValueError("nothing is learned: give 'learn' a number of steps, or leave 'learn_towards' out")
        return self

    def options(self) -> dict[str, Any]:
        """The arguments of `isomerge.align` that these settings are, besides the anchor and the data."""
        return {key: getattr(self, key) for key in type(self).model_fields if key not in ("anchor", "data")}
