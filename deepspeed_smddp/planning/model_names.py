"""The built-in list of models: name -> arguments of ``ModelShape``.

Sizes are those of the published configs. GPT-NeoX 65B and GPT-2 30B are the models of two AWS
articles about the closed library; the first has no published shape, so it has that of Llama 65B
with a feed-forward network of four times the hidden size.
"""

from __future__ import annotations

from typing import Any


def _llama(
    layers: int, hidden: int, heads: int, kv: int, ffn: int, vocabulary: int, sequence: int
) -> dict[str, Any]:
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv,
        "ffn": ffn,
        "vocabulary": vocabulary,
        "sequence": sequence,
    }


def _gpt(
    layers: int, hidden: int, heads: int, vocabulary: int, sequence: int, **more: Any
) -> dict[str, Any]:
    """A decoder as GPT-2 and GPT-3: four times the hidden size in between, biases, LayerNorm."""
    shape = _llama(layers, hidden, heads, heads, 4 * hidden, vocabulary, sequence)
    shape |= {"gated": False, "bias": "all", "norm": 2, "tied": True, "positions": sequence}
    return shape | more


def _neox(layers: int, hidden: int, heads: int, vocabulary: int) -> dict[str, Any]:
    return _gpt(layers, hidden, heads, vocabulary, 2048, tied=False, positions=0)


def _mpt(layers: int, hidden: int, heads: int, sequence: int) -> dict[str, Any]:
    more: dict[str, Any] = {"bias": "none", "norm": 1, "positions": 0}
    return _gpt(layers, hidden, heads, 50432, sequence, **more)


BUILT_IN: dict[str, dict[str, Any]] = {
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, 32000, 4096),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192),
    "llama-3-405b": _llama(126, 16384, 128, 8, 53248, 128256, 8192),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32000, 8192),
    "qwen2.5-7b": _llama(28, 3584, 28, 4, 18944, 152064, 8192) | {"bias": "qkv"},
    "qwen2.5-32b": _llama(64, 5120, 40, 8, 27648, 152064, 8192) | {"bias": "qkv"},
    "qwen2.5-72b": _llama(80, 8192, 64, 8, 29568, 152064, 8192) | {"bias": "qkv"},
    "gpt2": _gpt(12, 768, 12, 50257, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 50257, 1024),
    "gpt2-30b": _gpt(48, 7168, 64, 50257, 2048),
    "gpt3-175b": _gpt(96, 12288, 96, 51200, 2048),
    "mt-nlg-530b": _gpt(105, 20480, 128, 51200, 2048),
    "opt-13b": _gpt(40, 5120, 40, 50272, 2048, positions=2050),
    "opt-66b": _gpt(64, 9216, 72, 50272, 2048, positions=2050),
    "bloom-176b": _gpt(70, 14336, 112, 250880, 2048, positions=0, embedding_norm=True),
    "gpt-neox-20b": _neox(44, 6144, 64, 50432),
    "gpt-neox-65b": _neox(80, 8192, 64, 50432),
    "pythia-12b": _neox(36, 5120, 40, 50688),
    "mpt-7b": _mpt(32, 4096, 32, 2048),
    "mpt-30b": _mpt(48, 7168, 64, 8192),
}
