"""The data module of the recipes: chat, completion, text and token files."""

import os
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from typing_extensions import override

from lightning_nd.assets import resolve
from lightning_nd.data import cache
from lightning_nd.data.dataset import OnBadRow, OnTooLong, Tally, TokenDataset
from lightning_nd.data.encode import Encoder, TrainOn
from lightning_nd.data.errors import DataError
from lightning_nd.data.inputs import Input, as_sources, find_inputs
from lightning_nd.data.loader import Batch, Collator, StatefulLoader
from lightning_nd.data.node import once_per_node
from lightning_nd.data.order import Group, PackOrder, RowOrder
from lightning_nd.data.report import CLOSE, OPEN, check, describe, mark, what_happened
from lightning_nd.data.rows import Message
from lightning_nd.data.sampler import GlobalOrderSampler, SequentialOrderSampler
from lightning_nd.data.stream import StreamDataset, StreamLoader
from lightning_nd.data.template import ChatRenderer, prepare_tokenizer
from lightning_nd.data.tokenise import Policy, tokenise

# A dictionary is a `lightning_nd.data.inputs.Source`, checked with our own words.
Files = str | dict[str, Any] | list[str | dict[str, Any]]
_STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}
# Tokenizers without a limit say so with a huge number.
_NO_LIMIT = 10**9


