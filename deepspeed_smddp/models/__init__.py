"""What a model takes from this package: activations in host memory, delayed initialisation."""
