"""Published training speeds, predicted: the rows, the fit, the page. ``benchmarks/planner.py``."""
