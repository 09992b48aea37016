"""What a run needs: GB on each GPU, minutes a step, hours, GB of disk. Counted, never measured.

    python scripts/costs.py     # both tables, and what one decoding step moves

The models' shapes are the published ones, the flags those of stapo.py and of recipes/, the cards'
figures those of their data sheets. What else is assumed stands above each table.
"""

import copy
import functools
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import eval as evaluation  # noqa: E402
import rollout  # noqa: E402
import stapo  # noqa: E402
from support import decoding  # noqa: E402
from support.bookkeeping import parse_flags  # noqa: E402
from support.norms import fuse_norms  # noqa: E402

# ---------------------------------------- models


def qwen3(name: str) -> Qwen3Config:
    """The published shape of Qwen3-0.6B, 1.7B, 8B or 14B."""
    hidden, layers, heads, intermediate, tied = {
        "0.6B": (1024, 28, 16, 3072, True),
        "1.7B": (2048, 28, 16, 6144, True),
        "8B": (4096, 36, 32, 12288, False),
        "14B": (5120, 40, 40, 17408, False),
    }[name]
    return Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=intermediate,
        vocab_size=151936,
        tie_word_embeddings=tied,
    )


@functools.cache
def empty_model(name: str) -> Qwen3ForCausalLM:
    """The published model without its weights, as a program here loads it."""
    with torch.device("meta"):
        return fuse_norms(Qwen3ForCausalLM(qwen3(name))).eval()


def parameters(model: Qwen3ForCausalLM) -> int:
    return sum(p.numel() for p in model.parameters())


def cache_bytes(config: Qwen3Config) -> int:
    """Keys and values of one token in all layers, in bfloat16."""
    return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def least_step_bytes(model: Qwen3ForCausalLM, tokens: int) -> int:
    """What a decoding step reads at least: bfloat16 weights, the cache of all rows' tokens."""
    return 2 * parameters(model) + tokens * cache_bytes(model.config)


# ---------------------------------------- memory: GB on each GPU, in host memory, on disk


def layer_bytes_per_token(config: Qwen3Config) -> int:
    """What one decoder layer saves for its backward in bfloat16 on CUDA, its input not counted."""
    hidden, width = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    norms = 2 * 4 + 3 * 2 * hidden  # two float32 scales, the second's input, both outputs
    scales = 4 * (heads + kv_heads) + 4 * heads  # of the heads' norms and of attention
    # queries and keys before their norms and rotated, the rotations, values, attention's output
    attention = 6 * (heads + kv_heads) * width + 4 * width + scales
    return norms + attention + 8 * config.intermediate_size


def bytes_per_gpu(
    model: Qwen3ForCausalLM, gpus: int, micro_tokens: int = stapo.Config.tokens_per_micro_batch
) -> dict[str, int]:
    """What stapo.py holds on each GPU under FSDP2, and its two peaks, in bytes.

    Weights, gradients and AdamW's states are float32 shards (rank 0's, which are never smaller
    than another's); compute is bfloat16. `update` is the peak of an update with gradient
    checkpointing and micro-batches of `micro_tokens`; `rollout` is what a rollout holds before
    its first token: no gradients, and all weights gathered in bfloat16.
    """
    config, tensors = model.config, list(model.parameters())
    words, hidden = config.vocab_size, config.hidden_size
    shard = sum(math.ceil(len(p) / gpus) * math.prod(p.shape[1:]) for p in tensors)
    layer = parameters(model.base_model.layers[0])
    root = parameters(model) - config.num_hidden_layers * layer  # embedding, last norm, head
    chunk = rollout.HEAD_ROWS["cuda"].gradient
    held = {
        "weights": 4 * shard,
        "gradients": 4 * shard,
        "adamw": 8 * shard + 4 * len(tensors),  # two moments, and a step count for each tensor
        "gathered": 2 * parameters(model),
        "inputs": 2 * config.num_hidden_layers * hidden * micro_tokens,  # checkpointing keeps them
        "layer": micro_tokens * layer_bytes_per_token(config),
        # the weight's gradient in float32, and beside it a chunk of logits (float32, and bfloat16
        # for their gradient) or, in the end, itself in bfloat16; the last states, their gradient
        "head": words * (4 * hidden + max(6 * chunk, 2 * hidden)) + 4 * micro_tokens * hidden,
    }
    held["states"] = held["weights"] + held["gradients"] + held["adamw"]
    # The root's bfloat16 weights stay through the update; its gradient does from the head on.
    moments = (
        held["inputs"] + held["head"],
        # two layers gathered, one layer's gradient in bfloat16 and, to be reduced, in float32
        held["inputs"] + held["layer"] + 2 * words * hidden + 10 * layer,
        2 * words * hidden + 6 * root,  # the root's gradient is reduced
    )
    held["update"] = held["states"] + 2 * root + max(moments)
    held["rollout"] = held["states"] - held["gradients"] + held["gathered"]
    return held


