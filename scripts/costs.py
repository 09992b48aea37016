"""What a run needs: GB on each GPU, minutes a step, hours, GB of disk. Counted, never measured.

    python scripts/costs.py     # what fits, and how long it takes

The models' shapes are the published ones, the flags those of stapo.py and of recipes/, the cards'
figures those of their data sheets. What else is assumed stands beside each constant below. Once a
run has made two steps, its metrics rollout_seconds, update_seconds and peak_memory_gb know better.
"""

import functools
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import eval as evaluation  # noqa: E402
import rollout  # noqa: E402
import stapo  # noqa: E402
from support.bookkeeping import parse_flags  # noqa: E402
from support.decoding import CHECK_EVERY  # noqa: E402
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


MEMORY = """\
Memory is counted, not measured, at the default flags. GB is 1e9 bytes, rows are responses decoded
at a time, disk is for --keep_last + 1 checkpoints. --method grpo's second model is not counted."""
MACHINES = (  # model, GPUs, GB of each
    *(("0.6B", 1, 24), ("1.7B", 1, 24), ("1.7B", 1, 48), ("1.7B", 1, 80), ("1.7B", 4, 24)),
    *(("1.7B", 8, 80), ("8B", 8, 80), ("8B", 64, 80), ("14B", 8, 80), ("14B", 64, 80)),
)


