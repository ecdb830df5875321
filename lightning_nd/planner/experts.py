"""How tensor parallelism divides what experts compute: rows of tokens, repeated for each expert that they go to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "grouped_mm", "linear", "grouped_mm_fallback")


class ExpertRows:
    """Follows these rows through a pass, operation by operation.

    The experts' first product is split by columns and its second by rows: a product of whole rows is split, one of
    split rows whole (a sum over ranks is still to come); the same holds for their gradients. Anything else is split if
    something that it is made of is.

    Args:
        tokens: of the pass.
        routed: experts that a token goes to; fewer than 2 leave nothing to follow.
        is_split: the experts are divided at all.
    """

    def __init__(self, tokens: int, routed: int, is_split: bool) -> None:
        self.rows, self.tokens, self.routed, self.is_split = tokens * routed, tokens, routed, is_split
        self._split: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor consists of such rows."""
        shape = tensor.shape
        return self.routed > 1 and len(shape) > 0 and (
            shape[0] == self.rows or shape[:2] == (self.tokens, self.routed)
        )  # fmt: skip

    def where(self, tensor: Tensor) -> str:
        """``split`` or ``whole``, of a tensor of such rows."""
        return "split" if self._split.get(tensor.untyped_storage(), False) else "whole"

    def note(self, func: Any, args: Iterable[Any], out: Any) -> None:
        """An operation that was run."""
        if self.routed < 2 or not self.is_split:
            return
        made = [t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor) and self.has(t)]
        given = [t for t in args if isinstance(t, Tensor) and self.has(t)]
        any_split = any(self.where(tensor) == "split" for tensor in given)
        is_product = func._schema.name.rpartition("::")[2] in PRODUCTS
        for tensor in made:
            storage = tensor.untyped_storage()
            if not any(storage is t.untyped_storage() for t in given) or is_product:
                self._split.setdefault(storage, any_split != is_product)
