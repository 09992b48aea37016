"""STAPO: Spurious-Token-Aware Policy Optimization (arXiv 2602.15620), in one readable file.

    python stapo.py --model Qwen/Qwen3-1.7B-Base                        # the paper's recipe
    python stapo.py @tests/tiny/args                                    # a CPU, a few minutes
    torchrun --nproc-per-node 8 stapo.py --model Qwen/Qwen3-14B-Base    # the same under FSDP2

Algorithm 1 of the paper, and the function that does each of its lines:

    repeat                                                                     train
        pi_old = pi_theta;  y_1 .. y_G ~ pi_old(.|x) for each of B prompts x   collect, sample
        R = +1 or -1;  A_i = (R_i - mean R) / std R within each group          group_advantages
        for each mini-batch:
            p and H of its tokens under the current policy pi_theta            statistics_pass
            I = 0 where A > 0 and p < tau_p and H < tau_h, else 1              spurious_mask
            J = 1 / (sum I) * sum I min(rho A, clip(rho) A)                    clipped_loss
            one AdamW step up the gradient of J                                update

Read from top to bottom: the flags, the loss beside its equations, the update of a mini-batch, the
collection of a rollout batch, the loop, main. support/bookkeeping.py keeps the records of a run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.optim import Optimizer

import eval as evaluation
from reward import load_reward
from rollout import (
    INSTRUCTION,
    Episode,
    Model,
    Response,
    Tokenizer,
    load_tokenizer,
    pad_batch,
    sample,
    sampling_gap,
)
from support import bookkeeping, distributed
from support.bookkeeping import Run, stop
from support.distributed import all_cat, all_max, all_sum, rank, world_size
from support.seeds import generator, mix_seed, uniform


def flag(default: object, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Config:
    """Every flag; the defaults are the paper's training setup (appendix)."""

    model: str = flag("Qwen/Qwen3-1.7B-Base", "Hub id or local folder of a causal LM")
    data: str = flag("BytedTsinghua-SIA/DAPO-Math-17k", "Hub id, .jsonl or .parquet")
    instruction: str = flag(INSTRUCTION, "follows every problem; may be empty")
    reward: str = flag("", "FILE.py:FUNCTION in place of the grader: (response, row) -> float")
    output: str = flag("", "run directory; empty: a fresh one under runs/")
    resume: bool = flag(False, "continue the run in --output, with its flags")
    # the objective
    method: Literal[
        "stapo", "justrl", "grpo", "20-entropy", "full-mask", "high-entropy", "random"
    ] = flag("stapo", "STAPO, a baseline or an ablation")
    tau_p: float = flag(0.002, "S2T: a token is a candidate below this probability")
    q: float = flag(0.75, "S2T: silence candidates below this quantile of entropy")
    quantile_over: Literal["candidates", "all"] = flag(
        "candidates", "S2T: tokens whose entropies give tau_h (all, with --q 0.8: the paper's v1)"
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
    threads: int = flag(0, "CPU threads of each rank (0: torch's choice)")
    save_every: int = flag(50, "steps between checkpoints (0: only by --save_minutes)")
    save_minutes: float = flag(60, "minutes between checkpoints at most (0: only by --save_every)")
    keep_last: int = flag(2, "checkpoints kept")
    log_samples: int = flag(8, "responses of every step that go to samples.jsonl")
    dump_every: int = flag(0, "steps between dumps of tokens for figures.py (0: none)")
    eval_every: int = flag(0, "steps between evaluations (0: none)")
    eval_benchmarks: list[str] = field(
        default_factory=lambda: ["aime24"], metadata={"help": "eval.py's names or .jsonl files"}
    )


# =========================================================================== the loss, Sec. 2 and 3
#
# B responses of at most T tokens. `mask` is True on response tokens; everything outside it is
# padding, may hold any garbage, and reaches neither the loss nor the gradient.


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Sec. 2.2: A_i = (R_i - mean_j R_j) / std_j R_j within each group, std unbiased (n - 1).

    rewards (P, G) float, G >= 2, a row for each prompt -> (P, G). A group whose rewards are all
    equal has A = 0: it is found by max == min, as rounding can leave its std above zero.
    Eight responses of which two are right: 1.62 for those two, -0.54 for the other six.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # (P, G)
    all_equal = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)  # (P, 1)
    return torch.where(all_equal, torch.zeros_like(rewards), centred / rewards.std(1, keepdim=True))


