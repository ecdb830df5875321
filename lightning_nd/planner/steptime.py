"""How long an optimizer step takes, from physical constants.

A block computes (matrix products, attention, everything else) while the next block's parameters are gathered: what of
the gathering is not hidden counts. Tensor parallelism stands in the way of computing; context parallelism hides behind
attention. The last micro-batch reduces gradients behind its backward pass. Constants are those of `Constants`, of
the GPU and of the network; none belongs to a model, a framework or a layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning_nd.planner.hardware import Cluster
from lightning_nd.planner.layout import Setting, Work, recomputed
from lightning_nd.planner.model import Block, ModelFacts


@dataclass(frozen=True)
class Constants:
    """What the data sheets do not say; fitted once by ``benchmarks/planner_accuracy.py``.

    Attributes:
        width: features at which a matrix product reaches half of its best rate (per the narrower of its two widths).
        attention_length: tokens of a document at which attention reaches half of its best rate.
        attention_backward: attention's backward over its forward: five products instead of two, at a lower rate.
        attention_head: head features at which attention reaches half of its best rate.
        traffic: share of the memory bandwidth that elementwise kernels reach.
        fused: elementwise traffic of compiled blocks over that of eager ones.
        backward_traffic: elementwise traffic backward over forward.
        launch: seconds that the host needs for a kernel.
        link, network: share of the links' and of the network's bandwidth that collectives reach.
        link_latency, network_latency: seconds of a collective per rank of a node, and per node.
        overlap: slowdown of computing while a collective runs, as a share of the collective's time.
        jitter: slowdown of a step for each doubling of the nodes: ranks wait for the slowest.
        fp8: rate of fp8 products over bf16 ones, casts included.
        step: seconds of an optimizer step that belong to nothing else.
        owner: seconds until one rank has told the others what it updated (ZeRO-1 of other frameworks).
    """

    width: float = 390
    attention_length: float = 384.6
    attention_backward: float = 4
    attention_head: float = 12.31
    traffic: float = 0.8
    fused: float = 0.5951
    backward_traffic: float = 1.15
    launch: float = 6e-06
    link: float = 0.95
    network: float = 0.6154
    link_latency: float = 1.665e-05
    network_latency: float = 2.97e-05
    overlap: float = 0.01205
    jitter: float = 0.01
    fp8: float = 1.4
    step: float = 0.0249
    owner: float = 0.001725


CONSTANTS = Constants()


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on one rank; what is hidden behind computing is not in them.

    Attributes:
        compute: by kind: matmul, attention, elementwise, recompute, head, optimizer, launch.
        exposed: communication that nothing hides, by axis.
        waiting: for slower ranks.
        tokens: of the step, over all ranks.
        gpus: ranks.
        mfu: model floating-point operations over what the GPUs could do in this time.
    """

    compute: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    waiting: float = 0.0
    tokens: float = 0.0
    gpus: int = 1
    mfu: float = 0.0

    @property
    def total(self) -> float:
        """Seconds."""
        return sum(self.compute.values()) + sum(self.exposed.values()) + self.waiting

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens a second and GPU."""
        return self.tokens / self.total / self.gpus


@dataclass(frozen=True)
class _Links:
    """Collectives on one cluster."""

    cluster: Cluster
    k: Constants

    def ring(self, size: int, stride: int, volume: float) -> float:
        """Seconds of an all-gather or reduce-scatter of ``volume`` bytes in all over ``size`` ranks.

        Ranks of the group stand ``stride`` apart. Between nodes all groups that run beside this one share the NICs,
        so that each has one NIC a rank; a group with several ranks on a node crosses with all their NICs.
        """
        if size <= 1 or volume <= 0:
            return 0.0
        per_node = max(1, self.cluster.gpus_per_node // stride)
        inside, nodes = min(size, per_node), max(1, math.ceil(size / per_node))
        gpu = self.cluster.gpu
        link = min(gpu.link_gbs, gpu.pair_gbs * max(1, inside - 1)) * 1e9 * self.k.link
        seconds = volume * (size - 1) / size / link if inside > 1 else 0.0
        if nodes > 1:
            across = volume * (nodes - 1) / nodes / (inside * self.cluster.nic_gbs * 1e9 * self.k.network)
            seconds = max(seconds, across) + self.k.network_latency * (nodes - 1)
        return seconds + self.k.link_latency * (inside - 1)

    def send(self, size: int, stride: int, volume: float) -> float:
        """Seconds in which a rank of such a group sends ``volume`` bytes to its neighbour."""
        crosses = size * stride > self.cluster.gpus_per_node
        if crosses:
            return volume / (self.cluster.nic_gbs * 1e9 * self.k.network) + self.k.network_latency
        return volume / (min(self.cluster.gpu.link_gbs, self.cluster.gpu.pair_gbs) * 1e9 * self.k.link)


@dataclass
class _Parts:
    """Seconds of one block's forward or backward pass."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tp: float = 0.0
    launch: float = 6e-06

    @property
    def busy(self) -> float:
        return max(self.matmul + self.attention + self.elementwise, self.launch)


