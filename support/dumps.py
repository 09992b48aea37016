"""What scripts/figures.py draws: a bounded sample of a step's tokens, and some responses whole.

Everything is about responses with A > 0, under the policy that sampled them. A dump takes at most
about 7 MB as JSON, whatever the size of the model and the batch: 20,000 sampled tokens of about
200 bytes each (4 MB), and 20 responses of at most 1,000 tokens of about 150 bytes each (3 MB).
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from support.distributed import all_list, all_max, all_sum, rank, world_size
from support.seeds import generator

Batch = Any  # stapo.Batch, which nothing here may import: stapo.py imports this file

# Of a dump, over all ranks: tokens of the sample, responses, and tokens of each response.
TOKENS, RESPONSES, WINDOW = 20_000, 20, 1_000


def make_dump(
    batch: Batch,
    samples: list[dict],
    silenced: torch.Tensor,
    tau_h: torch.Tensor,
    *,
    step: int,
    method: str,
    tau_p: float,
    seed: int,
    decode: Callable[[list[int]], str],
    likeliest: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, Any]:
    """A step's dump, ready for JSON and the same on every rank; each rank brings its responses.

    `samples` are the rows' dicts from `collect`; silenced (B, L) bool; tau_h (B,) nats, of the
    row's mini-batch, not finite where it has none. `decode` makes text of ids. `likeliest` is the
    model's own (see rollout.py): under FSDP it is a collective, and every rank calls it equally
    often. The result is a function of the arguments.
    """
    right = batch.mask & (batch.advantages > 0)[:, None]  # (B, L), tokens of right responses
    counts = all_sum({"positive_tokens": right.sum(), "all_tokens": batch.mask.sum()})
    p = batch.old.logp.exp()  # (B, L)
    tokens = []
    for row, t, weight in sample_tokens(right, p < tau_p, generator(seed, "dump", step)):
        token = {
            "token": decode([int(batch.ids[row, t])]),
            "p": float(p[row, t]),
            "entropy": float(batch.old.entropy[row, t]),
            "collision": float(batch.old.collision[row, t]),
            "advantage": float(batch.advantages[row]),
            "silenced": bool(silenced[row, t]),
            "tau_h": finite(float(tau_h[row])),
            "weight": weight,
        }
        tokens.append(token)
    rows = rows_to_show(right, silenced, generator(seed, "responses", step, rank()))
    # Asked for before the forwards, which wait for one another under FSDP.
    idle = all_max(len(rows)) - len(rows)
    functions = {"decode": decode, "likeliest": likeliest}
    shown = [describe(batch, samples, silenced, tau_h, row, **functions) for row in rows]
    for _ in range(idle):
        likeliest(torch.zeros(2, dtype=torch.long), 1)  # keeps the ranks in step
    dump = {"step": step, "method": method, "tau_p": tau_p}
    dump |= {name: int(count) for name, count in counts.items()}
    dump["tokens"] = list(itertools.chain(*all_list(tokens)))
    dump["responses"] = list(itertools.chain(*all_list(shown)))
    return dump


def finite(value: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else None


def rounded(value: float, digits: int) -> float:
    """To so many significant digits: shorter in JSON."""
    return float(f"{value:.{digits}g}")


def sample_tokens(
    right: torch.Tensor, low: torch.Tensor, draw: torch.Generator
) -> list[tuple[int, int, float]]:
    """This rank's share of the sampled tokens: row, column and weight of each.

    right, low (B, L) bool: tokens of right responses, those with p < tau_p. The low ones come
    first, and each kind has half of the room. The weight is how many tokens of its kind a token
    stands for.
    """
    sampled = []
    for kind in (right & low, right & ~low):
        places = kind.nonzero()  # (T, 2), response after response
        order = torch.randperm(len(places), generator=draw)
        chosen = places[order[: TOKENS // 2 // world_size()]].tolist()
        sampled += [(row, t, len(places) / len(chosen)) for row, t in chosen]
    return sampled


def rows_to_show(right: torch.Tensor, silenced: torch.Tensor, draw: torch.Generator) -> list[int]:
    """Which of this rank's right responses are among those of all ranks that are shown.

    right, silenced (B, L) bool. Responses with silenced tokens come first, and lots decide among
    equals.
    """
    rows = right.any(1).nonzero().flatten().tolist()
    lots = torch.rand(len(rows), generator=draw).tolist()
    unmarked = (~silenced.any(1)).tolist()
    mine = [(unmarked[row], lot, rank(), row) for row, lot in zip(rows, lots)]
    first = sorted(itertools.chain(*all_list(mine)))[:RESPONSES]
    return [row for _, _, owner, row in first if owner == rank()]


def window(mask: torch.Tensor, silenced: torch.Tensor) -> list[int]:
    """The columns of a response's row that are shown; mask, silenced (L,) bool.

    A long response is cut to WINDOW tokens with the first silenced one in the middle, or, where it
    has none, to its beginning.
    """
    columns = mask.nonzero().flatten().tolist()
    marked = silenced[mask].nonzero().flatten().tolist()
    start = marked[0] - WINDOW // 2 if marked else 0
    start = max(0, min(start, len(columns) - WINDOW))
    return columns[start : start + WINDOW]


def describe(
    batch: Batch,
    samples: list[dict],
    silenced: torch.Tensor,
    tau_h: torch.Tensor,
    row: int,
    *,
    decode: Callable[[list[int]], str],
    likeliest: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, Any]:
    """A row's response as JSON, its tokens in lists: an entry for each of those shown."""
    prompt = int(batch.mask[row].nonzero()[0])  # its length
    columns = window(batch.mask[row], silenced[row])
    p, entropy = batch.old.logp[row, columns].exp(), batch.old.entropy[row, columns]  # (T,) each
    top = likeliest(batch.ids[row, : columns[-1] + 1], len(columns))  # p and ids, (T, 5) both
    return {
        "problem": samples[row]["problem"],
        "answer": samples[row]["gold"],
        "advantage": float(batch.advantages[row]),
        "tau_h": finite(rounded(float(tau_h[row]), 6)),
        "length": int(batch.mask[row].sum()),
        "start": columns[0] - prompt,
        "token": [decode([i]) for i in batch.ids[row, columns].tolist()],
        "p": [rounded(value, 6) for value in p.tolist()],
        "entropy": [rounded(value, 6) for value in entropy.tolist()],
        "silenced": silenced[row, columns].tolist(),
        "likeliest": [
            [[decode([i]), rounded(share, 4)] for share, i in zip(shares, ids)]
            for shares, ids in zip(*(values.tolist() for values in top))
        ],
    }
