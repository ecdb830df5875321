"""From an object in a file to a checked row: conversation, prompt and completion, text, or token ids."""

import json
from dataclasses import dataclass
from typing import Any

from lightning_nd.data.errors import RowError

ROLES = ("system", "developer", "user", "assistant", "tool")
_FORMATS = "'messages', 'prompt' and 'completion', 'input_ids' (and 'labels'), or 'text'"

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Chat turns. ``answers_from`` is the first turn that ``train_on: completion`` supervises."""

    messages: list[Message]
    tools: list[Any] | None
    answers_from: int
    open_ended: bool = False  # ends with a user turn: a prompt to answer


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion, plain text."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """Plain text, every token of it supervised."""

    text: str


@dataclass(frozen=True)
class Tokens:
    """Token ids, and labels of the same length (-100 where unsupervised)."""

    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Row:
    """A checked row. With ``train`` false it is context only: no token of it is supervised."""

    content: Conversation | Completion | Text | Tokens
    train: bool


def parse_row(value: dict[str, Any], *, prompts: bool = False) -> Row:
    """Check a row and say which format it has.

    The formats are looked for in the order messages, prompt + completion, input_ids, text; other fields are
    ignored, whatever their types.

    Args:
        value: The object from the file.
        prompts: Allow conversations that end with a user turn, and a prompt without completion.

    Raises:
        RowError: with the reason, and the role sequence of a chat row.

    """
    train = True if value.get("train") is None else value["train"]  # columns of Parquet fill up with null
    if not isinstance(train, bool):
        raise RowError(f"'train' must be true or false, not {train!r}")
    if value.get("messages") is not None:
        return Row(_conversation(value["messages"], value.get("tools"), prompts), train)
    prompt, completion = value.get("prompt"), value.get("completion")
    if prompt is not None and (completion is not None or prompts):
        return Row(_prompt(prompt, completion, value.get("tools"), prompts), train)
    if value.get("input_ids") is not None:
        return Row(_tokens(value["input_ids"], value.get("labels")), train)
    if value.get("text") is not None:
        return Row(Text(_string(value["text"], "text")), train)
    known = ("messages", "prompt", "completion", "input_ids", "text")
    if empty := [repr(key) for key in known if key in value and value[key] is None]:
        raise RowError(f"{' and '.join(empty)} {'is' if len(empty) == 1 else 'are'} null; a row has {_FORMATS}")
    keys = ", ".join(repr(key) for key in list(value)[:8]) or "none"
    raise RowError(f"no known format: its keys are {keys}; a row has {_FORMATS}")


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{name!r} is not a string")
    if not value.strip():
        raise RowError(f"{name!r} is empty")
    _check_text(value, name)
    return value


def _check_text(text: str, name: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"{name!r} holds half of a surrogate pair at character {error.start}") from None


def _prompt(prompt: Any, completion: Any, tools: Any, prompts: bool) -> Conversation | Completion:
    if completion is None:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return _conversation(turns, tools, prompts)
    if isinstance(prompt, list) and isinstance(completion, list):
        whole = _conversation(prompt + completion, tools, prompts)
        return Conversation(whole.messages, whole.tools, answers_from=len(prompt))
    if isinstance(prompt, list) != isinstance(completion, list):
        raise RowError("'prompt' and 'completion' must both be strings or both be lists of messages")
    # A prompt may be empty: then everything is completion.
    if prompt != "":
        _string(prompt, "prompt")
    return Completion(prompt, _string(completion, "completion"))


def _tokens(ids: Any, labels: Any) -> Tokens:
    for name, values in (("input_ids", ids), ("labels", ids if labels is None else labels)):
        if not isinstance(values, list) or not all(type(v) is int for v in values):
            raise RowError(f"{name!r} is not a list of integers")
    if not ids:
        raise RowError("'input_ids' is empty")
    if labels is not None and len(labels) != len(ids):
        raise RowError(f"{len(ids)} input_ids but {len(labels)} labels")
    return Tokens(ids, list(ids if labels is None else labels))


def _conversation(messages: Any, tools: Any, prompts: bool) -> Conversation:
    if not isinstance(messages, list) or not messages:
        raise RowError("'messages' is not a non-empty list")
    if not all(isinstance(m, dict) for m in messages):
        raise RowError("'messages' holds something that is not an object")
    roles = ", ".join(str(m.get("role", "<missing>")) for m in messages)
    try:
        turns = [_message(m, n) for n, m in enumerate(messages, start=1)]
        open_ended = _check_order(turns, prompts)
        last_user = max(i for i, m in enumerate(turns) if m["role"] == "user")
        return Conversation(turns, _tools(tools), answers_from=last_user + 1, open_ended=open_ended)
    except RowError as error:
        raise RowError(error.reason, roles) from None


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise RowError(f"'tools' is a string but not JSON ({error})") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("'tools' is not a list of objects")
    return tools


def _message(message: Message, number: int) -> Message:
    role = message.get("role")
    if role is None:
        raise RowError(f"turn {number} has no role")
    if role not in ROLES:
        raise RowError(f"turn {number} has the unknown role {role!r}; allowed are {', '.join(ROLES)}")
    train = message.get("train")
    if train is not None and not isinstance(train, bool):
        raise RowError(f"turn {number} ({role}) has 'train': {train!r}; it must be true or false")
    if train and role != "assistant":
        raise RowError(f"turn {number} ({role}) has 'train': true; only assistant turns are supervised one by one")
    content = message.get("content")
    if isinstance(content, list):
        # Text parts are joined; a template that wants parts would otherwise be needed for plain text.
        if not all(isinstance(p, dict) and p.get("type") == "text" for p in content):
            raise RowError(f"turn {number} ({role}) has content parts that are not text")
        content = "".join(_part(part, number, role) for part in content)
    if content is not None and not isinstance(content, str):
        raise RowError(f"turn {number} ({role}) has content that is not text")
    calls = role == "assistant" and bool(message.get("tool_calls"))
    if not calls and (content is None or not content.strip()):
        raise RowError(f"turn {number} ({role}) has empty content")
    _check_text(content or "", f"turn {number} ({role})")
    return {**message, "content": content or ""}


def _part(part: dict[str, Any], number: int, role: str) -> str:
    if not isinstance(part.get("text"), str):
        raise RowError(f"turn {number} ({role}) has a text part without text")
    return part["text"]


def _check_order(turns: list[Message], prompts: bool) -> bool:
    """System first if at all, then user and assistant in turn; tool results follow an assistant turn."""
    allowed: tuple[str, ...] = ("system", "developer", "user")
    for number, turn in enumerate(turns, start=1):
        role = turn["role"]
        if role not in allowed:
            raise RowError(f"wrong role order: turn {number} is {role}, expected {' or '.join(allowed)}")
        if role in ("system", "developer"):
            allowed = ("user",)
        elif role == "user":
            allowed = ("assistant",)
        elif role == "assistant":
            # Some sets write tool calls as text, so a tool result may follow any assistant turn.
            allowed = ("tool",) if turn.get("tool_calls") else ("user", "tool")
        else:
            allowed = ("tool", "assistant")
    last = turns[-1]["role"]
    if last == "assistant":
        return False
    if not any(turn["role"] == "user" for turn in turns):
        raise RowError("wrong role order: there is no user turn")
    if not prompts:
        raise RowError(f"wrong role order: it ends with a {last} turn that nothing answers")
    return True
