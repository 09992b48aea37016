"""Train a language model with STAPO, Spurious-Token-Aware Policy Optimization (arXiv 2602.15620).

    python stapo.py @tests/tiny/args                # one to three minutes on one CPU thread
    python stapo.py --model Qwen/Qwen3-1.7B-Base    # by an estimate 2.3 to 4.2 hours on an H100
    torchrun --nproc-per-node 8 --shutdown-timeout 3600 stapo.py @recipes/paper-1.7b

Algorithm 1 of the paper, and the function that does each of its lines:

    repeat                                                                     train_step
        pi_old = pi_theta;  y_1 .. y_G ~ pi_old(.|x) for each prompt x         collect
        R = +1 or -1;  A_i = (R_i - mean R) / std R within each group          group_advantages
        for each mini-batch:
            p and H of its tokens under the current policy pi_theta            logp_and_entropy
            tau_h = the q-quantile of H over its tokens with A > 0, p < tau_p  spurious_mask
            I = 0 where A > 0 and p < tau_p and H < tau_h, else 1              spurious_mask
            J = 1 / (sum I) * sum I min(rho A, clip(rho) A)                    clipped_loss
            one AdamW step up the gradient of J                                update

p is the probability of a sampled token. H is the entropy of the distribution it was drawn from. The
ratio rho is p under pi_theta / p under pi_old. clip(rho) is rho within [1 - eps_low, 1 + eps_high].
Metrics call a response right if R > 0. The mask asks for A > 0, R above the group's mean, as the
paper does. With the rewards +1 and -1 both are the same. With others, such as a penalty for length,
a wrong response can have A > 0, and its tokens can be silenced.

Where training departs from the paper, or goes beyond it (docs/reference.md has the whole list):
- The default run is small: 80 steps of 256 responses. recipes/paper-1.7b has the paper's sizes.
- This project's grader gives R. The paper takes DAPO's rule: scripts/rewards.py has one form of it.
- Prompts take the tokenizer's chat template if it has one.
- An update that is not finite is skipped.

Every rank runs every function. A rank that fails ends its process, and torchrun ends the others.
tests/test_paper.py repeats Algorithm 1 in plain code. tests/test_distributed.py compares ranks.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch.optim import Optimizer

import eval as evaluation
from reward import Reward, load_reward, reward_all, unbox
from rollout import (
    INSTRUCTION,
    Policy,
    Response,
    Tokenizer,
    TokenStats,
    encode_prompt,
    load_policy,
    load_tokenizer,
    response_stats,
    sample,
    sampling_config,
    sampling_gap,
    stop_ids,
)
from support import InputError, progress, ranks
from support.batch import Batch, Choice, micro_batches, pad_batch
from support.checkpoints import load_optimizer
from support.data import load_problems
from support.files import fingerprint
from support.flags import check_least, flag, parse_flags
from support.metrics import ratio_sums, response_metrics, sample_log, update_metrics
from support.models import check_length, gathered, load_config
from support.ranks import all_cat, all_sum, even_out, peak_memory_gb, rank, world_size
from support.run import RunFolder
from support.seeds import generator, mix_seed
from support.stop import StopSignals

# =========================================================================== the loss, Sec. 2 and 3
#
# From here to "the loss ends here" nothing but `import torch` is needed: copy it. This is the loss
# of STAPO (arXiv 2602.15620), from stapo.py of the STAPO reimplementation (MIT License).
#
# The tensors hold B responses of at most T tokens. `mask` is True on response tokens. Everything
# outside the mask is padding. Padding may hold any garbage: no loss and no gradient depends on it.


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Sec. 2.2, the advantage of each response within its group: A_i = (R_i - mean R) / std R.

    rewards (P, G) float, a row for each prompt, G >= 2. Returns A, (P, G). The std is unbiased
    (n - 1). A group whose rewards are all equal has A = 0. Such a group is recognised by max ==
    min, because rounding can leave its std above zero.
    Example: of eight responses two are right. Their A is 1.62, and A of the six others is -0.54.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # (P, G)
    all_equal = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)  # (P, 1)
    return torch.where(all_equal, torch.zeros_like(rewards), centred / rewards.std(1, keepdim=True))


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
    over_ranks=lambda values: values,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sec. 3.3, S2T: choose the tokens that are silenced, which means I = 0:

        I_it = 0   if A_i > 0 and pi(y_it) < tau_p and H_it < tau_h
             = 1   otherwise

        response 1, A = 0.71:   p = 0.9, 0.001, 0.001   H = 0.2, 0.1, 1.5
        response 2, A = -0.71:  p = 0.001               H = 0.1

    In this example tokens 2 and 3 of response 1 are the candidates. So tau_h = 0.1 + 0.75 (1.5 -
    0.1) = 1.15, and token 2 is silenced. A > 0 is the paper's condition. With the rewards +1 and -1
    it means a right response, R > 0.

    logp (B, T) float32: ln p of each response token under the current policy. entropy (B, T)
    float32: H in nats, under the same policy. advantages float32: (B,), or (B, T) with the A_i of
    its response at each token. mask (B, T) bool.
    tau_h is the q-quantile of the candidates' entropies. If tau_h is None, it is computed from this
    call, which must then see the whole mini-batch. If the mini-batch is spread over ranks,
    over_ranks must concatenate the ranks' 1-D tensors.

    Returns (silenced, candidates, tau_h): (B, T) bool twice, and a 0-dim tensor. Without candidates
    tau_h is -inf, and nothing is silenced.
    """
    check_shapes(advantages, mask, logp, entropy)
    A = advantages if advantages.dim() == 2 else advantages[:, None]  # (B, T) or (B, 1)
    candidates = mask & (A > 0) & (logp.exp() < tau_p)  # (B, T)
    if tau_h is None:
        tau_h = quantile(over_ranks(entropy[candidates]), q)
    silenced = candidates & (entropy < tau_h)  # (B, T)
    return silenced, candidates, torch.as_tensor(tau_h)


