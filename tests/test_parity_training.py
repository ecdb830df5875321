"""Whatever the optimizer and the loop do, every layout trains like one process."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from families import make_model
from parity import Layout, ParityModule, full_grads, train_parallel
from pool import Pool, tiny_trainer
from reference import Batch, Run, adamw, compare, make_batches, nll_sum, relative, rows_of, train
from torch import Tensor, nn


def name_of(value: Any) -> str | None:
    return "x".join(map(str, value)) if isinstance(value, tuple) else None


LAYOUTS: list[Layout] = [(1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 2, 2)]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
# Where what is tested does not depend on the kind of data parallelism.
two_layouts = pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 2)], ids=name_of)
FAMILY = "qwen3"  # norms over heads and, under sequence parallelism, over tokens


def sgd(parameters: Iterable[nn.Parameter], **kwargs: Any) -> torch.optim.Optimizer:
    # Unlike Adam, SGD shows a gradient that is off by a factor.
    return torch.optim.SGD(parameters, **({"lr": 0.05} | kwargs))


def two_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """As usual: no weight decay on norms and biases, and here another step size as well."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0, "lr": 5e-4},
    ]
    return adamw(groups)  # type: ignore[arg-type]


def freeze_all_but_last_layer(model: Any) -> None:
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)


def freeze_norms_and_embeddings(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.ndim > 1 and "embed" not in name)


def run_both(
    pool: Pool, layout: Layout, batches: list[Batch], *, accumulate: int = 1, prepare: Any = None, **kwargs: Any
) -> tuple[Run, Run]:
    """One process by the reference, and the layout."""
    optimizer = kwargs.pop("optimizer", adamw)
    trainer = {"accumulate_grad_batches": accumulate} | kwargs.pop("trainer", {})
    model = make_model(FAMILY)
    if prepare is not None:
        prepare(model)
    expected = train(model, batches, accumulate=accumulate, optimizer=optimizer, **kwargs.pop("reference", {}))
    world_size = layout[0] * layout[1] * layout[2]
    got = pool.run(
        train_parallel,
        world_size,
        FAMILY,
        layout,
        batches,
        optimizer=optimizer,
        trainer=trainer,
        prepare=prepare,
        timeout=120,
        **kwargs,
    )[0]
    return expected, got


def check(expected: Run, got: Run) -> None:
    assert got.tokens == expected.tokens
    assert relative(expected.losses[0], got.losses[0]) <= 1e-5
    assert max(map(relative, expected.losses, got.losses)) <= 1e-4
    assert compare(expected.grads, got.grads)[0][0] <= 1e-5
    assert compare(expected.weights, got.weights)[0][0] <= 1e-4


@two_layouts
@pytest.mark.parametrize(
    "optimizer",
    [
        partial(adamw, foreach=True),
        partial(adamw, foreach=False),
        partial(adamw, fused=True),
        two_groups,
        sgd,
        partial(sgd, momentum=0.9, nesterov=True, weight_decay=0.01),
    ],
    ids=["foreach", "forloop", "fused", "groups", "sgd", "momentum"],
)
def test_optimizers(pool: Pool, layout: Layout, optimizer: Any) -> None:
    check(*run_both(pool, layout, make_batches(3), optimizer=optimizer))


