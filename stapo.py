"""Train a language model with STAPO, Spurious-Token-Aware Policy Optimization (arXiv 2602.15620).

    python stapo.py @tests/tiny/args                             # two minutes, one CPU thread
    python stapo.py --model Qwen/Qwen3-1.7B-Base                 # one night, one GPU of 80 GB
    torchrun --nproc-per-node 8 --shutdown-timeout 600 stapo.py @recipes/paper-1.7b    # eight GPUs

Algorithm 1 of the paper, and the function that does each of its lines:

    repeat                                                                     train
        pi_old = pi_theta;  y_1 .. y_G ~ pi_old(.|x) for each prompt x         collect
        R = +1 or -1;  A_i = (R_i - mean R) / std R within each group          group_advantages
        for each mini-batch:
            p and H of its tokens under the current policy pi_theta            statistics_pass
            I = 0 where A > 0 and p < tau_p and H < tau_h, else 1              silence_spurious
            J = 1 / (sum I) * sum I min(rho A, clip(rho) A)                    clipped_loss
            one AdamW step up the gradient of J                                update

The path of one response:

1. `collect` samples the response, rewards it, and computes its advantage A within its group.
2. `collect` computes p and H of every token under pi_old. The response becomes a row of a Batch.
3. `train` cuts the Batch into mini-batches. The first mini-batch of a step is trained before any
   update, so it uses p and H of the Batch. For each later mini-batch `statistics_pass` computes p
   and H again, under the current policy.
4. `silence_spurious` decides with `spurious_mask` which tokens are silenced. The threshold tau_h is
   a quantile over the candidates of all ranks.
5. `update` forwards the response once more, with gradients. `clipped_loss` is the loss over the
   tokens that are kept.

p and H are computed in one place. `response_stats` (rollout.py) cuts rows into micro-batches,
`Policy.forward` (rollout.py) runs the model, and `HeadStats` (support/head.py) turns hidden states
into p and H.

In tests/test_paper.py, test_3_3_algorithm_1_replayed_by_a_plain_second_loop repeats points 2 to 5
in plain code. tests/test_distributed.py compares two and four ranks with one.
"""

import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch.optim import Optimizer

import eval as evaluation
from reward import Reward, load_reward, reward_fingerprint
from rollout import (
    INSTRUCTION,
    Policy,
    Response,
    Tokenizer,
    TokenStats,
    encode_prompt,
    in_order,
    load_policy,
    load_tokenizer,
    micro_batches,
    pad_batch,
    response_stats,
    sample,
    sampling_config,
    sampling_gap,
    stop_ids,
)
from support import distributed, progress
from support.checkpoints import load_optimizer, loading, newest_checkpoint, weights_fingerprint
from support.distributed import all_cat, all_sum, peak_memory_gb, rank, world_size
from support.errors import InputError, RewardError
from support.files import fingerprint
from support.flags import flag, parse_flags
from support.models import check_length, load_config
from support.problems import load_problems
from support.run_folder import RunFolder
from support.seeds import generator, mix_seed
from support.stop import Stopped, stop


@dataclass(frozen=True)  # --resume takes the flags of config.json, which is written at the start
class Config:
    """All flags of training. The defaults are sized for one night on one GPU of 80 GB.

    tau_p, q, the clip range, G, the learning rate and four updates to a step are the paper's. If a
    default is not the paper's, its help has the paper's value. recipes/paper-1.7b has every value
    of the paper's appendix.
    """

    model: str = flag("Qwen/Qwen3-1.7B-Base", "Hub id or local folder of a causal LM")
    data: str = flag("BytedTsinghua-SIA/DAPO-Math-17k", "Hub id, .jsonl, .json or .parquet")
    instruction: str = flag(INSTRUCTION, "text after every problem; may be empty")
    chat_template: str = flag(
        "", "file with a chat template; none: no template; empty: the tokenizer's own"
    )
    reward: str = flag(
        "",
        "FILE.py:FUNCTION(response, row) -> float; empty: this project's grader of mathematics "
        "(paper: DAPO's rule, scripts/rewards.py:dapo)",
    )
    output: str = flag("", "directory of the run; empty: a new one under runs/")
    resume: str = flag("", "directory of a run to continue with its own flags")
    # the objective
    method: str = flag(
        "stapo",
        "stapo; baselines: justrl (silences nothing), grpo, 20-entropy; ablations: full-mask "
        "(silences all candidates), high-entropy, random",
    )
    tau_p: float = flag(
        0.002, "a token of a response with A > 0 is a candidate below this probability"
    )
    q: float = flag(0.75, "candidates below this quantile of entropy are silenced")
    quantile_over: Literal["candidates", "all"] = flag(
        "candidates",
        "tokens of the mini-batch over which the quantile is taken (first version of the paper: "
        "all, with --q 0.8)",
    )
    eps_low: float = flag(0.2, "clip the ratio at 1 - eps_low")
    eps_high: float = flag(0.28, "clip the ratio at 1 + eps_high (grpo: 1 + eps_low)")
    beta: float = flag(0.001, "grpo: weight of the KL to the starting model")
    # one step: responses to a batch of prompts, then an optimiser step for each mini-batch
    steps: int = flag(80, "batches of prompts to train on (paper: 3,000 and more)")
    batch_size: int = flag(32, "prompts in a step (paper: 256)")
    mini_batch_size: int = flag(8, "prompts in an optimiser step (paper: 64)")
    group_size: int = flag(8, "responses to each prompt (G)")
    max_prompt_tokens: int = flag(
        1024, "longer prompts are dropped; instruction and template count"
    )
    max_new_tokens: int = flag(4096, "longest response, in tokens (paper: 15,360)")
    lr: float = flag(1e-6, "AdamW's learning rate after the warm-up")
    warmup_steps: int = flag(5, "steps (of batch_size prompts) of linear warm-up (paper: 10)")
    weight_decay: float = flag(0.1, "AdamW's (JustRL's value; the paper gives none)")
    grad_clip: float = flag(1.0, "largest gradient norm")
    seed: int = flag(0, "seed of the data order and of the sampling")
    # memory and files
    rollout_batch_size: int = flag(256, "most responses decoded at a time on each rank")
    tokens_per_micro_batch: int = flag(16384, "most tokens of a micro-batch, padding included")
    gradient_checkpointing: bool = flag(
        True, "recompute activations, which saves memory; --no_gradient_checkpointing keeps them"
    )
    threads: int = flag(0, "CPU threads of each rank (0: torch's choice)")
    save_every: int = flag(
        20, "steps between checkpoints (0: none); evaluations and the end also save one"
    )
    save_minutes: float = flag(
        30, "save after a step if the last checkpoint is this many minutes old (0: never)"
    )
    keep_last: int = flag(2, "number of checkpoints that are kept")
    log_samples: int = flag(
        8, "responses of each step that are written to samples.jsonl, of those of rank 0"
    )
    eval_every: int = flag(0, "steps between evaluations; the first is before step 1 (0: none)")
    eval_benchmarks: list[str] = flag(
        ["aime24"],
        "aime24, aime25, amc23, math500, minerva, olympiadbench, or files; --reward grades files",
    )
    eval_limit: int = flag(0, "number of problems of each benchmark, its first (0: all)")
    eval_samples: int = flag(0, "responses to a problem (0: the benchmark's own)")


