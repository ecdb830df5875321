"""The ``lightning-nd`` command line."""

from lightning_nd.cli.main import main

__all__ = ["main"]
