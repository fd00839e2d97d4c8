"""What a recipe says about data: where it is, what is measured on it, and the repair that uses it."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, Strict, WithJsonSchema

from isomerge.choices import FISHER_KINDS, DataKind, FisherKind
from isomerge.merging.recipe.fields import Count, Definition, Text, kind_of


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
        re.compile(value)
    except re.error as error:
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


def read_switch(value: Any) -> Any:
    """true is all defaults, false is nothing."""
    return ({} if value else None) if isinstance(value, bool) else value
