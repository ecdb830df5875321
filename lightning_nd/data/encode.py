"""From a checked row to token ids and labels."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from transformers import PreTrainedTokenizerBase

from lightning_nd.data.errors import DataError, RowError
from lightning_nd.data.rows import Completion, Conversation, Row, Text, Tokens
from lightning_nd.data.template import ChatRenderer, Span

IGNORE = -100
TrainOn = Literal["assistant", "last_assistant", "completion", "all"]


@dataclass
class Example:
    """Token ids and labels of one row, equally long; a label is the id itself or -100 where unsupervised."""

    input_ids: list[int]
    labels: list[int]
    closed: bool = True  # the last supervised turn ends with an end-of-turn token
    context_only: bool = False

    @property
    def supervised(self) -> int:
        """Number of supervised tokens."""
        return sum(label != IGNORE for label in self.labels)


class Encoder:
    """Tokenises rows and labels the tokens that the loss is over.

    The first token of a row is never supervised, since nothing predicts it.

    Args:
        tokenizer: A fast tokenizer (character offsets are needed to place labels).
        train_on: Which part of a row is supervised.

    Raises:
        DataError: the tokenizer has no character offsets.

    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: TrainOn = "assistant") -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, and only those tell which characters a "
                "token stands for. Use a tokenizer with a tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.train_on = train_on
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = special | set(tokenizer.all_special_ids)

    @cached_property
    def renderer(self) -> ChatRenderer | None:
        """Renders conversations; None without a chat template."""
        return ChatRenderer(self.tokenizer) if self.tokenizer.chat_template else None

    def __call__(self, row: Row) -> Example:
        """Encode a row.

        Raises:
            RowError: the row cannot be rendered or placed.
            DataError: it is a conversation and there is no chat template.

        """
        content = row.content
        if isinstance(content, Conversation):
            example = self._conversation(content)
        elif isinstance(content, Completion):
            example = self._plain(content.prompt + content.completion, len(content.prompt))
        elif isinstance(content, Text):
            example = self._plain(content.text, 0)
        else:
            example = self._given(content)
        example.labels[0] = IGNORE
        if not row.train:
            example.labels = [IGNORE] * len(example.labels)
            example.context_only = True
        return example

    def _given(self, row: Tokens) -> Example:
        size = max(len(self.tokenizer), self.tokenizer.vocab_size)
        for name, values in (("input_ids", row.input_ids), ("labels", row.labels)):
            for value in values:
                if not 0 <= value < size and not (name == "labels" and value == IGNORE):
                    raise RowError(f"{name!r} holds {value}, outside the tokenizer's ids 0 to {size - 1}")
        return Example(list(row.input_ids), list(row.labels))

    def _plain(self, text: str, prompt: int) -> Example:
        """Text that the tokenizer frames itself; supervised from character ``prompt``, end token included."""
        ids, offsets = self._tokenise(text, special=True)
        eos = self.tokenizer.eos_token_id
        if len(ids) > 1 and offsets[-1] == (0, 0):
            offsets[-1] = (len(text), len(text))  # written by the tokenizer behind the text
        if eos is not None and ids[-2:] == [eos, eos]:
            ids, offsets = ids[:-1], offsets[:-1]
        elif eos is not None and ids[-1:] != [eos]:
            ids, offsets = [*ids, eos], [*offsets, (len(text), len(text))]
        everything = self.train_on == "all"
        labels = [
            token if everything or _inside(offset, text, prompt, len(text) + 1) else IGNORE
            for token, offset in zip(ids, offsets, strict=True)
        ]
        return Example(ids, labels, closed=eos is not None)

    def _conversation(self, row: Conversation) -> Example:
        if self.renderer is None:
            raise DataError("no chat template")
        text = self.renderer.render(row.messages, row.tools, prompt=row.open_ended)
        ids, offsets = self._tokenise(text, special=False)
        if self.train_on == "all":
            self._check_no_turn_is_left_out(row)
            return Example(ids, list(ids))
        spans = [] if row.open_ended else self._supervised_spans(row, text)
        labels = [IGNORE] * len(ids)
        closed = True
        stops = [stop for _, stop in offsets]
        for span in spans:
            end, closed = self._end(span, text, ids, offsets)
            for token in range(bisect_right(stops, span.start), len(ids)):
                if offsets[token][0] >= end:
                    break
                if _inside(offsets[token], text, span.start, end):
                    labels[token] = ids[token]
        return Example(ids, labels, closed=closed)

    def _supervised_spans(self, row: Conversation, text: str) -> list[Span]:
        assert self.renderer is not None
        spans = self.renderer.assistant_spans(row.messages, row.tools, text)
        chosen = list(spans)
        if self.train_on == "last_assistant":
            chosen = chosen[-1:]
        elif self.train_on == "completion":
            chosen = [index for index in chosen if index >= row.answers_from]
        wanted = [index for index in chosen if row.messages[index].get("train") is not False]
        if chosen and not wanted:
            raise RowError("no supervised token: the turns that it could learn have 'train': false")
        return [spans[index] for index in wanted]

    @staticmethod
    def _check_no_turn_is_left_out(row: Conversation) -> None:
        for number, message in enumerate(row.messages, start=1):
            if message["role"] == "assistant" and message.get("train") is False:
                raise RowError(f"turn {number} (assistant) has 'train': false, and train_on: all supervises every turn")

    def _end(self, span: Span, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> tuple[int, bool]:
        """Where supervision of a turn ends: behind its first special token, if it has one.

        Decided by position: the same id elsewhere, as padding or inside the text, is not looked at.
        """
        for token in range(bisect_left(offsets, (span.stop, 0)), len(ids)):
            start, stop = offsets[token]
            if start >= span.tail:
                break
            if start >= span.stop and stop <= span.tail and stop > start and ids[token] in self._special:
                return stop, True
        # A template without end tokens may still close a turn with text; white space is none of the answer.
        return span.stop + len(text[span.stop : span.tail].rstrip()), False

    def _tokenise(self, text: str, *, special: bool) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self.tokenizer(
            text, add_special_tokens=special, return_offsets_mapping=True, truncation=False, verbose=False
        )
        ids, offsets = list(encoded["input_ids"]), [tuple(o) for o in encoded["offset_mapping"]]
        if not ids:
            raise RowError("it has no tokens")
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            # The text and the tokenizer have both written it.
            ids, offsets = ids[1:], offsets[1:]
        return ids, offsets


def _inside(offset: tuple[int, int], text: str, start: int, stop: int) -> bool:
    """Whether a token belongs to the characters [start, stop).

    A token across the start belongs if only white space of it is outside: " Paris" behind "answer:".
    """
    first, last = offset
    if not first < stop:
        return False
    if first >= start:
        return True
    return last > start and not text[first:start].strip()
