"""A rare right option where a policy is sure of a wrong one: a table of logits alone.

    python experiments/toy.py            # 32 seeds, a quarter of an hour
    python experiments/toy.py --table

A response has 16 words. The first one decides: the right option begins with p = 0.001 beside one
wrong option with 99.9 %. The other words earn nothing. Each has its own usual word with 98 %, and a
thin tail of all other words. A run has 300 steps of 32 prompts x 8 responses in four updates.
"""

import runs
import torch
from runs import Lines, Part
from torch import Tensor

from stapo import clipped_loss, group_advantages, spurious_mask

STEPS, PROMPTS, GROUP, LENGTH, WORDS = 300, 32, 8, 16, 256
RARE, TAIL = 0.001, 0.02
OPTIMIZERS = {"Adam": (torch.optim.Adam, 0.03), "SGD": (torch.optim.SGD, 400.0)}
METHODS = ("STAPO", "JustRL", "FullMask", "highest entropy")


def log_policy_at_the_start() -> Tensor:
    """ln pi of every word, (P, T, V). In a decision word 0 is right and word 1 is wrong."""
    usual = torch.randint(WORDS, (PROMPTS, LENGTH, 1))
    p = torch.full((PROMPTS, LENGTH, WORDS), TAIL / WORDS)
    p.scatter_(2, usual, 1 - TAIL)
    p[:, 0] = 1e-6
    p[:, 0, :2] = torch.tensor([RARE, 1 - RARE])
    return p.log().log_softmax(-1)


def train(method: str, optimizer: str, seed: int) -> float:
    """Train a policy, and return the mean probability of the right options in percent."""
    torch.manual_seed(seed)
    logits = log_policy_at_the_start().requires_grad_()
    make, lr = OPTIMIZERS[optimizer]
    steps = make([logits], lr=lr)
    for _ in range(STEPS):
        old = logits.detach().log_softmax(-1)
        drawn = torch.distributions.Categorical(logits=old).sample((GROUP,))  # (G, P, T)
        words = drawn.transpose(0, 1)  # (P, G, T)
        rewards = (words[:, :, 0] == 0) * 2.0 - 1  # (P, G)
        advantages = group_advantages(rewards)
        for rows in torch.randperm(PROMPTS).chunk(4):
            log_pi = logits[rows].log_softmax(-1)  # (P / 4, T, V)
            of_words = words[rows].transpose(1, 2)  # (P / 4, T, G)
            logp = log_pi.gather(2, of_words).transpose(1, 2).flatten(0, 1)  # (B, T)
            old_logp = old[rows].gather(2, of_words).transpose(1, 2).flatten(0, 1)
            H = -(log_pi.exp() * log_pi).sum(-1).detach().repeat_interleave(GROUP, 0)  # (B, T)
            A = advantages[rows].flatten()  # (B,)
            mask = torch.ones_like(logp, dtype=torch.bool)
            low = -H if method == "highest entropy" else H
            silenced, candidates, _ = spurious_mask(logp.detach(), A, low, mask)
            off = {"JustRL": ~mask, "FullMask": candidates}.get(method, silenced)
            steps.zero_grad()
            clipped_loss(logp, old_logp, A, keep=mask & ~off).backward()
            steps.step()
    return 100 * logits.detach()[:, 0].softmax(-1)[:, 0].mean().item()


def report(lines: Lines) -> str:
    """The probability of the right options after the last step, and the difference to STAPO."""
    rows = runs.rows_of(lines)
    for name, its in rows.items():
        for seed, numbers in its.items():
            stapo = rows[f"{name.split(',')[0]}, STAPO"][seed]
            numbers["minus STAPO"] = numbers["right, %"] - stapo["right, %"]
    return runs.table({"right, %": ".1f", "minus STAPO": "95 +.1f"}, rows)


if __name__ == "__main__":
    parts = {"toy": Part([], report)}
    args = runs.make_parser(__doc__, parts).parse_args()
    torch.set_num_threads(1)
    made, began = [], runs.circumstances()
    for seed in [] if args.table else args.seeds or range(32):
        for optimizer in OPTIMIZERS:
            for method in METHODS:
                numbers = {"right, %": train(method, optimizer, seed)}
                made.append(runs.line(f"{optimizer}, {method}", seed, numbers, began))
    runs.finish(args, made, parts)
