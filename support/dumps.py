"""What scripts/figures.py draws: a bounded sample of a step's tokens, and some responses whole.

Everything is about responses with A > 0, under the policy that sampled them. A dump takes at most
about 7 MB as JSON, whatever the size of the model and the batch: 20,000 sampled tokens of about
200 bytes each (4 MB), and 20 responses of at most 1,000 tokens of about 150 bytes each (3 MB).
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from support.distributed import all_list, all_max, all_sum, rank, world_size
from support.seeds import generator

# Of a dump, over all ranks: tokens of the sample, responses, and tokens of each response.
TOKENS, RESPONSES, WINDOW = 20_000, 20, 1_000


class RightResponses(NamedTuple):
    """This rank's responses with A > 0, on the CPU: rows [prompt, response, padding] of a batch."""

    ids: torch.Tensor  # (N, L) long
    mask: torch.Tensor  # (N, L) bool, True on response tokens
    advantages: torch.Tensor  # (N,) float32
    silenced: torch.Tensor  # (N, L) bool
    p: torch.Tensor  # (N, L) float32, the sampled token's probability
    entropy: torch.Tensor  # (N, L) float32, nats
    collision: torch.Tensor  # (N, L) float32, the sum of squared probabilities
    tau_h: torch.Tensor  # (N,) nats, of the response's mini-batch; not finite where it has none
    problems: list[str]
    answers: list[str]  # the right ones, as the data has them


def make_dump(
    responses: RightResponses,
    *,
    step: int,
    method: str,
    tau_p: float,
    all_tokens: int,
    seed: int,
    decode: Callable[[list[int]], str],
    likeliest: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, Any]:
    """A step's dump, ready for JSON and the same on every rank; each rank brings its responses.

    `all_tokens` counts the tokens of the other responses too. `decode` makes text of ids.
    `likeliest` is the model's own (see rollout.py): under FSDP it is a collective, and every rank
    calls it equally often. The result is a function of the arguments.
    """
    tokens = sample_tokens(responses, tau_p, decode, generator(seed, "dump", step))
    counts = all_sum({"positive_tokens": responses.mask.sum(), "all_tokens": all_tokens})
    rows = rows_to_show(responses.silenced, generator(seed, "responses", step, rank()))
    idle = all_max(len(rows)) - len(rows)  # forwards that other ranks do more than this one
    shown = []
    for row in rows:
        places = window(responses.mask[row], responses.silenced[row])
        top = likeliest(responses.ids[row, : places[-1] + 1], len(places))
        shown.append(describe(responses, row, places, top, decode))
    for _ in range(idle):
        likeliest(torch.zeros(2, dtype=torch.long), 1)  # keeps the ranks in step
    tokens_of_ranks, shown_of_ranks = all_list(tokens), all_list(shown)
    return {
        "step": step,
        "method": method,
        "tau_p": tau_p,
        "positive_tokens": int(counts["positive_tokens"]),
        "all_tokens": int(counts["all_tokens"]),
        "tokens": list(itertools.chain(*tokens_of_ranks)),
        "responses": list(itertools.chain(*shown_of_ranks)),
    }


def finite(value: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else None


def rounded(value: float, digits: int) -> float:
    """To so many significant digits: shorter in JSON."""
    return float(f"{value:.{digits}g}")


# ---------------------------------------------------------------------- a sample of the tokens


def sample_tokens(
    responses: RightResponses,
    tau_p: float,
    decode: Callable[[list[int]], str],
    draw: torch.Generator,
) -> list[dict[str, Any]]:
    """This rank's share of the sampled tokens: low-probability ones (p < tau_p), then others.

    Each kind has half of the room; `weight` is how many tokens of its kind a token stands for.
    """
    rows, columns = responses.mask.nonzero(as_tuple=True)  # (T,) each, response after response
    low = responses.p[rows, columns] < tau_p  # (T,)
    tokens = []
    for kind in (True, False):
        members = (low == kind).nonzero().flatten()
        shuffled = members[torch.randperm(len(members), generator=draw)]
        chosen = shuffled[: TOKENS // 2 // world_size()].tolist()
        for row, t in zip(rows[chosen].tolist(), columns[chosen].tolist(), strict=True):
            token = {
                "token": decode([int(responses.ids[row, t])]),
                "p": float(responses.p[row, t]),
                "entropy": float(responses.entropy[row, t]),
                "collision": float(responses.collision[row, t]),
                "advantage": float(responses.advantages[row]),
                "silenced": bool(responses.silenced[row, t]),
                "tau_h": finite(float(responses.tau_h[row])),
                "weight": len(members) / len(chosen),
            }
            tokens.append(token)
    return tokens


# ------------------------------------------------------------------- responses, token by token


def rows_to_show(silenced: torch.Tensor, draw: torch.Generator) -> list[int]:
    """Which of this rank's responses are among those of all ranks that are shown.

    silenced (N, L) bool. Responses with silenced tokens come first, and lots decide among equals.
    """
    lots = torch.rand(len(silenced), generator=draw).tolist()
    unmarked = (~silenced.any(1)).tolist()
    mine = [(unmarked[i], lots[i], rank(), i) for i in range(len(lots))]
    first = sorted(itertools.chain(*all_list(mine)))[:RESPONSES]
    return [i for _, _, owner, i in first if owner == rank()]


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
    responses: RightResponses,
    row: int,
    columns: list[int],
    likeliest: tuple[torch.Tensor, torch.Tensor],
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    """A response as JSON, its tokens in lists: an entry for each of the columns shown.

    `likeliest`: the largest probabilities of each place and the ids that have them, (T, 5) both.
    """
    prompt = int(responses.mask[row].nonzero()[0])  # its length
    return {
        "problem": responses.problems[row],
        "answer": responses.answers[row],
        "advantage": float(responses.advantages[row]),
        "tau_h": finite(rounded(float(responses.tau_h[row]), 6)),
        "length": int(responses.mask[row].sum()),
        "start": columns[0] - prompt,
        "token": [decode([i]) for i in responses.ids[row, columns].tolist()],
        "p": [rounded(p, 6) for p in responses.p[row, columns].tolist()],
        "entropy": [rounded(h, 6) for h in responses.entropy[row, columns].tolist()],
        "silenced": responses.silenced[row, columns].tolist(),
        "likeliest": [
            [[decode([i]), rounded(p, 4)] for p, i in zip(probabilities, ids)]
            for probabilities, ids in zip(*(column.tolist() for column in likeliest))
        ],
    }
