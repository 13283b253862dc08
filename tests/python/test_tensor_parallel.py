"""Tensor parallelism: its refusals, its plans, and random numbers in divided layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed_smddp.deepspeed import autotp
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.tensor_parallel import (
    check_degree,
    clip_grad_norm_,
    division,
    draw_apart,
    tensor_parallel,
)
from deepspeed_smddp.upstream import source
from harness import model_jobs
from harness.worker import Context
from harness.world import Pool


def test_degrees() -> None:
    for degree in (1, 2, 3, 6):
        check_degree(degree, 6)
    with pytest.raises(SmddpConfigError, match="is 4, but may hold a divisor of the 6 ranks: 1, 2"):
        check_degree(4, 6)


def test_plans() -> None:
    plan = division(model_jobs.llama())
    assert plan["model.layers.1.self_attn.q_proj"] == "colwise"
    assert plan["model.layers.0.mlp.down_proj"] == "rowwise"
    assert len(plan) == 2 * 7 + 2
    with pytest.raises(SmddpConfigError, match="Linear has no tensor-parallel plan"):
        division(nn.Linear(2, 2))
    model = model_jobs.llama()
    model.config.base_model_tp_plan = None
    model._tp_plan = {"model.layers.*.mlp": "moe_experts"}
    with pytest.raises(SmddpConfigError, match=r'divides model.layers.0.mlp .* by "moe_experts"'):
        division(model)


def refusals(ctx: Context) -> list[str]:
    found = []
    for build in (
        lambda: model_jobs.llama(num_attention_heads=3),
        lambda: model_jobs.llama(num_key_value_heads=1),
        lambda: model_jobs.llama(vocab_size=77),
        lambda: nn.Linear(2, 2),
    ):
        try:
            tensor_parallel(build(), 2)
        except SmddpConfigError as error:
            found.append(str(error))
    mesh = tensor_parallel(model_jobs.llama(), 1)
    found.append(f"{mesh['data'].size()} x {mesh['tensor'].size()}")
    return found


def test_sizes_that_do_not_divide(worlds: Pool) -> None:
    for answer in worlds("AA").run(refusals):
        assert "has to divide the 3 num_attention_heads of LlamaForCausalLM" in answer[0]
        assert "has to divide the 1 num_key_value_heads of LlamaForCausalLM" in answer[1]
        assert "has to divide the 77 entries of model.embed_tokens" in answer[2]
        assert "Linear has no tensor-parallel plan" in answer[3]
        assert answer[4] == "2 x 1"


def test_tied_embeddings(worlds: Pool) -> None:
    for losses in worlds("AA").run(tied):
        assert losses["tied"]
        assert losses["divided"] == pytest.approx(losses["whole"], rel=1e-5)


def tied(ctx: Context) -> dict[str, object]:
    found: dict[str, object] = {}
    for divided in (False, True):
        torch.manual_seed(1)
        model = model_jobs.llama(tie_word_embeddings=True)
        if divided:
            tensor_parallel(model, 2)
            found["tied"] = model.lm_head.weight is model.model.embed_tokens.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for _ in range(3):
            tokens = torch.arange(24).view(2, 12)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found["divided" if divided else "whole"] = losses
    return found


def test_clipping_is_torchs_on_plain_gradients() -> None:
    torch.manual_seed(0)
    for most in (0.1, 100.0):
        layers = [nn.Linear(5, 4) for _ in range(2)]
        layers[1].load_state_dict(layers[0].state_dict())
        for layer in layers:
            layer(torch.ones(3, 5)).square().sum().backward()
        ours = clip_grad_norm_(layers[0].parameters(), most)
        theirs = torch.nn.utils.clip_grad_norm_(layers[1].parameters(), most)
        assert torch.allclose(ours, theirs)
        assert torch.allclose(layers[0].weight.grad, layers[1].weight.grad)
    assert clip_grad_norm_([], 1.0) == 0


class Pair(nn.Module):
    """A pair of divided layers with dropout between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.columns, self.rows = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        inside = self.drop(torch.ones_like(self.columns(x)))
        return inside, self.drop(torch.ones_like(self.rows(inside)))


def test_dropout_differs_between_columns_and_rows_only() -> None:
    def masks(rank: int, seed: int = 0) -> list[torch.Tensor]:
        model = Pair().train()
        draw_apart(model, {"columns": "colwise", "rows": "rowwise"}, rank, seed)
        torch.manual_seed(4)
        return [mask for _ in range(3) for mask in model(torch.ones(40, 8))]

    one, other, again, seeded = masks(0), masks(1), masks(0), masks(0, seed=7)
    for index in range(6):
        assert torch.equal(one[index], again[index])
        outside = index % 2 == 1
        assert torch.equal(one[index], other[index]) == outside
        assert torch.equal(one[index], seeded[index]) == outside
        assert not torch.equal(one[index], one[(index + 2) % 6]), "two calls drew the same numbers"


def test_a_region_that_was_never_left() -> None:
    model = Pair().train()
    draw_apart(model, {"columns": "colwise", "rows": "rowwise"}, 0, 0)
    torch.manual_seed(4)
    expected = model(torch.ones(40, 8))
    model.columns(torch.ones(40, 8))  # like a recomputation that stops early
    torch.manual_seed(4)
    found = model(torch.ones(40, 8))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("config", "arguments", "sentence"),
    [
        ({}, {"mpu": object()}, "was given mpu"),
        ({"tensor_parallel": {"autotp_size": 4}}, {}, '"tensor_parallel.autotp_size" is 4'),
        ({}, {"model": "zero"}, "built under zero.Init"),
    ],
)
def test_contradicting_configs(
    config: dict, arguments: dict, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    if arguments.get("model") == "zero":
        arguments = {"model": nn.Linear(2, 2)}
        arguments["model"].weight.ds_id = 0
    with pytest.raises(SmddpConfigError, match=sentence):
        autotp._check(arguments, config, 2)
    autotp._check({"model": nn.Linear(2, 2)}, {}, 2)
    feature = "tensor_parallel_degree"
    monkeypatch.setitem(source.READ, feature, {place: {} for place in source.READ[feature]})
    with pytest.raises(SmddpConfigError, match=r"is not that of 0.19.8; install the known one"):
        autotp._check({"model": nn.Linear(2, 2)}, {}, 2)