def rows_that_fit(
    config: Qwen3Config, length: int, free: float, batch_size: int = 256, top_p: float = 1.0
) -> int:
    """What rollout.rows_that_fit finds where `free` bytes are left for rows of `length` tokens."""
    per_row = rollout.bytes_per_row(config, length, 2, top_p)
    return max(0, min(batch_size, int(0.8 * free / per_row)))


def update_fits(held: dict[str, int], gb: int) -> bool:
    """A twentieth of a card is left to CUDA itself and to gaps between the allocator's blocks."""
    return held["update"] <= 0.95e9 * gb


MEMORY = """Memory is counted, not measured, at the default flags. GB is 1e9 bytes.

- Rows are responses decoded at a time: as many as four fifths of the free memory hold, and at most
  --rollout_batch_size. What drawing a token takes is counted, too: for eval.py that includes
  top-p, which sorts the vocabulary.
- Host: rank 0 of stapo.py has the float32 weights in memory while it loads and saves. eval.py has
  one bfloat16 copy at a time. torch itself takes a few GB a rank beside that.
- Disk: a checkpoint has 12 bytes a parameter, and --keep_last + 1 exist while one is saved.
- PyTorch's allocator has its default setting, and a rollout gives its memory back before the
  update. Where a run is out of memory although much is "reserved but unallocated", set
  PYTORCH_ALLOC_CONF=expandable_segments:True.
- --method grpo holds the starting model, too, which is not counted."""
MACHINES = (  # model, GPUs, GB of each
    *(("0.6B", 1, 24), ("1.7B", 1, 24), ("1.7B", 1, 48), ("1.7B", 1, 80), ("1.7B", 4, 24)),
    *(("1.7B", 8, 80), ("8B", 8, 80), ("8B", 64, 80), ("14B", 8, 80), ("14B", 64, 80)),
)


def markdown(heading: list[str], rows: list[list[str]]) -> str:
    rows = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def memory_table() -> str:
    training, evaluating = stapo.Config(), evaluation.Config(model="")
    lengths = [training.max_prompt_tokens + training.max_new_tokens, 5120]
    longer = training.max_prompt_tokens + evaluating.max_new_tokens
    heading = ["model", "GPUs x GB", "weights, gradients, AdamW", "peak of an update"]
    heading += ["a rollout without its cache", *(f"rows of {n:,} tokens" for n in lengths), "fits"]
    heading += [f"eval.py: rows of {longer:,}", "host: stapo.py, eval.py", "disk"]
    rows = []
    for name, gpus, gb in MACHINES:
        model = empty_model(name)
        held = bytes_per_gpu(model, gpus)
        whole, free = held["gathered"], 1e9 * gb - held["rollout"]
        fit = [rows_that_fit(model.config, length, free) for length in lengths]
        cells = [name, f"{gpus} x {gb}"]
        cells += [f"{held[key] / 1e9:.1f}" for key in ("states", "update", "rollout")]
        cells += [*map(str, fit), "yes" if update_fits(held, gb) and fit[0] else "no"]
        cells += [f"{rows_that_fit(model.config, longer, 1e9 * gb - whole, top_p=0.9)}"]
        cells += [f"{2 * whole / 1e9:.1f}, {whole / 1e9:.1f}"]  # float32, bfloat16
        cells += [f"{6 * whole * (training.keep_last + 1) / 1e9:.0f}"]
        rows.append(cells)
    return markdown(heading, rows)


# ---------------------------------------- costs: hours of a run


class Card(NamedTuple):
    """The vendor's figures."""

    gb: int
    flops: float  # a second, bfloat16, dense
    bandwidth: float  # bytes a second


