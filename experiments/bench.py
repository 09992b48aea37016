"""Measure speed and memory beside other code that does the same work, and print ratios.

    python experiments/bench.py                  # head, update, rollout, step
    python experiments/bench.py update --quick   # small shapes, as in the tests

1. `head`, `update` and `rollout` compare this project's code with a plain twin. The benchmark
   checks that both compute the same. `step` compares it with TRL's trainer, if trl is installed.
2. The two run in turn. A ratio is the median over the pairs. On a CPU they have one thread.
3. What does not fit into the GPU's memory is left out.
"""

import argparse
import contextlib
import functools
import importlib.util
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tables
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from costs import qwen3

import rollout
import stapo
from support import decoding, distributed, progress
from support.head import HeadStats
from support.models import prepared

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
EOS, PAD, SEPARATOR = 0, 1, 2  # ids of the random models; all other ids are words

# ---------------------------------------- models


def small_shape(quick: bool) -> Qwen3Config:
    """Return the shape of a Qwen3 for one CPU thread."""
    width = 32 if quick else 128
    return Qwen3Config(
        hidden_size=width,
        num_hidden_layers=2 if quick else 4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        intermediate_size=3 * width,
        vocab_size=1024,
        tie_word_embeddings=True,
    )


def random_model(config: Qwen3Config) -> Qwen3ForCausalLM:
    """Return a model with random weights."""
    torch.manual_seed(0)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = EOS, PAD, None
    with DEVICE:
        return prepared(Qwen3ForCausalLM(config)).eval()


# ---------------------------------------- measuring


def clock() -> float:
    """Return seconds: the time of day when the GPU's work is done, or this process's CPU time.

    CPU time does not count other programs of a busy machine.
    """
    if CUDA:
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def seconds(call: Callable) -> float:
    start = clock()
    call()
    return clock() - start


def in_turn(ours: Callable, twin: Callable, repeats: int) -> float:
    """Return how many times faster `ours` is: the median over `repeats` pairs.

    Both were called before, because first calls are slower.
    """
    return statistics.median(seconds(twin) / seconds(ours) for _ in range(repeats))


def left_out(what: str, why: str) -> None:
    print(f"{what} is left out: {why}", file=sys.stderr)


def error(ours: torch.Tensor, twin: torch.Tensor) -> float:
    """Return the largest difference, relative to the twin's largest entry."""
    return float((ours - twin).abs().max() / twin.abs().max())


# ---------------------------------------- head: token statistics without the logits


