"""STAPO: Spurious-Token-Aware Policy Optimization (arXiv 2602.15620), in one readable file.

    python stapo.py --model Qwen/Qwen3-1.7B-Base                        # the paper's recipe
    python stapo.py @tests/tiny/args                                    # a CPU, a few minutes
    torchrun --nproc-per-node 8 stapo.py --model Qwen/Qwen3-14B-Base    # the same under FSDP2

Read from top to bottom: the flags, the loss (beside Sec. 2 and 3 of the paper), the update of one
mini-batch (Algorithm 1), the data, the metrics, the training loop, main.
"""

import bisect
import itertools
import json
import math
import resource
import shlex
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from tqdm import tqdm
from transformers import HfArgumentParser
from transformers.utils import logging

import distributed
import eval as evaluation
from distributed import all_cat, all_max, all_sum, rank, world_size
from reward import math_reward
from rollout import (
    INSTRUCTION,
    InputError,
    Model,
    Response,
    Tokenizer,
    encode_prompt,
    load_problems,
    load_tokenizer,
    pad_batch,
    sample,
    to_text,
)


def flag(default: object, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Config:
    """Every flag; the defaults are the paper's training setup (appendix)."""

    model: str = flag("Qwen/Qwen3-1.7B-Base", "Hub id or local folder of a causal LM")
    data: str = flag("BytedTsinghua-SIA/DAPO-Math-17k", "Hub id, .jsonl or .parquet")
    instruction: str = flag(INSTRUCTION, "follows every problem; may be empty")
    output: str = flag("", "run directory (default: a fresh one under runs/)")
    resume: bool = flag(False, "continue the run in --output from its newest checkpoint")
    # the objective
    method: Literal[
        "stapo", "justrl", "grpo", "20-entropy", "full-mask", "high-entropy", "random"
    ] = flag("stapo", "STAPO, a baseline or an ablation")
    tau_p: float = flag(0.002, "S2T: a token is a candidate below this probability")
    q: float = flag(0.75, "S2T: silence candidates below this quantile of entropy")
    quantile_over: Literal["candidates", "all"] = flag(
        "candidates", "S2T: tokens whose entropies give tau_h (all: the paper's v1)"
    )
    eps_low: float = flag(0.2, "clip the ratio at 1 - eps_low")
    eps_high: float = flag(0.28, "clip the ratio at 1 + eps_high (grpo: eps_low)")
    beta: float = flag(0.001, "grpo: weight of the KL to the starting model")
    # one step: a rollout batch and its optimiser steps
    steps: int = flag(3000, "rollout batches to train on")
    batch_size: int = flag(256, "prompts in a rollout batch")
    mini_batch_size: int = flag(64, "prompts in an optimiser step")
    group_size: int = flag(8, "responses to each prompt (G)")
    max_prompt_tokens: int = flag(1024, "longer prompts are dropped")
    max_new_tokens: int = flag(15360, "response length at most")
    lr: float = flag(1e-6, "AdamW's constant rate; 0 only measures: no update")
    warmup_steps: int = flag(10, "steps of linear warm-up")
    weight_decay: float = flag(0.1, "AdamW's (JustRL's value; the paper names none)")
    grad_clip: float = flag(1.0, "largest gradient norm")
    seed: int = flag(0, "of the data order and the sampling")
    # memory and files
    rollout_batch_size: int = flag(256, "sequences decoded at a time, on each rank")
    tokens_per_micro_batch: int = flag(16384, "rows times longest row, on each rank")
    gradient_checkpointing: bool = flag(True, "recompute activations: less memory, more time")
    save_every: int = flag(50, "steps between checkpoints")
    keep_last: int = flag(2, "checkpoints kept")
    dump_every: int = flag(0, "steps between dumps of tokens for figures.py (0: none)")
    eval_every: int = flag(0, "steps between evaluations (0: none)")
    eval_benchmarks: list[str] = field(
        default_factory=lambda: ["aime24"], metadata={"help": "eval.py's names or .jsonl files"}
    )


# =========================================================================== the loss, Sec. 2 and 3
#
# Shapes: B responses, T tokens at most. `mask` is True on response tokens; everything outside it
# is padding, may hold any garbage, and reaches neither the loss nor the gradient.


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Sec. 2.2: A_i = (R_i - mean_j R_j) / std_j R_j within each group, std unbiased (n - 1).

    rewards (P, G) float, G >= 2, a row for each prompt -> (P, G). A group whose rewards are all
    equal has A = 0: it is found by max == min, as rounding can leave its std above zero.
    Eight responses of which two are right: 1.62 for those two, -0.54 for the other six.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    all_equal = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    return torch.where(all_equal, torch.zeros_like(rewards), centred / rewards.std(1, keepdim=True))


def quantile(values: torch.Tensor, q: float) -> torch.Tensor:
    """Linear-interpolated quantile of a 1-D tensor of any size; -inf of an empty one.

    torch.quantile raises on empty input and above 16 million values; a batch can hold more.
    """
    if values.numel() == 0:
        return values.new_tensor(float("-inf"))
    ordered = values.sort().values
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], position - low)