CARDS = {
    "RTX 4090": Card(24, 165e12, 1.01e12),
    "A100": Card(80, 312e12, 2.04e12),
    "H100": Card(80, 989e12, 3.35e12),
    "H200": Card(141, 989e12, 4.8e12),
    "H20": Card(96, 148e12, 4.0e12),
}
PAPER = "paper-1.7b"
RUNS = {  # files in recipes/
    PAPER: [(1, "H100"), (8, "H100"), (64, "H100"), (64, "H20")],
    "qwen3-0.6b-one-24gb": [(1, "RTX 4090")],
    "qwen3-1.7b-one-80gb": [(1, "A100"), (1, "H100"), (1, "H200")],
    "qwen3-8b-eight-80gb": [(8, "A100"), (8, "H100"), (8, "H200")],
}
HOST_SECONDS = (12e-6, 19e-6)  # of a kernel's launch in a decoding step: a guess, from and to
KERNEL_SECONDS = 2e-6  # of the card, for each kernel beside what it moves: a guess
# Of a layer's attention for each token of the longest row, where rows are few: an estimate. With a
# mask one block of threads walks along all keys of a row and head.
ATTENTION_SECONDS = 0.58e-3 / 16000
PROMPT = 200  # tokens
SHARE = 0.4  # of a card's peak, in token statistics and in updates
COSTS = """Costs are counted from these assumptions; nothing of this was measured on a GPU:

- A decoding step takes as long as the host or the card, whichever is slower.
- The host launches each kernel in 12 to 19 microseconds. This is a guess, and the reason for each
  range below. 28 layers launch 830 kernels.
- The card reads all weights, and the keys and values of every row as if each were as long as the
  longest, at the published bandwidth. A layer's attention takes at least 0.58 ms for each 16,000
  tokens of the longest row, even where there is one row only (an estimate). Each kernel takes 2
  microseconds beside what it moves (a guess).
- Response lengths are log-normal: the median is a fifth of --max_new_tokens, sigma is 1, and what
  is longer than --max_new_tokens is cut. Prompts have 200 tokens. As many rows are decoded at a
  time as fit, and the slowest rank counts.
- Each parameter costs 2 operations a token in the statistics and 8 in an update. Before every
  mini-batch but the first, the half of its responses that is right gets its statistics again. All
  of this runs at 40 % of the card's published dense bfloat16 peak. No group has A = 0.
- The hours of a run hold its evaluations, which are sampled like rollouts. Grading, communication
  between GPUs and checkpoints are not counted.
- GB to download are the weights. GB on disk are these and the checkpoints.

A run that ends its responses later than assumed costs more, in proportion to the decoding steps."""
TABLE = "eval.py's whole table, six benchmarks under two decodings, by the same assumptions:"
TABLES = [("1.7B", 1), ("1.7B", 8), ("8B", 1), ("8B", 8)]  # on an H100 each
PROBLEMS = {"aime24": 30, "aime25": 30, "amc23": 40}
PROBLEMS |= {"math500": 500, "minerva": 272, "olympiadbench": 674}


def log_normal_lengths(count: int, median: float, longest: int, sigma: float = 0.5) -> list[int]:
    """Quantiles of a log-normal law, cut at `longest`, in a fixed random order."""
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    lengths = (math.log(median) + sigma * torch.special.ndtri(places)).exp().round()
    lengths = lengths.clamp(1, longest).long()
    return lengths[torch.randperm(count, generator=torch.Generator().manual_seed(0))].tolist()


def rollout_time(
    lengths: list[int], slots: int, step_seconds: Callable[[int, torch.Tensor], torch.Tensor]
) -> tuple[float, int]:
    """Seconds and decoding steps of a rollout: a slot whose response has ended takes the next.

    step_seconds(rows, longest): of steps with so many rows, the longest of so many tokens each.
    """
    waiting, running, taken, steps = lengths[::-1], [], 0.0, 0
    more = decoding.CHECK_EVERY
    while waiting or running:
        while waiting and len(running) < slots:
            running.append((0, waiting.pop()))  # tokens that it has, and will have
        longest = PROMPT + max(has for has, _ in running)
        rounds = min(math.ceil((end - has) / more) for has, end in running)  # until a slot is free
        times = step_seconds(len(running), longest + more * torch.arange(rounds))  # (rounds,)
        made = more * rounds
        taken, steps = taken + more * float(times.sum()), steps + made
        running = [(has + made, end) for has, end in running if has + made < end]
    return taken, steps


