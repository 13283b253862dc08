"""Predicts memory, step time and cost of a training job before it starts (``smddp plan``)."""