def step_time(
    model: ModelFacts,
    setting: Setting,
    work: Work,
    cluster: Cluster,
    constants: Constants = CONSTANTS,
    fp8: bool = False,
) -> StepTime:
    """Predict the time of one optimizer step.

    Args:
        model: what is trained.
        setting: how.
        work: on what.
        cluster: where.
        constants: replace single ones to ask what if.
        fp8: matrix products of the blocks run in fp8 (of published measurements; `fit` has no such precision).
    """
    k, dims, links = constants, setting.dims, _Links(cluster, constants)
    tokens, tp = setting.tokens(work.length), setting.dims.tp
    compute = dict.fromkeys(("matmul", "attention", "elementwise", "recompute", "head", "optimizer", "launch"), 0.0)
    exposed = dict.fromkeys(("dp_shard", "dp_replicate", "cp", "tp"), 0.0)
    width = work.compute_bytes
    for block in model.blocks:
        forward, backward = _block(model, block, setting, work, cluster, k, fp8)
        selective = setting.checkpointing == "selective"
        again = 0.0 if selective else recomputed(setting.checkpointing, block.count, model.layers) / block.count
        if selective:
            again_time = 0.5 * forward.matmul + forward.elementwise + forward.tp
        else:
            again_time = again * (forward.busy + forward.tp)
        ring_f, ring_b = _context(block, setting, work, links)
        share = block.parameters.on(tp)
        trained = block.trainable.on(tp)
        gather = links.ring(setting.shards, tp, width * share) if not setting.owners else 0.0
        reduce = links.ring(setting.shards, tp, work.reduce_bytes * trained) if not setting.owners else 0.0
        replicate = 2 * links.ring(dims.dp_replicate, setting.shards * tp, work.reduce_bytes * trained / setting.shards)
        cp_f, cp_b = (
            max(0.0, ring_f - forward.attention),
            max(0.0, ring_b - backward.attention - again * forward.attention),
        )
        if again:
            cp_b += again * cp_f
        busy_f = forward.busy + forward.tp + cp_f
        busy_b = backward.busy + backward.tp + again_time + cp_b
        for micro in range(min(setting.accumulation, 2)):
            last = micro == 0
            reduces = last or setting.reduces_always
            times = 1 if last else setting.accumulation - 1
            gather_f = gather if setting.reshard or last else 0.0
            gather_b = gather if setting.reshard else 0.0
            fsdp_b, hsdp_b = gather_b + (reduce if reduces else 0.0), replicate if reduces else 0.0
            slow = k.overlap * (min(busy_f, gather_f) + min(busy_b, fsdp_b + hsdp_b))
            late = max(0.0, gather_f - busy_f) + max(0.0, fsdp_b - busy_b)
            n = times * block.count
            exposed["dp_shard"] += n * (late + slow)
            exposed["dp_replicate"] += n * max(0.0, hsdp_b - max(0.0, busy_b - fsdp_b))
            exposed["tp"] += n * (forward.tp + backward.tp)
            exposed["cp"] += n * (cp_f + cp_b)
            for part in ("matmul", "attention", "elementwise"):
                compute[part] += n * (getattr(forward, part) + getattr(backward, part))
            compute["recompute"] += n * again_time
            for parts in (forward, backward):
                compute["launch"] += n * max(0.0, parts.launch - parts.matmul - parts.attention - parts.elementwise)
        # the first gather and the last reduction have nothing to hide behind
        if block is model.blocks[0]:
            exposed["dp_shard"] += setting.accumulation * 2 * gather + reduce
    compute["head"] = setting.accumulation * _head(model, tokens, tp, work, cluster, k)
    head = links.ring(setting.shards, tp, width * model.head_products / tp)
    exposed["dp_shard"] += 0.0 if setting.owners else head * 0.5
    if setting.owners > 1:
        exposed["dp_shard"] += (
            links.ring(setting.owners, tp, width * model.parameters.on(tp)) + k.owner * setting.owners
        )
    update = model.trainable.on(tp) / setting.shards
    compute["optimizer"] = (
        update * (3 * work.weight_bytes + 2 * work.state_bytes) / (cluster.gpu.hbm_gbs * 1e9 * k.traffic)
    )
    compute["optimizer"] += k.step
    busy = sum(compute.values()) + sum(exposed.values())
    waiting = busy * k.jitter * math.log2(max(1, cluster.nodes))
    total = setting.rows * work.length
    flops = total * model.flops_per_token(work.documents or work.length)
    made = StepTime(compute, exposed, waiting, total, cluster.gpus)
    mfu = flops / made.total / cluster.gpus / (cluster.gpu.bf16_tflops * 1e12)
    return StepTime(compute, exposed, waiting, total, cluster.gpus, mfu)


