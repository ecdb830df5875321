"""Sums that autograd's engine makes in place where nobody watches, and out of place where a dispatch mode is active."""

from __future__ import annotations

import sys
from typing import Any

import torch

#: Python's last frame when the engine itself calls an operation, and files of torch that wrap a mode's dispatch.
ENGINE = "_engine_run_backward"
_WRAPPERS = ("_dynamo/eval_frame.py", "torch/_compile.py")


def is_engines_sum(func: Any) -> bool:
    """Whether a dispatched operation adds up gradients of a tensor with several users.

    To be called from a mode's ``__torch_dispatch__``. Without a mode the engine adds to the first gradient if nobody
    else holds it (``InputBuffer::accumulate``), so that the sum takes no memory of its own.
    """
    if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
        return False
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.replace("\\", "/").endswith(_WRAPPERS):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_name == ENGINE