@torch.no_grad()
def spurious_mask(
    logp: torch.Tensor,
    advantages: torch.Tensor,
    entropy: torch.Tensor,
    mask: torch.Tensor,
    *,
    tau_p: float = 0.002,
    q: float = 0.75,
    tau_h: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Sec. 3.3, S2T: I = 0 where A_i > 0 and pi < tau_p and H < tau_h. True = silenced, (B, T).

    logp, entropy (B, T) float32 of the current policy; advantages (B,); mask (B, T) bool. tau_h
    is the q-quantile of the candidates' entropies (low-probability tokens in right responses);
    give it where this call sees less than the whole mini-batch. No candidate: nothing silenced.
    """
    candidates = mask & (advantages[:, None] > 0) & (logp.exp() < tau_p)
    if tau_h is None:
        tau_h = quantile(entropy[candidates], q)
    return candidates & (entropy < tau_h)


def clipped_objective(
    ratio: torch.Tensor, advantages: torch.Tensor, eps_low: float, eps_high: float
) -> torch.Tensor:
    """Sec. 2.3: min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A) of every token, (B, T)."""
    advantages = advantages[:, None]  # (B, 1): every token of y_i has the same A_i
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    return torch.min(ratio * advantages, clipped * advantages)


def stapo_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    entropy: torch.Tensor,
    mask: torch.Tensor,
    *,
    tau_p: float = 0.002,
    q: float = 0.75,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    tau_h: float | torch.Tensor | None = None,
    num_kept: float | torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sec. 3.1: -J = -1 / (sum I) * sum I min(rho A, clip(rho) A), and sums for the metrics.

    logp (B, T) float32 with gradient: ln pi_theta of each response token (temperature 1, full
    vocabulary); old_logp (B, T): the same under pi_old; advantages (B,); entropy (B, T) nats, of
    the current policy, never given a gradient; mask (B, T) bool, True on response tokens.
    tau_h and num_kept belong to the whole mini-batch: None takes them from this call, which is
    right when the call sees all of it. Under FSDP, which averages gradients over ranks, num_kept
    is the global count of kept tokens / world size. tau_p = 0 is JustRL (Sec. 2.3).
    Returns the loss, a 0-dim tensor, and detached 0-dim sums that add up over micro-batches.
    """
    silenced = spurious_mask(logp, advantages, entropy, mask, tau_p=tau_p, q=q, tau_h=tau_h)
    keep = mask & ~silenced  # I_{i,t}
    # rho_{i,t}; what is not kept leaves before exp, so that it cannot make inf * 0
    ratio = (logp - old_logp).masked_fill(~keep, 0.0).exp()
    objective = clipped_objective(ratio, advantages, eps_low, eps_high).masked_fill(~keep, 0.0)
    if num_kept is None:
        num_kept = keep.sum().clamp(min=1)
    loss = -objective.sum() / num_kept
    every_candidate = spurious_mask(
        logp, advantages, entropy, mask, tau_p=tau_p, tau_h=float("inf")
    )
    metrics = {
        "candidates": every_candidate.sum(),
        "silenced": silenced.sum(),
        "entropy_sum": entropy.detach().masked_fill(~mask, 0.0).sum(),
        **ratio_sums(logp, old_logp, advantages, mask, eps_low, eps_high),
    }
    return loss, metrics


def grpo_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    ref_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    eps: float,
    beta: float,
    num_responses: float,
) -> torch.Tensor:
    """Sec. 2.2: a mean over the tokens of each response, then over responses, with KL to pi_ref.

    Shapes as in stapo_loss. The KL is estimated by k3 = r - ln r - 1 with r = pi_ref / pi_theta.
    """
    ratio = (logp - old_logp).masked_fill(~mask, 0.0).exp()
    log_r = (ref_logp - logp).masked_fill(~mask, 0.0)
    k3 = log_r.exp() - log_r - 1  # 0 outside mask
    objective = clipped_objective(ratio, advantages, eps, eps) - beta * k3
    per_response = objective.masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)
    return -per_response.sum() / num_responses


