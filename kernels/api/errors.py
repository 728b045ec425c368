"""Errors of the kernels package. It imports nothing of Tandem's, so the engine turns these into its own ConfigError."""

from __future__ import annotations


class UnsupportedOptionError(ValueError):
    """A backend can't do what was asked of it. `option` names the argument, the message says what to use instead."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option


class BackendUnavailableError(ValueError):
    """The attention backend that was asked for by name can't serve this device, dtype, head size or option."""
