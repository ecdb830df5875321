"""Chat, completion and text sources, sampling and the data module."""

from lightning_nd.data.datamodule import ChatDataModule
from lightning_nd.data.encode import Encoder, Example
from lightning_nd.data.errors import BadRow, DataError, RowError, Where
from lightning_nd.data.isolation import check_isolation
from lightning_nd.data.loader import Collator, StatefulLoader
from lightning_nd.data.order import Group, PackOrder, RowOrder, global_order
from lightning_nd.data.sampler import GlobalOrderSampler, SequentialOrderSampler
from lightning_nd.data.template import ChatRenderer, Span

__all__ = [
    "BadRow",
    "ChatDataModule",
    "ChatRenderer",
    "Collator",
    "DataError",
    "Encoder",
    "Example",
    "GlobalOrderSampler",
    "Group",
    "PackOrder",
    "RowError",
    "RowOrder",
    "SequentialOrderSampler",
    "Span",
    "StatefulLoader",
    "Where",
    "check_isolation",
    "global_order",
]
