"""The place of a run beside its weights: counters of the loops, place in the data, random states, what must agree."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_nd.checkpoint.manifest import CheckpointError, Manifest

if TYPE_CHECKING:
    import lightning.pytorch as pl

# -- random states ----------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Tensor]:
    """The state of this process's generators, as tensors."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state())
    assert version == 3
    assert kind == "MT19937"
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.append(keys.astype(np.int64), [position, has_gauss])),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Continue with the states that `random_state` gave."""
    torch.set_rng_state(state["torch"])
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = state["numpy"].tolist()
    cached = float(state["numpy_gauss"])
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def shared_states(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """The states of all ranks, equal ones once."""
    kept: list[Mapping[str, Tensor]] = []
    numbers: dict[bytes, int] = {}
    ranks = []
    for state in states:
        key = hashlib.sha256(b"".join(state[k].numpy().tobytes() for k in sorted(state))).digest()
        if key not in numbers:
            numbers[key] = len(kept)
            kept.append(state)
        ranks.append(numbers[key])
    return {"states": kept, "of_rank": ranks}


def state_of_rank(saved: Mapping[str, Any], rank: int, same_layout: bool) -> Mapping[str, Tensor]:
    """This rank's own state on the layout that saved it; on another one rank 0's, for all ranks."""
    return saved["states"][saved["of_rank"][rank if same_layout else 0]]


# -- loops and data ---------------------------------------------------------------------------------------------------


def rewind_window(
    checkpoint: dict[str, Any], accumulate: int, automatic: bool, places: Sequence[Any] | None = None
) -> int:
    """Move a checkpoint from inside an accumulation window to the window's begin; returns the micro-batches moved.

    The gradients of a window that is not complete are not saved: its micro-batches are read again.

    Args:
        checkpoint: as `Trainer.dump_checkpoint` made it, changed in place.
        accumulate: micro-batches of a window.
        automatic: Lightning takes the optimizer's steps.
        places: states of the loaders at the window's begin, where some are not ours and only they can set them back.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop")
    if loops is None or accumulate == 1 or not automatic:
        return 0
    progress = loops["epoch_loop.batch_progress"]
    inside = progress["current"]["processed"] % accumulate
    if not inside or progress["is_last_batch"]:
        return 0
    for counts in (progress["current"], progress["total"]):
        at = counts["processed"] - inside
        # `started` one behind: neither at the end of a batch nor of a validation, of which Lightning asks
        counts.update(ready=at, started=at - 1, processed=at, completed=at)
    # Lightning adds the step before the window again, taking it for one whose batch has not ended
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    states = loops["state_dict"].get("combined_loader") or []
    if places is not None:  # what they said at the end of an epoch is no place in the next one
        loops["state_dict"]["combined_loader"] = list(places) if progress["current"]["processed"] else []
        return inside
    for i, state in enumerate(states):
        if isinstance(state, dict) and "rows_per_batch" in state:
            states[i] = {**state, "position": state["position"] - inside * state["rows_per_batch"]}
    return inside


def continue_epoch(loops: dict[str, Any]) -> None:
    """Count an epoch in a checkpoint's loops by its rows, however the run that saved it was stopped.

    When `max_steps` or a callback stops a run, Lightning counts the epoch at hand as done, and would leave out its
    rows that have not been read. Where an epoch has ended it goes on "inside" of that if the run is limited by steps,
    and so leaves out the next one; else it does not tell the loaders their places.

    Args:
        loops: ``checkpoint["loops"]["fit_loop"]``, changed in place.
    """
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    if epochs["current"]["processed"] != epochs["current"]["started"] or not batches["current"]["processed"]:
        return
    if not batches["is_last_batch"]:  # as a checkpoint that is saved at the end of a batch counts
        for counts in (epochs["current"], epochs["total"]):
            counts["processed"] = counts["completed"] = counts["started"] - 1
        if batches["current"]["started"] == batches["current"]["completed"]:
            for counts in (batches["current"], batches["total"]):
                counts["completed"] -= 1
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    else:  # as a checkpoint that is saved at the begin of the next epoch counts
        for counts in (epochs["current"], epochs["total"]):
            counts["completed"] = counts["processed"]
            counts["ready"] = counts["processed"] + 1
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False


