"""``smp.step``: calls a function once per micro-batch and collects what it returns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from deepspeed_smddp.compat import modelparallel
from deepspeed_smddp.errors import SmddpConfigError


class StepOutput:
    """The values of one output of a step, one per micro-batch."""

    def __init__(self, outputs: list[Any]) -> None:
        self.outputs = outputs

    def reduce_mean(self) -> Any:
        """The mean over the micro-batches."""
        return self.reduce_sum() / len(self.outputs)

    def reduce_sum(self) -> Any:
        """The sum over the micro-batches."""
        return functools.reduce(lambda a, b: a + b, self.outputs)

    def concat(self) -> torch.Tensor:
        """The tensors one after the other, along the first dimension."""
        return torch.cat(self.outputs)

    def stack(self) -> torch.Tensor:
        """The tensors along a new first dimension."""
        return torch.stack(self.outputs)


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Iterable[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable[..., Any]:
    """Decorates a function that runs the forward pass, and the backward pass by the model.

    Each tensor in its arguments, also inside lists, tuples and dictionaries, is cut along its first
    dimension into micro-batches; the parameter ``microbatches`` is their number. All other values
    are passed unchanged.

    Args:
        function: given if the decorator is used without parentheses.
        non_split_inputs: names of arguments that are not cut.
        input_split_axes: another dimension to cut, by the name of the argument.
        detach_outputs: returned tensors have no graph.

    Returns:
        A function that returns a :class:`StepOutput` in place of each value that ``function``
        returns: of its result, or of the members of a tuple, list or mapping.

    Raises:
        SmddpConfigError: at a call with a tensor that does not divide into the micro-batches.
    """
    if function is None:
        return functools.partial(
            step,
            non_split_inputs=non_split_inputs,
            input_split_axes=input_split_axes,
            detach_outputs=detach_outputs,
        )
    import inspect

    signature = inspect.signature(function)
    whole, axes = set(non_split_inputs), dict(input_split_axes or {})

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        count = modelparallel.state.cfg.microbatches
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        returned = []
        cut = {
            name: [value] * count
            if name in whole
            else _cut(value, count, axes.get(name, 0), f"the argument {name}")
            for name, value in given.items()
        }
        for i in range(count):
            for name in given:
                given[name] = cut[name][i]
            returned.append(function(*bound.args, **bound.kwargs))
        return _collect(returned, detach_outputs)

    return wrapper


def _cut(value: Any, count: int, axis: int, where: str) -> list[Any]:
    if count == 1:
        return [value]
    if isinstance(value, torch.Tensor):
        if value.dim() <= axis or value.shape[axis] % count:
            raise SmddpConfigError(
                f"{where} of an smp.step has the shape {list(value.shape)}, whose dimension {axis} "
                f'does not divide into "microbatches": {count}; drop incomplete batches '
                "(drop_last=True), or name the argument in non_split_inputs"
            )
        return list(value.chunk(count, dim=axis))
    if isinstance(value, Mapping):
        parts = {key: _cut(item, count, axis, where) for key, item in value.items()}
        return [{key: part[i] for key, part in parts.items()} for i in range(count)]
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        pieces = [_cut(item, count, axis, where) for item in value]
        return [type(value)(piece[i] for piece in pieces) for i in range(count)]
    return [value] * count


def _collect(returned: list[Any], detach: bool) -> Any:
    first = returned[0]
    if first is None:
        return None
    if isinstance(first, Mapping):
        return {key: _collect([item[key] for item in returned], detach) for key in first}
    if isinstance(first, (list, tuple)):
        return tuple(_collect(list(items), detach) for items in zip(*returned, strict=True))
    if detach:
        returned = [r.detach() if isinstance(r, torch.Tensor) else r for r in returned]
    return StepOutput(returned)
