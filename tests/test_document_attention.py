"""Document by document without cp: one process's numbers, and nothing whose size is the square of the length."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from parity import train_parallel
from pool import Pool
from reference import Batch, make_batches
from test_attention_parity import check, packed, run, sgd
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_nd.loaders import warn_of_masks


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 1, 2), (1, 2, 1)], ids=str)
def test_it_trains_like_one_process(pool: Pool, family: str, layout: tuple[int, int, int]) -> None:
    batches = [*make_batches(1, length=23), *packed(make_batches(1, length=23, seed=3))]
    check(*run(pool, family, batches, layout, 1, document_attention=True))


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation gives, backward included."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def largest_tensor(rank: int, world_size: int, batches: list[Batch], by_document: bool) -> int:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    sizes["use_cache"] = False  # with a cache, transformers overlooks documents
    with Largest() as seen:
        train_parallel(
            rank, world_size, "llama", (1, 1, 1), batches,
            overrides=sizes, strategy={"document_attention": by_document}, optimizer=sgd,
        )  # fmt: skip
    return seen.elements


def long_batches(length: int) -> dict[str, Batch]:
    """A long row and a shorter one, padded together; and documents in one row."""
    padded = make_batches(1, rows=2, length=length, silent_row=False)[0]
    for name, fill in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        padded[name][1, length * 9 // 16 :] = fill
    return {"padded": padded, "packed": packed(make_batches(1, rows=1, length=length, silent_row=False))[0]}


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_h07_nothing_is_as_large_as_the_square_of_the_length(pool: Pool, kind: str) -> None:
    length = 2048
    batch = long_batches(length)[kind]
    assert pool.run(largest_tensor, 1, [batch], True)[0] < length**2 / 2
    assert pool.run(largest_tensor, 1, [batch], False)[0] >= length**2  # what transformers does by itself


@pytest.mark.parametrize(
    ("length", "extra", "told"),
    [
        (8192, {"attention_mask": torch.ones(1, 8192)}, False),
        (8192, {"attention_mask": torch.arange(8192)[None] < 8000}, True),
        (8192, {"position_ids": torch.arange(8192)[None]}, False),
        (8192, {"position_ids": torch.arange(8192)[None] % 4096}, True),
        (4096, {"position_ids": torch.arange(4096)[None] % 2048}, False),
    ],
)
def test_h07_masks_of_long_rows_are_told_of(length: int, extra: dict[str, torch.Tensor], told: bool) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warn_of_masks({"input_ids": torch.zeros(1, length, dtype=torch.long), **extra})
    assert any("document_attention=True" in str(w.message) for w in seen) is told
