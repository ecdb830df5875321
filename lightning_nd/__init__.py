"""N-dimensional parallel training of language models for PyTorch Lightning."""

from lightning_nd import watch as watch  # first: a process whose parent has gone ends before it imports anything else
from lightning_nd.attention.context import AttentionContext, context_parallel_attention
from lightning_nd.checkpoint import from_config, load_pretrained, save_pretrained
from lightning_nd.checkpoint.convert import load_from_checkpoint
from lightning_nd.mesh import Meshes, ParallelDims
from lightning_nd.parallelize import ParallelConfig, parallelize
from lightning_nd.parallelize.context import gather_sequence
from lightning_nd.strategy import NDStrategy

__version__ = "0.1.0.dev0"

__all__ = [
    "AttentionContext",
    "Meshes",
    "NDStrategy",
    "ParallelConfig",
    "ParallelDims",
    "context_parallel_attention",
    "from_config",
    "gather_sequence",
    "load_from_checkpoint",
    "load_pretrained",
    "parallelize",
    "save_pretrained",
]
