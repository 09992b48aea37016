"""Estimate what a run needs: memory of a GPU, rows, disk and hours.

python experiments/costs.py    # the table of docs/training.md, which lists the assumptions

results/gpu.md has what was measured.
"""

import re
from typing import NamedTuple

import runs

import stapo
from support.decoding import DRAW_BYTES
from support.flags import parse_flags
from support.head import HEAD_CHUNK


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int
    mlp: int
    tied: bool  # embedding and output head


QWEN3 = {  # the published models
    "0.6B": Shape(1024, 28, 16, 3072, True),
    "1.7B": Shape(2048, 28, 16, 6144, True),
    "8B": Shape(4096, 36, 32, 12288, False),
}
WORDS, KV_HEADS, WIDTH = 151936, 8, 128  # of all three; the width of a head
CARDS = {  # GB, operations a second in dense bfloat16, bytes a second: the vendors' figures
    "RTX 4090": (24, 165e12, 1.01e12),
    "A100": (80, 312e12, 2.04e12),
    "H100": (80, 989e12, 3.35e12),
}
RUNS = {  # the flags, and on which GPUs
    "--model Qwen/Qwen3-1.7B-Base": [(4, "RTX 4090"), (1, "A100"), (1, "H100")],
    "@recipes/qwen3-0.6b-one-24gb": [(1, "RTX 4090")],
    "@recipes/qwen3-1.7b-one-80gb": [(1, "A100"), (1, "H100")],
    "@recipes/qwen3-8b-eight-80gb": [(8, "A100"), (8, "H100")],
    "@recipes/paper-1.7b": [(8, "H100")],
}
PROBLEMS = {"aime24": 30, "math500": 500}  # of the benchmarks in RUNS
DATA = 2  # GB of DAPO-Math-17k's 1.79 million rows: the file, and the copy of `datasets`; a guess


def parameters(shape: Shape) -> tuple[int, int]:
    """Of the whole model, and of one decoder layer."""
    attention = 2 * (shape.heads + KV_HEADS) * WIDTH * shape.hidden  # queries, keys, values, output
    layer = attention + 3 * shape.hidden * shape.mlp + 2 * shape.hidden + 2 * WIDTH  # MLP, norms
    head = (1 if shape.tied else 2) * WORDS * shape.hidden + shape.hidden  # and the last norm
    return shape.layers * layer + head, layer


def update_bytes(shape: Shape, gpus: int, micro_tokens: int) -> float:
    """The peak of an update on each GPU under FSDP2, with gradient checkpointing."""
    whole, layer = parameters(shape)
    states = 16 * whole / gpus  # float32 shards of weights, gradients and AdamW's moments
    gathered = 2 * (whole - shape.layers * layer)  # embedding and head in bfloat16
    inputs = 2 * shape.layers * shape.hidden * micro_tokens  # checkpointing keeps them
    # the head's gradient and, beside it, a chunk of logits and its softmax; the last states and
    # their gradient
    chunk = max(8 * HEAD_CHUNK["cuda"], 2 * shape.hidden)
    head = WORDS * (4 * shape.hidden + chunk) + 4 * micro_tokens * shape.hidden
    # What a layer saves for its backward, for each token: norms, queries, keys, values, MLP. Two
    # layers gathered; one layer's gradient in bfloat16 and, to be reduced, in float32.
    saved = 6 * shape.hidden + 6 * (shape.heads + KV_HEADS) * WIDTH + 8 * shape.mlp
    layers = saved * micro_tokens + 2 * WORDS * shape.hidden + 10 * layer
    return states + gathered + inputs + max(head, layers)


def cost(run: str, gpus: int, card: str, share: float = 0.3) -> dict[str, str]:
    """A row of the table, with its heading as keys. Responses have this share of the longest."""
    cfg = parse_flags(stapo.Config, "", run.replace("@", f"@{runs.ROOT}/").split())
    gb, flops, bandwidth = CARDS[card]
    shape = QWEN3[re.search(r"Qwen3-([\d.]+B)", cfg.model)[1]]
    size, memory = parameters(shape)[0], update_bytes(shape, gpus, cfg.tokens_per_micro_batch)
    count, longest = cfg.batch_size * cfg.group_size, cfg.max_new_tokens
    free = 1e9 * gb - 12 * size / gpus - 2 * size  # the states without gradients; bfloat16 weights
    cached = 4 * shape.layers * KV_HEADS * WIDTH  # bytes of the keys and values of one token
    row_bytes = cached * (cfg.max_prompt_tokens + longest) + DRAW_BYTES * WORDS
    rows = min(int(0.8 * free / row_bytes), cfg.rollout_batch_size, count // gpus)

    def sampling_seconds(responses: float) -> list[float]:
        """What these responses need, at 15 and 30 microseconds to launch a kernel."""
        steps = (share * responses / gpus / rows + 2 / 3) * longest
        read = (2 * size + cached * rows * 0.75 * longest) / bandwidth
        return [steps * max((45 + 28 * shape.layers) * launch, read) for launch in (15e-6, 30e-6)]

    passes = 11 * size * count * (share * longest + 200) / (0.4 * flops * gpus)
    step = [seconds + passes for seconds in sampling_seconds(count)]
    problems = sum(min(PROBLEMS[name], cfg.eval_limit) for name in cfg.eval_benchmarks)
    times = 1 + cfg.steps // cfg.eval_every if cfg.eval_every else 0  # the first is before step 1
    evaluation = sampling_seconds(problems * cfg.eval_samples)
    hours = [(cfg.steps * s + times * e) / 3600 for s, e in zip(step, evaluation)]
    kept, saved, downloads = cfg.keep_last + 1, 12e-9 * size, 2e-9 * size + DATA  # GB
    return {
        "run": f"`{run}`",
        "GPUs": f"{gpus} x {card}",
        "GB of a GPU": f"{memory / 1e9:.0f} of {gb}",
        "rows": f"{rows}",
        "GB of disk": f"{kept} x {saved:.1f} + {downloads:.1f} = {kept * saved + downloads:.0f}",
        "seconds a step": f"{step[0]:,.0f} to {step[1]:,.0f}",
        "hours": f"{cfg.steps:,} steps: {hours[0]:,.1f} to {hours[1]:,.1f}",
    }


if __name__ == "__main__":
    rows = []
    for run, place in [(run, place) for run, places in RUNS.items() for place in places]:
        longer = cost(run, *place, share=0.6)["hours"].partition(": ")[2]
        rows.append(cost(run, *place) | {"longer": longer})
    print(runs.markdown([list(rows[0]), *(list(row.values()) for row in rows)]), end="")
