"""What a rank's Python does, in words: the user's line, and the library call that it stands in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import PurePosixPath

from deepspeed_smddp.diagnostics.report.dump import Frame, Stack

PACKAGE = "deepspeed_smddp"

_INSTALLED = re.compile(r"(?:site|dist)-packages/(.+)$")
_STANDARD = re.compile(r"/lib(?:64)?/python3[^/]*/(?!(?:site|dist)-packages/)(.+)$")
_OWN = re.compile(rf"(?:^|/)({PACKAGE}/(?!(?:tests|examples|benchmarks)/).+)$")
# Libraries that are installed in place: the folder alone may be the user's, with these below it
# it is the library's.
_IN_PLACE = re.compile(
    r"/((?:torch/(?:nn|distributed|utils|autograd|optim|_dynamo)"
    r"|deepspeed/(?:runtime|comm|utils|checkpoint)"
    r"|transformers/(?:models|generation|utils)|accelerate/utils)/.+)$"
)
_FROZEN = re.compile(r"<frozen ([^>]+)>$")
_GENERATED = re.compile(r"<(?:eval_with_key|__array_function__|attrs generated|decorator)")
_LAUNCHER = re.compile(r"/bin/[^/.]+$")
_DECORATORS = ("torch.utils._contextlib", "contextlib", "functools")

# Where a function lies -> the name that users call it by. A trailing dot replaces a module.
_PUBLIC = (
    ("torch.serialization.save", "torch.save"),
    ("torch.serialization.load", "torch.load"),
    ("torch._tensor.backward", "Tensor.backward"),
    ("torch.autograd.backward", "torch.autograd.backward"),
    ("torch.distributed.distributed_c10d.", "torch.distributed."),
    ("torch.distributed.checkpoint.state_dict_saver.", "torch.distributed.checkpoint."),
    ("torch.distributed.checkpoint.state_dict_loader.", "torch.distributed.checkpoint."),
    ("torch.nn.modules.module._wrapped_call_impl", "the forward of a module"),
    ("torch.nn.modules.module._call_impl", "the forward of a module"),
    ("torch.utils.data.dataloader.", "torch.utils.data.DataLoader."),
    ("deepspeed.runtime.engine.", "DeepSpeedEngine."),
    ("deepspeed.comm.comm.", "deepspeed.comm."),
    ("transformers.generation.utils.", "transformers' "),
    ("transformers.trainer.", "transformers.Trainer."),
    ("numpy.lib._npyio_impl.", "numpy."),
    ("numpy.lib.npyio.", "numpy."),
)


def is_user(frame: Frame) -> bool:
    """If the frame runs the user's code: no library, no part of Python, none of this package."""
    return bool(frame.file) and not module_of(frame) and not _LAUNCHER.search(frame.file)


def is_own(frame: Frame) -> bool:
    """If the frame runs code of this package."""
    return _dotted_or_empty(_OWN, frame.file) != ""


def is_decorator(frame: Frame) -> bool:
    """If the frame only calls the function that it is wrapped around."""
    return module_of(frame) in _DECORATORS


def module_of(frame: Frame) -> str:
    """The dotted module of a library's frame; "" for the user's code."""
    file = frame.file.replace("\\", "/")
    frozen = _FROZEN.search(file)
    if frozen:
        return frozen.group(1)
    if _GENERATED.match(file):
        return "generated code"
    for pattern in (_INSTALLED, _OWN, _STANDARD, _IN_PLACE):
        dotted = _dotted_or_empty(pattern, file)
        if dotted:
            return dotted
    return ""


def called(frame: Frame) -> str:
    """The function that a library's frame runs, by its public name if it has one."""
    name = f"{module_of(frame)}.{frame.function}" if frame.function else module_of(frame)
    for inner, public in _PUBLIC:
        if inner.endswith(".") and name.startswith(inner):
            return public + name[len(inner) :]
        if name == inner:
            return public
    return name


def _dotted_or_empty(pattern: re.Pattern[str], file: str) -> str:
    found = pattern.search(file)
    if not found:
        return ""
    path = re.sub(r"\.(?:py|pyc|so)$", "", found.group(1))
    return path.removesuffix("/__init__").replace("/", ".")


