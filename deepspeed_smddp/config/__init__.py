"""The settings: what they are, where they come from, and how a DeepSpeed config is read."""
