"""What lossless coding between hosts is expected to bring: csrc/flows/coding_choice.cc's rule."""

from __future__ import annotations

# The part of their bytes that trained weights take: docs/coding.md.
RATIOS = {"bf16": 0.71, "fp32": 0.86}
_LEAST_GAIN = 1.05
# Bytes per second that a core with AVX2 codes and decodes, one after the other: 10 and 20 GB/s.
USUAL_CODE = 1e9 / 0.15


def highest_rate(ratio: float, code: float = USUAL_CODE) -> float:
    """Bytes per second of a rank's network up to which coding pays, at ``code`` bytes per second.

    The core codes if ``(ratio / network + 1 / code) * 1.05 <= 1 / network``.
    """
    return max(0.0, code * (1 / _LEAST_GAIN - ratio))
