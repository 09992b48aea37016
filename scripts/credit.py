"""Measure what tokens are worth, by fresh continuations. Nothing is trained.

    python scripts/credit.py RUN                                      # a run, newest checkpoint
    python scripts/credit.py @tests/tiny/args --output runs/credit    # before any training

K continuations from before a token have the mean reward V. K continuations from behind it have the
mean reward Q. Q - V is the token's true advantage. Training gives the token A, the advantage of its
whole response. V and Q are 0 for the lowest reward that was seen and 1 for the highest: with the
rewards +1 and -1 they are shares of right answers. The tokens that are measured:

    silenced, kept    candidates (A > 0, p < tau_p) below tau_h of their mini-batch, and the others
    rare, wrong       tokens with p < tau_p of wrong answers (A < 0)
    likely, right     tokens with p >= tau_p, each from the response of a candidate
    likely, wrong     the same for the rare tokens of wrong answers
    placebo           another token with p < tau_p at the place of a candidate, drawn by the model's
                      probabilities, whatever becomes of the answer

It takes RUN and flags as tokens.py does. It writes into --output: table.md, credit.jsonl (a line
for each token), and tokens.html (the candidates of the lowest and the highest Q - V). If it is
stopped, the same command goes on.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import responses
import tokens
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stapo
from eval import markdown
from reward import extract_answer, load_reward
from rollout import Model, Policy, load_policy, pad_batch, response_stats, sample, stop_ids, to_text
from support import InputError, progress
from support.decoding import generator, mix_seed
from support.models import gathered, weights_of
from support.run import append_rows, flag, must_be_empty, read_lines, write_rows, write_whole

CANDIDATES = ("silenced", "kept")
RARE = (*CANDIDATES, "rare, wrong")
KINDS = (*RARE, "likely, right", "likely, wrong")
SHOWN = 20  # tokens of either end on the page
READ = """Q - V of tokens in right answers is too high: of equal tokens, one that helped is more
often in a right answer. The likely tokens of the same answers show by how much. The placebo is free
of this. Q - V cannot be below -V. Its mean over all tokens that the model can draw is 0. So where
rare tokens hold much of the probability ("rare p"), their mean cannot be far from 0.
± is one standard error, clustered by problem."""


@dataclass(frozen=True)
class Config(stapo.Config):
    """The flags of stapo.py and more."""

    tokens: int = flag(100, "most silenced tokens, and most kept candidates")
    controls: int = flag(100, "most tokens of each other kind")
    continuations: int = flag(16, "continuations from before and from behind a token (K)")
    batches: int = flag(16, "most batches of responses that are searched for tokens")
    answered: str = flag(
        "",
        "FILE.py:FUNCTION(text, row): whether the text so far has an answer. It splits tokens into "
        "before and behind the answer (empty: whether it has a box; with --reward: no split)",
    )


# -------------------------------------------------------------------------------------- the tokens


def choose_tokens(policy: Policy, task: stapo.Task, first: int, cfg: Config) -> list[dict]:
    """Sample batches, that of step `first` and later ones, until they have enough tokens.

    Returns a row for each token that is to be measured.
    """
    pairs: dict[str, list[tuple[dict, dict]]] = {kind: [] for kind in RARE}
    most = dict(zip(RARE, (cfg.tokens, cfg.tokens, cfg.controls)))
    for step in range(first, first + cfg.batches):
        wrong_too = len(pairs["rare, wrong"]) < cfg.controls
        for rare, likely in tokens_of_batch(policy, task, step, wrong_too, cfg):
            pairs[rare["kind"]].append((rare, likely))
        counts = {kind: len(each) for kind, each in pairs.items()}
        progress.log(f"the batch of step {step}: {counts}")
        if all(counts[kind] >= most[kind] for kind in RARE):
            break

    def draw(each: list, count: int) -> list:
        order = torch.randperm(len(each), generator=generator(cfg.seed, "draw"))
        return [each[i] for i in order[:count].tolist()]

    drawn = {kind: draw(pairs[kind], most[kind]) for kind in RARE}
    likely = draw(drawn["silenced"] + drawn["kept"], cfg.controls) + drawn["rare, wrong"]
    rows = [rare for kind in RARE for rare, _ in drawn[kind]] + [each for _, each in likely]
    answered = load_answered(cfg)
    with gathered(policy) as model:
        for row in progress.track(rows, "places"):
            add_place(row, model, task, answered, cfg)
    return rows


def tokens_of_batch(
    policy: Policy, task: stapo.Task, step: int, wrong_too: bool, cfg: Config
) -> list[tuple[dict, dict]]:
    """Return the rare tokens of a batch, each with a likely token of the same response.

    wrong_too: also those of wrong answers, of as many as there are right answers.
    """
    sampled, _, samples = stapo.sample_and_reward(policy, task, step, cfg)
    A = torch.tensor([sample["advantage"] for sample in samples])
    random = generator(cfg.seed, step, "credit")
    right, wrong = (A > 0).nonzero()[:, 0], (A < 0).nonzero()[:, 0]
    wrong = wrong[torch.randperm(len(wrong), generator=random)[: wrong_too * len(right)]]
    if len(right) == 0:
        return []
    numbers = torch.cat([right, wrong]).sort().values  # (N,) of the batch's responses
    A, chosen = A[numbers], [sampled[i] for i in numbers.tolist()]
    ids, mask, lengths = pad_batch(chosen)  # (N, L), (N, L), (N,)
    logp, entropy = response_stats(policy, ids, mask, lengths, cfg.tokens_per_micro_batch)
    silenced, rank = torch.zeros_like(mask), torch.zeros_like(entropy)
    tau_h = torch.zeros_like(A)
    mini_batches = numbers // (cfg.mini_batch_size * cfg.group_size)
    for part in [mini_batches == i for i in mini_batches.unique()]:
        silenced[part], candidates, tau_h[part] = stapo.spurious_mask(
            logp[part], A[part], entropy[part], mask[part], tau_p=cfg.tau_p, q=cfg.q
        )
        ordered = entropy[part][candidates].sort().values
        below = torch.searchsorted(ordered, entropy[part].contiguous())
        rank[part] = below / max(1, len(ordered) - 1) if len(ordered) > 1 else 1.0
    p = logp.exp()
    order = stapo.batch_indices(step, len(task.problems), cfg.batch_size, cfg.seed)

    def row(i: int, at: int, kind: str) -> dict:
        start, number = len(chosen[i].prompt_ids), int(numbers[i])
        return {
            "kind": kind,
            "problem": order[number // cfg.group_size],  # its number in the data, from 0
            "response": f"{step}-{number}",
            "t": at - start,
            "p": float(p[i, at]),
            "H": float(entropy[i, at]),
            "A": float(A[i]),
            "rank": float(rank[i, at]),  # S2T with any q silences candidates of rank < q
            "tau_h": float(tau_h[i]),
            "start": start,  # of the response in ids
            "ids": chosen[i].prompt_ids + chosen[i].ids,
        }

    pairs = []
    for i, at in (mask & (p < cfg.tau_p)).nonzero().tolist():
        likely = (mask[i] & (p[i] >= cfg.tau_p)).nonzero()[:, 0]
        if len(likely) == 0:
            continue
        near = int(likely[torch.randint(len(likely), (), generator=random)])
        kind = "wrong" if A[i] < 0 else "right"
        rare = "rare, wrong" if A[i] < 0 else "silenced" if silenced[i, at] else "kept"
        pairs.append((row(i, at, rare), row(i, near, f"likely, {kind}")))
    return pairs


@torch.no_grad()
def add_place(row: dict, model: Model, task: stapo.Task, answered: Callable, cfg: Config) -> None:
    """Add to a token's row its text, what else the model would have drawn, and a placebo."""
    at, tokenizer = row["start"] + row["t"], task.tokenizer
    before = torch.tensor([row["ids"][:at]], device=model.device)
    hidden = model.base_model(before, use_cache=False).last_hidden_state[0, -1:]
    pi = model.get_output_embeddings()(hidden)[0].double().softmax(-1).cpu()  # (V,)
    rare = pi * (pi < cfg.tau_p)
    row["rare_p"] = float(rare.sum())
    row["token"] = tokens.token_text(tokenizer, row["ids"][at])
    row["context"] = to_text(tokenizer, row["ids"][row["start"] : at], skip_special=True)
    row["answered"] = answered(row["context"], task.problems[row["problem"]])
    if row["kind"] in CANDIDATES:
        random = generator(cfg.seed, row["response"], row["t"])
        row["placebo_id"] = int(torch.multinomial(rare, 1, generator=random))
        row["placebo_token"] = tokens.token_text(tokenizer, row["placebo_id"])