def clipped_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    keep: torch.Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    denominator: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Sec. 3.1, the clipped objective over the kept tokens. Returns the loss -J, a 0-dim tensor:

        J = 1 / (sum I_it) * sum I_it min(rho_it A_i, clip(rho_it, 1 - eps_low, 1 + eps_high) A_i)
        rho_it = pi_theta(y_it) / pi_old(y_it)

    logp (B, T) float32 with gradient: ln pi_theta of each response token (temperature 1, full
    vocabulary). old_logp (B, T) float32: ln pi_old of the same tokens; it never receives a
    gradient. advantages (B,) or (B, T) float32. keep (B, T) bool is the paper's I; a float keep
    weights each token. If I is 1 on every response token, this is the objective of DAPO and JustRL
    (Sec. 2.3). denominator is sum I; None takes the sum of keep in this call. A micro-batch needs
    the denominator of its whole mini-batch. FSDP averages gradients over ranks: pass the
    denominator of all ranks / the number of ranks.
    """
    check_shapes(advantages, keep != 0, logp, old_logp)
    A = advantages if advantages.dim() == 2 else advantages[:, None]  # (B, T) or (B, 1)
    log_rho = (logp - old_logp.detach()).masked_fill(keep == 0, 0.0)  # (B, T)
    # exp overflows above 88. Where A >= 0, J_it is flat long before: the gradient there is 0.
    rho = log_rho.masked_fill((A >= 0) & (log_rho > 80), 80.0).exp()  # (B, T)
    J_it = torch.min(rho * A, rho.clamp(1 - eps_low, 1 + eps_high) * A)  # (B, T): a token's term
    J_it = (keep * J_it).masked_fill(keep == 0, 0.0)  # (B, T): times I
    if denominator is None:
        denominator = torch.where(keep.any(), keep.sum(), 1)  # nothing kept: 0 / 1
    return -J_it.sum() / denominator


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
    denominator: float | torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """STAPO in one call: spurious_mask, then clipped_loss over the tokens that are kept.

    It is for a loop of your own that sees a whole mini-batch in one call. `train_step` does not
    call it. Like any loop with micro-batches, it calls spurious_mask once for a mini-batch, and
    clipped_loss for each micro-batch. A micro-batch must not decide again which tokens are
    silenced: its forward rounds differently, and tau_h can equal the entropy of one candidate.

    The arguments are those of spurious_mask and clipped_loss. Only logp receives a gradient. tau_h
    and denominator belong to the whole mini-batch: None computes them from this call.
    Returns the loss, a 0-dim tensor, and the numbers of tokens, candidates and silenced tokens:
    0-dim tensors that add up over micro-batches.
    """
    silenced, candidates, _ = spurious_mask(
        logp, advantages, entropy, mask, tau_p=tau_p, q=q, tau_h=tau_h
    )
    loss = clipped_loss(
        logp,
        old_logp,
        advantages,
        keep=mask & ~silenced,  # (B, T): the paper's I
        eps_low=eps_low,
        eps_high=eps_high,
        denominator=denominator,
    )
    counts = {"tokens": mask.sum(), "candidates": candidates.sum(), "silenced": silenced.sum()}
    return loss, counts


def quantile(values: torch.Tensor, q: float | torch.Tensor) -> torch.Tensor:
    """Return quantiles of a 1-D tensor, with linear interpolation; -inf if the tensor is empty.

    The result has the shape of q. torch.quantile raises on an empty tensor, and on more than 16
    million values. A batch can hold more.
    """
    q = torch.as_tensor(q, dtype=torch.float64)  # on the CPU: the GPU of a Mac has no float64
    if values.numel() == 0:
        return values.new_full(q.shape, float("-inf"))
    ordered = values.sort().values
    position = q * (len(ordered) - 1)
    low = position.long()
    high = (low + 1).clamp(max=len(ordered) - 1)
    weight = (position - low).to(values.dtype).to(values.device)
    return torch.lerp(ordered[low], ordered[high], weight)


def check_shapes(advantages: torch.Tensor, mask: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Raise a ValueError unless mask is (B, T) bool, advantages (B,) or (B, T), tensors (B, T).

    Other shapes would broadcast. The tensors, ln p and H, must be float32 or float64: bfloat16
    rounds an ln p of -8 by up to 0.03, so rho would be off by 3 %.
    """
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise ValueError(f"mask must be (B, T) bool: it is {tuple(mask.shape)} {mask.dtype}")
    if advantages.shape not in (mask.shape, mask.shape[:1]):
        text = f"advantages must be (B,) or (B, T) like mask, {tuple(mask.shape)}"
        raise ValueError(f"{text}: they are {tuple(advantages.shape)}")
    for tensor in tensors:
        if tensor.shape != mask.shape or tensor.dtype not in (torch.float32, torch.float64):
            text = "log-probabilities and entropy must be (B, T) like mask, float32 or float64"
            found = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"{text}: mask is {tuple(mask.shape)}, and one is {found}")


