"""Measure what tokens are worth, by fresh continuations. Nothing is trained.

    python scripts/credit.py RUN                                      # a run, newest checkpoint
    python scripts/credit.py @tests/tiny/args --output runs/credit    # before any training

K continuations from before a token have the mean reward V. K continuations from after it have the
mean reward Q. Q - V is the token's true advantage. Training gives the token A, the advantage of its
whole response. With the rewards +1 and -1, Q - V = 0.1 is 5 points of accuracy. These tokens are
measured:

    rare, as drawn    tokens with p < tau_p of all responses, whatever became of the answer. Low and
                      high H are below tau_h of their mini-batch, and the others
    likely, as drawn  tokens with p >= tau_p of all responses
    silenced, kept    candidates (A > 0, p < tau_p) of low H, and of high H; with --q 0.5, halves
    rare, wrong       tokens with p < tau_p of wrong answers (A < 0)
    likely, right     tokens with p >= tau_p, each from the response of a candidate
    likely, wrong     the same for the rare tokens of wrong answers
    placebo           a token with p < tau_p that is drawn anew at the place of a candidate, by the
                      model's probabilities, whatever becomes of the answer

It takes RUN and flags as tokens.py does. It writes into --output: table.md, credit.jsonl (a line
for each token), and tokens.html (the candidates of the lowest and the highest Q - V). If it is
stopped while it continues responses, the same command goes on.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any, NamedTuple

import responses
import tokens
import torch
from torch import Tensor
from torch.nn.functional import pad

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stapo
from eval import markdown
from reward import extract_answer, load_reward
from rollout import Model, Policy, load_policy, sample, stop_ids, to_text
from support import InputError, progress
from support.decoding import generator, mix_seed
from support.models import gathered, weights_of
from support.run import (
    append_rows,
    fingerprint,
    flag,
    must_be_empty,
    read_lines,
    write_rows,
    write_whole,
)

CANDIDATES = ("silenced", "kept")
KINDS = ("rare, as drawn", "likely, as drawn", *CANDIDATES, "rare, wrong")
KINDS += ("likely, right", "likely, wrong")
PLACES: dict[str, Callable[[dict], bool]] = {
    "first token": lambda row: row["t"] == 0,
    "second token": lambda row: row["t"] == 1,
    "later": lambda row: row["t"] >= 2,
    "before the answer": lambda row: row.get("answered") is False,
    "after the answer": lambda row: row.get("answered") is True,
}
SHOWN = 20  # tokens of either end on the page
NOTES = (
    "A is what training gives a token. Q - V is what it was worth, in units of the reward: with +1 "
    "and -1, 0.1 is 5 points of accuracy. ± is one standard error, clustered by problem. held: the "
    "number in the batches, of which n were measured. minus likely: Q - V minus that of likely "
    "tokens (as drawn, of right, or of wrong answers). spread: the standard deviation of the true "
    "Q - V between tokens, without the noise of sampling.\n"
    "Tokens as drawn are not selected by the outcome. In right answers Q - V is too high, by "
    "selection: of two equal tokens, the one that was followed by a right answer is there. In "
    "wrong answers Q - V is too low. A candidate minus its placebo shows by how much. The placebo "
    "is free of this, but its place still is one of a right answer.\n"
    "The mean of Q - V over all tokens that the model can draw at a place is 0. So where rare "
    'tokens hold much of the probability ("rare p"), their mean may be near 0 for this reason. Q '
    "cannot be below the lowest reward."
)
# Flags that decide which tokens are drawn, and their continuations.
IDENTITY = (
    "instruction chat_template reward answered tau_p q quantile_over group_size batch_size seed "
    "mini_batch_size max_prompt_tokens max_new_tokens drawn tokens controls continuations batches"
).split()


@dataclass(frozen=True)
class Config(stapo.Config):
    """The flags of stapo.py and more."""

    drawn: int = flag(100, "most rare tokens as drawn, and most likely ones as drawn")
    tokens: int = flag(100, "most silenced tokens, and most kept candidates")
    controls: int = flag(100, "most tokens of each other kind")
    continuations: int = flag(16, "continuations from before and from after a token (K)")
    batches: int = flag(16, "most batches of responses that are searched for tokens")
    answered: str = flag(
        "",
        "FILE.py:FUNCTION(text, row): whether the text so far has an answer. It splits tokens into "
        "before and after the answer. Only with --reward; without, a box is an answer",
    )


# -------------------------------------------------------------------------------------- the tokens


class Token(NamedTuple):
    """A token of a batch."""

    kind: str
    held: int  # tokens of this kind in all batches
    step: int  # of the batch
    batch: stapo.Batch
    tau_h: Tensor  # (B,): of the mini-batch of each row
    row: int  # of the batch
    column: int


def choose_tokens(policy: Policy, task: stapo.Task, first: int, cfg: Config) -> list[dict]:
    """Collect batches, that of step `first` and later ones, until they have enough tokens.

    Returns a row for each token that is to be measured.
    """
    answered = load_answered(cfg)
    most = dict(zip(KINDS, (cfg.drawn, cfg.drawn, cfg.tokens, cfg.tokens, cfg.controls)))
    batches = []
    found: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}  # (N, 3): batch, row, column
    held = dict.fromkeys(KINDS, 0)
    for step in range(first, first + cfg.batches):
        batch, _ = stapo.collect(policy, None, task, step, cfg)
        silenced, tau_h = tokens.silence(batch, cfg)  # (B, L), (B,)
        rare = batch.mask & (batch.old.logp.exp() < cfg.tau_p)
        likely = batch.mask & ~rare
        right, wrong = batch.advantages[:, None] > 0, batch.advantages[:, None] < 0  # (B, 1)
        masks = (rare, likely, silenced, rare & right & ~silenced)
        masks += (rare & wrong, likely & right, likely & wrong)
        for kind, mask in zip(KINDS, masks, strict=True):
            found[kind].append(pad(mask.nonzero(), (1, 0), value=len(batches)))
            held[kind] += len(found[kind][-1])
        batches.append((step, batch, tau_h))
        progress.log(f"the batch of step {step}: {held}")
        if all(held[kind] >= count for kind, count in most.items()):
            break

    if not held["rare, as drawn"]:
        raise InputError(
            f"--batches {cfg.batches}: no rare token in them; give more, or larger ones"
        )

    def draw(size: int, count: int) -> list[int]:
        return torch.randperm(size, generator=generator(cfg.seed, "draw"))[:count].tolist()

    drawn: dict[str, list[Token]] = {}
    for kind, count in most.items():
        places = torch.cat(found[kind])[draw(held[kind], count)].tolist()
        drawn[kind] = [Token(kind, held[kind], *batches[b], i, at) for b, i, at in places]
    candidates = drawn["silenced"] + drawn["kept"]
    near_candidates = [candidates[i] for i in draw(len(candidates), cfg.controls)]
    chosen = sum(drawn.values(), [])
    chosen += likely_tokens(near_candidates, "likely, right", held, cfg)
    chosen += likely_tokens(drawn["rare, wrong"], "likely, wrong", held, cfg)
    with gathered(policy) as model:
        return [describe(x, model, task, answered, cfg) for x in progress.track(chosen, "places")]


def likely_tokens(rare: list[Token], kind: str, held: dict, cfg: Config) -> list[Token]:
    """Draw a likely token from the response of each rare token, if it has any."""
    found = []
    for token in rare:
        p = token.batch.old.logp[token.row].exp()
        likely = token.batch.mask[token.row] & (p >= cfg.tau_p)
        random = generator(cfg.seed, kind, token.step, token.row, token.column)
        if likely.any():
            column = int(torch.multinomial(likely.float(), 1, generator=random))
            found.append(token._replace(kind=kind, held=held[kind], column=column))
    return found


@torch.no_grad()
def describe(
    token: Token, model: Model, task: stapo.Task, answered: Callable, cfg: Config
) -> dict[str, Any]:
    """Return a token's row: what is known of it before it is measured, and a placebo."""
    kind, held, step, batch, tau_h, i, at = token
    order = stapo.batch_indices(step, len(task.problems), cfg.batch_size, cfg.seed)
    problem = order[i // cfg.group_size]
    start, ids = int(batch.mask[i].nonzero()[0]), batch.ids[i, : batch.lengths[i]]
    p, entropy = batch.old.logp[i, : len(ids)].exp(), batch.old.entropy[i, : len(ids)]
    hidden = model.base_model(ids[None, :at].to(model.device), use_cache=False).last_hidden_state
    pi = model.get_output_embeddings()(hidden[0, -1:])[0].double().softmax(-1).cpu()  # (V,)
    rare_pi = pi * (pi < cfg.tau_p)
    context = to_text(task.tokenizer, ids[start:at].tolist(), skip_special=True)
    row = {
        "kind": kind,
        "held": held,
        "problem": problem,  # its number among the problems, from 0
        "response": f"{step}-{i}",
        "t": at - start,
        "token": tokens.token_text(task.tokenizer, int(ids[at])),
        "context": context,
        "answered": answered(context, task.problems[problem]),
        "p": float(p[at]),
        "H": float(entropy[at]),
        "low_h": bool(entropy[at] < tau_h[i]),
        "A": float(batch.advantages[i]),
        "rare_p": float(rare_pi.sum()),
        "start": start,  # of the response in ids
        "ids": ids.tolist(),
    }
    if kind in CANDIDATES:
        likeliest = pi.topk(5)
        random = generator(cfg.seed, row["response"], row["t"])
        row |= {
            "placebo_id": int(torch.multinomial(rare_pi, 1, generator=random)),
            "rank": rank_of(token, cfg),
            "tau_h": float(tau_h[i]),
            "likeliest": list(zip(likeliest.indices.tolist(), likeliest.values.tolist())),
            "all_p": p.tolist(),  # of each of ids
            "all_H": entropy.tolist(),
        }
    return row


def rank_of(token: Token, cfg: Config) -> float:
    """Return the rank of a candidate's H in its mini-batch, 0 to 1. S2T silences ranks below q."""
    size = cfg.mini_batch_size * cfg.group_size
    first = token.row // size * size
    part = token.batch.take(slice(first, first + size))
    rare = part.mask & (part.old.logp.exp() < cfg.tau_p)
    candidates = part.old.entropy[rare & (part.advantages > 0)[:, None]]  # (N,)
    below = int((candidates <= token.batch.old.entropy[token.row, token.column]).sum()) - 1
    return below / (len(candidates) - 1) if len(candidates) > 1 else 1.0


def load_answered(cfg: Config) -> Callable[[str, dict], bool | None]:
    """Return the function that says of a text and its problem whether it has an answer."""
    if cfg.answered and not cfg.reward:
        raise InputError(f"--answered {cfg.answered}: give it with --reward only")
    if not cfg.reward:
        return lambda text, problem: extract_answer(text) is not None
    if not cfg.answered:
        return lambda text, problem: None
    own = load_reward(cfg.answered)
    return lambda text, problem: bool(own(text, problem))


# ------------------------------------------------------------------------------------------ V and Q


def measure(policy: Policy, task: stapo.Task, rows: list[dict], cfg: Config, file: Path) -> None:
    """Append a line with the rewards of its continuations for each token that has none yet."""
    done = {line["number"] for line in read_lines(file)}
    with file.open("a") as lines:
        lines.write("\n")  # ends a line that a crash tore
    missing = [number for number in range(len(rows)) if number not in done]
    missing.sort(key=lambda number: rows[number]["t"])  # a chunk's continuations end together
    size = max(1, 2 * cfg.rollout_batch_size // cfg.continuations)
    with gathered(policy) as model:
        for start in progress.track(range(0, len(missing), size), "continuations"):
            found = {number: {"number": number} for number in missing[start : start + size]}
            for name in ("V", "Q", "placebo"):
                some = [i for i in found if name != "placebo" or "placebo_id" in rows[i]]
                rewards = continue_all(model, task, [rows[i] for i in some], name, cfg)
                for i, each in zip(some, rewards, strict=True):
                    found[i][name] = [int(x) if x == int(x) else x for x in each]
            append_rows(file, list(found.values()))


def continue_all(
    model: Model, task: stapo.Task, rows: list[dict], name: str, cfg: Config
) -> list[list[float]]:
    """Return the rewards of K continuations for each token.

    name: "V" for before the token, "Q" for after it, "placebo" for after its placebo. A
    continuation ends where its response would have been cut. Text that has ended already, by a stop
    id or by its length, has one reward: its own.
    """
    stops = set(stop_ids(model, task.tokenizer))
    texts: list[list[list[int]]] = []  # for each token the ids of texts
    waiting, seeds = [], []
    for i, row in enumerate(rows):
        at = row["start"] + row["t"]
        last = {"V": [], "Q": [row["ids"][at]], "placebo": [row.get("placebo_id")]}[name]
        ids, budget = row["ids"][:at] + last, cfg.max_new_tokens - row["t"] - len(last)
        ended = budget == 0 or (len(last) > 0 and last[0] in stops)
        texts.append([ids] if ended else [])
        for k in range(0 if ended else cfg.continuations):
            waiting.append((i, ids, budget))
            seeds.append(mix_seed(cfg.seed, name, row["response"], row["t"], k))
    sampled = sample(
        model,
        task.tokenizer,
        [ids for _, ids, _ in waiting],
        max_new_tokens=max((budget for _, _, budget in waiting), default=1),
        batch_size=cfg.rollout_batch_size,
        cuda_graphs=cfg.cuda_graphs,
        seed=seeds,
    )
    for number, response in sampled:
        i, ids, budget = waiting[number]
        texts[i].append(ids + response.ids[:budget])
    rewards = []
    for row, each in zip(rows, texts, strict=True):
        words = [to_text(task.tokenizer, ids[row["start"] :], skip_special=True) for ids in each]
        rewards.append([task.reward(text, task.problems[row["problem"]]) for text in words])
    return rewards


# ---------------------------------------------------------------------------------------- the table


def estimate(rows: list[dict], minus: list[dict] | None = None) -> tuple[float, float] | None:
    """Return the mean of Q - V, minus that of other rows, and its standard error.

    The error is clustered by problem, because tokens come in responses, and responses in groups.
    Returns None if rows are of fewer than two problems.
    """
    mean, residuals = 0.0, defaultdict(float)  # by the problem
    for sign, part in [(1, rows)] if minus is None else [(1, rows), (-1, minus)]:
        if len({row["problem"] for row in part}) < 2:
            return None
        average = fmean(row["Q"] - row["V"] for row in part)
        mean += sign * average
        for row in part:
            residuals[row["problem"]] += sign * (row["Q"] - row["V"] - average) / len(part)
    count = len(residuals)
    return mean, (count / (count - 1) * sum(x * x for x in residuals.values())) ** 0.5


def spread(rows: list[dict]) -> float:
    """Return the standard deviation of the true Q - V between tokens: without sampling's noise."""
    if min(len(rows), *(len(row["rewards"]["V"]) for row in rows)) < 2:
        return math.nan
    found = variance(row["Q"] - row["V"] for row in rows)
    for each in [row["rewards"][name] for row in rows for name in ("V", "Q")]:
        if len(each) > 1:  # a text that has ended has one reward, without noise
            found -= variance(each) / len(each) / len(rows)
    return max(0.0, found) ** 0.5


def placebos(rows: list[dict]) -> list[dict]:
    """Return candidates with their placebos' Q."""
    rewards = [row["rewards"] for row in rows]
    both = [{"rewards": x | {"Q": x["placebo"]}} for x in rewards]
    return [row | each | {"Q": row["placebo"]} for row, each in zip(rows, both)]


def mean_cell(rows: list[dict], minus: list[dict] | None) -> str:
    """Return the mean of Q - V, minus that of other rows, with its standard error."""
    found = estimate(rows, minus)
    return "{:+.3f} ± {:.3f}".format(*found) if found else "-"


def table(rows: list[dict], show: Callable = mean_cell, form: str = ".3f") -> list[list[str]]:
    """Return cells, the headings first: a row for each kind of tokens, and for their places.

    show: the function for means of Q - V. form: the format of the spread.
    """
    of = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    drawn, likely, silenced, kept, rare_wrong, right, wrong = of.values()
    low, high = ([row for row in drawn if row["low_h"] is said] for said in (True, False))
    groups = [  # of tokens, and the likely tokens that they are compared with
        ("rare, as drawn", drawn, likely),
        *with_parts("as drawn, low H", low, likely),
        *with_parts("as drawn, high H", high, likely),
        ("likely, as drawn", likely, None),
        *with_parts("silenced", silenced, right),
        ("kept", kept, right),
        ("placebo of silenced", placebos(silenced), right),
        ("placebo of kept", placebos(kept), right),
        ("likely, right", right, None),
        ("rare, wrong", rare_wrong, wrong),
        ("likely, wrong", wrong, None),
    ]
    cells = [["tokens", "n", "held", "A", "rare p", "V", "Q - V", "minus likely", "spread"]]
    for title, own, others in groups:
        if own:
            held = str(own[0]["held"]) if title in KINDS else ""
            means = [f"{fmean(row[key] for row in own):.3g}" for key in ("A", "rare_p", "V")]
            worth = [show(own, None), show(own, others) if others else ""]
            cells.append([title, str(len(own)), held, *means, *worth, f"{spread(own):{form}}"])
    for title, own, others in (
        ("as drawn, high minus low H", high, low),
        ("kept minus silenced", kept, silenced),
    ):
        cells.append([title, *[""] * 5, show(own, others), "", ""])
    return cells


def with_parts(title: str, rows: list[dict], likely: list[dict]) -> list[tuple]:
    """Return a group of tokens for table, and its parts by place."""
    parts = {name: list(filter(holds, rows)) for name, holds in PLACES.items()}
    return [(title, rows, likely), *((f"- {name}", part, likely) for name, part in parts.items())]


# ----------------------------------------------------------------------------------------- the page


def shown_response(row: dict, task: stapo.Task, cfg: Config) -> dict:
    """Return a token in its context for responses.page, with its V and Q.

    Only this token has the words that were likelier.
    """
    at = row["start"] + row["t"]
    first = max(row["start"], at - 500)
    ids, p, entropy = (row[name][first : at + 500] for name in ("ids", "all_p", "all_H"))
    likeliest: list[list] = [[] for _ in ids]
    likeliest[at - first] = [(tokens.token_text(task.tokenizer, i), x) for i, x in row["likeliest"]]
    low_p, low_h = [x < cfg.tau_p for x in p], [x < row["tau_h"] for x in entropy]
    problem = task.problems[row["problem"]]
    note = f"token {row['t'] + 1}, {row['token']!r} ({row['kind']}): V = {row['V']:.2f}, "
    return {
        "problem": problem["problem"],
        "gold": problem["answer"],
        "advantage": row["A"],
        "note": f"{note}Q = {row['Q']:.2f}, Q - V = {row['Q'] - row['V']:+.2f}",
        "token": [tokens.token_text(task.tokenizer, i) for i in ids],
        "p": p,
        "entropy": entropy,
        "threshold": [row["tau_h"]] * len(ids),
        "low_p": low_p,
        "low_h": low_h,
        "silenced": [a and b for a, b in zip(low_p, low_h)],
        "marked": sum(a and b for a, b in zip(low_p, low_h)),
        "likeliest": likeliest,
        "measured": at - first,
        "start": first - row["start"],
        "length": len(row["ids"]) - row["start"],
    }


# ---------------------------------------------------------------------------------------------- run


def identity(cfg: Config, task: stapo.Task) -> dict[str, Any]:
    """Return all that decides the numbers: flags, and hashes of weights, problems and rewards."""
    known = {name: getattr(cfg, name) for name in IDENTITY}
    for name in ("reward", "answered"):
        file = Path(known[name].rpartition(":")[0])
        known[f"{name}_file"] = fingerprint(file.read_text("utf-8")) if known[name] else ""
    return known | {"model": weights_of(cfg.model), "data": task.data_fingerprint}


def check_folder(folder: Path, made_from: dict[str, Any]) -> None:
    """Raise InputError if a folder has tokens of something else, or files of another program."""
    file = folder / "flags.json"
    if not file.exists():
        return must_be_empty(folder, "name")
    stored = json.loads(file.read_text("utf-8"))
    for name, value in made_from.items():
        if stored.get(name) != value:
            what = f"{folder} holds tokens that were measured with another one"
            raise InputError(f"--{name}: {what}; name another --output")


def run(cfg: Config) -> None:
    """Choose tokens, measure them, print and write. Raises InputError."""
    out = Path(cfg.output)
    task, policy = stapo.load_task(cfg), load_policy(cfg.model)
    made_from = identity(cfg, task)
    check_folder(out, made_from)
    if not (out / "tokens.jsonl").exists():
        chosen = choose_tokens(policy, task, tokens.next_step(cfg.model), cfg)
        write_whole(out / "flags.json", json.dumps(made_from, indent=2) + "\n")
        write_rows(out / "tokens.jsonl", chosen)
    rows = list(read_lines(out / "tokens.jsonl"))
    measure(policy, task, rows, cfg, out / "rewards.jsonl")
    for line in read_lines(out / "rewards.jsonl"):
        rewards = {name: line[name] for name in ("V", "Q", "placebo") if name in line}
        rows[line["number"]] |= {name: fmean(x) for name, x in rewards.items()}
        rows[line["number"]]["rewards"] = rewards
    text = f"### {cfg.model}\n\n{markdown(table(rows))}\n{NOTES}\n"
    write_whole(out / "table.md", text)
    candidates = [row for row in rows if row["kind"] in CANDIDATES]
    candidates.sort(key=lambda row: row["Q"] - row["V"])
    ends = candidates[:SHOWN] + candidates[SHOWN:][-SHOWN:]
    shown = [shown_response(row, task, cfg) for row in ends]
    title = f"{cfg.model}: what tokens are worth"
    rule = f"The measured token has a frame. The lowest Q - V is first, the highest last.\n{NOTES}"
    write_whole(out / "tokens.html", responses.page(title, rule, shown, cfg.tau_p))
    whole = ("ids", "all_p", "all_H", "likeliest")  # tokens.jsonl has these
    lines = [{key: x for key, x in row.items() if key not in whole} for row in rows]
    write_rows(out / "credit.jsonl", lines)
    progress.say(f"\n{text}\nresults in {out}")


def main(argv: list[str] | None = None) -> None:
    tokens.main(argv, "credit", __doc__, Config, run)


if __name__ == "__main__":
    main()
