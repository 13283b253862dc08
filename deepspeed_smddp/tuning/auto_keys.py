"""Which keys a DeepSpeed config leaves to ``"auto"``, and filling them in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_smddp.config.parsing import SECTION
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.tuning.choice import SMDDP_KEYS, ZERO_DEFAULTS, ZERO_KEYS, Choice

_ZERO = "zero_optimization"

_NO_BOUND = 1 << 50  # of smddp's keys


def open_keys(config: Mapping[str, Any]) -> list[str]:
    """Keys of a ZeRO-3 config that are absent or "auto"; none if the stage is not 3."""
    if _part(config, _ZERO).get("stage") != 3:
        return []
    return [key for key, value in _held(config).items() if value == "auto"]


def without_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that leaves all sizes open."""
    return _having(config, dict.fromkeys((*SMDDP_KEYS, *ZERO_KEYS), "auto"))


def stated(config: Mapping[str, Any]) -> Choice:
    """The sizes without any choice: the config's, and DeepSpeed's defaults for open keys.

    Raises:
        SmddpConfigError: one of them is no number.
    """
    found: dict[str, Any] = {}
    for key, value in _held(config).items():
        size = ZERO_DEFAULTS.get(key, 0) if value == "auto" else value
        if isinstance(size, bool) or not isinstance(size, (int, float)) or size < 0:
            raise SmddpConfigError(
                f'"{key}" in the DeepSpeed config is {value!r}; it may hold "auto" or a number of '
                "at least 0"
            )
        found[key] = int(size)
    return Choice(**found)


def set_all(config: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """A copy with every size of the choice, so that nothing is left to measure."""
    ours = {key: getattr(choice, key) or _NO_BOUND for key in SMDDP_KEYS}
    return _having(config, ours | {key: getattr(choice, key) for key in ZERO_KEYS})


def element_size(config: Mapping[str, Any]) -> int:
    """Bytes of a parameter's element in an AllGather."""
    enabled = (_part(config, key).get("enabled") for key in ("bf16", "bfloat16", "fp16"))
    return 2 if any(value in (True, "auto") for value in enabled) else 4


def fill_zero(config: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """A copy of the config, with the chosen values for open keys of "zero_optimization"."""
    return _having(config, {k: getattr(choice, k) for k in open_keys(config) if k in ZERO_KEYS})


def fill(config: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """The same, and with the chosen values for open keys of the "smddp" section.

    A choice without a bound is written as "auto", as no other value means that.
    """
    ours = {k: getattr(choice, k) or "auto" for k in open_keys(config) if k in SMDDP_KEYS}
    return _having(fill_zero(config, choice), ours)


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _held(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the config has for each key, "auto" if nothing."""
    zero, section = _part(config, _ZERO), _part(config, SECTION)
    ours = {key: section.get(key, "auto") for key in SMDDP_KEYS}
    return ours | {key: zero.get(key, zero.get(_alias(key), "auto")) for key in ZERO_KEYS}


def _alias(key: str) -> str:
    """The other name that DeepSpeed accepts for a key of stage 3."""
    return key.removeprefix("stage3_")


def _having(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with these values, in the section that each key belongs to."""
    found = dict(config)
    for key, value in values.items():
        name = SECTION if key in SMDDP_KEYS else _ZERO
        section = {k: v for k, v in _part(found, name).items() if k != _alias(key)}
        found[name] = section | {key: value}
    return found