@torch.no_grad()
def ratio_sums(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    eps_low: float,
    eps_high: float,
) -> dict[str, torch.Tensor]:
    """Tokens, sum of rho, and the tokens whose gradient the clip takes away, below and above."""
    ratio = (logp - old_logp).masked_fill(~mask, 0.0).exp()
    low = (advantages[:, None] < 0) & (ratio < 1 - eps_low)
    high = (advantages[:, None] > 0) & (ratio > 1 + eps_high)
    return {
        "tokens": mask.sum(),
        "ratio_sum": ratio.masked_fill(~mask, 0.0).sum(),
        "clip_low": (low & mask).sum(),
        "clip_high": (high & mask).sum(),
    }


# ============================================================= the update, Sec. 3.3, Algorithm 1

# The methods that silence candidates; the others take tau_p = 0 (20-entropy has its own mask).
S2T_METHODS = ("stapo", "full-mask", "high-entropy", "random")


@dataclass
class Episode:
    """A response on its way through a step; its tensors are (T,), one entry for each token."""

    problem: dict
    response: Response
    reward: float
    advantage: float
    old_logp: torch.Tensor | None = None  # under pi_old
    ref_logp: torch.Tensor | None = None  # under the starting model, grpo only
    logp: torch.Tensor | None = None  # under the policy that forms the mask
    entropy: torch.Tensor | None = None
    collision: torch.Tensor | None = None
    noise: torch.Tensor | None = None  # the entropy's stand-in for --method random
    keep: torch.Tensor | None = None  # bool: carries a gradient


def micro_batches(episodes: list[Episode], budget: int) -> list[list[Episode]]:
    """Sorted by length and cut so that rows x longest row stays within `budget` tokens.

    Every rank gets the same number of batches: the short ones end with empty batches, whose
    forward keeps the ranks' collectives in step.
    """

    def size(episode: Episode) -> int:
        return len(episode.response.prompt_ids) + len(episode.response.ids)

    batches: list[list[Episode]] = []
    for episode in sorted(episodes, key=size, reverse=True):
        if batches and (len(batches[-1]) + 1) * size(batches[-1][0]) <= budget:
            batches[-1].append(episode)
        else:
            batches.append([episode])
    return batches + [[]] * (all_max(len(batches)) - len(batches))


def forward(model: Model, batch: list[Episode]) -> tuple[torch.Tensor, ...]:
    """logp, entropy, collision, response_mask of a micro-batch: (B, L); an empty one is a dummy."""
    responses = [e.response for e in batch] or [Response([0], [0], False, "")]
    input_ids, attention_mask, mask = pad_batch(responses, model.device)
    return *model.token_stats(input_ids, attention_mask, mask), mask