@pytest.mark.parametrize(
    ("count", "accumulate", "layout"),
    [(5, 2, layout) for layout in LAYOUTS] + [(6, 4, (1, 2, 2)), (3, 4, (1, 2, 2))],
    ids=name_of,
)
def test_short_last_window(pool: Pool, layout: Layout, count: int, accumulate: int) -> None:
    """The last window of an epoch is shorter than the others and weighs by its own tokens."""
    expected, got = run_both(pool, layout, make_batches(count), accumulate=accumulate, optimizer=sgd)
    assert len(expected.losses) == -(-count // accumulate)
    check(expected, got)


@layouts
def test_clipping_by_value(pool: Pool, layout: Layout) -> None:
    trainer = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    check(*run_both(pool, layout, make_batches(3), optimizer=sgd, trainer=trainer, reference={"clip_value": 0.01}))


@pytest.mark.parametrize(
    ("max_norm", "layout"), [(0.1, layout) for layout in LAYOUTS] + [(1e6, (1, 2, 2))], ids=name_of
)
def test_clipping_by_norm(pool: Pool, layout: Layout, max_norm: float) -> None:
    expected, got = run_both(
        pool,
        layout,
        make_batches(3),
        optimizer=sgd,
        trainer={"gradient_clip_val": max_norm},
        reference={"clip_norm": max_norm},
    )
    check(expected, got)
    assert max(map(relative, expected.grad_norms, got.grad_norms)) <= 1e-5


@layouts
@pytest.mark.parametrize("prepare", [freeze_all_but_last_layer, freeze_norms_and_embeddings])
def test_frozen_parameters(pool: Pool, layout: Layout, prepare: Any) -> None:
    expected, got = run_both(
        pool,
        layout,
        make_batches(4),
        accumulate=2,
        prepare=prepare,
        trainer={"gradient_clip_val": 1.0},
        reference={"clip_norm": 1.0},
    )
    check(expected, got)
    start = make_model(FAMILY)
    prepare(start)
    frozen = [name for name, p in start.named_parameters() if not p.requires_grad]
    assert frozen
    for name in frozen:
        assert torch.equal(got.weights[name], start.get_parameter(name)), name
        assert got.grads[name] is None, name
    assert relative(expected.grad_norms[0], got.grad_norms[0]) <= 1e-5


@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 1, 1), (1, 2, 2)], ids=name_of)
@pytest.mark.parametrize("prepare", [freeze_all_but_last_layer, None], ids=["frozen", "all"])
def test_data_rank_without_supervised_tokens(pool: Pool, layout: Layout, prepare: Any) -> None:
    """All rows of the last data ranks are masked: their part is an exact zero, and nobody waits."""
    batches = make_batches(4)
    for batch in batches[1:]:
        batch["labels"][2:] = -100
    expected, got = run_both(pool, layout, batches, accumulate=2, optimizer=sgd, prepare=prepare)
    check(expected, got)


class ManualModule(ParityModule):
    """Manual optimization: zero, backward, clip, step by hand; two micro-batches a step, each weighing one half."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, index: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.model(**batch).loss
        self.manual_backward(loss / 2)
        if index % 2:
            if index == 1:
                self.run.grads = full_grads(self.model)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        pass


@layouts
def test_manual_optimization(pool: Pool, layout: Layout) -> None:
    batches = make_batches(6)
    model = make_model(FAMILY)
    optimizer = sgd(model.parameters())
    first = None
    for i, batch in enumerate(batches):
        nll, count = nll_sum(model, batch)
        (nll / count / 2).backward()
        if i % 2:
            first = first or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    world_size = layout[0] * layout[1] * layout[2]
    got = pool.run(
        train_parallel, world_size, FAMILY, layout, batches, module_class=ManualModule, optimizer=sgd, timeout=120
    )[0]
    assert first is not None
    assert compare(first, got.grads)[0][0] <= 1e-5
    assert compare({n: p.detach() for n, p in model.named_parameters()}, got.weights)[0][0] <= 1e-4


def _count_reductions(rank: int, world_size: int, layout: Layout, accumulate: int, steps: int) -> tuple[int, int]:
    """How often FSDP2 reduced gradients, and how many units there are."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    from lightning_nd import NDStrategy

    strategy = NDStrategy(dp_replicate=layout[0], dp_shard=layout[1], tp=layout[2])
    module = ParityModule(make_model(FAMILY), make_batches(accumulate * steps))
    trainer = tiny_trainer(
        rank,
        world_size,
        strategy,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
    )
    reduce = _fsdp_param_group.foreach_reduce
    with mock.patch.object(_fsdp_param_group, "foreach_reduce", wraps=reduce) as counted:
        trainer.fit(module)
    return counted.call_count, sum(isinstance(m, FSDPModule) for m in module.modules())


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 1, 1), (1, 2, 2), (2, 2, 1)], ids=name_of)
def test_accumulation_reduces_gradients_once(pool: Pool, layout: Layout, accumulate: int) -> None:
    """One reduction a unit and optimizer step, however many micro-batches it has."""
    world_size = layout[0] * layout[1] * layout[2]
    for calls, units in pool.run(_count_reductions, world_size, layout, accumulate, 2):
        assert units == 6  # three blocks, embedding, head, root
        assert calls == 2 * units


