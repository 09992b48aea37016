"""Measure what tokens are worth, by fresh continuations. Nothing is trained.

    python scripts/credit.py RUN                                      # a run, newest checkpoint
    python scripts/credit.py @tests/tiny/args --output runs/credit    # before any training

K continuations from before a token have the mean reward V, and K from after it Q. Q - V is the
token's true advantage. Training gives the token A, the advantage of its whole response.

    rare, as drawn    tokens with p < tau_p of all responses, right or wrong, drawn evenly. Their H
                      is low (below tau_h of their mini-batch) or high
    likely, as drawn  tokens with p >= tau_p of all responses
    silenced, kept    candidates (A > 0, p < tau_p) of low H, and of high H; with --q 0.5, halves
    rare, wrong       tokens with p < tau_p of wrong answers (A < 0)
    likely, right     tokens with p >= tau_p, each from the response of a candidate
    likely, wrong     the same for the rare tokens of wrong answers
    placebo           a token with p < tau_p that is drawn anew at the place of a candidate, by the
                      model's probabilities, whatever becomes of the answer

It takes RUN and flags as tokens.py does. It writes table.md and credit.jsonl (each token, with the
text before it) into --output. A command that was stopped goes on with its continuations.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any, NamedTuple

import tokens
import torch
from torch import Tensor
from torch.nn.functional import pad

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stapo
from reward import extract_answer, load_reward, reward_all
from rollout import Model, Policy, load_policy, sample, stop_ids, to_text
from support import InputError, files, progress
from support.flags import flag
from support.models import gathered, weights_of
from support.seeds import generator, mix_seed

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
NOTES = """\
held: tokens in the batches; n of these were measured. A: what training gives a token. Q - V: what
it was worth, in units of the reward (with +1 and -1, 0.1 is 5 points of accuracy), ± one standard
error, clustered by problem. minus likely: Q - V minus that of likely tokens, as drawn, of right or
of wrong answers, at the same places. spread: the standard deviation of the true Q - V, without the
noise of sampling. A mini-batch without candidates has neither low nor high H.
Tokens as drawn are not selected by the outcome. In right answers Q - V is too high: of two equal
tokens, the one before a right answer is there. In wrong answers it is too low. Placebos are free of
this, but stand in right answers. The mean of Q - V over all tokens that can be drawn at a place is
0: where rare tokens hold much of the probability (rare p), their mean may be near 0.
"""
# Flags that change no token and no continuation. The model and the data have fingerprints.
OTHER_FLAGS = (
    "model data output resume method eps_low eps_high beta steps lr warmup_steps weight_decay "
    "grad_clip rollout_batch_size cuda_graphs tokens_per_micro_batch gradient_checkpointing "
    "threads save_every keep_last log_samples report_to eval_every eval_benchmarks eval_limit "
    "eval_samples"
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
        "FILE.py:FUNCTION(text, row): whether the text so far has an answer, to split tokens by "
        "it. Only with --reward; without, a box is an answer",
    )


# -------------------------------------------------------------------------------------- the tokens


class Token(NamedTuple):
    """A token of a mini-batch."""

    kind: str
    held: int  # tokens of this kind in all batches
    step: int  # of the batch
    first: int  # number of the mini-batch's first row in the batch
    part: stapo.Batch  # the mini-batch
    choice: stapo.Choice  # of S2T
    row: int  # of the mini-batch
    column: int


def choose_tokens(policy: Policy, task: stapo.Task, first: int, cfg: Config) -> list[dict]:
    """Collect batches from step `first` on until they have enough tokens. Return rows of these."""
    answered = load_answered(cfg)
    most = dict(zip(KINDS, (cfg.drawn, cfg.drawn, cfg.tokens, cfg.tokens, cfg.controls)))
    parts: list[tuple[int, int, stapo.Batch, stapo.Choice]] = []  # mini-batches
    found: dict[str, list[Tensor]] = {kind: [] for kind in most}  # (N, 3): part, row, column
    held = dict.fromkeys(KINDS, 0)
    for step in range(first, first + cfg.batches):
        batch, row = stapo.collect(policy, None, task, step, cfg)[0], 0
        for part in batch.mini_batches(cfg.batch_size // cfg.mini_batch_size):
            choice = stapo.silence_spurious(part, None, cfg)  # None: p, H under pi_old
            rare, A = part.old.logp.exp() < cfg.tau_p, part.advantages[:, None]
            masks = (rare, ~rare, choice.candidates & ~choice.keep, choice.candidates & choice.keep)
            masks += (rare & (A < 0), ~rare & (A > 0), ~rare & (A < 0))
            for kind, mask in zip(KINDS, masks, strict=True):
                held[kind] += int((part.mask & mask).sum())
                if kind in most:
                    places = (part.mask & mask).nonzero()
                    found[kind].append(pad(places, (1, 0), value=len(parts)))
            parts.append((step, row, part, choice))
            row += len(part.ids)
        progress.log(f"the batch of step {step}: {held}")
        if all(held[kind] >= count for kind, count in most.items()):
            break
    if not held["rare, as drawn"]:
        what = "no rare token in them; give more, or larger ones"
        raise InputError(f"--batches {cfg.batches}: {what}")

    def draw(size: int, count: int) -> list[int]:
        return torch.randperm(size, generator=generator(cfg.seed, "draw"))[:count].tolist()

    drawn: dict[str, list[Token]] = {}
    for kind, count in most.items():
        places = torch.cat(found[kind])[draw(held[kind], count)].tolist()
        drawn[kind] = [Token(kind, held[kind], *parts[k], i, at) for k, i, at in places]
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
        p = token.part.old.logp[token.row].exp()
        likely = token.part.mask[token.row] & (p >= cfg.tau_p)
        random = generator(cfg.seed, kind, token.step, token.first + token.row, token.column)
        if likely.any():
            column = int(torch.multinomial(likely.float(), 1, generator=random))
            found.append(token._replace(kind=kind, held=held[kind], column=column))
    return found


@torch.no_grad()
def describe(
    token: Token, model: Model, task: stapo.Task, answered: Callable, cfg: Config
) -> dict[str, Any]:
    """Return a token's row: what is known of it before it is measured, and a placebo."""
    kind, held, step, first, part, choice, i, at = token
    problem = int(part.problem_index[i])
    start, ids = int(part.mask[i].nonzero()[0]), part.ids[i, : part.lengths[i]]
    entropy = part.old.entropy[i, at]
    hidden = model.base_model(ids[None, :at].to(model.device), use_cache=False).last_hidden_state
    pi = model.get_output_embeddings()(hidden[0, -1:])[0].double().softmax(-1).cpu()  # (V,)
    rare_pi = pi * (pi < cfg.tau_p)
    context = to_text(task.tokenizer, ids[start:at].tolist(), skip_special=True)
    row = {
        "kind": kind,
        "held": held,
        "problem": problem,  # its number among the problems, from 0
        "response": f"{step}-{first + i}",
        "t": at - start,
        "token": tokens.token_text(task.tokenizer, int(ids[at])),
        "context": context,
        "answered": answered(context, task.problems[problem]),
        "p": float(part.old.logp[i, at].exp()),
        "H": float(entropy),
        "low_h": bool(entropy < choice.tau_h) if choice.candidates.any() else None,
        "A": float(part.advantages[i]),
        "rare_p": float(rare_pi.sum()),
        "start": start,  # of the response in ids
        "ids": ids.tolist(),
    }
    if kind in CANDIDATES:
        random = generator(cfg.seed, row["response"], row["t"])
        row["placebo_id"] = int(torch.multinomial(rare_pi, 1, generator=random))
        among = part.old.entropy[choice.candidates]  # (N,)
        # The rank of H among the candidates, 0 to 1. S2T silences ranks below q.
        below = int((among <= entropy).sum()) - 1
        row["rank"] = below / (len(among) - 1) if len(among) > 1 else 1.0
    return row