# =========================================================================== the loss ends here

# ================================================================ one step of Algorithm 1, Sec. 3.3


class StepResult(NamedTuple):
    """What a step of training leaves behind for its metrics and its log."""

    batch: Batch
    texts: list[str]  # of the responses, a text for each row of the batch
    mini_batches: list[Batch]  # in the order of the updates
    choices: list[Choice]  # of each mini-batch
    updates: list[dict[str, float]]  # what `update` returned for each mini-batch
    began: float  # times in seconds: before `collect`, after it, and after the updates
    collected: float
    ended: float


def train_step(
    policy: Policy,
    reference: Policy | None,
    optimizer: Optimizer,
    task: Task,
    step: int,
    cfg: Config,
) -> StepResult:
    """Take one step of Algorithm 1: a batch of responses, then an AdamW step for each mini-batch.

    With the default flags a step has four mini-batches, so 80 steps are 320 AdamW steps. reference
    is the reference policy of a KL term, or None. Returns what the metrics of the step need.
    """
    choose = METHODS[cfg.method]  # stapo: silence_spurious
    # 1. pi_old = pi_theta. Sample G responses to each prompt, reward them, compute A.
    began = time.monotonic()
    batch, texts = collect(policy, reference, task, step, cfg)
    collected, choices, updates = time.monotonic(), [], []
    mini_batches = batch.mini_batches(cfg.batch_size // cfg.mini_batch_size)
    for mini_batch in mini_batches:
        # 2. p and H under pi_theta, and from these the mask I. Before any update pi_theta = pi_old.
        choice = choose(mini_batch, policy if updates else None, cfg)
        # 3. One AdamW step up the gradient of J.
        updates.append(update(policy, optimizer, mini_batch, choice, cfg))
        choices.append(choice)
    ended = time.monotonic()
    return StepResult(batch, texts, mini_batches, choices, updates, began, collected, ended)


def collect(
    policy: Policy, reference: Policy | None, task: Task, step: int, cfg: Config
) -> tuple[Batch, list[str]]:
    """Sample this rank's responses of a step, reward them, and compute A, and ln p and H of pi_old.

    Returns the batch, whose rows are in the order of rank_rows, and the texts of its responses.
    Raises InputError if a reward of your own fails.
    """
    indices = batch_indices(step, len(task.problems), cfg.batch_size, cfg.seed)
    pairs = rank_rows(cfg.batch_size, cfg.mini_batch_size, cfg.group_size, rank(), world_size())
    indices = [indices[place] for place, _ in pairs]  # of the problem of each response
    problems = [task.problems[index] for index in indices]
    seeds = [mix_seed(cfg.seed, step, place, member) for place, member in pairs]
    responses, rewards = sample_and_reward(policy, task, problems, seeds, cfg)
    prompts = [response.prompt_ids for response in responses]
    ids, mask, lengths = pad_batch(prompts, [response.ids for response in responses])
    old = response_stats(policy, ids, mask, lengths, cfg.tokens_per_micro_batch)
    ref_logp = None
    if reference:
        # Gathered: FSDP2 keeps a list of forwards until a backward, which the reference never has.
        with gathered(reference) as model:
            stats = response_stats(Policy(model), ids, mask, lengths, cfg.tokens_per_micro_batch)
        ref_logp = stats.logp
    batch = Batch(
        ids=ids,
        mask=mask,
        lengths=lengths,
        old=old,
        ref_logp=ref_logp,
        problem_index=torch.tensor(indices),
        rewards=rewards,
        advantages=advantages_of(rewards.view(-1, cfg.group_size)).flatten(),
        truncated=torch.tensor([response.truncated for response in responses]),
        seeds=torch.tensor(seeds),
    )
    return batch, [response.text for response in responses]


def sample_and_reward(
    policy: Policy, task: Task, problems: list[dict], seeds: list[int], cfg: Config
) -> tuple[list[Response], torch.Tensor]:
    """Sample a response to each of `problems` (each problem G times in a row), and reward it.

    Returns the responses and their rewards, (B,) float64. Every rank must call it. Raises
    InputError on every rank if a reward of your own fails on one.
    """
    with gathered(policy) as model:
        sampled = sample(
            model,
            task.tokenizer,
            [problem["prompt_ids"] for problem in problems],
            max_new_tokens=cfg.max_new_tokens,
            batch_size=cfg.rollout_batch_size,
            seed=seeds,
            cuda_graphs=cfg.cuda_graphs,
            progress="rollout",
        )  # temperature 1, top-p 1
        responses = [response for _, response in sorted(sampled)]  # by the index of the prompt
    texts = [response.text for response in responses]
    infos = [{"tokens": len(each.ids), "truncated": each.truncated} for each in responses]
    rewards = ranks.together(lambda: reward_all(task.reward, texts, problems, infos))
    return responses, torch.tensor(rewards, dtype=torch.float64)


def have_advantages(groups: torch.Tensor) -> torch.Tensor:
    """Whether the rewards of each group differ: groups (P, G) float64 -> (P,) bool.

    0.7 + 0.2 + 0.1 and 0.1 + 0.2 + 0.7 differ by 1e-16. That is no difference.
    """
    return groups.amax(dim=1) - groups.amin(dim=1) >= 1e-7


def advantages_of(groups: torch.Tensor) -> torch.Tensor:
    """Return the advantages of rewards: groups (P, G) float64 -> (P, G) float32."""
    # float32 cannot tell rewards of 1e8 and 1e8 + 1 apart. So the whole part of the group's mean is
    # subtracted first, which changes no A.
    small = groups - groups.mean(dim=1, keepdim=True).trunc()
    return group_advantages(small.float()).masked_fill(~have_advantages(groups)[:, None], 0.0)


def batch_indices(step: int, num_problems: int, batch_size: int, seed: int) -> list[int]:
    """Return the indices of a step's problems. Epochs are shuffled, and follow each other."""
    start = (step - 1) * batch_size  # of the batch in the list of all epochs
    last = start + batch_size - 1
    epochs = range(start // num_problems, last // num_problems + 1)
    orders = [torch.randperm(num_problems, generator=generator(seed, epoch)) for epoch in epochs]
    offset = start - epochs[0] * num_problems
    return torch.cat(orders)[offset : offset + batch_size].tolist()


def rank_rows(
    batch_size: int, mini_batch_size: int, group_size: int, rank: int, world: int
) -> list[tuple[int, int]]:
    """Return which responses of a step a rank samples: (problem in the batch, member of its group).

    Each rank takes its slice of every mini-batch, so the mini-batches do not depend on the number
    of ranks. The members of a group follow each other, so that they share a prefill. Example: a
    batch of four problems 0 to 3, mini-batches of two and groups of two.

        rank_rows(4, 2, 2, rank=0, world=1) is 00 01 10 11, 20 21 30 31
        rank_rows(4, 2, 2, rank=0, world=2) is 00 01, 20 21
        rank_rows(4, 2, 2, rank=1, world=2) is 10 11, 30 31
    """
    problems = torch.arange(batch_size).view(-1, world, mini_batch_size // world)
    problems = problems[:, rank].flatten().tolist()
    return [(problem, member) for problem in problems for member in range(group_size)]


def logp_and_entropy(
    policy: Policy | None, batch: Batch, cfg: Config, rows: torch.Tensor | None = None
) -> TokenStats:
    """Compute ln p and H of a mini-batch's tokens under pi_theta: (B, L) float32 each.

        p_it = pi_theta(y_it)        H_it = -sum_v pi_theta(v) ln pi_theta(v), v: the vocabulary

    policy is pi_theta, or None before the first update of a step: then pi_theta = pi_old, and
    nothing is computed. rows (B,) bool: the responses that are forwarded (None: all). The others
    keep ln p and H under pi_old. Every rank must call it.
    """
    if policy is None:
        return batch.old
    index = torch.arange(len(batch.ids)) if rows is None else rows.nonzero().flatten()  # (N,)
    part = batch.take(index)  # (N, L)
    fresh = response_stats(policy, part.ids, part.mask, part.lengths, cfg.tokens_per_micro_batch)
    return TokenStats(
        logp=batch.old.logp.index_copy(0, index, fresh.logp),
        entropy=batch.old.entropy.index_copy(0, index, fresh.entropy),
    )


def silence_spurious(batch: Batch, policy: Policy | None, cfg: Config) -> Choice:
    """Sec. 3.3, S2T on a mini-batch, with tau_h over the tokens of all ranks: STAPO's choice."""
    over_all = cfg.quantile_over == "all"  # the first version of the paper
    # No other responses can hold candidates.
    stats = logp_and_entropy(policy, batch, cfg, rows=(batch.advantages > 0) | over_all)
    silenced, candidates, tau_h = spurious_mask(
        stats.logp,
        batch.advantages,
        stats.entropy,
        batch.mask,
        tau_p=cfg.tau_p,
        q=cfg.q,
        tau_h=quantile(all_cat(stats.entropy[batch.mask]), cfg.q) if over_all else None,
        over_ranks=all_cat,
    )
    return Choice(keep=batch.mask & ~silenced, stats=stats, candidates=candidates, tau_h=tau_h)


def update(
    policy: Policy, optimizer: Optimizer, batch: Batch, choice: Choice, cfg: Config
) -> dict[str, float]:
    """Take one optimiser step on a mini-batch, over the tokens that are kept.

    Without a KL term, responses with A = 0 have no gradient: they are not forwarded, but they stay
    in the denominator. If anything is not finite, there is no step. Returns numbers over all ranks:
    `loss`, ratio_sums, `grad_norm` before clipping, and `finite`: whether there was a step.
    """
    # 1. I and its sum. `choice` has this rank's part of the denominator, and the sum over ranks is
    # the whole. FSDP averages gradients over ranks, so the loss gets the whole / their number.
    keep = choice.keep * batch.mask  # (B, L): a mask of your own may be True outside responses
    share = keep.sum() if choice.denominator is None else choice.denominator
    known = choice.stats.logp.isfinite() & choice.stats.entropy.isfinite()  # (B, L)
    counts = all_sum({"denominator": share, "not_finite": (batch.mask & ~known).sum()})
    denominator = (counts["denominator"] or 1) / world_size()  # nothing kept: 0 / 1
    eps_high = cfg.eps_high if choice.eps_high is None else choice.eps_high
    has_gradient = (batch.advantages != 0) | (batch.ref_logp is not None)  # (B,)
    trained = has_gradient.nonzero().flatten()  # (N,)
    sums = Counter(loss=0.0)  # ratio_sums has the other names
    # 2. The gradient, summed over micro-batches. Checkpointing needs the training mode.
    policy.train()
    optimizer.zero_grad()
    parts = micro_batches(batch.lengths[trained].tolist(), cfg.tokens_per_micro_batch)
    for part in progress.track(even_out(parts), "update"):
        index = trained[part]  # empty if another rank has more micro-batches: zero gradients
        micro = batch.rows(index)
        logp = policy(micro.ids, micro.mask, logp_only=True).logp  # (B, L)
        micro, kept = micro.to(logp.device), keep[index, : logp.shape[1]].to(logp.device)
        loss = clipped_loss(
            logp,
            micro.old.logp,
            micro.advantages,
            kept,
            eps_low=cfg.eps_low,
            eps_high=eps_high,
            denominator=denominator,
        )
        if micro.ref_logp is not None:  # GRPO's J has a KL term
            loss = loss + cfg.beta * kl_term(logp, micro.ref_logp, kept, denominator)
        sums["loss"] += loss.detach().double() / world_size()
        # Add a term of your own to `loss` here: the metrics keep -J. Divide it by `denominator`, as
        # J is. An entropy needs a forward without logp_only, and has_gradient True everywhere: it
        # has a gradient where A = 0, too.
        loss.backward()
        ratios = ratio_sums(
            logp,
            micro.old.logp,
            micro.advantages,
            micro.mask,
            eps_low=cfg.eps_low,
            eps_high=eps_high,
        )
        for name, value in ratios.items():
            sums[name] += value.double()
    # 3. Clip it, and take a step if everything is finite.
    policy.eval()
    totals = all_sum(sums) | {"grad_norm": clip_gradient(policy, cfg.grad_clip)}
    finite = not counts["not_finite"] and math.isfinite(totals["loss"])
    finite = finite and math.isfinite(totals["grad_norm"])
    if finite:
        optimizer.step()
    policy.zero_grad()  # frees the gradients' memory for the next rollout
    return totals | {"finite": finite}


def clip_gradient(policy: Policy, largest: float) -> float:
    """Scale the gradient down to the norm `largest`, and return its norm before that."""
    for parameter in policy.parameters():
        # Nothing was forwarded: AdamW takes the step of a zero gradient. Frozen weights stay.
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), largest)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


# ========================================================== other methods: ablations and baselines


def silence_candidates(batch: Batch, policy: Policy | None, cfg: Config) -> Choice:
    """FullMask: silence every candidate."""
    stats = logp_and_entropy(policy, batch, cfg, rows=batch.advantages > 0)
    choice = silence_lowest(stats.entropy, batch, stats, cfg)
    return choice._replace(keep=batch.mask & ~choice.candidates)


def silence_high_entropy(batch: Batch, policy: Policy | None, cfg: Config) -> Choice:
    """Silence the candidates of the highest entropy: S2T sees -H for H."""
    stats = logp_and_entropy(policy, batch, cfg, rows=batch.advantages > 0)
    return silence_lowest(-stats.entropy, batch, stats, cfg)


def silence_random(batch: Batch, policy: Policy | None, cfg: Config) -> Choice:
    """Silence random candidates: S2T sees noise for H, which a response's seed alone decides."""
    noise = torch.zeros(batch.mask.shape)  # (B, L)
    for row, (seed, mask) in enumerate(zip(batch.seeds.tolist(), batch.mask, strict=True)):
        noise[row, mask] = torch.rand(int(mask.sum()), generator=generator(seed, "noise"))
    stats = logp_and_entropy(policy, batch, cfg, rows=batch.advantages > 0)
    return silence_lowest(noise, batch, stats, cfg)


def silence_lowest(values: torch.Tensor, batch: Batch, stats: TokenStats, cfg: Config) -> Choice:
    """S2T with values (B, L) in place of H. If none are equal, STAPO silences as many."""
    silenced, candidates, _ = spurious_mask(
        stats.logp,
        batch.advantages,
        values,
        batch.mask,
        tau_p=cfg.tau_p,
        q=cfg.q,
        over_ranks=all_cat,
    )
    return Choice(keep=batch.mask & ~silenced, stats=stats, candidates=candidates)


def keep_high_entropy(batch: Batch, policy: Policy | None, cfg: Config) -> Choice:
    """20-Entropy: keep the 20 % of all tokens with the highest entropy, and divide by all."""
    stats = logp_and_entropy(policy, batch, cfg)
    threshold = quantile(all_cat(stats.entropy[batch.mask]), 0.8)
    keep = batch.mask & (stats.entropy >= threshold)
    return Choice(keep=keep, stats=stats, denominator=batch.mask.sum())


def justrl(batch: Batch, policy: Policy | None, cfg: Config) -> Choice:
    """JustRL: keep every response token."""
    return Choice(keep=batch.mask, stats=batch.old)


def grpo(batch: Batch, policy: Policy | None, cfg: Config) -> Choice:
    """Sec. 2.2, GRPO: the clipped objective, averaged in each response, then over responses.

        J = 1/N sum_i 1/|y_i| sum_t [min(rho A, clip(rho, 1 - eps, 1 + eps) A) - beta k3]

    So a token weighs 1/|y_i|, and the denominator is N, the number of responses. The clip has
    eps_low on both sides. `update` subtracts beta k3 (kl_term) if there is a reference policy.
    """
    lengths = batch.mask.sum(dim=1, keepdim=True)  # (B, 1)
    weights = batch.mask / lengths.clamp(min=1)  # (B, L)
    return Choice(weights, batch.old, denominator=len(batch.ids), eps_high=cfg.eps_low)


def kl_term(
    logp: torch.Tensor, ref_logp: torch.Tensor, keep: torch.Tensor, denominator: float
) -> torch.Tensor:
    """Sec. 2.2, GRPO's KL to the reference policy, a mean like the objective's: a 0-dim tensor.

        1 / denominator * sum keep_it k3_it        k3 = r - ln r - 1 with r = pi_ref / pi_theta

    The paper has KL(pi_theta || pi_ref) beside the mean. Here its estimate k3 is inside the mean
    over tokens. The value of k3 estimates KL(pi_theta || pi_ref). The gradient of k3 estimates the
    gradient of KL(pi_ref || pi_theta). ref_logp (B, T) float32 is ln p under the reference policy,
    the model before training. keep (B, T) and denominator are those of clipped_loss.
    """
    log_r = (ref_logp - logp).masked_fill(keep == 0, 0.0)  # (B, T)
    k3 = log_r.exp() - log_r - 1  # (B, T)
    return (keep * k3).sum() / denominator


# A method is a function of a mini-batch of this rank, the policy (None before the first update of a
# step, as logp_and_entropy takes it) and the flags. docs/using-the-loss.md adds methods.
METHODS: dict[str, Callable[[Batch, Policy | None, Config], Choice]] = {
    "stapo": silence_spurious,
    "justrl": justrl,
    "grpo": grpo,
    "20-entropy": keep_high_entropy,
    "full-mask": silence_candidates,
    "high-entropy": silence_high_entropy,
    "random": silence_random,
}


# =========================================================================================== flags


@dataclass(frozen=True)  # --resume takes the flags of config.json, which is written at the start
class Config:
    """All flags of training. By an estimate the defaults take 2.3 to 4.2 hours on an H100.

    tau_p, q, the clip range, G, the learning rate and four updates to a step are the paper's. If a
    default is not the paper's, its help has the paper's value. recipes/paper-1.7b has every value
    of the paper's appendix.
    """

    model: str = flag("Qwen/Qwen3-1.7B-Base", "Hub id or local folder of a causal LM")
    data: str = flag(
        "BytedTsinghua-SIA/DAPO-Math-17k", "Hub id (ID:CONFIG:SPLIT), .jsonl, .json or .parquet"
    )
    instruction: str = flag(INSTRUCTION, "text after every problem; may be empty")
    chat_template: str = flag(
        "", "file with a chat template; none: no template; empty: the tokenizer's own"
    )
    reward: str = flag(
        "",
        "FILE.py:FUNCTION(response, row) -> float, or an async def; empty: this project's grader "
        "of mathematics (paper: DAPO's rule, scripts/rewards.py:dapo)",
    )
    output: str = flag("", "directory of the run; empty: a new one under runs/")
    resume: str = flag("", "directory of a run to continue; flags beside it win")
    method: str = flag(
        "stapo",
        "stapo; baselines: justrl (silences nothing), grpo, 20-entropy; ablations: full-mask "
        "(silences all candidates), high-entropy, random",
    )
    tau_p: float = flag(0.002, "candidates have A > 0 and p below this (stapo, ablations)")
    q: float = flag(
        0.75,
        "candidates below this quantile of entropy are silenced (stapo, high-entropy, random)",
    )
    quantile_over: Literal["candidates", "all"] = flag(
        "candidates",
        "stapo: tokens of the mini-batch over which the quantile is taken (first version of the "
        "paper: all, with --q 0.8)",
    )
    eps_low: float = flag(0.2, "clip the ratio at 1 - eps_low")
    eps_high: float = flag(0.28, "clip the ratio at 1 + eps_high (grpo: 1 + eps_low)")
    beta: float = flag(0.04, "grpo: weight of the KL to the reference policy (DeepSeekMath's)")
    steps: int = flag(80, "batches of prompts to train on (paper: 3,000 and more)")
    batch_size: int = flag(32, "prompts in a step (paper: 256)")
    mini_batch_size: int = flag(8, "prompts in an optimiser step (paper: 64)")
    group_size: int = flag(8, "responses to each prompt (G)")
    max_prompt_tokens: int = flag(1024, "longer prompts (with instruction) are dropped")
    max_new_tokens: int = flag(4096, "longest response, in tokens (paper: 15,360)")
    lr: float = flag(1e-6, "AdamW's learning rate after the warm-up")
    warmup_steps: int = flag(5, "steps (of batch_size prompts) of linear warm-up (paper: 10)")
    weight_decay: float = flag(0.1, "AdamW's (JustRL's value; the paper gives none)")
    grad_clip: float = flag(1.0, "largest gradient norm")
    seed: int = flag(0, "seed of the data order and of the sampling")
    rollout_batch_size: int = flag(256, "most responses decoded at a time on each rank")
    cuda_graphs: bool = flag(True, "replay recorded decoding steps on CUDA; off: --no_cuda_graphs")
    tokens_per_micro_batch: int = flag(16384, "most tokens of a micro-batch, padding included")
    gradient_checkpointing: bool = flag(
        True, "recompute activations, which saves memory; --no_gradient_checkpointing keeps them"
    )
    threads: int = flag(0, "CPU threads of each rank (0: torch's choice)")
    save_every: int = flag(10, "steps between checkpoints (0: only evaluations and the end)")
    keep_last: int = flag(2, "number of checkpoints that are kept")
    log_samples: int = flag(8, "responses of each step in samples.jsonl, of those of rank 0")
    report_to: Literal["", "tensorboard", "wandb", "trackio"] = flag("", "also gets the numbers")
    eval_every: int = flag(0, "steps between evaluations; the first is before step 1 (0: none)")
    eval_benchmarks: list[str] = flag(
        ["aime24"],
        "aime24, aime25, amc23, math500, minerva, olympiadbench, or files; --reward grades files",
    )
    eval_limit: int = flag(0, "number of problems of each benchmark, its first (0: all)")
    eval_samples: int = flag(0, "responses to a problem (0: the benchmark's own)")


def check_flags(cfg: Config) -> None:
    """Raise InputError, naming the flag, if a flag has a value that cannot work."""

    def need(name: str, holds: bool, why: str) -> None:
        if not holds:
            raise InputError(f"--{name} {getattr(cfg, name)}: {why}")

    need("method", cfg.method in METHODS, f"not one of {', '.join(METHODS)}")
    found = not cfg.report_to or importlib.util.find_spec(cfg.report_to)
    found = getattr(found, "origin", found)  # None of a folder wandb/ that wandb has left here
    need("report_to", found, f"not installed; pip install {cfg.report_to}")
    need("q", 0 <= cfg.q <= 1, "a quantile is between 0 and 1")
    need("group_size", cfg.group_size >= 2, "an advantage needs at least 2 responses")
    need("grad_clip", cfg.grad_clip > 0, "must be above 0 (inf: no clipping)")
    check_least(cfg, batch_size=1, mini_batch_size=1, max_prompt_tokens=1, max_new_tokens=1)
    check_least(cfg, rollout_batch_size=1, tokens_per_micro_batch=1, keep_last=1, log_samples=0)
    check_least(cfg, steps=0, warmup_steps=0, save_every=0, threads=0)
    check_least(cfg, eval_every=0, eval_limit=0, eval_samples=0)
    fits = cfg.batch_size % cfg.mini_batch_size == 0
    need("batch_size", fits, f"not a multiple of --mini_batch_size {cfg.mini_batch_size}")
    fits = cfg.mini_batch_size % world_size() == 0
    need("mini_batch_size", fits, f"not a multiple of {world_size()} ranks")


# ========================================================================================= the run


class Task(NamedTuple):
    """The tokenizer, the problems and the reward of a run, and the benchmarks that evaluate it."""

    tokenizer: Tokenizer
    problems: list[dict]  # {"problem", "answer", "prompt_ids"}, and "row" with --reward
    reward: Reward
    suite: evaluation.Suite
    data_fingerprint: str  # of the problems


def load_task(cfg: Config, checkpoint: Path | None = None) -> Task:
    """Load all that the flags name except the weights. Raises InputError.

    Prompts that are too long are dropped. checkpoint: of a resumed run; its tokenizer and its
    config are loaded in place of --model's.
    """
    name = str(checkpoint or cfg.model)
    tokenizer = load_tokenizer(name, "" if checkpoint else cfg.chat_template)  # a checkpoint has it
    reward = load_reward(cfg.reward)
    whole_rows = bool(cfg.reward)  # a reward of your own can read every column
    benchmarks = cfg.eval_benchmarks if cfg.eval_every else []
    suite = evaluation.load_benchmarks(benchmarks, cfg.eval_samples, whole_rows)
    suite = evaluation.first_problems(suite, cfg.eval_limit)
    problems = load_problems(cfg.data, whole_rows=whole_rows, unbox=unbox)
    for problem in progress.track(problems, "encoding prompts"):
        problem["prompt_ids"] = encode_prompt(tokenizer, problem["problem"], cfg.instruction)
    kept = [p for p in problems if 0 < len(p["prompt_ids"]) <= cfg.max_prompt_tokens]
    if not kept:
        raise InputError(f"--max_prompt_tokens {cfg.max_prompt_tokens}: every prompt is longer")
    counts = f"{len(kept)} problems, {len(problems) - len(kept)} over --max_prompt_tokens dropped"
    progress.say(f"{cfg.data}: {counts}")
    longest = max(len(problem["prompt_ids"]) for problem in kept)
    check_length(load_config(name), longest, cfg.max_new_tokens)
    texts = [[problem["problem"], problem["answer"], problem.get("row")] for problem in kept]
    return Task(tokenizer, kept, reward, suite, f"{len(kept)} problems, {fingerprint(texts)}")


def load_models(
    cfg: Config, tokenizer: Tokenizer, checkpoint: Path | None
) -> tuple[Policy, Optimizer, Policy | None]:
    """Load the policy, its AdamW, and the reference policy (None without a KL term).

    The policy and AdamW come from a checkpoint, or if it is None, from --model. The reference
    policy is --model. Raises InputError.
    """
    policy = load_policy(str(checkpoint or cfg.model), cfg.gradient_checkpointing)
    fused = policy.model.device.type == "cuda"
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay, fused=fused
    )
    if checkpoint:
        load_optimizer(checkpoint, policy.model, optimizer)
        for group in optimizer.param_groups:
            group["weight_decay"] = cfg.weight_decay  # not the checkpoint's
    # A checkpoint has this, so other programs stop and sample as training does.
    stops = stop_ids(policy.model, tokenizer)
    policy.model.generation_config = sampling_config(1.0, 1.0, None, stops, tokenizer.pad_token_id)
    with_kl = cfg.method == "grpo" and cfg.beta > 0
    return policy, optimizer, load_policy(cfg.model) if with_kl else None


