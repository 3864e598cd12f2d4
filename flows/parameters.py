"""A deployment's form: every field of a run, optional, in its section.

    {"training": {"epochs": 2}}   as Prefect's page fills the form in; a field left empty or null stays as the file has it
    {"training.epochs": 2}        dotted keys, as the command line writes them; null unsets an optional value

The server refuses a form with an unknown field or a value out of bounds before a run exists; `settings` checks everything again.
"""

import types
from collections.abc import Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, create_model, model_serializer
from pydantic.fields import FieldInfo
from pydantic.json_schema import SkipJsonSchema

from dflash_core.config import Config


def _plain(field: FieldInfo) -> Any:
    """A field's type without None, its bounds kept: the form then shows one input and no choice between types."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) in (Union, types.UnionType) else (field.annotation,)
    kind = Union[tuple(kind for kind in kinds if kind is not types.NoneType)]  # noqa: UP007
    for bound in field.metadata:
        kind = Annotated[kind, bound]
    return kind


def _no_default(schema: dict[str, Any]) -> None:
    """An unset field shows as empty, not as null."""
    schema.pop("default", None)


class _Form(BaseModel):
    """What is not filled in is not there, also where a form is shown as a default."""

    @model_serializer(mode="wrap")
    def _filled_in(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if value is not None or key in (self.model_extra or {})}


def _form(model: type[BaseModel], name: str, purpose: str, **config: Any) -> type[BaseModel]:
    """`model` with every field optional, sections included."""
    fields: dict[str, Any] = {}
    for key, field in model.model_fields.items():
        kind = _plain(field)
        description = field.description
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            description = kind.__doc__
            kind = _form(kind, kind.__name__.removesuffix("Config"), str(description), extra="forbid")
        shown = Field(None, title=key, description=description, json_schema_extra=_no_default)
        fields[key] = (kind | SkipJsonSchema[None], shown)
    base = type(name, (_Form,), {"model_config": ConfigDict(hide_input_in_errors=True, **config)})
    return create_model(name, __base__=base, __doc__=purpose, **fields)


Overrides = _form(Config, "Overrides", "Fields of the run to change; what is left empty stays as the file has it.", extra="allow")


UNCHANGED = Overrides()


def given(overrides: BaseModel | Mapping[str, Any] | None) -> dict[str, Any]:
    """What a form or a mapping asks to change, as `settings.resolve` takes it."""
    if overrides is None:
        return {}
    if not isinstance(overrides, BaseModel):
        return dict(overrides)
    form = overrides.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude=set(overrides.model_extra or {}))
    return form | dict(overrides.model_extra or {})
