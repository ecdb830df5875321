"""What the model answers: before and after training, and at every validation."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_nd.assets import resolve
from lightning_nd.parallelize.context import gather_sequence

_BLOCK = 64  # lengths are rounded up to it, so that a compiled model sees few shapes


class SampleCompletions(Callback):
    """Prints greedy completions of a few prompts before and after the fit.

    Every rank runs the same prompts for the same number of forward passes, because a sharded forward is a collective;
    no cache is kept, so the cost is up to ``max_new_tokens`` forward passes. Under cp the prompts are split as every
    batch is.

    Args:
        prompts: a JSONL file with one ``{"prompt": …}`` or ``{"messages": […]}`` a line, a text file (``.txt``) with
            one prompt a line, or a list of prompts. A prompt is given to the model as a user turn when the tokenizer
            has a chat template, as plain text otherwise.
        max_new_tokens: length of a completion.
        limit: use at most this many prompts.

    Raises:
        ValueError: with file and line for a row that is neither, and when there is no prompt.
    """

    def __init__(self, prompts: str | list[str], max_new_tokens: int = 24, limit: int = 4) -> None:
        if max_new_tokens < 1 or limit < 1:
            raise ValueError(f"SampleCompletions: max_new_tokens={max_new_tokens} and limit={limit} must be positive.")
        if isinstance(prompts, list):
            found = {f"prompt {number}": _as_messages(prompt) for number, prompt in enumerate(prompts, 1)}
        else:
            found = _read(prompts)
        if not found:
            raise ValueError(f"SampleCompletions: no prompt in {prompts!r}.")
        self._places, self.conversations = list(found)[:limit], list(found.values())[:limit]
        self.max_new_tokens = max_new_tokens

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # what cannot be asked is told now, and not at the first validation
            self._encoded(pl_module)

    def _encoded(self, module: LightningModule) -> list[list[int]]:
        """The prompts as the model sees them.

        Raises:
            ValueError: there is no tokenizer, its template refuses a prompt, or a prompt and its completion do not
                fit the model; named.
        """
        tokenizer = _tokenizer(module)
        if tokenizer is None:
            raise ValueError(f"{type(self).__name__} needs {type(module).__name__}.tokenizer, which is missing.")
        limit, encoded = _positions(module), []
        for place, messages in zip(self._places, self.conversations, strict=True):
            try:
                encoded.append(_encode(tokenizer, messages))
            except Exception as error:  # a template raises whatever it likes
                raise ValueError(f"{type(self).__name__}: {place}: the chat template refuses it: {error}") from error
            tokens, more = len(encoded[-1]), self.max_new_tokens
            if limit is not None and tokens + more > limit:
                raise ValueError(
                    f"{type(self).__name__}: {place}: {tokens} tokens and max_new_tokens={more} are {tokens + more},"
                    f" and the model has {limit} positions. Shorten the prompt, or ask for fewer."
                )
        return encoded

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show("before training", trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show("after training", trainer, pl_module)

    def _show(self, when: str, trainer: Trainer, pl_module: LightningModule) -> None:
        lines = [f"\nCompletions {when}:"]
        for prompt, text in self.complete(pl_module):
            lines += [f"  > {prompt}", f"    {text}"]
        rank_zero_info("\n".join(lines))

    def complete(self, module: LightningModule) -> list[tuple[str, str]]:
        """The prompts and what the model answers; collective over all ranks.

        Raises:
            ValueError: for prompts that cannot be asked, as when the fit was set up.
        """
        prompts, tokenizer = self._encoded(module), _tokenizer(module)
        stops = _stops(module, tokenizer)
        found = []
        for messages, answer in zip(
            self.conversations, greedy(module, prompts, self.max_new_tokens, stops), strict=True
        ):
            tokens = _until(answer, stops)
            text = " ".join(tokenizer.decode(tokens, skip_special_tokens=True).split()) or "(nothing)"
            found.append((messages[-1]["content"], text + (" …" if len(tokens) == len(answer) else "")))
        return found


class GenerateSamples(SampleCompletions):
    """Greedy completions of a few prompts at every validation, as text.

    They are printed, added to ``samples.jsonl`` in the run folder (``step``, ``prompt``, ``completion``), and given to
    every logger that takes text. Prompts and cost as for `SampleCompletions`.
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        step = trainer.global_step
        found = self.complete(pl_module)
        words = [f"\nCompletions after step {step}:"]
        for prompt, text in found:
            words += [f"  > {prompt}", f"    {text}"]
        rank_zero_info("\n".join(words))
        if trainer.is_global_zero:
            path = Path(trainer.default_root_dir) / "samples.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                for prompt, text in found:
                    row = {"step": step, "prompt": prompt, "completion": text}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
            for logger in trainer.loggers:
                _log_text(logger, found, step)


