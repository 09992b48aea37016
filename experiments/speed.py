"""Measure the speed of sampling, of a training step, and of TRL's step on the same work.

    python experiments/speed.py sampler    # generate, rollout.sample with and without CUDA graphs
    python experiments/speed.py ours       # steps of stapo.py, with and without CUDA graphs
    python experiments/speed.py trl        # steps of TRL's GRPOTrainer

The model has random weights and the shape of Qwen3-1.7B. On a CPU give small numbers: --layers 2
--hidden 128 --vocabulary 500 --rows 32 --new 24. results/gpu.md has what was measured on a GPU.
"""

import argparse
import json
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import runs
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import eval as evaluation
import rollout
import stapo
from support import ranks
from support.flags import parse_flags

SHAPE = {"layers": 28, "hidden": 2048, "vocabulary": 151936, "rows": 128, "new": 512, "steps": 2}
CUDA = torch.cuda.is_available()
GROUP, PROMPT = 8, 32  # responses to a prompt, and its tokens
PATIENCE = 120  # seconds in which generate with a static cache must have compiled and sampled


def make_model(args: argparse.Namespace) -> str:
    """Return the folder of a random model with the tiny model's tokenizer."""
    name = f"stapo-speed-{args.layers}-{args.hidden}-{args.vocabulary}"
    folder = Path(tempfile.gettempdir(), name)
    tokenizer, heads = AutoTokenizer.from_pretrained(runs.TINY), max(1, args.hidden // 128)
    config = Qwen3Config(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=min(8, heads),
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    if not (folder / "tokenizer.json").exists():  # which is saved last
        torch.manual_seed(0)
        with ranks.device():
            Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def parity(response: str, row: dict) -> float:
    """A reward that differs within most groups."""
    return 1.0 if len(response) % 2 else -1.0


def show(name: str, numbers: dict[str, float]) -> None:
    texts = [f"{x:,.{0 if x >= 100 else 3}f} {unit}" for unit, x in numbers.items()]
    print(f"{name}: {', '.join(texts)}", flush=True)


@ranks.session("speed.py")
def sampler(args: argparse.Namespace) -> None:
    """Sample responses of equal length (no token ends them) and ragged ones (2 / --new of all do).

    Ragged ones are twice as many, so that slots are refilled. Each program draws its own lengths.
    "ms a token" is the time in which each of the rows gets one. Its limit is the time in which a
    copy moves what a step must read: the weights, and the keys and values of all tokens so far.
    """
    model, tokenizer = evaluation.load(make_model(args))
    tokenizer.eos_token = None  # would end responses
    config, weights = model.config, sum(weight.nbytes for weight in model.parameters())
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    cached *= model.dtype.itemsize  # bytes of a token's keys and values
    source = torch.zeros(2**30 if CUDA else 2**26, dtype=torch.uint8, device=model.device)
    target = source.clone()
    float(target[-1])  # waits until it is there
    began = time.monotonic()
    for _ in range(10):
        target.copy_(source)
    float(target[-1])
    speed = 20 * len(source) / (time.monotonic() - began)  # bytes a second, read and written
    show("this device", {"GB of weights": weights / 1e9, "GB a second in a copy": speed / 1e9})

    def generate(prompts: list, new: int, stops: list[int], cache: str | None = None) -> list[int]:
        flags = rollout.sampling_config(1.0, 1.0, new, stops, tokenizer.pad_token_id)
        flags.cache_implementation = cache
        seeds = list(range(len(prompts)))
        drawn = rollout.generate_in_batches(model, prompts, flags, args.rows, seeds)
        return [len(ids) for _, ids in drawn]

    def slots(prompts: list, new: int, stops: list[int], graphs: bool) -> list[int]:
        model.generation_config.eos_token_id = stops
        options = {"batch_size": args.rows, "cuda_graphs": graphs}
        drawn = rollout.sample(model, tokenizer, prompts, max_new_tokens=new, **options)
        return [len(response.ids) for _, response in drawn]

    def measure(name: str, draw: Callable, warm: int = 16, **options: Any) -> None:
        no_token, some = [args.vocabulary], list(range(-(-2 * args.vocabulary // args.new)))
        draw([[5] * PROMPT] * args.rows, warm, no_token, **options)
        for kind, count, stops in ("equal", args.rows, no_token), ("ragged", 2 * args.rows, some):
            prompts = [[5 + i // GROUP % 90] * PROMPT for i in range(count)]
            began = time.monotonic()
            lengths = draw(prompts, args.new, stops, **options)
            took, steps = time.monotonic() - began, sum(lengths) / args.rows
            visible = sum(n * (PROMPT + n / 2) for n in lengths)
            limit = (weights * steps + cached * visible) / speed
            numbers = {"tokens": sum(lengths), "tokens a second": sum(lengths) / took}
            numbers |= {"ms a token": 1e3 * took / steps, "ms are the limit": 1e3 * limit / steps}
            show(f"{name}, {kind} lengths", numbers | {"times the limit": took / limit})

    measure("generate", generate)
    measure("rollout.sample without CUDA graphs", slots, graphs=False)
    if CUDA:
        measure("rollout.sample", slots, graphs=True)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(PATIENCE)
    try:  # it compiles in the first call
        measure("generate with a static cache", generate, warm=args.new, cache="static")
    except (Exception, KeyboardInterrupt) as error:  # a compiler can fail in any way
        print(f"generate with a static cache failed, or took over {PATIENCE} s: {error!r:.200}")


@ranks.session("speed.py")
def ours(args: argparse.Namespace) -> None:
    """Take steps of stapo.py, without its checkpoint of 20 GB."""
    prompts = args.rows // GROUP
    text = f"--data {runs.TINY}/train.jsonl --instruction= --reward {__file__}:parity --batch_size"
    text += f" {prompts} --mini_batch_size {prompts // 4} --max_new_tokens {args.new}"
    cfg = parse_flags(stapo.Config, "", [*text.split(), "--model", make_model(args)])
    keys = "rollout_seconds update_seconds tokens_per_second peak_memory_gb sampling_z".split()
    task = stapo.load_task(cfg)
    policy, optimizer, _ = stapo.load_models(cfg, task.tokenizer, None)
    rollouts = -(-args.rows // cfg.rollout_batch_size)
    stapo.train_step(policy, None, optimizer, task, 1, cfg)  # loads kernels, as a run's first step
    for graphs in (False, True) if CUDA else (False,):
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        for step in range(1, args.steps + 1):
            flags = replace(cfg, cuda_graphs=graphs)
            result = stapo.train_step(policy, None, optimizer, task, step, flags)
            line = stapo.step_metrics(result, cfg.tau_p)
            longest = max(result.batch.mask.sum(1).tolist())
            each = 1e3 * line["rollout_seconds"] / longest / rollouts
            numbers = {"ms a token with rewards, p and H": each}
            numbers |= {key: line[key] for key in keys}
            show(f"{'with' if graphs else 'without'} CUDA graphs, step {step}", numbers)


def trl(args: argparse.Namespace) -> None:
    """Take steps of GRPOTrainer: the same model, problems, sizes and reward; `generate` samples."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    folder, rollouts = make_model(args), []

    def reward(completions: list, completion_ids: list, **_: object) -> list[float]:
        rollouts.append((time.monotonic(), sum(map(len, completion_ids))))
        return [parity(text, {}) for text in completions]

    config = GRPOConfig(
        output_dir=f"{folder}-trl",
        bf16=CUDA,
        per_device_train_batch_size=args.rows // 4,
        steps_per_generation=4,
        num_generations=GROUP,
        max_completion_length=args.new,
        epsilon_high=0.28,
        max_steps=4 * (args.steps + 1),
        logging_strategy="no",
        save_strategy="no",
        model_init_kwargs={"dtype": "float32"},
    )
    with (runs.TINY / "train.jsonl").open() as lines:
        data = [{"prompt": json.loads(line)["problem"] + "\n"} for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    options = {"train_dataset": Dataset.from_list(data), "processing_class": tokenizer}
    GRPOTrainer(folder, reward, config, **options).train()
    for (began, _), (ended, tokens) in zip(rollouts, rollouts[1:]):
        numbers = {"seconds": ended - began, "tokens a second": tokens / (ended - began)}
        show("GRPOTrainer, a step", numbers | {"GB at the peak": ranks.peak_memory_gb()})


if __name__ == "__main__":
    parts = {"sampler": sampler, "ours": ours, "trl": trl}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=parts)
    for name, default in SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.rows % 32:
        parser.error("--rows must be a multiple of 32: four mini-batches of groups of eight")
    parts[args.part](args)