def sampling_time(
    lengths: list[int],
    rows: int,
    gpus: int,
    step_seconds: Callable[[int, torch.Tensor], torch.Tensor],
) -> tuple[float, int]:
    """Seconds and decoding steps of the slowest rank for responses of these lengths."""
    shares = [lengths[rank::gpus] for rank in range(gpus)]
    return max(rollout_time(share, rows, step_seconds) for share in shares)


def response_lengths(count: int, max_new_tokens: int) -> list[int]:
    return log_normal_lengths(count, max_new_tokens / 5, max_new_tokens, sigma=1.0)


def evaluation_size(names: list[str], limit: int = 0, samples: int = 0) -> int:
    """Responses under one decoding."""
    own = {benchmark.key: benchmark.samples for benchmark in evaluation.BENCHMARKS}
    return sum(min(PROBLEMS[n], limit or PROBLEMS[n]) * (samples or own[n]) for n in names)


class Cost(NamedTuple):
    """Of a training step, and of an evaluation."""

    responses: int
    tokens: float  # of a response, on average
    rows: int  # decoded at a time, on each GPU
    decoding_steps: int
    sampling: float  # seconds, as statistics and update
    statistics: float
    update: float
    evaluated: int  # responses of an evaluation, 0 where there is none
    evaluation: float  # seconds of one

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.sampling + self.statistics + self.update

    def hours(self, cfg: stapo.Config) -> float:
        """Of a run, with its evaluations: one before step 1 and then one every so many steps."""
        evaluations = cfg.steps // cfg.eval_every + 1 if cfg.eval_every else 0
        return (cfg.steps * self.seconds + evaluations * self.evaluation) / 3600


