"""Records the operations on tensors without memory, and replays those that matter on the CPU."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# What parameters are made of, and whatever else draws from the generator.
_FACTORIES = frozenset(
    (
        torch.empty,
        torch.empty_strided,
        torch.zeros,
        torch.ones,
        torch.full,
        torch.rand,
        torch.randn,
        torch.randint,
        torch.randperm,
    )
)
_WITHOUT_VALUES = ("aten::empty", "aten::empty_strided", "aten::new_empty", "aten::empty_like")
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
# Private, of torch 2.13; trunc_normal_refusal() tries whether what replaces it does the same.
_TRUNC_NORMAL = "_no_grad_trunc_normal_"
# In-place operations that do not look at what they write to.
_OVERWRITE = (
    "aten::normal_",
    "aten::uniform_",
    "aten::fill_",
    "aten::zero_",
    "aten::copy_",
    "aten::random_",
    "aten::bernoulli_",
    "aten::exponential_",
    "aten::geometric_",
    "aten::log_normal_",
    "aten::cauchy_",
)


@dataclass(frozen=True)
class View:
    """A tensor's place in its storage."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: bool  # it is all of the storage

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """Where a meta tensor lies."""
        storage = tensor.untyped_storage()
        return cls(
            storage._cdata,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.numel() * tensor.itemsize == storage.nbytes(),
        )

    def within(self, memory: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, on a storage that has memory."""
        return torch.empty(0, dtype=self.dtype).set_(memory, self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class Storage:
    """A storage whose final content is known."""

    index: int
    memory: torch.UntypedStorage


@dataclass
class _Operation:
    function: Any
    args: Any
    kwargs: Any
    reads: frozenset[int]
    writes: frozenset[int]
    makes: tuple[View, ...]  # results with storages of their own
    overwrites: int | None
    random: bool


class Record:
    """As a context: tensors are made on the meta device, and what happens to them is recorded.

    ``reason``: why this torch's ``trunc_normal_`` can't be recorded and is refused, or None.
    """

    def __init__(self, reason: str | None = None) -> None:
        self._reason = reason
        self._operations: list[_Operation] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # alive, so that none is another's
        self._contexts = ExitStack()

    def __enter__(self) -> Record:
        if self._reason is not None and not hasattr(torch.nn.init, _TRUNC_NORMAL):
            _refuse(self._reason)  # whoever holds the public function would not be noticed
        self._contexts = ExitStack()
        self._contexts.enter_context(self._sampling_loops())
        self._contexts.enter_context(_OnMeta())
        self._contexts.enter_context(_Watch(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.close()

    @contextmanager
    def _sampling_loops(self) -> Iterator[None]:
        # How often torch's trunc_normal_ draws depends on what it drew; on a meta tensor it does
        # nothing at all. The call is recorded as one operation.
        original = getattr(torch.nn.init, _TRUNC_NORMAL)
        replaced: dict[str, Any] = {_TRUNC_NORMAL: functools.partial(self._recorded, original)}
        if self._reason is not None:
            refusing = functools.partial(_refuse, self._reason)
            replaced = dict.fromkeys((_TRUNC_NORMAL, "trunc_normal_"), refusing)
        kept = {name: getattr(torch.nn.init, name) for name in replaced}
        for name, function in replaced.items():
            setattr(torch.nn.init, name, function)
        try:
            yield
        finally:
            for name, function in kept.items():
                setattr(torch.nn.init, name, function)

    def _recorded(
        self, original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if not tensor.is_meta:
            return original(tensor, *args, **kwargs)
        index = self._known(tensor)
        whole = View.of(tensor).whole
        self._operations.append(
            _Operation(
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
        """Takes down one operation that has been carried out on meta tensors."""
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
            _Operation(
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

    def replay(self, wanted: set[int]) -> Iterator[Storage]:
        """Each wanted storage once its content is final; a storage is freed when it is done with.

        Every operation that draws random numbers is carried out, others where a wanted storage
        comes to depend on them.
        """
        needed, dead, last_write = self._plan(wanted)
        memory: dict[int, torch.UntypedStorage] = {}

        def storage(index: int) -> torch.UntypedStorage:
            if index not in memory:
                empty = torch.empty(self._storages[index].nbytes(), dtype=torch.uint8)
                memory[index] = empty.untyped_storage()
            return memory[index]

        def real(value: Any) -> Any:
            if isinstance(value, View):
                return value.within(storage(value.storage))
            is_meta = isinstance(value, torch.device) and value.type == "meta"
            return torch.device("cpu") if is_meta else value

        for index in wanted - set(last_write):
            if index in self._storages:
                zeros = torch.zeros(self._storages[index].nbytes(), dtype=torch.uint8)
                yield Storage(index, zeros.untyped_storage())
        for position, operation in enumerate(self._operations):
            if not needed[position]:
                continue
            result = operation.function(
                *tree_map(real, operation.args), **tree_map(real, operation.kwargs)
            )
            results = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            if operation.makes:
                fresh = results[-len(operation.makes) :]
                for view, tensor in zip(operation.makes, fresh, strict=True):
                    memory[view.storage] = tensor.untyped_storage()
            for index in _touched(operation):
                if last_write.get(index) == position:
                    yield Storage(index, storage(index))
            for index in dead[position]:
                memory.pop(index, None)

    def _plan(self, wanted: set[int]) -> tuple[list[bool], list[frozenset[int]], dict[int, int]]:
        # Backwards: ``later`` are the storages whose content an operation that follows looks at.
        needed = [False] * len(self._operations)
        dead: list[frozenset[int]] = [frozenset()] * len(self._operations)
        last_write: dict[int, int] = {}
        later: set[int] = set()
        for position in range(len(self._operations) - 1, -1, -1):
            operation = self._operations[position]
            results = operation.writes | {view.storage for view in operation.makes}
            ended = {index for index in results & wanted if index not in last_write}
            last_write.update(dict.fromkeys(ended, position))
            dead[position] = frozenset(_touched(operation) - later)
            matters = bool(ended or results & later)
            needed[position] = operation.random or matters
            if matters:
                later -= {view.storage for view in operation.makes}
                if operation.overwrites is not None:
                    later.discard(operation.overwrites)
                later |= operation.reads
        return needed, dead, last_write


def _touched(operation: _Operation) -> frozenset[int]:
    return operation.reads | operation.writes | {view.storage for view in operation.makes}


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # A tensor with memory may change before the replay.
    return View.of(value) if value.is_meta else value.detach().clone()


def _targets(schema: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    # The tensors that an operation writes to.
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


@cache
def trunc_normal_refusal() -> str | None:
    """Why calls of ``trunc_normal_`` can't be recorded under this torch, or None.

    The check records one that draws several times, beside initialisers before and after it, and
    compares the replay with the values themselves, to the bit.
    """
    if not callable(getattr(torch.nn.init, _TRUNC_NORMAL, None)):
        return f"this torch ({torch.__version__}) has no torch.nn.init.{_TRUNC_NORMAL}"

    def build() -> torch.Tensor:
        tensor = torch.nn.init.normal_(torch.empty(3, 64))
        torch.nn.init.trunc_normal_(tensor[1], 0.5, 1.0, 0.4, 0.6)
        torch.nn.init.uniform_(tensor[2])
        return tensor

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        expected = build()
        record = Record()
        try:
            with record:
                recorded = View.of(build())
            torch.manual_seed(0)
            found = [recorded.within(s.memory) for s in record.replay({recorded.storage})]
        except (RuntimeError, TypeError) as error:
            return f"recording that of this torch ({torch.__version__}) failed: {error}"
    if len(found) == 1 and torch.equal(found[0], expected):
        return None
    return f"that of this torch ({torch.__version__}) draws in another way than was recorded"


def _refuse(reason: str, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"delayed_init can't record torch.nn.init.trunc_normal_, as {reason}; build the model "
        "without delayed_init, or initialise it by another function"
    )


class _OnMeta(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # torch.nn.init returns early for some of its functions.
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
            # torch wants them all on one device; the record has the values.
            result = func(*tree_map(_shadow, args), **tree_map(_shadow, kwargs))
        else:
            result = func(*args, **kwargs)
        self._record.add(func, args, kwargs, result)
        return result
