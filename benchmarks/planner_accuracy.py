"""How well the planner predicts published step times, and the constants it predicts them with.

    python benchmarks/planner_accuracy.py                      # report on the held-out half of the published table
    python benchmarks/planner_accuracy.py --fit                # fit the constants on the other half first
    python benchmarks/planner_accuracy.py --table other.csv --max-mape 10     # all rows of another table

A row is held out if a hash of what was run (not of how fast it was) is odd. Rows that this package could not run
(pipeline or expert parallelism, fp4, offloading) and rows without batch or sequence length are counted and left out.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path

from lightning_nd.mesh import ParallelDims
from lightning_nd.planner.hardware import GPU, Cluster, read_gpus
from lightning_nd.planner.layout import Setting, Work
from lightning_nd.planner.model import Attention, Block, ModelFacts, PerToken, Sizes
from lightning_nd.planner.steptime import CONSTANTS, Constants, step_time

TABLE = Path(__file__).parent / "published" / "measured.csv"
GPUS = {
    "a100_80gb": "a100-80gb",
    "a100_40gb": "a100-40gb",
    "h100_80gb": "h100-80gb",
    "H100": "h100-96gb-500w",  # torchao's figures are from the machines of torchtitan's
    "h100_96gb_hbm2e_500w": "h100-96gb-500w",
    "h100_95gb_hbm2e_500w": "h100-96gb-500w",
    "H200": "h200-141gb",
    "h200_141gb": "h200-141gb",
}
#: hidden, key/value features, intermediate, layers, vocabulary, head features, gated
SHAPES = {
    "llama2-7b": (4096, 4096, 11008, 32, 32000, 128, True),
    "llama2-13b": (5120, 5120, 13824, 40, 32000, 128, True),
    "llama2-34b": (8192, 1024, 22016, 48, 32000, 128, True),
    "llama2-70b": (8192, 1024, 28672, 80, 32000, 128, True),
    "llama3-8b": (4096, 1024, 14336, 32, 128256, 128, True),
    "llama3-70b": (8192, 1024, 28672, 80, 128256, 128, True),
    "llama3-405b": (16384, 1024, 53248, 126, 128256, 128, True),
    "internlm-7b": (4096, 4096, 11008, 32, 103168, 128, True),
    "llama-like-7B": (4096, 4096, 11008, 32, 32000, 128, True),
    "mpt-125m": (768, 768, 3072, 12, 50368, 64, False),
    "mpt-350m": (1024, 1024, 4096, 24, 50368, 64, False),
    "mpt-760m": (1536, 1536, 6144, 24, 50368, 128, False),
    "mpt-1b": (2048, 2048, 8192, 24, 50368, 128, False),
    "mpt-3b": (2560, 2560, 10240, 32, 50368, 128, False),
    "mpt-7b": (4096, 4096, 16384, 32, 50368, 128, False),
    "mpt-13b": (5120, 5120, 20480, 40, 50368, 128, False),
    "mpt-30b": (7168, 7168, 28672, 48, 50368, 128, False),
    "mpt-70b": (8192, 8192, 32768, 80, 50368, 128, False),
}


def shape_facts(name: str, gated: bool | None = None) -> ModelFacts:
    """Numbers of a decoder whose norms and rotary embeddings are single kernels, as these frameworks have them."""
    hidden, kv, inner, layers, vocabulary, head, has_gate = SHAPES[name]
    weights = Sizes(split=2.0 * hidden * hidden + (3 if has_gate else 2) * hidden * inner + 2.0 * hidden * kv)
    # read and written in bf16: two norms, two sums; rotation of q and k; the activation
    residual = 2 * (2 * 2 + 2 * 3) * hidden
    split = 2 * (4 * (hidden + kv) + (5 if has_gate else 2) * inner)
    block = Block(
        count=layers,
        trainable=weights,
        frozen=Sizes(),
        products=weights,
        trained_products=weights,
        attention=(Attention(hidden // head, kv // head, head, head),),
        saved=PerToken(),
        kept=PerToken(),
        traffic=PerToken(split=split, residual=residual),
        kernels=20,
    )
    table = Sizes(split=float(hidden * vocabulary))
    tied = name.startswith("mpt")
    return ModelFacts(name, hidden, vocabulary, table, Sizes() if tied else table, Sizes(whole=hidden), (block,))


@dataclass(frozen=True)
class Row:
    """A published measurement and what the planner is asked."""

    source: str
    key: str
    model: str
    setting: Setting
    work: Work
    gpu: str
    gpus: int
    per_node: int
    nic: float | None
    fp8: bool
    measured: float

    @property
    def is_held_out(self) -> bool:
        """By a hash of what was run."""
        return hashlib.sha256(self.key.encode()).digest()[0] % 2 == 1

    def predict(self, constants: Constants, gpus: dict[str, GPU]) -> float:
        """Tokens a second and GPU."""
        gpu = gpus[self.gpu]
        cluster = Cluster(gpu, self.gpus, self.per_node, self.nic or gpu.nic_gbs)
        return step_time(_FACTS[self.model], self.setting, self.work, cluster, constants, self.fp8).tokens_per_gpu

    def constant_mfu(self, gpus: dict[str, GPU], mfu: float) -> float:
        """Tokens a second and GPU of a planner that knows the model's operations and nothing else."""
        return gpus[self.gpu].bf16_tflops * 1e12 * mfu / _FACTS[self.model].flops_per_token(self.work.length)


