"""The settings of adapter_config.json that are read, with their types."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from isomerge.adapters.adapter import compiled


def _readable(pattern: str) -> str:
    try:
        compiled(pattern)
    except ValueError as error:
        raise ValueError(f"it is no pattern of names ({error})") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_readable)]
Rank = Annotated[int, Field(ge=1)]
Alpha = Annotated[float, Field(allow_inf_nan=False)]


class AdapterConfig(BaseModel):
    """What is read of adapter_config.json."""

    model_config = ConfigDict(extra="allow")

    r: Rank
    lora_alpha: Alpha = 8
    rank_pattern: dict[Pattern, Rank] | None = None
    alpha_pattern: dict[Pattern, Alpha] | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    fan_in_fan_out: bool | None = None
    lora_bias: bool | None = None
    ensure_weight_tying: bool | None = None
    bias: Literal["none", "lora_only", "all"] | None = None
    target_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
