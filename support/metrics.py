"""Metrics of tensors, when a response is right, and the log of responses.

docs/reference.md says what each metric means. ratio_sums are of this rank, the others of all.
"""

import math
from collections import Counter

import torch

from support.batch import Batch, Choice
from support.ranks import all_sum


def right(reward: float | torch.Tensor) -> bool | torch.Tensor:
    """Whether a response is right: its reward (a number, or a tensor of them) is above 0.

    Metrics, evaluations and texts say so. S2T has A > 0, as the paper's formula has it.
    """
    return reward > 0


def response_metrics(batch: Batch, tau_p: float) -> dict[str, float | None]:
    """Metrics of a step's responses, under pi_old."""
    is_right = right(batch.rewards)  # (B,)
    right_tokens = batch.mask & is_right[:, None]  # (B, L)
    sums = {
        "responses": len(batch.rewards),
        "right": is_right.sum(),
        "low_prob": (right_tokens & (batch.old.logp.exp() < tau_p)).sum(),
        "right_tokens": right_tokens.sum(),
        "tokens": batch.mask.sum(),
        "truncated": batch.truncated.sum(),
        "reward": batch.rewards.sum(),
        "zero_advantage": (batch.advantages == 0).sum(),
    }
    total = all_sum(sums)
    responses, right_tokens = total["responses"], total["right_tokens"]
    return {
        "reward": total["reward"] / responses,
        "accuracy": total["right"] / responses,
        "zero_advantage_fraction": total["zero_advantage"] / responses,
        "low_prob_fraction": total["low_prob"] / right_tokens if right_tokens else None,
        "tokens": int(total["tokens"]),
        "response_length": total["tokens"] / responses,
        "truncated_fraction": total["truncated"] / responses,
    }


@torch.no_grad()
def ratio_sums(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    eps_low: float,
    eps_high: float,
) -> dict[str, torch.Tensor]:
    """Return the sums behind ratio_mean, approx_kl, clip_low and clip_high: 0-dim tensors.

    The sums are over all tokens in mask, silenced tokens included.
    kl_sum / tokens is the mean of rho - 1 - ln rho, an estimate of KL(pi_old || pi_theta). It grows
    with every drift. The mean of rho, ratio_sum / tokens, stays 1 if some rho grow and others
    shrink. clip_low is the number of tokens with A < 0 and rho < 1 - eps_low. clip_high is the
    number of tokens with A > 0 and rho > 1 + eps_high. There the clipped term has no gradient.
    """
    log_rho = (logp - old_logp).masked_fill(~mask, 0.0)  # (B, T)
    rho = log_rho.exp()  # (B, T)
    low = (advantages[:, None] < 0) & (rho < 1 - eps_low)  # (B, T)
    high = (advantages[:, None] > 0) & (rho > 1 + eps_high)  # (B, T)
    return {
        "tokens": mask.sum(),
        "ratio_sum": rho.masked_fill(~mask, 0.0).sum(),
        "kl_sum": (rho - 1 - log_rho).sum(),
        "clip_low": (low & mask).sum(),
        "clip_high": (high & mask).sum(),
    }


def update_metrics(
    mini_batches: list[Batch], choices: list[Choice], updates: list[dict[str, float]]
) -> dict[str, float | None]:
    """Metrics of a step's updates. updates: what `stapo.update` returned for each mini-batch."""
    counts, total = Counter(candidates=0, silenced=0), Counter()
    for batch, choice in zip(mini_batches, choices, strict=True):
        counts["tokens"] += int(batch.mask.sum())
        if choice.candidates is not None:
            candidates = batch.mask & choice.candidates  # (B, L)
            counts["candidates"] += int(candidates.sum())
            counts["silenced"] += int((candidates & (choice.keep == 0)).sum())
    counts = all_sum(counts)
    thresholds = [float(choice.tau_h) for choice in choices if choice.tau_h is not None]
    thresholds = [tau_h for tau_h in thresholds if tau_h > -math.inf]  # -inf: no candidates
    for sums in updates:
        total.update(sums)  # adds up the numbers of each key
    forwarded = total["tokens"]  # without the responses that no update forwards

    def per_token(key: str) -> float | None:
        return total[key] / forwarded if forwarded else None

    return {
        "candidates": int(counts["candidates"]),
        "silenced": int(counts["silenced"]),
        "silenced_fraction": counts["silenced"] / counts["tokens"],
        "tau_h": sum(thresholds) / len(thresholds) if thresholds else None,
        "clip_low": per_token("clip_low"),
        "clip_high": per_token("clip_high"),
        "ratio_mean": per_token("ratio_sum"),
        "approx_kl": per_token("kl_sum"),
        "loss": total["loss"] / len(updates),
        "grad_norm": total["grad_norm"] / len(updates),
        "skipped_updates": len(updates) - total["finite"],
    }


def sample_log(batch: Batch, texts: list[str], problems: list[dict]) -> list[dict]:
    """Return what samples.jsonl says of each response. problems: those of the run."""
    columns = (batch.problem_index, batch.rewards, batch.advantages)
    return [
        {"problem": problems[index]["problem"], "gold": problems[index]["answer"]}
        | {"response": text, "reward": reward, "advantage": advantage}
        for text, index, reward, advantage in zip(texts, *map(torch.Tensor.tolist, columns))
    ]
