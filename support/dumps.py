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


class DumpedResponse(NamedTuple):
    """A response with A > 0; the tensors are (T,), an entry for each of `ids`, on the CPU."""

    problem: str
    answer: str  # the right one, as the data has it
    prompt_ids: list[int]
    ids: list[int]
    advantage: float
    silenced: torch.Tensor  # bool
    p: torch.Tensor  # float32, the sampled token's probability
    entropy: torch.Tensor  # float32, nats
    collision: torch.Tensor  # float32, the sum of squared probabilities
    tau_h: float  # nats, of the response's mini-batch; not finite where it has none


def make_dump(
    responses: list[DumpedResponse],
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

    `responses` are those of A > 0, `all_tokens` counts the tokens of the others too. `decode` makes
    text of ids. `likeliest` is the model's own (see rollout.py): under FSDP it is a collective, and
    every rank calls it equally often. The result is a function of the arguments.
    """
    tokens = sample_tokens(responses, tau_p, decode, generator(seed, "dump", step))
    positive_tokens = sum(len(response.ids) for response in responses)
    counts = all_sum({"positive_tokens": positive_tokens, "all_tokens": all_tokens})
    chosen = responses_to_show(responses, generator(seed, "responses", step, rank()))
    idle = all_max(len(chosen)) - len(chosen)  # forwards that other ranks do more than this one
    shown = []
    for response in chosen:
        places = window(response)
        ids = torch.tensor(response.prompt_ids + response.ids[: places.stop])
        shown.append(describe(response, places, likeliest(ids, len(places)), decode))
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
    responses: list[DumpedResponse],
    tau_p: float,
    decode: Callable[[list[int]], str],
    draw: torch.Generator,
) -> list[dict[str, Any]]:
    """This rank's share of the sampled tokens: low-probability ones (p < tau_p), then others.

    Each kind has half of the room; `weight` is how many tokens of its kind a token stands for.
    """
    low = torch.cat([torch.zeros(0), *(response.p for response in responses)]) < tau_p  # (N,)
    lengths = torch.tensor([len(response.ids) for response in responses], dtype=torch.long)
    ends = lengths.cumsum(0)
    tokens = []
    for kind in (True, False):
        members = (low == kind).nonzero().flatten()
        shuffled = members[torch.randperm(len(members), generator=draw)]
        chosen = shuffled[: TOKENS // 2 // world_size()]
        owners = torch.searchsorted(ends, chosen, right=True)
        places = chosen - (ends - lengths)[owners]  # within the owner
        for owner, t in zip(owners.tolist(), places.tolist()):
            response = responses[owner]
            token = {"token": decode([response.ids[t]]), "p": float(response.p[t])}
            token["entropy"] = float(response.entropy[t])
            token["collision"] = float(response.collision[t])
            token["advantage"] = response.advantage
            token["silenced"] = bool(response.silenced[t])
            token["tau_h"] = finite(response.tau_h)
            token["weight"] = len(members) / len(chosen)
            tokens.append(token)
    return tokens


# ------------------------------------------------------------------- responses, token by token


def responses_to_show(
    responses: list[DumpedResponse], draw: torch.Generator
) -> list[DumpedResponse]:
    """This rank's responses among those of all ranks that are shown.

    Responses with silenced tokens come first, and lots decide among equals.
    """
    lots = torch.rand(len(responses), generator=draw).tolist()
    mine = [
        (not bool(response.silenced.any()), lot, rank(), i)
        for i, (response, lot) in enumerate(zip(responses, lots))
        if response.ids
    ]
    of_ranks = all_list(mine)
    first = sorted(itertools.chain(*of_ranks))[:RESPONSES]
    return [responses[i] for _, _, owner, i in first if owner == rank()]


def window(response: DumpedResponse) -> range:
    """The places of a response that are shown: all of a short one's.

    A longer one is cut to WINDOW tokens with the first silenced one in the middle, or, where it
    has none, to its beginning.
    """
    silenced = response.silenced.nonzero().flatten().tolist()
    start = silenced[0] - WINDOW // 2 if silenced else 0
    start = max(0, min(start, len(response.ids) - WINDOW))
    return range(start, min(start + WINDOW, len(response.ids)))


def describe(
    response: DumpedResponse,
    places: range,
    likeliest: tuple[torch.Tensor, torch.Tensor],
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    """A response as JSON, its tokens in columns: an entry for each of the places shown.

    `likeliest`: the largest probabilities of each place and the ids that have them, (T, 5) both.
    """
    here = slice(places.start, places.stop)
    return {
        "problem": response.problem,
        "answer": response.answer,
        "advantage": response.advantage,
        "tau_h": finite(rounded(response.tau_h, 6)),
        "length": len(response.ids),
        "start": places.start,
        "token": [decode([i]) for i in response.ids[here]],
        "p": [rounded(p, 6) for p in response.p[here].tolist()],
        "entropy": [rounded(h, 6) for h in response.entropy[here].tolist()],
        "silenced": response.silenced[here].tolist(),
        "likeliest": [
            [[decode([i]), rounded(p, 4)] for p, i in zip(probabilities, ids)]
            for probabilities, ids in zip(*(column.tolist() for column in likeliest))
        ],
    }
