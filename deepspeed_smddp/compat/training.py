"""``smp.DistributedModel`` and ``smp.DistributedOptimizer``, which share one DeepSpeed engine.

The engine is made when both exist. With ``sharded_data_parallel_degree`` above 1 it is ZeRO-3 with
that degree, with ``shard_optimizer_state`` ZeRO-1, and without both plain data parallelism.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from deepspeed_smddp.compat import modelparallel, refuse
from deepspeed_smddp.errors import SmddpConfigError, logger
from deepspeed_smddp.models.offload import offload_activations

# Arguments of DistributedModel without effect: pipelines, and memory that DeepSpeed manages itself.
_IDLE = (
    "trace_device",
    "trace_execution_times",
    "trace_memory_usage",
    "overlapping_allreduce",
    "broadcast_buffers",
    "gradient_as_bucket_view",
)


class DistributedModel(nn.Module):
    """Runs a module on a DeepSpeed engine; ``backward()`` takes the place of ``loss.backward()``.

    Args:
        module: the model.
        backward_passes_per_step: steps whose gradients are summed before ``optimizer.step()``.
        average_grads_across_microbatches: divide gradients by the number of micro-batches.
        idle: further arguments of the original, without effect here.

    Raises:
        RuntimeError: ``smp.init()`` was not called.
        TypeError: the original has no such argument.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        **idle: Any,
    ) -> None:
        super().__init__()
        unknown = [name for name in idle if name not in _IDLE]
        if unknown:
            raise TypeError(f"DistributedModel has no argument {unknown[0]}")
        if not modelparallel.is_initialized():
            raise RuntimeError("smp.DistributedModel needs smp.init() before it")
        self._module = module
        self._passes = backward_passes_per_step
        count = modelparallel.state.cfg.microbatches
        self._divisor = count if average_grads_across_microbatches else 1
        self._engine: Any = None
        modelparallel.state.model = self

    def get_module(self) -> nn.Module:
        """The module that was given."""
        return self._module

    module = property(get_module)

    @property
    def engine(self) -> Any:
        """The DeepSpeed engine.

        Raises:
            RuntimeError: there is no optimizer yet.
        """
        if self._engine is None:
            raise RuntimeError(
                "smp.DistributedModel needs smp.DistributedOptimizer around its optimizer to run"
            )
        return self._engine

    def _start(self, optimizer: torch.optim.Optimizer) -> Any:
        import deepspeed

        cfg = modelparallel.state.cfg
        engine, *_ = deepspeed.initialize(
            model=self._module,
            optimizer=optimizer,
            config=cfg.ds_config(self._passes * cfg.microbatches),
        )
        if cfg.offload_activations:
            offload_activations(self._module, horizon=cfg.activation_loading_horizon)
        object.__setattr__(self, "_engine", engine)  # not a second registered child
        return engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        return self.engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """The backward pass of a scalar loss."""
        if gradient is not None or loss.numel() != 1:
            refuse("backward() of a non-scalar tensor", "reduce it to a scalar loss first")
        engine = self.engine
        engine.backward(loss / self._divisor, scale_wrt_gas=False)
        if not engine.is_gradient_accumulation_boundary():
            engine.step()  # counts the micro-batch

    def train(self, mode: bool = True) -> DistributedModel:
        """Sets the mode of the module and the engine."""
        super().train(mode)
        if self._engine is not None:
            self._engine.train(mode)
        return self

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> Any:
        """All parameters and buffers on the CPU, by the module's own names; gathered if sharded.

        Every rank must call it.

        Args:
            args: without effect.
            gather_to_rank0: ranks other than 0 get an empty dictionary.
            kwargs: without effect.
        """
        import deepspeed

        with deepspeed.zero.GatheredParameters(self._module.parameters()):
            found = {k: v.detach().cpu().clone() for k, v in self._module.state_dict().items()}
        return found if modelparallel.rank() == 0 or not gather_to_rank0 else {}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads into the module, by its own names; only before the optimizer is wrapped."""
        if self._engine is not None:
            refuse(
                "load_state_dict() after smp.DistributedOptimizer has wrapped the optimizer",
                "call it before, or resume with smp.resume_from_checkpoint",
            )
        return self._module.load_state_dict(state_dict, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters, by its own names."""
        return self._module.named_parameters(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_module"), name)


class DistributedOptimizer(torch.optim.Optimizer):
    """Steps the engine; the learning rates are in the wrapped optimizer's ``param_groups``.

    Args:
        optimizer: of parameters of the module that was given to ``smp.DistributedModel``.
        static_loss_scale: refused except for None and 1.
        dynamic_loss_scale: without effect; with ``fp16`` the loss scale is always dynamic.
        dynamic_loss_args: without effect; DeepSpeed's defaults apply.

    Raises:
        RuntimeError: there is no ``smp.DistributedModel`` yet.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = None,
        dynamic_loss_scale: bool = True,
        dynamic_loss_args: Any = None,
    ) -> None:
        # super().__init__() is not called: the groups and the state are the wrapped optimizer's.
        model = modelparallel.state.model
        if model is None:
            raise RuntimeError("smp.DistributedOptimizer needs smp.DistributedModel before it")
        if static_loss_scale not in (None, 1, 1.0):
            refuse("static_loss_scale", "leave it out; with fp16 the loss scale is dynamic")
        self.optimizer = optimizer
        self._engine = model._start(optimizer)
        self.defaults = optimizer.defaults

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's groups."""
        return self._engine.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because fp16 gradients had overflowed."""
        return bool(getattr(self._engine.optimizer, "overflow", False))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Reduces, clips and applies the gradients.

        Raises:
            SmddpConfigError: fewer than ``backward_passes_per_step`` passes have run.
        """
        if closure is not None:
            refuse("optimizer.step(closure)", "call the closure before optimizer.step()")
        if not self._engine.is_gradient_accumulation_boundary():
            raise SmddpConfigError(
                "optimizer.step() was called before all backward passes of the step; wrap the "
                "model with backward_passes_per_step=1, or with the number of passes per step"
            )
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the engine clears gradients after it has applied them."""

    def clip_master_grads(self, max_norm: float) -> None:
        """Clips gradients to this norm, from this step on."""
        optimizer = self._engine.optimizer
        if hasattr(optimizer, "clip_grad"):
            optimizer.clip_grad = max_norm
        else:
            refuse(
                "clip_master_grads() without fp16 or sharding", "use torch.nn.utils.clip_grad_norm_"
            )

    def state_dict(self) -> Any:
        """Refused, because the state is sharded."""
        refuse("optimizer.state_dict()", "use smp.save_checkpoint")

    def load_state_dict(self, state_dict: Any) -> None:
        """Refused, because the state is sharded."""
        refuse("optimizer.load_state_dict()", "use smp.resume_from_checkpoint")

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Recomputes the module's activations in the backward pass instead of keeping them.

    Args:
        module: a layer; for an ``nn.Sequential`` or ``nn.ModuleList``, each of its members.
        preserve_rng_state: dropout draws the same numbers again.
        pack_args_as_tuple: without effect here.
        strategy: "each"; groups of layers are refused.
    """
    if strategy != "each":
        refuse(f'activation checkpointing with strategy="{strategy}"', 'use strategy="each"')
    if isinstance(module, (nn.Sequential, nn.ModuleList)):
        for child in module:
            set_activation_checkpointing(child, preserve_rng_state)
        return
    from torch.utils.checkpoint import checkpoint

    module.forward = functools.partial(
        checkpoint, module.forward, use_reentrant=False, preserve_rng_state=preserve_rng_state
    )


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **of_layers: Any
) -> Iterator[None]:
    """As a context: models built in it have parameters of type ``dtype``.

    Args:
        tensor_parallelism: refused; the original would also replace layers by its own.
        dtype: default: torch's default type.
        of_layers: settings of the original's own layers, without effect here.
    """
    if tensor_parallelism:
        refuse(
            "transformer layers of its own (tensor_parallelism=True)",
            "build the model as it is, with tensor_parallelism=False, and with torch's attention",
        )
    if any(of_layers.values()):
        names = ", ".join(sorted(name for name, value in of_layers.items() if value))
        logger.info("smddp: smp.model_creation: %s without effect here", names)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def set_partition(module: nn.Module | None, index: int) -> None:
    """Puts a layer into a pipeline's stage; there is only stage 0."""
    if index != 0:
        refuse("pipeline parallelism", "leave out smp.partition and smp.set_partition, or pass 0")


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """As a context: layers of a pipeline's stage."""
    set_partition(None, index)
    yield


def _refused(what: str, instead: str) -> Callable[..., contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def context(enabled: bool = True, **config: Any) -> Iterator[None]:
        """Has no effect if not enabled; refused if enabled."""
        if enabled:
            refuse(what, instead)
        yield

    return context


tensor_parallelism = _refused(
    "tensor parallelism under smp", 'use DeepSpeed\'s "tensor_parallel" (AutoTP)'
)
delay_param_initialization = _refused(
    "smp.delay_param_initialization", "build the model under deepspeed.zero.Init"
)