class UnseededModule(ParityModule):
    """Builds its model without a common seed, as a user may forget to."""

    def __init__(self, model: nn.Module, *args: Any) -> None:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(torch.distributed.get_rank())
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
        super().__init__(model, *args)


@two_layouts
def test_ranks_that_start_apart_take_the_weights_of_rank_0(pool: Pool, layout: Layout) -> None:
    batches = make_batches(2)
    model = make_model(FAMILY)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    expected = train(model, batches)
    world_size = layout[0] * layout[1] * layout[2]
    got = pool.run(train_parallel, world_size, FAMILY, layout, batches, module_class=UnseededModule)[0]
    check(expected, got)


class LateModule(ParityModule):
    """Makes the model in `configure_model`, as Lightning recommends for large ones."""

    def __init__(self, model: nn.Module, *args: Any) -> None:
        super().__init__(nn.Identity(), *args)
        self.model = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.model is None:
            self.model = make_model(FAMILY)


class OwnHandsModule(LateModule):
    """Parallelises by itself."""

    def configure_model(self) -> None:
        import lightning_nd

        if self.model is None:
            self.model = lightning_nd.parallelize(make_model(FAMILY), self.trainer.strategy)  # type: ignore[arg-type]


class NestedModule(ParityModule):
    """The causal LM stands inside another module."""

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **batch: Tensor) -> Any:
            return self.inner(**batch)

    def __init__(self, model: nn.Module, *args: Any) -> None:
        super().__init__(self.Wrapper(model), *args)

    def on_train_end(self) -> None:
        self.model = self.model.inner  # type: ignore[assignment]
        self.run.grads = {name.removeprefix("inner."): grad for name, grad in self.run.grads.items()}


@two_layouts
@pytest.mark.parametrize("module_class", [LateModule, OwnHandsModule, NestedModule])
def test_where_the_model_is_made(pool: Pool, layout: Layout, module_class: type[ParityModule]) -> None:
    expected, got = run_both(
        pool,
        layout,
        make_batches(4),
        accumulate=2,
        module_class=module_class,
        trainer={"gradient_clip_val": 1.0},
        reference={"clip_norm": 1.0},
    )
    check(expected, got)


@pytest.mark.parametrize("module_class", [ParityModule, LateModule, OwnHandsModule])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)])
def test_precision_wherever_the_model_is_made(
    pool: Pool, precision: str, dtype: torch.dtype, module_class: type[ParityModule]
) -> None:
    """The weights that the optimizer sees have the dtype that the precision says."""
    got = pool.run(
        train_parallel,
        2,
        FAMILY,
        (1, 2, 1),
        make_batches(1),
        module_class=module_class,
        trainer={"precision": precision},
    )[0]
    assert {weight.dtype for weight in got.weights.values()} == {dtype}


class TwoCallsModule(ParityModule):
    """Calls the model twice in one step, on the halves of its rows."""

    def training_step(self, batch: Batch, index: int) -> Tensor:
        halves = [rows_of(batch, half, 2) for half in range(2)]
        return sum(self.model(**half).loss for half in halves) / 2  # type: ignore[return-value]


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 1), (1, 2, 2)], ids=name_of)
def test_two_forward_passes_in_a_step(pool: Pool, layout: Layout) -> None:
    """Each call is a token mean over its own rows of all data ranks."""
    batches = make_batches(3, silent_row=False)
    data = layout[0] * layout[1]
    model = make_model(FAMILY)
    optimizer = sgd(model.parameters())
    for batch in batches:
        parts = [rows_of(rows_of(batch, rank, data), half, 2) for half in range(2) for rank in range(data)]
        for half in range(2):
            joined = [parts[half * data + rank] for rank in range(data)]
            rows = {key: torch.cat([part[key] for part in joined]) for key in batch}
            nll, count = nll_sum(model, rows)
            (nll / count / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    world_size = data * layout[2]
    got = pool.run(train_parallel, world_size, FAMILY, layout, batches, module_class=TwoCallsModule, optimizer=sgd)[0]
    assert compare({n: p.detach() for n, p in model.named_parameters()}, got.weights)[0][0] <= 1e-5
