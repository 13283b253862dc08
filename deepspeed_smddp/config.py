"""Parses the "smddp" section of a DeepSpeed config and the values of environment variables."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.sections import Section
from deepspeed_smddp.sections import SmddpConfig as SmddpConfig
from deepspeed_smddp.variables import Variable

SECTION = "smddp"


def parse_section(section: Any) -> SmddpConfig:
    """Validates the section of the file.

    Raises:
        SmddpConfigError: an unknown key or a wrong value, in one sentence.
    """
    if isinstance(section, SmddpConfig):
        return section
    if not isinstance(section, Mapping):
        raise SmddpConfigError(
            f'"{SECTION}" in the DeepSpeed config is {show(section)}, '
            "but may hold an object with the keys " + ", ".join(SmddpConfig.model_fields)
        )
    try:
        return SmddpConfig.model_validate(dict(section))
    except ValidationError as error:
        raise SmddpConfigError(_sentence(error)) from None


def set_keys(section: SmddpConfig) -> dict[str, Any]:
    """The values of the keys that were given, by dotted path; defaults are left out."""
    found: dict[str, Any] = {}
    for name in section.model_fields_set:
        value = getattr(section, name)
        if isinstance(value, Section):
            found.update({f"{name}.{key}": getattr(value, key) for key in value.model_fields_set})
        else:
            found[name] = value
    return found


def parse_variable(variable: Variable, text: str) -> Any:
    """The value of a key of the section, from the text of its environment variable.

    Raises:
        SmddpConfigError: the key may not hold the value.
    """
    assert variable.key is not None
    field = field_of(variable.key)
    try:
        section = parse_section(nested({variable.key: _from_text(text, field)}))
    except SmddpConfigError:
        raise SmddpConfigError(
            f"{variable.environment_name} is {show(text)}, but may hold {field.description}"
        ) from None
    return set_keys(section)[variable.key]


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The nested object of the section, from values by dotted path."""
    section: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        node = section
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return section


def field_of(path: str) -> FieldInfo:
    """The model's field at a dotted path."""
    *parents, last = path.split(".")
    return _model(parents).model_fields[last]


def _model(parents: Iterable[str]) -> type[Section]:
    """The model of a sub-section, by the keys that lead to it; without keys, the whole section."""
    model: type[Section] = SmddpConfig
    for key in parents:
        inner = model.model_fields[key].annotation
        assert isinstance(inner, type) and issubclass(inner, Section)
        model = inner
    return model


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a misspelt word most likely stands for."""
    words = list(known)
    close = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.6)
    if close:
        return close[0]
    starts = [name for name in words if name.startswith(word.lower())]
    return starts[0] if word and len(starts) == 1 else None


def show(value: Any) -> str:
    """A value in the syntax of the file, shortened."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _from_text(text: str, field: FieldInfo) -> Any:
    lowered = text.strip().lower()
    if field.annotation is bool:
        return {"1": True, "true": True, "0": False, "false": False}.get(lowered, text)
    if field.annotation is str:
        return text
    if lowered.startswith("["):
        try:
            return json.loads(text)
        except ValueError:
            return text
    try:
        return float(lowered)
    except ValueError:
        return lowered


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    location = [str(part) for part in first["loc"]]
    held = show(first["input"])
    if first["type"] == "extra_forbidden":
        *parents, key = location
        model = _model(parents)
        where = ".".join([SECTION, *parents])
        guess = nearest(key, model.model_fields)
        hint = (
            f'did you mean "{guess}"?' if guess else "known keys: " + ", ".join(model.model_fields)
        )
        return f'"{key}": {held} is not a key of the section "{where}"; {hint}'
    # pydantic adds a union's branches to the location; only the part that names a field is kept.
    names = [part for part in location[:1] if part in SmddpConfig.model_fields]
    if names and len(location) > 1 and isinstance(getattr(SmddpConfig(), names[0]), Section):
        names.append(location[1])
    key = ".".join(names)
    return f'"{SECTION}.{key}" is {held}, but may hold {field_of(key).description}'
