"""Measure what the gradient of the silenced tokens alone does to the tiny model in one step.

    python experiments/causal.py                                             # the base model
    python experiments/causal.py --model RUN/checkpoints/step_000028          # a trained model

Each batch is sampled from the same model, pi_old. The model takes one plain gradient step up the
objective over one set of the batch's tokens, every response token is measured, and the weights are
restored. Prints mean ± standard deviation over the batches.
"""

import argparse
from collections import defaultdict
from typing import NamedTuple

import runs
import torch
from runs import TINY
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from reward import math_reward
from rollout import Policy, Tokenizer, in_order, sample
from stapo import clipped_loss, group_advantages, spurious_candidates, spurious_mask

PROMPTS, GROUP = 64, 8  # prompts of a batch, responses to each
LR = 1e-3
COLUMNS = ["tokens in the set", "change of entropy, 1e-3 nats", "change times tokens"]
COLUMNS += ["same sign as the entropy lemma, %"]


class Batch(NamedTuple):
    ids: Tensor  # (B, L) long, prompt and response, right-padded
    mask: Tensor  # (B, L) bool, True on response tokens
    advantages: Tensor  # (B,)
    logp: Tensor  # (B, L) ln p of each response token under pi_old
    entropy: Tensor  # (B, L) nats, under pi_old


def collect(policy: Policy, tokenizer: Tokenizer, problems: list[dict], seed: int) -> Batch:
    """Sample GROUP responses to each problem, and compute their advantages."""
    rows = [row for row in problems for _ in range(GROUP)]
    prompts = [tokenizer(f"{row['problem']}\n").input_ids for row in rows]
    responses = in_order(sample(policy.model, tokenizer, prompts, max_new_tokens=80, seed=seed))
    rewards = [math_reward(r.text, row["answer"]) for r, row in zip(responses, rows)]
    advantages = group_advantages(torch.tensor(rewards).view(-1, GROUP)).flatten()
    lengths = [(len(r.prompt_ids), len(r.prompt_ids + r.ids)) for r in responses]
    ids = pad_sequence([torch.tensor(r.prompt_ids + r.ids) for r in responses], batch_first=True)
    mask = pad_sequence([torch.arange(end) >= start for start, end in lengths], batch_first=True)
    with torch.no_grad():
        return Batch(ids, mask, advantages, *policy(ids, mask))


def token_sets(batch: Batch, seed: int) -> dict[str, Tensor]:
    """Return the four sets as (B, L) bool. `seed` draws the random tokens."""
    A, mask = batch.advantages, batch.mask
    silenced = spurious_mask(batch.logp, A, batch.entropy, mask)
    candidates = spurious_candidates(batch.logp, A, mask)
    others = (mask & (A > 0)[:, None] & ~candidates).nonzero()
    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))
    at_random = torch.zeros_like(silenced)
    at_random[tuple(others[order[: int(silenced.sum())]].T)] = True
    return {
        "silenced tokens": silenced,
        "kept candidates": candidates & ~silenced,
        "as many others of right answers": at_random,
        "rare tokens of wrong answers": spurious_mask(batch.logp, -A, batch.entropy, mask),
    }


def one_step(policy: Policy, batch: Batch, chosen: Tensor, lr: float) -> list[float]:
    """Step up J, the mean over `chosen` (B, L), measure all tokens, and restore the weights.

    Returns a number for each of COLUMNS. The entropy lemma of Sec. 3.2 gives the change for a
    natural gradient step with rate 1. A is 0 for every token except the sampled one, so it is
    -pi(y) [ln pi(y) + H] A of the sampled token y.
    """
    weights = list(policy.parameters())
    before = [weight.detach().clone() for weight in weights]
    rows = chosen.any(1)  # other rows do not change J
    logp, _ = policy(batch.ids[rows], chosen[rows])
    loss = clipped_loss(logp, logp.detach(), batch.advantages[rows], chosen[rows])
    with torch.no_grad():
        for weight, grad in zip(weights, torch.autograd.grad(loss, weights)):
            weight -= lr * grad
        _, entropy = policy(batch.ids, batch.mask)
        for weight, value in zip(weights, before):
            weight.copy_(value)
    change = 1e3 * (entropy - batch.entropy).double()  # (B, L)
    lemma = -batch.logp.exp() * (batch.logp + batch.entropy) * batch.advantages[:, None]
    same_sign = change[chosen].sign() == lemma[chosen].sign()
    tokens, mean = int(chosen.sum()), float(change[batch.mask].mean())
    return [tokens, mean, mean * tokens, 100 * float(same_sign.double().mean())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=TINY, help="a checkpoint")
    parser.add_argument("--batches", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    policy = Policy(AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    problems = runs.read_rows(TINY / "train.jsonl")
    steps_of = defaultdict(list)  # set -> numbers of each batch that has such tokens
    for seed in range(args.batches):
        order = torch.randperm(len(problems), generator=torch.Generator().manual_seed(seed))
        batch = collect(policy, tokenizer, [problems[i] for i in order[:PROMPTS]], seed)
        for name, tokens in token_sets(batch, seed).items():
            if tokens.any():
                steps_of[name].append(one_step(policy, batch, tokens, LR))
    rows = []
    for name, steps in steps_of.items():
        rows.append([name, f"{sum(step[1] > 0 for step in steps)} of {len(steps)}"])
        for values in torch.tensor(steps).double().T:
            deviation = float(f"{values.std():.2g}")  # 120, not 1.2e+02
            rows[-1].append(f"{values.mean():.3g} ± {deviation:g}")
    print(runs.markdown(["step on", "entropy up in", *COLUMNS], rows))


if __name__ == "__main__":
    main()
