"""A byte-level tokenizer of 264 ids and a two-layer random model, built in milliseconds without any files."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

BOS, EOS, PAD, USER, ASSISTANT, SYSTEM = 256, 257, 258, 259, 260, 261
SPECIAL = ["<s>", "<|end|>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|extra|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(
    template: str | None = TEMPLATE,
    *,
    pad_is_eos: bool = False,
    prepend_bos: bool = False,
    append_eos: bool = False,
    padding_side: str = "right",
) -> PreTrainedTokenizerFast:
    """One id per byte (0 to 255), then the special tokens from 256 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    if prepend_bos or append_eos:
        single = ("<s> " if prepend_bos else "") + "$A" + (" <|end|>" if append_eos else "")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", BOS), ("<|end|>", EOS)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|end|>",
        pad_token="<|end|>" if pad_is_eos else "<pad>",
        padding_side=padding_side,
    )
    fast.chat_template = template
    return fast


def tiny_model(seed: int = 1, **overrides: Any) -> PreTrainedModel:
    """A random llama of 264 ids, hidden size 32, two layers, four heads and two KV heads, in float32."""
    settings: dict[str, Any] = {
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": False,
        **overrides,
    }
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type", "llama"), **settings))


class Recorder(LightningModule):
    """Trains a tiny model and keeps which rows it saw in which epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model()
        self.seen: list[tuple[int, list[list[int]]]] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch["input_ids"].tolist()))
        loss: torch.Tensor = self.model(**batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-2)