def load_answered(cfg: Config) -> Callable[[str, dict], bool | float | None]:
    """Return the function that says of a text and its problem whether it has an answer."""
    if not cfg.reward:
        return lambda text, problem: extract_answer(text) is not None
    return load_reward(cfg.answered) if cfg.answered else lambda text, problem: None


# ------------------------------------------------------------------------------------------ V and Q


def measure(policy: Policy, task: stapo.Task, rows: list[dict], cfg: Config, file: Path) -> None:
    """Append a line with the rewards of its continuations for each token that has none yet."""
    done = {line["number"] for line in read_lines(file)}
    with file.open("a") as lines:
        lines.write("\n")  # ends a line that a crash tore
    left = [number for number in range(len(rows)) if number not in done]
    left.sort(key=lambda number: rows[number]["t"])  # in a chunk, equally many tokens are left
    size = max(1, 2 * cfg.rollout_batch_size // cfg.continuations)
    chunks = [left[i : i + size] for i in range(0, len(left), size)]
    with gathered(policy) as model:
        for numbers in progress.track(chunks, "continuations"):
            found: dict[int, dict] = {number: {"number": number} for number in numbers}
            for name in ("V", "Q", "placebo"):
                prefixes = {i: prefix(rows[i], name) for i in numbers}
                prefixes = {i: ids for i, ids in prefixes.items() if ids}
                rewards = continue_all(model, task, rows, prefixes, name, cfg)
                for i in prefixes:
                    found[i][name] = rewards[i]
            append_rows(file, list(found.values()))


def prefix(row: dict, name: str) -> list[int] | None:
    """Return the ids that are continued for V, for Q, or for a placebo (None without one)."""
    before, token = row["ids"][: row["start"] + row["t"]], row["ids"][row["start"] + row["t"]]
    if name == "placebo":
        return [*before, row["placebo_id"]] if "placebo_id" in row else None
    return before if name == "V" else [*before, token]


def continue_all(
    model: Model,
    task: stapo.Task,
    rows: list[dict],
    prefixes: dict[int, list[int]],
    name: str,
    cfg: Config,
) -> dict[int, list[float]]:
    """Return the rewards of K continuations of each prefix, {number of a row: ids}.

    A continuation ends where its response would have been cut. A prefix that has ended already, by
    a stop id or by its length, has one reward: its own.
    """
    stops = set(stop_ids(model, task.tokenizer))
    ends = {i: rows[i]["start"] + cfg.max_new_tokens for i in prefixes}  # where responses are cut
    whole: dict[int, list[list[int]]] = {i: [] for i in prefixes}
    waiting = []
    for i, ids in prefixes.items():
        if len(ids) == ends[i] or (len(ids) > rows[i]["start"] and ids[-1] in stops):
            whole[i] = [ids]
        else:
            waiting += [(i, k) for k in range(cfg.continuations)]
    sampled = sample(
        model,
        task.tokenizer,
        [prefixes[i] for i, _ in waiting],
        max_new_tokens=max((ends[i] - len(prefixes[i]) for i, _ in waiting), default=1),
        batch_size=cfg.rollout_batch_size,
        seed=[mix_seed(cfg.seed, name, rows[i]["response"], rows[i]["t"], k) for i, k in waiting],
    )
    for index, response in sampled:
        i = waiting[index][0]
        whole[i].append((prefixes[i] + response.ids)[: ends[i]])
    rewards = {}
    for i, each in whole.items():
        texts = [to_text(task.tokenizer, ids[rows[i]["start"] :], skip_special=True) for ids in each]
        rewards[i] = [task.reward(text, task.problems[rows[i]["problem"]]) for text in texts]
    return rewards


# ---------------------------------------------------------------------------------------- the table


def add_values(rows: list[dict], lines: Iterable[dict]) -> str:
    """Add V, Q and placebo to the rows of the tokens. Returns their unit in words."""
    lines = list(lines)
    rewards = [reward for line in lines for name in ("V", "Q") for reward in line[name]]
    low, high = min(rewards), max(rewards)
    for line in lines:
        for name in line.keys() & {"V", "Q", "placebo"}:
            rows[line["number"]][name] = (fmean(line[name]) - low) / (high - low or 1)
    return f"V and Q are 0 for a reward of {low:g} and 1 for a reward of {high:g}."


def estimate(
    rows: list[dict], minus: Sequence[dict] = (), name: str = "Q"
) -> tuple[float, float] | None:
    """Return the mean of Q - V, minus that of other rows, and its standard error.

    The error is clustered by problem, because tokens come in responses, and responses in groups.
    name: "Q", or "placebo". None without rows, or with a single problem.
    """
    mean, residuals = 0.0, defaultdict(float)
    for sign, part in ((1, rows), (-1, minus)):
        if not part:
            continue
        average = fmean(row[name] - row["V"] for row in part)
        mean += sign * average
        for row in part:
            residuals[row["problem"]] += sign * (row[name] - row["V"] - average) / len(part)
    count = len(residuals)
    if not rows or count < 2:
        return None
    return mean, (count / (count - 1) * sum(x * x for x in residuals.values())) ** 0.5


def table(rows: list[dict]) -> str:
    """Return Q - V by the kind of token and by its place, as a Markdown table."""
    candidates = [row for row in rows if row["kind"] in CANDIDATES]
    middle = median(row["H"] for row in candidates) if candidates else 0.0
    low = [row for row in candidates if row["H"] < middle]
    high = [row for row in candidates if row["H"] >= middle]
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    groups = {kind: (kinds[kind], [], "Q") for kind in CANDIDATES}
    groups |= {"candidates, low H": (low, [], "Q"), "candidates, high H": (high, [], "Q")}
    groups |= {"high H minus low H": (high, low, "Q")}
    groups |= {kind: (kinds[kind], [], "Q") for kind in KINDS[2:]}
    groups |= {"placebo, low H": (low, [], "placebo"), "placebo, high H": (high, [], "placebo")}
    splits = {
        "Q - V": lambda row: True,
        "first two tokens": lambda row: row["t"] < 2,
        "later": lambda row: row["t"] >= 2,
        "before the answer": lambda row: row["answered"] is not None and not row["answered"],
        "behind the answer": lambda row: bool(row["answered"]),
    }
    shown = [["tokens", "n", "A", "rare p", "V", *splits]]
    for title, (own, minus, name) in groups.items():
        means = [fmean(row[key] for row in own) for key in ("A", "rare_p", "V")] if own else []
        cells = [title, str(len(own)), *(f"{mean:.3g}" for mean in means or [math.nan] * 3)]
        for here in splits.values():
            both = [list(filter(here, own)), list(filter(here, minus))]
            found = estimate(*both, name) if all(both[: 1 + bool(minus)]) else None
            cells.append("-" if found is None else "{:+.3f} ± {:.3f}".format(*found))
        shown.append(cells)
    return markdown(shown)


# ----------------------------------------------------------------------------------------- the page


def shown_response(row: dict, policy: Policy, task: stapo.Task, cfg: Config) -> dict:
    """Return the response of a token for responses.page, with the token's V and Q."""
    ids = torch.tensor(row["ids"])
    mask = torch.arange(len(ids)) >= row["start"]
    stats = response_stats(policy, ids[None], mask[None], torch.tensor([len(ids)]), len(ids))
    count = int(mask.sum())
    with gathered(policy) as model:
        _, likeliest_p, likeliest_id = tokens.next_words(model, ids, count)
    p, entropy = stats.logp[0][mask].exp(), stats.entropy[0][mask]
    here = torch.arange(count) == row["t"]
    threshold = torch.full((count,), row["tau_h"])
    columns = {
        "row": torch.zeros(count),
        "id": ids[mask],
        "p": p,
        "entropy": entropy,
        "threshold": threshold,
        "low_p": p < cfg.tau_p,
        "low_h": entropy < threshold,
        "silenced": here,
        "likeliest_p": likeliest_p,
        "likeliest_id": likeliest_id,
    }
    problem = task.problems[row["problem"]]
    known = {"problem": problem["problem"], "gold": problem["answer"], "advantage": row["A"]}
    worth = f"{row['kind']}: {row['token']!r}, token {row['t'] + 1}, V = {row['V']:.2f}, "
    known["note"] = f"{worth} Q = {row['Q']:.2f}, Q - V = {row['Q'] - row['V']:+.2f}"
    return tokens.describe(columns, 0, known, task)


def run(cfg: Config) -> None:
    """Choose tokens, continue, print and write. Raises InputError."""
    out = Path(cfg.output)
    task, policy = stapo.load_task(cfg), load_policy(cfg.model)
    made_from = asdict(cfg) | {"model": weights_of(cfg.model), "data": task.data_fingerprint}
    for name in ("output", "threads"):  # they change nothing
        del made_from[name]
    file, chosen = out / "flags.json", out / "tokens.jsonl"
    if not file.exists():
        must_be_empty(out, "name")
        out.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(made_from, indent=2) + "\n")
    stored = json.loads(file.read_text("utf-8"))
    for name, value in made_from.items():
        if stored[name] != value:
            raise InputError(f"--{name}: {out} was made with another one; name another --output")
    if not chosen.exists():
        write_rows(chosen, choose_tokens(policy, task, tokens.next_step(cfg.model), cfg))
    rows = list(read_lines(chosen))
    measure(policy, task, rows, cfg, out / "rewards.jsonl")
    unit = add_values(rows, read_lines(out / "rewards.jsonl"))
    text = f"### {cfg.model}\n\n{table(rows)}\n{unit}\n{READ}\n"
    write_whole(out / "table.md", text)
    write_rows(out / "credit.jsonl", [{k: v for k, v in row.items() if k != "ids"} for row in rows])
    candidates = [row for row in rows if row["kind"] in CANDIDATES]
    candidates.sort(key=lambda row: row["Q"] - row["V"])
    ends = candidates[:SHOWN] + candidates[SHOWN:][-SHOWN:]
    shown = [shown_response(row, policy, task, cfg) for row in ends]
    title = f"{cfg.model}: what tokens are worth"
    write_whole(out / "tokens.html", responses.page(title, READ, shown, cfg.tau_p))
    progress.say(f"\n{text}\nresults in {out}")


def main(argv: list[str] | None = None) -> None:
    tokens.main(argv, __doc__, Config, "credit", run)


if __name__ == "__main__":
    main()
