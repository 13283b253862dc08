"""Records the operations on tensors without memory while a model is built."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from deepspeed_smddp.models.delayed_init.replay import Operation, View, replay
from deepspeed_smddp.upstream.wrapping import replaced

# Functions that make parameters, and the other factories that draw from the generator.
_NAMES = ("empty", "empty_strided", "zeros", "ones", "full", "rand", "randn", "randint", "randperm")
_FACTORIES = frozenset(getattr(torch, name) for name in _NAMES)
_WITHOUT_VALUES = ("aten::empty", "aten::empty_strided", "aten::new_empty", "aten::empty_like")
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
# Private, of torch 2.13; the public function calls it.
_TRUNC_NORMAL = "_no_grad_trunc_normal_"
# In-place operations that do not read the tensor that they write.
_OVERWRITE = {
    *("aten::fill_", "aten::zero_", "aten::copy_", "aten::random_", "aten::bernoulli_"),
    *("aten::normal_", "aten::log_normal_", "aten::uniform_", "aten::exponential_"),
    *("aten::geometric_", "aten::cauchy_"),
}


class Record:
    """As a context: tensors are made on the meta device, and operations on them are recorded."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        # By address; kept alive, so that no address is used twice.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._contexts = ExitStack()

    def __enter__(self) -> Record:
        # How often trunc_normal_ draws depends on the values that it drew, and on a meta tensor it
        # does nothing, so its call is recorded as one operation.
        original = getattr(torch.nn.init, _TRUNC_NORMAL, None)
        if original is None:
            raise RuntimeError(
                "delayed_init can't record torch.nn.init.trunc_normal_, as this torch "
                f"({torch.__version__}) has no torch.nn.init.{_TRUNC_NORMAL}; build the model "
                "without delayed_init"
            )
        recorded = functools.partial(self._recorded, original)
        self._contexts.enter_context(replaced(torch.nn.init, _TRUNC_NORMAL, recorded))
        self._contexts.enter_context(_OnMeta())
        self._contexts.enter_context(_Watch(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.close()

    def _recorded(
        self, original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if not tensor.is_meta:
            return original(tensor, *args, **kwargs)
        index = self._known(tensor)
        whole = View.of(tensor).whole
        self._operations.append(
            Operation(
                original,
                (View.of(tensor), *args),
                kwargs,
                reads=frozenset() if whole else frozenset((index,)),
                writes=frozenset((index,)),
                makes=(),
                overwrites=index if whole else None,
                random=True,
            )
        )
        return tensor

    def add(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Records one operation that has been carried out on meta tensors."""
        random = torch.Tag.nondeterministic_seeded in function.tags
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.is_meta]
        inputs = frozenset(self._known(t) for t in given if t.is_meta)
        fresh = tuple(View.of(t) for t in made if self._known(t) not in inputs)
        schema = function._schema
        if not inputs and not fresh:
            if random and kwargs.get("generator") is None:
                raise RuntimeError(
                    f"{schema.name} draws random numbers into a tensor with memory while the model "
                    "is built, so their order can't be kept; build the model without delayed_init"
                )
            return
        if schema.name in _WITHOUT_VALUES:
            return
        targets = _targets(schema, args, kwargs)
        if not targets and not fresh:
            return  # a view
        overwrites = None
        if schema.name in _OVERWRITE and len(targets) == 1 and View.of(targets[0]).whole:
            overwrites = View.of(targets[0]).storage
            others = [t for t in given if t is not targets[0] and t.is_meta]
            if any(View.of(t).storage == overwrites for t in others):
                overwrites = None
        self._operations.append(
            Operation(
                function,
                tree_map(_described, args),
                tree_map(_described, kwargs),
                inputs - {overwrites},
                frozenset(View.of(t).storage for t in targets),
                fresh,
                overwrites,
                random,
            )
        )

    def _known(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self._storages.setdefault(storage._cdata, storage)
        return int(storage._cdata)

    def replay(self, wanted: set[int]) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Each wanted storage once its content is final; see :func:`replay.replay`."""
        sizes = {index: storage.nbytes() for index, storage in self._storages.items()}
        return replay(self._operations, sizes, wanted)


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # A tensor with memory may change before the replay, so its values are copied.
    return View.of(value) if value.is_meta else value.detach().clone()


def _targets(schema: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    # The tensors that an operation writes, by its schema.
    written = []
    for position, declared in enumerate(schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            by_name = kwargs.get(declared.name)
            written.append(args[position] if position < len(args) else by_name)
    return [t for t in tree_leaves(written) if isinstance(t, torch.Tensor)]


def _shadow(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return torch.empty_like(value, device="meta")
    return value


class _OnMeta(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Some functions of torch.nn.init return early for a meta tensor; here they must run.
        if func == _IS_META and sys._getframe(1).f_globals.get("__name__") == "torch.nn.init":
            return False
        kwargs = dict(kwargs or {})
        if func in _FACTORIES and kwargs.get("device") is None and kwargs.get("out") is None:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(t.is_meta for t in tensors) and not all(t.is_meta for t in tensors):
            for target in _targets(func._schema, args, kwargs):
                if not target.is_meta:
                    raise RuntimeError(
                        f"{func._schema.name} writes values that are not known yet into a tensor "
                        "with memory while the model is built; build it without delayed_init"
                    )
            # torch expects all tensors on one device; the record has the values.
            result = func(*tree_map(_shadow, args), **tree_map(_shadow, kwargs))
        else:
            result = func(*args, **kwargs)
        self._record.add(func, args, kwargs, result)
        return result
