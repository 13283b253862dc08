"""Which keys a DeepSpeed config leaves to ``"auto"``, and filling them in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_smddp.config.parsing import SECTION
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.tuning.choice import (
    LARGEST_PERSISTENT,
    LARGEST_PREFETCH,
    LARGEST_REDUCE,
    SMDDP_KEYS,
    ZERO_KEYS,
    Choice,
)

_ZERO = "zero_optimization"
# Other names that DeepSpeed accepts for the same key.
_ALSO = {
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_param_persistence_threshold": "param_persistence_threshold",
}

# DeepSpeed's own (deepspeed/runtime/zero/config.py), in elements; smddp's key for no bound.
_DEFAULTS = {
    "stage3_prefetch_bucket_size": LARGEST_PREFETCH,
    "stage3_param_persistence_threshold": LARGEST_PERSISTENT,
    "reduce_bucket_size": LARGEST_REDUCE,
}
_NO_BOUND = 1 << 50


def open_keys(config: Mapping[str, Any]) -> list[str]:
    """Keys of a ZeRO-3 config that are absent or "auto"; none if the stage is not 3."""
    zero = config.get(_ZERO)
    if not isinstance(zero, Mapping) or zero.get("stage") != 3:
        return []
    section = config.get(SECTION)
    ours = section if isinstance(section, Mapping) else {}
    return [
        *(key for key in SMDDP_KEYS if ours.get(key, "auto") == "auto"),
        *(
            key
            for key in ZERO_KEYS
            if zero.get(key, zero.get(_ALSO.get(key, ""), "auto")) == "auto"
        ),
    ]


def without_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that leaves all sizes open."""
    zero, section = dict(config.get(_ZERO) or {}), dict(config.get(SECTION) or {})
    for key in ZERO_KEYS:
        zero.pop(key, None)
        zero.pop(_ALSO.get(key, ""), None)
    for key in SMDDP_KEYS:
        section.pop(key, None)
    return {**config, _ZERO: zero, **({SECTION: section} if section else {})}


def stated(config: Mapping[str, Any]) -> Choice:
    """The sizes without any choice: the config's, and DeepSpeed's defaults for open keys.

    Raises:
        SmddpConfigError: one of them is no number.
    """
    zero, section = config.get(_ZERO) or {}, config.get(SECTION) or {}
    found: dict[str, Any] = {}
    for key in ZERO_KEYS:
        value = zero.get(key, zero.get(_ALSO.get(key, ""), "auto"))
        found[key] = _whole(key, _DEFAULTS[key] if value == "auto" else value)
    for key in SMDDP_KEYS:
        value = section.get(key, "auto")
        found[key] = _whole(key, 0 if value == "auto" else value)
    return Choice(**found)


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise SmddpConfigError(
            f'"{key}" in the DeepSpeed config is {value!r}; it may hold "auto" or a number of at '
            "least 0"
        )
    return int(value)


def set_all(config: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """A copy with every size of the choice, so that nothing is left to measure."""
    zero = {key: getattr(choice, key) for key in ZERO_KEYS}
    ours = {key: getattr(choice, key) or _NO_BOUND for key in SMDDP_KEYS}
    bare = without_sizes(config)
    return {**bare, _ZERO: {**bare[_ZERO], **zero}, SECTION: {**bare.get(SECTION, {}), **ours}}


def element_size(config: Mapping[str, Any]) -> int:
    """Bytes of a parameter's element in an AllGather."""
    for key in ("bf16", "bfloat16", "fp16"):
        section = config.get(key)
        if isinstance(section, Mapping) and section.get("enabled") in (True, "auto"):
            return 2
    return 4


def fill_zero(config: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """A copy of the config, with the chosen values for open keys of "zero_optimization"."""
    open_ones = [key for key in open_keys(config) if key in ZERO_KEYS]
    if not open_ones:
        return dict(config)
    zero = {**config[_ZERO], **{key: getattr(choice, key) for key in open_ones}}
    for key in open_ones:
        zero.pop(_ALSO.get(key, ""), None)  # it held "auto"
    return {**config, _ZERO: zero}


def fill(config: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """The same, and with the chosen values for open keys of the "smddp" section.

    A choice without a bound is written as "auto", as no other value means that.
    """
    ours = {key: getattr(choice, key) or "auto" for key in SMDDP_KEYS if key in open_keys(config)}
    filled = fill_zero(config, choice)
    return {**filled, SECTION: {**filled.get(SECTION, {}), **ours}} if ours else filled
