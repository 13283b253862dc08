"""Tells a user's source files from those of libraries, and names what a library's frame runs."""

from __future__ import annotations

import re

from deepspeed_smddp.diagnostics.report.dump import Frame

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
    return bool(frame.file) and not module(frame) and not _LAUNCHER.search(frame.file)


def is_own(frame: Frame) -> bool:
    """If the frame runs code of this package."""
    return _dotted_or_empty(_OWN, frame.file) != ""


def is_decorator(frame: Frame) -> bool:
    """If the frame only calls the function that it is wrapped around."""
    return module(frame) in _DECORATORS


def module(frame: Frame) -> str:
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
    name = f"{module(frame)}.{frame.function}" if frame.function else module(frame)
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