def spread(values: list[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """Ragged (T_i,) rows -> (B, L), laid on the True entries of mask, 0 elsewhere."""
    flat = torch.cat(values).to(mask.device)
    return torch.zeros(mask.shape, dtype=flat.dtype, device=mask.device).masked_scatter(mask, flat)


@torch.no_grad()
def score(model: Model, episodes: list[Episode], cfg: Config) -> list[tuple[torch.Tensor, ...]]:
    """[(logp, entropy, collision)] of every episode under this policy: (T,) float32, on the CPU."""
    scores = {}
    for batch in micro_batches(episodes, cfg.tokens_per_micro_batch):
        *stats, mask = forward(model, batch)
        for i, episode in enumerate(batch):
            scores[id(episode)] = tuple(values[i][mask[i]].cpu() for values in stats)
    distributed.reshard(model)
    return [scores[id(episode)] for episode in episodes]


def form_mask(episodes: list[Episode], cfg: Config) -> dict[str, float]:
    """Decide once for the whole mini-batch, over all ranks, which tokens carry a gradient.

    Sets `keep` of every episode. Returns the objective's denominator and the global counts of
    candidates and silenced tokens. An ablation is STAPO with another key in the entropy's place.
    """
    lengths = [len(e.response.ids) for e in episodes]
    logp = torch.cat([e.logp for e in episodes])  # (N,): all response tokens of this rank
    entropy = torch.cat([e.entropy for e in episodes])
    key = -entropy if cfg.method == "high-entropy" else entropy
    if cfg.method == "random":
        key = torch.cat([e.noise for e in episodes])
    advantages = torch.tensor([e.advantage for e in episodes])
    advantages = advantages.repeat_interleave(torch.tensor(lengths))
    # spurious_mask takes (B, T): the N tokens go in as N responses of one token each
    tokens = logp[:, None], advantages, key[:, None], torch.ones(len(logp), 1, dtype=torch.bool)
    tau_p = cfg.tau_p if cfg.method in S2T_METHODS else 0.0  # no probability is below 0
    candidates = spurious_mask(*tokens, tau_p=tau_p, tau_h=math.inf).squeeze(1)
    tau_h = quantile(all_cat(key if cfg.quantile_over == "all" else key[candidates]), cfg.q)
    if cfg.method == "full-mask":
        tau_h = math.inf
    silenced = spurious_mask(*tokens, tau_p=tau_p, tau_h=tau_h).squeeze(1)
    keep = ~silenced
    if cfg.method == "20-entropy":
        keep = entropy >= quantile(all_cat(entropy), 0.8)
    for episode, kept in zip(episodes, keep.split(lengths), strict=True):
        episode.keep = kept
    counts = {"responses": len(episodes), "kept": len(logp) - silenced.sum()}
    counts |= {"candidates": candidates.sum(), "silenced": silenced.sum()}
    counts["odd"] = (~(logp.isfinite() & entropy.isfinite())).sum()
    totals = all_sum(counts)
    # 20-entropy drops tokens and still divides by all of them; GRPO divides by responses
    totals["denominator"] = max(totals["responses" if cfg.method == "grpo" else "kept"], 1.0)
    return totals | {"tau_h": float(tau_h), "finite": totals["odd"] == 0}


def statistics_pass(model: Model, episodes: list[Episode], cfg: Config) -> None:
    """The statistics pass: p and H under the current policy, of the tokens the mask needs."""
    if cfg.method == "20-entropy" or (cfg.method == "stapo" and cfg.quantile_over == "all"):
        needed = episodes
    elif cfg.method in S2T_METHODS:
        needed = [e for e in episodes if e.advantage > 0]  # only they can hold candidates
    else:
        return
    for episode, stats in zip(needed, score(model, needed, cfg), strict=True):
        episode.logp, episode.entropy, episode.collision = stats


def batch_loss(
    cfg: Config,
    batch: list[Episode],
    logp: torch.Tensor,
    entropy: torch.Tensor,
    mask: torch.Tensor,
    denominator: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a micro-batch under --method, and its ratio sums."""
    old_logp = spread([e.old_logp for e in batch], mask)
    advantages = torch.tensor([e.advantage for e in batch], device=mask.device)
    eps_high = cfg.eps_low if cfg.method == "grpo" else cfg.eps_high
    sums = ratio_sums(logp, old_logp, advantages, mask, cfg.eps_low, eps_high)
    if cfg.method == "grpo":
        ref_logp = spread([e.ref_logp for e in batch], mask)
        args = logp, old_logp, ref_logp, advantages, mask
        clip = {"eps": cfg.eps_low, "beta": cfg.beta}
        return grpo_loss(*args, **clip, num_responses=denominator), sums
    # `keep` is I_{i,t}, decided for the whole mini-batch: tau_p = 0 asks for no second decision.
    keep = spread([e.keep for e in batch], mask)
    args = logp, old_logp, advantages, entropy, keep
    clip = {"eps_low": cfg.eps_low, "eps_high": cfg.eps_high}
    return stapo_loss(*args, tau_p=0.0, **clip, num_kept=denominator)[0], sums


def update(model: Model, optimizer: Optimizer | None, episodes: list[Episode], cfg: Config) -> dict:
    """One optimiser step on a mini-batch whose mask is formed from the episodes' logp and entropy.

    Responses with A = 0 have no gradient (without a KL term) and are left out of the passes; they
    stay in the denominator. Without an optimiser nothing but the mask is computed.
    """
    totals = form_mask(episodes, cfg)
    if optimizer is None:
        return totals
    with_kl = cfg.method == "grpo" and cfg.beta != 0
    trained = [e for e in episodes if e.advantage != 0 or with_kl]
    local = dict.fromkeys(("loss", "tokens", "ratio_sum", "clip_low", "clip_high"), 0.0)
    model.train()
    optimizer.zero_grad()
    for batch in micro_batches(trained, cfg.tokens_per_micro_batch):
        logp, entropy, _, mask = forward(model, batch)
        if not batch:
            (logp.sum() * 0).backward()
            continue
        # FSDP averages gradients over ranks, so a global sum is divided by the share of a rank.
        denominator = totals["denominator"] / world_size()
        loss, sums = batch_loss(cfg, batch, logp, entropy, mask, denominator)
        loss.backward()
        for name, value in {"loss": loss.detach() / world_size(), **sums}.items():
            local[name] += value.double().cpu()
    model.eval()
    for parameter in model.parameters():
        if parameter.grad is None:  # nothing was forwarded: AdamW still takes its step
            parameter.grad = torch.zeros_like(parameter)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    totals |= all_sum(local) | {"grad_norm": norm}
    totals["finite"] &= math.isfinite(norm) and math.isfinite(totals["loss"])
    if totals["finite"]:
        optimizer.step()
    return totals


# =============================================================================== data and rollouts


def training_problems(cfg: Config, tokenizer: Tokenizer) -> list[dict]:
    """[{"problem", "answer", "prompt_ids"}] with the prompts that are too long dropped aloud."""
    problems = load_problems(cfg.data)
    for problem in problems:
        problem["prompt_ids"] = encode_prompt(tokenizer, problem["problem"], cfg.instruction)
    kept = [p for p in problems if 0 < len(p["prompt_ids"]) <= cfg.max_prompt_tokens]
    if not kept:
        raise InputError(f"--max_prompt_tokens {cfg.max_prompt_tokens}: every prompt is longer")
    if rank() == 0:
        dropped = len(problems) - len(kept)
        print(f"{cfg.data}: {len(kept)} problems, {dropped} over --max_prompt_tokens dropped")
    return kept


def batch_indices(step: int, size: int, batch_size: int, seed: int) -> list[int]:
    """Which problems step 1, 2, ... trains on: epochs of shuffles, a pure function of the seed."""
    first = (step - 1) * batch_size
    epochs = range(first // size, (first + batch_size - 1) // size + 1)
    order = torch.cat([torch.randperm(size, generator=seeded(seed, epoch)) for epoch in epochs])
    first -= epochs[0] * size
    return order[first : first + batch_size].tolist()


def mix(*numbers: int) -> int:
    """One seed from several small numbers, distinct for distinct numbers below a million."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number) % 2**63
    return seed


def seeded(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(mix(*numbers))


def collect(
    model: Model, tokenizer: Tokenizer, problems: list[dict], step: int, cfg: Config
) -> list[list[Episode]]:
    """Sample, reward and score this rank's share of step's prompts: a list for each mini-batch.

    Each rank takes its slice of every mini-batch, so the mini-batches do not depend on the ranks.
    """
    indices = batch_indices(step, len(problems), cfg.batch_size, cfg.seed)
    places = torch.arange(cfg.batch_size).view(
        -1, world_size(), cfg.mini_batch_size // world_size()
    )
    mine = places[:, rank()].flatten().repeat_interleave(cfg.group_size).tolist()
    chosen = [problems[indices[place]] for place in mine]
    with distributed.unsharded(model):
        responses = sample(
            model,
            tokenizer,
            [problem["prompt_ids"] for problem in chosen],
            max_new_tokens=cfg.max_new_tokens,
            batch_size=cfg.rollout_batch_size,
            seed=mix(cfg.seed, step, rank()),
            progress="rollout" if rank() == 0 else None,
        )
    rewards = [math_reward(r.text, p["answer"]) for r, p in zip(responses, chosen, strict=True)]
    rewards = torch.tensor(rewards).nan_to_num(nan=-1.0)  # what cannot be graded is not right
    advantages = group_advantages(rewards.view(-1, cfg.group_size)).flatten()  # (P, G) -> (P G,)
    rows = zip(chosen, responses, rewards.tolist(), advantages.tolist(), strict=True)
    episodes = [Episode(*row) for row in rows]
    scores = score(model, episodes, cfg)
    for place, (episode, stats) in enumerate(zip(episodes, scores, strict=True)):
        episode.logp, episode.entropy, episode.collision = stats
        episode.old_logp = episode.logp
        key = seeded(cfg.seed, step, mine[place], place % cfg.group_size)
        episode.noise = torch.rand(len(episode.logp), generator=key)
    size = len(episodes) * cfg.mini_batch_size // cfg.batch_size
    return [episodes[i : i + size] for i in range(0, len(episodes), size)]


# ================================================================================== the run itself


def rollout_metrics(episodes: list[Episode], cfg: Config) -> dict[str, float | None]:
    """Under pi_old, over every response of every rank; the README defines each key."""
    entropy = all_cat(torch.cat([e.entropy for e in episodes]))
    right = [e for e in episodes if e.reward > 0]
    low_prob = sum(int((e.old_logp.exp() < cfg.tau_p).sum()) for e in right)
    sums = {"responses": len(episodes), "right": len(right), "low_prob": low_prob}
    sums["right_tokens"] = sum(len(e.response.ids) for e in right)
    sums["truncated"] = sum(e.response.truncated for e in episodes)
    sums["reward"] = sum(e.reward for e in episodes)
    sums["zero"] = sum(e.advantage == 0 for e in episodes)
    total = all_sum(sums)
    count, right_tokens = total["responses"], total["right_tokens"]
    return {
        "reward": total["reward"] / count,
        "accuracy": total["right"] / count,
        "zero_advantage_fraction": total["zero"] / count,
        "entropy": float(entropy.double().mean()),
        **{f"entropy_p{p}": float(quantile(entropy, p / 100)) for p in (50, 80, 95, 99)},
        "low_prob_fraction": total["low_prob"] / right_tokens if right_tokens else None,
        "tokens": len(entropy),
        "response_length": len(entropy) / count,
        "truncated_fraction": total["truncated"] / count,
    }


def update_metrics(totals: list[dict], tokens: int) -> dict[str, float | None]:
    """Sums over the mini-batches of a step -> its share of the metrics line."""
    total = {key: sum(t[key] for t in totals) for key in totals[0]}
    forwarded = total.get("tokens", 0)

    def per_token(key: str) -> float | None:
        return total[key] / forwarded if forwarded else None

    def mean(key: str) -> float | None:
        return total[key] / len(totals) if key in total else None

    return {
        "candidates": int(total["candidates"]),
        "silenced": int(total["silenced"]),
        "silenced_fraction": total["silenced"] / tokens,
        "clip_low": per_token("clip_low"),
        "clip_high": per_token("clip_high"),
        "ratio_mean": per_token("ratio_sum"),
        "loss": mean("loss"),
        "grad_norm": mean("grad_norm"),
        "skipped_updates": len(totals) - total["finite"],
    }


DUMPED_TOKENS, DUMPED_CASES = 20_000, 32  # bounds of a dump, over all ranks


def dump_tokens(
    path: Path,
    step: int,
    model: Model,
    tokenizer: Tokenizer,
    mini_batches: list[list[Episode]],
    cfg: Config,
) -> None:
    """Write what figures.py draws: tokens of responses with A > 0, as pi_old sees them.

    Half of them are low-probability tokens; `weight` is how many tokens each stands for.
    """
    tau_h = [form_mask(mini_batch, cfg)["tau_h"] for mini_batch in mini_batches]
    episodes = [e for mini_batch in mini_batches for e in mini_batch]
    positive = [e for e in episodes if e.advantage > 0]
    ends = list(itertools.accumulate(len(e.logp) for e in positive))
    low = torch.cat([torch.zeros(0), *(e.logp for e in positive)]).exp() < cfg.tau_p
    generator, tokens, rare = seeded(cfg.seed, step), [], []
    for kind in (low, ~low):
        shuffled = kind.nonzero().flatten()[torch.randperm(int(kind.sum()), generator=generator)]
        chosen = shuffled[: DUMPED_TOKENS // 2 // world_size()].tolist()
        for index in chosen:
            number = bisect.bisect(ends, index)
            e, t = positive[number], index - ends[number]  # t < 0: from the response's end
            token = {"token": to_text(tokenizer, [e.response.ids[t]]), "p": float(e.logp[t].exp())}
            token |= {"entropy": float(e.entropy[t]), "collision": float(e.collision[t])}
            token |= {"advantage": e.advantage, "silenced": bool(low[index] & ~e.keep[t])}
            tokens.append(token | {"weight": len(shuffled) / len(chosen)})
            rare += [(tokens[-1], e, t)] if low[index] else []
    describe(model, tokenizer, rare[: DUMPED_CASES // world_size()])
    counts = all_sum({"positive": len(low), "all": sum(len(e.logp) for e in episodes)})
    dump = {
        "step": step,
        "method": cfg.method,
        "tau_p": cfg.tau_p,
        "tau_h": [tau if math.isfinite(tau) else None for tau in tau_h],
        "positive_tokens": int(counts["positive"]),
        "all_tokens": int(counts["all"]),
        "tokens": list(itertools.chain(*distributed.gather(tokens))),
    }
    if rank() == 0:
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".partial").write_text(json.dumps(dump))
        path.with_suffix(".partial").rename(path)


@torch.no_grad()
def describe(model: Model, tokenizer: Tokenizer, cases: list[tuple[dict, Episode, int]]) -> None:
    """The paper's case tables: adds to a token its context and the five likeliest alternatives."""
    idle = {}, Episode({"problem": ""}, Response([0], [0], False, ""), 0.0, 0.0), 0
    for token, e, t in cases + [idle] * (all_max(len(cases)) - len(cases)):  # ranks stay in step
        before = e.response.prompt_ids + e.response.ids[:t]
        logits = model(torch.tensor([before], device=model.device), logits_to_keep=1).logits
        top = logits[0, -1].float().softmax(-1).topk(5)
        likely = zip(top.indices.tolist(), top.values.tolist())
        token |= {"problem": e.problem["problem"], "context": to_text(tokenizer, before)[-200:]}
        token |= {"top": [[to_text(tokenizer, [i]), p] for i, p in likely]}
    distributed.reshard(model)


def peak_memory_gb() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # KiB on Linux


def show(episode: Episode, step: int) -> None:
    """A sample for the reader's eye: problem, response, verdict."""
    verdict = "right" if episode.reward > 0 else "wrong"
    text = episode.response.text.strip()
    text = text if len(text) <= 600 else f"{text[:300]} [...] {text[-300:]}"
    problem, answer = episode.problem["problem"], episode.problem["answer"]
    tqdm.write(f"--- step {step}, {verdict} (the answer is {answer}): {problem}\n{text}")


def check(cfg: Config) -> None:
    """Refuse flags that cannot work; raises InputError naming the flag."""

    def need(name: str, holds: bool, why: str) -> None:
        if not holds:
            raise InputError(f"--{name} {getattr(cfg, name)}: {why}")

    need("q", 0 <= cfg.q <= 1, "a quantile is between 0 and 1")
    need("tau_p", 0 <= cfg.tau_p <= 1, "a probability is between 0 and 1")
    need("group_size", cfg.group_size >= 2, "an advantage needs at least 2")
    v1 = cfg.quantile_over == "all"
    need("quantile_over", cfg.method == "stapo" or not v1, "a definition of --method stapo alone")
    default_beta = cfg.beta == Config.beta
    need("beta", cfg.method == "grpo" or default_beta, "only --method grpo has a KL term")
    need("resume", bool(cfg.output or not cfg.resume), "name the run to continue with --output")
    sizes = "steps batch_size mini_batch_size max_new_tokens rollout_batch_size keep_last"
    for name in (*sizes.split(), "tokens_per_micro_batch"):
        need(name, getattr(cfg, name) >= 1, "has to be at least 1")
    rates = "lr warmup_steps weight_decay eps_low eps_high beta save_every eval_every dump_every"
    for name in rates.split():
        need(name, 0 <= getattr(cfg, name) < math.inf, "has to be at least 0")
    need("grad_clip", cfg.grad_clip > 0, "has to be above 0")
    whole = cfg.batch_size % cfg.mini_batch_size == 0
    need("batch_size", whole, f"not a multiple of --mini_batch_size {cfg.mini_batch_size}")
    whole = cfg.mini_batch_size % world_size() == 0
    need("mini_batch_size", whole, f"not a multiple of {world_size()} ranks")


def train(cfg: Config) -> None:
    """The training loop: a rollout batch and its optimiser steps, --steps times."""
    check(cfg)
    tokenizer = load_tokenizer(cfg.model)
    problems = training_problems(cfg, tokenizer)
    suite = evaluation.load_benchmarks(cfg.eval_benchmarks) if cfg.eval_every else {}
    run = cfg.output or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{cfg.method}"
    run, checkpoint = distributed.open_run(run, cfg.resume, asdict(cfg))
    model = distributed.load_policy(str(checkpoint or cfg.model))
    reference = distributed.load_policy(cfg.model) if cfg.method == "grpo" else None
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = None  # --lr 0 measures the model and leaves it as it is
    if cfg.lr > 0:
        fused = model.device.type == "cuda"
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay, fused=fused
        )
    done = distributed.step_of(checkpoint)
    if checkpoint and optimizer:
        distributed.load_optimizer(checkpoint, model, optimizer)
    bad, stop, found = 0, StopSignal(), Counter()
    bar = tqdm(total=cfg.steps, initial=done, desc=cfg.method, disable=rank() > 0)
    for step in range(done + 1, cfg.steps + 1):
        started = time.time()
        model.zero_grad()  # gradients take no memory during a rollout
        mini_batches = collect(model, tokenizer, problems, step, cfg)
        episodes = [episode for mini_batch in mini_batches for episode in mini_batch]
        if reference:
            scores = score(reference, episodes, cfg)
            for episode, (ref_logp, *_) in zip(episodes, scores, strict=True):
                episode.ref_logp = ref_logp
        if cfg.dump_every and step % cfg.dump_every == 0:
            path = run / "dumps" / f"step_{step:06d}.json"
            dump_tokens(path, step, model, tokenizer, mini_batches, cfg)
        metrics = {"step": step} | rollout_metrics(episodes, cfg)
        rolled_out = time.time()
        lr = cfg.lr * min(1.0, step / max(1, cfg.warmup_steps))
        totals = []
        for number, mini_batch in enumerate(mini_batches):
            if optimizer:
                optimizer.param_groups[0]["lr"] = lr
                if number > 0:  # before the first, pi_theta = pi_old: its statistics are there
                    statistics_pass(model, mini_batch, cfg)
            totals.append(update(model, optimizer, mini_batch, cfg))
            bad = 0 if totals[-1]["finite"] else bad + 1
            if bad == 3:
                raise SystemExit(f"stapo.py: step {step}: three updates in a row were not finite")
        metrics |= update_metrics(totals, metrics["tokens"])
        found.update({key: metrics[key] for key in ("tokens", "silenced")})
        finished = time.time()
        metrics |= {
            "lr": lr,
            "rollout_seconds": rolled_out - started,
            "update_seconds": finished - rolled_out,
            "tokens_per_second": metrics["tokens"] / (finished - started),
            "peak_memory_gb": peak_memory_gb(),
        }
        if cfg.eval_every and step % cfg.eval_every == 0:
            with distributed.unsharded(model):
                metrics["eval"] = evaluation.evaluate(model, tokenizer, suite, cfg)
        stopping = all_max(int(stop.asked)) > 0
        if rank() == 0:
            with open(run / "metrics.jsonl", "a") as log:
                log.write(json.dumps(finite(metrics)) + "\n")
            bar.update()
            keys = ("accuracy", "entropy", "silenced_fraction")
            bar.set_postfix({key.split("_")[0]: f"{metrics[key]:.2g}" for key in keys})
            if step % 10 == 1:
                show(episodes[0], step)
        last = stopping or step == cfg.steps
        if optimizer and (last or (cfg.save_every and step % cfg.save_every == 0)):
            distributed.save(run, step, model, optimizer, tokenizer, cfg.keep_last)
        if stopping:
            if rank() == 0:
                bar.write(f"stopped after step {step}; continue with --resume --output {run}")
            break
    bar.close()
    if rank() == 0 and not optimizer and found:
        percent = 100 * found["silenced"] / found["tokens"]
        print(f"{found['silenced']} of {found['tokens']} tokens are spurious: {percent:.4f} %")


def finite(metrics: dict) -> dict:
    """JSON knows no NaN or infinity: they become null."""
    odd = (k for k, v in metrics.items() if isinstance(v, float) and not math.isfinite(v))
    return metrics | dict.fromkeys(odd)


class StopSignal:
    """Ctrl-C and SIGTERM ask for a stop after the step; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask)

    def ask(self, number: int, _frame) -> None:
        tqdm.write("stopping after this step (Ctrl-C again: at once)", file=sys.stderr)
        self.asked = True
        signal.signal(number, signal.default_int_handler)


class Parser(HfArgumentParser):
    """Reads @file as a command line: many flags to a line, quotes, comments."""

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return shlex.split(arg_line, comments=True)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(Config, description=__doc__.split("\n")[0], fromfile_prefix_chars="@")
    cfg = Config(**vars(parser.parse_args(argv)))
    logging.disable_progress_bar()
    distributed.start()
    try:
        train(cfg)
    except (InputError, OSError) as error:  # wrong flags, a full disk
        sys.exit(f"stapo.py: {error}")
    finally:
        distributed.finish()


if __name__ == "__main__":
    main()
