"""What silencing does to entropy, shown without a language model: a run takes seconds.

    python scripts/toy.py      # prints a table and draws docs/toy.png

The policy is the head of a language model alone: logits = prior + features @ head. A response is
one decision among OPTIONS equally likely words, one of which earns the reward, and FILLERS words
that earn nothing: in each context one usual word (98 %) and a thin tail of every word. Change one
thing, in CHANGES or in a constant, and see what follows.
"""

import argparse
import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stapo import clipped_loss, group_advantages, spurious_mask, stapo_loss

STEPS, PROMPTS, GROUP, MINI_BATCHES = 300, 32, 8, 4  # a step: 32 x 8 responses, 4 updates
OPTIONS, FILLERS, TAIL = 8, 15, 0.02
METHODS = {  # stapo_loss's arguments, where they are not its defaults
    "JustRL": {"tau_p": 0.0},
    "STAPO": {},
    "FullMask": {"tau_h": math.inf},
    "random candidates silenced": {},
    "rare tokens of wrong answers silenced": {},
}
JUSTRL, STAPO, _, RANDOM, WRONG = METHODS
CHANGES = {  # train's arguments
    "half the learning rate": {"lr": 0.005},
    "SGD, not Adam": {"optimizer": torch.optim.SGD, "lr": 10.0},
    "2,048 words": {"words": 2048},
    "30 % of the rewards flipped": {"reward": "flipped"},
    "random rewards, 10 % right": {"reward": 0.1},
    "random rewards, 50 % right": {"reward": 0.5},
    "random rewards, 90 % right": {"reward": 0.9},
    "rare fillers spoil the answer": {"reward": "spoiled"},
    "no shared head: a table of logits": {"width": None},
    "such a table, random, 90 % right": {"width": None, "reward": 0.9},
}


def loss_of(method: str, logp: Tensor, old_logp: Tensor, A: Tensor, entropy: Tensor) -> tuple:
    """Loss of a mini-batch and its number of silenced tokens; shapes as in stapo_loss, A (B,)."""
    mask = torch.ones_like(logp, dtype=torch.bool)
    if method == WRONG:  # STAPO's rule under the opposite sign of every advantage
        silenced = spurious_mask(logp, -A, entropy, mask)
        return clipped_loss(logp, old_logp, A, mask & ~silenced), silenced.sum()
    key = torch.rand_like(entropy) if method == RANDOM else entropy
    loss, metrics = stapo_loss(logp, old_logp, A, key, mask, **METHODS[method])
    return loss, metrics["silenced"]


def entropies(log_pi: Tensor) -> Tensor:
    return -(log_pi.exp() * log_pi).sum(-1)  # exact, in nats: (..., V) -> (...)


def grade(response: Tensor, answer: Tensor, usual: Tensor, reward: str | float) -> Tensor:
    """response (P, G, T), the decision first; answer (P,); usual (P, T) -> +1 or -1: (P, G)."""
    right = response[:, :, 0] == answer[:, None]
    if reward == "flipped":
        right ^= torch.rand(right.shape) < 0.3
    elif reward == "spoiled":  # right only if every filler is the usual word
        right &= (response == usual[:, None])[:, :, 1:].all(-1)
    elif reward != "decision":  # a probability: luck alone decides
        right = torch.rand(right.shape) < reward
    return 2.0 * right - 1


def train(
    method: str,
    seed: int,
    reward: str | float = "decision",
    words: int = 256,
    width: int | None = 48,  # of the features; None: every context has a row of the head alone
    optimizer: type = torch.optim.Adam,
    lr: float = 0.01,
) -> tuple[list[float], float, float]:
    """Returns the mean entropy of the fillers (nats) before each step and at the end; in percent
    the probability of the right option at the end and the silenced share of all tokens."""
    torch.manual_seed(seed)
    shape = PROMPTS, 1 + FILLERS  # (P, T) contexts: a group's responses pass through the same T
    usual, answer = torch.randint(words, shape), torch.randint(OPTIONS, (PROMPTS,))
    prior = torch.zeros(*shape, words).scatter(2, usual[:, :, None], 1.0)
    prior[:, 0] = torch.arange(words) < OPTIONS
    prior = ((1 - TAIL) * prior / prior.sum(2, keepdim=True) + TAIL / words).log()
    features = torch.randn(usual.numel(), width) if width else torch.eye(usual.numel())
    features = torch.nn.functional.normalize(features, dim=1).view(*shape, -1)
    head = torch.zeros(features.shape[2], words, requires_grad=True)
    opt = optimizer([head], lr=lr)

    def policy(prompts: Tensor) -> Tensor:  # ln pi (len(prompts), T, V)
        return (prior[prompts] + features[prompts] @ head).log_softmax(-1)

    curve, silenced, every = [], 0, torch.arange(PROMPTS)
    for _ in range(STEPS):
        with torch.no_grad():  # the rollout, (P, G, T)
            old = policy(every)
            response = torch.distributions.Categorical(logits=old).sample((GROUP,)).transpose(0, 1)
            old_logp = old.transpose(1, 2).gather(1, response)
            advantages = group_advantages(grade(response, answer, usual, reward))  # (P, G)
        curve.append(entropies(old[:, 1:]).mean().item())
        for batch in torch.randperm(PROMPTS).view(MINI_BATCHES, -1):
            log_pi = policy(batch)
            logp = log_pi.transpose(1, 2).gather(1, response[batch]).flatten(0, 1)  # (B, T)
            entropy = entropies(log_pi.detach()).repeat_interleave(GROUP, 0)
            given = old_logp[batch].flatten(0, 1), advantages[batch].flatten()
            loss, count = loss_of(method, logp, *given, entropy)
            opt.zero_grad()
            loss.backward()
            opt.step()
            silenced += int(count)
    last = policy(every).detach()
    curve.append(entropies(last[:, 1:]).mean().item())
    right = last[every, 0, answer].exp().mean().item()
    return curve, 100 * right, 100 * silenced / STEPS / response.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    parser.add_argument("--figure", default="docs/toy.png")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    print("| run | entropy, start | entropy, end | right, % | silenced, % |\n|---|---|---|---|---|")
    plan = [(method, method, {}) for method in METHODS]
    plan += [(f"{name}: {m}", m, c) for name, c in CHANGES.items() for m in (JUSTRL, STAPO)]
    for name, method, change in plan:
        runs = [train(method, seed, **change) for seed in args.seeds]
        curves, *ends = map(torch.tensor, zip(*runs))
        cells = [name, f"{curves[0, 0]:.3f}"]  # curves (seeds, steps + 1)
        for values, digits in zip((curves[:, -1], *ends), (3, 1, 3)):
            cells.append(f"{values.mean():.{digits}f} ± {values.std():.{digits}f}")
        print(f"| {' | '.join(cells)} |", flush=True)
        if not change:  # a line for the mean over seeds, a band from the lowest to the highest
            axes.plot(curves.mean(0), label=method)
            axes.fill_between(range(curves.shape[1]), curves.amin(0), curves.amax(0), alpha=0.2)
    axes.set(yscale="log", xlabel="step", ylabel="entropy of the fillers (nats)")
    figure.legend(loc="outside upper center", ncols=3, fontsize="small", frameon=False)
    figure.savefig(args.figure, dpi=100)


if __name__ == "__main__":
    main()
