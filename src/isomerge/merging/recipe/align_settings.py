"""What a recipe says about alignment: the words of `isomerge.align`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from isomerge.alignment.levels import Scope, parse_layers
from isomerge.choices import EVIDENCE, Evidence, Level, Many, Measure, Part, Site
from isomerge.errors import RequestError
from isomerge.merging.recipe.data_settings import DataEntry
from isomerge.merging.recipe.fields import Count, Definition, Reference, Switch, kind_of


def _read_layers(value: Any) -> Any:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str):
        raise ValueError(f'layers are written as in "0-4,7", and this is {kind_of(value)}')
    try:
        parse_layers(text, 10**6)
    except RequestError as error:
        raise ValueError(str(error).partition(": ")[2]) from None
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
    many: Many = Field("anchor", description="Move all to the anchor, or to a common mean.")
    layers: Annotated[str, BeforeValidator(_read_layers)] | None = Field(None, description='Layers, as in "0-4,7".')
    scale: Switch | None = Field(None, description="Rescale heads too; by default only level full does.")
    sweeps: Count = Field(15, description="At most this many rounds over all spaces.")
    only: Part | None = Field(None, description="Move only this part.")
    evidence: Annotated[Evidence | dict[str, Evidence], BeforeValidator(_read_evidence)] | None = Field(
        None, description="What decides: with data, activations for the residual stream and weights elsewhere."
    )
    measure: Measure = Field("covariance", description="How activations are compared.")
    site: Site = Field("post", description="Feed-forward units before or after their activation.")
    data: DataEntry | None = Field(None, description="The data to see activations on; the recipe's if not named.")

    @model_validator(mode="after")
    def _fits(self) -> AlignSettings:
        try:
            Scope(self.level, self.scale, self.layers, self.only)
        except RequestError as error:
            raise ValueError(str(error).replace("Drop --scale", "Leave scale out")) from None
        return self

    def options(self) -> dict[str, Any]:
        """The arguments of `isomerge.align` that these settings are, besides the anchor and the data."""
        keys = ("level", "many", "layers", "scale", "sweeps", "only", "evidence", "measure", "site")
        return {key: getattr(self, key) for key in keys}