class ChatDataModule(LightningDataModule):
    """Rows of JSONL, JSON, CSV or Parquet files, or of the hub, as batches of token ids and labels.

    A row has ``messages`` (and ``tools``), ``prompt`` and ``completion``, ``input_ids`` (and ``labels``), or
    ``text``. All rows are read and checked in ``setup``, before any weights are loaded. A batch is a dict of
    ``input_ids``, ``attention_mask`` and ``labels``, each ``[micro-batch, length]`` int64, padded on the
    right; a label is -100 where the loss does not look.

    Every data rank reads other rows of one global order, and does the same number of steps; Lightning adds no
    sampler of its own. See ``docs/data.md``.

    Args:
        train: File, glob, ``{path: …, weight: 2}``, ``{hub: …, split: …}``, or several of them. Relative paths start
            at the current directory, ``~`` is the home directory, ``lightning_nd://quickstart/train.jsonl`` is a file
            of the package.
        val: Likewise, for validation.
        test: Likewise, for testing.
        predict: Likewise, for prediction; its conversations may end with a user turn.
        tokenizer: Folder or hub id; the model's own if left out. In Python also a tokenizer.
        chat_template: Jinja file that replaces the tokenizer's chat template, and is exported with it.
        max_length: Longest row in tokens; if left out, the tokenizer's limit or the model's, the smaller one.
        micro_batch_size: Rows per data rank and step of accumulation.
        eval_micro_batch_size: The same for validation, test and prediction; ``micro_batch_size`` if left out.
        train_on: What the loss is over: every ``assistant`` turn, the ``last_assistant`` turn, the
            ``completion`` (what follows the prompt or the last user turn), or ``all`` tokens.
        system: ``keep`` system turns, or ``fold`` them into the first user turn for templates without a
            system role.
        on_bad_row: Refuse a dataset with unusable rows (``error``), or leave them out, counted and listed.
        on_too_long: What to do with rows over ``max_length``: ``error``, ``drop``, or ``truncate``.
        packing: Lay rows, which do not see each other, end to end in packs of up to ``max_length`` tokens; a
            micro-batch is ``micro_batch_size`` packs. Prediction is not packed.
        streaming: Read the rows of ``train`` while training, instead of tokenising them beforehand; only the first ones
            are checked before weights load.
        shuffle: Read the training rows in another order every epoch.
        shuffle_buffer: Rows that are held to draw from with ``streaming``.
        seed: Of that order; the one given to ``seed_everything`` if left out.
        num_workers: Processes that collate batches, for each rank.
        num_proc: Processes that tokenise, on each node; its cores if left out.
        cache_dir: Folder of tokenised sources; ``$LIGHTNING_ND_CACHE/data`` or ``~/.cache/lightning-nd/data`` if left
            out. Processes of one node must share it.
        pad_to_multiple_of: Round batch lengths up to a multiple of this.

    Raises:
        DataError: in ``setup``; the message names files and lines and the setting to change.
        ValueError: an option has a value that is not allowed.

    """

    def __init__(
        self,
        train: Files | None = None,
        val: Files | None = None,
        test: Files | None = None,
        predict: Files | None = None,
        *,
        tokenizer: str | PathLike[str] | PreTrainedTokenizerBase | None = None,
        chat_template: str | None = None,
        max_length: int | None = None,
        micro_batch_size: int = 1,
        eval_micro_batch_size: int | None = None,
        train_on: TrainOn = "assistant",
        system: Literal["keep", "fold"] = "keep",
        on_bad_row: OnBadRow = "error",
        on_too_long: OnTooLong = "error",
        packing: bool = False,
        streaming: bool = False,
        shuffle: bool = True,
        shuffle_buffer: int = 10_000,
        seed: int | None = None,
        num_workers: int = 0,
        num_proc: int | None = None,
        cache_dir: str | None = None,
        pad_to_multiple_of: int | None = None,
    ) -> None:
        super().__init__()
        _check_choice("train_on", train_on, ("assistant", "last_assistant", "completion", "all"))
        _check_choice("system", system, ("keep", "fold"))
        _check_choice("on_bad_row", on_bad_row, ("error", "skip"))
        _check_choice("on_too_long", on_too_long, ("error", "drop", "truncate"))
        _check_at_least("max_length", max_length, 2)
        _check_at_least("micro_batch_size", micro_batch_size, 1)
        _check_at_least("eval_micro_batch_size", eval_micro_batch_size, 1)
        _check_at_least("num_workers", num_workers, 0)
        _check_at_least("shuffle_buffer", shuffle_buffer, 1)
        _check_at_least("num_proc", num_proc, 1)
        _check_at_least("pad_to_multiple_of", pad_to_multiple_of, 1)
        given = {"train": train, "val": val, "test": test, "predict": predict}
        self.sources = {name: as_sources(value, f"data.{name}") for name, value in given.items()}
        if streaming and packing:
            raise ValueError("ChatDataModule: packing needs the lengths of all rows beforehand; set streaming: false")
        if streaming and any(source.weight != 1 for source in self.sources["train"]):
            raise ValueError("ChatDataModule: weights need the number of rows beforehand; set streaming: false")
        self.chat_template = chat_template
        self.max_length = max_length
        self.micro_batch_size = micro_batch_size
        self.eval_micro_batch_size = eval_micro_batch_size or micro_batch_size
        self.train_on = train_on
        self.system = system
        self.on_bad_row = on_bad_row
        self.on_too_long = on_too_long
        self.packing = packing
        self.streaming = streaming
        self.shuffle = shuffle
        self.shuffle_buffer = shuffle_buffer
        self.seed = seed
        self.num_workers = num_workers
        self.num_proc = num_proc
        self.cache_dir = cache_dir
        self.pad_to_multiple_of = pad_to_multiple_of
        self._tokenizer_source = tokenizer
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._encoder: Encoder | None = None
        self._notes: list[str] = []
        self._datasets: dict[str, TokenDataset] = {}
        self._tallies: dict[str, Tally] = {}
        self._orders: dict[str, RowOrder] = {}

    # -- tokenizer ----------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer with the chat template in force: the one to export and to generate with."""
        if self._tokenizer is None:
            tokenizer = self._load_tokenizer()
            self._notes = prepare_tokenizer(tokenizer, self.chat_template, self.system)
            self._tokenizer = tokenizer
        return self._tokenizer

    def _load_tokenizer(self) -> PreTrainedTokenizerBase:
        source = self._tokenizer_source
        if source is None:
            source = self._tokenizer_of_model()
        if isinstance(source, PreTrainedTokenizerBase):
            return source
        name = str(Path(resolve(str(source))).expanduser()) if str(source)[:1] in "~." else resolve(str(source))
        try:
            return AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            tried = Path(name).absolute()
            raise DataError(
                f"data.tokenizer: cannot load a tokenizer from {str(source)!r} (as a folder: {tried}, "
                f"{'which exists' if tried.is_dir() else 'which does not exist'}): {error}"
            ) from error

    def _tokenizer_of_model(self) -> str | PreTrainedTokenizerBase:
        module = self.trainer.lightning_module if self.trainer else None
        own = getattr(module, "tokenizer", None)
        if isinstance(own, PreTrainedTokenizerBase):
            return own
        model = getattr(module, "model", None)
        for name in (
            getattr(module, "hparams", {}).get("model"),
            model,
            getattr(model, "name_or_path", None),
        ):
            if isinstance(name, str) and name:
                return name
        raise DataError(
            f"{type(self).__name__} cannot tell the model's tokenizer"
            + (f" ({type(module).__name__} has no 'tokenizer' and names no model)" if module is not None else "")
            + "; set data.tokenizer to a folder or a hub id"
        )

    @property
    def _pad_id(self) -> int:
        tokenizer = self.tokenizer
        for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return 0  # any id does: padding is masked and unsupervised by position

    def encode_prompt(self, messages: list[Message], tools: list[Any] | None = None) -> list[int]:
        """Token ids of a conversation up to where the assistant is to answer, as in training.

        Raises:
            DataError: there is no chat template.

        """
        if not self.tokenizer.chat_template:
            raise DataError("a prompt of messages needs a chat template; set data.chat_template to a Jinja file")
        text = ChatRenderer(self.tokenizer).render(messages, tools, prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    # -- datasets -----------------------------------------------------------------------------------------

    def preflight(self, stage: str) -> None:
        """Read, check and tokenise the sources of a stage in this process, for the ranks that it will start.

        Raises:
            DataError: what `setup` would raise on every rank.

        """
        self._check_given(stage)
        self._check_ready()
        if self._streams(stage):
            self._stream().head()
        self._tokenised(self._needed([stage]))

    @override
    def setup(self, stage: str | None = None) -> None:
        """Read, check and tokenise the sources of a stage (``fit``, ``validate``, ``test``, ``predict``)."""
        stages = list(_STAGES) if stage is None else [str(getattr(stage, "value", stage))]
        if any(map(self._streams, stages)):
            self._check_ready()
            rank_zero_info(once_per_node(self._describe_stream, self.trainer))
        self._build(self._needed(stages))
        for s in stages if stage is not None else []:
            self._check_given(s)

    def _check_given(self, stage: str) -> None:
        if not self.sources[_STAGES[stage][0]]:
            raise DataError(f"{stage} needs data.{_STAGES[stage][0]}, a file or glob, and it is not set")

    def _needed(self, stages: list[str]) -> list[str]:
        needed = [name for stage in stages for name in _STAGES[stage]]
        return [n for n in dict.fromkeys(needed) if self.sources[n] and not (n == "train" and self.streaming)]

    def _streams(self, stage: str) -> bool:
        return self.streaming and "train" in _STAGES[stage] and bool(self.sources["train"])

    def _stream(self, num_replicas: int = 1, rank: int = 0) -> StreamDataset:
        return StreamDataset(
            find_inputs(self.sources["train"], "data.train", streaming=True),
            Encoder(self.tokenizer, self.train_on),
            Policy(self._longest, self.on_too_long),
            Collator(self._pad_id, self.pad_to_multiple_of),
            on_bad_row=self.on_bad_row,
            micro_batch_size=self.micro_batch_size,
            seed=self._order_seed,
            shuffle=self.shuffle_buffer if self.shuffle else 0,
            pad_id=self._pad_id,
            num_replicas=num_replicas,
            rank=rank,
        )

    def _describe_stream(self) -> str:
        tally, example = self._stream().head()
        lines = [f"data: {note}" for note in self._notes]
        looked = tally.rows + len(tally.bad) + tally.dropped_rows
        usable = f"{tally.rows} can be used, the longest of {tally.longest:,} tokens"
        lines.append(f"train: streamed; of the first {looked} rows {usable}")
        if happened := what_happened(tally, self.on_bad_row):
            lines.append(f"  {happened}")
        if example is not None:
            lines.append(f"  sample, supervised tokens in {OPEN}{CLOSE}:")
            lines += ["    " + line for line in mark(example.input_ids, example.labels, self.tokenizer).splitlines()]
        return "\n".join(lines)

    def _build(self, names: list[str]) -> None:
        names = [name for name in names if name not in self._datasets]
        if not names:
            return
        self._check_ready()
        for name, (folder, tally, weights) in once_per_node(lambda: self._tokenised(names), self.trainer).items():
            self._datasets[name], self._tallies[name] = self._open(folder), tally
            self._orders[name] = self._order(name, weights)
        rank_zero_info(self.describe(names))

    def _check_ready(self) -> None:
        _ = self.tokenizer  # every rank needs it, so every rank says what is wrong with it
        if self.packing and self._longest is None:
            raise DataError(
                "data.packing needs data.max_length, the length of a pack; the tokenizer has no limit either"
            )

    def _tokenised(self, names: list[str]) -> dict[str, tuple[Path, Tally, list[float]]]:
        """By name, the folder with its tokens, made if there is none yet, its tally, and the weight of each file.

        One process a node does this.
        """
        if self._encoder is None:
            self._encoder = Encoder(self.tokenizer, self.train_on)
        root = cache.cache_folder(self.cache_dir)
        folders: dict[str, Path] = {}
        tallies: dict[str, Tally] = {}
        inputs: dict[str, list[Input]] = {}
        made: dict[str, Path] = {}
        try:
            for name in names:
                inputs[name] = find_inputs(self.sources[name], f"data.{name}")
                split = [one.split() for one in inputs[name]]
                pieces, digests = [p for of_one, _ in split for p in of_one], [digest for _, digest in split]
                files = [one.name for one in inputs[name]]
                policy = Policy(self._longest, self.on_too_long, prompts=name == "predict")
                folders[name] = root / cache.key_of(
                    self.tokenizer, digests, {"train_on": self.train_on, **vars(policy)}
                )
                found = cache.find(folders[name], files)
                if found is None:
                    label = f"Tokenising {name}" if getattr(rank_zero_only, "rank", 0) == 0 else None
                    encoded = tokenise(pieces, self._encoder, policy, processes=self.num_proc, label=label)
                    made[name], found = cache.write(root, encoded, files)
                tallies[name] = found
            check(tallies, self.on_bad_row, self.on_too_long, self._longest)
            for name in list(made):
                cache.publish(made.pop(name), folders[name])
        finally:
            for folder in made.values():
                cache.discard(folder)
        return {name: (folders[name], tallies[name], [one.weight for one in inputs[name]]) for name in names}

    def _open(self, folder: Path) -> TokenDataset:
        try:
            return TokenDataset(folder, self._pad_id)
        except OSError as error:
            raise DataError(
                f"this rank cannot read the tokens that the first rank of its node has written to {folder} ({error}). "
                "Set data.cache_dir to a folder that all processes of a node share"
            ) from error

    def _order(self, name: str, weights: list[float]) -> RowOrder:
        dataset = self._datasets[name]
        weight_of_row = np.repeat(weights, self._tallies[name].rows_of)
        groups = [Group(np.flatnonzero(weight_of_row == weight), weight) for weight in dict.fromkeys(weights)]
        try:
            if self.packing and name != "predict":
                assert self._longest is not None
                return PackOrder(groups, dataset.lengths, self._longest)
            return RowOrder(groups)
        except ValueError as error:
            raise DataError(f"data.{name}: {error}") from error

    @property
    def _longest(self) -> int | None:
        if self.max_length is not None:
            return self.max_length
        limit = self.tokenizer.model_max_length
        known = [int(limit)] if limit < _NO_LIMIT else []
        if not self.packing:  # the length of a pack is something to decide, not all that the model can take
            config: Any = getattr(self.trainer.lightning_module if self.trainer else None, "config", None)
            text = config.get_text_config() if hasattr(config, "get_text_config") else None
            positions = getattr(text, "max_position_embeddings", None)
            known += [positions] if isinstance(positions, int) and positions > 0 else []
        return min(known, default=None)

    def describe(self, names: list[str] | None = None) -> str:
        """The start report of the sources set up so far: rows, tokens, lengths, drops, a decoded sample."""
        lines = [f"data: {note}" for note in self._notes]
        for name in names or list(self._datasets):
            dataset, tally, order = self._datasets[name], self._tallies[name], self._orders[name]
            lines.append(describe(name, dataset, tally, order, self.tokenizer, self.on_bad_row))
        return "\n".join(lines)

    def dataset(self, name: str) -> TokenDataset:
        """The tokenised rows of ``train``, ``val``, ``test`` or ``predict``, after ``setup``."""
        return self._datasets[name]

    # -- loaders ------------------------------------------------------------------------------------------

    def _layout(self) -> dict[str, Any]:
        # Only the strategy knows which ranks share rows; strategies of one process do not have this.
        layout = (getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) if self.trainer else None) or {}
        return {"num_replicas": layout.get("num_replicas", 1), "rank": layout.get("rank", 0)}

    @property
    def _order_seed(self) -> int:
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.seed is None else self.seed

    def _loader(self, name: str, *, shuffle: bool, micro_batch_size: int) -> StatefulLoader:
        dataset, order, trainer = self._datasets[name], self._orders[name], self.trainer
        ranks = self._layout()
        sampler: GlobalOrderSampler
        if shuffle and not getattr(trainer, "overfit_batches", 0):
            sampler = GlobalOrderSampler(
                dataset, micro_batch_size=micro_batch_size, **ranks, order=order, seed=self._order_seed
            )
        else:
            sampler = SequentialOrderSampler(dataset, order=order, micro_batch_size=micro_batch_size, **ranks)
        rest = len(order) % sampler.rows_per_batch
        if rest and sampler.num_replicas > 1:
            idle = max(0, sampler.num_replicas - rest)
            without = f", and {idle} {'rank takes' if idle == 1 else 'ranks take'} part in it without a {order.what}"
            rank_zero_info(
                f"{name}: {len(order):,} {order.what}s over {sampler.num_replicas} data ranks × {micro_batch_size}: "
                f"the last micro-batch of an epoch has {rest} of {sampler.rows_per_batch} {order.what}s; none is "
                f"repeated{without if idle else ''}"
            )
        return StatefulLoader(
            dataset,
            batch_size=micro_batch_size,
            sampler=sampler,
            collate_fn=Collator(self._pad_id, self.pad_to_multiple_of),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=self._on_gpu,
        )

    @property
    def _on_gpu(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    @override
    def train_dataloader(self) -> DataLoader[Batch]:
        """Batches of this rank for an epoch; the order follows the epoch."""
        if self.streaming:
            return StreamLoader(self._stream(**self._layout()), num_workers=self.num_workers, pin_memory=self._on_gpu)
        return self._loader("train", shuffle=self.shuffle, micro_batch_size=self.micro_batch_size)

    def _evaluation(self, name: str) -> dict[str, DataLoader[Batch]] | DataLoader[Batch]:
        # Lightning skips a stage without loaders; it takes an empty list for a loader, an empty dict for none.
        if not self.sources[name]:
            return {}
        return self._loader(name, shuffle=False, micro_batch_size=self.eval_micro_batch_size)

    @override
    def val_dataloader(self) -> dict[str, DataLoader[Batch]] | DataLoader[Batch]:
        """Batches of this rank; every row is read once over all ranks."""
        return self._evaluation("val")

    @override
    def test_dataloader(self) -> dict[str, DataLoader[Batch]] | DataLoader[Batch]:
        """As ``val_dataloader``."""
        return self._evaluation("test")

    @override
    def predict_dataloader(self) -> dict[str, DataLoader[Batch]] | DataLoader[Batch]:
        """As ``val_dataloader``; conversations that end with a user turn stop where the answer starts."""
        return self._evaluation("predict")


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"ChatDataModule: {name} is {value!r}; allowed are {', '.join(map(repr, allowed))}")


def _check_at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and (isinstance(value, bool) or value < least):
        raise ValueError(f"ChatDataModule: {name} is {value!r}; it must be at least {least}")