class Doing(Enum):
    """What a thread stands in, the most telling first: the first one that fits names the place."""

    DEBUGGER = "debugger"
    COLLECTIVE = "collective"
    SAVE = "save"
    LOAD = "load"
    DATA = "data"
    SUBPROCESS = "subprocess"
    SLEEP = "sleep"
    INPUT = "input"
    LOCK = "lock"
    DEVICE = "device"
    CHECKPOINT = "checkpoint"
    BACKWARD = "backward"
    LIBRARY = "library"
    USER = "user"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Place:
    """Where a thread stands.

    ``what`` starts with "in"; ``file`` (its last part), ``line`` and ``function`` are those of the
    user's innermost frame, and empty if there is none. ``text`` is its source line.
    """

    doing: Doing
    what: str
    file: str = ""
    line: int = 0
    function: str = ""
    text: str = ""

    @property
    def sentence(self) -> str:
        """``in torch.save, called at train.py:88 in save_checkpoint``."""
        if not self.file:
            return self.what
        where = f"at {self.file}:{self.line}"
        if self.function and self.function != "<module>":
            where += f" in {self.function}"
        if self.doing is Doing.USER:
            return where
        return f"{self.what}, called {where}"


UNKNOWN = Place(Doing.NOTHING, "at an unknown place (the dump has no Python stack)")

_SAVES = {"torch.serialization.save", "safetensors.torch.save_file", "numpy.save"}
_LOADS = {"torch.serialization.load", "safetensors.torch.load_file"}
_DEBUGGERS = ("pdb", "bdb", "ipdb", "pudb", "debugpy", "pydevd", "IPython.terminal.debugger")
_LOCKS = ("threading", "queue", "concurrent.futures", "multiprocessing", "asyncio", "selectors")
_WAITS = {
    "acquire",
    "wait",
    "wait_for",
    "join",
    "_wait_for_tstate_lock",
    "get",
    "put",
    "result",
    "poll",
    "_poll",
    "select",
    "recv",
    "_recv",
    "__enter__",
}
_COLLECTIVE_MODULES = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "deepspeed.comm.comm",
    "deepspeed.comm.torch",
)
_COLLECTIVE = re.compile(
    r"(all_?gather|reduce_?scatter|all_?reduce|all_to_all|broadcast|barrier|monitored_barrier|"
    r"reduce|gather|scatter|send|recv|batch_isend_irecv|init_process_group|new_group|new_subgroups|"
    r"split_group|destroy_process_group|wait_tensor|inference_all_)\w*$"
)
# A function written in C leaves no frame: the source line above it tells.
_LINES = (
    (re.compile(r"\bbreakpoint\(|\.set_trace\("), Doing.DEBUGGER, "the debugger"),
    (re.compile(r"\btorch\.save\("), Doing.SAVE, "torch.save"),
    (re.compile(r"\btorch\.load\("), Doing.LOAD, "torch.load"),
    (re.compile(r"\bsleep\("), Doing.SLEEP, "time.sleep"),
    (
        re.compile(r"(?<![\w.])input\("),
        Doing.INPUT,
        "input() (it waits for a line from a terminal)",
    ),
    (re.compile(r"\.acquire\("), Doing.LOCK, "the wait for a lock"),
    (re.compile(r"\.join\(\s*(?:timeout\b|\))"), Doing.LOCK, "the wait for a thread or process"),
    (re.compile(r"\.wait\("), Doing.LOCK, "a wait"),
    (
        re.compile(r"\.(?:item|cpu|tolist|synchronize)\("),
        Doing.DEVICE,
        "a call that waits for the GPU if the tensor is there",
    ),
    (re.compile(r"\.backward\("), Doing.BACKWARD, "loss.backward"),
)
# Named beside what a thread stands in.
_CONTEXTS = (Doing.SAVE, Doing.DATA, Doing.CHECKPOINT, Doing.BACKWARD)


def place_of(stacks: Sequence[Stack]) -> Place:
    """Where a rank stands: its main thread, or another thread that works for its backward pass."""
    main = next((s for s in stacks if s.main), stacks[0] if stacks else None)
    if main is None:
        return UNKNOWN
    place = doing(main.frames)
    if place.doing is not Doing.BACKWARD:
        return place
    for other in stacks:
        if other is main:
            continue
        inner = doing(other.frames)
        if inner.doing is Doing.COLLECTIVE:
            return replace(place, what=f"{place.what}, whose thread is {inner.what}")
    return place


