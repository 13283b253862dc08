"""Modules that the fork server imports once for all ranks. None of them may start a thread."""

import gc

import numpy.random  # noqa: F401
import pydantic  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp
import torch.fx.experimental.symbolic_shapes  # noqa: F401

import deepspeed_smddp.distributed.backend  # noqa: F401
import harness.cases
import harness.worker  # noqa: F401

gc.collect()
gc.freeze()  # the ranks' garbage collections leave these modules alone
