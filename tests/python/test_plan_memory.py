"""The planner's shapes and memory against transformers and the papers' own figures."""

import json
from dataclasses import replace

import pytest
import torch
import transformers

from deepspeed_smddp.planning import hardware, model_shape
from deepspeed_smddp.planning.memory_use import (
    layer_activation_bytes,
    memory_use,
    score_bytes,
)
from deepspeed_smddp.planning.training_job import Job, Scheme
from harness import modules

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 211}
CONFIGS = [
    transformers.LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=176),
    transformers.LlamaConfig(**SMALL, intermediate_size=176, attention_bias=True, mlp_bias=True),
    transformers.LlamaConfig(**SMALL, intermediate_size=176, tie_word_embeddings=True),
    transformers.MistralConfig(**SMALL, num_key_value_heads=1, intermediate_size=176, head_dim=8),
    transformers.Qwen2Config(**SMALL, num_key_value_heads=2, intermediate_size=96),
    transformers.Qwen3Config(**SMALL, num_key_value_heads=2, intermediate_size=96, head_dim=32),
    transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=211),
    transformers.GPTNeoXConfig(**SMALL, intermediate_size=256),
    transformers.OPTConfig(
        **SMALL, ffn_dim=200, word_embed_proj_dim=64, max_position_embeddings=128
    ),
    transformers.BloomConfig(hidden_size=64, n_layer=3, n_head=4, vocab_size=211),
    transformers.MptConfig(d_model=64, n_layers=3, n_heads=4, vocab_size=211),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_the_parameters_are_those_of_the_model_that_transformers_makes(config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    shape = model_shape.of_text(str(tmp_path))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_model_states_are_those_of_table_1_of_the_zero_paper(stage, gigabytes):
    # 7.5 billion parameters on 64 GPUs: the vocabulary is whatever the layers leave.
    shape = replace(model_shape.named("gpt2-xl"), hidden=4096, ffn=16384, heads=32, kv_heads=32)
    shape = replace(shape, layers=36, positions=0)
    left = 7.5e9 - 36 * shape.layer_parameters - 2 * 4096
    whole = replace(shape, vocabulary=round(left / 4096))
    assert whole.parameters / 1e9 == pytest.approx(7.5, rel=1e-6)
    job = Job(whole, hardware.cluster("p4d"), 64, Scheme(stage=stage))
    use = memory_use(job)
    states = use.parameters + use.gradients + use.optimizer
    assert states / 1e9 == pytest.approx(gigabytes, abs=0.06)


def test_activations_are_those_of_korthikanti_s_formulas():
    # Section 4 of the paper, GPT-3: s 2048, b 1, h 12288, a 96, t 8.
    shape = model_shape.named("gpt3-175b")
    sbh = 2048 * 12288
    scores = 5 * 96 * 2048 / 12288
    assert layer_activation_bytes(shape, 1) == 34 * sbh
    assert score_bytes(shape, 1) == pytest.approx(scores * sbh)
    assert layer_activation_bytes(shape, 1, tensor=8) == (10 + 24 / 8) * sbh
    assert layer_activation_bytes(shape, 1, 8, sequence_parallel=True) == 34 / 8 * sbh


def _memory_command():
    return modules.load("benchmarks/plan_memory.py")


def test_real_steps_on_cpus_need_what_the_planner_says_within_ten_percent():
    command = _memory_command()
    measured = {
        case: command.RESULTS / f"case-{number}.json"
        for number, case in enumerate(command.CASES, 1)
        if (command.RESULTS / f"case-{number}.json").exists()
    }
    assert len(measured) >= 3
    for case, path in measured.items():
        assert case.planned().total == pytest.approx(command.peak(path), rel=0.1), case
        run = json.loads(path.read_text())["case"]
        assert run["ds_config"] == case.ds_config()
        assert run["model"] == case.transformers_config()