def _rate(cluster: Cluster, width: float, tokens: float, k: Constants) -> float:
    gpu = cluster.gpu
    best = gpu.matmul_tflops * 1e12 * gpu.matmul_share
    return best / (1 + k.width / width) / (1 + k.width / max(tokens, 1))


def _block(
    model: ModelFacts, block: Block, setting: Setting, work: Work, cluster: Cluster, k: Constants, fp8: bool
) -> tuple[_Parts, _Parts]:
    """One block forward and backward, on one rank's tokens of a micro-batch."""
    tp, tokens = setting.dims.tp, setting.tokens(work.length)
    slow = 8.0 if work.precision == "32-true" else 1.0
    products, trained = block.products.on(tp), block.trained_products.on(tp)
    rate = (
        _rate(cluster, model.hidden / max(1, tp) ** 0.5, tokens / max(1, block.routed), k)
        * (k.fp8 if fp8 else 1.0)
        / slow
    )
    memory = cluster.gpu.hbm_gbs * 1e9 * k.traffic
    forward, backward = _Parts(), _Parts()
    forward.matmul = 2 * products * tokens / rate
    backward.matmul = (2 * products + 2 * trained) * tokens / rate
    document = min(work.documents or work.length, work.length)
    for call in block.attention:
        eager = cluster.gpu.bf16_tflops * 1e12 * cluster.gpu.attention_share / slow
        per_kernel = document if setting.dims.cp == 1 else document / (2 * setting.dims.cp)
        rate_a = eager / (1 + k.attention_length / max(per_kernel, 1)) / (1 + k.attention_head / call.head_dim)
        seconds = setting.micro_batch * (work.length / document) * call.flops(document) / tp / setting.dims.cp / rate_a
        forward.attention += seconds
        backward.attention += k.attention_backward * seconds
    moved = block.traffic.on(tp, work.sequence_parallel) * tokens * (k.fused if work.compiled else 1.0)
    forward.elementwise = moved / memory
    backward.elementwise = k.backward_traffic * moved / memory
    launch = k.launch * block.kernels * (0.4 if work.compiled else 1.0)
    forward.launch, backward.launch = launch, 2 * launch
    links = _Links(cluster, k)
    hidden = work.compute_bytes * model.hidden * tokens
    forward.tp = backward.tp = 4 * links.ring(tp, 1, hidden)
    return forward, backward


def _context(block: Block, setting: Setting, work: Work, links: _Links) -> tuple[float, float]:
    """Seconds in which a block's keys and values travel, forward and backward (with their gradients in fp32)."""
    cp, tp = setting.dims.cp, setting.dims.tp
    if cp == 1:
        return 0.0, 0.0
    forward = backward = 0.0
    for call in block.attention:
        rows = setting.tokens(work.length)
        if call.window is not None:
            rows = min(rows, call.window * setting.micro_batch)
        grouped = call.kv_features / tp if call.kv_heads % tp == 0 else call.kv_features / call.kv_heads
        hops = (cp - 1) if call.window is None else 1
        keys = 0.75 * hops * work.compute_bytes * rows * grouped  # direct transport sends three quarters of a ring's
        forward += links.send(cp, tp, keys)
        backward += links.send(cp, tp, keys + 0.75 * hops * 4 * rows * grouped)
    return forward, backward


def _head(model: ModelFacts, tokens: float, tp: int, work: Work, cluster: Cluster, k: Constants) -> float:
    """Seconds of the head and the loss of a micro-batch, forward and backward."""
    vocabulary = model.vocabulary / tp
    rate = _rate(cluster, model.hidden, tokens, k) / (8.0 if work.precision == "32-true" else 1.0)
    products = (3 if model.trains_head or (model.is_tied and model.trains_embedding) else 2) * 2 * model.hidden
    passes = 2 * work.compute_bytes + 5 * 4  # logits written and read, then log-softmax and its gradient in fp32
    memory = cluster.gpu.hbm_gbs * 1e9 * k.traffic
    return products * vocabulary * tokens / rate + passes * vocabulary * tokens / memory
