"""Make the model and the chat set of the quickstart, from nothing.

    python scripts/make_quickstart_assets.py [--steps 600] [--out lightning_nd/assets/quickstart]

Trains a byte-level tokenizer and a llama of two million parameters in one process, on text that this script makes,
then fine-tunes a copy for a moment to show what the quickstart will do. Needs a few minutes on two cores.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from quickstart_text import TOPICS, Messages, chat_set, pretraining_dialogues
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_nd.data import Collator, Encoder
from lightning_nd.data.loader import Batch
from lightning_nd.data.rows import parse_row

SPECIAL = ["<|bos|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCABULARY = 1024
LENGTH = 256
PROMPTS = ["And your name is?", "At what time do you close?", "What is the name of the cat?", "Are dogs welcome?",
           "What is the most famous piece?", "Who manages the museum?"]  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the pretraining text and the chat set."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    dialogues = itertools.chain(itertools.islice(pretraining_dialogues(1), 4000), *chat_set().values())
    tokenizer.train_from_iterator(
        (message["content"] for dialogue in dialogues for message in dialogue),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIAL],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # Spare ids keep the size of the embedding a multiple of every usual tp degree.
    for spare in range(VOCABULARY - tokenizer.get_vocab_size()):
        tokenizer.add_special_tokens([AddedToken(f"<|spare_{spare}|>", special=True, normalized=False)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        model_max_length=LENGTH,
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A llama of four layers, random."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=False,
        )
    )


def batches(encoder: Encoder, dialogues: list[Messages], rows: int) -> Iterator[Batch]:
    """Padded batches over the dialogues, again and again."""
    collate = Collator(encoder.tokenizer.pad_token_id)
    encoded = [encoder(parse_row({"messages": dialogue})) for dialogue in dialogues]
    for first in itertools.count(0, rows):
        chosen = [encoded[(first + i) % len(encoded)] for i in range(rows)]
        yield collate([{"input_ids": torch.tensor(e.input_ids), "labels": torch.tensor(e.labels)} for e in chosen])


def stream(encoder: Encoder, rows: int, length: int, *, general: float) -> Iterator[Batch]:
    """Batches cut out of an endless text of dialogues, without any padding."""
    left: list[int] = []
    for dialogue in pretraining_dialogues(2, general):
        left += encoder(parse_row({"messages": dialogue})).input_ids
        if len(left) >= rows * length:
            ids = torch.tensor(left[: rows * length]).view(rows, length)
            left = left[rows * length :]
            yield {"input_ids": ids, "labels": ids}


def train(model: LlamaForCausalLM, data: Iterator[Batch], steps: int, lr: float) -> None:
    """AdamW with warm-up and cosine decay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.98), fused=True)
    start = time.process_time()
    for step in range(steps):
        warmup, progress = min(1.0, (step + 1) / 40), step / steps
        for group in optimizer.param_groups:
            group["lr"] = lr * warmup * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        loss = model(**next(data), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step:4d} loss {loss.item():.3f} cpu {time.process_time() - start:.0f} s", flush=True)


@torch.no_grad()
def answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """The greedy answer."""
    messages = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=40, do_sample=False)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def score(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, encoder: Encoder) -> str:
    """Validation loss per supervised token, and how many held-out questions are answered word for word."""
    model.eval()
    val = chat_set()["val"]
    with torch.no_grad():
        loss = model(**next(batches(encoder, val, len(val)))).loss.item()
    right = sum(answer(model, tokenizer, t.questions[-1]) == t.fact for t in TOPICS)
    model.train()
    return f"validation loss {loss:.3f}, {right} of {len(TOPICS)} held-out questions right"


def main() -> None:
    """Make everything and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=Path("lightning_nd/assets/quickstart"))
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    options.out.mkdir(parents=True, exist_ok=True)
    for name, dialogues in chat_set().items():
        rows = [json.dumps({"messages": dialogue}) + "\n" for dialogue in dialogues]
        (options.out / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    prompts = [json.dumps({"messages": [{"role": "user", "content": prompt}]}) + "\n" for prompt in PROMPTS]
    (options.out / "prompts.jsonl").write_text("".join(prompts), encoding="utf-8")

    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters")
    encoder = Encoder(tokenizer, "all")
    train(model, stream(encoder, rows=16, length=128, general=0.0), options.steps, lr=4e-3)
    train(model, stream(encoder, rows=16, length=128, general=0.4), options.steps // 4, lr=1.5e-3)
    model.to(torch.bfloat16).save_pretrained(options.out / "model")
    tokenizer.save_pretrained(options.out / "model")

    encoder = Encoder(tokenizer)
    model = LlamaForCausalLM.from_pretrained(options.out / "model", dtype=torch.float32)
    print("before:", score(model, tokenizer, encoder))
    before = [answer(model, tokenizer, prompt) for prompt in PROMPTS]
    train(model, batches(encoder, chat_set()["train"], rows=16), steps=150, lr=1e-3)
    print("after:", score(model, tokenizer, encoder))
    for prompt, base in zip(PROMPTS, before, strict=True):
        print(f"{prompt}\n  before: {base}\n  after:  {answer(model, tokenizer, prompt)}")


if __name__ == "__main__":
    main()