def step_seconds(
    model: Qwen3ForCausalLM, card: Card, host: float
) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Seconds of decoding steps with so many rows, the longest of so many tokens each.

    host: seconds that it takes to launch a kernel.
    """
    kernels, layers = launches(model), model.config.num_hidden_layers
    fixed = kernels * KERNEL_SECONDS + 2 * parameters(model) / card.bandwidth

    def seconds(rows: int, longest: torch.Tensor) -> torch.Tensor:
        longest = longest.double()
        cache = rows * longest * cache_bytes(model.config) / card.bandwidth
        attention = torch.maximum(cache, layers * longest * ATTENTION_SECONDS)
        return (fixed + attention).clamp(min=kernels * host)

    return seconds


def cost(cfg: stapo.Config, model: Qwen3ForCausalLM, gpus: int, card: Card, host: float) -> Cost:
    """host: seconds of a launch. Raises ValueError where the run does not fit on the cards."""
    held = bytes_per_gpu(model, gpus, cfg.tokens_per_micro_batch)
    longest = cfg.max_prompt_tokens + cfg.max_new_tokens
    free = 1e9 * card.gb - held["rollout"]
    rows = rows_that_fit(model.config, longest, free, cfg.rollout_batch_size)
    if rows == 0 or not update_fits(held, card.gb):
        raise ValueError(f"{cfg.model} does not fit on {gpus} x {card.gb} GB")
    count = cfg.batch_size * cfg.group_size
    lengths = response_lengths(count, cfg.max_new_tokens)
    of_step = step_seconds(model, card, host)
    sampling, steps = sampling_time(lengths, rows, gpus, of_step)
    size = evaluation_size(cfg.eval_benchmarks, cfg.eval_limit, cfg.eval_samples)
    evaluated = response_lengths(size if cfg.eval_every else 0, cfg.max_new_tokens)
    evaluation_seconds, _ = sampling_time(evaluated, rows, gpus, of_step)
    tokens = sum(lengths) + PROMPT * count
    statistics = 2 * parameters(model) * tokens / (SHARE * card.flops * gpus)
    statistics_pass = 0.5 * (1 - cfg.mini_batch_size / cfg.batch_size) * statistics
    update = 8 / 2 * statistics + statistics_pass
    rows = min(rows, math.ceil(count / gpus))
    step = count, sum(lengths) / count, rows, steps, sampling, statistics, update
    return Cost(*step, len(evaluated), evaluation_seconds)


def load_run(run: str) -> tuple[stapo.Config, Qwen3ForCausalLM]:
    """The flags and the empty model of a run."""
    cfg = parse_flags(stapo.Config, "", [f"@{ROOT}/recipes/{run}"])
    return cfg, empty_model(re.search(r"Qwen3-([\d.]+B)", cfg.model)[1])


def span(low: float, high: float, digits: int = 1) -> str:
    """A range as text; one number where both print alike."""
    low, high = f"{low:,.{digits}f}", f"{high:,.{digits}f}"
    return low if low == high else f"{low} to {high}"


@functools.cache
def costs_table() -> str:
    heading = ["run", "GPUs", "responses x mean tokens", "rows", "decoding steps"]
    heading += ["minutes a step: sampling + statistics + update", "steps"]
    heading += ["an evaluation: responses, minutes", "hours of the run"]
    heading += ["GB to download", "GB on disk"]
    rows = []
    for run, machines in RUNS.items():
        cfg, model = load_run(run)
        weights = 2e-9 * parameters(model)
        for gpus, card in machines:
            low, high = (cost(cfg, model, gpus, CARDS[card], host) for host in HOST_SECONDS)
            sampling = span(low.sampling / 60, high.sampling / 60)
            minutes = f"{sampling} + {low.statistics / 60:.1f} + {low.update / 60:.1f} = "
            minutes += span(low.seconds / 60, high.seconds / 60)
            cells = [run, f"{gpus} x {card}", f"{low.responses:,} x {low.tokens:,.0f}"]
            cells += [f"{low.rows}", f"{low.decoding_steps:,}", minutes, f"{cfg.steps:,}"]
            minutes = f"{low.evaluated:,}, {span(low.evaluation / 60, high.evaluation / 60)}"
            cells += [minutes if low.evaluated else "none"]
            hours = [found.hours(cfg) for found in (low, high)]
            cells += [span(*hours, digits=0 if hours[1] > 100 else 1), f"{weights:.1f}"]
            rows.append([*cells, f"{weights * (1 + 6 * (cfg.keep_last + 1)):.0f}"])
    return markdown(heading, rows)


def table_hours(name: str, gpus: int, card: Card, host: float) -> tuple[int, float]:
    """Rows decoded at a time under the decoding that leaves fewer, and hours of both decodings.

    host: seconds of a launch.
    """
    model, cfg = empty_model(name), evaluation.Config(model="")
    free = 1e9 * card.gb - 2 * parameters(model)
    longest = stapo.Config.max_prompt_tokens + cfg.max_new_tokens
    lengths = response_lengths(evaluation_size(cfg.benchmarks), cfg.max_new_tokens)
    of_step, seconds, fit = step_seconds(model, card, host), 0.0, []
    for _, top_p in evaluation.parse_decodings(cfg.decoding).values():
        fit.append(rows_that_fit(model.config, longest, free, cfg.rollout_batch_size, top_p))
        seconds += sampling_time(lengths, fit[-1], gpus, of_step)[0]
    return min(fit), seconds / 3600


def evaluations_table() -> str:
    cfg, rows = evaluation.Config(model=""), []
    lengths = response_lengths(evaluation_size(cfg.benchmarks), cfg.max_new_tokens)
    count, tokens = len(lengths), sum(lengths)
    for name, gpus in TABLES:
        found = [table_hours(name, gpus, CARDS["H100"], host) for host in HOST_SECONDS]
        (fit, low), (_, high) = found
        cells = [name, f"{gpus} x H100", f"{2 * count:,} x {tokens / count:,.0f}"]
        rows.append([*cells, f"{fit}", span(low, high)])
    return markdown(["model", "GPUs", "responses x mean tokens", "rows", "hours"], rows)


def compared() -> str:
    """The count of the paper's run beside the paper's own figure."""
    run, card = load_run(PAPER), CARDS["H20"]
    hours = (64 * cost(*run, 64, card, host).seconds / 3600 for host in HOST_SECONDS)
    return (
        f"On the paper's 64 H20 this makes {span(*hours)} GPU-hours a step. The paper's own 5 to 7 "
        f"days for 3,000 steps make 2.6 to 3.6 GPU-hours a step."
    )


# ---------------------------------------- one decoding step: bytes and kernel launches

STEP = (64, 2000)  # rows, and the tokens that each has


class Count(TorchDispatchMode):
    """Kernel launches and bytes moved by what runs on the meta device, as CUDA would run it.

    A kernel reads its inputs and writes its outputs once; a lookup moves what it finds, a write
    into a part of a tensor that part. Views and empty tensors are free.
    """

    FREE = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view")
    FOUND = ("aten::embedding", "aten::index.Tensor", "aten::gather", "aten::searchsorted.Tensor")
    FILLED = ("aten::fill_", "aten::zero_", "aten::zeros", "aten::new_zeros", "aten::arange")

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.bytes = 0

    def __enter__(self):
        self.own = functional.scaled_dot_product_attention, functional.rms_norm
        functional.scaled_dot_product_attention = self.fused_attention
        functional.rms_norm = self.fused_norm
        return super().__enter__()

    def __exit__(self, *error):
        functional.scaled_dot_product_attention, functional.rms_norm = self.own
        return super().__exit__(*error)

    def fused_attention(self, query, key, value, attn_mask=None, **_) -> torch.Tensor:
        """One kernel, as on CUDA; its output is as large as the query."""
        self.launch(query, query, key, value, *([] if attn_mask is None else [attn_mask]))
        return torch.empty_like(query)

    def fused_norm(self, states, _shape, weight, _eps) -> torch.Tensor:
        """One kernel, as on CUDA."""
        self.launch(states, weight, states)
        return torch.empty_like(states)

    def launch(self, *moved: torch.Tensor) -> None:
        self.launches += 1
        for tensor in moved:  # an expanded dimension (stride 0) is there once
            sizes = [n for n, stride in zip(tensor.shape, tensor.stride()) if stride]
            self.bytes += tensor.element_size() * math.prod(sizes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name()
        outs = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        ins = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if view or name.startswith(self.FREE):
            return out
        if name.startswith(self.FOUND):
            self.launch(*outs, *outs)
        elif name.startswith(self.FILLED):
            self.launch(*outs)
        elif name.startswith(("aten::index_put_", "aten::copy_")):
            new = args[2] if "index_put" in name else args[1]
            self.launch(new, new)
        else:
            self.launch(*ins, *outs)
        return out


def counted(call: Callable) -> Count:
    with Count() as count, torch.no_grad():
        call()
    return count


def slots_of_text(model: Qwen3ForCausalLM, rows: int, length: int) -> Callable[[int], torch.Tensor]:
    """decoding.decode for a number of steps after `length` tokens in each of `rows` slots."""
    cache = decoding.SlotCache(length + 64, model.device, model.dtype)
    cache.reserve(rows, length + 64)
    forward = functools.partial(model, past_key_values=cache, use_cache=True, logits_to_keep=1)
    texts, seeds = [[7] * length for _ in range(rows)], list(range(rows))
    choose = lambda _token, logits, numbers: decoding.next_token(logits, numbers)  # noqa: E731
    return lambda n: decoding.decode(forward, cache, texts, seeds, n, choose)


def counted_step(model: Qwen3ForCausalLM) -> Count:
    """A step of STEP in bfloat16."""
    model = copy.deepcopy(model).bfloat16()
    with torch.device("meta"), torch.no_grad():
        decode = slots_of_text(model, *STEP)
        decode(1)  # makes the cache
        return counted(lambda: decode(1))


@functools.cache
def launches(model: Qwen3ForCausalLM) -> int:
    """Kernels of a decoding step, whatever its rows and their lengths."""
    return counted_step(model).launches


def step_sentence(step: Count) -> str:
    rows, length = STEP
    least = least_step_bytes(empty_model("1.7B"), rows * length)
    return (
        f"A decoding step at 1.7B, {rows} rows x {length:,} tokens, moves {step.bytes / 1e9:.1f} "
        f"GB ({least / 1e9:.1f} GB is the least) with {step.launches:,} kernel launches."
    )


if __name__ == "__main__":
    print(f"{MEMORY}\n\n{memory_table()}\n\n{COSTS}\n\n{costs_table()}\n\n{compared()}\n")
    print(f"{TABLE}\n\n{evaluations_table()}\n")
    print(step_sentence(counted_step(empty_model("1.7B"))))