def load_answered(cfg: Config) -> Callable[[str, dict], bool | None]:
    """Return the function that says of a text and its problem whether it has an answer."""
    if cfg.answered:
        if not cfg.reward:
            raise InputError(f"--answered {cfg.answered}: give it with --reward only")
        own = load_reward(cfg.answered)
        return lambda text, problem: bool(own(text, problem))
    return lambda text, problem: None if cfg.reward else extract_answer(text) is not None


# ------------------------------------------------------------------------------------------ V and Q


def measure(policy: Policy, task: stapo.Task, rows: list[dict], cfg: Config, file: Path) -> None:
    """Append a line with the rewards of its continuations for each token that has none yet."""
    done = {line["number"] for line in files.read_jsonl(file)}
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
            files.append_jsonl(file, list(found.values()))


def continue_all(
    model: Model, task: stapo.Task, rows: list[dict], name: str, cfg: Config
) -> list[list[float]]:
    """Return the rewards of K continuations for each token.

    name: "V" for before the token, "Q" for after it, "placebo" for after its placebo. A
    continuation ends where its response would have been cut. Text that has ended already, by a stop
    id or by its length, has one reward: its own.
    """
    stops = set(stop_ids(model, task.tokenizer))
    texts: list[list[list[int]]] = [[] for _ in rows]  # for each token the ids of texts
    waiting, seeds = [], []
    for i, row in enumerate(rows):
        at = row["start"] + row["t"]
        last = {"V": [], "Q": [row["ids"][at]], "placebo": [row.get("placebo_id")]}[name]
        ids, budget = row["ids"][:at] + last, cfg.max_new_tokens - row["t"] - len(last)
        if budget == 0 or stops & {*last}:
            texts[i] = [ids]
            continue
        for k in range(cfg.continuations):
            waiting.append((i, ids, budget))
            seeds.append(mix_seed(cfg.seed, name, row["response"], row["t"], k))
    prompts = [ids for _, ids, _ in waiting]
    longest = max((budget for _, _, budget in waiting), default=1)
    how = {"batch_size": cfg.rollout_batch_size, "cuda_graphs": cfg.cuda_graphs, "seed": seeds}
    for number, response in sample(model, task.tokenizer, prompts, max_new_tokens=longest, **how):
        i, ids, budget = waiting[number]
        texts[i].append(ids + response.ids[:budget])
    flat = [(row, ids[row["start"] :]) for row, each in zip(rows, texts) for ids in each]
    words = [to_text(task.tokenizer, ids, skip_special=True) for _, ids in flat]
    infos = [{"tokens": len(ids), "truncated": ids[-1] not in stops} for _, ids in flat]
    problems = [task.problems[row["problem"]] for row, _ in flat]
    rewards = iter(reward_all(task.reward, words, problems, infos))
    return [[next(rewards) for _ in each] for each in texts]


