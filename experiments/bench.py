"""Measure memory and speed beside other code that does the same work, on one CPU thread.

    python experiments/bench.py            # half an hour
    python experiments/bench.py --quick    # small shapes

Times are CPU times, which leave other programs of a busy machine out.
"""

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import runs
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import rollout
from support.head import HeadStats

HEADS = ("our_head", "plain_head")
STOPS = range(1, 13)  # ids that end a response: of a random model one token in 85, of 1,024 ids


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


def run_head(forward: Callable, tokens: int, words: int, width: int) -> tuple[float, int]:
    """Run one forward and backward: CPU seconds, and peak bytes beyond inputs and gradients.

    The bytes are right in a process that had no higher peak before. Linux only.
    """

    def resident(key: str) -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(rf"{key}:\s+(\d+) kB", status)[1])

    torch.set_num_threads(1)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.empty(words, width).normal_(std=0.1).requires_grad_()
    targets, before, start = torch.randint(words, (tokens,)), resident("VmRSS"), time.process_time()
    logp, _ = forward(hidden, weight, targets)
    (logp * torch.linspace(-1, 1, tokens)).sum().backward()
    extra = resident("VmHWM") - before - hidden.grad.nbytes - weight.grad.nbytes
    return time.process_time() - start, extra


def head_costs(name: str, *shape: int) -> tuple[float, float]:
    """Call run_head in a process of its own, after a small call that loads libraries."""
    code = f"from bench import *; run_head({name}, 2, 64, 64); print(*run_head({name}, *{shape}))"
    command = [sys.executable, "-c", code]
    said = subprocess.check_output(command, cwd=Path(__file__).parent, text=True)
    return tuple(map(float, said.split()))


def random_model(width: int, layers: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4}
    ids = {"eos_token_id": list(STOPS), "pad_token_id": 0, "bos_token_id": None}
    return Qwen3ForCausalLM(Qwen3Config(**shape, **heads, **ids, vocab_size=1024)).eval()


def our_sample(model: Qwen3ForCausalLM, prompts: torch.Tensor, longest: int, rows: int) -> int:
    """Return the number of tokens that were sampled."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(1024)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0")
    options = {"max_new_tokens": longest, "batch_size": rows}
    sampled = rollout.in_order(rollout.sample(model, tokenizer, prompts.tolist(), **options))
    return sum(len(response.ids) for response in sampled)


def plain_sample(model: Qwen3ForCausalLM, prompts: torch.Tensor, longest: int, rows: int) -> int:
    """The same with plain `generate`, in batches. Tokens behind a stop id do not count."""
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    tokens = 0
    for batch in prompts.split(rows):
        mask = torch.ones_like(batch)
        ids = model.generate(batch, attention_mask=mask, max_new_tokens=longest, **options)
        tokens += int((ids[:, batch.shape[1] :] != model.config.pad_token_id).sum())
    return tokens


def sampling_factor(quick: bool, rows: int, longest: int) -> float:
    """How many times more tokens in a second: the median over three pairs, which run in turn."""
    model = random_model(32, 2) if quick else random_model(128, 4)
    prompts = torch.randint(13, 1024, (4 * rows, 16))

    def speed(sample: Callable[..., int]) -> float:
        start = time.process_time()
        return sample(model, prompts, longest, rows) / (time.process_time() - start)

    speed(our_sample), speed(plain_sample)  # first calls are slower
    return statistics.median(speed(our_sample) / speed(plain_sample) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    tokens, words, width = (512, 4096, 128) if quick else (4096, 151936, 1024)
    rows, longest = (8, 60) if quick else (96, 256)
    ours, plain = (head_costs(name, tokens, words, width)[1] for name in HEADS)
    what = f"output head, {tokens:,} tokens x {words:,} words x {width:,}, forward and backward"
    table = [[what, "all logits at once", f"{plain / ours:.3g} times less extra memory"]]
    ours, plain = (head_costs(name, tokens // 4, words, width)[0] for name in HEADS)
    what = f"the same with {tokens // 4:,} tokens"
    table += [[what, "all logits at once", f"{ours / plain:.3g} times the time"]]
    what = f"sampling, {4 * rows} responses up to {longest} tokens in {rows} rows"
    factor = f"{sampling_factor(quick, rows, longest):.3g} times faster"
    table += [[what, "plain `generate`", factor]]
    print(runs.markdown(["this code", "compared with", "factor"], table))


if __name__ == "__main__":
    main()