def our_head(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return HeadStats.apply(*inputs, False)


def plain_head(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute logp and entropy as HeadStats does, but from all (N, V) logits at once."""
    logp = (hidden @ weight.T).log_softmax(-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy


def head_inputs(tokens: int, words: int, width: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=DEVICE, requires_grad=True)
    weight = torch.empty(words, width, device=DEVICE).normal_(std=0.1).requires_grad_()
    return hidden, weight, torch.randint(words, (tokens,), device=DEVICE)


def run_head(forward: Callable, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Run one forward and backward. Returns the two gradients, logp and entropy."""
    hidden, weight, targets = inputs
    hidden.grad = weight.grad = None
    logp, entropy = forward(hidden, weight, targets)
    (logp * torch.linspace(-1, 1, len(targets), device=DEVICE)).sum().backward()
    return hidden.grad, weight.grad, logp.detach(), entropy.detach()


def resident_bytes(key: str) -> int:
    """Return VmRSS (resident memory) or VmHWM (its peak) of this process. Linux only."""
    return 1024 * int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def head_memory(name: str, shape: tuple[int, int, int]) -> int:
    """Return the peak bytes of one forward and backward beyond inputs and gradients."""
    forward = {"ours": our_head, "plain": plain_head}[name]
    run_head(forward, head_inputs(2, 64, 64))  # loads libraries before the measurement
    inputs = head_inputs(*shape)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if CUDA else resident_bytes("VmRSS")
    run_head(forward, inputs)
    peak = torch.cuda.max_memory_allocated() if CUDA else resident_bytes("VmHWM")
    return peak - before - sum(x.grad.nbytes for x in inputs[:2])


def fresh_head_memory(name: str, shape: tuple[int, int, int]) -> int:
    """Call head_memory in a new process, which has no peak of earlier work."""
    code = f"import bench; bench.torch.set_num_threads(1); print(bench.head_memory{name, shape})"
    command = [sys.executable, "-c", code]
    return int(subprocess.check_output(command, cwd=Path(__file__).parent))


def head(quick: bool) -> Iterator[tuple[str, float]]:
    tokens, words, width = (512, 4096, 128) if quick else (4096, 151936, 1024)
    fewer = head_inputs(tokens // 4, words, width)  # time grows in proportion to the tokens
    ours, twin = (functools.partial(run_head, each, fewer) for each in (our_head, plain_head))
    if max(error(a, b) for a, b in zip(ours(), twin(), strict=True)) > 1e-4:
        raise RuntimeError("the two heads do not compute the same")  # rounding is 3e-5
    memory = head_memory if CUDA else fresh_head_memory
    plain, small = (memory(name, (tokens, words, width)) for name in ("plain", "ours"))
    what = f"head, {tokens:,} tokens x {words:,} words x {width:,}: extra memory, plain / ours"
    yield what, plain / small
    yield "head: time, ours / plain", 1 / in_turn(ours, twin, 1 if quick else 3)


# ---------------------------------------- update: no wasted tokens


def log_normal_lengths(count: int, median: float, longest: int) -> list[int]:
    """Return quantiles of a log-normal distribution (sigma 0.5) in a fixed random order."""
    shares = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    lengths = (math.log(median) + 0.5 * torch.special.ndtri(shares)).exp().round()
    lengths = lengths.clamp(1, longest).long()
    return lengths[torch.randperm(count, generator=torch.Generator().manual_seed(0))].tolist()


def random_batch(
    policy: rollout.Policy, response_lengths: list[int], zero_groups: int
) -> stapo.Batch:
    """Return groups of 8 random responses, half of them right. The first groups have A = 0."""
    lengths = 16 + torch.tensor(response_lengths)  # with the prompt
    columns, rows = torch.arange(int(lengths.max())), torch.arange(len(lengths))
    ids = torch.randint(3, policy.model.config.vocab_size, (len(lengths), len(columns)))
    mask = (columns >= 16) & (columns < lengths[:, None])
    rewards = torch.where(rows % 2 == 0, -1.0, 1.0)
    return stapo.Batch(
        ids=ids,
        mask=mask,
        lengths=lengths,
        old=rollout.response_stats(policy, ids, mask, lengths, 2 * len(columns)),
        ref_logp=None,
        rewards=rewards.double(),
        advantages=torch.where(rows // 8 < zero_groups, 0.0, 0.94 * rewards),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        seeds=rows,
    )


def plain_update(
    policy: rollout.Policy,
    optimizer: torch.optim.Optimizer,
    batch: stapo.Batch,
    keep: torch.Tensor,
    cfg: stapo.Config,
) -> None:
    """Do what stapo.update does with 8 rows at a time, all padded, and none skipped."""
    policy.train()
    optimizer.zero_grad()
    for start in range(0, len(batch.ids), 8):
        rows = slice(start, start + 8)
        part = batch.take(rows)
        logp = policy(part.ids, part.mask, logp_only=True).logp
        stapo.objective(part, keep[rows], logp, int(keep.sum()), cfg)[0].backward()
    policy.eval()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.grad_clip)
    optimizer.step()


def update(quick: bool) -> Iterator[tuple[str, float]]:
    policy = rollout.Policy(random_model(small_shape(quick)), gradient_checkpointing=True)
    lengths = log_normal_lengths(80, *((20, 60) if quick else (300, 1024)))
    batch = random_batch(policy, lengths, zero_groups=4)
    cfg = stapo.Config(tokens_per_micro_batch=2 * (max(lengths) + 16))
    choice = stapo.silence_spurious(batch, batch.old, cfg)
    counts = stapo.count_tokens(batch, batch.old, choice)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0)  # the weights do not change
    gradients = []

    def keep_gradient(*_):
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))

    optimizer.register_step_pre_hook(keep_gradient)
    ours = functools.partial(stapo.update, policy, optimizer, batch, choice.keep, counts, cfg)
    twin = functools.partial(plain_update, policy, optimizer, batch, choice.keep, cfg)
    statistics_pass = functools.partial(stapo.statistics_pass, policy, batch, cfg)
    ours(), twin(), statistics_pass()
    if error(*gradients) > 1e-5:
        raise RuntimeError("the two updates do not have the same gradient")
    repeats = 1 if quick else 5
    what = "update, 80 ragged responses, 4 of 10 groups with A = 0: speed-up"
    yield what, in_turn(ours, twin, repeats)
    what = "statistics pass / update, half of the trained right"
    yield what, in_turn(ours, statistics_pass, repeats)