# ---------------------------------------------------------------------------------------- the table


def estimate(rows: list[dict], minus: list[dict] | None = None) -> tuple[float, float] | None:
    """Return the mean of Q - V, minus that of other rows, and its error, clustered by problem."""
    mean, residuals = 0.0, defaultdict(float)  # by the problem
    for sign, part in [(1, rows)] if minus is None else [(1, rows), (-1, minus)]:
        if len({row["problem"] for row in part}) < 2:
            return None  # one problem has no error
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
    rewards = [row["rewards"] | {"Q": row["rewards"]["placebo"]} for row in rows]
    return [row | {"Q": row["placebo"], "rewards": x} for row, x in zip(rows, rewards)]


def mean_cell(rows: list[dict], minus: list[dict] | None = None) -> str:
    """Return the mean of Q - V, minus that of other rows, with its standard error."""
    found = estimate(rows, minus)
    return "{:+.3f} ± {:.3f}".format(*found) if found else "-"


def table(rows: list[dict], show: Callable = mean_cell, form: str = ".3f") -> list[list[str]]:
    """Return cells, the headings first: a row for each kind of tokens, and for their places.

    show: the function for means of Q - V. form: the format of the spread.
    """
    of = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    drawn, likely, silenced, kept, _, right, wrong = of.values()
    low, high = ([row for row in drawn if row["low_h"] is said] for said in (True, False))
    groups = {  # of tokens, and the likely tokens that they are compared with
        "rare, as drawn": (drawn, likely),
        "as drawn, low H": (low, likely),
        "as drawn, high H": (high, likely),
        "likely, as drawn": (likely, []),
        "silenced": (silenced, right),
        "kept": (kept, right),
        "placebo of silenced": (placebos(silenced), right),
        "placebo of kept": (placebos(kept), right),
        "likely, right": (right, []),
        "rare, wrong": (of["rare, wrong"], wrong),
        "likely, wrong": (wrong, []),
    }
    cells = [["tokens", "n", "held", "A", "rare p", "V", "Q - V", "minus likely", "spread"]]
    for title, pair in groups.items():
        split = PLACES if title in ("as drawn, low H", "as drawn, high H", *CANDIDATES) else {}
        for place, holds in {"": bool, **split}.items():
            part, others = (list(filter(holds, each)) for each in pair)
            if part:
                held = sum({row.get("seed"): row["held"] for row in part}.values())
                known = str(held or "") if title in KINDS and not place else ""
                means = [f"{fmean(row[key] for row in part):.3g}" for key in ("A", "rare_p", "V")]
                worth = [show(part, None), show(part, others) if pair[1] else ""]
                wide = f"{spread(part):{form}}".replace("nan", "-")
                name = f"{title}: {place}".removesuffix(": ")
                cells.append([name, str(len(part)), known, *means, *worth, wide])
    pairs = [("as drawn, high minus low H", high, low), ("kept minus silenced", kept, silenced)]
    return cells + [[title, *[""] * 5, show(a, b), "", ""] for title, a, b in pairs if a]


