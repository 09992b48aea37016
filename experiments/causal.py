"""What the gradient of the silenced tokens alone does to the entropy of the tiny model in one step.

    python experiments/causal.py                                        # the base model
    python experiments/causal.py --model runs/tiny/checkpoints/step_000028    # a trained model

Each batch is sampled from the same model, pi_old. The model takes one plain gradient step up the
objective over one set of the batch's tokens, and every response token is measured. A seed is the
number of a batch.
"""

import copy
from collections.abc import Sequence

import runs
import torch
from runs import Lines, Part
from torch import Tensor

import stapo
from rollout import Policy
from support.flags import parse_flags

LR = 1e-3
COLUMNS = {"entropy up": "mean .2f", "tokens in the set": ".1f"}
COLUMNS |= {"change of entropy, 1e-3 nats": ".2f", "change times tokens": ".0f"}
COLUMNS |= {"same sign as the entropy lemma, %": ".1f"}


def token_sets(batch: stapo.Batch, seed: int) -> dict[str, Tensor]:
    """Return the four sets as (B, L) bool. `seed` draws the random tokens."""
    logp, entropy, A, mask = batch.old.logp, batch.old.entropy, batch.advantages, batch.mask
    silenced, candidates, _ = stapo.spurious_mask(logp, A, entropy, mask)
    silenced_if_wrong_were_right, _, _ = stapo.spurious_mask(logp, -A, entropy, mask)
    others = (mask & (A > 0)[:, None] & ~candidates).nonzero()
    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))
    at_random = torch.zeros_like(silenced)
    at_random[tuple(others[order[: int(silenced.sum())]].T)] = True
    return {
        "silenced tokens": silenced,
        "kept candidates": candidates & ~silenced,
        "as many others of right answers": at_random,
        "rare tokens of wrong answers": silenced_if_wrong_were_right,
    }


def one_step(policy: Policy, batch: stapo.Batch, chosen: Tensor) -> dict[str, float]:
    """Step up J, the mean over `chosen` (B, L), with a copy of the policy, and measure all tokens.

    The entropy lemma of Sec. 3.2 gives the change for a natural gradient step with rate 1. A is 0
    for every token except the sampled one, so it is -pi(y) [ln pi(y) + H] A of that token y.
    """
    policy = copy.deepcopy(policy)
    rows = chosen.any(1)  # other rows do not change J
    logp = policy(batch.ids[rows], chosen[rows]).logp
    loss = stapo.clipped_loss(logp, logp.detach(), batch.advantages[rows], chosen[rows])
    loss.backward()
    with torch.no_grad():
        for weight in policy.parameters():
            weight -= LR * weight.grad
        entropy = policy(batch.ids, batch.mask).entropy
    change = 1e3 * (entropy - batch.old.entropy).double()  # (B, L)
    lemma = -batch.old.logp.exp() * (batch.old.logp + batch.old.entropy)
    lemma = lemma * batch.advantages[:, None]  # (B, L)
    same_sign = change[chosen].sign() == lemma[chosen].sign()
    tokens, mean = int(chosen.sum()), float(change[batch.mask].mean())
    numbers = [mean > 0, tokens, mean, mean * tokens, 100 * float(same_sign.double().mean())]
    return dict(zip(COLUMNS, map(float, numbers)))


def measure(model: str, batches: Sequence[int]) -> Lines:
    """A line for each set and batch."""
    flags = [f"@{runs.TINY}/args", "--model", model, "--data", f"{runs.TINY}/train.jsonl"]
    cfg = parse_flags(stapo.Config, "", flags)
    torch.set_num_threads(1)
    task = stapo.load_task(cfg)
    policy, _, _ = stapo.load_models(cfg, task.tokenizer, checkpoint=None)
    name = "base model" if model == str(runs.TINY) else "after a run"
    made, began = [], runs.circumstances()
    for number in batches:
        batch, _ = stapo.collect(policy, None, task, number + 1, cfg)
        for tokens, chosen in token_sets(batch, number).items():
            if chosen.any():
                numbers = one_step(policy, batch, chosen)
                made.append(runs.line(f"{name}: {tokens}", number, numbers, began))
    return made


def report(lines: Lines) -> str:
    """One step on each set alone: means over the batches of one model."""
    return runs.table(COLUMNS, runs.rows_of(lines))


if __name__ == "__main__":
    parts = {"causal": Part([], report)}
    parser = runs.make_parser(__doc__, parts)
    parser.add_argument("--model", default=str(runs.TINY), help="a checkpoint")
    args = parser.parse_args()
    made = [] if args.table else measure(args.model, args.seeds or range(20))
    runs.finish(args, made, parts)
