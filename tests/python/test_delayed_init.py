"""Models built without memory get the values that ordinary construction gives, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from deepspeed_smddp import delayed_init, materialize
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.models.delayed_init import is_delayed
from harness import model_jobs


def compare(build: Callable[[], nn.Module], seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    eager = build()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    model = delayed_init(build, seed)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert is_delayed(model)
    assert materialize(model, "cpu") is model
    assert not is_delayed(model)
    assert torch.equal(torch.get_rng_state(), before), "the generator has changed"
    ours, theirs = tensors(model), tensors(eager)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
        assert ours[name].dtype == value.dtype, name
        assert ours[name].requires_grad == value.requires_grad, name
    assert len(list(model.parameters())) == len(list(eager.parameters())), "ties are kept"
    return model


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


@pytest.mark.parametrize("name", sorted(model_jobs.BUILDS))
def test_models_of_transformers(name: str) -> None:
    compare(model_jobs.BUILDS[name])


class Everything(nn.Module):
    """torch's own layers and initialisers, ties, buffers, tensors with values, partial writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Linear(40, 30),
                nn.Conv2d(3, 8, 3),
                nn.LSTM(8, 8),
                nn.BatchNorm1d(9),
                nn.Embedding(10, 16, padding_idx=2),
                nn.TransformerEncoderLayer(16, 2, 32),
            ]
        )
        self.grown = nn.Parameter(torch.rand(6, 8) * torch.arange(8) + torch.randn(8))
        self.frozen = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
        self.low = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.ones(8, 8).tril())
        self.register_buffer("angles", torch.arange(8).float().cos(), persistent=False)
        self.register_buffer("order", torch.randperm(12))
        self.tied = nn.Linear(16, 10)
        self.tied.weight = self.layers[4].weight
        with torch.no_grad():
            self.low[1:3] = 7
            nn.init.trunc_normal_(self.layers[0].weight, std=0.02)
            nn.init.orthogonal_(self.layers[0].weight[:20])
            nn.init.trunc_normal_(self.layers[0].bias, 1.0, 0.9, 2.5, 3.0)
            nn.init.normal_(self.layers[0].bias[:7])
            nn.init.dirac_(self.layers[1].weight)
            nn.init.sparse_(self.layers[2].weight_hh_l0, 0.3)
            nn.init.eye_(self.layers[2].weight_ih_l0)
            self.layers[3].weight.mul_(3).add_(self.layers[3].bias)
            self.layers[5].linear1.weight.data.copy_(self.layers[5].linear2.weight.t())
            nn.init.xavier_uniform_(self.tied.weight)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_layers_and_initialisers_of_torch(seed: int) -> None:
    model = compare(Everything, seed)
    assert model.tied.weight is model.layers[4].weight
    model.layers[5](torch.randn(2, 3, 16)).sum().backward()


def test_without_a_seed_the_current_generator_is_used() -> None:
    torch.manual_seed(11)
    torch.rand(3)
    state = torch.get_rng_state()
    eager = nn.Linear(5, 5)
    torch.set_rng_state(state)
    model = materialize(delayed_init(lambda: nn.Linear(5, 5)))
    assert torch.equal(model.weight, eager.weight)


def test_one_parameter_at_a_time() -> None:
    """Memory for one parameter, not for all, although transformers writes each parameter twice."""
    model = delayed_init(model_jobs.BUILDS["gpt_neox"], 0)
    recipe = model._smddp_delayed_init
    storages = {}
    for index, memory in recipe.record.replay(set(recipe.slots)):
        storages[index] = memory.nbytes()
        held = sum(kept.nbytes() for kept in replaying(recipe))
        assert held <= 2 * max(recipe.record._storages[i].nbytes() for i in recipe.slots)
    assert sum(storages.values()) > 5 * max(storages.values())
    assert storages.keys() == recipe.slots.keys()


def replaying(recipe) -> list[torch.UntypedStorage]:
    """The storages that the replay's generator holds now."""
    import gc
    import inspect

    for found in gc.get_objects():
        # Other objects may do anything when they are asked for a name.
        if not inspect.isgenerator(found):
            continue
        if found.__name__ == "replay" and found.gi_frame is not None:
            frame = found.gi_frame
            if frame.f_locals["operations"] is recipe.record._operations:
                return list(frame.f_locals["memory"].values())
    raise AssertionError("no replay is running")


def test_code_that_cannot_be_recorded() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4))
            self.least = self.weight.min().item()

    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("noise", torch.tensor([1.0, 2.0]).normal_())

    with pytest.raises(RuntimeError, match="meta"):
        delayed_init(Asks)
    with pytest.raises(RuntimeError, match=r"aten::normal_ draws random numbers into a tensor"):
        delayed_init(Draws)
    assert torch.empty(1).device.type == "cpu", "nothing is left behind"
    assert nn.init.trunc_normal_(torch.zeros(9)).abs().sum() > 0


def test_misuse() -> None:
    with pytest.raises(ValueError, match="Linear was not built by delayed_init"):
        materialize(nn.Linear(2, 2))
    model = delayed_init(lambda: nn.Linear(2, 2))
    model.weight = nn.Parameter(torch.empty(3, 2, device="meta"))
    with pytest.raises(ValueError, match=r"weight of Linear has the shape \(3, 2\), but"):
        materialize(model)
    model = delayed_init(lambda: nn.Linear(2, 2))
    with pytest.raises(SmddpConfigError, match=r'"zero_optimization.stage": 3, and it is 1'):
        materialize(model, ds_config={"zero_optimization": {"stage": 1}})


def test_a_torch_without_the_private_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nn.init, "_no_grad_trunc_normal_")
    with pytest.raises(RuntimeError, match=r"has no torch\.nn\.init\._no_grad_trunc_normal_"):
        delayed_init(lambda: nn.Linear(8, 8))
