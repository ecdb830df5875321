"""The loss without all logits: the numbers of plain transformers in float64, and what a user gets to see."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from families import make_model
from formula import formula
from reference import Batch, compare, make_batches, relative
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Llama4Config,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

from lightning_nd.loss import (
    LossOptions,
    TokenLedger,
    install_loss,
    kernels,
    nll_sum,
    shift_labels,
    token_nll,
    token_scores,
)
from lightning_nd.loss.chunked import Recipe
from lightning_nd.loss.objective import check_router_loss
from lightning_nd.loss.pending import PendingLogits, Product

CASES = Path(__file__).parent / "cases"
CHUNK = LossOptions(chunk=7)


def a_batch(vocab: int = 256) -> Batch:
    batch = make_batches(1, vocab=vocab)[0]
    return {"input_ids": batch["input_ids"], "labels": batch["labels"]}


def chunked(model: Any, options: LossOptions = CHUNK) -> Any:
    install_loss(model, TokenLedger(), None, options=options)
    return model


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def cohere() -> CohereForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = CohereConfig(**sizes, vocab_size=256, logit_scale=0.25, initializer_range=0.1, pad_token_id=0)
    return CohereForCausalLM(config).train()


def head_with_bias() -> nn.Module:
    model: Any = make_model("llama")
    model.lm_head.bias = nn.Parameter(torch.randn(256, generator=torch.Generator().manual_seed(1)))
    return model


def head_with_adapter(targets: tuple[str, ...] = ("q_proj", "lm_head")) -> nn.Module:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), lora_dropout=0.0, task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_model("llama"), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.05
    return model


def frozen(head: bool) -> nn.Module:
    model: Any = make_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(("lm_head" in name) != head)
    return model


MODELS = {
    "llama": lambda: make_model("llama"),
    "tied": lambda: make_model("llama", tie_word_embeddings=True),
    "odd vocabulary": lambda: make_model("llama", vocab_size=257),
    "soft cap": lambda: make_model("gemma2"),
    "scaled": lambda: make_model("granite"),
    "scaled, another way": cohere,
    "bias": head_with_bias,
    "adapter": head_with_adapter,
    "frozen head": lambda: frozen(head=True),
    "head alone": lambda: frozen(head=False),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_all_logits_in_float64(kind: str, dtype: torch.dtype) -> None:
    batch = a_batch()
    exact = MODELS[kind]().to(torch.float64)
    nll, count = formula(exact, batch)
    (nll / count).backward()
    model = MODELS[kind]().to(dtype)
    inner = chunked(model.get_base_model() if hasattr(model, "get_base_model") else model)
    output = model(**batch, use_cache=False)
    assert isinstance(output.logits, PendingLogits)
    assert not output.logits.is_made
    output.loss.backward()
    assert not output.logits.is_made
    limit = 1e-12 if dtype == torch.float64 else 4e-6
    assert relative(float(nll / count), float(output.loss)) < limit
    assert compare(grads(exact), grads(model))[0][0] < limit
    assert inner.loss_function.calls == 1


def test_head_and_loss_alone_are_exact_to_1e6_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(96, 32, generator=generator), torch.randn(32_000, 32, generator=generator) * 0.1
    targets = torch.randint(32_000, (96,), generator=generator)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    F.cross_entropy(exact[0] @ exact[1].t(), targets, reduction="sum").backward()
    ours = [t.clone().requires_grad_() for t in (x, weight)]
    nll, _ = nll_sum(PendingLogits(((Product(ours[0], ours[1], None), 1.0),)), targets, LossOptions(chunk=16))
    nll.backward()
    for want, got in zip(exact, ours, strict=True):
        assert want.grad is not None
        assert got.grad is not None
        assert (got.grad - want.grad).abs().max() < 1e-6 * want.grad.abs().max()


def test_sixteen_bits_are_added_up_in_thirty_two() -> None:
    """256 chunks of one token each: as close to float64 as one product of all tokens is."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 32, generator=generator).bfloat16() for n in (256, 500))
    targets = torch.randint(500, (256,), generator=generator)
    exact, plain, ours = (weight.to(d, copy=True).requires_grad_() for d in (torch.float64, x.dtype, x.dtype))
    F.cross_entropy(x.double() @ exact.t(), targets, reduction="sum").backward()
    F.cross_entropy((x @ plain.t()).float(), targets, reduction="sum").backward()
    nll_sum(PendingLogits(((Product(x, ours, None), 1.0),)), targets, LossOptions(chunk=1))[0].backward()
    assert exact.grad is not None
    errors = [float((w.grad - exact.grad).norm() / exact.grad.norm()) for w in (plain, ours)]  # type: ignore[operator]
    assert errors[1] < 1.1 * errors[0] < 0.02


