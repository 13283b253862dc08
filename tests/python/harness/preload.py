"""Modules that the fork server imports once for all ranks. None of them may start a thread."""

import numpy.random  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.fx.experimental.symbolic_shapes  # noqa: F401

import harness.cases
import harness.worker  # noqa: F401