def begin_epoch(fit_loop: Any) -> None:
    """Count the epoch that begins where a run goes on from the last batch of the one before.

    Lightning ends the earlier one and does not begin the next: what is saved in that looks as if it had ended, too.
    Called once the loop has been reset.
    """
    epochs = fit_loop.epoch_progress
    if fit_loop.restarted_mid_epoch and epochs.current.processed == epochs.current.started:
        epochs.increment_ready()
        epochs.increment_started()


def fit_to_layout(fit_loop: Any) -> None:
    """Count the batches of this layout that lie before the place in the data, where others had been counted.

    Called once the loaders have been given their places.
    """
    loop = fit_loop.epoch_loop
    loader = fit_loop._combined_loader
    places = [one for one in (loader.flattened if loader is not None else []) if getattr(one, "resumed", None)]
    if len(places) != 1 or not fit_loop.restarting:
        return
    progress = loop.batch_progress
    there, here = places[0].resumed.get("rows_per_batch"), places[0].rows_per_batch
    if there is None or there == here:
        return
    before = places[0].batches_before()
    if before is None or (progress.is_last_batch and before == 0):  # at the end of an epoch
        before = fit_loop.max_batches if progress.is_last_batch else 0
    if before == float("inf"):
        return
    change = int(before) - progress.current.processed
    for counts in (progress.current, progress.total):
        for name in ("ready", "started", "processed", "completed"):
            setattr(counts, name, getattr(counts, name) + change)


def tell_places(fit_loop: Any) -> None:
    """Tell loaders their places where Lightning has not: they were there before the states.

    So it is where a schedule has asked for the number of steps. What has begun to read is begun anew.
    """
    if fit_loop.restarting and fit_loop._combined_loader_states_to_load:
        fit_loop._load_combined_loader_states()
        iter(fit_loop._data_fetcher)


def spare_callbacks(trainer: pl.Trainer) -> None:
    """Do not save the step again that a run goes on from: within its next window, whose begin is that step's end."""
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "_every_n_train_steps", 0) >= 1:
            callback._last_global_step_saved = trainer.global_step  # type: ignore[attr-defined]


# -- what must agree --------------------------------------------------------------------------------------------------


def describe_models(module: nn.Module) -> dict[str, Any]:
    """Class and configuration of each transformers model in a module, and of the module itself."""
    from transformers import PreTrainedModel

    from lightning_nd.checkpoint import _transformers as hf

    found: dict[str, Any] = {
        "": {"class": type(module).__name__, "parameters": sum(p.numel() for p in module.parameters())}
    }
    for name, part in module.named_modules():
        outer = any(name.startswith(f"{other}.") for other in found if other)
        if isinstance(part, PreTrainedModel) and not outer:
            config = json.loads(part.config.to_json_string(use_diff=False))
            volatile = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "_attn_implementation")
            config = {key: value for key, value in config.items() if key not in volatile}
            generation = part.generation_config.to_dict() if part.can_generate() and part.generation_config else None
            found[hf.clean_name(name)] = {
                "class": hf.plain_class(part).__name__,
                "config": config,
                "generation": json.loads(json.dumps(generation, default=str)),
                "dtypes": _stored_dtypes(part),
            }
    return found


def _stored_dtypes(model: nn.Module) -> dict[str, str]:
    """Dtypes of the files that a model was read from: the usual one under "", others by name."""
    from lightning_nd.checkpoint.source import WeightSource

    source = getattr(model, "_nd_source", None)
    if not isinstance(source, WeightSource):
        return {}
    dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in source.dtypes.items()}
    usual = max(set(dtypes.values()), key=list(dtypes.values()).count)
    return {"": usual, **{name: dtype for name, dtype in dtypes.items() if dtype != usual}}