# Flags that may name a new place when a run is resumed. The contents must be the same. FILE.py of
# --reward may move, too, but its FUNCTION may not change: parse_flags compares that.
MOVABLE = frozenset({"model", "data"})
# Flags that may change when a run is resumed: its length, what it writes, how much memory it takes.
# Other sizes of micro-batches and rollouts, and other threads, round differently. That can change a
# sampled token. Nothing else in an update depends on these flags. If a learning rate falls towards
# --steps, `steps` has no place here.
CHANGEABLE = frozenset(
    "steps save_every save_minutes keep_last eval_every eval_benchmarks eval_limit eval_samples "
    "log_samples rollout_batch_size tokens_per_micro_batch gradient_checkpointing threads".split()
)


# =========================================================================== the loss, Sec. 2 and 3
#
# From here to "the loss ends here" nothing but `import torch` is needed: copy it.
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


def quantile(values: torch.Tensor, q: float | torch.Tensor) -> torch.Tensor:
    """Return quantiles of a 1-D tensor, with linear interpolation; -inf if the tensor is empty.

    The result has the shape of q. torch.quantile raises on an empty tensor, and on more than 16
    million values. A batch can hold more.
    """
    q = torch.as_tensor(q, dtype=torch.float64, device=values.device)
    if values.numel() == 0:
        return torch.full_like(q, float("-inf"), dtype=values.dtype)
    ordered = values.sort().values
    position = q * (len(ordered) - 1)
    low = position.long()
    high = (low + 1).clamp(max=len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], (position - low).to(values.dtype))


