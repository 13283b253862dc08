"""Settings from a config's section and from the environment, and the sentence if one is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from deepspeed_smddp.config.fields import PREFIX, Field, Model, settings_of, show
from deepspeed_smddp.config.schema import (
    DEBUG,
    VARIABLES,
    DebugSettings,
    ProcessSettings,
    SmddpConfig,
)
from deepspeed_smddp.errors import SmddpConfigError, warn_once

SECTION = "smddp"

# Keys of the section that older files have: accepted, without effect.
_RETIRED_KEYS = {
    "hierarchical_allgather": "AllGather between hosts always runs along the rails and then "
    "inside each host",
    "check_first_use": f"{DEBUG}=check_first_use=0 switches the check off",
}
_IN_DEBUG = {"transfer": "FABRIC_TRANSFER", "curve": "FABRIC_CURVE", "hmem": "FABRIC_HMEM"}
# Environment variables of older versions, and what replaces them.
RETIRED_VARIABLES = {
    **{
        PREFIX + _IN_DEBUG.get(key, key.upper()): f"{DEBUG}={key}=... replaces it, for developers"
        for key in DebugSettings.fields()
    },
    **{
        PREFIX + one.path.upper().replace(".", "_"): f'the key "{SECTION}.{one.path}" of a '
        "DeepSpeed config, or deepspeed_smddp.configure(), replaces it"
        for one in settings_of(SmddpConfig)
        if one.variable is None
    },
    f"{PREFIX}HIERARCHICAL_ALLGATHER": _RETIRED_KEYS["hierarchical_allgather"],
    f"{PREFIX}FABRIC_MESSAGES": "libfabric carries all messages; libfabric 2.x has the least time "
    "for short ones",
    f"{PREFIX}LEAVE_SHARED_CORES": "a waiting thread always leaves a core that another rank uses",
}


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
            "but may hold an object with the keys " + ", ".join(SmddpConfig.fields())
        )
    for key in _RETIRED_KEYS.keys() & section.keys():
        warn_once(key, f'smddp: "{SECTION}.{key}" has no effect any more: {_RETIRED_KEYS[key]}')
    kept = {str(key): value for key, value in section.items() if key not in _RETIRED_KEYS}
    return SmddpConfig(lambda path: f'"{SECTION}.{path}"', **kept)


def parse_variables(environment: Mapping[str, str]) -> tuple[dict[str, Any], ProcessSettings]:
    """What the environment sets: keys of the section, by name, and the settings of the process.

    Raises:
        SmddpConfigError: a variable holds a value that it may not hold.
    """
    found: dict[type[Model], dict[str, Any]] = {SmddpConfig: {}, ProcessSettings: {}}
    for name, one in VARIABLES.items():
        if text := environment.get(name):
            found[one.model][one.path] = _from_text(text, one.field)

    def named(path: str) -> str:
        return PREFIX + path.upper()

    section = SmddpConfig(named, **found[SmddpConfig])
    return given_keys(section), ProcessSettings(named, **found[ProcessSettings])


def parse_debug(text: str) -> DebugSettings:
    """The settings of ``SMDDP_DEBUG``.

    Raises:
        SmddpConfigError: an unknown key or a wrong value, in one sentence.
    """
    fields = DebugSettings.fields()
    values: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        key, _, value = pair.partition("=")
        values[key] = _from_text(value, fields[key]) if key in fields else value
    return DebugSettings(lambda path: f"{path} in {DEBUG}", **values)


def given_keys(section: Model, prefix: str = "") -> dict[str, Any]:
    """The values of the keys that were given, by dotted path; defaults are left out."""
    found: dict[str, Any] = {}
    for name, value in vars(section).items():
        if isinstance(value, Model):
            found |= given_keys(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the section with these values, by dotted path."""
    section: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        node = section
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return section


def _from_text(text: str, field: Field) -> Any:
    """The value that a text of the environment stands for."""
    lowered = text.strip().lower()
    kind = get_args(field.kind)[0] if get_origin(field.kind) is Annotated else field.kind
    if kind is str:
        return text
    if kind is bool:
        return {"1": True, "true": True, "0": False, "false": False}.get(lowered, text)
    try:
        return lowered if get_origin(kind) is Literal else float(lowered)
    except ValueError:
        return lowered
