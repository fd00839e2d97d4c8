"""The kinds of values a recipe is made of: models, dtypes, settings of options."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    InstanceOf,
    PlainSerializer,
    Strict,
    Tag,
    WithJsonSchema,
    WrapValidator,
)

from isomerge.checkpoint.dtypes import FLOATS, parse_dtype
from isomerge.errors import RequestError, did_you_mean
from isomerge.merging.recipe.model_reference import ModelReference

Text = Annotated[str, Strict(), Field(min_length=1)]
Count = Annotated[int, Strict(), Field(ge=1)]
Switch = Annotated[bool, Strict()]


def read_reference(value: Any) -> Any:
    if isinstance(value, ModelReference):
        return value
    if isinstance(value, dict):
        return _read_long_reference(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"a model is a path or a hub id, and this is {kind_of(value)}; put it in quotes if it is a name"
        )
    return ModelReference.parse(value.strip())


def _read_long_reference(value: dict[str, Any]) -> ModelReference:
    """mergekit's long form, which it writes for paths with spaces: {model: {path, revision}, lora: {…}}."""
    parts: list[str | None] = []
    unknown = set(value) - {"model", "lora", "override_architecture"}
    if unknown or value.get("override_architecture") is not None:
        name = min(unknown) if unknown else "override_architecture"
        raise ValueError(f"'{name}' is not part of a model's long form, which has 'model' and 'lora'")
    for key in ("model", "lora"):
        part = value.get(key)
        part = {"path": part} if isinstance(part, str) or part is None else part
        if not isinstance(part, dict) or set(part) - {"path", "revision"} or (key == "model" and not part.get("path")):
            raise ValueError(f"'{key}' of a model's long form is a path, or a mapping with 'path' and 'revision'")
        parts += [part.get("path"), part.get("revision")]
    assert parts[0] is not None
    return ModelReference(parts[0], *parts[1:])


def kind_of(value: Any) -> str:
    """What a value is, in the words of YAML."""
    words = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    return "empty" if value is None or value == "" else f"{words.get(type(value), 'something else')} ({value!r})"


def as_text(value: Any) -> str:
    """`str` as a function with a signature, which older versions of pydantic ask for."""
    return str(value)


REFERENCE = "A model: a folder, a file or a hub id, with @revision and +adapter where needed."
Reference = Annotated[
    InstanceOf[ModelReference],
    BeforeValidator(read_reference),
    PlainSerializer(as_text),
    WithJsonSchema({"type": "string", "minLength": 1, "description": REFERENCE}),
]


def _read_dtype(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError(f"a dtype is a name such as bfloat16, and this is {kind_of(value)}")
    try:
        return str(parse_dtype(value)).removeprefix("torch.")
    except RequestError:
        raise ValueError(f"'{value}' is not a floating-point dtype. {did_you_mean(value, FLOATS)}") from None


Dtype = Annotated[
    str,
    BeforeValidator(_read_dtype),
    WithJsonSchema({"type": "string", "examples": ["bfloat16", "float16", "float32", "bf16", "fp16"]}),
]


TAG = "\x00"  # begins the names of alternatives, which pydantic puts into paths and no key of YAML can begin with


# --- parameters -------------------------------------------------------------------------------------------------------
def _read_scalar(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    raise ValueError(f"a value is a number, true, false or text, and this is {kind_of(value)}")


# Which of these an option takes is the method's business: see options.py.
Scalar = Annotated[
    bool | int | float | str | None,
    WrapValidator(lambda value, _: _read_scalar(value)),
    WithJsonSchema({"type": ["boolean", "number", "string", "null"]}),
]
Gradient = Annotated[tuple[Scalar, ...], Field(min_length=1)]


class Definition(BaseModel):
    """Frozen, and nothing unknown in it."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Conditional(Definition):
    """A value for the tensors whose name contains a text."""

    filter: Annotated[str, Strict()] | None = Field(
        None, description="A part of a tensor's name. Without it, or with '*', the value holds for every tensor."
    )
    value: Annotated[
        Annotated[Scalar, Tag(TAG + "value")] | Annotated[Gradient, Tag(TAG + "gradient")],
        Discriminator(lambda value: TAG + "gradient" if isinstance(value, (list, tuple)) else TAG + "value"),
    ] = Field(description="One value, or a list to be interpolated over the layers.")


def _form(value: Any) -> str:
    """Which of the four ways to write a setting this is."""
    if isinstance(value, (dict, Conditional)):
        return TAG + "one filter"
    if isinstance(value, (list, tuple)):
        return TAG + "filters" if any(isinstance(v, (dict, Conditional)) for v in value) else TAG + "gradient"
    return TAG + "value"


Setting = Annotated[
    Annotated[Scalar, Tag(TAG + "value")]
    | Annotated[Gradient, Tag(TAG + "gradient")]
    | Annotated[tuple[Conditional, ...], Tag(TAG + "filters")]
    | Annotated[Conditional, AfterValidator(lambda one: (one,)), Tag(TAG + "one filter")],
    Discriminator(_form),
]
Settings = dict[str, Setting]
OPTIONS = "Options of the merge method: a value, a gradient over the layers, or a list of {filter, value}."
