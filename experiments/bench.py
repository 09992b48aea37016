"""Measure how much faster rollout.py samples than plain `generate`, on one CPU thread.

    python experiments/bench.py            # a few minutes
    python experiments/bench.py --quick    # a small model

The lengths of the responses vary much. Plain `generate` waits for the longest of a batch. Times are
CPU times, which leave other programs of a busy machine out.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import runs
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import rollout

STOPS = range(1, 13)  # ids that end a response: of a random model one token in 85, of 1,024 ids


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
    parser.add_argument("--quick", action="store_true", help="a small model")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    rows, longest = (8, 60) if quick else (96, 256)
    what = f"sampling, {4 * rows} responses up to {longest} tokens in {rows} rows"
    factor = f"{sampling_factor(quick, rows, longest):.3g} times faster"
    heading = ["this code", "compared with", "factor"]
    print(runs.markdown(heading, [[what, "plain `generate`", factor]]))


if __name__ == "__main__":
    main()
