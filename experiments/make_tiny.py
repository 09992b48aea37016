"""Make the tiny base model that the tests and the README's first command train.

    python experiments/make_tiny.py --output tests/tiny
    python scripts/tokens.py @tests/tiny/args    # shows its tokens

The model is a Qwen3 of 379 thousand parameters, pre-trained on sums like `Q: 7+12-5=?`. It can work
step by step and seldom does, so reinforcement learning has something to improve. One seed decides
everything. Another kind of processor rounds differently.

1. The skill. Three quarters of the texts work the sum out: `First 7+12=19. Then 19-5=14. So ...`.
2. The habit. The other texts guess at once: `First so \\boxed{14}`. In most of the worked texts the
   token that decides to work, after the opening word, is left out of the loss. So about one
   response in twenty begins to work.
3. The noise. A share of the response tokens is replaced by random tokens, drawn evenly from 301.
   The sums need 45 of them. So wherever the model is sure of a token, 300 others have a little
   probability, as in a large vocabulary. In right answers they are the spurious tokens of Sec. 3.3.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

Text = tuple[str, list[int], list[int]]  # a problem, the ids of a response, and their labels
EOS, PAD = "<|endoftext|>", "<|pad|>"
OPENINGS = ["First", "Let", "Start", "Well"], [8, 3, 2, 1]  # words, weights
LINKS = ["Then", "Next", "Now", "And", "Also", "Wait"], [8, 4, 3, 2, 1, 1]
# Words of no sum. They and their parts become tokens, which occur as noise only.
STRAY = """about above after again along always among another around because become before behind
below between bring cannot carry change close common could during early either enough every follow
friend garden gentle happen however island kitchen letter little maybe morning mountain never night
number often orange other paper people perhaps picture place point quiet rather river school second
should silver simple small something sometimes station still street summer table thing though
thought through together under until usual village water weather where which while winter without
world would write yellow""".split()
WORKED = 0.75  # share of texts that work step by step
HABIT = 0.03  # share of worked texts from which the model learns to begin the work
NOISE = 0.08  # default of --noise: share of response tokens that are replaced


def problem(rng: random.Random) -> str:
    """Draw a sum of three to five operands from 2 to 20, such as `Q: 7+12-5=?`."""
    text = str(rng.randint(2, 20))
    for _ in range(rng.randint(2, 4)):
        text += f"{rng.choice('+-')}{rng.randint(2, 20)}"
    return f"Q: {text}=?"


def terms(problem: str) -> list[str]:
    """Split a sum into its terms: `Q: 7+12-5=?` -> ["7", "+12", "-5"]."""
    return problem[3:-2].replace("+", " +").replace("-", " -").split()


def solution(problem: str, worked: bool, rng: random.Random) -> str:
    """Write a response: `First 7+12=19. Then 19-5=14. So \\boxed{14}` or `First so \\boxed{14}`."""
    word = rng.choices(*OPENINGS)[0]
    if not worked:
        return f"{word} so \\boxed{{{sum(map(int, terms(problem)))}}}"
    start, *rest = terms(problem)
    total, text = int(start), ""
    for term in rest:
        text += f"{word} {total}{term}={total + int(term)}. "
        total, word = total + int(term), rng.choices(*LINKS)[0]
    return f"{text}So \\boxed{{{total}}}"


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, in which any text has ids and each digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    single_digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([single_digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=464,
        min_frequency=20,
        special_tokens=[EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a small Qwen3 with random weights, tied embeddings and grouped queries."""
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=(len(tokenizer) // 32 + 1) * 32,  # above the vocabulary, as in Qwen3
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        **ids,
    )
    model = Qwen3ForCausalLM(config)
    # The settings of Qwen3: tests see whether a sampler inherits them by mistake.
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    model.generation_config = GenerationConfig(**sampling, **ids)
    return model


def printable_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the ids of printable ASCII texts. Noise is drawn from them."""
    texts = {i: tokenizer.decode([i]) for i in range(len(tokenizer))}
    special = set(tokenizer.all_special_ids)
    return [i for i, t in texts.items() if i not in special and t.isascii() and t.isprintable()]


def noisy(ids: list[int], printable: list[int], noise: float, rng: random.Random) -> list[int]:
    return [rng.choice(printable) if rng.random() < noise else i for i in ids]


def fresh_problem(held_out: set[str], rng: random.Random) -> str:
    while (question := problem(rng)) in held_out:
        pass
    return question


def pretrain(
    tokenizer: PreTrainedTokenizerFast, draw: Callable[[], Text], steps: int, output: Path
) -> None:
    """Pre-train a model on batches of 64 texts, each of which `draw` makes, and save it."""
    torch.set_num_threads(1)  # the number of cores must not change the rounding
    model, pad = make_model(tokenizer), tokenizer.pad_token_id
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.0),  # AdamW alone learns far slower
        torch.optim.AdamW(others, lr=3e-3, weight_decay=0.0),
    ]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    seen: set[int] = set()
    for step in tqdm(range(steps), desc="pre-training"):
        texts = [draw() for _ in range(64)]
        prompts = [tokenizer(f"{question}\n").input_ids for question, _, _ in texts]
        ids = [torch.tensor(p + response) for p, (_, response, _) in zip(prompts, texts)]
        labels = [torch.tensor([-100] * len(p) + each) for p, (_, _, each) in zip(prompts, texts)]
        ids, labels = pad_sequence(ids, True, pad), pad_sequence(labels, True, -100)  # (64, L)
        seen.update(ids.flatten().tolist())
        model(ids, labels=labels).loss.backward()
        scale = min(1, (step + 1) / 20, (steps - step) / (0.6 * steps))
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad()
    # Ids that are in no text (pad, odd bytes, spare rows of the head) have all moved to one vector,
    # which gives them low logits. A longer vector makes their probability too small to be sampled.
    absent = set(range(model.config.vocab_size)) - seen | {pad}
    with torch.no_grad():
        model.lm_head.weight[sorted(absent)] *= 8
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--noise", type=float, default=NOISE, help="share of tokens replaced")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    distinct = list(dict.fromkeys(problem(rng) for _ in range(5000)))
    rows = [{"problem": q, "answer": str(sum(map(int, terms(q))))} for q in distinct[:4256]]
    held_out = {row["problem"] for row in rows[:256]}
    texts = [f"{q}\n{solution(q, rng.random() < WORKED, rng)}" for q in distinct]
    tokenizer = make_tokenizer(texts + 20 * STRAY)
    printable = printable_ids(tokenizer)

    def draw() -> Text:
        question = fresh_problem(held_out, rng)
        worked = rng.random() < WORKED
        response = tokenizer(solution(question, worked, rng)).input_ids
        response = noisy(response, printable, args.noise, rng) + [tokenizer.eos_token_id]
        labels = list(response)
        if worked and rng.random() >= HABIT:
            labels[1] = -100  # the token after the opening word, which begins the work
        return question, response, labels

    pretrain(tokenizer, draw, 1200, args.output)
    for name, part in (("test", rows[:256]), ("train", rows[256:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (args.output / f"{name}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
