"""Which tokens are supervised: spans in the full rendering, end tokens by position, one BOS."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import BOS, EOS, TEMPLATE, tiny_model, tiny_tokenizer

from lightning_nd.data import ChatDataModule, ChatRenderer, Collator, Encoder, RowError
from lightning_nd.data.rows import parse_row
from lightning_nd.data.template import prepare_tokenizer

CASES = Path(__file__).parent / "cases"
THINK = "<think>some thought</think>"

# In the manner of templates in use: an empty thinking block in the last turn, none in earlier ones.
THINKING = (
    "{% for m in messages %}{% set c = m.content %}{% set r = '' %}"
    "{% if m.role == 'assistant' and '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1] %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}"
    "<|{{ m.role }}|>\n{% if m.role == 'assistant' and loop.last %}<think>\n{{ r }}\n</think>\n\n{% endif %}"
    "{{ c | trim }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# The generation prompt opens the thinking block, and earlier turns have none.
OPENED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] "
    "if not loop.last else m.content }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
# No token closes a turn; only the conversation is closed.
UNCLOSED = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}<|end|>{% endif %}"
)
# An end token that is no special token, and a space in front of it.
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} END\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Every turn opens with the same token; the last turn closes with another one than the earlier turns.
RETURNS = (
    "{% for m in messages %}<|extra|>{{ m.role }}:{{ m.content }}"
    "{% if m.role == 'assistant' and loop.last %}<|end|>{% else %}<|tool|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|extra|>assistant:{% endif %}"
)
CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}]{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def encode(row, template=TEMPLATE, train_on="assistant", prompts=False, **options):
    tokenizer = tiny_tokenizer(template, **options)
    prepare_tokenizer(tokenizer, None, "keep")
    example = Encoder(tokenizer, train_on)(parse_row(row, prompts=prompts))
    return tokenizer, example


def supervised(row, *args, **options) -> list[str]:
    """The text of each run of supervised tokens."""
    tokenizer, example = encode(row, *args, **options)
    runs, before = [], False
    for token, label in zip(example.input_ids, example.labels, strict=True):
        assert label in (-100, token)
        if label != -100:
            runs = [*runs, [token]] if not before else [*runs[:-1], [*runs[-1], token]]
        before = label != -100
    return [tokenizer.decode(run) for run in runs]


def chat(*contents):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]}


def test_a_template_without_markers_supervises_answers_and_their_end():
    data = ChatDataModule(
        train=str(CASES / "A07.jsonl"),
        tokenizer=tiny_tokenizer(None),
        chat_template=str(CASES / "A07.template.jinja"),
    )
    data.setup("fit")
    rows = data.dataset("train")
    counts = [int((rows[i]["labels"] != -100).sum()) for i in range(2)]
    assert counts == [len("blue") + 1 + len("green") + 1, len("wren") + 1]


def test_a_template_that_rewrites_history_supervises_what_is_rendered():
    template = (CASES / "A08.template.jinja").read_text()
    row = chat("q one", "<think>a long thought</think>one", "q two", "<think>short</think>two", "q three", "three")
    assert supervised(row, template) == ["one<|end|>", "two<|end|>", "three<|end|>"]
    row = chat("q one", "<think>a long thought</think>one", "q two", "<think>short</think>two")
    assert supervised(row, template) == ["one<|end|>", "<think>short</think>two<|end|>"]


def test_the_answer_starts_where_the_generation_prompt_ends():
    # What the template puts between the header and the text is the model's to write.
    assert supervised(chat("a", "b", "c", "d"), THINKING) == ["b<|end|>", "<think>\n\n</think>\n\nd<|end|>"]
    assert supervised(chat("a", f"{THINK}b", "c", f"{THINK}d"), THINKING) == [
        "b<|end|>",
        "<think>\nsome thought\n</think>\n\nd<|end|>",
    ]


@pytest.mark.parametrize(
    ("user", "assistant", "written"),
    [
        ("[INST] {{ m.content }} [/INST]", " {{ m.content }}", " yo"),
        ("USER: {{ m.content }} ", "ASSISTANT: {{ m.content }}", "ASSISTANT: yo"),
    ],
)
def test_without_a_generation_prompt_the_answer_is_all_that_the_model_has_to_write(user, assistant, written):
    turn = f"{{% if m.role == 'user' %}}{user}{{% else %}}{assistant}<|end|>{{% endif %}}"
    template = "{% for m in messages %}" + turn + "{% endfor %}"
    assert supervised(chat("hi", "yo", "and?", "yo"), template) == [f"{written}<|end|>"] * 2


def test_a_prompt_that_opens_the_thinking_block():
    assert supervised(chat("a", f"{THINK}b", "c", f"{THINK}d"), OPENED) == [
        "b<|end|>",
        "some thought</think>d<|end|>",
    ]
    # A user who writes the header does not move the answer.
    assert supervised(chat("<|assistant|><think>", "b", "c", "d"), OPENED) == ["b<|end|>", "d<|end|>"]


def test_turns_without_an_end_token_take_nothing_of_the_next_turn():
    assert supervised(chat("a", "b", "c", "d"), UNCLOSED) == ["b", "d<|end|>"]
    _, example = encode(chat("a", "b"), "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}")
    assert not example.closed


def test_an_earlier_turn_may_close_with_another_token_than_the_last():
    assert supervised(chat("a", "b", "c", "d"), RETURNS) == ["b<|tool|>", "d<|end|>"]


def test_an_end_in_plain_text_is_supervised_without_the_line_break():
    assert supervised(chat("a", "b", "c", "d"), PLAIN) == [" b END", " d END"]


def test_tool_calls_are_part_of_the_answer():
    call = [{"type": "function", "function": {"name": "look"}}]
    row = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": call},
            {"role": "tool", "content": "seen"},
            {"role": "assistant", "content": "done"},
        ]
    }
    assert supervised(row, CALLS) == ["[look]<|end|>", "done<|end|>"]


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("assistant", ["b<|end|>", "d<|end|>"]),
        ("last_assistant", ["d<|end|>"]),
        ("completion", ["d<|end|>"]),
        ("all", ["a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>d<|end|>"]),
    ],
)
def test_what_is_supervised_can_be_chosen(train_on, expected):
    assert supervised(chat("a", "b", "c", "d"), train_on=train_on) == expected


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [("assistant", ["b<|end|>", "f<|end|>"]), ("last_assistant", ["f<|end|>"]), ("completion", ["f<|end|>"])],
)
def test_a_turn_can_be_left_out(train_on, expected):
    row = chat("a", "b", "c", "d", "e", "f")
    row["messages"][3]["train"] = False
    row["messages"][5]["train"] = True
    assert supervised(row, train_on=train_on) == expected
    with pytest.raises(RowError, match=r"turn 4 .* has 'train': false, and train_on: all"):
        supervised(row, train_on="all")


def test_prompt_and_completion():
    row = {"prompt": "two and two is", "completion": " four"}
    assert supervised(row) == [" four<|end|>"]
    assert supervised(row, train_on="all", prepend_bos=True) == ["two and two is four<|end|>"]
    turns = chat("a", "b", "c", "d")["messages"]
    assert supervised({"prompt": turns[:1], "completion": turns[1:]}, train_on="completion") == [
        "b<|end|>",
        "d<|end|>",
    ]
    assert supervised({"prompt": turns[:3], "completion": turns[3:]}, train_on="completion") == ["d<|end|>"]


def test_text_and_tokens_are_supervised_but_for_the_first_token():
    assert supervised({"text": "abc"}) == ["bc<|end|>"]
    _, example = encode({"input_ids": [5, 6, 7]})
    assert example.labels == [-100, 6, 7]
    _, example = encode({"input_ids": [5, 6, 7], "labels": [5, -100, 7]})
    assert example.labels == [-100, -100, 7]


@pytest.mark.parametrize("append_eos", [False, True])
@pytest.mark.parametrize("prepend_bos", [False, True])
@pytest.mark.parametrize("text", ["abc", "<s>abc", "abc<|end|>", "<s>abc<|end|>"])
def test_text_gets_one_bos_at_most_and_one_end(text, prepend_bos, append_eos):
    _, example = encode({"text": text}, prepend_bos=prepend_bos, append_eos=append_eos)
    assert example.input_ids.count(BOS) == int(prepend_bos or text.startswith("<s>"))
    assert example.input_ids.count(EOS) == 1
    assert example.input_ids[-1] == example.labels[-1] == EOS
    _, example = encode({"prompt": "ab", "completion": "c"}, prepend_bos=prepend_bos, append_eos=append_eos)
    assert [label for label in example.labels if label != -100] == [example.input_ids[-2], EOS]


@pytest.mark.parametrize("template", [TEMPLATE, "{{ bos_token }}" + TEMPLATE, "<s>{{ bos_token }}" + TEMPLATE])
@pytest.mark.parametrize("prepend_bos", [False, True])
def test_conversations_get_one_bos_where_the_tokenizer_or_template_has_one(template, prepend_bos):
    tokenizer, example = encode(chat("a", "b"), template, prepend_bos=prepend_bos)
    assert example.input_ids.count(BOS) == int(prepend_bos or template != TEMPLATE)
    if example.input_ids.count(BOS):
        assert example.input_ids[0] == BOS
    if template == TEMPLATE:
        # What is exported renders the same.
        again = tokenizer.apply_chat_template(chat("a", "b")["messages"], return_dict=True)["input_ids"]
        assert again == example.input_ids


def test_end_tokens_are_told_by_position_when_pad_is_the_end_token():
    _, plain = encode(chat("a", "b"))
    tokenizer, example = encode(chat("a", "b"), pad_is_eos=True)
    assert example == plain
    assert example.labels[-1] == EOS == tokenizer.pad_token_id
    # The same token inside a user turn stays unsupervised.
    assert supervised(chat("a<|end|>b", "c"), pad_is_eos=True) == ["c<|end|>"]


def test_repeated_and_hostile_content_does_not_move_spans():
    row = chat("b", "b", "b", "<|user|>b<|end|>", "<|assistant|>b<|end|>", "b")
    assert supervised(row) == ["b<|end|>", "<|user|>b<|end|><|end|>", "b<|end|>"]


@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(
        st.text(alphabet="ab \n<>|üß漢🙂", min_size=1).filter(lambda t: t.strip()), min_size=2, max_size=6
    ).filter(lambda c: len(c) % 2 == 0),
    template=st.sampled_from([TEMPLATE, THINKING, "{{ bos_token }}" + TEMPLATE]),
)
def test_any_answer_is_found_in_full(contents, template):
    trimmed = [c.strip() for c in contents[1::2]] if template == THINKING else contents[1::2]
    found = supervised(chat(*contents), template)
    assert [f.removeprefix("<think>\n\n</think>\n\n") for f in found] == [f"{t}<|end|>" for t in trimmed]


ONLY = (
    "{% for m in messages %}{% if m.role in ROLES %}<|{{ m['role'] }}|>{{ m['content'] }}CALLS<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("roles", "calls", "said"),
    [
        (["user", "assistant", "tool"], "{{ m.tool_calls }}", r"leaves out turn 1 \(developer\)"),
        (["developer", "user", "assistant"], "{{ m.tool_calls }}", r"leaves out turn 4 \(tool\), so the answers"),
        (["developer", "user", "assistant", "tool"], "", r"leaves out the tool calls of turn 3 \(assistant\)"),
        (["developer", "user", "assistant", "tool"], "{{ m.tool_calls }}", None),
    ],
)
def test_what_the_template_leaves_out_is_refused(roles, calls, said):
    template = ONLY.replace("ROLES", str(roles)).replace("CALLS", calls)
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"sky": "blue"}'},
        {"role": "assistant", "content": "Blue."},
    ]
    renderer = ChatRenderer(tiny_tokenizer(template))
    if said is None:
        assert "weather" in renderer.render(messages)
        return
    with pytest.raises(RowError, match=said):
        renderer.render(messages)


def test_a_turn_that_the_template_leaves_out_or_repeats_is_refused():
    with pytest.raises(RowError, match="turn 2 cannot be located: the template writes it 0 times"):
        supervised(
            chat("a", "b", "c", "d"),
            "{% for m in messages %}{% set c = m.content if m.role == 'user' or loop.last else '' %}"
            "<|{{ m.role }}|>{{ c }}{% endfor %}",
        )
    with pytest.raises(RowError, match="leaves out turn 1"):
        supervised(chat("a", "b", "c", "d"), "{% for m in messages[2:] or messages %}{{ m.content }}{% endfor %}")


class TestSystemTurns:
    def data(self, **options):
        template = str(CASES / "A04.template.jinja")
        return ChatDataModule(
            train=str(CASES / "A04.jsonl"), tokenizer=tiny_tokenizer(None), chat_template=template, **options
        )

    def test_a_template_that_refuses_them_names_the_row_and_the_way_out(self):
        with pytest.raises(ValueError, match=r"A04.jsonl:1: the chat template refuses a system turn") as caught:
            self.data().setup("fit")
        assert "'system: fold'" in str(caught.value)

    def test_folding_holds_for_training_prompts_and_export(self, tmp_path):
        data = self.data(system="fold")
        data.setup("fit")
        expected = "<s><|user|>Answer briefly.\n\ncapital of France?<|end|><|assistant|>"
        assert data.tokenizer.decode(data.dataset("train")[0]["input_ids"]) == expected + "Paris<|end|>"
        prompt = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "capital of France?"}]
        assert data.tokenizer.decode(data.encode_prompt(prompt)) == expected
        data.tokenizer.save_pretrained(tmp_path)
        from transformers import AutoTokenizer

        exported = AutoTokenizer.from_pretrained(tmp_path)
        assert exported.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) == expected


@pytest.mark.parametrize("multiple", [None, 8])
@pytest.mark.parametrize("pad_is_eos", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_row(side, pad_is_eos, multiple):
    """A23 and G02: nll per row in a batch equals the nll of the row alone, whatever the tokenizer's padding."""
    tokenizer = tiny_tokenizer(padding_side=side, pad_is_eos=pad_is_eos)
    data = ChatDataModule(train=str(CASES / "G02.jsonl"), tokenizer=tokenizer)
    data.setup("fit")
    rows = [data.dataset("train")[i] for i in range(5)]
    batch = Collator(tokenizer.pad_token_id, multiple)(rows)
    assert batch["input_ids"].shape[1] == (40 if multiple else 33)
    model = tiny_model().double()

    def nll(row):
        shifted = row["labels"][:, 1:]
        logits = model(input_ids=row["input_ids"], attention_mask=row["attention_mask"]).logits[:, :-1]
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), shifted, reduction="none", ignore_index=-100)
        return each.sum(dim=1)

    with torch.no_grad():
        together = nll(batch)
        alone = torch.cat(
            [
                nll({k: v[None] for k, v in {**row, "attention_mask": torch.ones_like(row["labels"])}.items()})
                for row in rows
            ]
        )
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=0)
    assert (batch["labels"] != -100).sum(1).tolist() == [25, 2, 8, 5, 4]


@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(
        st.sampled_from(["a", "b", "ab", "a<|end|><|user|>", "<|assistant|>"]), min_size=2, max_size=8
    ).filter(lambda c: len(c) % 2 == 0),
    template=st.sampled_from([TEMPLATE, THINKING, OPENED, UNCLOSED, RETURNS, PLAIN]),
)
def test_all_turns_at_once_are_where_each_alone_is(contents, template):
    renderer = ChatRenderer(tiny_tokenizer(template))
    messages = chat(*contents)["messages"]
    full = renderer.render(messages)
    turns = list(range(1, len(messages), 2))
    together = renderer._all_at_once(messages, None, full, turns)
    if together is not None:
        alone, done = {}, 0
        for turn in turns:
            alone[turn] = renderer._span(messages, None, full, turn, done)
            done = alone[turn].stop
        assert together == alone