def evaluate_if_due(
    run: RunFolder, policy: Policy, task: Task, cfg: Config, tracker: progress.Tracker
) -> None:
    """Evaluate the policy before step 1 and every --eval_every steps, into metrics.jsonl."""
    if run.evaluation_is_due():
        with gathered(policy) as model:
            scores, rows = evaluation.evaluate(model, task.tokenizer, task.suite, cfg, task.reward)
        run.end_evaluation(scores, rows)
        tracker.send(run.step, {f"eval/{name}": score["mean"] for name, score in scores.items()})
        progress.log(progress.scores_in_words(run.step, scores))


def rollout_metrics(batch: Batch, tau_p: float) -> dict[str, float | None]:
    """Return the metrics of a step's responses under pi_old, over all ranks."""
    logp, entropy = (all_cat(values[batch.mask]) for values in batch.old)  # (N,) each
    shares = torch.tensor([0.5, 0.8, 0.95, 0.99], dtype=torch.float64)
    check = sampling_gap(logp, entropy, torch.ones_like(entropy, dtype=torch.bool))
    names = "entropy_p50 entropy_p80 entropy_p95 entropy_p99 entropy sampling_gap sampling_z"
    values = map(float, [*quantile(entropy, shares), entropy.double().mean(), *check])
    return dict(zip(names.split(), values, strict=True)) | response_metrics(batch, tau_p)


