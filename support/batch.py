"""Responses as padded tensors, cut into mini-batches and micro-batches, and a method's choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from support.head import TokenStats


@dataclass(frozen=True)
class Batch:
    """Responses as padded tensors on the CPU, one row [prompt, response, padding] for each.

    `stapo.collect` makes the Batch of a step. A mini-batch is a slice of its rows. A micro-batch is
    some rows of a mini-batch, cut to the longest of these rows. All three are this type.
    """

    ids: torch.Tensor  # (B, L) long
    mask: torch.Tensor  # (B, L) bool, True on response tokens, end of sequence included
    lengths: torch.Tensor  # (B,) long, tokens of prompt and response
    old: TokenStats  # p and H under pi_old: (B, L) float32 each, 0 outside mask
    ref_logp: torch.Tensor | None  # (B, L) float32 under the reference policy; None: no KL term
    problem_index: torch.Tensor  # (B,) long, of the problem among those of the run
    rewards: torch.Tensor  # (B,) float64, as a reward function returns them
    advantages: torch.Tensor  # (B,) float32
    truncated: torch.Tensor  # (B,) bool, ended by --max_new_tokens
    seeds: torch.Tensor  # (B,) long, of the sampling

    def mini_batches(self, count: int) -> list[Batch]:
        """Split the batch into `count` parts with equally many rows (views)."""
        size = len(self.ids) // count
        return [self.take(slice(i * size, (i + 1) * size)) for i in range(count)]

    def rows(self, index: torch.Tensor) -> Batch:
        """Return the rows `index` (N,) long, without the padding that none of them needs."""
        return self.take(index, width=max(self.lengths[index].tolist(), default=0))

    def take(self, index: slice | torch.Tensor, width: int | None = None) -> Batch:
        """Return some of the rows, with their first `width` columns (None: all columns)."""
        return self.map(lambda x: x[index] if x.dim() == 1 else x[index, :width])

    def to(self, device: torch.device) -> Batch:
        return self.map(lambda x: x.to(device))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return a batch of function(tensor) for each tensor."""
        old = TokenStats(function(self.old.logp), function(self.old.entropy))
        others = {name: function(x) for name, x in vars(self).items() if torch.is_tensor(x)}
        return replace(self, old=old, **others)


class Choice(NamedTuple):
    """A method's decision for a mini-batch (this rank's rows): which tokens are kept."""

    keep: torch.Tensor  # (B, L): the paper's I, bool, or float weights
    stats: TokenStats  # ln p and H that it was made from, (B, L) each
    candidates: torch.Tensor | None = None  # (B, L) bool: tokens that could have been silenced
    tau_h: torch.Tensor | None = None  # 0-dim: the threshold of entropy, of all ranks' tokens
    denominator: float | torch.Tensor | None = None  # of this rank; None: the sum of keep
    eps_high: float | None = None  # None: --eps_high


def pad_batch(
    prompts: list[list[int]], responses: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the ids of prompts and of their responses as right-padded [prompt, response] rows.

    Returns ids (B, L) long, the mask (B, L) bool of response tokens, and lengths (B,) long. The
    padding is 0: no token sees it, because attention is causal.
    """
    rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    lengths = [len(row) for row in rows]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for i, (prompt, row) in enumerate(zip(prompts, rows)):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, len(prompt) : len(row)] = True
    return ids, mask, torch.tensor(lengths)


def micro_batches(lengths: list[int], budget: int) -> list[list[int]]:
    """Sort rows by length, longest first, and cut them into batches of at most `budget` tokens.

    Returns the indices of each batch's rows. The tokens of a batch are rows x longest row. A row
    that is longer than the budget gets a batch for itself. Example: micro_batches([3, 9, 4, 2],
    budget=9) is [[1], [2, 0], [3]].
    """
    batches: list[list[int]] = []
    longest = 0  # row of the newest batch
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if batches and (len(batches[-1]) + 1) * longest <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
            longest = lengths[row]
    return batches
