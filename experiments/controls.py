"""stapo.py with methods that ask why silencing helps; experiments/replicate.py runs them.

    python experiments/controls.py @tests/tiny/args --method same-gradient

Each changes one thing of STAPO or JustRL. None is meant for training.

    wrong-answers          S2T's rule for wrong answers: their rare tokens are silenced
    both-answers           the rule for right and wrong answers together
    weight-0.25, -0.5, ...  every candidate stays, and its term of J is multiplied by the weight:
                           a weight of 0 would be FullMask, a weight of 1 is JustRL
    same-gradient          random other tokens of right answers are left out, until the gradients
                           left out are as large in sum as those that STAPO would silence
    stapo-sgd, justrl-sgd  SGD with momentum 0.9 in the place of AdamW, at --lr
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stapo
from rollout import TokenStats
from stapo import Batch, Choice, Config, Method, clipped_loss, silence_spurious, spurious_candidates
from support.seeds import generator

WEIGHTS = {f"weight-{weight}": weight for weight in (0.25, 0.5, 1.5, 2)}


def silence_where(turn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Choice]:
    """S2T's rule with other advantages in the place of A, of which it asks whether A > 0."""

    def choose(batch: Batch, stats: TokenStats, cfg: Config) -> Choice:
        return silence_spurious(replace(batch, advantages=turn(batch.advantages)), stats, cfg)

    return choose


def leave_out_as_much_gradient(batch: Batch, stats: TokenStats, cfg: Config) -> Choice:
    """Random tokens of right answers that are no candidates, with the gradient of the silenced.

    The gradient of a token's A ln p in the logits is A (onehot - pi). Its entries are A (1 - p),
    and for all other words together -A (1 - p): in sum of absolute values 2 A (1 - p). This number
    is added up over the silenced tokens, and over tokens in a random order up to the same sum.
    """
    candidates = spurious_candidates(stats.logp, batch.advantages, batch.mask, tau_p=cfg.tau_p)
    silenced = batch.mask & ~silence_spurious(batch, stats, cfg).keep
    others = batch.mask & (batch.advantages[:, None] > 0) & ~candidates  # (B, L)
    size = 2 * batch.advantages[:, None] * (1 - stats.logp.exp())  # (B, L)
    places = others.nonzero()  # (N, 2)
    seed = generator(*batch.seeds.tolist(), "left out")
    places = places[torch.randperm(len(places), generator=seed)]
    sums = size[tuple(places.T)].double().cumsum(0)  # (N,)
    count = int((sums <= size[silenced].double().sum()).sum())
    keep = batch.mask.clone()
    keep[tuple(places[:count].T)] = False
    return Choice(keep=keep, candidates=others)


def weighted_loss(weight: float) -> Callable[..., torch.Tensor]:
    """clipped_loss, in which the candidates' terms of J are multiplied by `weight`.

    The denominator does not change: it counts all tokens.
    """

    def loss(logp, old_logp, advantages, keep, **options) -> torch.Tensor:
        candidates = spurious_candidates(logp, advantages, keep)
        of_all = clipped_loss(logp, old_logp, advantages, keep, **options)
        of_candidates = clipped_loss(logp, old_logp, advantages, candidates, **options)
        return of_all + (weight - 1) * of_candidates

    return loss


def momentum_sgd(parameters, lr: float, **_adamw: object) -> torch.optim.SGD:
    """SGD where the training loop asks for AdamW; it has no weight decay."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


S2T = {"divides_by": "kept", "uses": "q quantile_over"}
METHODS = {
    "wrong-answers": Method(silence_where(torch.neg), reads="all", **S2T),
    "both-answers": Method(silence_where(torch.abs), reads="all", **S2T),
    **dict.fromkeys(WEIGHTS, stapo.METHODS["justrl"]),
    "same-gradient": Method(leave_out_as_much_gradient, reads="A > 0", **S2T),
    "stapo-sgd": stapo.METHODS["stapo"],
    "justrl-sgd": stapo.METHODS["justrl"],
}


def main(argv: list[str]) -> None:
    """stapo.py's main with METHODS beside its own; argv has `--method NAME`."""
    method = argv[argv.index("--method") + 1]
    stapo.METHODS |= METHODS
    if method in WEIGHTS:
        stapo.clipped_loss = weighted_loss(WEIGHTS[method])
    if method.endswith("-sgd"):
        torch.optim.AdamW = momentum_sgd
    stapo.main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
