"""Speed and memory, measured: pairs that do the same work, in turn, in one process, as ratios.

    python scripts/bench.py                       # counts head update rollout step memory
    python scripts/bench.py update step --quick   # small shapes: what the tests run; no bar applies

Each pair is this project's fast code and a plain twin that computes the same result (it is checked
to), or TRL's trainer in `step`, which is left out aloud where trl is not installed. A CPU runs on
one thread. A ratio is the median over the repeats of (twin's seconds / ours), each repeat a pair.
The last line of every table names machine, versions and date.
"""

import argparse
import datetime
import functools
import importlib.metadata
import importlib.util
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import rollout
import stapo
from rollout import HeadStats, Response, head_stats, sample, token_stats
from support import bookkeeping, decoding, distributed

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
GIB = 2**30
EOS, PAD = 0, 1  # of the tiny models; every other id is a word
# The published shapes of Qwen3, from which `memory` counts and CUDA models are built.
QWEN3 = {
    name: {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
    }
    for name, hidden, layers, heads, intermediate, tied in (
        ("0.6B", 1024, 28, 16, 3072, True),
        ("1.7B", 2048, 28, 16, 6144, True),
        ("8B", 4096, 36, 32, 12288, False),
        ("14B", 5120, 40, 40, 17408, False),
    )
}
# Bytes a second of the GPU's memory, for the roofline: the vendor's figures.
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12}


# ---------------------------------------- measuring, printing


def clock() -> float:
    """Seconds: of wall-clock time after the GPU's work, or of this process's one CPU thread.

    CPU time leaves out what other programs of a busy machine take; nothing here waits for a disk.
    """
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() if CUDA else time.process_time()


def seconds(call) -> float:
    start = clock()
    call()
    return clock() - start


def in_turn(ours, twin, repeats: int, warm: bool = True) -> float:
    """How many times faster `ours` is: the median over repeats that time one after the other.

    With `warm` each is called once before, so that neither pays for first-time work.
    """
    if warm:
        ours(), twin()
    return statistics.median(1 / (seconds(ours) / seconds(twin)) for _ in range(repeats))


def row(what: str, value: float, *, least: float | None = None, most: float | None = None) -> dict:
    """A line of the table; `least` or `most` is its bar, where it has one."""
    bar = (
        ""
        if least is None and most is None
        else f"at least {least}"
        if least
        else f"at most {most}"
    )
    holds = (least is None or value >= least) and (most is None or value <= most)
    return {"what": what, "value": value, "bar": bar, "holds": holds if bar else None}


def cpu(bar: float) -> float | None:
    """A bar for shapes that keep a CPU busy; on a GPU they measure the host."""
    return None if CUDA else bar


def error(ours: torch.Tensor, twin: torch.Tensor) -> float:
    """The largest difference, relative to the twin's largest entry."""
    return float((ours - twin).abs().max() / twin.abs().max())


def log_normal_lengths(count: int, median: float, longest: int, sigma: float = 0.5) -> list[int]:
    """Quantiles of a log-normal law, cut at `longest`, in a fixed random order."""
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    lengths = (math.log(median) + sigma * torch.special.ndtri(places)).exp().round()
    lengths = lengths.clamp(1, longest).long()
    return lengths[torch.randperm(count, generator=torch.Generator().manual_seed(0))].tolist()


# ---------------------------------------- head: scoring without the logits


