"""What a recipe says about LoRA."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from lightning_nd.names import nearest
from lightning_nd.quantized import why_not

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass(frozen=True)
class LoRA:
    """Train low-rank pairs beside frozen layers, through peft (Hu et al. 2021).

    A pair adds ``alpha / r · B A x`` to what its layer gives for ``x``.

    Attributes:
        r: rank of the pairs.
        alpha: their weight, divided by ``r``.
        target_modules: the last parts of layer names (``[q_proj, v_proj]``), ``"all-linear"`` for every linear layer
            but the head, or a regular expression for whole names.
        dropout: probability with which a pair's inputs are zeroed; each layout draws other masks.
        rslora: divide ``alpha`` by ``√r`` instead of ``r`` (Kalajdzievski 2023).
        layers: numbers of the blocks that get pairs; None: all.
        adapter: a peft adapter folder to start from; None: random ``A``, zero ``B``.
        quantization: ``"nf4"`` keeps the frozen linear layers in 4 bits (QLoRA, Dettmers et al. 2023), through
            bitsandbytes; refused under ``tp``.

    Raises:
        ValueError: for values that cannot be right, or a quantization that this machine cannot do.
    """

    r: int = 16
    alpha: float = 32.0
    target_modules: list[str] | str = "all-linear"
    dropout: float = 0.0
    rslora: bool = False
    layers: list[int] | None = None
    adapter: str | None = None
    quantization: Literal["nf4"] | None = None

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ValueError(f"lora.r is {self.r}; the rank of a pair is at least 1.")
        if self.alpha <= 0:
            raise ValueError(f"lora.alpha is {self.alpha}; it must be positive, or the pairs add nothing.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout is {self.dropout}; it is a probability, from 0 to less than 1.")
        if not self.target_modules:
            raise ValueError("lora.target_modules is empty; name layers such as q_proj, or leave it at 'all-linear'.")
        if self.quantization not in (None, "nf4"):
            raise ValueError(f"lora.quantization is {self.quantization!r}; it is nf4, or null for none.")
        if self.quantization is not None and (reason := why_not()):
            raise ValueError(f"lora.quantization={self.quantization!r} cannot be done here: {reason}")
        if importlib.util.find_spec("peft") is None:
            raise ValueError("lora needs peft, which is not installed: pip install 'lightning-nd[lora]'.")

    @classmethod
    def of(cls, value: LoRA | Mapping[str, Any]) -> LoRA:
        """From a mapping of its fields.

        Raises:
            ValueError: for a name that is not one of them.
        """
        if isinstance(value, cls):
            return value
        assert isinstance(value, Mapping)
        known = [field.name for field in fields(cls)]
        for name in value:
            if name not in known:
                raise ValueError(f"lora has no {name!r}: {nearest(name, known)}")
        return cls(**value)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)

    def config(self) -> LoraConfig:
        """What peft is given; `add_adapters` sees to ``layers``."""
        from peft import LoraConfig

        alpha: Any = int(self.alpha) if self.alpha == int(self.alpha) else self.alpha
        return LoraConfig(
            r=self.r,
            lora_alpha=alpha,
            target_modules=self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules),
            lora_dropout=self.dropout,
            use_rslora=self.rslora,
            bias="none",
            task_type="CAUSAL_LM",
        )