_FACTS = {name: shape_facts(name) for name in SHAPES}


def read_rows(path: Path, left_out: Counter[str]) -> Iterator[Row]:
    """The rows that the planner can be asked about."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    for raw in csv.DictReader(lines):
        reason = _unfit(raw)
        if reason:
            left_out[reason] += 1
            continue
        yield _row(raw)


def _unfit(raw: dict[str, str]) -> str | None:
    if raw["status"] != "ok" or not raw["tokens_s_gpu"]:
        return "no speed in it"
    if (raw["pp"] or "1") != "1" or (raw["ep"] or "1") not in ("0", "1"):
        return "pipeline or expert parallelism"
    if raw["model"] not in SHAPES:
        return "architecture not stated in the table"
    if not raw["seq_len"] or not raw["micro_batch"]:
        return "no sequence length or batch in it"
    if not raw["ac"]:
        return "activation checkpointing not stated"
    if raw["gpu"] not in GPUS:
        return "a GPU whose state is not known (power limited, other vendor's fp8)"
    if "fp4" in raw["precision"].lower() or raw["precision"].startswith("amp_fp8"):
        return "fp4, or fp8 of a kind that is not described"
    return None


def _row(raw: dict[str, str]) -> Row:
    number = {key: int(raw[key]) if raw[key] else 1 for key in ("dp_replicate", "dp_shard", "cp", "tp", "grad_accum")}
    gpus = int(raw["n_gpus"])
    if raw["sharding"].startswith(("ZeRO1", "zero")) or not raw["dp_shard"]:
        number["dp_replicate"], number["dp_shard"] = gpus // number["tp"] // number["cp"], 1
    dims = ParallelDims(**{key: number[key] for key in ("dp_replicate", "dp_shard", "cp", "tp")})
    ac: str | int = {"op": "selective", "selective": 3, "layer": 2, "full": "full"}.get(raw["ac"], "none")
    setting = Setting(
        dims,
        int(raw["micro_batch"]),
        number["grad_accum"],
        ac,  # type: ignore[arg-type]
        reshard=raw["sharding"] not in ("SHARD_GRAD_OP", "HSDP"),
        reduces_always="composer" in raw["framework"],
        owners=_owners(raw["sharding"], number["dp_replicate"]),
    )
    precision = raw["precision"].lower()
    fp8 = "fp8" in precision or "float8" in precision or "tensorwise" in precision
    compiled = raw["compile"] == "compile"
    narrow = raw["framework"].startswith(("fms", "InternEvo")) or "PURE" in raw["notes"]  # gradients travel in bf16
    reduce_bytes = 2 if narrow else 4
    work = Work(int(raw["seq_len"]), precision="bf16-mixed", compiled=compiled, reduce_bytes=reduce_bytes)
    columns = ("source", "model", "gpu", "n_gpus", "dp_replicate", "dp_shard", "cp", "tp", "seq_len", "micro_batch",
               "grad_accum", "precision", "compile", "ac", "sharding", "notes")  # fmt: skip
    key = "/".join(raw[c] for c in columns)
    nic = float(raw["inter_gbps_per_gpu"]) / 8 if raw["inter_gbps_per_gpu"] else None
    per_node = int(raw["gpus_per_node"] or 8)
    return Row(raw["source"].removesuffix(".csv"), key, raw["model"], setting, work, GPUS[raw["gpu"]], gpus, per_node,
               nic, fp8, float(raw["tokens_s_gpu"]))  # fmt: skip


def _owners(sharding: str, ranks: int) -> int:
    if not sharding.lower().startswith("zero"):
        return 0
    size = int(sharding.rpartition(" ")[2]) if "size" in sharding else ranks
    return ranks if size < 0 else min(size, ranks)


# -- fitting ----------------------------------------------------------------------------------------------------------

_BOUNDS = {
    "width": (20.0, 1500.0),
    "attention_length": (10.0, 4000.0),
    "attention_backward": (2.5, 4.0),
    "attention_head": (1.0, 100.0),
    "traffic": (0.5, 1.0),
    "fused": (0.2, 0.8),
    "backward_traffic": (1.0, 2.5),
    "launch": (2e-6, 2e-5),
    "link": (0.4, 0.95),
    "network": (0.3, 1.0),
    "link_latency": (1e-7, 2e-5),
    "network_latency": (1e-7, 4e-5),
    "overlap": (0.0, 0.6),
    "jitter": (0.0, 0.05),
    "fp8": (1.1, 2.0),
    "step": (1e-4, 0.05),
    "owner": (1e-4, 5e-3),
}
_SHARES = {"matmul_share": (0.4, 1.0), "attention_share": (0.1, 0.75)}


def fit(rows: list[Row], gpus: dict[str, GPU], rounds: int = 12) -> tuple[Constants, dict[str, GPU]]:
    """Coordinate descent on the mean relative error; every source weighs by the root of its rows. Deterministic."""
    weights = Counter(row.source for row in rows)
    total = sum(weights[row.source] ** -0.5 for row in rows)
    used = sorted({row.gpu for row in rows})

    def loss(constants: Constants, table: dict[str, GPU]) -> float:
        errors = (
            abs(math.log(row.predict(constants, table) / row.measured)) * weights[row.source] ** -0.5 for row in rows
        )
        return sum(errors) / total

    constants, table = CONSTANTS, dict(gpus)
    best = loss(constants, table)
    step = 0.3
    for _ in range(rounds):
        before = best
        for name, (low, high) in _BOUNDS.items():
            for sign in (1, -1):
                value = getattr(constants, name)
                moved = min(high, max(low, (value or 0.01) * (1 + step) ** sign))
                trial = replace(constants, **{name: moved})
                if (error := loss(trial, table)) < best:
                    best, constants = error, trial
                    break
        for gpu in used:
            for name, (low, high) in _SHARES.items():
                for sign in (1, -1):
                    moved = min(high, max(low, getattr(table[gpu], name) * (1 + step / 2) ** sign))
                    changed = {**table, gpu: replace(table[gpu], **{name: moved})}
                    if (error := loss(constants, changed)) < best:
                        best, table = error, changed
                        break
        if before - best < 1e-4:
            step /= 2
        if step < 0.01:
            break
    return constants, table


# -- report -----------------------------------------------------------------------------------------------------------


def errors(rows: list[Row], predict: Callable[[Row], float]) -> list[float]:
    """Relative errors."""
    return [predict(row) / row.measured - 1 for row in rows]


def describe(found: list[float]) -> str:
    """Mean, median, 90th percentile and bias."""
    size = sorted(abs(e) for e in found)
    tail = size[max(0, math.ceil(0.9 * len(size)) - 1)]
    return (f"{len(size):4}  {100 * statistics.mean(size):6.1f}%  {100 * statistics.median(size):6.1f}%"
            f"  {100 * tail:6.1f}%  {100 * statistics.mean(found):+6.1f}%")  # fmt: skip


def ranking(rows: list[Row], predict: Callable[[Row], float]) -> tuple[int, int, list[str]]:
    """Groups that differ only in layout or batch shape: how often the predicted best is within 5% of the best."""
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        s = row.setting
        per_step = s.rows
        groups[row.source, row.model, row.gpu, row.gpus, row.work.length, row.fp8, row.work.compiled, per_step].append(
            row
        )
    good, lines = 0, []
    found = [
        group for group in groups.values() if len({repr(row.setting) + str(row.setting.owners) for row in group}) > 1
    ]
    for group in found:
        chosen, best = max(group, key=predict), max(group, key=lambda row: row.measured)
        hit = chosen.measured >= 0.95 * best.measured
        good += hit
        mark = "ok  " if hit else "MISS"
        lines.append(f"  {mark} {best.source}, {best.model}, {best.gpus} GPUs, {len(group)} rows: chose"
                     f" {chosen.measured:.0f} of {best.measured:.0f} tokens/s")  # fmt: skip
    return good, len(found), lines


def pairs(rows: list[Row], predict: Callable[[Row], float]) -> tuple[int, int]:
    """Pairs of rows of one model, GPU and source that differ by more than 5%: how many are in the right order."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.source, row.model, row.gpu].append(row)
    right = total = 0
    for group in groups.values():
        for a, b in combinations(group, 2):
            if abs(a.measured / b.measured - 1) > 0.05:
                total += 1
                right += (predict(a) > predict(b)) == (a.measured > b.measured)
    return right, total