def check_shapes(advantages: torch.Tensor, mask: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Raise a ValueError unless mask is (B, T) bool, advantages (B,) and each of tensors (B, T).

    Others would broadcast. If each token has its own advantage, or tokens are packed, make each
    token a row: T is 1. grpo_loss is an exception: it averages each row, so its rows must be
    responses.
    """
    if mask.dtype != torch.bool or mask.dim() != 2 or advantages.shape != mask.shape[:1]:
        text = f"mask must be (B, T) bool: it is {tuple(mask.shape)} {mask.dtype}. "
        raise ValueError(f"{text}advantages must be (B,): they are {tuple(advantages.shape)}")
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if any(shape != mask.shape for shape in shapes):
        text = "log-probabilities and entropy must be (B, T) like mask"
        raise ValueError(f"{text}, {tuple(mask.shape)}: they are {shapes}")


@torch.no_grad()
def spurious_candidates(
    logp: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, *, tau_p: float = 0.002
) -> torch.Tensor:
    """Sec. 3.3, the candidates: low-probability tokens (p < tau_p) of right responses (A > 0).

    Returns (B, T) bool. The arguments are those of spurious_mask.
    """
    check_shapes(advantages, mask, logp)
    return mask & (advantages[:, None] > 0) & (logp.exp() < tau_p)


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
    """Sec. 3.3, S2T: return which tokens are silenced, (B, T) bool. True means I = 0:

        I_it = 0   if A_i > 0 and pi(y_it) < tau_p and H_it < tau_h
             = 1   otherwise

    logp (B, T) float32: ln p of each response token under the current policy. entropy (B, T)
    float32: H in nats, under the same policy. advantages (B,) float32. mask (B, T) bool.
    tau_h is the q-quantile of the candidates' entropies. If tau_h is None, it is computed from this
    call, which must then see the whole mini-batch. Without candidates nothing is silenced.
    """
    check_shapes(advantages, mask, entropy)
    candidates = spurious_candidates(logp, advantages, mask, tau_p=tau_p)  # (B, T)
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
    denominator: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Sec. 3.1, the clipped objective over the kept tokens. Returns the loss -J, a 0-dim tensor:

        J = 1 / (sum I_it) * sum I_it min(rho_it A_i, clip(rho_it, 1 - eps_low, 1 + eps_high) A_i)
        rho_it = pi_theta(y_it) / pi_old(y_it)

    logp (B, T) float32 with gradient: ln pi_theta of each response token. old_logp (B, T) float32:
    ln pi_old of the same tokens; it never receives a gradient. advantages (B,) float32. keep (B, T)
    bool is the paper's I. If I is 1 on every response token, this is the objective of DAPO and
    JustRL (Sec. 2.3).
    denominator is sum I; None takes the kept tokens of this call. A micro-batch needs the number of
    its whole mini-batch. FSDP averages gradients over ranks: pass the number of kept tokens on all
    ranks, divided by the world size.
    """
    check_shapes(advantages, keep, logp, old_logp)
    log_rho = logp - old_logp.detach()  # (B, T)
    log_rho = log_rho.masked_fill(~keep, 0.0)  # masked first: exp can overflow
    rho = log_rho.exp()  # (B, T)
    A = advantages[:, None]  # (B, 1): every token of y_i has the same A_i
    J_it = torch.min(rho * A, rho.clamp(1 - eps_low, 1 + eps_high) * A)  # (B, T): a token's term
    J_it = J_it.masked_fill(~keep, 0.0)  # (B, T): times I
    if denominator is None:
        denominator = keep.sum().clamp(min=1)
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

    Use it in a training loop of your own that sees a whole mini-batch in one call. If you split a
    mini-batch into micro-batches, call spurious_mask once for the mini-batch, and clipped_loss for
    each micro-batch. tau_h can equal the entropy of one candidate. A second pass rounds
    differently, so it could decide otherwise about that candidate.

    logp (B, T) float32 with gradient: ln pi_theta of each response token (temperature 1, full
    vocabulary). old_logp (B, T) float32: ln pi_old of the same tokens. advantages (B,) float32.
    entropy (B, T) float32: H in nats under the current policy; it never receives a gradient. mask
    (B, T) bool, True on response tokens. tau_h and denominator belong to the whole mini-batch: None
    computes them from this call.
    Returns the loss, a 0-dim tensor, and detached 0-dim sums that add up over micro-batches.
    """
    silenced = spurious_mask(logp, advantages, entropy, mask, tau_p=tau_p, q=q, tau_h=tau_h)
    keep = mask & ~silenced  # (B, T): the paper's I
    clip = {"eps_low": eps_low, "eps_high": eps_high}
    loss = clipped_loss(logp, old_logp, advantages, keep, **clip, denominator=denominator)
    metrics = {
        "candidates": spurious_candidates(logp, advantages, mask, tau_p=tau_p).sum(),
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


def grpo_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    ref_logp: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    eps: float,
    beta: float,
    num_responses: float,
) -> torch.Tensor:
    """Sec. 2.2, GRPO: the clipped objective, averaged in each response, then over responses.

        J = 1/N sum_i 1/|y_i| sum_t [min(rho A, clip(rho, 1 - eps, 1 + eps) A) - beta k3]
        k3 = r - ln r - 1 with r = pi_ref / pi_theta

    The value of k3 estimates KL(pi_theta || pi_ref). The gradient of k3 estimates the gradient of
    KL(pi_ref || pi_theta). ref_logp (B, T) float32 is ln p under the starting model; None: no KL
    term. num_responses is N. The other arguments are those of stapo_loss. Returns the loss -J, a
    0-dim tensor.
    """
    check_shapes(advantages, mask, logp, old_logp, logp if ref_logp is None else ref_logp)
    rho = (logp - old_logp.detach()).masked_fill(~mask, 0.0).exp()  # (B, T)
    A = advantages[:, None]  # (B, 1)
    J_it = torch.min(rho * A, rho.clamp(1 - eps, 1 + eps) * A)  # (B, T)
    if ref_logp is not None:
        log_r = (ref_logp - logp).masked_fill(~mask, 0.0)  # (B, T)
        k3 = log_r.exp() - log_r - 1  # (B, T)
        J_it = J_it - beta * k3
    per_response = J_it.masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)  # (B,)
    return -per_response.sum() / num_responses


# =========================================================================== the loss ends here


# ============================================= a mini-batch, and which of its tokens are kept


@dataclass(frozen=True)
class Batch:
    """Responses as padded tensors on the CPU, one row [prompt, response, padding] for each.

    `collect` makes the Batch of a step. A mini-batch is a slice of its rows. A micro-batch is some
    rows of a mini-batch, cut to the longest of these rows. All three are this type.
    """

    ids: torch.Tensor  # (B, L) long
    mask: torch.Tensor  # (B, L) bool, True on response tokens, end of sequence included
    lengths: torch.Tensor  # (B,) long, tokens of prompt and response
    old: TokenStats  # p and H under pi_old: (B, L) float32 each, 0 outside mask
    ref_logp: torch.Tensor | None  # (B, L) float32 under the starting model; None: no KL term
    rewards: torch.Tensor  # (B,) float64
    advantages: torch.Tensor  # (B,) float32
    truncated: torch.Tensor  # (B,) bool, ended by --max_new_tokens
    seeds: torch.Tensor  # (B,) long, of the sampling

    def mini_batches(self, count: int) -> "list[Batch]":
        """Split the batch into `count` parts with equally many rows (views). No row is left out."""
        if len(self.ids) % count:
            raise ValueError(f"{len(self.ids)} responses are not {count} equal mini-batches")
        size = len(self.ids) // count
        return [self.take(slice(i * size, (i + 1) * size)) for i in range(count)]

    def rows(self, index: torch.Tensor) -> "Batch":
        """Return the rows `index` (N,) long, without the padding that none of them needs."""
        return self.take(index, width=max(self.lengths[index].tolist(), default=0))

    def take(self, index: slice | torch.Tensor, width: int | None = None) -> "Batch":
        """Return some of the rows, with their first `width` columns (None: all columns)."""
        return Batch(
            ids=self.ids[index, :width],
            mask=self.mask[index, :width],
            lengths=self.lengths[index],
            old=TokenStats(*(values[index, :width] for values in self.old)),
            ref_logp=None if self.ref_logp is None else self.ref_logp[index, :width],
            rewards=self.rewards[index],
            advantages=self.advantages[index],
            truncated=self.truncated[index],
            seeds=self.seeds[index],
        )


class Choice(NamedTuple):
    """A method's decision for a mini-batch (this rank's rows): which tokens are kept."""

    keep: torch.Tensor  # (B, L) bool: the tokens that the objective is over, the paper's I
    candidates: torch.Tensor  # (B, L) bool: the tokens that could have been silenced
    tau_h: float | None = None  # nats: candidates with H < tau_h are silenced; None: none is used


def silence_spurious(batch: Batch, stats: TokenStats, cfg: Config) -> Choice:
    """Sec. 3.3, S2T on a mini-batch: spurious_mask, with tau_h over the candidates of all ranks.

        response 1, A = 0.71:   p = 0.9, 0.001, 0.001   H = 0.2, 0.1, 1.5
        response 2, A = -0.71:  p = 0.001               H = 0.1

    In this example tokens 2 and 3 of response 1 are the candidates. So tau_h = 0.1 + 0.75 (1.5 -
    0.1) = 1.15, and token 2 is silenced: keep = [True, False, True], [True]. denominator is 3.
    """
    logp, entropy, A, mask = stats.logp, stats.entropy, batch.advantages, batch.mask
    candidates = spurious_candidates(logp, A, mask, tau_p=cfg.tau_p)  # (B, L)
    quantile_tokens = mask if cfg.quantile_over == "all" else candidates
    tau_h = quantile(all_cat(entropy[quantile_tokens]), cfg.q)
    silenced = spurious_mask(logp, A, entropy, mask, tau_p=cfg.tau_p, tau_h=tau_h)  # (B, L)
    threshold = float(tau_h) if tau_h.isfinite() else None  # -inf without candidates
    return Choice(keep=mask & ~silenced, candidates=candidates, tau_h=threshold)


def silence_high_entropy(batch: Batch, stats: TokenStats, cfg: Config) -> Choice:
    """Silence as many candidates as STAPO does: the candidates with the highest entropy.

    S2T sees -H in place of H.
    """
    reversed_stats = stats._replace(entropy=-stats.entropy)
    return silence_spurious(batch, reversed_stats, cfg)._replace(tau_h=None)


def silence_random(batch: Batch, stats: TokenStats, cfg: Config) -> Choice:
    """Silence as many candidates as STAPO does: random candidates.

    S2T sees noise in place of H. The noise of a token depends on its response's seed alone.
    """
    noise = torch.zeros(batch.mask.shape)  # (B, L)
    for row, (seed, mask) in enumerate(zip(batch.seeds.tolist(), batch.mask, strict=True)):
        noise[row, mask] = torch.rand(int(mask.sum()), generator=generator(seed, "noise"))
    return silence_spurious(batch, stats._replace(entropy=noise), cfg)._replace(tau_h=None)


def silence_candidates(batch: Batch, stats: TokenStats, cfg: Config) -> Choice:
    """FullMask: silence every candidate."""
    candidates = spurious_candidates(stats.logp, batch.advantages, batch.mask, tau_p=cfg.tau_p)
    return Choice(keep=batch.mask & ~candidates, candidates=candidates)


def keep_high_entropy(batch: Batch, stats: TokenStats, cfg: Config) -> Choice:
    """20-Entropy: keep the 20 % of all tokens that have the highest entropy."""
    threshold = quantile(all_cat(stats.entropy[batch.mask]), 0.8)
    keep = batch.mask & (stats.entropy >= threshold)
    return Choice(keep=keep, candidates=torch.zeros_like(keep))


def keep_all(batch: Batch, stats: TokenStats, cfg: Config) -> Choice:
    """JustRL and GRPO: keep every response token."""
    return Choice(keep=batch.mask, candidates=torch.zeros_like(batch.mask))


class Method(NamedTuple):
    """A training method: which tokens it keeps, and what it divides by.

    docs/using-the-loss.md adds one to METHODS.
    """

    choose: Callable[[Batch, TokenStats, Config], Choice]  # from p and H under pi_theta
    reads: Literal["A > 0", "all", "none"]  # the responses whose p and H under pi_theta it needs
    divides_by: Literal["kept", "tokens", "responses"]  # the denominator: a key of count_tokens
    uses: str = ""  # flags that not every method uses: the others refuse them
    kl: bool = False  # a KL term to the starting model, weighted by --beta; needs "responses"


METHODS = {
    "stapo": Method(silence_spurious, "A > 0", "kept", uses="q quantile_over"),
    "justrl": Method(keep_all, "none", "tokens"),
    # divides by each response's length, too; clips at eps_low on both sides
    "grpo": Method(keep_all, "none", "responses", kl=True),
    # divides by all tokens, the dropped ones included
    "20-entropy": Method(keep_high_entropy, "all", "tokens"),
    "full-mask": Method(silence_candidates, "A > 0", "kept"),
    "high-entropy": Method(silence_high_entropy, "A > 0", "kept", uses="q"),
    "random": Method(silence_random, "A > 0", "kept", uses="q"),
}


def refused_flags(method: Method) -> list[str]:
    """Return the names of the flags that a method does not use: they must keep their defaults."""
    known = " ".join(each.uses for each in METHODS.values()).split()
    refused = sorted(set(known) - set(method.uses.split()))
    refused += [] if method.kl else ["beta"]
    return refused + (["eps_high"] if method.divides_by == "responses" else [])


def count_tokens(batch: Batch, stats: TokenStats, choice: Choice) -> dict[str, int]:
    """Count a mini-batch's responses and tokens, over all ranks."""
    finite = stats.logp.isfinite() & stats.entropy.isfinite()  # (B, L)
    counts = {
        "responses": len(batch.ids),
        "tokens": batch.mask.sum(),
        "kept": (batch.mask & choice.keep).sum(),
        "candidates": (batch.mask & choice.candidates).sum(),
        "silenced": (batch.mask & choice.candidates & ~choice.keep).sum(),
        "not_finite": (batch.mask & ~finite).sum(),
    }
    return {name: int(count) for name, count in all_sum(counts).items()}


