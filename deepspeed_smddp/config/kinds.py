"""What settings may hold, in pydantic's terms: the types of the fields of ``schema``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

MIN_BUCKET_BYTES = 4096
ROUTES = ("default", "smddp", "fallback", "nccl", "gloo", "auto")


def whole(value: Any) -> Any:
    """JSON and hjson read 5e8 as a float, which DeepSpeed takes for a count too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _steps(value: Any) -> tuple[tuple[int, str], ...]:
    """Steps of a route: bytes at most (0: no bound), and the path. A single path is one step."""
    if isinstance(value, str):
        value = [{"path": value}]
    steps = [_step(step) for step in value] if isinstance(value, list | tuple) else []
    bounds = [bound for bound, _ in steps]
    bounded = [bound for bound in bounds if bound]
    # "auto" finds bounds itself, as "default" does for CUDA tensors.
    finds = any(path in ("auto", "default") for _, path in steps) and len(steps) > 1
    if not steps or 0 in bounds[:-1] or finds or bounded != sorted(set(bounded)):
        raise ValueError("these are no steps")
    return tuple(steps)


def _step(step: Any) -> tuple[int, str]:
    if isinstance(step, dict) and {"path"} <= set(step) <= {"up_to", "path"}:
        bound, path, least = whole(step.get("up_to", 0)), step["path"], int("up_to" in step)
    elif isinstance(step, list | tuple) and len(step) == 2:
        bound, path, least = whole(step[0]), step[1], 0
    else:
        raise ValueError("this is no step")
    if type(bound) is not int or not least <= bound < 1 << 62 or path not in ROUTES:
        raise ValueError("this is no step")
    return bound, path


# The titles are what a value of the type may hold.
Flag = Annotated[bool, Field(strict=True, title="true or false")]
Text = Annotated[str, Field(strict=True, title="a text")]
File = Annotated[
    str,
    Field(
        strict=True,
        title="the name of a file, with {rank} and {host} in it if wanted, or an empty text for "
        "none",
    ),
]
Count = Annotated[
    int,
    BeforeValidator(whole),
    Field(strict=True, ge=0, le=1 << 31, title="a number of at least 0"),
]
Positive = Annotated[int, BeforeValidator(whole), Field(strict=True, ge=1, le=1 << 31)]
Bytes = Annotated[int, Field(strict=True, ge=MIN_BUCKET_BYTES, le=1 << 62)]
Bucket = Annotated[
    Bytes | Literal["auto"],
    BeforeValidator(whole),
    Field(title=f'"auto" or a number of bytes of at least {MIN_BUCKET_BYTES}'),
]
Seconds = Annotated[float, Field(strict=True, ge=0, le=1e9, allow_inf_nan=False)]
Deadline = Annotated[Seconds, Field(gt=0)]
Route = Annotated[
    tuple[tuple[int, str], ...],
    BeforeValidator(_steps),
    Field(
        title='"smddp", "nccl", "gloo", "fallback" (either), "auto", or a list of '
        '{"up_to": bytes, "path": one of these} in rising order, of which the last may have no '
        '"up_to"'
    ),
]
