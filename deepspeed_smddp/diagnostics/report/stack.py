"""What a rank's Python does, in words: the user's line, and the library call that it stands in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import PurePosixPath

from deepspeed_smddp.diagnostics.report.dump import Frame, Stack

PACKAGE = "deepspeed_smddp"

# The first that fits names the module.
_LIBRARIES = (
    re.compile(r"<frozen ([^>]+)>$"),
    re.compile(r"(?:site|dist)-packages/(.+)$"),
    re.compile(
        rf"(?:^|/)({PACKAGE}/(?!(?:tests|examples|benchmarks)/).+|smddp_autoload\.py|smdistributed\.py)$"
    ),
    re.compile(r"/lib(?:64)?/python3[^/]*/(?!(?:site|dist)-packages/)(.+)$"),
    # Libraries that are installed in place: the folder alone may be the user's, with these below
    # it it is the library's.
    re.compile(
        r"/((?:torch/(?:nn|distributed|utils|autograd|optim|_dynamo)"
        r"|deepspeed/(?:runtime|comm|utils|checkpoint)"
        r"|transformers/(?:models|generation|utils)|accelerate/utils)/.+)$"
    ),
)
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


def module_of(frame: Frame) -> str:
    """The dotted module of a library's frame; "" for the user's code."""
    file = frame.file.replace("\\", "/")
    if _GENERATED.match(file):
        return "generated code"
    found = next((m for pattern in _LIBRARIES if (m := pattern.search(file))), None)
    path = re.sub(r"(?:/__init__)?\.(?:py|pyc|so)$", "", found[1]) if found else ""
    return path.replace("/", ".")


def called(frame: Frame) -> str:
    """The function that a library's frame runs, by its public name if it has one."""
    name = f"{module_of(frame)}.{frame.function}" if frame.function else module_of(frame)
    for inner, public in _PUBLIC:
        if name == inner or (inner.endswith(".") and name.startswith(inner)):
            return public + name[len(inner) :]
    return name


# What a thread stands in, the most telling first: the first one that fits names the place.
Doing = Enum(
    "Doing",
    "DEBUGGER COLLECTIVE SAVE LOAD DATA SUBPROCESS SLEEP INPUT LOCK DEVICE CHECKPOINT BACKWARD "
    "LIBRARY USER NOTHING",
)


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
    def where(self) -> str:
        """``at train.py:88 in save_checkpoint``; "" without a frame of the user's."""
        function = "" if self.function in ("", "<module>") else f" in {self.function}"
        return f"at {self.file}:{self.line}{function}" if self.file else ""

    @property
    def sentence(self) -> str:
        """``in torch.save, called at train.py:88 in save_checkpoint``."""
        if self.doing is Doing.USER or not self.file:
            return self.where or self.what
        return f"{self.what}, called {self.where}"


UNKNOWN = Place(Doing.NOTHING, "at an unknown place (the dump has no Python stack)")

