"""Reading and writing weights: Hugging Face folders and sharded checkpoints."""

from lightning_nd.checkpoint.adapters import add_adapters, save_adapter
from lightning_nd.checkpoint.export import save_pretrained
from lightning_nd.checkpoint.init import from_config, recompute_buffers
from lightning_nd.checkpoint.load import load_pretrained, materialize

__all__ = [
    "add_adapters",
    "from_config",
    "load_pretrained",
    "materialize",
    "recompute_buffers",
    "save_adapter",
    "save_pretrained",
]