@pytest.mark.parametrize("chunk", [7, None], ids=["chunks", "at once"])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.1, 0.0), (0.0, 1e-2), (0.2, 1e-2)])
def test_label_smoothing_and_z_loss(chunk: int | None, smoothing: float, z_loss: float) -> None:
    batch = a_batch()
    exact = make_model("gemma2", dtype=torch.float64)
    nll, count = formula(exact, batch, smoothing, z_loss)
    (nll / count).backward()
    options = LossOptions(chunk=chunk, label_smoothing=smoothing, z_loss=z_loss)
    model = chunked(make_model("gemma2", dtype=torch.float64), options)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    assert relative(float(nll / count), float(loss)) < 1e-12
    assert compare(grads(exact), grads(model))[0][0] < 1e-12
    with torch.no_grad():  # a perplexity is made of the plain nll
        plain, _ = formula(exact, batch)
        assert relative(float(plain / count), float(model(**batch, use_cache=False).loss)) < 1e-12


# ---------------------------------------------------------------- memory


def held(step: Any) -> int:
    """The largest number of bytes of live storage during a step, above what was there before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("supervised", [64, 4096])
def test_h06_a_chunk_of_logits_is_all_that_is_held(supervised: int) -> None:
    case = json.loads((CASES / "H06.config.json").read_text())
    tokens, width, vocabulary = case["_run"]["tokens"], case["hidden_size"], case["vocab_size"]
    assert case["_run"]["supervised"] == 64
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).requires_grad_()
    targets = torch.full((tokens,), -100)
    targets[-supervised:] = torch.randint(vocabulary, (supervised,), generator=generator)

    def step() -> None:
        nll_sum(PendingLogits(((Product(x, weight, None), 1.0),)), targets)[0].backward()

    assert held(step) < case["_run"]["plain_fp32_logits_bytes"] / 8
    got = [x.grad, weight.grad]
    if supervised == 64:
        x.grad = weight.grad = None
        F.cross_entropy(x[-supervised:] @ weight.t(), targets[-supervised:], reduction="sum").backward()
        for want, have in zip((x.grad, weight.grad), got, strict=True):
            assert want is not None
            assert (have - want).abs().max() < 1e-5 * want.abs().max()


# ---------------------------------------------------------------- logits that a user reads


def test_logits_can_be_read_until_backward() -> None:
    batch = a_batch()
    plain = make_model("gemma2")
    want = plain(input_ids=batch["input_ids"], use_cache=False).logits
    model = chunked(make_model("gemma2"))
    output = model(**batch, use_cache=False)
    assert "PendingLogits([4, 24, 256]" in repr(output.logits)
    assert output.logits.shape == want.shape
    assert torch.equal(output.logits.detach(), want.detach())
    # a second loss from them: its gradient adds to that of the first
    F.cross_entropy(want[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
    want_grads = {name: grad.clone() for name, grad in grads(plain).items() if grad is not None}
    logits = plain(input_ids=batch["input_ids"], use_cache=False).logits
    logits.square().mean().backward()
    (output.loss + output.logits.square().mean()).backward()
    assert compare(grads(plain), grads(model))[0][0] < 1e-5
    assert want_grads

    output = model(**batch, use_cache=False)
    output.loss.backward()
    with pytest.raises(RuntimeError, match=r"logits were not kept.*LossOptions\(chunk=None\)"):
        output.logits.argmax(-1)
    with torch.no_grad():
        old = model(**batch, use_cache=False)
        model(**batch, use_cache=False)
    with pytest.raises(RuntimeError, match="not kept"):
        old.logits.argmax(-1)


def test_logits_are_there_without_labels_and_on_request() -> None:
    batch = a_batch()
    model = chunked(make_model("llama"))
    assert type(model(input_ids=batch["input_ids"]).logits) is Tensor
    model = chunked(make_model("llama"), LossOptions(chunk=None))
    assert type(model(**batch).logits) is Tensor


class SlicesLogits(LlamaForCausalLM):
    """Does to its logits what cannot be done chunk by chunk: leaves out the last tokens of its vocabulary."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        logits = logits[..., :250].softmax(-1).clamp(min=1e-9).log()
        output: Any = type("Output", (), {})()
        output.logits, output.loss = logits, None if labels is None else self.loss_function(logits, labels)
        return output


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.exp().log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class HidesLogits(LlamaForCausalLM):
    """Sends its logits through an autograd function, which no tensor subclass sees."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = Identity.apply(self.lm_head(self.model(input_ids).last_hidden_state))
        output: Any = type("Output", (), {})()
        output.logits, output.loss = logits, self.loss_function(logits, labels)
        return output


def of_class(kind: type) -> Any:
    model: Any = make_model("llama")
    model.__class__ = kind
    return model


def test_what_cannot_be_followed_gets_real_logits() -> None:
    batch = make_batches(1, vocab=250)[0]
    plain, model = of_class(SlicesLogits), chunked(of_class(SlicesLogits))
    logits = plain(batch["input_ids"]).logits[:, :-1]
    F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
    loss = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
    loss.backward()
    assert compare(grads(plain), grads(model))[0][0] < 1e-5


def test_what_would_lose_the_gradient_is_refused() -> None:
    batch = a_batch()
    with pytest.raises(RuntimeError, match=r"LossOptions\(chunk=None\)"):
        chunked(of_class(HidesLogits))(**batch)
    loss = chunked(of_class(HidesLogits), LossOptions(chunk=None))(**batch).loss
    loss.backward()


class NoExtras(LlamaForCausalLM):
    """A class from before keyword arguments: its forward takes these and no others."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        output: Any = type("Output", (), {})()
        output.logits, output.loss = logits, self.loss_function(logits, labels, self.config.vocab_size)
        return output