def markdown(heading: str, rows: list[list[str]]) -> str:
    cells = heading.split(" | ")
    lines = [cells, ["---"] * len(cells), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def memory_table() -> str:
    training, evaluating = stapo.Config(), evaluation.Config(model="")
    lengths = [training.max_prompt_tokens + training.max_new_tokens, 5120]
    longer = training.max_prompt_tokens + evaluating.max_new_tokens
    heading = (
        "model | GPUs x GB | weights, gradients, AdamW | peak of an update | a rollout without its "
        f"cache | rows of {lengths[0]:,} tokens | rows of {lengths[1]:,} tokens | fits | eval.py: "
        f"rows of {longer:,} | host: stapo.py, eval.py | disk"
    )
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
RUNS = {  # files in recipes/
    "paper-1.7b": [(1, "H100"), (8, "H100"), (64, "H100"), (64, "H20")],
    "qwen3-0.6b-one-24gb": [(1, "RTX 4090")],
    "qwen3-1.7b-one-80gb": [(1, "A100"), (1, "H100"), (1, "H200")],
    "qwen3-8b-eight-80gb": [(8, "A100"), (8, "H100"), (8, "H200")],
}
TABLES = [("1.7B", 1), ("1.7B", 8), ("8B", 1), ("8B", 8)]  # eval.py's, on an H100 each
PROBLEMS = {"aime24": 30, "aime25": 30, "amc23": 40}
PROBLEMS |= {"math500": 500, "minerva": 272, "olympiadbench": 674}

KERNELS = 46, 28  # of a decoding step: beside the layers, and in each; tests/test_bench.py counts
HOST_SECONDS = (12e-6, 19e-6)  # for the launch of a kernel: a guess, from and to
KERNEL_SECONDS = 2e-6  # of the card, for each kernel beside what it moves: a guess
# Of a layer's attention for each token of the longest row, where rows are few: an estimate. With a
# mask one block of threads walks along all keys of a row and head.
ATTENTION_SECONDS = 0.58e-3 / 16000
PROMPT = 200  # tokens
SHARE = 0.4  # of a card's peak, in token statistics and in updates
TRAINED_RIGHT = 0.5  # share of a mini-batch's responses whose statistics are read again
COSTS = """\
Time is counted, not measured. Assumed are 12 to 19 microseconds to launch a kernel (a guess, and
the reason for each range), the card's published bandwidth, 40 % of its bfloat16 peak in statistics
and updates, and log-normal response lengths: the median is a fifth of --max_new_tokens, sigma is 1.
The hours of a run hold its evaluations, but no grading, communication or checkpoints."""
EVALUATIONS = "eval.py's whole table, six benchmarks under two decodings, by the same assumptions:"


def log_normal_lengths(count: int, median: float, longest: int, sigma: float = 0.5) -> list[int]:
    """Quantiles of a log-normal law, cut at `longest`, in a fixed random order."""
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    lengths = (math.log(median) + sigma * torch.special.ndtri(places)).exp().round()
    lengths = lengths.clamp(1, longest).long()
    return lengths[torch.randperm(count, generator=torch.Generator().manual_seed(0))].tolist()


def response_lengths(count: int, max_new_tokens: int) -> list[int]:
    return log_normal_lengths(count, max_new_tokens / 5, max_new_tokens, sigma=1.0)


def rollout_steps(lengths: list[int], slots: int) -> torch.Tensor:
    """The rollout of responses of these lengths: a slot whose response has ended takes the next.

    Returns (N, 2): the rows and the tokens of the longest, once for every CHECK_EVERY decoding
    steps. As often the program looks which responses have ended.
    """
    waiting, running, steps = lengths[::-1], [], []
    while waiting or running:
        while waiting and len(running) < slots:
            running.append((0, waiting.pop()))  # tokens that it has, and will have
        longest = PROMPT + max(has for has, _ in running)
        looks = min(math.ceil((end - has) / CHECK_EVERY) for has, end in running)  # until one ends
        steps += [(len(running), longest + CHECK_EVERY * look) for look in range(looks)]
        made = CHECK_EVERY * looks
        running = [(has + made, end) for has, end in running if has + made < end]
    return torch.tensor(steps).view(-1, 2)


@functools.cache
def steps_of_ranks(count: int, max_new_tokens: int, slots: int, gpus: int) -> list[torch.Tensor]:
    """rollout_steps of each rank's share of so many responses."""
    lengths = response_lengths(count, max_new_tokens)
    return [rollout_steps(lengths[rank::gpus], slots) for rank in range(gpus)]


def step_seconds(
    model: Qwen3ForCausalLM, card: Card, host: float, steps: torch.Tensor
) -> torch.Tensor:
    """What decoding steps take, (N,): as long as the slower one of host and card.

    steps (N, 2): the rows and the tokens of the longest; all rows are read as if as long. The host
    launches each kernel in `host` seconds. The card reads weights, keys and values.
    """
    rows, longest = steps.double().unbind(1)
    layers = model.config.num_hidden_layers
    kernels = KERNELS[0] + KERNELS[1] * layers
    cache = rows * longest * cache_bytes(model.config) / card.bandwidth
    attention = torch.maximum(cache, layers * longest * ATTENTION_SECONDS)
    fixed = kernels * KERNEL_SECONDS + 2 * parameters(model) / card.bandwidth
    return (fixed + attention).clamp(min=kernels * host)


def sampling_time(
    model: Qwen3ForCausalLM, card: Card, host: float, ranks: list[torch.Tensor]
) -> tuple[float, int]:
    """Seconds and decoding steps of the slowest rank; ranks: the rollout_steps of each."""
    each = [(step_seconds(model, card, host, steps).sum(), len(steps)) for steps in ranks]
    seconds, looks = max(each)
    return CHECK_EVERY * float(seconds), CHECK_EVERY * looks


def evaluation_size(names: list[str], limit: int = 0, samples: int = 0) -> int:
    """Responses under one decoding."""
    own = {benchmark.key: benchmark.samples for benchmark in evaluation.BENCHMARKS}
    return sum(min(PROBLEMS[n], limit or PROBLEMS[n]) * (samples or own[n]) for n in names)


def cost(
    cfg: stapo.Config, model: Qwen3ForCausalLM, gpus: int, card: Card, host: float
) -> dict[str, float]:
    """Of a run. host: seconds of a launch. Raises ValueError where it does not fit on the cards.

    Of a step `seconds`, of which sampling, statistics and update; decoding_steps; `tokens` of a
    response on average; `rows` decoded at a time on each GPU. Of an evaluation `evaluated`, which
    is its responses, and `evaluation`, its seconds. Of the whole run `hours`.
    """
    held = bytes_per_gpu(model, gpus, cfg.tokens_per_micro_batch)
    longest = cfg.max_prompt_tokens + cfg.max_new_tokens
    free = 1e9 * card.gb - held["rollout"]
    rows = rows_that_fit(model.config, longest, free, cfg.rollout_batch_size)
    if rows == 0 or not update_fits(held, card.gb):
        raise ValueError(f"{cfg.model} does not fit on {gpus} x {card.gb} GB")
    count = cfg.batch_size * cfg.group_size
    found = {"rows": min(rows, math.ceil(count / gpus)), "evaluated": 0, "evaluation": 0.0}
    ranks = steps_of_ranks(count, cfg.max_new_tokens, rows, gpus)
    found["sampling"], found["decoding_steps"] = sampling_time(model, card, host, ranks)
    # Operations for each parameter and token: 2 in the statistics, 8 in an update. Every mini-batch
    # but the first has a statistics pass before. No group has A = 0.
    tokens = sum(response_lengths(count, cfg.max_new_tokens))
    operations = 2 * parameters(model) * (tokens + PROMPT * count)
    found["tokens"] = tokens / count
    found["statistics"] = operations / (SHARE * card.flops * gpus)
    passes = TRAINED_RIGHT * (1 - cfg.mini_batch_size / cfg.batch_size)
    found["update"] = (8 / 2 + passes) * found["statistics"]
    found["seconds"] = found["sampling"] + found["statistics"] + found["update"]
    seconds = cfg.steps * found["seconds"]
    if cfg.eval_every:  # before step 1, and then every so many steps
        evaluated = evaluation_size(cfg.eval_benchmarks, cfg.eval_limit, cfg.eval_samples)
        ranks = steps_of_ranks(evaluated, cfg.max_new_tokens, rows, gpus)
        found["evaluated"] = evaluated
        found["evaluation"], _ = sampling_time(model, card, host, ranks)
        seconds += (cfg.steps // cfg.eval_every + 1) * found["evaluation"]
    return found | {"hours": seconds / 3600}


def load_run(run: str) -> tuple[stapo.Config, Qwen3ForCausalLM]:
    """The flags and the empty model of a run."""
    cfg = parse_flags(stapo.Config, "", [f"@{ROOT}/recipes/{run}"])
    return cfg, empty_model(re.search(r"Qwen3-([\d.]+B)", cfg.model)[1])


def span(low: float, high: float, digits: int = 1) -> str:
    """A range as text; one number where both print alike."""
    low, high = f"{low:,.{digits}f}", f"{high:,.{digits}f}"
    return low if low == high else f"{low} to {high}"


def costs_table() -> str:
    heading = (
        "run | GPUs | responses x mean tokens | rows | decoding steps | minutes a step: sampling + "
        "statistics + update | steps | an evaluation: responses, minutes | hours of the run | GB "
        "to download | GB on disk"
    )
    rows = []
    for run, machines in RUNS.items():
        cfg, model = load_run(run)
        count, weights = cfg.batch_size * cfg.group_size, 2e-9 * parameters(model)
        for gpus, card in machines:
            found = [cost(cfg, model, gpus, CARDS[card], host) for host in HOST_SECONDS]
            low = found[0]
            sampling, minutes, evaluation_minutes = (
                span(*(each[key] / 60 for each in found))
                for key in ("sampling", "seconds", "evaluation")
            )
            passes = f"{low['statistics'] / 60:.1f} + {low['update'] / 60:.1f}"
            hours = [each["hours"] for each in found]
            cells = [run, f"{gpus} x {card}", f"{count:,} x {low['tokens']:,.0f}"]
            cells += [f"{low['rows']}", f"{low['decoding_steps']:,}"]
            cells += [f"{sampling} + {passes} = {minutes}", f"{cfg.steps:,}"]
            evaluated = f"{low['evaluated']:,}, {evaluation_minutes}"
            cells += [evaluated if low["evaluated"] else "none"]
            cells += [span(*hours, digits=0 if max(hours) > 100 else 1), f"{weights:.1f}"]
            rows.append([*cells, f"{weights * (1 + 6 * (cfg.keep_last + 1)):.0f}"])
    return markdown(heading, rows)


def table_hours(name: str, gpus: int, host: float) -> float:
    """Of eval.py's table on so many H100, both decodings; host: seconds of a launch."""
    model, card, cfg = empty_model(name), CARDS["H100"], evaluation.Config(model="")
    free = 1e9 * card.gb - 2 * parameters(model)
    longest = stapo.Config.max_prompt_tokens + cfg.max_new_tokens
    count, seconds = evaluation_size(cfg.benchmarks), 0.0
    for _, top_p in evaluation.parse_decodings(cfg.decoding).values():
        rows = rows_that_fit(model.config, longest, free, cfg.rollout_batch_size, top_p)
        ranks = steps_of_ranks(count, cfg.max_new_tokens, rows, gpus)
        seconds += sampling_time(model, card, host, ranks)[0]
    return seconds / 3600


def evaluations_table() -> str:
    cfg, rows = evaluation.Config(model=""), []
    count = evaluation_size(cfg.benchmarks)
    tokens = sum(response_lengths(count, cfg.max_new_tokens)) / count
    for name, gpus in TABLES:
        hours = span(*(table_hours(name, gpus, host) for host in HOST_SECONDS))
        rows.append([name, f"{gpus} x H100", f"{2 * count:,} x {tokens:,.0f}", hours])
    return markdown("model | GPUs | responses x mean tokens | hours", rows)


if __name__ == "__main__":
    print(f"{MEMORY}\n\n{memory_table()}\n\n{COSTS}\n\n{costs_table()}\n")
    print(f"{EVALUATIONS}\n\n{evaluations_table()}")
