"""What a run needs: memory, disk and hours.

    python experiments/costs.py             # what each recipe and docs/training.md say
    python experiments/costs.py --write     # writes it there, after a change

All of it is estimated from published shapes and data sheets. Nothing was measured.
"""

import argparse
import functools
import re
import sys
from pathlib import Path

import tables
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stapo
from support import decoding, models
from support.flags import parse_flags
from support.head import HEAD_CHUNKS

ROOT = Path(__file__).resolve().parent.parent
CARDS = {  # GB, operations a second in dense bfloat16, bytes a second: the vendors' figures
    "RTX 4090": (24, 165e12, 1.01e12),
    "L40S": (48, 362e12, 0.86e12),
    "A100": (80, 312e12, 2.04e12),
    "H100": (80, 989e12, 3.35e12),
    "H200": (141, 989e12, 4.8e12),
    "H20": (96, 148e12, 4.0e12),
}
RUNS = {  # the flags, and on which GPUs
    "--model Qwen/Qwen3-1.7B-Base": [(4, "RTX 4090"), (1, "L40S"), (1, "A100"), (1, "H100")],
    "--model Qwen/Qwen3-14B-Base": [(8, "H100")],
    "@recipes/qwen3-0.6b-one-24gb": [(1, "RTX 4090")],
    "@recipes/qwen3-1.7b-one-80gb": [(1, "A100"), (1, "H100"), (1, "H200")],
    "@recipes/qwen3-8b-eight-80gb": [(8, "A100"), (8, "H100"), (8, "H200")],
    "@recipes/paper-1.7b": [(8, "H100"), (64, "H100"), (64, "H20")],
}
PROBLEMS = {"aime24": 30, "math500": 500}  # of the benchmarks in RUNS
DATA = 2  # GB of DAPO-Math-17k's 1.79 million rows: the file, and the copy of `datasets`; a guess


def qwen3(name: str) -> Qwen3Config:
    """The published shape of Qwen3-0.6B, 1.7B, 8B or 14B."""
    keys = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    shape = {
        "0.6B": (1024, 28, 16, 3072),
        "1.7B": (2048, 28, 16, 6144),
        "8B": (4096, 36, 32, 12288),
        "14B": (5120, 40, 40, 17408),
    }[name]
    same = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    return Qwen3Config(**dict(zip(keys, shape)), **same, tie_word_embeddings=shape[0] < 4096)


@functools.cache
def empty_model(name: str) -> Qwen3ForCausalLM:
    """The published model without its weights."""
    return models.empty_model(qwen3(name)).eval()


def parameters(model: Qwen3ForCausalLM) -> int:
    return sum(p.numel() for p in model.parameters())


def layer_bytes_per_token(config: Qwen3Config) -> int:
    """What one decoder layer saves for its backward in bfloat16 on CUDA, except its input."""
    hidden, width = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    norms = 2 * 4 + 3 * 2 * hidden  # two float32 scales, the second's input, both outputs
    scales = 4 * (heads + kv_heads) + 4 * heads  # of the heads' norms and of attention
    # queries and keys before their norms and rotated, the rotations, values, attention's output
    attention = 6 * (heads + kv_heads) * width + 4 * width + scales
    return norms + attention + 8 * config.intermediate_size


def bytes_per_gpu(model: Qwen3ForCausalLM, gpus: int, micro_tokens: int) -> dict[str, float]:
    """What stapo.py holds on each GPU under FSDP2, in bytes.

    `states`: float32 shards of weights, gradients and AdamW's moments. `update`: the peak, with
    gradient checkpointing. `rollout`: before its first token, with all weights in bfloat16.
    """
    config, size = model.config, parameters(model)
    words, hidden = config.vocab_size, config.hidden_size
    layer = parameters(model.base_model.layers[0])
    root = size - config.num_hidden_layers * layer  # embedding, last norm, head
    inputs = 2 * config.num_hidden_layers * hidden * micro_tokens  # checkpointing keeps them
    # the head's gradient and, beside it, a chunk of logits; the last states and their gradient
    chunk = max(6 * HEAD_CHUNKS["cuda"].gradient, 2 * hidden)
    head = words * (4 * hidden + chunk) + 4 * micro_tokens * hidden
    # two layers gathered, one layer's gradient in bfloat16 and, to be reduced, in float32
    layers = micro_tokens * layer_bytes_per_token(config) + 2 * words * hidden + 10 * layer
    states = 16 * size / gpus
    update = states + 2 * root + inputs + max(head, layers)  # the root stays gathered
    return {"states": states, "update": update, "rollout": states - 4 * size / gpus + 2 * size}


def rows_that_fit(config: Qwen3Config, length: int, free: float) -> int:
    """Responses of `length` tokens, prompt included, for which `free` bytes have room."""
    return max(0, int(0.8 * free / decoding.bytes_per_row(config, length, 2)))


