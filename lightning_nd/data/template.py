"""Rendering conversations with a chat template, and finding the assistant's text in the rendering."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_nd.assets import resolve
from lightning_nd.data.errors import DataError, RowError
from lightning_nd.data.rows import Message

# Stands in for a turn's content; private-use characters survive any trimming, and no data should have them.
_MARK = "\ue0f3\ue0a5\ue0f3"

# Written in front of a template by `system: fold`, so that training, evaluation and export share one policy.
_FOLD = (
    "{%- if messages|length > 1 and messages[0]['role'] in ['system', 'developer'] -%}"
    "{%- set messages = [{'role': 'user', 'content': messages[0]['content'] + '\\n\\n' "
    "+ messages[1]['content']}] + messages[2:] -%}{%- endif -%}"
)


@dataclass(frozen=True)
class Span:
    """Where an assistant turn stands in a rendering, in characters.

    ``[start, stop)`` is what the model writes; ``[stop, tail)`` is what the template closes the turn with, in
    which the end-of-turn token is looked for.
    """

    start: int
    stop: int
    tail: int


def prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, chat_template: str | None, system: str) -> list[str]:
    """Set up the tokenizer's own template, so that what is trained is what is exported.

    Args:
        tokenizer: Changed in place.
        chat_template: Path of a Jinja file that replaces the tokenizer's template.
        system: ``"fold"`` rewrites the template to put a system turn in front of the first user turn.

    Returns:
        What was changed, a sentence each, for the start report.

    Raises:
        DataError: the file is missing, empty, or not a Jinja template.

    """
    notes = []
    if chat_template is not None:
        path = Path(resolve(chat_template)).expanduser().absolute()
        if not path.is_file():
            raise DataError(f"data.chat_template: no file {path} (given as {chat_template!r})")
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise DataError(f"data.chat_template: {path} is empty")
        tokenizer.chat_template = text
        notes.append(f"chat template from {path}")
    if not tokenizer.chat_template:
        return notes
    if system == "fold":
        _prefix_template(tokenizer, _FOLD)
        notes.append("system turns are folded into the first user turn, by the template")
    if _lacks_bos(tokenizer):
        _prefix_template(tokenizer, "{{- bos_token -}}")
        notes.append(f"the template writes no {tokenizer.bos_token!r}, which the tokenizer starts texts with: added")
    return notes


def _prefix_template(tokenizer: PreTrainedTokenizerBase, prefix: str) -> None:
    template: Any = tokenizer.chat_template
    if isinstance(template, dict):
        tokenizer.chat_template = {k: v if v.startswith(prefix) else prefix + v for k, v in template.items()}
    elif not template.startswith(prefix):
        tokenizer.chat_template = prefix + template


def _lacks_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    bos = tokenizer.bos_token
    if bos is None or tokenizer("a")["input_ids"][:1] != [tokenizer.bos_token_id]:
        return False
    try:
        return not _render(tokenizer, [{"role": "user", "content": "a"}], None, True).startswith(bos)
    except RowError:
        return False


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[Any] | None, prompt: bool) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        )
    except Exception as error:
        # Jinja raises its own errors and whatever Python raises inside an expression.
        raise RowError(f"the chat template refuses it: {error}") from error


class ChatRenderer:
    """Renders conversations and locates assistant turns in the full rendering.

    Args:
        tokenizer: With a chat template.

    Raises:
        DataError: the template does not compile.

    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._special = {str(t.content) for t in tokenizer.added_tokens_decoder.values() if t.special}
        self._header, self._tail = self._probe()
        opens = [token for token in self._special if token in self._header]
        self._opener = min(opens, key=self._header.index, default="")

    def render(self, messages: list[Message], tools: list[Any] | None = None, *, prompt: bool = False) -> str:
        """The whole conversation as text; with ``prompt``, up to where an answer starts.

        Raises:
            RowError: the template refuses the conversation or leaves out a part of it.

        """
        try:
            text = _render(self.tokenizer, messages, tools, prompt)
        except RowError as error:
            if messages[0]["role"] in ("system", "developer") and self._try(messages[1:], tools, prompt):
                raise RowError(
                    f"the chat template refuses a system turn ({error.__cause__}); 'system: fold' puts it "
                    "into the first user turn"
                ) from error
            raise
        for index, message in enumerate(messages):
            role = message["role"]
            turn = f"turn {index + 1} ({role})"
            if role in ("system", "developer", "user") and message["content"].strip() not in text:
                raise RowError(f"the chat template leaves out {turn}, or changes its text")
            # A template may quote what a tool has answered; so ask whether another answer would be seen.
            if role == "tool":
                other = self._try(_with(messages, index, content=_MARK), tools, prompt)
                if other is not None and _MARK not in other:
                    raise RowError(f"the chat template leaves out {turn}, so the answers after it have no ground")
            if message.get("tool_calls") and self._try(_with(messages, index, tool_calls=[]), tools, prompt) == text:
                raise RowError(f"the chat template leaves out the tool calls of {turn}, so there is nothing to learn")
        if tools and self._try(messages, None, prompt) == text:
            raise RowError("the chat template leaves out the tools")
        return text

    def _try(self, messages: list[Message], tools: list[Any] | None, prompt: bool) -> str | None:
        try:
            return _render(self.tokenizer, messages, tools, prompt)
        except RowError:
            return None

    def _probe(self) -> tuple[str, str]:
        """The text that opens an assistant turn, and the text that closes the last one."""
        question = [{"role": "user", "content": "a"}]
        try:
            closed = _render(self.tokenizer, question, None, False)
            opened = _render(self.tokenizer, question, None, True)
            answered = _render(self.tokenizer, [*question, _stand_in()], None, False)
        except RowError as error:
            raise DataError(
                f"the chat template cannot render a user turn and an answer ({error.__cause__}); "
                "set data.chat_template to a Jinja file that can"
            ) from error
        header = opened[_shared(closed, opened) :]
        return header, answered.rpartition(_MARK)[2]

    def assistant_spans(self, messages: list[Message], tools: list[Any] | None, full: str) -> dict[int, Span]:
        """Where each assistant turn stands in the full rendering.

        A turn is found by rendering the same conversation with a mark in its place: what is before and after
        the mark must be the start and the end of the full rendering. So the place is right also where the
        template rewrites earlier turns, trims text, or has no generation markers. A turn starts where the
        generation prompt ends, since that is where the model takes over.

        Args:
            messages: The conversation.
            tools: As rendered.
            full: ``render(messages, tools)``.

        Returns:
            A span for the index of each assistant message.

        Raises:
            RowError: a turn cannot be located with certainty.

        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        spans = self._all_at_once(messages, tools, full, turns)
        if spans is None:
            spans, done = {}, 0
            for index in turns:
                spans[index] = span = self._span(messages, tools, full, index, done)
                done = span.stop
        if not self._header:  # no generation prompt: the model writes all that follows the turns before its own
            for index in filter(None, turns):
                prompt = self._try(messages[:index], tools, True)
                if prompt is not None and full.startswith(prompt) and len(prompt) < spans[index].start:
                    spans[index] = replace(spans[index], start=len(prompt))
        return spans

    def _all_at_once(
        self, messages: list[Message], tools: list[Any] | None, full: str, turns: list[int]
    ) -> dict[int, Span] | None:
        """All turns from one more rendering, with a mark in each; None unless there is just one way to fit it."""
        marks = [f"{_MARK}{index}{_MARK}" for index in turns]
        stand_ins = {index: _stand_in(content=mark) for index, mark in zip(turns, marks, strict=True)}
        marked = self._try([stand_ins.get(i, message) for i, message in enumerate(messages)], tools, False) or ""
        pieces = []
        for mark in marks:
            piece, _, marked = marked.partition(mark)
            pieces.append(piece)
        first, *between = pieces
        if not (full.startswith(first) and marked and full.endswith(marked)):
            return None
        starts, stops = [len(first)], []
        at, backward = len(first), len(full) - len(marked)
        for piece in between:
            if (at := full.find(piece, at)) < 0:
                return None
            stops.append(at)
            at += len(piece)
            starts.append(at)
        stops.append(len(full) - len(marked))
        # The same pieces searched for from the end must be in the same places.
        for piece, stop in zip(reversed(between), reversed(stops[:-1]), strict=True):
            backward = full.rfind(piece, 0, backward)
            if backward != stop:
                return None
        spans = {}
        for index, start, stop in zip(turns, starts, stops, strict=True):
            if start > stop or not full.endswith(self._header, 0, start):
                return None
            spans[index] = Span(start, stop, stop + self._closing(full[stop:]))
        return spans

    def _span(self, messages: list[Message], tools: list[Any] | None, full: str, index: int, done: int) -> Span:
        before, after = self._around(messages, tools, index)
        if not full.endswith(after):
            raise RowError(f"turn {index + 1} cannot be located: the template changes the turns after it")
        stop = len(full) - len(after)
        known = _shared(before, full)
        if known == len(before) and before.endswith(self._header):
            start = known
        else:
            # The template writes something between the header and the text, say an empty thinking block.
            floor = max(done, self._end_of(messages, tools, full, index - 1))
            # The header may reach into the turn, where a generation prompt opens a thinking block.
            reach = min(stop, known + len(self._header) - 1)
            at = full.rfind(self._header, floor, reach) if self._header else -1
            if at >= 0:
                start = at + len(self._header)
            elif known == len(before):
                start = known
            else:
                raise RowError(f"turn {index + 1} cannot be located: the template changes the turns before it")
        if not done <= start <= stop:
            raise RowError(f"turn {index + 1} cannot be located in the rendering")
        return Span(start, stop, stop + self._closing(after))

    def _closing(self, after: str) -> int:
        """How much of the text behind a turn belongs to it: what closes the last turn, or one special token."""
        if after.startswith(self._tail):
            return len(self._tail)
        # Some templates close an earlier turn, or a tool call, with another token than the last turn.
        end = after.find(self._opener) if self._opener else -1
        return end if end > 0 and after[:end].strip() in self._special else 0

    def _around(self, messages: list[Message], tools: list[Any] | None, index: int) -> tuple[str, str]:
        role = messages[index]["role"]
        marked = _render(self.tokenizer, [*messages[:index], _stand_in(role), *messages[index + 1 :]], tools, False)
        if marked.count(_MARK) != 1:
            raise RowError(f"turn {index + 1} cannot be located: the template writes it {marked.count(_MARK)} times")
        before, _, after = marked.partition(_MARK)
        return before, after

    def _end_of(self, messages: list[Message], tools: list[Any] | None, full: str, index: int) -> int:
        try:
            _, after = self._around(messages, tools, index)
        except RowError:
            return 0
        return len(full) - len(after) if full.endswith(after) else 0


def _shared(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    if b.startswith(a):
        return len(a)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _with(messages: list[Message], index: int, **changes: Any) -> list[Message]:
    """The conversation with fields of one message changed."""
    changed: Any = {**messages[index], **changes}
    return [*messages[:index], changed, *messages[index + 1 :]]


def _stand_in(role: str = "assistant", content: str = _MARK) -> Message:
    return {"role": role, "content": content}
