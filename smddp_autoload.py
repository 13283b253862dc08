"""Entry point: registers the backend name ``smddp`` with torch.distributed without an import.

torch runs :func:`register` at the end of ``import torch`` in every process of the machine. So
nothing here loads the compiled module or the package (unless ``SMDDP_SHARED_ALLOCATOR=1`` asks for
it), and nothing here may raise. ``SMDDP_AUTOLOAD=0`` switches it off.

Nor does a program load the package that imports DeepSpeed, accelerate or transformers: what reads a
DeepSpeed config there is wrapped by :func:`_defer`, until a config names smddp, or the program
imports the package or makes a group of smddp.
"""

from __future__ import annotations

import base64
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from types import ModuleType
from typing import Any

# Modules that get a hook after their import, and its name in deepspeed_smddp.deepspeed.hooks.
_HOOKS = {
    "deepspeed": "hook_deepspeed",
    "accelerate.utils.deepspeed": "hook_accelerate",
    "transformers.training_args": "hook_transformers",
}
# What of them reads a DeepSpeed config, or makes the process group.
_READERS = {
    "deepspeed": (
        "initialize",
        "zero.Init.__init__",
        "init_distributed",
        "comm.init_distributed",
        "comm.comm.init_distributed",
        "runtime.zero.partition_parameters.init_distributed",
    ),
    "accelerate.utils.deepspeed": ("HfDeepSpeedConfig.__init__",),
    "transformers.training_args": ("TrainingArguments.__post_init__",),
}
_MARK = "_smddp_wraps"  # as in deepspeed_smddp.upstream.wrapping
# Where objects have a config: DeepSpeedConfig, HfDeepSpeedConfig, arguments of the command line,
# TrainingArguments.
_HOLDERS = ("_param_dict", "config", "deepspeed_config", "deepscale_config", "deepspeed")
_deferred: dict[str, list[_Reader]] = {}  # by module
_registered = False
_watched: set[str] = set()  # the modules whose import is watched


def register() -> None:
    """The entry point of both groups; never raises."""
    if os.environ.get("SMDDP_AUTOLOAD") != "0":
        register_once()


def register_with_torch() -> None:
    """Registers now, or at the end of ``import torch``; ``import deepspeed_smddp`` calls it.

    The command ``smddp`` starts without torch, whose import takes seconds.
    """
    if "torch" in sys.modules:
        register_once()
        for name in list(_deferred):
            _run_hook(sys.modules[name])
    else:
        _watch_imports(["torch"])


def register_once() -> None:
    """Registers the backend and the hooks."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        register_backend()
        install_hooks()
        serve_torch_sagemaker()
    except Exception as error:
        _warn(f"smddp: the backend could not be registered: {error}")
    if os.environ.get("SMDDP_SHARED_ALLOCATOR", "0") in ("", "0"):
        return
    try:
        # Before the first tensor. Only in this case the package is loaded with torch.
        import_module("deepspeed_smddp.distributed.memory").install_if_asked()
    except Exception as error:
        _warn(f"smddp: tensors will not lie in shared memory: {error}")


def register_backend() -> None:
    """Registers ``smddp`` with torch.distributed; the first group loads the extension."""
    import torch.distributed as dist

    if dist.is_available() and "SMDDP" not in dist.Backend._plugins:
        dist.Backend.register_backend("smddp", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    return import_module("deepspeed_smddp.entry").create(options, backend_options)


def install_hooks() -> None:
    """Makes the DeepSpeed hooks run after the import of the modules that they wrap."""
    if os.environ.get("SMDDP_DEEPSPEED_HOOK") == "0":
        return
    _watch_imports(_HOOKS)
    for name in _HOOKS:
        module = sys.modules.get(name)
        if module is None:
            continue
        spec = getattr(module, "__spec__", None)
        # `import deepspeed` imports torch, which runs this; deepspeed itself is half imported then.
        if spec is not None and getattr(spec, "_initializing", False):
            _watch(spec)
        else:
            _run_hook(module)


def _watch_imports(names: Iterable[str]) -> None:
    _watched.update(names)
    if not any(isinstance(finder, _HookFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _HookFinder())


def serve_torch_sagemaker() -> None:
    """Makes ``import torch.sagemaker`` find the adapter, if torch itself has no such package."""
    if not any(isinstance(finder, _SageMakerFinder) for finder in sys.meta_path):
        sys.meta_path.append(_SageMakerFinder())  # last, so that others come first


def _run_hook(module: ModuleType) -> None:
    if module.__name__ == "torch":
        register_once()
        return
    try:
        if "deepspeed_smddp" in sys.modules:
            _hook(module)
        else:
            _defer(module)
    except Exception as error:
        _warn(
            f'smddp: "comm_backend" in a DeepSpeed config will not be read: the hook on '
            f"{module.__name__} failed: {error}"
        )


def _hook(module: ModuleType) -> None:
    readers = _deferred.pop(module.__name__, [])
    for reader in readers:
        reader.give_back()
    hooks = import_module("deepspeed_smddp.deepspeed.hooks")
    getattr(hooks, _HOOKS[module.__name__])(module)
    for reader in readers:
        reader.follow()


def _defer(module: ModuleType) -> None:
    readers = [reader for reader in _deferred.get(module.__name__, []) if reader.is_in_place()]
    for path in _READERS[module.__name__]:
        owner: Any = module
        *owners, name = path.split(".")
        for part in owners:
            owner = getattr(owner, part, None)
        if hasattr(owner, name) and not hasattr(getattr(owner, name), _MARK):
            readers.append(_Reader(owner, name))
    _deferred[module.__name__] = readers


class _Reader:
    """Stands for a function that reads a config; the first call that concerns smddp hooks all."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._target = self._original = original = getattr(owner, name)

        @functools.wraps(original)
        def reader(*args: Any, **kwargs: Any) -> Any:
            if _deferred and (
                "deepspeed_smddp" in sys.modules or _name_smddp([*args, *kwargs.values()])
            ):
                for module in list(_deferred):
                    _hook(sys.modules[module])
            return self._target(*args, **kwargs)

        setattr(reader, _MARK, original)
        self._reader = self._held = reader
        setattr(owner, name, reader)

    def is_in_place(self) -> bool:
        """False if a reload has replaced it."""
        return getattr(self._owner, self._name) is self._reader

    def give_back(self) -> None:
        """The original takes its place for the hook, which looks at it and wraps it."""
        self._held = getattr(self._owner, self._name)
        setattr(self._owner, self._name, self._original)

    def follow(self) -> None:
        """Those that hold this function, or have wrapped it since, call what the hook has made."""
        self._target = getattr(self._owner, self._name)
        if self._held is not self._reader:
            setattr(self._owner, self._name, self._held)