def describe_recipe(trainer: pl.Trainer) -> dict[str, Any]:
    """What a resumed run must agree on (``must``), and what changes its numbers if it does not (``should``)."""
    data: Any = getattr(trainer, "datamodule", None)
    must: dict[str, Any] = {"lr_schedulers": [type(c.scheduler).__name__ for c in trainer.lr_scheduler_configs]}
    tokenizer: Any = getattr(data, "tokenizer", None)
    if callable(getattr(tokenizer, "get_vocab", None)):
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
        must["tokenizer"] = {
            "size": len(tokenizer),
            "vocabulary": hashlib.sha256(vocabulary.encode()).hexdigest()[:16],
            "template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16],
        }
    loader = trainer.fit_loop._combined_loader
    rows = [
        one.rows_per_batch for one in (loader.flattened if loader is not None else []) if hasattr(one, "rows_per_batch")
    ]
    should: dict[str, Any] = {"precision": str(trainer.precision)}
    if len(rows) == 1:
        should["rows per optimizer step"] = rows[0] * trainer.accumulate_grad_batches
    return {"must": must, "should": should, "chat_template": getattr(tokenizer, "chat_template", None)}


def model_differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Words for how the models of a checkpoint and of a module differ; empty if they do not."""
    words = []
    for name in sorted(set(saved) & set(here)):
        there, now = saved[name], here[name]
        if name and there["class"] != now["class"]:
            words.append(f"{name} was a {there['class']} and is a {now['class']}")
        a, b = there.get("config", {}), now.get("config", {})
        changed = [
            f"{key} was {a.get(key)} and is {b.get(key)}" for key in sorted(set(a) | set(b)) if a.get(key) != b.get(key)
        ]
        words += [f"{name}.config.{text}" for text in changed[:6]]
    return f" ({'; '.join(words)}.)" if words else ""


def check_recipe(manifest: Manifest, trainer: pl.Trainer) -> None:
    """Refuse to go on with what would train on other numbers; called when the loaders are there.

    Raises:
        CheckpointError: another tokenizer or another kind of learning rate schedule, saying which.
    """
    here, saved = describe_recipe(trainer), manifest.recipe
    if not saved:
        return
    there = saved["must"].get("tokenizer"), here["must"].get("tokenizer")
    if all(there) and there[0] != there[1]:
        what = [key for key in there[0] if there[0][key] != there[1][key]]
        raise CheckpointError(
            f"The tokenizer is not that of the checkpoint: {' and '.join(what)} differ"
            f" ({there[0]['size']} tokens then, {there[1]['size']} now). Resume with the same tokenizer and chat"
            " template."
        )
    changed = [
        f"{key} was {value} and is {here['should'][key]}"
        for key, value in saved["should"].items()
        if key in here["should"] and here["should"][key] != value
    ]
    if changed:
        rank_zero_warn(
            f"NDStrategy: {'; '.join(changed)}: from here on the run will not be the one that was interrupted. Rows per"
            " step are micro_batch_size × data ranks × accumulate_grad_batches."
        )


def check_schedulers(manifest: Manifest, trainer: pl.Trainer, states: list[Any]) -> list[Any]:
    """The states for the schedulers that there are now; those that are new start with their first rates.

    Raises:
        CheckpointError: a scheduler is of another kind than the saved one.
    """
    then = manifest.recipe.get("must", {}).get("lr_schedulers", [])
    now = [type(c.scheduler).__name__ for c in trainer.lr_scheduler_configs]
    for a, b in zip(then, now, strict=False):
        if a != b:
            raise CheckpointError(
                f"The checkpoint's learning rate schedule is a {a}, and configure_optimizers now makes a {b}, whose"
                " state it does not hold. Resume with the same schedule, or start a new run from the weights:"
                " lightning-nd export --checkpoint ..., then fit from that folder."
            )
    if len(now) > len(then):
        for config in trainer.lr_scheduler_configs[len(then) :]:  # not the rates that the checkpoint has left
            scheduler = config.scheduler
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
        rank_zero_warn(
            f"NDStrategy: the checkpoint has no learning rate schedule; {', '.join(now[len(then) :])} starts at its"
            f" beginning, at step {manifest.step}."
        )
    elif len(then) > len(now):
        rank_zero_warn(
            f"NDStrategy: the checkpoint's {', '.join(then[len(now) :])} is not used any more: the learning rate stays"
            " where it was."
        )
    return states[: len(now)]


def optimizer_settings(optimizers: Sequence[Any]) -> list[list[dict[str, Any]]]:
    """Rate, betas and the like of every group of each optimizer, as the run at hand has configured them."""
    found = []
    for optimizer in optimizers:
        groups: list[dict[str, Any]] = [
            {key: value for key, value in group.items() if isinstance(value, int | float | tuple)}
            for group in optimizer.param_groups
        ]
        for group in groups:
            group["lr"] = group.pop("initial_lr", group.get("lr"))  # the rate before any schedule
        found.append(groups)
    return found


def warn_of_settings(before: Sequence[Any], after: Sequence[Any], trainer: pl.Trainer, states: Sequence[Any]) -> None:
    """Say which configured values give way to the checkpoint's, and whether the schedule is another one.

    Args:
        before: `optimizer_settings` as configured.
        after: the same once the checkpoint has been loaded.
        trainer: with its schedulers, not yet loaded.
        states: of the schedulers in the checkpoint.
    """
    words = []
    for mine, saved in zip(before, after, strict=True):
        for a, b in zip(mine, saved, strict=True):
            words += [f"{key} {b[key]} (configured: {a[key]})" for key in a if key in b and a[key] != b[key]]
    for config, state in zip(trainer.lr_scheduler_configs, states, strict=False):
        own = config.scheduler.state_dict()
        words += [
            f"{key} {state[key]} (configured: {value})"
            for key, value in own.items()
            if isinstance(value, int | float) and not key.startswith("_") and key != "last_epoch"
            if isinstance(state.get(key), int | float) and state[key] != value
        ]
    if words:
        rank_zero_warn(
            f"NDStrategy: the optimizer goes on with the checkpoint's settings: {', '.join(dict.fromkeys(words))}. For"
            " others start a new run from an export of it."
        )
    for config, state in zip(trainer.lr_scheduler_configs, states, strict=False):
        _warn_of_shape(config.scheduler, state)


def _warn_of_shape(scheduler: Any, state: Mapping[str, Any]) -> None:
    """A schedule that is a function of the step is not in its state: compare what it gives for the next step."""
    factors, rates = getattr(scheduler, "lr_lambdas", None), state.get("_last_lr")
    if not factors or not rates or len(factors) != len(rates) or "base_lrs" not in state:
        return
    step = state["last_epoch"]
    here = [base * factor(step) for base, factor in zip(state["base_lrs"], factors, strict=True)]
    if any(abs(a - b) > 1e-6 * max(abs(a), abs(b)) for a, b in zip(here, rates, strict=True)):
        rank_zero_warn(
            "NDStrategy: the learning rate schedule is not that of the checkpoint, as with another warm-up or number"
            f" of steps: step {step + 1} would have had a rate of {rates[0]:.3g} and has {here[0]:.3g}. From here on"
            " the run will not be the one that was interrupted."
        )


# -- what weights_only loading takes ----------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """The same with paths as text and subclasses of dict as dict: what is loaded without running code."""
    if isinstance(value, PurePath | Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {plain(key): plain(entry) for key, entry in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(plain(entry) for entry in value)
    return value
