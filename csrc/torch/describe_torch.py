"""Prints what the build needs to know of the installed torch, as one CMake list."""

import sysconfig

import torch
from torch.utils import cpp_extension

print(
    ";".join(
        [
            torch.__version__,
            str(int(torch._C._GLIBCXX_USE_CXX11_ABI)),
            cpp_extension.library_paths()[0],
            sysconfig.get_config_var("EXT_SUFFIX"),
            sysconfig.get_paths()["include"],
            *cpp_extension.include_paths(),
        ]
    )
)