# ---------------------------------------- rollout: slots that are filled again


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose id i is the word `wi`. All ids and texts can be converted."""
    words = {"<eos>": EOS, "<pad>": PAD} | {f"w{i}": i for i in range(2, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options = {"eos_token": "<eos>", "pad_token": "<pad>", "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


@contextlib.contextmanager
def schedule(lengths: list[int], prompt_width: int) -> Iterator[None]:
    """Make every sampler of a Qwen3 end response i after lengths[i] tokens.

    1. The words are cut into as many classes as there are lengths. Response i consists of words of
       class i, so the last token of a row says which response the row is.
    2. The last word of a prompt chooses the class of its response. If it is the SEPARATOR, the
       class is the number of the row in its batch.
    3. The model still samples the words within a class. A forward without a cache, which computes
       token statistics, is not changed.
    """
    plain, ends = Qwen3ForCausalLM.forward, torch.tensor(lengths, device=DEVICE)

    @functools.wraps(plain)  # generate reads the signature
    def forward(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        if kwargs.get("past_key_values") is None:
            return output
        word_class = torch.arange(self.config.vocab_size, device=DEVICE) % len(lengths)
        word_class[[EOS, PAD, SEPARATOR]] = -1
        sampled = kwargs["position_ids"][:, -1] + 1 - prompt_width  # (B,) tokens of the response
        last_class = word_class[kwargs["input_ids"][:, -1]]
        row = torch.arange(len(last_class), device=DEVICE) % len(lengths)
        response = torch.where(last_class < 0, row, last_class)
        allowed = word_class == response[:, None]  # (B, V)
        ended = sampled + 1 >= ends[response]
        allowed[ended] = False
        allowed[ended, EOS] = True
        output.logits[:, -1].masked_fill_(~allowed, float("-inf"))
        return output

    Qwen3ForCausalLM.forward = forward
    try:
        yield
    finally:
        Qwen3ForCausalLM.forward = plain


def plain_sample(
    model: Qwen3ForCausalLM, prompts: list[list[int]], max_new_tokens: int, batch_size: int
) -> list[list[int]]:
    """Sample with plain `generate`, in batches that wait for their longest response."""
    config, rows = rollout.sampling_config(1.0, 1.0, max_new_tokens, [EOS], PAD), []
    for start in range(0, len(prompts), batch_size):
        out = rollout.generate(model, prompts[start : start + batch_size], config)
        rows += [decoding.until_stop(row, {EOS}) for row in out[:, len(prompts[0]) :].tolist()]
    return rows


def rollouts(quick: bool) -> Iterator[tuple[str, float]]:
    """Sample four times as many responses as there are slots."""
    large = CUDA and not quick
    slots, median, longest = (8, 20, 60) if quick else (96, 79, 256)
    count = 4 * slots
    model = random_model(qwen3("1.7B") if large else small_shape(quick))
    model = model.bfloat16() if large else model
    tokenizer = word_tokenizer(model.config.vocab_size)
    lengths = log_normal_lengths(count, median, longest)
    prompts = torch.randint(3, model.config.vocab_size, (count, 16))
    prompts[:, -1] = torch.arange(count, 2 * count)  # prompt i ends with a word of class i
    prompts = prompts.tolist()

    def ours() -> list[int]:
        options = {"max_new_tokens": longest, "batch_size": slots}
        sampled = rollout.in_order(rollout.sample(model, tokenizer, prompts, **options))
        return [len(response.ids) for response in sampled]

    def twin() -> list[int]:
        return [len(ids) for ids in plain_sample(model, prompts, longest, slots)]

    with schedule(lengths, prompt_width=16):
        if not ours() == twin() == lengths:
            raise RuntimeError("the two rollouts did not do the same work")
        faster = in_turn(ours, twin, 1 if quick or large else 3)
    yield f"rollout, {count} responses up to {longest} in {slots} slots: speed-up", faster


# ---------------------------------------- step: against TRL's trainer


def first_word_is_even(text: str, _row: dict | None = None) -> float:
    """Reward for both trainers. Under `schedule`, half of every group is right."""
    return 1.0 if text and int(text.split()[0][1:]) % 2 == 0 else -1.0


def train_with_trl(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    texts: list[str],
    reward: Callable,
    ours: Callable,
    options: dict,
) -> list[float]:
    """Train with TRL's GRPOTrainer and call `ours` after each four optimiser steps.

    Returns the ratios of their times.
    """
    from trl import GRPOConfig, GRPOTrainer

    ratios = []

    class InTurn(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.start = clock()

        def on_step_end(self, _args, state, *_, **__):
            if state.global_step % 4 == 0:
                ratios.append((clock() - self.start) / seconds(ours))
                self.start = clock()

    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            num_generations=8,
            loss_type="dapo",
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            lr_scheduler_type="constant",
            use_cpu=not CUDA,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )
        data = Dataset.from_list([{"prompt": text} for text in texts])
        host = {"processing_class": tokenizer, "callbacks": [InTurn()]}
        trainer = GRPOTrainer(model, reward, args, data, **host)
        trainer.remove_callback(PrinterCallback)  # it prints into the table
        trainer.train()
    return ratios


def step(quick: bool) -> Iterator[tuple[str, float]]:
    """Time a step: 8 x 8 responses, four optimiser steps and three statistics passes."""
    if importlib.util.find_spec("trl") is None:
        left_out("step", "trl is not installed (pip install trl)")
        return
    large, repeats = CUDA and not quick, 2 if quick or CUDA else 5
    longest = 1024 if large else 40 if quick else 256
    lengths = log_normal_lengths(64, 300 if large else 15 if quick else 79, longest)
    mine, peer = (random_model(qwen3("1.7B") if large else small_shape(quick)) for _ in "ab")
    policy = rollout.Policy(mine, gradient_checkpointing=large)
    tokenizer = word_tokenizer(mine.config.vocab_size)
    if large:
        distributed.shard(policy)  # computes in bfloat16
    prompts = torch.randint(3, mine.config.vocab_size, (8, 16))
    prompts[:, -1] = SEPARATOR  # the responses of a group have the same prompt
    texts = [" ".join(f"w{i}" for i in ids) for ids in prompts.tolist()]
    problems = [{"problem": "", "answer": "", "prompt_ids": ids} for ids in prompts.tolist()]
    task = stapo.Task(tokenizer, problems, first_word_is_even, suite={}, fingerprints={})
    sizes = {"batch_size": 8, "mini_batch_size": 2, "group_size": 8, "max_new_tokens": longest}
    cfg = stapo.Config(**sizes, tokens_per_micro_batch=2 * (longest + 16))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, fused=CUDA)
    tokens = {"ours": [], "trl": []}  # of each step

    def ours():
        """Do what stapo.train does in a step."""
        batch, _ = stapo.collect(policy, None, task, len(tokens["ours"]) + 1, cfg)
        stapo.entropy_metrics(batch), stapo.rollout_metrics(batch, cfg.tau_p)
        for number, mini_batch in enumerate(batch.mini_batches(4)):
            later = number > 0
            stats = stapo.statistics_pass(policy, mini_batch, cfg) if later else mini_batch.old
            choice = stapo.silence_spurious(mini_batch, stats, cfg)
            counts = stapo.count_tokens(mini_batch, stats, choice)
            stapo.update(policy, optimizer, mini_batch, choice.keep, counts, cfg)
        tokens["ours"].append(int(batch.mask.sum()))

    def reward(completions, completion_ids, **_):
        tokens["trl"].append(sum(map(len, completion_ids)))
        return [first_word_is_even(text) for text in completions]

    rows = 2 if large else 16  # of a micro-batch; a mini-batch is 16 responses
    options = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 16 // rows}
    options |= {"steps_per_generation": 64 // rows, "max_steps": 4 * (repeats + 1)}
    options |= {"max_completion_length": longest, "bf16": large, "gradient_checkpointing": large}
    options |= {"learning_rate": cfg.lr, "weight_decay": cfg.weight_decay}
    with schedule(lengths, prompt_width=16):
        ratios = train_with_trl(peer, tokenizer, texts, reward, ours, options)
    if set(tokens["ours"]) | set(tokens["trl"]) != {sum(lengths)}:
        raise RuntimeError(f"the two trainers did not do the same work: {tokens}")
    what = f"step, 64 responses up to {longest}, TRL's micro-batch {rows} rows: speed-up"
    yield what, statistics.median(ratios[1:])  # the first turn warms up


# ---------------------------------------- the table

BENCHES = {"head": head, "update": update, "rollout": rollouts, "step": step}


def measure(name: str, quick: bool) -> Iterator[tuple[str, float]]:
    """Yield what a benchmark measures, and the value, as far as the GPU's memory allows."""
    try:
        yield from BENCHES[name](quick)
    except torch.OutOfMemoryError as error:
        left_out(name, ". ".join(str(error).split(". ")[:2]))  # with the size that was asked for
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=BENCHES, help="default: all of them")
    parser.add_argument("--quick", action="store_true", help="small shapes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if CUDA:
        distributed.start()
    progress.report_device("float32")
    print(tables.head(["measured", "value"]), flush=True)
    for name in [args.name] if args.name else BENCHES:
        for what, value in measure(name, args.quick):
            print(tables.line([what, f"{value:.3g}"]), flush=True)
    distributed.finish()


if __name__ == "__main__":
    main()
