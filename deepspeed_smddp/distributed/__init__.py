"""The backend in torch.distributed: registration, extension, launchers, memory."""
