"""How this package rests on DeepSpeed and torch: supported versions, read sources, wrapping.

Knows the mechanisms only. What a feature does with them stands in the feature's own package, and no
module here imports one.
"""