def doing(frames: Sequence[Frame]) -> Place:
    """Where one thread stands; ``frames`` have the innermost last."""
    frames = _without_report(frames)
    if not frames:
        return UNKNOWN
    at = next((i for i in range(len(frames) - 1, -1, -1) if is_user(frames[i])), None)
    inner = list(frames[at + 1 :] if at is not None else frames)
    found = _recognized(frames, inner)
    first = min(found, key=list(Doing).index, default=None)
    if first is not None:
        what = _with_context(first, found)
        kind = first
    elif inner:
        # The function that the user called; without a user, the innermost one.
        outer = next((f for f in inner if not is_decorator(f)), inner[0])
        what = f"in {called(outer if at is not None else inner[-1])}"
        kind = Doing.LIBRARY
    else:
        what, kind = "in the user's code", Doing.USER
    if at is None:
        return Place(kind, f"{what} (no frame of the user's code is in the stack)")
    user = frames[at]
    name = PurePosixPath(user.file.replace("\\", "/")).name
    return Place(kind, what, name, user.line, user.function, user.text.strip())


def _with_context(first: Doing, found: dict[Doing, str]) -> str:
    around = [found[kind] for kind in _CONTEXTS if kind in found and kind is not first]
    return f"in {found[first]}" + "".join(f", in {text}" for text in around)


def _recognized(frames: Sequence[Frame], inner: Sequence[Frame]) -> dict[Doing, str]:
    """What is known to be running: below the user's line, and around it for what calls it back."""
    found: dict[Doing, str] = {}
    for frame in inner:
        kind, text = _by_module(frame)
        if kind is not None and (kind not in found or kind is Doing.COLLECTIVE):
            found[kind] = text
    for frame in frames[: len(frames) - len(inner)]:
        kind, text = _by_module(frame)
        if kind in _CONTEXTS:
            found.setdefault(kind, text)
    last = frames[-1]
    for pattern, kind, text in _LINES:
        if last.text and pattern.search(last.text):
            found.setdefault(kind, text)
            break
    if Doing.COLLECTIVE not in found and any(map(_own_wait, inner)):
        found[Doing.COLLECTIVE] = "the wait for a collective"
    return found


def _own_wait(frame: Frame) -> bool:
    return is_own(frame) and ("wait" in frame.function or ".wait(" in frame.text)


def _without_report(frames: Sequence[Frame]) -> Sequence[Frame]:
    """The calls before those that made the dump."""
    for i, frame in enumerate(frames):
        if module_of(frame).startswith(f"{PACKAGE}.diagnostics"):
            return frames[:i]
    return frames


def _by_module(frame: Frame) -> tuple[Doing | None, str]:
    module = module_of(frame)
    full = f"{module}.{frame.function}"
    kind: Doing | None = None
    text = called(frame)
    if not module:
        return None, ""
    if module.startswith(_DEBUGGERS):
        name = module.partition(".")[0].replace("bdb", "pdb")
        kind, text = Doing.DEBUGGER, f"the debugger ({name})"
    elif module in _COLLECTIVE_MODULES and _COLLECTIVE.match(frame.function):
        kind, text = Doing.COLLECTIVE, frame.function
    elif full in _SAVES or module.startswith("torch.distributed.checkpoint.state_dict_saver"):
        kind = Doing.SAVE
    elif full in _LOADS or module.startswith("torch.distributed.checkpoint.state_dict_loader"):
        kind = Doing.LOAD
    elif module == "torch.utils.data.dataloader":
        kind, text = Doing.DATA, "a DataLoader's next batch"
    elif module == "subprocess":
        kind, text = Doing.SUBPROCESS, f"subprocess.{frame.function} (a child process runs)"
    elif module.split(".")[0] == "deepspeed" and "save_checkpoint" in frame.function:
        kind, text = Doing.CHECKPOINT, "a checkpoint by DeepSpeed (save_checkpoint)"
    elif module in ("torch._tensor", "torch.autograd") and frame.function == "backward":
        kind, text = Doing.BACKWARD, "loss.backward"
    elif module.startswith("deepspeed.runtime.engine") and frame.function == "backward":
        kind, text = Doing.BACKWARD, "DeepSpeed's backward"
    elif module.startswith(_LOCKS) and frame.function in _WAITS:
        kind, text = Doing.LOCK, f"the wait for a lock ({module.partition('.')[0]})"
    return kind, text