# ---------------------------------------------------------------------------------------------- run


def check_folder(folder: Path, task: stapo.Task, cfg: Config) -> str:
    """Return all that decides the numbers, as text, or raise InputError for files of others."""
    known = {name: value for name, value in asdict(cfg).items() if name not in OTHER_FLAGS}
    for name in ("reward", "answered"):
        file = Path(known[name].rpartition(":")[0])
        known[f"{name}_file"] = files.fingerprint(file.read_text("utf-8")) if known[name] else ""
    known |= {"model": weights_of(cfg.model), "data": task.data_fingerprint}
    if stored := files.read_flags(folder):
        before, now = ({f"--{name}": x for name, x in each.items()} for each in (stored, known))
        files.check_same(folder, before, now, "tokens that were measured")
    return json.dumps(known, indent=2)


def run(cfg: Config) -> None:
    """Choose tokens, measure them, print and write. Raises InputError."""
    out = Path(cfg.output)
    task, policy = stapo.load_task(cfg), load_policy(cfg.model)
    made_from = check_folder(out, task, cfg)
    if not (out / "tokens.jsonl").exists():
        chosen = choose_tokens(policy, task, tokens.next_step(cfg.model), cfg)
        files.write_whole(out / "flags.json", made_from)
        files.write_jsonl(out / "tokens.jsonl", chosen)
    rows = files.read_jsonl(out / "tokens.jsonl")
    measure(policy, task, rows, cfg, out / "rewards.jsonl")
    for line in files.read_jsonl(out / "rewards.jsonl"):
        rewards = {name: line[name] for name in ("V", "Q", "placebo") if name in line}
        rows[line["number"]] |= {name: fmean(x) for name, x in rewards.items()}
        rows[line["number"]]["rewards"] = rewards
    text = f"### {cfg.model}\n\n{files.markdown(table(rows))}\n{NOTES}"
    files.write_whole(out / "table.md", text)
    for row in rows:
        del row["ids"]  # tokens.jsonl has them
    files.write_jsonl(out / "credit.jsonl", rows)
    progress.say(f"\n{text}\nresults in {out}")


def main(argv: list[str] | None = None) -> None:
    tokens.main(argv, "credit", __doc__, Config, run)


if __name__ == "__main__":
    main()
