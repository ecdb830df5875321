"""Where a model repeats itself: the blocks that are checkpointed, compiled and sharded as units."""

from __future__ import annotations

from torch import nn


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of a model with their names, in the order of registration.

    A transformers model names its block classes (``_no_split_modules``). In any other model a block is an element of a
    `ModuleList`, `ModuleDict` or `Sequential` that holds at least two parametrised children of one class. Blocks are
    the outermost such modules: what repeats inside a block (experts, say) is not a block of its own.
    """
    names = _block_class_names(model)
    found: list[tuple[str, nn.Module]] = []

    def visit(module: nn.Module, path: str) -> None:
        siblings = _repeated_children(module) if not names else []
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if type(child).__name__ in names or any(child is sibling for sibling in siblings):
                found.append((child_path, child))
            else:
                visit(child, child_path)

    visit(model, "")
    return found


def block_list(model: nn.Module) -> list[nn.Module] | None:
    """The blocks if they form one chain (elements of a single container), else ``None``."""
    blocks = find_blocks(model)
    parents = {name.rpartition(".")[0] for name, _ in blocks}
    return [block for _, block in blocks] if len(parents) == 1 else None


def check_shared(model: nn.Module) -> None:
    """Refuse parts of blocks that several blocks share: each block is sharded, split and gathered as a unit.

    Tied parameters of the embedding and the head are no such part.

    Raises:
        ValueError: naming both places.
    """
    seen: dict[int, str] = {}
    for block_name, block in find_blocks(model):
        mine: dict[int, str] = {}
        for name, module in block.named_modules(prefix=block_name):
            if not any(True for _ in module.parameters(recurse=False)):
                continue
            if (first := seen.get(id(module))) is not None:
                raise ValueError(
                    f"NDStrategy: {name} and {first} of {type(model).__name__} are one module. A block is split and"
                    " gathered as a unit, so blocks cannot share a part of themselves: give each block its own."
                )
            mine[id(module)] = name
        seen.update(mine)


def _block_class_names(model: nn.Module) -> set[str]:
    names = getattr(model, "_no_split_modules", None) or ()
    present = {type(module).__name__ for module in model.modules()}
    return {name for name in names if name in present}


def _repeated_children(module: nn.Module) -> list[nn.Module]:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return []
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    # Checkpointing may have wrapped some of them already.
    classes = [type(getattr(child, "_checkpoint_wrapped_module", child)) for child in children]
    return [child for child, cls in zip(children, classes, strict=True) if classes.count(cls) > 1]