def step_metrics(result: StepResult, tau_p: float) -> dict[str, float | None]:
    """Return the metrics of a step, the same on every rank except the seconds and the memory."""
    line = rollout_metrics(result.batch, tau_p)
    return line | {
        **update_metrics(result.mini_batches, result.choices, result.updates),
        "rollout_seconds": result.collected - result.began,
        "update_seconds": result.ended - result.collected,
        "tokens_per_second": line["tokens"] / (result.ended - result.began),
        "peak_memory_gb": peak_memory_gb(),
    }


# A step depends on the weights, AdamW's moments and its number: --resume has nothing else. Whatever
# else lasts from step to step must be put into the checkpoint.
def train(cfg: Config) -> None:
    """Train for --steps steps, and write the run's directory.

    Raises InputError. After a stop was asked for, it ends the program with status 130.
    """
    check_flags(cfg)
    # --resume has set cfg.output. The process id: several runs can start in the same second.
    output = cfg.output or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{cfg.method}-{os.getpid()}"
    run = RunFolder(ranks.broadcast(output), cfg)
    task = load_task(cfg, run.checkpoint)
    policy, optimizer, reference = load_models(cfg, task.tokenizer, run.checkpoint)
    run.compare(task.data_fingerprint)
    # A tracker that misses its key ends the program: nothing is written yet.
    tracker = progress.Tracker(cfg.report_to, run.path, run.id, run.step, asdict(cfg))
    run.begin()
    without_update = 0  # steps in a row
    with StopSignals() as stop:
        try:
            evaluate_if_due(run, policy, task, cfg, tracker)  # before step 1, or left out by a stop
            for step in range(run.step + 1, cfg.steps + 1):
                if stop.asked():
                    break
                lr = cfg.lr * min(1, step / max(1, cfg.warmup_steps))
                for group in optimizer.param_groups:
                    group["lr"] = lr
                result = train_step(policy, reference, optimizer, task, step, cfg)
                line = {"step": step, "lr": lr} | step_metrics(result, cfg.tau_p)
                log = sample_log(result.batch, result.texts, task.problems)
                run.end_step(line, log[: cfg.log_samples])
                if run.save_is_due():
                    run.save(policy.model, optimizer, task.tokenizer)
                tracker.send(step, line)
                progress.report_step(line, log[0], cfg.steps)
                all_skipped = line["skipped_updates"] == len(result.updates)
                without_update = without_update + 1 if all_skipped else 0
                if without_update == 2:
                    raise InputError(f"step {step}: no update of two steps in a row was finite")
                if not stop.asked():
                    evaluate_if_due(run, policy, task, cfg, tracker)
        except InputError:  # of a reward, or after a whole step: the weights are those of run.step
            run.save(policy.model, optimizer, task.tokenizer)
            progress.report_run(run.lines(), cfg.steps, output, stopped=True)
            raise
        run.save(policy.model, optimizer, task.tokenizer)
    tracker.finish()
    stopped = run.step < cfg.steps or run.evaluation_is_due()
    progress.report_run(run.lines(), cfg.steps, output, stopped)
    if stopped:
        sys.exit(130)


def main(argv: list[str] | None = None) -> None:
    """Read the flags and train. argv replaces the command line."""
    with ranks.session("stapo.py"):
        progress.quiet_libraries()
        about = __doc__.split("\n")[0] + " @FILE reads flags. --resume DIR continues a run."
        cfg = parse_flags(Config, about, argv)
        if cfg.threads > 0:
            torch.set_num_threads(cfg.threads)
        progress.report_environment()
        train(cfg)


if __name__ == "__main__":
    main()
