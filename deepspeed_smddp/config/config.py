"""Parses the "smddp" section of a DeepSpeed config and the values of environment variables."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed_smddp.config import keys
from deepspeed_smddp.config.keys import Key, Section, WrongKeyError
from deepspeed_smddp.config.sections import SmddpConfig as SmddpConfig
from deepspeed_smddp.config.variables import Variable
from deepspeed_smddp.errors import SmddpConfigError

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
            "but may hold an object with the keys " + ", ".join(SmddpConfig.keys)
        )
    try:
        return SmddpConfig(**{str(key): value for key, value in section.items()})
    except WrongKeyError as error:
        raise SmddpConfigError(_sentence(error)) from None


def set_keys(section: SmddpConfig) -> dict[str, Any]:
    """The values of the keys that were given, by dotted path; defaults are left out."""
    found: dict[str, Any] = {}
    for name in section.given:
        value = getattr(section, name)
        if isinstance(value, Section):
            found.update({f"{name}.{key}": getattr(value, key) for key in value.given})
        else:
            found[name] = value
    return found


def parse_variable(variable: Variable, text: str) -> Any:
    """The value of a key of the section, from the text of its environment variable.

    Raises:
        SmddpConfigError: the key may not hold the value.
    """
    assert variable.key is not None
    key = key_of(variable.key)
    try:
        section = parse_section(nested({variable.key: _from_text(text, key)}))
    except SmddpConfigError:
        raise SmddpConfigError(
            f"{variable.environment_name} is {show(text)}, but may hold {key.description}"
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


def key_of(path: str) -> Key:
    """The key at a dotted path."""
    *parents, last = path.split(".")
    return _keys(parents)[last]


def _keys(parents: Iterable[str]) -> Mapping[str, Key]:
    """Those of a sub-section, by the keys that lead to it; without keys, of the whole section."""
    found = SmddpConfig.keys
    for key in parents:
        found = found[key].default.keys
    return found


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


def _from_text(text: str, key: Key) -> Any:
    lowered = text.strip().lower()
    if key.parse is keys.boolean:
        return {"1": True, "true": True, "0": False, "false": False}.get(lowered, text)
    if key.parse is keys.text:
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


def _sentence(error: WrongKeyError) -> str:
    held = show(error.held)
    if error.known:
        path = ".".join(error.path)
        return f'"{SECTION}.{path}" is {held}, but may hold {key_of(path).description}'
    *parents, key = error.path
    known = _keys(parents)
    where = ".".join([SECTION, *parents])
    guess = nearest(key, known)
    hint = f'did you mean "{guess}"?' if guess else "known keys: " + ", ".join(known)
    return f'"{key}": {held} is not a key of the section "{where}"; {hint}'