TEXT = """\
How these numbers are estimated:
- A GPU needs (tokens of its responses / rows + 2/3 of `--max_new_tokens`) decoding steps. The
  second term is for the end of a rollout, when few long responses are left.
- A decoding step takes the longer of two times: to launch 45 + 28 x layers kernels, or to read the
  weights and, for each row, the keys and values of 3/4 of `--max_new_tokens`.
- Statistics and updates take 11 operations a parameter and token, at 40 % of the card's peak.
- Responses are assumed to have 0.3 times `--max_new_tokens` on average, and prompts 200 tokens.
- A launch is assumed to take 15 microseconds (fewer hours) or 30. This is the largest unknown."""


def sampling_seconds(
    model: Qwen3ForCausalLM, bandwidth: float, responses: float, longest: int, rows: int
) -> list[float]:
    """What one GPU needs for its responses, at both launch times: the formula of TEXT."""
    config, steps = model.config, (0.3 * responses / rows + 2 / 3) * longest
    per_token = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    read = (2 * parameters(model) + rows * 0.75 * longest * per_token) / bandwidth
    launches = 45 + 28 * config.num_hidden_layers
    return [steps * max(launches * seconds, read) for seconds in (15e-6, 30e-6)]


def cost(run: str, gpus: int, card: str) -> dict[str, str]:
    """A row of the table, with its heading as keys."""
    cfg = parse_flags(stapo.Config, "", run.replace("@", f"@{ROOT}/").split())
    gb, flops, bandwidth = CARDS[card]
    model = empty_model(re.search(r"Qwen3-([\d.]+B)", cfg.model)[1])
    size, held = parameters(model), bytes_per_gpu(model, gpus, cfg.tokens_per_micro_batch)
    count, longest = cfg.batch_size * cfg.group_size, cfg.max_new_tokens
    fit = rows_that_fit(model.config, cfg.max_prompt_tokens + longest, 1e9 * gb - held["rollout"])
    rows = min(fit, cfg.rollout_batch_size, count // gpus)
    decode = functools.partial(sampling_seconds, model, bandwidth, longest=longest, rows=rows)
    passes = 11 * size * count * (0.3 * longest + 200) / (0.4 * flops * gpus)
    step = [seconds + passes for seconds in decode(count / gpus)]
    problems = sum(min(PROBLEMS[name], cfg.eval_limit) for name in cfg.eval_benchmarks)
    times = 1 + cfg.steps // cfg.eval_every if cfg.eval_every else 0  # the first is before step 1
    evaluation = decode(problems * cfg.eval_samples / gpus)
    hours = [(cfg.steps * s + times * e) / 3600 for s, e in zip(step, evaluation)]
    kept, saved, downloads = cfg.keep_last + 1, 12e-9 * size, 2e-9 * size + DATA  # GB
    return {
        "run": f"`{run}`",
        "GPUs": f"{gpus} x {card}",
        "GB of a GPU": f"{held['update'] / 1e9:.0f} of {gb}",
        "rows": f"{rows}",
        "GB of disk": f"{kept} x {saved:.1f} + {downloads:.1f} = {kept * saved + downloads:.0f}",
        "a step: responses, minutes": f"{count:,}, {step[0] / 60:.1f} to {step[1] / 60:.1f}",
        "evaluations": f"{times} x {problems * cfg.eval_samples} responses" if times else "none",
        "hours": f"{cfg.steps:,} steps: {hours[0]:,.1f} to {hours[1]:,.1f}",
    }


def written_texts() -> dict[Path, str]:
    """What stands between the markers of docs/training.md and of each recipe."""
    texts, every = {}, []
    for run, places in RUNS.items():
        rows = [cost(run, *place) for place in places]
        lines = [f"{row['GPUs']}: {row['GB of a GPU']} GB; {row['hours']} hours" for row in rows]
        lines += [f"disk: {rows[0]['GB of disk']} GB (checkpoints; downloads)"]
        texts |= {ROOT / run[1:]: "".join(f"#   {x}\n" for x in lines)} if run[0] == "@" else {}
        every += rows
    lines = [tables.head(list(every[0])), *(tables.line(row.values()) for row in every)]
    return texts | {ROOT / "docs" / "training.md": "\n".join([*lines, "", TEXT, ""])}


def written(content: str, text: str) -> str:
    """A file's content with the text between the line that names this program and `until here`."""
    between = r"(experiments/costs.py --write.*\n)[^\0]*?(.*until here)"
    return re.sub(between, lambda marks: marks[1] + text + marks[2], content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="into docs/training.md and recipes/")
    write = parser.parse_args().write
    for file, text in written_texts().items():
        file.write_text(written(file.read_text(), text)) if write else print(text)
