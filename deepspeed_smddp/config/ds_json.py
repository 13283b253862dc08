"""Reads a DeepSpeed config in every form that DeepSpeed, accelerate and transformers take."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Mapping
from typing import Any


def read(config: Any) -> Mapping[str, Any] | None:
    """The config as a mapping; None if there is none or it cannot be read.

    Accepts a mapping, a path to JSON or hjson, a base64 or JSON text, a ``DeepSpeedConfig``, an
    ``HfDeepSpeedConfig``. DeepSpeed itself raises the error for an unreadable config.
    """
    if config is None:
        return None
    if isinstance(config, Mapping):
        return config
    for attribute in ("_param_dict", "config"):  # DeepSpeedConfig, HfDeepSpeedConfig
        held = getattr(config, attribute, None)
        if isinstance(held, Mapping):
            return held
    if isinstance(config, (str, os.PathLike)):
        return _read_text(os.fspath(config))
    return None


def of_initialize(arguments: Mapping[str, Any]) -> Any:
    """The config among the arguments of ``deepspeed.initialize``, searched in its order."""
    args = arguments.get("args")
    candidates = (
        arguments.get("config"),
        arguments.get("config_params"),
        getattr(args, "deepspeed_config", None),
        getattr(args, "deepscale_config", None),
    )
    return next((config for config in candidates if config is not None), None)


def of_accelerate_launch() -> str | None:
    """The config file that ``accelerate launch --use_deepspeed`` passes to its processes."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() not in ("true", "1", "yes"):
        return None
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    return path if path not in ("", "none") else None


def of_command_line() -> str | None:
    """The value of ``--deepspeed_config``, DeepSpeed's argument, on this program's command line.

    Megatron-DeepSpeed makes the process group long before it reads that file, by a call of
    ``init_distributed()`` without arguments.
    """
    name = "--deepspeed_config"
    for word, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        if word == name:
            return following or None
        if word.startswith(f"{name}="):
            return word.partition("=")[2] or None
    return None


def at(config: Mapping[str, Any], path: str) -> Any:
    """The value at a path such as ``zero_optimization.stage``, or None."""
    found: Any = config
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def number(config: Mapping[str, Any], path: str, default: float = 0) -> float:
    """The number at a path; ``default`` if there is none, as with "auto"."""
    found = at(config, path)
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    return found if is_number else default


def _read_text(text: str) -> Mapping[str, Any] | None:
    import hjson

    try:
        if os.path.exists(text):
            with open(text, encoding="utf-8") as file:
                found = hjson.load(file)
        elif text.lstrip().startswith("{"):
            found = hjson.loads(text)
        else:
            found = hjson.loads(base64.urlsafe_b64decode(text).decode("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, Mapping) else None