def _log_text(logger: Any, found: list[tuple[str, str]], step: int) -> None:
    """Hand completions to a logger that takes text: tables of W&B and Comet's kind, or TensorBoard's `add_text`."""
    if hasattr(logger, "log_text"):
        logger.log_text("samples", columns=["prompt", "completion"], data=[list(pair) for pair in found], step=step)
    elif hasattr(logger.experiment, "add_text"):
        text = "\n\n".join(f"**{prompt}**\n\n{completion}" for prompt, completion in found)
        logger.experiment.add_text("samples", text, step)


def greedy(
    module: LightningModule, prompts: list[list[int]], new_tokens: int, stops: Collection[int] = ()
) -> list[list[int]]:
    """The most likely continuation of each prompt; collective over all ranks.

    Args:
        module: has the causal LM as ``model``, already sharded.
        prompts: token ids, the same on every rank.
        new_tokens: length of the continuations.
        stops: ids that end a continuation. When all have ended, on every rank at once, they are left shorter.
    """
    was_training = module.training
    module.eval()
    device = module.trainer.strategy.root_device
    longest = max(map(len, prompts)) + new_tokens
    width = -(-longest // _BLOCK) * _BLOCK
    if (limit := _positions(module)) is not None:
        width = max(longest, min(width, limit))
    ids = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
    rows = torch.arange(len(prompts), device=device)
    positions = torch.arange(width, device=device)
    context = getattr(module.trainer.strategy, "_context", None)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    made = 0
    with torch.no_grad(), module.trainer.precision_plugin.forward_context():
        while made < new_tokens and not bool(ended.all()):
            mask = (positions < lengths[:, None]).long()
            batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
            if context is not None:
                batch = context.shard(batch)
                context.remember(batch)
            logits: Any = module.model(**batch, use_cache=False).logits  # type: ignore[operator]
            likeliest = gather_sequence(_full(logits).argmax(-1), batch)
            following = _same_everywhere(likeliest[rows, lengths - 1])
            ids[rows, lengths] = following
            ended |= torch.isin(following, torch.tensor(sorted(stops), dtype=torch.long, device=device))
            lengths, made = lengths + 1, made + 1
    module.train(was_training)
    return [ids[row, len(prompt) : len(prompt) + made].tolist() for row, prompt in enumerate(prompts)]


def _full(logits: Any) -> Tensor:
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits


def _same_everywhere(tokens: Tensor) -> Tensor:
    """Rank 0's choice: a tie that two ranks break differently would feed tp peers different tokens."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast(tokens, src=0)
    return tokens


def _tokenizer(module: LightningModule) -> Any:
    """With the chat template in force, which is the data module's if it has one."""
    data = getattr(module._trainer, "datamodule", None)
    return getattr(data, "tokenizer", None) or getattr(module, "tokenizer", None)


def _positions(module: LightningModule) -> int | None:
    config: Any = getattr(module, "config", None) or getattr(getattr(module, "model", None), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    limit = getattr(text, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _encode(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    if tokenizer.chat_template:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        ids = tokenizer("\n".join(m["content"] for m in messages))["input_ids"]
    return list(ids)


def _stops(module: LightningModule, tokenizer: Any) -> set[int]:
    config = getattr(getattr(module, "model", None), "generation_config", None)
    eos = getattr(config, "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
    return {i for i in ids if i is not None}


def _until(tokens: list[int], stops: set[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


def _as_messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _read(path: str) -> dict[str, list[dict[str, str]]]:
    """Conversations by file and line."""
    conversations: dict[str, list[dict[str, str]]] = {}
    text_file = Path(path).suffix == ".txt"
    # JSON takes line separators other than these in its strings
    lines = Path(resolve(path)).expanduser().read_text(encoding="utf-8-sig").split("\n")
    for number, line in enumerate(lines, 1):
        place = f"{path}:{number}"
        if not line.strip():
            continue
        if text_file:
            conversations[place] = _as_messages(line.strip())
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: not valid JSON: {error}") from error
        if isinstance(row, dict) and isinstance(row.get("prompt"), str):
            conversations[place] = _as_messages(row["prompt"])
        elif isinstance(row, dict) and isinstance(row.get("messages"), list) and row["messages"]:
            messages = row["messages"]
            # the answer is the model's: a closing assistant turn is not part of the prompt
            conversations[place] = messages[:-1] if messages[-1].get("role") == "assistant" else messages
            if not conversations[place]:
                raise ValueError(f"{place}: there is nothing before the answer, so nothing to be asked.")
        else:
            raise ValueError(f'{place}: expected {{"prompt": "…"}} or {{"messages": […]}}.')
    return conversations