# By a frame's module and function: what it does, and how that is named; None: as users call it.
_FUNCTIONS = tuple(
    (re.compile(pattern), kind, text)
    for pattern, kind, text in (
        (
            r"(?:[pb]db|ipdb|pudb|debugpy|pydevd|IPython\.terminal\.debugger)",
            Doing.DEBUGGER,
            "the debugger ({library})",
        ),
        (
            r"(?:torch\.distributed\.(?:distributed_c10d|_functional_collectives)"
            r"|deepspeed\.comm\.(?:comm|torch))\.(?:all_?gather|reduce_?scatter|all_?reduce|all_to_all"
            r"|broadcast|barrier|monitored_barrier|reduce|gather|scatter|send|recv|batch_isend_irecv"
            r"|init_process_group|new_group|new_subgroups|split_group|destroy_process_group"
            r"|wait_tensor|inference_all_)\w*$",
            Doing.COLLECTIVE,
            "{function}",
        ),
        (
            r"torch\.serialization\.save$|torch\.distributed\.checkpoint\.state_dict_saver\."
            r"|safetensors\.torch\.save_file$|numpy\.lib\._?npyio(?:_impl)?\.save$",
            Doing.SAVE,
            None,
        ),
        (
            r"torch\.serialization\.load$|torch\.distributed\.checkpoint\.state_dict_loader\."
            r"|safetensors\.torch\.load_file$",
            Doing.LOAD,
            None,
        ),
        (r"torch\.utils\.data\.dataloader\.", Doing.DATA, "a DataLoader's next batch"),
        (r"subprocess\.", Doing.SUBPROCESS, "subprocess.{function} (a child process runs)"),
        (
            r"deepspeed\..*save_checkpoint",
            Doing.CHECKPOINT,
            "a checkpoint by DeepSpeed (save_checkpoint)",
        ),
        (r"torch\.(?:_tensor|autograd)\.backward$", Doing.BACKWARD, "loss.backward"),
        (r"deepspeed\.runtime\.engine.*\.backward$", Doing.BACKWARD, "DeepSpeed's backward"),
        (
            r"(?:threading|queue|concurrent\.futures|multiprocessing|asyncio|selectors)\b.*"
            r"\.(?:acquire|wait|wait_for|join|_wait_for_tstate_lock|get|put|result|_?poll|select"
            r"|_?recv|__enter__)$",
            Doing.LOCK,
            "the wait for a lock ({library})",
        ),
    )
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
    made = f"{PACKAGE}.diagnostics"  # from here on, the calls that made the dump
    end = next((i for i, f in enumerate(frames) if module_of(f).startswith(made)), len(frames))
    frames = frames[:end]
    if not frames:
        return UNKNOWN
    at = next((i for i in range(len(frames) - 1, -1, -1) if is_user(frames[i])), None)
    inner = list(frames[at + 1 :] if at is not None else frames)
    found = _recognized(frames, inner)
    first = min(found, key=lambda kind: int(kind.value), default=None)
    if first is not None:
        around = [found[kind] for kind in _CONTEXTS if kind in found and kind is not first]
        what, kind = ", ".join(f"in {text}" for text in [found[first], *around]), first
    elif inner:
        # The function that the user called; without a user, the innermost one.
        outer = next((f for f in inner if module_of(f) not in _DECORATORS), inner[0])
        what, kind = f"in {called(outer if at is not None else inner[-1])}", Doing.LIBRARY
    else:
        what, kind = "in the user's code", Doing.USER
    if at is None:
        return Place(kind, f"{what} (no frame of the user's code is in the stack)")
    user = frames[at]
    name = PurePosixPath(user.file.replace("\\", "/")).name
    return Place(kind, what, name, user.line, user.function, user.text.strip())


def _recognized(frames: Sequence[Frame], inner: Sequence[Frame]) -> dict[Doing, str]:
    """What is known to be running: below the user's line, and around it for what calls it back."""
    found: dict[Doing, str] = {}
    for frame in inner:
        for kind, text in _known(frame):
            if kind not in found or kind is Doing.COLLECTIVE:
                found[kind] = text
    for frame in frames[: len(frames) - len(inner)]:
        for kind, text in _known(frame):
            if kind in _CONTEXTS:
                found.setdefault(kind, text)
    for pattern, kind, text in _LINES:
        if pattern.search(frames[-1].text):
            found.setdefault(kind, text)
            break
    if any(
        module_of(f).startswith(PACKAGE) and ("wait" in f.function or ".wait(" in f.text)
        for f in inner
    ):
        found.setdefault(Doing.COLLECTIVE, "the wait for a collective")
    return found


def _known(frame: Frame) -> list[tuple[Doing, str]]:
    """What the function of a library does, and how that is named: one entry, or none."""
    module = module_of(frame)
    library = module.partition(".")[0].replace("bdb", "pdb")
    for pattern, kind, text in _FUNCTIONS:
        if module and pattern.match(f"{module}.{frame.function}"):
            known = text or called(frame)
            return [(kind, known.format(library=library, function=frame.function))]
    return []