# ============================================================= the update, Sec. 3.3, Algorithm 1


def statistics_pass(policy: Policy, batch: Batch, cfg: Config) -> TokenStats:
    """Compute ln p and H of a mini-batch's tokens under the current policy: (B, L) float32 each.

    Only the responses that the method reads are forwarded. STAPO reads those with A > 0, because no
    others can hold candidates. Rows that are not forwarded keep ln p and H under pi_old.
    """
    reads = "all" if cfg.quantile_over == "all" else METHODS[cfg.method].reads
    every = torch.ones_like(batch.advantages, dtype=torch.bool)  # (B,)
    needed = {"A > 0": batch.advantages > 0, "all": every, "none": ~every}[reads]  # (B,)
    rows = needed.nonzero().flatten()  # (N,)
    tokens = batch.ids[rows], batch.mask[rows], batch.lengths[rows]
    fresh = response_stats(policy, *tokens, cfg.tokens_per_micro_batch)  # (N, L) each
    logp = batch.old.logp.index_copy(0, rows, fresh.logp)
    return TokenStats(logp, entropy=batch.old.entropy.index_copy(0, rows, fresh.entropy))


def objective(
    batch: Batch, keep: torch.Tensor, logp: torch.Tensor, denominator: float, cfg: Config
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss -J of a micro-batch under --method, a 0-dim tensor, and its ratio_sums.

    keep (B, L) bool is the paper's I, on the CPU like the batch. logp (B, L) float32 with gradient
    is on the model's device, and so are the results.
    """
    tensors = batch.old.logp, batch.ref_logp, batch.advantages, batch.mask, keep
    tensors = [x if x is None else x.to(logp.device, non_blocking=True) for x in tensors]
    old_logp, ref_logp, advantages, mask, keep = tensors
    keep = keep & mask  # a mask of your own may be True outside responses
    if METHODS[cfg.method].divides_by == "responses":  # GRPO
        clip = {"eps_low": cfg.eps_low, "eps_high": cfg.eps_low}
        options = {"eps": cfg.eps_low, "beta": cfg.beta, "num_responses": denominator}
        loss = grpo_loss(logp, old_logp, ref_logp, advantages, keep, **options)
    else:
        clip = {"eps_low": cfg.eps_low, "eps_high": cfg.eps_high}
        loss = clipped_loss(logp, old_logp, advantages, keep, **clip, denominator=denominator)
    return loss, ratio_sums(logp, old_logp, advantages, mask, **clip)


def update(
    policy: Policy,
    optimizer: Optimizer,
    batch: Batch,
    keep: torch.Tensor,
    counts: dict[str, int],
    cfg: Config,
) -> dict[str, float]:
    """Take one optimiser step on a mini-batch, over the tokens in keep (B, L) bool.

    counts: what count_tokens returned. Without a KL term, responses with A = 0 have no gradient:
    they are not forwarded, but they stay in the denominator. If anything is not finite, there is no
    step. Returns numbers over all ranks: `loss`, ratio_sums, `grad_norm` before clipping, and
    `finite`, which says whether there was a step.
    """
    # FSDP averages gradients over ranks, so the denominator of all ranks is divided by world_size.
    denominator = max(counts[METHODS[cfg.method].divides_by], 1) / world_size()
    trained = (batch.advantages != 0) | (batch.ref_logp is not None)  # (B,)
    trained = trained.nonzero().flatten()  # (N,) rows
    lengths = batch.lengths[trained].tolist()
    local = dict.fromkeys(("loss", "tokens", "ratio_sum", "kl_sum", "clip_low", "clip_high"), 0.0)
    policy.train()
    optimizer.zero_grad()
    parts = micro_batches(lengths, cfg.tokens_per_micro_batch)  # equally many on every rank
    for part in progress.track(parts, "update"):
        rows = trained[part]  # empty if another rank has more micro-batches: zero gradients
        micro = batch.rows(rows)
        logp = policy(micro.ids, micro.mask, logp_only=True).logp  # (B, L)
        loss, sums = objective(micro, keep[rows, : logp.shape[1]], logp, denominator, cfg)
        loss.backward()
        sums["loss"] = loss.detach() / world_size()  # its sum over ranks is the global loss
        for name, value in sums.items():
            local[name] += value.double()
    policy.eval()
    for parameter in policy.parameters():
        # If nothing was forwarded, AdamW takes the step of a zero gradient. A frozen parameter has
        # no gradient: weight decay would shrink it.
        if parameter.grad is None and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.grad_clip)
    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    totals = all_sum(local)
    totals["grad_norm"] = norm
    finite = not counts["not_finite"] and math.isfinite(norm) and math.isfinite(totals["loss"])
    if finite:
        optimizer.step()
    policy.zero_grad()  # frees the gradients' memory for the next rollout
    return totals | {"finite": finite}


# ========================================================== collecting a step's responses, Sec. 2.2


class Task(NamedTuple):
    """The tokenizer, the problems and the reward of a run, and the benchmarks that evaluate it."""

    tokenizer: Tokenizer
    problems: list[dict]  # {"problem", "answer", "prompt_ids"}, and "row" with --reward
    reward: Reward
    suite: evaluation.Suite
    fingerprints: dict[str, str]  # of the contents of --data, --reward and --chat_template


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
    of ranks. Example: a batch of four problems 0 to 3, mini-batches of two and groups of two.

        rank_rows(4, 2, 2, rank=0, world=1) is 00 01 10 11, 20 21 30 31
        rank_rows(4, 2, 2, rank=0, world=2) is 00 01, 20 21
        rank_rows(4, 2, 2, rank=1, world=2) is 10 11, 30 31
    """
    problems = torch.arange(batch_size).view(-1, world, mini_batch_size // world)
    problems = problems[:, rank].flatten().tolist()
    return [(problem, member) for problem in problems for member in range(group_size)]


def collect(
    policy: Policy, reference: Policy | None, task: Task, step: int, cfg: Config
) -> tuple[Batch, list[dict]]:
    """Sample this rank's responses of a step, reward them, and compute ln p and H under pi_old.

    Returns the batch, whose rows are in the order of rank_rows, and a row of samples.jsonl for each
    response. Raises Stopped if a stop was asked for, and RewardError, each on every rank.
    """
    indices = batch_indices(step, len(task.problems), cfg.batch_size, cfg.seed)
    pairs = rank_rows(cfg.batch_size, cfg.mini_batch_size, cfg.group_size, rank(), world_size())
    problems = [task.problems[indices[number]] for number, _ in pairs]
    seeds = [mix_seed(cfg.seed, step, number, member) for number, member in pairs]
    prompts = [problem["prompt_ids"] for problem in problems]
    temperature, top_p = evaluation.DECODINGS["training"]
    options = {"max_new_tokens": cfg.max_new_tokens, "batch_size": cfg.rollout_batch_size}
    options |= {"temperature": temperature, "top_p": top_p}
    options |= {"seed": seeds, "progress": f"step {step}, rollout"}
    with distributed.gathered(policy) as model:
        responses = in_order(stop.together(sample(model, task.tokenizer, prompts, **options)))
    # The metrics count a response with a reward above 0 as right. So a length penalty here would
    # lower `accuracy`, too.
    rewards = torch.tensor(grade(task.reward, responses, problems), dtype=torch.float64)  # (B,)
    advantages = group_advantages(rewards.float().view(-1, cfg.group_size)).flatten()  # (B,)
    ids, mask, lengths = pad_batch(responses)  # (B, L), (B, L), (B,)
    old = response_stats(policy, ids, mask, lengths, cfg.tokens_per_micro_batch)
    ref_logp = None
    if reference:
        # Gathered: FSDP2 keeps a list of forwards until a backward, which the reference never has.
        with distributed.gathered(reference) as model:
            stats = response_stats(Policy(model), ids, mask, lengths, cfg.tokens_per_micro_batch)
        ref_logp = stats.logp
    stop.leave_if_asked()  # a stop during the updates waits until the step is whole
    batch = Batch(
        ids=ids,
        mask=mask,
        lengths=lengths,
        old=old,
        ref_logp=ref_logp,
        rewards=rewards,
        advantages=advantages,
        truncated=torch.tensor([response.truncated for response in responses]),
        seeds=torch.tensor(seeds),
    )
    rows = zip(problems, responses, rewards.tolist(), advantages.tolist(), strict=True)
    samples = [
        {"problem": problem["problem"], "gold": problem["answer"], "response": response.text}
        | {"reward": reward, "advantage": advantage}
        for problem, response, reward, advantage in rows
    ]
    return batch, samples


def grade(reward: Reward, responses: list[Response], problems: list[dict]) -> list[float]:
    """Reward each response. If one rank fails or stops, all ranks raise RewardError or Stopped."""
    rewards = []
    pairs = list(zip(responses, problems, strict=True))
    with distributed.raised_on_all():
        for response, problem in progress.track(pairs, "rewards"):
            if stop.asked:
                break
            rewards.append(reward(response.text, problem))
    stop.leave_if_asked()
    return rewards


# ============================================================== metrics; docs/reference.md has each


def rollout_metrics(batch: Batch, tau_p: float) -> dict[str, float | None]:
    """Metrics of a step's responses on all ranks, under pi_old. Right is reward > 0."""
    right = batch.rewards > 0  # (B,)
    right_tokens = batch.mask & right[:, None]  # (B, L)
    sums = {
        "responses": len(right),
        "right": right.sum(),
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


def entropy_metrics(batch: Batch) -> dict[str, float]:
    """Token entropy in nats over all ranks' responses, under pi_old, and the sampling check."""
    entropy = all_cat(batch.old.entropy[batch.mask])  # (N,)
    logp = all_cat(batch.old.logp[batch.mask])  # (N,)
    shares = torch.tensor([0.5, 0.8, 0.95, 0.99], dtype=torch.float64)
    p50, p80, p95, p99 = quantile(entropy, shares).tolist()
    gap, z = sampling_gap(logp, entropy, torch.ones_like(entropy, dtype=torch.bool))
    return {
        "entropy_p50": p50,
        "entropy_p80": p80,
        "entropy_p95": p95,
        "entropy_p99": p99,
        "entropy": float(entropy.double().mean()),
        "sampling_gap": float(gap),
        "sampling_z": float(z),
    }


def update_metrics(counts: list[dict], updates: list[dict]) -> dict[str, float | None]:
    """Metrics of a step's updates, over all its mini-batches and ranks.

    counts: what count_tokens returned for each mini-batch; updates: what `update` returned.
    """
    total = Counter()
    for sums in updates:
        total.update(sums)  # adds up the numbers of each key
    forwarded = total["tokens"]  # without the responses that `update` does not forward
    silenced = sum(count["silenced"] for count in counts)

    def per_token(key: str) -> float | None:
        return total[key] / forwarded if forwarded else None

    return {
        "candidates": sum(count["candidates"] for count in counts),
        "silenced": silenced,
        "silenced_fraction": silenced / sum(count["tokens"] for count in counts),
        "clip_low": per_token("clip_low"),
        "clip_high": per_token("clip_high"),
        "ratio_mean": per_token("ratio_sum"),
        "approx_kl": per_token("kl_sum"),
        "loss": total["loss"] / len(updates),
        "grad_norm": total["grad_norm"] / len(updates),
        "skipped_updates": len(updates) - total["finite"],
    }


def cost_metrics(tokens: int, began: float, collected: float) -> dict[str, float]:
    """Seconds of a step, and peak memory since the start in GB, on this rank.

    tokens: response tokens of all ranks. began, collected: time.monotonic() before and after
    `collect`.
    """
    ended = time.monotonic()
    return {
        "rollout_seconds": collected - began,
        "update_seconds": ended - collected,
        "tokens_per_second": tokens / (ended - began),
        "peak_memory_gb": peak_memory_gb(),
    }


# ============================================================================== the training loop


def check_flags(cfg: Config) -> None:
    """Raise InputError, naming the flag, if a flag has a value that cannot work."""

    def need(name: str, holds: bool, why: str) -> None:
        if not holds:
            raise InputError(f"--{name} {getattr(cfg, name)}: {why}")

    at_least_1 = "steps batch_size mini_batch_size max_new_tokens rollout_batch_size keep_last "
    at_least_1 += "tokens_per_micro_batch"
    at_least_0 = "warmup_steps weight_decay eps_low eps_high beta save_every save_minutes "
    at_least_0 += "eval_every eval_limit eval_samples log_samples threads"
    for name in at_least_1.split():
        need(name, getattr(cfg, name) >= 1, "must be at least 1")
    for name in at_least_0.split():
        need(name, 0 <= getattr(cfg, name) < math.inf, "must be at least 0, and finite")
    need("lr", 0 < cfg.lr < math.inf, "must be above 0, and finite")
    need("grad_clip", cfg.grad_clip > 0, "must be above 0")
    need("q", 0 <= cfg.q <= 1, "a quantile is between 0 and 1")
    need("tau_p", 0 <= cfg.tau_p <= 1, "a probability is between 0 and 1")
    need("group_size", cfg.group_size >= 2, "an advantage needs at least 2 responses")
    fits = cfg.batch_size % cfg.mini_batch_size == 0
    need("batch_size", fits, f"not a multiple of --mini_batch_size {cfg.mini_batch_size}")
    fits = cfg.mini_batch_size % world_size() == 0
    need("mini_batch_size", fits, f"not a multiple of {world_size()} ranks")
    need("method", cfg.method in METHODS, f"not one of {', '.join(METHODS)}")
    method = METHODS[cfg.method]
    for name in ("reads", "divides_by"):
        value, known = getattr(method, name), get_args(Method.__annotations__[name])
        need("method", value in known, f"{name} is {value!r}, not one of {str(known)[1:-1]}")
    kl_works = not method.kl or method.divides_by == "responses"
    need("method", kl_works, 'a KL term needs divides_by="responses"')
    if not cfg.resume:  # a run that began with such a flag can be resumed
        for name in refused_flags(method):
            unchanged = getattr(cfg, name) == getattr(Config, name)
            need(name, unchanged, f"cannot be used with --method {cfg.method}; leave it out")


def load_task(cfg: Config, checkpoint: Path | None = None) -> Task:
    """Check the flags, and load all that they name except the weights. Raises InputError.

    Prompts that are too long are dropped. checkpoint: of a resumed run; its tokenizer and its
    config are loaded in place of --model's.
    """
    check_flags(cfg)
    with loading(checkpoint):
        if checkpoint:  # its tokenizer has the chat template
            tokenizer, config = load_tokenizer(str(checkpoint)), load_config(str(checkpoint))
        else:
            tokenizer = load_tokenizer(cfg.model, cfg.chat_template)
            config = load_config(cfg.model)
    reward = load_reward(cfg.reward)
    whole_rows = bool(cfg.reward)  # a reward of your own can read every column
    benchmarks = cfg.eval_benchmarks if cfg.eval_every else []
    options = {"samples": cfg.eval_samples, "limit": cfg.eval_limit, "whole_rows": whole_rows}
    suite = evaluation.load_benchmarks(benchmarks, **options)
    problems = load_problems(cfg.data, whole_rows=whole_rows)
    for problem in progress.track(problems, "encoding prompts"):
        problem["prompt_ids"] = encode_prompt(tokenizer, problem["problem"], cfg.instruction)
    kept = [p for p in problems if 0 < len(p["prompt_ids"]) <= cfg.max_prompt_tokens]
    if not kept:
        raise InputError(f"--max_prompt_tokens {cfg.max_prompt_tokens}: every prompt is longer")
    dropped = len(problems) - len(kept)
    progress.say(f"{cfg.data}: {len(kept)} problems, {dropped} over --max_prompt_tokens dropped")
    prompts = [problem["prompt_ids"] for problem in kept]
    check_length(config, prompts, cfg.max_new_tokens, "--max_new_tokens")
    rows = [[problem["problem"], problem["answer"], problem.get("row")] for problem in kept]
    fingerprints = {"data": f"{len(kept)} problems, {fingerprint(rows)}"}
    if cfg.reward:
        fingerprints["reward"] = reward_fingerprint(cfg.reward)
    if cfg.chat_template not in ("", "none") and not checkpoint:
        fingerprints["chat_template"] = fingerprint(tokenizer.chat_template)
    return Task(tokenizer, kept, reward, suite, fingerprints)


def evaluate_if_due(run: RunFolder, policy: Policy, task: Task, cfg: Config) -> None:
    """Evaluate the policy before step 1 and every --eval_every steps, into metrics.jsonl.

    --resume continues an evaluation that was stopped: the checkpoint before it has these weights,
    or, before step 1, --model. Raises Stopped.
    """
    if not run.evaluation_is_due():
        return
    tokenizer, suite, reward = task.tokenizer, task.suite, task.reward
    with distributed.gathered(policy) as model:
        file = run.evaluation_file()
        scores = evaluation.evaluate(model, tokenizer, suite, file, cfg, reward)
    run.end_evaluation(scores)
    progress.log(progress.scores_in_words(run.step, scores))


def load_models(
    cfg: Config, tokenizer: Tokenizer, checkpoint: Path | None
) -> tuple[Policy, Optimizer, Policy | None]:
    """Load the policy, its AdamW, and the starting model (None without a KL term).

    The policy and AdamW come from a checkpoint, or if it is None, from --model. Raises InputError.
    """
    with loading(checkpoint):
        policy = load_policy(str(checkpoint or cfg.model), cfg.gradient_checkpointing)
        options = {"weight_decay": cfg.weight_decay, "fused": policy.model.device.type == "cuda"}
        optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, **options)
        if checkpoint:
            load_optimizer(checkpoint, policy.model, optimizer)
    # A checkpoint has this, so other programs stop and sample as training does.
    stops = stop_ids(policy.model, tokenizer)
    decoding = evaluation.DECODINGS["training"]
    config = sampling_config(*decoding, None, stops, tokenizer.pad_token_id)
    policy.model.generation_config = config
    with_kl = METHODS[cfg.method].kl and cfg.beta > 0
    return policy, optimizer, load_policy(cfg.model) if with_kl else None


def starting_weights(
    policy: Policy, reference: Policy | None, checkpoint: Path | None
) -> dict[str, str]:
    """Return the fingerprint of --model's weights; {} if a resumed run did not load them."""
    starting = reference or (None if checkpoint else policy)
    return {"model": weights_fingerprint(starting.model)} if starting else {}


# A step depends on the weights, AdamW's moments and its number: --resume has nothing else. Whatever
# else lasts from step to step must be put into the checkpoint.
def train(cfg: Config) -> None:
    """Train: repeat Algorithm 1 for --steps steps.

    Raises InputError, and Stopped after a stop was asked for.
    """
    checkpoint = newest_checkpoint(Path(cfg.resume)) if cfg.resume else None
    with distributed.raised_on_all():
        task = load_task(cfg, checkpoint)
    suite = fingerprint(list(task.suite.values()))
    distributed.refuse_differences(task.fingerprints | {"eval_benchmarks": suite})
    # With --resume, parse_flags has put that directory into cfg.output.
    # Runs of several seeds can start in the same second.
    output = cfg.output or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{cfg.method}-{os.getpid()}"
    run = RunFolder(output, asdict(cfg))
    policy, optimizer, reference = load_models(cfg, task.tokenizer, run.checkpoint)
    run.begin(task.fingerprints | starting_weights(policy, reference, run.checkpoint))
    skipped_in_a_row, ended_by = 0, None
    stop.listen()
    try:
        for step in itertools.count(run.step + 1):
            evaluate_if_due(run, policy, task, cfg)  # after the step before, or before step 1
            if step > cfg.steps:
                break
            # 1. Sample G responses to each prompt from pi_old = pi_theta, and reward them.
            began = time.monotonic()
            batch, samples = collect(policy, reference, task, step, cfg)
            line = {"step": step} | entropy_metrics(batch) | rollout_metrics(batch, cfg.tau_p)
            collected = time.monotonic()

            # 2. For each mini-batch: p and H under pi_theta, the mask I, one update.
            lr = cfg.lr * min(1, step / max(1, cfg.warmup_steps))
            for group in optimizer.param_groups:
                group["lr"] = lr
            counts, updates = [], []
            for mini_batch in batch.mini_batches(cfg.batch_size // cfg.mini_batch_size):
                stats = mini_batch.old  # p and H, (B, L): before any update pi_theta = pi_old
                if updates:
                    stats = statistics_pass(policy, mini_batch, cfg)
                choice = METHODS[cfg.method].choose(mini_batch, stats, cfg)  # keep is the paper's I
                counts += [count_tokens(mini_batch, stats, choice)]
                updates += [update(policy, optimizer, mini_batch, choice.keep, counts[-1], cfg)]
                skipped_in_a_row = 0 if updates[-1]["finite"] else skipped_in_a_row + 1
                if skipped_in_a_row == 3:
                    raise InputError(f"step {step}: three updates in a row were not finite")

            # 3. Write the metrics and samples of the step, and a checkpoint if one is due.
            line |= update_metrics(counts, updates) | {"lr": lr}
            line |= cost_metrics(line["tokens"], began, collected)
            run.end_step(line, samples[: cfg.log_samples])
            progress.report_step(line, samples[0], cfg.steps, run.lines())
            if run.save_is_due():
                run.save(policy.model, optimizer, task.tokenizer)
            stop.leave_if_asked()
    # Neither is raised during the updates, so the weights belong to a whole step.
    except (Stopped, RewardError) as error:
        ended_by = Stopped() if stop.asked else error  # SIGTERM also ends a reward's processes
    run.save(policy.model, optimizer, task.tokenizer)
    # A reward that fails in step 1 leaves nothing to resume: a mended reward is another reward.
    if run.step > 0 or not isinstance(ended_by, RewardError):
        progress.report_run(run.lines(), cfg.steps, str(run.path), run.evaluation_is_due())
    if ended_by:
        raise ended_by


def main(argv: list[str] | None = None) -> None:
    """Read the flags and train. argv replaces the command line."""
    with distributed.session("stapo.py"):
        progress.quiet_libraries()
        with distributed.raised_on_all():
            cfg = parse_flags(Config, __doc__.split("\n")[0], argv, CHANGEABLE | MOVABLE)
        cfg = distributed.broadcast(cfg)  # of several hosts' flags, those of rank 0 count
        if cfg.threads > 0:
            torch.set_num_threads(cfg.threads)
        progress.report_device(weights="float32")
        train(cfg)


if __name__ == "__main__":
    main()