def main() -> int:
    """Print the report; 1 if the mean error is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, help="another table with the same columns: all of its rows count")
    parser.add_argument("--max-mape", type=float, help="exit 1 above this mean absolute error, in percent")
    parser.add_argument("--fit", action="store_true", help="fit the constants first, and print them")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--plot", type=Path, help="draw predicted against measured")
    given = parser.parse_args()
    left_out: Counter[str] = Counter()
    rows = list(read_rows(given.table or TABLE, left_out))
    known = [row for row in rows if not row.is_held_out] if given.table is None else []
    asked = [row for row in rows if row.is_held_out] if given.table is None else rows
    gpus, constants = read_gpus(), CONSTANTS
    if given.fit:
        if not known:
            parser.error("--fit fits on the published table; leave --table out.")
        constants, gpus = fit(known, gpus)
        for field in fields(constants):
            print(f"    {field.name}: float = {getattr(constants, field.name):.4g}")
        for name in sorted({row.gpu for row in known}):
            print(f"    [{name}] matmul_share = {gpus[name].matmul_share:.3f}"
                  f" attention_share = {gpus[name].attention_share:.3f}")  # fmt: skip

    def predict(row: Row) -> float:
        return row.predict(constants, gpus)

    candidates = [0.2 + 0.005 * i for i in range(80)]
    base = known or asked
    mfu = min(candidates, key=lambda m: statistics.mean(map(abs, errors(base, lambda row: row.constant_mfu(gpus, m)))))
    print(f"{len(rows)} rows can be predicted, {sum(left_out.values())} are left out:")
    for reason, count in left_out.most_common():
        print(f"  {count:4}  {reason}")
    head = f"{'':44}rows    mean  median     90%     bias"
    if known:
        print(f"\n{head}\n{'rows that the constants were fitted on':44}{describe(errors(known, predict))}")
    print(f"\n{head}\n{'held-out rows' if known else 'rows':44}{describe(errors(asked, predict))}")
    naive = f"constant MFU of {100 * mfu:.1f}% ({'fitted on the others' if known else 'fitted on these'})"
    print(f"{naive:44}{describe(errors(asked, lambda row: row.constant_mfu(gpus, mfu)))}\n")
    for source in sorted({row.source for row in asked}):
        part = [row for row in asked if row.source == source]
        print(f"{source:44}{describe(errors(part, predict))}")
        print(f"{'    constant MFU':44}{describe(errors(part, lambda row: row.constant_mfu(gpus, mfu)))}")
    right, total = pairs(asked, predict)
    print(f"\npairs of one model and GPU in the right order: {right} of {total}")
    good, groups, lines = ranking(rows, predict)
    print(f"groups of all rows that differ in layout only, predicted best within 5% of the best: {good} of {groups}")
    print("\n".join(lines))
    if given.rows:
        for row in sorted(asked, key=lambda r: (r.source, r.model, r.gpu)):
            p = predict(row)
            print(f"{100 * (p / row.measured - 1):+6.1f}%  {row.measured:9.0f} {p:9.0f}  {row.source[:12]} {row.model}"
                  f" {row.gpu} ×{row.gpus} seq {row.work.length} {row.setting}")  # fmt: skip
    if given.plot:
        _plot(given.plot, asked, predict)
    mape = 100 * statistics.mean(map(abs, errors(asked, predict)))
    return int(given.max_mape is not None and mape > given.max_mape)


def _plot(path: Path, rows: list[Row], predict: Callable[[Row], float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 6.0), layout="constrained")
    for source in sorted({row.source for row in rows}):
        part = [row for row in rows if row.source == source]
        axes.scatter([r.measured for r in part], [predict(r) for r in part], s=22, alpha=0.75, label=source)
    low, high = min(r.measured for r in rows) * 0.8, max(r.measured for r in rows) * 1.25
    axes.plot([low, high], [low, high], color="black", linewidth=1)
    axes.fill_between(
        [low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="black", alpha=0.08, linewidth=0
    )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.set(xlabel="measured, tokens / s / GPU", ylabel="predicted, tokens / s / GPU")
    axes.set_title("Held-out rows; the band is ±10 %", fontsize=11)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