class Blind(LlamaForCausalLM):
    """Takes whatever comes, and passes none of it on to the loss."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        return NoExtras.forward(self, input_ids, labels)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [NoExtras, Blind])
def test_targets_count_that_a_class_does_not_pass_on(kind: type) -> None:
    batch = a_batch()
    nll, count = formula(make_model("llama"), batch)
    model = chunked(of_class(kind))
    model.loss_function.sharded = True  # as under cp: labels that the class would shift itself are not taken
    shifted = {**batch, "labels": batch["labels"].flip(1), "shift_labels": shift_labels(batch["labels"])}
    assert relative(float(nll / count), float(model(**shifted).loss)) < 1e-5
    with pytest.raises(ValueError, match="shift_labels"):
        model(**batch)


def test_one_backward_pass() -> None:
    loss = chunked(make_model("llama"))(**a_batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"one backward pass.*chunk=None"):
        loss.backward()


def test_a_label_outside_the_vocabulary_is_named() -> None:
    batch = a_batch()
    batch["labels"][0, 5] = 256
    with pytest.raises(IndexError, match="a label is 256, outside the vocabulary of 256"):
        chunked(make_model("llama"))(**batch)


def test_nll_token_by_token() -> None:
    batch = a_batch()
    model = chunked(make_model("granite"))
    targets = shift_labels(batch["labels"])
    logits = make_model("granite")(input_ids=batch["input_ids"]).logits
    want = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    assert torch.allclose(token_nll(model(**batch).logits, targets, CHUNK), want, atol=1e-5)
    assert torch.allclose(token_nll(logits, targets), want, atol=1e-6)
    for given in (model(**batch).logits, logits):
        assert (token_scores(given, targets, CHUNK)[1] == (logits.argmax(-1) == targets)).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk": 0}, "chunk=0"),
        ({"chunk": "all"}, "chunk='all'"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
        ({"z_loss": -1.0}, "z_loss=-1.0"),
        ({"kernel": "fast"}, "'auto', 'torch', 'liger', 'cut-cross-entropy'"),
    ],
)
def test_options_that_are_not_allowed(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LossOptions(**options)


# ---------------------------------------------------------------- kernels of others


def pairs_on(device: str, dtype: torch.dtype = torch.float32) -> Any:
    return [(torch.empty(2, 4, device=device, dtype=dtype), torch.empty(8, 4, device=device, dtype=dtype))]


def test_kernels_are_chosen_by_what_they_can(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    recipe = Recipe(None, 16)
    installed: set[str] = set()
    monkeypatch.setattr(kernels, "find_spec", lambda name: ModuleType(name) if name in installed else None)
    kernels._say.cache_clear()
    caplog.set_level("INFO")
    pairs = pairs_on("meta")
    assert kernels.choose("auto", cuda, pairs, None, recipe) is None
    assert "computed by torch; faster where one of these is installed: liger." in caplog.text
    with pytest.raises(ValueError, match="needs the package liger-kernel, which is not installed"):
        kernels.check_kernel("liger")
    with pytest.raises(ValueError, match="needs the package liger-kernel"):
        chunked(make_model("llama"), LossOptions(kernel="liger"))

    class Liger:
        def __init__(self, reduction: str = "mean", accum_dtype: Any = None) -> None: ...

    installed |= {"liger_kernel", "cut_cross_entropy"}
    monkeypatch.setattr(kernels, "_liger_class", lambda: Liger)
    assert kernels.choose("auto", cuda, pairs, None, recipe) is kernels.KERNELS["liger"]
    assert kernels.choose("auto", cpu, pairs, None, recipe) is None
    assert kernels.choose("torch", cuda, pairs, None, recipe) is None
    with torch.no_grad():
        assert kernels.choose("auto", cuda, pairs, None, recipe) is None
    assert kernels.choose("auto", cuda, pairs, None, Recipe(torch.tanh, 16)) is None
    assert "not by liger: the model scales or caps its logits" in caplog.text
    with pytest.raises(ValueError, match="it computes in 16 bits"):
        kernels.choose("cut-cross-entropy", cuda, pairs, None, recipe)
    half = pairs_on("meta", torch.bfloat16)
    assert kernels.choose("cut-cross-entropy", cuda, half, None, recipe) is kernels.KERNELS["cut-cross-entropy"]
    with pytest.raises(ValueError, match="neither label smoothing nor z-loss"):
        kernels.choose("cut-cross-entropy", cuda, half, None, Recipe(None, 16, z_loss=0.1))
    with pytest.raises(ValueError, match="it runs on CUDA"):
        kernels.choose("cut-cross-entropy", cpu, half, None, recipe)


# -- what labels stand for ---------------------------------------------------------------------------------------------


def test_labels_of_an_encoder_decoder_are_not_shifted_again() -> None:
    """T5Gemma feeds its decoder the labels moved by one: each label is the target of its own place."""
    part = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    part |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1}
    torch.manual_seed(0)
    config = T5GemmaConfig(encoder=part, decoder=part, dropout_rate=0.0, attention_dropout=0.0, vocab_size=64)
    model = T5GemmaForConditionalGeneration(config)
    batch = a_batch(vocab=64)
    plain = model(**batch)
    labels = batch["labels"]
    expected = F.cross_entropy(plain.logits[labels != -100], labels[labels != -100])
    ledger = TokenLedger()
    install_loss(model, ledger, None)
    got = model(**batch).loss
    assert relative(expected.item(), plain.loss.item()) < 1e-6
    assert relative(expected.item(), got.item()) < 1e-6
    shifted = F.cross_entropy(plain.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert relative(shifted.item(), got.item()) > 1e-4  # the two can be told apart


def test_a_class_that_computes_its_own_loss_is_told_what_its_labels_are() -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 1}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0))
    install_loss(model, TokenLedger(), None)
    with pytest.raises(RuntimeError, match="labels of an encoder-decoder model are not shifted"):
        model(**a_batch(vocab=64))


def test_a_router_loss_switched_on_in_a_nested_config_is_found() -> None:
    config = Llama4Config(text_config={"output_router_logits": True})
    with pytest.raises(ValueError, match=r"text_config.output_router_logits in the model's config"):
        check_router_loss(SimpleNamespace(config=config), 2)
    check_router_loss(SimpleNamespace(config=config), 1)
    check_router_loss(SimpleNamespace(config=config), 2, asked=False)
