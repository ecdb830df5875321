"""What torch's CPU allocator gives out while a rank is played on real tensors: the reference for fake ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_nd.planner.layout import Setting, Work

# Kernels of the CPU that take scratch of their own, which a GPU's do not: attention, the lists of the optimizer, and
# sums in place of two dtypes, where the CPU converts the second before it adds.
_SCRATCH = ("flash_attention_for_cpu", "_foreach_", "aten::add_")


def allocated_peak(
    config: Any, setting: Setting, work: Work, lora: Mapping[str, Any] | None = None, steps: int = 2
) -> int:
    """Most bytes that were out at once, as the profiler recorded them; in a child process (`in_child`).

    Args:
        config: of a model small enough to be played for real.
        setting: the layout; the other ranks are a fake process group.
        work: rows and precision.
        lora: fields of a `LoRA`.
        steps: optimizer steps.
    """
    import torch
    from torch._C._profiler import _EventType

    from lightning_nd.planner.simulate import play_rank

    with torch.profiler.profile(profile_memory=True) as profile:
        play_rank(config, setting, work, lora, steps=steps, real=True)
    results: Any = profile.profiler.kineto_results
    changes: list[tuple[int, int]] = []

    def visit(event: Any, scratch: dict[int, list[tuple[int, int]]] | None) -> None:
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                kept = changes if scratch is None else scratch.setdefault(fields.ptr, [])
                kept.append((event.start_time_ns, fields.alloc_size))
            return
        outermost = scratch is None and any(name in event.name for name in _SCRATCH)
        inside = {} if outermost else scratch
        for child in event.children:
            visit(child, inside)
        if outermost:
            assert inside is not None
            changes.extend(change for pair in inside.values() if sum(size for _, size in pair) for change in pair)

    for event in results.experimental_event_tree():
        visit(event, None)
    live = peak = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        live += size
        peak = max(peak, live)
    return peak