def plain_head(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """head_stats's twin: the (N, V) logits and their softmax, all at once."""
    logp = (hidden @ weight.T).log_softmax(-1)
    with torch.no_grad():
        probs = logp.exp()
        entropy = -(probs * logp).sum(-1)
        collision = probs.square().sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy, collision


def cuda_head(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple:
    """head_stats with the chunks that it takes on CUDA, wherever it runs."""
    return HeadStats.apply(hidden, weight, targets, *rollout.HEAD_ROWS["cuda"])


HEADS = {"plain": plain_head, "ours": head_stats, "ours on CUDA": cuda_head}


def head_inputs(tokens: int, words: int, width: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=DEVICE, requires_grad=True)
    weight = torch.empty(words, width, device=DEVICE).normal_(std=0.1).requires_grad_()
    return hidden, weight, torch.randint(words, (tokens,), device=DEVICE)


def run_head(name: str, inputs) -> tuple[torch.Tensor, ...]:
    """Forward and backward; the three statistics and the two gradients."""
    hidden, weight, targets = inputs
    hidden.grad = weight.grad = None
    stats = HEADS[name](hidden, weight, targets)
    (stats[0] * torch.linspace(-1, 1, len(targets), device=DEVICE)).sum().backward()
    return *(s.detach() for s in stats), hidden.grad, weight.grad


def status_bytes(key: str) -> int:
    """VmRSS (resident memory) or VmHWM (its peak in this program) of this process, on Linux."""
    return 1024 * int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def head_memory(name: str, shape: tuple[int, int, int]) -> int:
    """Peak bytes of one forward and backward beyond inputs and gradients, in this process.

    On a CPU it has to be a fresh process: memory that an earlier peak left would hide a new one.
    """
    run_head(name, head_inputs(2, 64, 64))  # libraries load and threads start here, not below
    inputs = head_inputs(*shape)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if CUDA else status_bytes("VmRSS")
    run_head(name, inputs)
    peak = torch.cuda.max_memory_allocated() if CUDA else status_bytes("VmHWM")
    return peak - before - sum(x.grad.nbytes for x in inputs[:2])


def fresh_head_memory(name: str, shape: tuple[int, int, int]) -> int:
    code = (
        f"import bench; bench.torch.set_num_threads(1); print(bench.head_memory('{name}', {shape}))"
    )
    command = [sys.executable, "-c", code]
    here = Path(__file__).parent
    return int(subprocess.run(command, cwd=here, check=True, stdout=subprocess.PIPE).stdout)


def head_error(inputs) -> float:
    """Of 300 tokens, against plain in float64: plain's own float32 softmax is off by 3e-5."""
    hidden, weight, targets = (x.detach()[:300] if x is not inputs[1] else x for x in inputs)
    few = hidden.clone().requires_grad_(), weight.detach().requires_grad_(), targets
    exact = hidden.double().requires_grad_(), weight.detach().double().requires_grad_(), targets
    pairs = zip(run_head("ours", few), run_head("plain", exact), strict=True)
    return max(error(a.double(), b) for a, b in pairs)


def head(quick: bool) -> list[dict]:
    tokens, words, width = (512, 4096, 128) if quick else (4096, 151936, 1024)
    plain = fresh_head_memory("plain", (tokens, words, width))
    small = fresh_head_memory("ours", (tokens, words, width))
    large = fresh_head_memory("ours", (4 * tokens, words, width))
    cuda = fresh_head_memory("ours on CUDA", (tokens, words, width))
    shape = f"{tokens:,} x {words:,} x {width:,}"
    sizes = [f"{size / GIB:.3f}" for size in (plain, small, large)]
    print("head, GiB: plain {}, ours {}, ours at 4 x the tokens {}".format(*sizes))
    inputs = head_inputs(tokens, words, width)
    # A pass at this size takes a CPU a minute: nothing that comes first counts beside that.
    times = [functools.partial(run_head, name, inputs) for name in ("ours", "plain")]
    faster = in_turn(*times, 3, warm=CUDA or quick)
    worst = head_error(inputs)
    return [
        row(f"head, {shape}: memory, plain / ours", plain / small, least=25),
        row("head: the same with CUDA's larger chunks", plain / cuda, least=25),
        row("head: ours at 4 x the tokens / at the tokens", large / small, most=1.1),
        row("head: time, ours / plain", 1 / faster, most=1.35 if CUDA else 1.1),
        row("head: largest relative error, values and gradients", worst, most=1e-5),
    ]


# ---------------------------------------- update: no wasted tokens


def random_model(quick: bool = False, **shape) -> Qwen3ForCausalLM:
    """A random Qwen3 that `stapo.update` accepts; without a shape, one for a single CPU thread."""
    width = 32 if quick else 128
    small = {
        "vocab_size": 1024,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": 2 if quick else 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    ids = {"eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": None}
    config = Qwen3Config(**(shape or small), **ids, max_position_embeddings=32768)
    with DEVICE:
        model = Qwen3ForCausalLM(config).eval()
    model.token_stats = types.MethodType(token_stats, model)
    return model


def random_episodes(model, lengths: list[int], zero_groups: int) -> list[rollout.Episode]:
    """Groups of 8 random responses, half of them right; the first groups have A = 0."""
    episodes = []
    for place, length in enumerate(lengths):
        ids = torch.randint(2, model.config.vocab_size, (16 + length,)).tolist()
        response = Response(ids[:16], ids[16:], False, "")
        advantage = 0.0 if place // 8 < zero_groups else 0.94 * (-1) ** place
        episodes.append(rollout.Episode({}, response, 1.0 if place % 2 else -1.0, advantage))
    stapo.statistics_pass(model, episodes, stapo.Config(quantile_over="all"))
    for episode in episodes:
        episode.old_logp = episode.logp
        episode.noise = torch.rand(len(episode.logp))
    return episodes


def plain_update(model, optimizer, episodes: list[rollout.Episode], cfg: stapo.Config) -> None:
    """stapo.update's twin: 8 rows at a time, padded to the longest of all, nothing left out."""
    denominator = stapo.form_mask(episodes, cfg)["denominator"]
    width = max(len(e.response.prompt_ids) + len(e.response.ids) for e in episodes)
    model.train()
    optimizer.zero_grad()
    for start in range(0, len(episodes), 8):
        batch = episodes[start : start + 8]
        padded = rollout.pad_batch([e.response for e in batch], DEVICE)
        short = width - padded[0].shape[1]
        padded = [functional.pad(t, (0, short)) for t in padded]
        logp, _, _ = model.token_stats(*padded)
        stapo.batch_loss(cfg, batch, logp, padded[2], denominator)[0].backward()
    model.eval()
    torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
    optimizer.step()


def update(quick: bool) -> list[dict]:
    model = random_model(quick)
    lengths = log_normal_lengths(80, *((20, 60) if quick else (300, 1024)))
    episodes = random_episodes(model, lengths, zero_groups=4)
    cfg = stapo.Config(tokens_per_micro_batch=2 * (max(lengths) + 16), lr=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)  # both start from the same weights
    gradients = {}

    def keep_gradient(name):
        gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters()])

    def ours():
        stapo.update(model, optimizer, episodes, cfg)
        keep_gradient("ours")

    def twin():
        plain_update(model, optimizer, episodes, cfg)
        keep_gradient("twin")

    repeats = 1 if quick else 5
    faster = in_turn(ours, twin, repeats)
    difference = error(*gradients.values())  # of one mask: a statistics pass would form another
    share = in_turn(ours, lambda: stapo.statistics_pass(model, episodes, cfg), repeats)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    default_share = in_turn(ours, lambda: stapo.statistics_pass(model, episodes, cfg), repeats)
    what = "update, 80 ragged responses, 4 of 10 groups with A = 0: speed-up"
    return [
        row(what, faster, least=cpu(4)),
        row("update: relative difference of the gradient", difference, most=1e-5),
        row("statistics pass / update, half of the trained right", default_share, most=cpu(0.15)),
        row("the same without gradient checkpointing", share, most=cpu(0.15)),
    ]


# ---------------------------------------- rollout: finished rows are dropped


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Id i is the word `wi`, so that any ids a random model samples have a text and back."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<eos>": EOS, "<pad>": PAD} | {f"w{i}": i for i in range(2, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options = {"eos_token": "<eos>", "pad_token": "<pad>", "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def schedule(model, lengths: list[int], prompt_width: int, *, by_prompt: bool = False) -> Any:
    """Make row i of a batch of prompts end after lengths[i] tokens, whoever calls `generate`.

    The words fall into as many classes as there are rows, and row i may sample those of class i
    alone: a later call knows the row by the class of its last token, wherever in the batch it has
    moved. With by_prompt, the last word of a prompt names its class already, so that prompts may
    start at any time. The words themselves are sampled from the model. What this adds to a step is
    the same for everyone; a forward without a cache (scoring) is untouched. The handle that is
    returned takes it off again.
    """
    word_class = torch.arange(model.config.vocab_size, device=DEVICE) % len(lengths)
    word_class[[EOS, PAD]] = -1
    ends = torch.tensor(lengths, device=DEVICE)

    def hook(_module, _args, kwargs, output):
        if kwargs.get("past_key_values") is None:
            return
        sampled = kwargs["position_ids"][:, -1] + 1 - prompt_width  # (B,) tokens of the response
        rows = word_class[kwargs["input_ids"][:, -1]]
        if not by_prompt:
            rows = torch.where(sampled > 0, rows, torch.arange(len(rows), device=DEVICE))
        allowed = word_class == rows[:, None]  # (B, V)
        over = sampled + 1 >= ends[rows]
        allowed[over] = False
        allowed[over, EOS] = True
        output.logits[:, -1].masked_fill_(~allowed, float("-inf"))

    return model.register_forward_hook(hook, with_kwargs=True)


def plain_sample(
    model, prompts: list[list[int]], max_new_tokens: int, batch_size: int
) -> list[list[int]]:
    """sample's twin: `generate` in batches, which computes every row until its last one ends."""
    rows = []
    for start in range(0, len(prompts), batch_size):
        ids = torch.tensor(prompts[start : start + batch_size], device=DEVICE)  # no padding
        config = GenerationConfig(do_sample=True, temperature=1.0, top_p=1.0, top_k=0)
        config.eos_token_id, config.pad_token_id, config.max_new_tokens = EOS, PAD, max_new_tokens
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        rows += [decoding.until_stop(row, {EOS}) for row in out[:, ids.shape[1] :].tolist()]
    return rows


def scheduled_prompts(words: int, count: int) -> list[list[int]]:
    """Random prompts of 16 words; the last word of prompt i is of `schedule`'s class i."""
    prompts = torch.randint(2, words, (count, 16))
    prompts[:, -1] = torch.arange(count) + count  # of class i, and neither EOS nor PAD
    return prompts.tolist()


def rollouts(quick: bool) -> list[dict]:
    """As many responses as slots, then four times as many: freed slots are filled again."""
    table, large = [], CUDA and not quick
    slots, median, longest = (8, 20, 60) if quick else (96, 79, 256)
    model = random_model(quick, **(QWEN3["1.7B"] if large else {}))
    model = model.bfloat16() if large else model
    tokenizer = word_tokenizer(model.config.vocab_size)
    for count in (slots, 4 * slots):
        lengths = log_normal_lengths(count, median, longest)
        prompts = scheduled_prompts(model.config.vocab_size, count)
        hook, sampled = schedule(model, lengths, prompt_width=16, by_prompt=True), {}

        def ours(prompts=prompts, sampled=sampled):
            options = {"max_new_tokens": longest, "batch_size": slots}
            responses = sample(model, tokenizer, prompts, **options)
            sampled["ours"] = [len(r.ids) for r in responses]

        def twin(prompts=prompts, sampled=sampled):
            responses = plain_sample(model, prompts, longest, slots)
            sampled["twin"] = list(map(len, responses))

        faster = in_turn(ours, twin, 2 if quick or large else 3)
        hook.remove()
        if not sampled["ours"] == sampled["twin"] == lengths:
            raise RuntimeError(f"the two rollouts did not do the same work: {sampled}, {lengths}")
        what = f"rollout, {count} responses up to {longest} in {slots} slots: speed-up"
        # On a GPU a step costs the host the same for few rows as for many, so that dropping rows
        # gains little there; fewer steps do.
        least = {slots: 1.0, 4 * slots: 1.3} if large else {slots: 2.0, 4 * slots: 2.4}
        table.append(row(what, faster, least=least[count]))
    return table + (decoding_step() if large else [])


def slots_of_text(model, rows: int, length: int) -> Callable[[int], torch.Tensor]:
    """decoding.decode for a number of steps after `length` tokens in each of `rows` slots."""
    cache = decoding.SlotCache(length + 64, model.device, model.dtype)
    cache.reserve(rows, length + 64)
    forward = functools.partial(model, past_key_values=cache, use_cache=True, logits_to_keep=1)
    texts, seeds = [[7] * length for _ in range(rows)], list(range(rows))
    choose = lambda _token, logits, numbers: decoding.next_token(logits, numbers)  # noqa: E731
    return lambda n: decoding.decode(forward, cache, texts, seeds, n, choose)


def decoding_step(rows: int = 64, length: int = 2000) -> list[dict]:
    """Milliseconds of a decoding step, and the memory bandwidth's share of them."""
    model = random_model(**QWEN3["1.7B"]).bfloat16()
    with torch.inference_mode():
        decode = slots_of_text(model, rows, length)
        decode(8)
        taken = min(seconds(lambda: decode(32)) / 32 for _ in range(3))
    table = [row(f"decoding step, 1.7B, {rows} rows x {length:,} tokens: ms", 1000 * taken)]
    name = torch.cuda.get_device_name()
    bandwidth = next((speed for key, speed in BANDWIDTH.items() if key in name), None)
    if bandwidth is None:
        print(f"rollout: no memory bandwidth is listed for {name}, so there is no roofline")
        return table
    # Weights and cache are read once a step; the host needs about 20 ms for its kernels.
    least = ideal_step_bytes(model.config.to_dict(), rows, length) / bandwidth
    what = "decoding step: share of the memory-bandwidth roofline"
    return [*table, row(what, least / taken, least=0.15)]


def ideal_step_bytes(shape: dict, rows: int, length: int) -> int:
    """The least that a decoding step can move in bfloat16: weights and cache, read once."""
    layer, root = parameter_shapes(shape)
    weights = 2 * sum(map(math.prod, layer * shape["num_hidden_layers"] + root))
    return weights + rows * length * cache_bytes_per_token(shape, 2)


# ---------------------------------------- counts: what any machine can count of the GPU path


class Count(TorchDispatchMode):
    """Kernel launches and bytes moved by what runs on the meta device, attention included.

    A kernel reads its inputs and writes its outputs once; a lookup moves what it finds, a write
    into a part of a tensor that part. Views and empty tensors are free.
    """

    FREE = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view")
    FOUND = ("aten::embedding", "aten::index.Tensor", "aten::gather", "aten::searchsorted.Tensor")
    FILLED = ("aten::fill_", "aten::zero_", "aten::zeros", "aten::new_zeros", "aten::arange")
    KERNELS = {"aten::logsumexp": 9, "aten::linalg_vecdot": 2}

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.bytes = 0

    def __enter__(self):
        self.attention = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = self.fused_attention
        return super().__enter__()

    def __exit__(self, *error):
        functional.scaled_dot_product_attention = self.attention
        return super().__exit__(*error)

    def fused_attention(self, query, key, value, attn_mask=None, **_) -> torch.Tensor:
        """One kernel, as on CUDA; an additive mask is read as it is."""
        mask = [] if attn_mask is None else [attn_mask]
        self.add(1, query, query, key, value, *mask)  # the output is as large as the query
        return torch.empty_like(query)

    def add(self, launches: int, *moved: torch.Tensor) -> None:
        self.launches += launches
        # an expanded dimension (stride 0) is there once
        sizes = ([n for n, s in zip(t.shape, t.stride()) if s] for t in moved)
        self.bytes += sum(t.element_size() * math.prod(n) for t, n in zip(moved, sizes))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name()
        outs = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        ins = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if views or name.startswith(self.FREE):
            return out
        if name.startswith(self.FOUND):
            self.add(1, *outs, *outs)
        elif name.startswith(self.FILLED):
            self.add(1, *outs)
        elif name.startswith(("aten::index_put_", "aten::copy_")):
            new = args[2] if "index_put" in name else args[1]
            self.add(1, new, new)
        else:
            self.add(self.KERNELS.get(name.split(".")[0], 1), *ins, *outs)
        return out


def counted(call) -> Count:
    with Count() as count, torch.no_grad():
        call()
    return count


def counted_step(rows: int = 64, length: int = 2000) -> tuple[Count, Count]:
    """A decoding step of the 1.7B shape in bfloat16: in slots, and with transformers' cache."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**QWEN3["1.7B"])).eval().bfloat16()
        width = (rows, 8, length, 128)
        plain = DynamicCache(config=model.config)
        for layer in range(model.config.num_hidden_layers):
            plain.update(*torch.empty(2, *width, dtype=torch.bfloat16), layer)
        position = torch.full((rows, 1), length)
        inputs = {"input_ids": position, "position_ids": position, "past_key_values": plain}

    def with_plain_cache():
        logits = model(**inputs, use_cache=True, logits_to_keep=1).logits
        numbers = torch.rand_like(position, dtype=torch.float64)
        decoding.next_token(logits[:, -1].float(), numbers)

    plainly = counted(with_plain_cache)
    decode = slots_of_text(model, rows, length)
    with torch.no_grad():
        decode(1)  # makes the cache
    return counted(lambda: decode(1)), plainly


def counted_head(rows: tuple[int, int], tokens: int = 4096) -> Count:
    """HeadStats' forward and backward at the 1.7B shape."""
    shape = QWEN3["1.7B"]
    with torch.device("meta"):
        hidden = torch.empty(tokens, shape["hidden_size"], requires_grad=True)
        weight = torch.empty(shape["vocab_size"], shape["hidden_size"], requires_grad=True)
        targets = torch.zeros(tokens, dtype=torch.long)
    with Count() as count:
        HeadStats.apply(hidden, weight, targets, *rows)[0].sum().backward()
    return count


def steps_in_batches(lengths: list[int], slots: int) -> int:
    return sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))


def steps_in_slots(lengths: list[int], slots: int, longest: int) -> int:
    """Decoding steps where a slot takes the next response at the next look at the tokens."""
    waiting, running, steps = lengths[::-1], [], 0  # running: (tokens to come, tokens allowed)
    while waiting or running:
        while waiting and len(running) < slots:
            running.append((waiting.pop(), longest))
        taken = min(decoding.CHECK_EVERY, *(allowed for _, allowed in running))
        running = [(left - taken, allowed - taken) for left, allowed in running if left > taken]
        steps += taken
    return steps


def scheduled_steps(lengths: list[int], slots: int, longest: int) -> int:
    """The same by counting a rollout's forwards."""
    model, steps = random_model(quick=True), []
    tokenizer = word_tokenizer(model.config.vocab_size)
    schedule(model, lengths, prompt_width=16, by_prompt=True)
    model.register_forward_hook(
        lambda _model, _args, kwargs, _out: steps.append(kwargs["input_ids"].shape[1] == 1),
        with_kwargs=True,
    )
    prompts = scheduled_prompts(model.config.vocab_size, len(lengths))
    options = {"max_new_tokens": longest, "batch_size": slots}
    responses = sample(model, tokenizer, prompts, **options)
    if [len(r.ids) for r in responses] != lengths:
        raise RuntimeError("the responses do not have the lengths that they should have")
    return sum(steps)


def counts(quick: bool) -> list[dict]:
    ours, plain = counted_step()
    ideal = ideal_step_bytes(QWEN3["1.7B"], 64, 2000) / 1e9
    what = "decoding step, 1.7B, 64 rows x 2,000 tokens, counted: GB"
    table = [
        row(f"{what} (at least {ideal:.1f})", ours.bytes / 1e9, most=22),
        row("the same with transformers' cache", plain.bytes / 1e9),
        row("decoding step: kernel launches", ours.launches, most=int(1.05 * plain.launches)),
    ]
    cpu, cuda = (counted_head(rollout.HEAD_ROWS[device]).launches for device in ("cpu", "cuda"))
    what = "head, 4,096 tokens: kernel launches, CUDA's chunks / the CPU's"
    table.append(row(what, cuda / cpu, most=0.5))
    count, slots, longest = (32, 8, 60) if quick else (384, 96, 1024)
    for sigma in (0.5, 1.0):
        lengths = log_normal_lengths(count, 20 if quick else 79, longest, sigma)
        steps = steps_in_slots(lengths, slots, longest)
        if steps != scheduled_steps(lengths, slots, longest):
            raise RuntimeError("a rollout takes other steps than the count of them")
        bar = 1.15 * sum(lengths) / slots + max(lengths)
        what = f"decoding steps, {count} responses in {slots} slots, log-normal, sigma {sigma}"
        table.append(row(what, steps, most=round(bar)))
        batches = steps_in_batches(lengths, slots)
        table.append(row("the same in batches that wait for their longest", batches))
    lengths = log_normal_lengths(2048, 3000, 15360, 1.0)
    slots = slots_that_fit(QWEN3["1.7B"], 1)
    what = f"decoding steps of the paper's step on one GPU of 80 GB ({slots} slots), simulated"
    mean = sum(lengths) / len(lengths)
    what += f": 2,048 responses, log-normal (sigma 1, mean {mean:,.0f}, at most 15,360)"
    table.append(row(what, steps_in_slots(lengths, slots, 15360)))
    batches = steps_in_batches(lengths, slots)
    return [*table, row("the same in batches that wait for their longest", batches)]


# ---------------------------------------- step: against TRL's trainer


def first_word_is_even(text: str) -> float:
    """A reward for both trainers: in `schedule`'s classes it makes half of every group right."""
    return 1.0 if text and int(text.split()[0][1:]) % 2 == 0 else -1.0


class Turns:
    """After four of TRL's optimiser steps one of our steps: in turn, in one process.

    Of each turn (the first warms up), `ratios` holds TRL's time over ours, `peaks` the bytes of
    both beyond weights, optimiser states and the gradients of one model.
    """

    def __init__(self, ours: Callable, peer: torch.nn.Module):
        self.ours, self.peer, self.ratios, self.peaks = ours, peer, [], []

    def restart(self) -> None:
        self.resident = torch.cuda.memory_allocated() if CUDA else 0
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        self.start = clock()

    def peak(self) -> int:
        gradients = sum(4 * p.numel() for p in self.peer.parameters())
        return torch.cuda.max_memory_allocated() - self.resident - gradients if CUDA else 0

    def after_step(self, number: int) -> None:
        if number % 4 == 0:
            trl_seconds, trl_peak = clock() - self.start, self.peak()
            self.restart()
            self.ratios.append(trl_seconds / seconds(self.ours))
            self.peaks.append((self.peak(), trl_peak))
            self.restart()


def train_with_trl(
    model, tokenizer, texts: list[str], reward: Callable, turns: Turns, rows: int, options: dict
) -> None:
    """TRL's GRPOTrainer on batches of 8 x 8 responses, in micro-batches of `rows`."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class InTurn(TrainerCallback):
        def on_train_begin(self, *_, **__):
            turns.restart()

        def on_step_end(self, _args, state, *_, **__):
            turns.after_step(state.global_step)

    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=16 // rows,
            steps_per_generation=64 // rows,
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
        GRPOTrainer(model, reward, args, data, **host).train()


def step(quick: bool) -> list[dict]:
    """A rollout batch of 8 x 8 responses and its four optimiser steps, statistics pass included."""
    if importlib.util.find_spec("trl") is None:
        print("step: trl is not installed (pip install trl): left out")
        return []
    large, repeats = CUDA and not quick, 2 if quick or CUDA else 5
    longest = 1024 if large else 40 if quick else 256
    lengths = log_normal_lengths(64, 300 if large else 15 if quick else 79, longest)
    mine, peer = pair = [random_model(quick, **(QWEN3["1.7B"] if large else {})) for _ in "ab"]
    tokenizer = word_tokenizer(mine.config.vocab_size)
    if large:
        distributed.shard(mine)  # this is what makes the compute bfloat16
    for model in pair:
        if large:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        schedule(model, lengths, prompt_width=16)
    prompts = torch.randint(2, mine.config.vocab_size, (8, 16)).tolist()
    texts = [" ".join(f"w{i}" for i in ids) for ids in prompts]
    pairs = zip(texts, prompts, strict=True)
    problems = [{"problem": text, "answer": "", "prompt_ids": ids} for text, ids in pairs]
    cfg = stapo.Config(batch_size=8, mini_batch_size=2, group_size=8, max_new_tokens=longest)
    cfg.tokens_per_micro_batch = 2 * (longest + 16)
    optimizer = torch.optim.AdamW(mine.parameters(), lr=cfg.lr, fused=CUDA)
    tokens = {"ours": [], "trl": []}  # of each step
    graded = lambda text, _: first_word_is_even(text)  # noqa: E731

    def ours():
        """What stapo.train does in a step."""
        number = len(tokens["ours"]) + 1
        mini_batches = stapo.collect(mine, tokenizer, problems, number, cfg, graded)
        for number, mini_batch in enumerate(mini_batches):
            if number > 0:
                stapo.statistics_pass(mine, mini_batch, cfg)
            stapo.update(mine, optimizer, mini_batch, cfg)
        optimizer.zero_grad()  # as TRL leaves it, so that the peaks compare
        episodes = [episode for mini_batch in mini_batches for episode in mini_batch]
        stapo.entropy_metrics(episodes), bookkeeping.rollout_metrics(episodes, cfg)
        tokens["ours"].append(sum(len(e.response.ids) for e in episodes))

    def reward(completions, completion_ids, **_):
        tokens["trl"].append(sum(map(len, completion_ids)))
        return [first_word_is_even(text) for text in completions]

    rows = 2 if large else 16  # of a micro-batch; a mini-batch is 16 responses
    options = {"max_completion_length": longest, "max_steps": 4 * (repeats + 1), "bf16": large}
    options |= {"learning_rate": cfg.lr, "weight_decay": cfg.weight_decay}
    options |= {"gradient_checkpointing": large}
    turns = Turns(ours, peer)
    train_with_trl(peer, tokenizer, texts, reward, turns, rows, options)
    if set(tokens["ours"]) | set(tokens["trl"]) != {sum(lengths)}:
        raise RuntimeError(f"the two trainers did not do the same work: {tokens}")
    faster, (our_peak, trl_peak) = statistics.median(turns.ratios[1:]), turns.peaks[-1]
    what = f"step, 64 responses up to {longest}, TRL's micro-batch {rows} rows: speed-up"
    table = [row(what, faster, least=1.5 if large else 2)]
    what = "step: peak beyond weights, gradients and optimiser, ours / TRL's"
    return table + ([row(what, our_peak / trl_peak)] if large else [])


# ---------------------------------------- memory: bytes on each GPU


def parameter_shapes(shape: dict) -> tuple[list[tuple], list[tuple]]:
    """Shapes of one decoder layer's parameters, and of those outside the layers."""
    hidden, inner, words = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    head = shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    attention = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    mlp = [(inner, hidden), (inner, hidden), (hidden, inner)]
    norms = [(head,), (head,), (hidden,), (hidden,)]
    root = [(words, hidden), (hidden,)] + [(words, hidden)] * (not shape["tie_word_embeddings"])
    return attention + mlp + norms, root


def cache_bytes_per_token(shape: dict, itemsize: int) -> int:
    """Keys and values of one token in every layer."""
    width = shape["num_key_value_heads"] * shape["head_dim"]
    return 2 * shape["num_hidden_layers"] * width * itemsize


def layer_bytes_per_token(shape: dict) -> int:
    """What one decoder layer saves for its backward in bfloat16, its input not counted."""
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    norms = 2 * (4 * hidden + 4 + 2 * hidden)  # float32 input and scale, bfloat16 output
    attention = 2 * hidden + 10 * (heads + kv_heads) * head + 8 * heads + 4 * kv_heads + 4 * head
    return norms + attention + 2 * hidden + 8 * inner


def bytes_per_gpu(
    shape: dict, gpus: int, *, micro_tokens: int = 16384, response_tokens: int = 1024 + 15360
) -> dict[str, int]:
    """What stapo.py holds on each GPU under FSDP2, and its two peaks, in bytes.

    Weights, gradients and AdamW's states are float32 shards (rank 0's, which are never smaller
    than another's); compute is bfloat16. `update` is the peak of an update with gradient
    checkpointing and micro-batches of `micro_tokens`; `rollout` is what a rollout holds before
    its first token; a sequence of `response_tokens` adds `cache`.
    """
    layer, root = parameter_shapes(shape)
    layers, hidden, words = shape["num_hidden_layers"], shape["hidden_size"], shape["vocab_size"]
    every = layer * layers + root
    shard = sum(math.ceil(s[0] / gpus) * math.prod(s[1:]) for s in every)
    layer_size, root_size = (sum(map(math.prod, group)) for group in (layer, root))
    chunk, _ = rollout.HEAD_ROWS["cuda"]
    held = {
        "weights": 4 * shard,
        "gradients": 4 * shard,
        "adamw": 8 * shard + 4 * len(every),  # two moments, and a step count for each tensor
        "gathered": 2 * sum(map(math.prod, every)),
        "cache": response_tokens * cache_bytes_per_token(shape, 2),
        "inputs": 2 * layers * hidden * micro_tokens,  # of each layer: what checkpointing keeps
        "layer": micro_tokens * layer_bytes_per_token(shape),
        # a chunk of logits (float32, its gradient in bfloat16), the head's gradient
        "head": 6 * chunk * words + 6 * words * hidden + 4 * micro_tokens * hidden,
    }
    states = held["weights"] + held["gradients"] + held["adamw"]
    # The root's bfloat16 weights stay through the update; its gradient does from the head on.
    moments = (
        held["inputs"] + held["head"],
        # two layers gathered, one layer's gradient in bfloat16 and, to be reduced, in float32
        held["inputs"] + held["layer"] + 2 * words * hidden + 10 * layer_size,
        2 * words * hidden + 6 * root_size,
    )
    held["update"] = states + 2 * root_size + max(moments)
    held["rollout"] = states - held["gradients"] + held["gathered"]
    return held


def slots_that_fit(
    shape: dict, gpus: int, response_tokens: int = 1024 + 15360, card: float = 80e9
) -> int:
    """What rollout.rows_that_fit finds on a GPU of `card` bytes that holds nothing else."""
    per_row = rollout.bytes_per_row(Qwen3Config(**shape), response_tokens, 2)
    return int(max(0, 0.8 * (card - bytes_per_gpu(shape, gpus)["rollout"])) / per_row)


CARDS = (  # model, GPUs, GB of each
    *(("0.6B", 1, 24), ("0.6B", 1, 48), ("1.7B", 1, 24), ("1.7B", 1, 48), ("1.7B", 1, 80)),
    *(("1.7B", 4, 24), ("1.7B", 8, 80), ("8B", 8, 48), ("8B", 8, 80), ("8B", 64, 80)),
    *(("14B", 8, 80), ("14B", 64, 80)),
)


def memory_table() -> str:
    """Markdown: GB (1e9 bytes) on each GPU at the default flags, and the checkpoint's on disk."""
    heading = ("model", "GPUs x GB", "weights, gradients, AdamW", "peak of an update")
    heading += ("a rollout without its cache", "rows of 16,384 tokens", "rows of 5,120")
    heading += ("fits", "checkpoint")
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    for name, gpus, card in CARDS:
        shape = QWEN3[name]
        held = bytes_per_gpu(shape, gpus)
        states = held["weights"] + held["gradients"] + held["adamw"]
        fit = [slots_that_fit(shape, gpus, tokens, 1e9 * card) for tokens in (16384, 5120)]
        fits = "yes" if held["update"] <= 0.95e9 * card and fit[0] else "no"
        cells = [f"{x / 1e9:.1f}" for x in (states, held["update"], held["rollout"])]
        disk = 3 * bytes_per_gpu(shape, 1)["weights"] / 1e9  # float32 weights and two moments
        cells += [*map(str, fit), fits, f"{disk:.0f}"]
        lines.append(f"| {name} | {gpus} x {card} | {' | '.join(cells)} |")
    return "\n".join(lines)


def memory(quick: bool) -> list[dict]:
    print(memory_table(), end="\n\n")
    if not CUDA or quick:
        print("memory: no GPU, so the sums meet no measured peak here" if not CUDA else "")
        return []
    model = random_model(**QWEN3["1.7B"])
    distributed.shard(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    episodes = random_episodes(model, [1008] * 16, zero_groups=0)  # 16 x 1,024 = 16,384 tokens
    for _ in range(2):  # the first makes AdamW's states
        torch.cuda.reset_peak_memory_stats()
        stapo.update(model, optimizer, episodes, stapo.Config())
    ratio = torch.cuda.max_memory_allocated() / bytes_per_gpu(QWEN3["1.7B"], 1)["update"]
    what = "memory, 1.7B on one GPU: |measured peak / sum - 1|"
    return [row(what, abs(ratio - 1), most=0.15)]


# ---------------------------------------- the table


def processor() -> str:
    if CUDA:
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, 1 thread"


def report(table: list[dict]) -> str:
    lines = ["| measured | value | bar | holds |", "|---|---|---|---|"]
    for line in table:
        holds = {None: "", True: "yes", False: "**no**"}[line["holds"]]
        value = line["value"]
        value = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
        lines.append(f"| {line['what']} | {value} | {line['bar']} | {holds} |")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if importlib.util.find_spec("trl"):
        versions += f", trl {importlib.metadata.version('trl')}"
    return "\n".join([*lines, "", f"{processor()}; {versions}; {datetime.date.today()}"])


BENCHES = {"counts": counts, "head": head, "update": update, "rollout": rollouts, "step": step}
BENCHES["memory"] = memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--quick", action="store_true", help="small shapes; no bar applies")
    args = parser.parse_args()
    if unknown := set(args.names) - set(BENCHES):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(BENCHES)}")
    torch.set_num_threads(1)
    if CUDA:
        distributed.start()
    else:
        print("no GPU: every CUDA part is left out, and nothing below speaks for one")
    table = []
    for name in args.names or BENCHES:
        table += BENCHES[name](args.quick)
    print(report([line | {"bar": "", "holds": None} for line in table] if args.quick else table))
    distributed.finish()


if __name__ == "__main__":
    main()