def _name_smddp(values: Iterable[Any]) -> bool:
    """Whether arguments, the command line or accelerate's variables have a config with our keys."""
    argument, words = "--deepspeed_config", [*sys.argv, ""]
    named = [words[i + 1] for i, word in enumerate(sys.argv) if word == argument]
    named += [word.partition("=")[2] for word in words if word.startswith(f"{argument}=")]
    named.append(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", ""))
    return any(map(_names_smddp, (*values, *named)))


def _names_smddp(value: Any) -> bool:
    """Whether a config in any form that DeepSpeed takes, or what holds one, has one of our keys."""
    if isinstance(value, Mapping):
        return "comm_backend" in value or "smddp" in value
    if not isinstance(value, (str, os.PathLike)):
        held = getattr(value, "__dict__", {})
        return any(
            _names_smddp(held[name])
            for name in _HOLDERS
            if isinstance(held.get(name), (str, os.PathLike, Mapping))
        )
    text = os.fspath(value)
    try:
        if os.path.isfile(text):
            with open(text, encoding="utf-8") as file:
                text = file.read()
        elif "{" not in text:
            text += base64.urlsafe_b64decode(text).decode("utf-8", "ignore")
    except (OSError, ValueError):
        pass
    return "comm_backend" in text or "smddp" in text


def _warn(message: str) -> None:
    try:
        warnings.warn(message, stacklevel=3)
    except Warning:  # python -W error
        print(message, file=sys.stderr)


class _WatchedSpec(ModuleSpec):
    """A module's spec that runs the hook when the import system marks the module as initialised.

    importlib sets ``spec._initializing`` to True before it executes a module and to False after.
    """

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__.get("_initializing", False))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        finished = self._initializing and not value
        self.__dict__["_initializing"] = value
        module = sys.modules.get(self.name)
        if finished and module is not None:  # absent: the import raised
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            _run_hook(module)


def _watch(spec: ModuleSpec) -> None:
    if type(spec) is ModuleSpec:
        spec.__class__ = _WatchedSpec


class _ReloadLoader:
    """Runs the hook after a reload, which replaces what it had wrapped; used once."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module by its own loader, which takes its place again."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _run_hook(module)


class _HookFinder:
    """Finds no module itself: it watches the spec that the other finders return."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _watched or name in self._searching:
            return None
        self._searching.add(name)
        try:
            for finder in sys.meta_path:
                find: Callable[..., ModuleSpec | None] | None = getattr(finder, "find_spec", None)
                spec = find(name, path, target) if finder is not self and find else None
                if spec is not None:
                    if target is None:
                        _watch(spec)
                    elif spec.loader is not None:  # importlib.reload
                        spec.loader = _ReloadLoader(spec.loader)  # type: ignore[assignment]
                    return spec
            return None
        finally:
            self._searching.discard(name)


class _SageMakerFinder:
    """Finds ``torch.sagemaker``, and by its path its submodules, in ``deepspeed_smddp/compat``."""

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch.sagemaker":
            return None
        package = find_spec("deepspeed_smddp")
        if package is None or not package.submodule_search_locations:
            return None
        place = os.path.join(package.submodule_search_locations[0], "compat", "torch_sagemaker")
        return spec_from_file_location(
            name, os.path.join(place, "__init__.py"), submodule_search_locations=[place]
        )
