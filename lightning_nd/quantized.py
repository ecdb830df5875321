"""Frozen weights in 4 bits (QLoRA, Dettmers et al. 2023): packed as they are read, and sharded as packed bytes.

Section 3 of the paper: NormalFloat in blocks of 64 values with a scale each, and these scales in 8 bits (double
quantization). The formats and kernels are bitsandbytes', on CPU and CUDA.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BLOCK, _OUTER = 64, 256
OLDEST = "0.46"
"""of bitsandbytes: the first that computes on a CPU"""


def why_not() -> str | None:
    """Why this installation cannot quantize; None if it can."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return (
            "bitsandbytes is not installed: pip install 'lightning-nd[qlora]', or leave it out: the frozen weights are"
            " bfloat16 with precision bf16-mixed, and sharded over dp_shard."
        )
    from importlib.metadata import PackageNotFoundError, version

    from packaging.version import Version

    try:
        found = version("bitsandbytes")
    except PackageNotFoundError:  # on the path without its metadata
        return None
    if Version(found) < Version(OLDEST):
        return f"bitsandbytes is {found}, and it takes {OLDEST} or newer: pip install -U bitsandbytes."
    return None


def check_quantized(model: nn.Module) -> None:
    """Refuse weights in formats that would be parted from their scales when they are sharded.

    Raises:
        ValueError: naming the layer.
    """
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            whole = (parameter.is_floating_point() and parameter.element_size() > 1) or parameter.is_complex()
            if not whole and not (is_quantized(module) and key == "weight"):
                raise ValueError(
                    f"NDStrategy: {name} ({type(module).__name__}) holds quantized weights ({parameter.dtype}), which"
                    " would be sharded without their scales. bitsandbytes' 4 bits (load_in_4bit, or lora.quantization:"
                    " nf4 in a recipe) can be; else load the weights in bfloat16."
                )


class PackedLinear(nn.Linear):
    """A frozen linear layer whose weight is a column of bytes, ``(n + 1) // 2`` of them for ``n`` values.

    Its scales are kept whole on every rank (0.5 bits a value). It computes in the dtype of its input.

    Attributes:
        quant_state: bitsandbytes' scales; `pack` sets them.
        unpacked: shape and dtype of the weight that is packed.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.unpacked = (linear.weight.shape, linear.weight.dtype)
        size = (linear.weight.numel() + 1) // 2
        self.weight = nn.Parameter(torch.empty(size, 1, dtype=torch.uint8, device="meta"), requires_grad=False)
        if linear.bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(linear.bias, requires_grad=False)
        self.quant_state: Any = None
        self.train(linear.training)

    @override
    def forward(self, input: Tensor) -> Tensor:
        """``input`` [..., in_features] → [..., out_features]."""
        from bitsandbytes import matmul_4bit

        bias = None if self.bias is None else self.bias.to(input.dtype)
        return cast(Tensor, matmul_4bit(input, self.weight, quant_state=self.quant_state, bias=bias))


def quantize_linears(model: PreTrainedModel) -> None:
    """Make the linear layers of a meta model, all but the head, hold NF4 values; `materialize` packs them.

    The layers are those that transformers quantizes.

    Raises:
        ValueError: if there is no such layer.
    """
    from lightning_nd.checkpoint._transformers import tied_names

    tied = {name for pair in tied_names(model).items() for name in pair}
    head = model.get_output_embeddings()
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and f"{name}.weight" not in tied
    ]
    if not found:
        raise ValueError(f"lora.quantization: {type(model).__name__} has no linear layers but its head.")
    for name, linear in found:
        model.set_submodule(name, PackedLinear(linear))


def is_quantized(module: nn.Module) -> bool:
    """Whether a module's weight is packed, by us or as bitsandbytes' own layers are."""
    return isinstance(module, nn.Linear) and hasattr(module, "quant_state")


def quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers whose weights are packed, by name."""
    return {name: module for name, module in model.named_modules() if is_quantized(module)}


def pack(layer: PackedLinear, weight: Tensor, device: torch.device) -> Tensor:
    """The packed bytes of a whole weight; its scales go to the layer."""
    from bitsandbytes.functional import quantize_4bit

    packed, layer.quant_state = quantize_4bit(
        weight.to(device).contiguous(), blocksize=_BLOCK, compress_statistics=True, quant_type="nf4"
    )
    return packed


def leave_blank(layer: PackedLinear, device: torch.device) -> None:
    """Give a layer scales without values, for a simulation that has no weights."""
    from bitsandbytes.functional import QuantState

    shape, dtype = layer.unpacked
    blocks = -(-shape[0] * shape[1] // _BLOCK)

    def floats(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=device)

    outer = QuantState(absmax=floats(-(-blocks // _OUTER)), code=floats(256), blocksize=_OUTER, dtype=torch.float32)
    layer.quant_state = QuantState(
        absmax=torch.empty(blocks, dtype=torch.uint8, device=device),
        shape=shape,
        dtype=dtype,
        blocksize=_BLOCK,
        code=floats(16),
        quant_type="nf4",
        offset=torch.zeros((), device=device),
        state2=outer,
    )
