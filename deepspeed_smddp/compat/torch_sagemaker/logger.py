"""``torch.sagemaker.logger``; served by deepspeed-smddp."""

from logging import Logger, getLogger

__all__ = ["get_logger"]


def get_logger(name: str = "torch.sagemaker") -> Logger:
    """A logger of the standard library."""
    return getLogger(name)
