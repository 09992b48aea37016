"""Measure what the gradient of the silenced tokens alone does to the tiny model in one step.

    python experiments/causal.py                                             # the base model
    python experiments/causal.py --model RUN/checkpoints/step_000028          # a trained model

1. Every batch is sampled from the same model, pi_old.
2. Four sets of tokens are compared: the tokens that STAPO silences, the candidates that it keeps,
   equally many other tokens of right responses drawn at random, and the tokens that S2T would
   silence if the wrong responses were the right ones.
3. The model takes one plain gradient step up the objective over one set, which is a mean over the
   set's tokens. Every response token of the batch is measured. Then the weights are restored.

Prints mean ± standard deviation over the batches, or the median if the deviation exceeds the mean.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import tables
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from reward import math_reward
from rollout import (
    Model,
    Policy,
    Tokenizer,
    encode_prompt,
    in_order,
    load_model,
    load_tokenizer,
    pad_batch,
    sample,
)
from stapo import clipped_loss, group_advantages, spurious_candidates, spurious_mask
from support import progress
from support.problems import load_problems

PROMPTS, GROUP = 64, 8  # prompts of a batch, responses to each
LR = 1e-3
COLUMNS = {  # what one_step returns: heading in the table, factor
    "tokens": ("tokens in the set", 1),
    "change": ("change of entropy, 1e-3 nats", 1e3),
    "times_tokens": ("change times tokens", 1e3),
    "kl": ("KL(old, new), 1e-6", 1e6),
    "norm": ("parameter gradient", 1),
    "factor": ("lemma's logit factor", 1),
    "same_sign": ("same sign as the entropy lemma, %", 100),
}


class Batch(NamedTuple):
    ids: Tensor  # (B, L) long, prompt and response, right-padded
    mask: Tensor  # (B, L) bool, True on the N response tokens
    advantages: Tensor  # (B,)
    log_pi: Tensor  # (N, V) float64, ln pi_old in the context of every response token


def collect(model: Model, tokenizer: Tokenizer, problems: list[dict], seed: int) -> Batch:
    """Sample GROUP responses to each problem, and compute their advantages."""
    rows = [row for row in problems for _ in range(GROUP)]
    prompts = [encode_prompt(tokenizer, row["problem"], "") for row in rows]
    responses = in_order(sample(model, tokenizer, prompts, max_new_tokens=80, seed=seed))
    rewards = [math_reward(r.text, row["answer"]) for r, row in zip(responses, rows)]
    advantages = group_advantages(torch.tensor(rewards).view(-1, GROUP)).flatten()
    ids, mask, _ = pad_batch(responses)
    return Batch(ids, mask, advantages, log_policy(model, ids, mask))


@torch.no_grad()
def log_policy(model: Model, ids: Tensor, mask: Tensor) -> Tensor:
    """Return ln pi in the context of every token of mask, row by row: (N, V) float64."""
    logits = [model(ids[i : i + 64]).logits for i in range(0, len(ids), 64)]
    return torch.cat(logits)[:, :-1][mask[:, 1:]].double().log_softmax(-1)


def entropies(log_pi: Tensor) -> Tensor:
    return -(log_pi.exp() * log_pi).sum(-1)  # nats: (N, V) -> (N,)


def token_sets(model: Model, batch: Batch, seed: int) -> dict[str, Tensor]:
    """Return the four sets as (B, L) bool. `seed` draws the random tokens."""
    with torch.no_grad():
        logp, entropy = Policy(model)(batch.ids, batch.mask)
    silenced = spurious_mask(logp, batch.advantages, entropy, batch.mask)
    candidates = spurious_candidates(logp, batch.advantages, batch.mask)
    others = (batch.mask & (batch.advantages > 0)[:, None] & ~candidates).nonzero()
    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))
    drawn = others[order[: int(silenced.sum())]]
    at_random = torch.zeros_like(silenced)
    at_random[tuple(drawn.T)] = True
    return {
        "silenced tokens": silenced,
        "kept candidates": candidates & ~silenced,
        "as many others of right answers": at_random,
        "rare tokens of wrong answers": spurious_mask(logp, -batch.advantages, entropy, batch.mask),
    }


def gradient(model: Model, batch: Batch, chosen: Tensor) -> list[Tensor]:
    """Return dJ / d theta at pi_theta = pi_old. J is the mean over the `chosen` (B, L) tokens."""
    rows = chosen.any(1)  # other rows do not change J
    logp, _ = Policy(model)(batch.ids[rows], chosen[rows])
    loss = clipped_loss(logp, logp.detach(), batch.advantages[rows], chosen[rows])
    return [-grad for grad in torch.autograd.grad(loss, list(model.parameters()))]


def entropy_lemma(log_pi: Tensor, ids: Tensor, advantages: Tensor) -> Tensor:
    """Return the entropy change of Sec. 3.2 for a natural gradient step with rate 1: (N,).

    It is the sum over all tokens y of -pi(y) [ln pi(y) - E ln pi] [A(y) - E A]. A is 0 for every
    token except the sampled one, so the change is -pi(y) [ln pi(y) + H] A of the sampled token.
    ids: (N,), the sampled tokens.
    """
    logp = log_pi.gather(1, ids[:, None]).squeeze(1)
    return -logp.exp() * (logp + entropies(log_pi)) * advantages


def one_step(model: Model, batch: Batch, chosen: Tensor, lr: float) -> dict[str, Tensor]:
    """Step up J over `chosen`, measure all tokens of the batch, and restore the weights.

    The values are 0-dim tensors.
    """
    before = [parameter.detach().clone() for parameter in model.parameters()]
    grads = gradient(model, batch, chosen)
    with torch.no_grad():
        for parameter, grad in zip(model.parameters(), grads):
            parameter += lr * grad
        new = log_policy(model, batch.ids, batch.mask)
        for parameter, value in zip(model.parameters(), before):
            parameter.copy_(value)
    old, in_set, ids = batch.log_pi, chosen[batch.mask], batch.ids[chosen]  # in_set: (N,) bool
    advantages = batch.advantages[:, None].expand_as(chosen)[chosen]
    change = entropies(new) - entropies(old)  # (N,)
    predicted = entropy_lemma(old[in_set], ids, advantages)
    pi = old[in_set].exp()
    p = pi.gather(1, ids[:, None]).squeeze(1)
    return {
        "tokens": in_set.sum(),
        "factor": (1 - 2 * p + pi.square().sum(1)).sqrt().mean(),
        "norm": torch.stack([grad.norm() for grad in grads]).norm(),
        "kl": (old.exp() * (old - new)).sum(1).mean(),
        "change": change.mean(),
        "times_tokens": change.mean() * in_set.sum(),
        "same_sign": (change[in_set].sign() == predicted.sign()).double().mean(),
    }


def in_words(values: Tensor) -> str:
    """Write values (N,) as `7.16 ± 0.92`, or as their median if the deviation exceeds the mean."""
    if values.std() > values.mean().abs():
        return f"{values.quantile(0.5):.3g} (median)"
    deviation = float(f"{values.std():.2g}")  # 120, not 1.2e+02
    return f"{values.mean():.3g} ± {deviation:g}"


def main() -> None:
    tiny = Path(__file__).resolve().parent.parent / "tests" / "tiny"
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(tiny), help="a checkpoint")
    parser.add_argument("--batches", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    progress.log(progress.device_in_words(["CPU (threads: 1)"], "float32", "float32"))
    model, tokenizer = load_model(args.model), load_tokenizer(args.model)
    problems = load_problems(str(tiny / "train.jsonl"))
    steps_of = defaultdict(list)  # set -> results of one_step, of each batch that has such tokens
    for seed in range(args.batches):
        order = torch.randperm(len(problems), generator=torch.Generator().manual_seed(seed))
        chosen = [problems[i] for i in order[:PROMPTS]]
        batch = collect(model, tokenizer, chosen, seed)
        for name, tokens in token_sets(model, batch, seed).items():
            if tokens.any():
                steps_of[name].append(one_step(model, batch, tokens, LR))
    print(tables.head(["step on", "entropy up in", *(heading for heading, _ in COLUMNS.values())]))
    for name, steps in steps_of.items():
        cells = [name, f"{sum(bool(s['change'] > 0) for s in steps)} of {len(steps)}"]
        for key, (_, factor) in COLUMNS.items():
            values = factor * torch.stack([step[key] for step in steps]).double()
            cells.append(in_words(values))
        print(tables.line(cells))


if __name__ == "__main__":
    main()