def quantile(values: torch.Tensor, q: float | torch.Tensor) -> torch.Tensor:
    """Linear-interpolated quantiles of a 1-D tensor of any size; -inf of an empty one.

    The result has the shape of q. torch.quantile raises on empty input and above 16 million
    values; a batch can hold more.
    """
    q = torch.as_tensor(q, dtype=torch.float64, device=values.device)
    if values.numel() == 0:
        return torch.full_like(q, float("-inf"), dtype=values.dtype)
    ordered = values.sort().values
    position = q * (len(ordered) - 1)
    low = position.long()
    high = (low + 1).clamp(max=len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], (position - low).to(values.dtype))


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
    """Sec. 3.3, S2T (silencing spurious tokens). Returns (B, T) bool, True = silenced (I = 0):

        I_it = 0   if A_i > 0 and pi(y_it) < tau_p and H_it < tau_h
             = 1   otherwise

    logp, entropy (B, T) float32 of the current policy, entropy in nats; advantages (B,); mask
    (B, T) bool. tau_h is the q-quantile of the entropies of the candidates, which are the
    low-probability tokens of right responses. None takes it from this call, which has to see the
    whole mini-batch for that. Without candidates nothing is silenced.
    """
    p = logp.exp()  # (B, T)
    candidates = mask & (advantages[:, None] > 0) & (p < tau_p)  # (B, T)
    if tau_h is None:
        tau_h = quantile(entropy[candidates], q)
    return candidates & (entropy < tau_h)


def clipped_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    keep: torch.Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    num_kept: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Sec. 3.1, the objective over the tokens that `keep` (the paper's I) leaves. Returns -J:

        J = 1 / (sum I_it) * sum I_it min(rho_it A_i, clip(rho_it, 1 - eps_low, 1 + eps_high) A_i)
        rho_it = pi_theta(y_it) / pi_old(y_it)

    logp (B, T) float32 with gradient: ln pi_theta of each response token; old_logp (B, T): the
    same under pi_old; advantages (B,) float32; keep (B, T) bool. num_kept is sum I; None counts
    this call's. It belongs to the whole mini-batch: micro-batches are handed its count, and under
    FSDP, which averages gradients over ranks, the global count / world size.
    With I = 1 on every response token this is DAPO and JustRL (Sec. 2.3).
    """
    log_rho = (logp - old_logp).masked_fill(~keep, 0.0)  # (B, T), masked first: exp can overflow
    rho = log_rho.exp()  # (B, T)
    A = advantages[:, None]  # (B, 1): every token of y_i has the same A_i
    J = torch.min(rho * A, rho.clamp(1 - eps_low, 1 + eps_high) * A)  # (B, T)
    J = J.masked_fill(~keep, 0.0)  # (B, T)
    if num_kept is None:
        num_kept = keep.sum().clamp(min=1)
    return -J.sum() / num_kept


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
    """STAPO in one call: spurious_mask, then clipped_loss over the tokens that it leaves.

    logp (B, T) float32 with gradient: ln pi_theta of each response token (temperature 1, full
    vocabulary); old_logp (B, T): the same under pi_old; advantages (B,); entropy (B, T) nats, of
    the current policy, never given a gradient; mask (B, T) bool, True on response tokens.
    tau_h and num_kept belong to the whole mini-batch: None takes them from this call, which is
    right when the call sees all of it.
    Returns the loss, a 0-dim tensor, and detached 0-dim sums that add up over micro-batches.
    """
    tokens = logp, advantages, entropy, mask
    candidates = spurious_mask(*tokens, tau_p=tau_p, tau_h=float("inf"))  # (B, T)
    silenced = spurious_mask(*tokens, tau_p=tau_p, q=q, tau_h=tau_h)  # (B, T)
    keep = mask & ~silenced  # (B, T): the paper's I
    clip = {"eps_low": eps_low, "eps_high": eps_high}
    loss = clipped_loss(logp, old_logp, advantages, keep, **clip, num_kept=num_kept)
    metrics = {
        "candidates": candidates.sum(),
        "silenced": silenced.sum(),
        "entropy_sum": entropy.detach().masked_fill(~mask, 0.0).sum(),
        **ratio_sums(logp, old_logp, advantages, mask, **clip),
    }
    return loss, metrics


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
    """Tokens, sum of rho, and the tokens whose gradient the clip takes away, below and above."""
    rho = (logp - old_logp).masked_fill(~mask, 0.0).exp()  # (B, T)
    low = (advantages[:, None] < 0) & (rho < 1 - eps_low)  # (B, T)
    high = (advantages[:, None] > 0) & (rho > 1 + eps_high)  # (B, T)
    return {
        "tokens": mask.sum(),
        "ratio_sum": rho.masked_fill(~mask, 0.0).sum(),
        "clip_low": (low & mask).sum(),
        "clip_high": (high & mask).sum(),
    }


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
    """Sec. 2.2, the GRPO baseline: a mean over the tokens of each response, then over responses:

        J = 1/G sum_i 1/|y_i| sum_t [min(rho A, clip(rho, 1 - eps, 1 + eps) A) - beta k3]
        k3 = r - ln r - 1 with r = pi_ref / pi_theta, an estimate of KL(pi_theta || pi_ref)

    Shapes as in stapo_loss; ref_logp (B, T) under the starting model. Returns -J, 0-dim.
    """
    rho = (logp - old_logp).masked_fill(~mask, 0.0).exp()  # (B, T)
    A = advantages[:, None]  # (B, 1)
    log_r = (ref_logp - logp).masked_fill(~mask, 0.0)  # (B, T)
    k3 = log_r.exp() - log_r - 1  # (B, T)
    J = torch.min(rho * A, rho.clamp(1 - eps, 1 + eps) * A) - beta * k3  # (B, T)
    per_response = J.masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)  # (B,)
    return -per_response.sum() / num_responses


# ============================================================= the update, Sec. 3.3, Algorithm 1

# The methods that silence candidates; 20-entropy has a mask of its own.
S2T_METHODS = ("stapo", "full-mask", "high-entropy", "random")


def micro_batches(episodes: list[Episode], budget: int) -> list[list[Episode]]:
    """Sorted by length and cut so that rows x longest row stays within `budget` tokens.

    Every rank gets the same number of batches: the short ones end with empty batches, whose
    forward keeps the ranks' collectives in step.
    """
    batches: list[list[Episode]] = []
    for episode in sorted(episodes, key=lambda e: e.response.length, reverse=True):
        if batches and (len(batches[-1]) + 1) * batches[-1][0].response.length <= budget:
            batches[-1].append(episode)
        else:
            batches.append([episode])
    return batches + [[]] * (all_max(len(batches)) - len(batches))


def forward(model: Model, batch: list[Episode]) -> tuple[torch.Tensor, ...]:
    """logp, entropy, collision, response_mask of a micro-batch: (B, L); an empty one is a dummy."""
    stop.leave_if_asked()  # every rank calls this equally often
    responses = [e.response for e in batch] or [Response([0], [0], False, "")]
    input_ids, attention_mask, mask = pad_batch(responses, model.device)
    return *model.token_stats(input_ids, attention_mask, mask), mask


def pad_like(rows: list[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """Ragged (T_i,) rows -> a tensor of mask's shape: the rows where mask is True, 0 elsewhere."""
    flat = torch.cat(rows).to(mask.device)
    return torch.zeros(mask.shape, dtype=flat.dtype, device=mask.device).masked_scatter(mask, flat)


@torch.no_grad()
def token_statistics(
    model: Model, episodes: list[Episode], cfg: Config
) -> list[tuple[Episode, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(episode, logp, entropy, collision) of each, under this model: (T,) float32 on the CPU."""
    statistics = []
    batches = micro_batches(episodes, cfg.tokens_per_micro_batch)
    for batch in distributed.progress(batches, "score"):
        *stats, mask = forward(model, batch)
        stats = torch.stack(stats)[:, mask].cpu()  # (3, N): one transfer for the whole batch
        rows = stats.split([len(e.response.ids) for e in batch], dim=1) if batch else []
        statistics += [(episode, *row) for episode, row in zip(batch, rows, strict=True)]
    distributed.reshard(model)
    return statistics


def statistics_pass(model: Model, episodes: list[Episode], cfg: Config) -> None:
    """Algorithm 1: p and H under the current policy, of those responses that the mask looks at."""
    if cfg.method == "20-entropy" or (cfg.method == "stapo" and cfg.quantile_over == "all"):
        needed = episodes
    elif cfg.method in S2T_METHODS:
        needed = [e for e in episodes if e.advantage > 0]  # only they can hold candidates
    else:
        return
    for e, logp, entropy, collision in token_statistics(model, needed, cfg):
        e.logp, e.entropy, e.collision = logp, entropy, collision


def form_mask(episodes: list[Episode], cfg: Config) -> dict[str, float]:
    """Decide once for the whole mini-batch, over all ranks, which tokens carry a gradient.

    Sets `keep` and `tau_h` of every episode. Returns the objective's denominator, the global
    counts of candidates and silenced tokens, and whether all statistics are finite. An ablation
    is STAPO with another number in the entropy's place.
    """
    lengths = torch.tensor([len(e.response.ids) for e in episodes])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]  # (B, T)
    logp = pad_like([e.logp for e in episodes], mask)
    entropy = pad_like([e.entropy for e in episodes], mask)
    advantages = torch.tensor([e.advantage for e in episodes])
    ranked_by = entropy
    if cfg.method == "high-entropy":
        ranked_by = -entropy
    elif cfg.method == "random":
        ranked_by = pad_like([e.noise for e in episodes], mask)
    candidates, tau_h = torch.zeros_like(mask), torch.tensor(-math.inf)
    if cfg.method in S2T_METHODS:
        s2t = {"logp": logp, "advantages": advantages, "entropy": ranked_by, "mask": mask}
        candidates = spurious_mask(**s2t, tau_p=cfg.tau_p, tau_h=math.inf)
        among = mask if cfg.quantile_over == "all" else candidates
        tau_h = quantile(all_cat(ranked_by[among]), cfg.q)
    silenced = candidates if cfg.method == "full-mask" else candidates & (ranked_by < tau_h)
    keep = mask & ~silenced
    if cfg.method == "20-entropy":
        keep = mask & (entropy >= quantile(all_cat(entropy[mask]), 0.8))
    for e, row, length in zip(episodes, keep, lengths.tolist(), strict=True):
        e.keep, e.tau_h = row[:length], float(tau_h)
    unusable = mask & ~(logp.isfinite() & entropy.isfinite())
    counts = {"responses": len(episodes), "averaged": (mask & ~silenced).sum()}
    counts |= {"candidates": candidates.sum(), "silenced": silenced.sum()}
    totals = all_sum(counts | {"unusable": unusable.sum()})
    # 20-entropy drops tokens and still divides by all of them; GRPO divides by responses
    totals["denominator"] = max(totals["responses" if cfg.method == "grpo" else "averaged"], 1.0)
    return totals | {"finite": totals["unusable"] == 0}


def batch_loss(
    cfg: Config, batch: list[Episode], logp: torch.Tensor, mask: torch.Tensor, denominator: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a micro-batch under --method, and its ratio sums. logp, mask (B, L)."""
    old_logp = pad_like([e.old_logp for e in batch], mask)
    advantages = torch.tensor([e.advantage for e in batch], device=mask.device)
    eps_high = cfg.eps_low if cfg.method == "grpo" else cfg.eps_high
    clip = {"eps_low": cfg.eps_low, "eps_high": eps_high}
    sums = ratio_sums(logp, old_logp, advantages, mask, **clip)
    if cfg.method == "grpo":
        # without a KL term no reference is loaded: pi_theta itself makes the term zero
        ref_logp = pad_like([e.ref_logp for e in batch], mask) if cfg.beta else logp.detach()
        args = logp, old_logp, ref_logp, advantages, mask
        options = {"eps": cfg.eps_low, "beta": cfg.beta, "num_responses": denominator}
        return grpo_loss(*args, **options), sums
    keep = pad_like([e.keep for e in batch], mask)
    return clipped_loss(logp, old_logp, advantages, keep, **clip, num_kept=denominator), sums


def update(model: Model, optimizer: Optimizer | None, episodes: list[Episode], cfg: Config) -> dict:
    """One optimiser step on a mini-batch whose mask is formed from the episodes' logp and entropy.

    Responses with A = 0 have no gradient (without a KL term) and are left out of the passes; they
    stay in the denominator. Without an optimiser nothing but the mask is computed. Returns the
    sums of form_mask and ratio_sums over all ranks, the loss and the gradient's norm.
    """
    totals = form_mask(episodes, cfg)
    if optimizer is None:
        return totals
    # FSDP averages gradients over ranks, so a global denominator is divided by their number.
    denominator = totals["denominator"] / world_size()
    with_kl = cfg.method == "grpo" and cfg.beta != 0
    trained = [e for e in episodes if e.advantage != 0 or with_kl]
    local = dict.fromkeys(("loss", "tokens", "ratio_sum", "clip_low", "clip_high"), 0.0)
    model.train()
    optimizer.zero_grad()
    batches = micro_batches(trained, cfg.tokens_per_micro_batch)
    for batch in distributed.progress(batches, "update"):
        logp, _, _, mask = forward(model, batch)
        if not batch:
            (logp.sum() * 0).backward()
            continue
        loss, sums = batch_loss(cfg, batch, logp, mask, denominator)
        loss.backward()
        for name, value in {"loss": loss.detach() / world_size(), **sums}.items():
            local[name] += value.double()
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


# ============================================================= collecting a rollout batch, Sec. 2.2


def batch_indices(step: int, size: int, batch_size: int, seed: int) -> list[int]:
    """Which problems step 1, 2, ... trains on: epochs of shuffles, a pure function of the seed."""
    first = (step - 1) * batch_size
    epochs = range(first // size, (first + batch_size - 1) // size + 1)
    order = torch.cat([torch.randperm(size, generator=generator(seed, epoch)) for epoch in epochs])
    first -= epochs[0] * size
    return order[first : first + batch_size].tolist()


def collect(
    model: Model,
    tokenizer: Tokenizer,
    problems: list[dict],
    step: int,
    cfg: Config,
    reward: Callable[[str, dict], float],
) -> list[list[Episode]]:
    """Sample, reward and score this rank's share of step's prompts: a list for each mini-batch.

    Each rank takes its slice of every mini-batch, so the mini-batches do not depend on the ranks.
    """
    indices = batch_indices(step, len(problems), cfg.batch_size, cfg.seed)
    share = cfg.mini_batch_size // world_size()  # prompts of each mini-batch on each rank
    starts = range(rank() * share, cfg.batch_size, cfg.mini_batch_size)
    prompts = [start + i for start in starts for i in range(share)]  # this rank's, in the batch
    pairs = [(prompt, member) for prompt in prompts for member in range(cfg.group_size)]
    chosen = [problems[indices[prompt]] for prompt, _ in pairs]
    seeds = [mix_seed(cfg.seed, step, *pair) for pair in pairs]
    with distributed.gathered(model) as policy:
        responses = stop.interruptible(sample)(
            policy,
            tokenizer,
            [problem["prompt_ids"] for problem in chosen],
            max_new_tokens=cfg.max_new_tokens,
            batch_size=cfg.rollout_batch_size,
            seed=seeds,
            progress="rollout" if rank() == 0 else None,
        )
    stop.leave_if_asked()
    rewards = bookkeeping.grade(reward, responses, chosen)
    groups = torch.tensor(rewards).view(-1, cfg.group_size)  # (P, G)
    advantages = group_advantages(groups).flatten().tolist()  # (P G,)
    episodes = list(map(Episode, chosen, responses, rewards, advantages))
    for e, logp, entropy, collision in token_statistics(model, episodes, cfg):
        e.logp, e.entropy, e.collision = logp, entropy, collision
        e.old_logp = logp
    for e, seed in zip(episodes, seeds, strict=True):  # at negative positions: sampling uses none
        e.noise = uniform(torch.tensor(seed), -1 - torch.arange(len(e.logp))).float()
    size = share * cfg.group_size
    return [episodes[i : i + size] for i in range(0, len(episodes), size)]


def entropy_metrics(episodes: list[Episode]) -> dict[str, float]:
    """Token entropy under pi_old over every rank's responses, in nats, and the sampling check."""
    entropy = all_cat(torch.cat([e.entropy for e in episodes]))
    old_logp = all_cat(torch.cat([e.old_logp for e in episodes]))
    gap, z = sampling_gap(old_logp, entropy, torch.ones_like(entropy, dtype=torch.bool))
    shares = torch.tensor([0.5, 0.8, 0.95, 0.99], dtype=torch.float64)
    names = ("entropy_p50", "entropy_p80", "entropy_p95", "entropy_p99")
    named = dict(zip(names, quantile(entropy, shares).tolist(), strict=True))
    named |= {"entropy": float(entropy.double().mean())}
    return named | {"sampling_gap": float(gap), "sampling_z": float(z)}


# ============================================================================== the training loop


def train(cfg: Config) -> None:
    """Algorithm 1, --steps times."""
    bookkeeping.check_flags(cfg)
    tokenizer = load_tokenizer(cfg.model)
    problems = bookkeeping.training_problems(cfg, tokenizer)
    reward = load_reward(cfg.reward)
    names = cfg.eval_benchmarks if cfg.eval_every else []
    suite = evaluation.load_benchmarks(names, flag="--eval_benchmarks")
    run = Run(cfg)
    model, reference, optimizer = bookkeeping.load_policies(cfg, run.checkpoint)
    with run.holding(model, optimizer, tokenizer):
        for step in run.steps():
            # 1. Sample G responses to each prompt from pi_old = pi_theta, reward and compare them.
            mini_batches = collect(model, tokenizer, problems, step, cfg, reward)
            episodes = [episode for mini_batch in mini_batches for episode in mini_batch]
            if reference:
                for episode, ref_logp, *_ in token_statistics(reference, episodes, cfg):
                    episode.ref_logp = ref_logp
            run.write(entropy_metrics(episodes), bookkeeping.rollout_metrics(episodes, cfg))
            if run.is_due(cfg.dump_every):
                for mini_batch in mini_batches:
                    form_mask(mini_batch, cfg)
                run.dump(episodes)
            run.stopwatch("rollout_seconds")

            # 2. For each mini-batch: p and H under pi_theta, the mask I, one step of AdamW.
            lr, totals = cfg.lr * min(1.0, step / max(1, cfg.warmup_steps)), []
            if optimizer:
                optimizer.param_groups[0]["lr"] = lr
            for number, mini_batch in enumerate(mini_batches):
                if optimizer and number > 0:  # before the first, pi_theta = pi_old
                    statistics_pass(model, mini_batch, cfg)
                totals.append(update(model, optimizer, mini_batch, cfg))
                run.check_finite(totals[-1]["finite"])
            model.zero_grad()  # gradients take no memory in what follows

            # 3. Write down what happened; evaluate and save when it is time.
            run.write(bookkeeping.update_metrics(totals), {"lr": lr})
            run.stopwatch("update_seconds")
            if run.is_due(cfg.eval_every):
                with distributed.gathered(model) as policy:
                    run.write({"eval": evaluation.evaluate(policy, tokenizer, suite, cfg, stop)})
            run.end_step(episodes)
            run.save_if_due()


def main(argv: list[str] | None = None) -> None:
    with distributed.session("stapo.py"):
        cfg = bookkeeping.parse_flags(Config, __doc__.split("\n")[0], argv)
        torch.set_num_threads(cfg.threads or torch.get_num_threads())
        train(cfg)


if __name__ == "__main__":
    main()
