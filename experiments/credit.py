"""What tokens are worth: Q - V of rare tokens, on the tiny model and on SmolLM2-135M.

    python experiments/credit.py --model FOLDER --jobs 2        # runs and tables: four hours
    python experiments/credit.py --only tiny-drawn --jobs 2     # a part: a quarter of an hour
    python experiments/credit.py --table --figure docs/credit.png

credit-protocol.md says what is run, and which result would support or refute the paper's premise.
scripts/credit.py measures the tokens of a state, and makes the table of kinds. The code in
experiments/README.md makes FOLDER.
"""

import argparse
import shlex
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

import runs
from credit import KINDS, PLACES, estimate, placebos, table  # of scripts/
from runs import Lines, Part
from tqdm import tqdm

FEWEST = 40  # tokens of each seed, for an interval over the seeds
NEAR_0 = 5  # points
DRAWN = "as drawn: "  # how the rows of the second protocol begin
STEP = "{base}/checkpoints/step_00000"
# The tiny model: flags of scripts/credit.py, and what makes the models.
BEFORE = "--q 0.5 --continuations 24 --batches 200 --drawn 0 --tokens 300 --controls 150"
AFTER = BEFORE.replace("300", "60").replace("150", "30")
TINY = "--continuations 24 --batches 8 --batch_size 256 --tokens 0 --controls 0 --drawn"
NOISY = "@tests/tiny/args --model {base} --data {base}/train.jsonl"
SIGNS = "stapo.py @tests/tiny/args --save_every 4 --keep_last 7 --log_samples 0"
# SmolLM2
RECIPE = "@recipes/smollm2-135m-cpu --model {model}"
TRAINING = f"stapo.py {RECIPE} --eval_every 0 --log_samples 0"
BOTH = "--continuations 16 --batch_size 64 --answered scripts/rewards.py:has_answer --batches"
HALVES = "--q 0.5 --tokens 10000 --drawn 0 --controls"
ALL_DRAWN = f"{BOTH} 8 --tokens 0 --controls 0 --drawn"


class State(NamedTuple):
    """A model, and the flags with which scripts/credit.py measures its tokens."""

    row: str
    seed: int  # of the training, or before training of the sampling
    flags: str  # {base} stands for the folder of `base`
    base: str  # the program and flags that make the model


def list_states(part: str) -> list[State]:
    """The states of a part, in the order of the protocol."""
    found = []

    def add(row: str, seeds: Iterable[int], flags: str, base: str = "") -> None:
        for seed in seeds:
            ours = "" if "{base}/checkpoints" in flags else f" --seed {seed}"
            found.append(State(row, seed, flags + ours, base.replace("{seed}", str(seed))))

    if part == "tiny":
        add("tiny, before training", [400], f"@tests/tiny/args {BEFORE}")
        for noise in (1, 12):
            base = f"experiments/make_tiny.py --noise {noise / 100} --seed 0"
            add(f"tiny, {noise} % of noise, before training", [400], f"{NOISY} {BEFORE}", base)
        for step, method in [
            (step, method) for step in ("08", "28") for method in ("STAPO", "JustRL")
        ]:
            base = f"{SIGNS} --method {method.lower()} --seed {{seed}}"
            name = f"tiny, step {int(step)} of {method}"
            add(name, range(40, 45), f"{STEP[:-1]}{step} {AFTER}", base)
    if part == "tiny-drawn":
        add(f"{DRAWN}tiny, before training", [410], f"@tests/tiny/args {TINY} 300")
        base = "experiments/make_tiny.py --noise 0.01 --seed 0"
        name = f"{DRAWN}tiny, 1 % of noise, before training"
        add(name, [410], f"{NOISY} {TINY} 300", base)
        base = "stapo.py @tests/tiny/args --log_samples 0 --steps 8 --seed {seed}"
        add(f"{DRAWN}tiny, step 8 of STAPO", range(80, 85), f"{STEP}8 {TINY} 60", base)
    if part == "SmolLM2":
        add("SmolLM2, before training", [309], f"{RECIPE} {BOTH} 8 {HALVES} 60")
        base = f"{TRAINING} --steps 3 --method justrl --seed {{seed}}"
        add("SmolLM2, step 3 of JustRL", range(303, 309), f"{STEP}3 {BOTH} 4 {HALVES} 30", base)
    if part == "SmolLM2-drawn":
        add(f"{DRAWN}SmolLM2, before training", [319], f"{RECIPE} {ALL_DRAWN} 250")
        base = f"{TRAINING} --steps 8 --save_every 3 --keep_last 9 --seed {{seed}}"
        for step in (3, 8):
            name = f"{DRAWN}SmolLM2, step {step} of STAPO"
            add(name, range(310, 313), f"{STEP}{step} {ALL_DRAWN} 84", base)
    return found


def measure_all(states: list[State], args: argparse.Namespace) -> Lines:
    """Make the models, measure their tokens, --jobs at a time: a line for each state and seed."""

    def folder_of(base: str) -> Path:
        return runs.named(base, args.output)

    def make_base(base: str) -> None:
        if base:
            runs.make(base.replace("{model}", args.model), folder_of(base))

    def measure(state: State) -> dict:
        flags = state.flags.replace("{base}", shlex.quote(str(folder_of(state.base))))
        folder = runs.named(f"{state.row}-{state.seed}", args.output)
        words = shlex.split(f"{flags.replace('{model}', args.model)} {args.more}")
        if not folder.exists():
            runs.note_beginning(folder)
        runs.call(["scripts/credit.py", *words, "--output", folder])
        rows = [compact(row) for row in runs.read_rows(folder / "credit.jsonl")]
        line = {"row": state.row, "seed": state.seed, **runs.beginning(folder)}
        return line | {"flags": state.flags, "base": state.base, "tokens": rows}

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(make_base, dict.fromkeys(state.base for state in states)))
        return list(tqdm(pool.map(measure, states), total=len(states), unit="model"))


def compact(row: dict) -> dict:
    """A token without its context. V and Q are shares of right answers, K the numbers of them."""
    names = ["kind", "held", "problem", "response", "t", "token", "low_h", "answered", "rank"]
    found = {name: row[name] for name in names if name in row}
    found |= {name: row[name] for name in ("p", "H", "A", "rare_p")}
    found |= {name: (row[name] + 1) / 2 for name in row["rewards"]}
    short = {key: float(f"{x:.3g}") for key, x in found.items() if isinstance(x, float)}
    return found | short | {"K": [len(each) for each in row["rewards"].values()]}


def tokens_of(lines: Lines) -> Lines:
    """The tokens of the lines, with V, Q and rewards in points: 100 for a right answer.

    Older lines are a token each, without the number of its continuations.
    """
    found = []
    for line in lines:
        usual = 16 if "SmolLM2" in line["row"] else 24
        for token in line.get("tokens", [line]):
            row = {"row": line["row"], "seed": line["seed"], "held": ""} | token
            names = [name for name in ("V", "Q", "placebo") if name in token]
            counts = token.get("K", [usual] * len(names))
            rights = {name: round(token[name] * n) for name, n in zip(names, counts)}
            row["rewards"] = {
                name: [100.0] * rights[name] + [0.0] * (n - rights[name])
                for name, n in zip(names, counts)
            }
            row |= {name: 100 * token[name] for name in (*names, "rare_p")}
            found.append(row)
    return found


# ----------------------------------------------------------------------------------------- tables


Interval = tuple[float, float, float] | None  # mean, lower and upper end, in points
States = dict[str, Lines]  # the tokens of each state


def over_problems(rows: Lines, minus: Lines | None = None) -> Interval:
    """The mean of Q - V, minus that of other tokens, with its 95 % interval: by problem."""
    found = estimate(rows, minus)
    return found and (found[0], found[0] - 1.96 * found[1], found[0] + 1.96 * found[1])


def over_seeds(rows: Lines, minus: Lines | None = None) -> Interval:
    """The same, with Student's interval over the training seeds."""
    found = []
    for seed in {row["seed"] for row in rows}:
        own, others = ([x for x in part if x["seed"] == seed] for part in (rows, minus or []))
        found.append(estimate(own, others if minus is not None else None))
    if len(found) < 2 or None in found:
        return None
    means = [mean for mean, _ in found]
    half = runs.T_95[len(means)] * stdev(means) / len(means) ** 0.5
    return fmean(means), fmean(means) - half, fmean(means) + half


def ways(state: str, rows: Lines) -> list[tuple[str, Callable[..., Interval]]]:
    """A name for the row of a state, and how its intervals are made."""
    seeds = len({row["seed"] for row in rows})
    more = [(f"{state}, over {seeds} seeds", over_seeds)] if seeds > 1 else []
    return [(state, over_problems), *more]


def shown(found: Interval) -> str:
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*found) if found else "-"


def verdict(found: Interval, below: str, near: str, above: str) -> str:
    """The words of a rule of the protocol for an interval."""
    if found is None:
        return "-"
    _, low, high = found
    words = {below: high < 0, above: low > 0, near: -NEAR_0 <= low and high <= NEAR_0}
    return ", ".join(word for word, holds in words.items() if holds) or "not resolved"


def with_low(states: States, is_low: Callable[[dict], bool]) -> States:
    """The candidates' kinds anew: silenced are those that are low."""
    names = {True: "silenced", False: "kept"}
    return {
        state: [row | {"kind": names[is_low(row)]} if "rank" in row else row for row in rows]
        for state, rows in states.items()
    }


def pair_table(states: States, holds: Callable[[dict], bool] = bool, rules: bool = False) -> str:
    """Q - V of rare tokens of low and of high entropy, where holds(token), and differences."""
    heading = ["", "n", "V, %", "rare p, %", "low", "high", "high minus low", "low minus likely"]
    heading += ["rule 1: they are", "rule 2: H picks", "against likely"] if rules else []
    cells = []
    for state, rows in states.items():
        drawn = state.startswith(DRAWN)
        of = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
        whole = [of["silenced"], of["kept"]]
        if drawn:
            whole = [[x for x in of[KINDS[0]] if x["low_h"] is low] for low in (True, False)]
        low, high = (list(filter(holds, part)) for part in whole)
        likely = list(filter(holds, of["likely, as drawn" if drawn else "likely, right"]))
        v = fmean([x["V"] for x in (low if drawn else sum(whole, []))] or [0.0])
        decisive = [low] if drawn else [low, high, *whole]
        counts = 15 <= v <= 85 and min(map(len, decisive)) >= FEWEST
        for name, way in ways(state, rows):
            found = [way(low), way(high), way(high, low), way(low, likely)]
            cells.append([name, f"{len(low)} / {len(high)}"])
            for key in ("V", "rare_p"):
                means = [
                    f"{fmean(x[key] for x in part):.0f}" if part else "-" for part in (low, high)
                ]
                cells[-1].append(" / ".join(means))
            cells[-1] += map(shown, found)
            if rules:
                words = [
                    verdict(found[0], "harmful", "contribute nothing", "refuted"),
                    verdict(found[2], "the better half", "nothing", "the worse half"),
                    verdict(found[3], "worth less", "not distinguishable", "worth more")
                    if drawn
                    else "",
                ]
                cells[-1] += words if counts else [word and f"({word})" for word in words]
    return runs.markdown(heading, cells)


def kind_table(states: States) -> str:
    """The table of scripts/credit.py for each state."""
    cells = [[]]
    for state, rows in states.items():
        for name, way in ways(state, rows):
            heading, *its = table(rows, lambda *parts, way=way: shown(way(*parts)), ".1f")
            cells += [[f"{name}: {title}", *rest] for title, *rest in its]
    return runs.markdown(["", *heading[1:]], cells[1:])


def report(lines: Lines) -> str:
    """Q - V in points of accuracy, with 95 % intervals, by the rules of credit-protocol.md.

    Intervals are over problems (errors clustered by problem), or over training seeds (Student's) in
    rows that say so. low, high: rare tokens as drawn below tau_h (q = 0.75) and above it; else
    candidates below and above their model's median entropy. likely: as drawn; else of right
    answers. n: numbers of low and high. V: the share of right answers from before these tokens.
    rare p: the probability of all tokens with p < 0.002 at their places. spread: of the true Q - V
    between tokens. In brackets: the premise is absent, or there are fewer than 40 tokens. The first
    protocol decides over seeds if each has 40 tokens, the second over problems.
    """
    rows, tokens = dict.fromkeys(line["row"] for line in lines), tokens_of(lines)
    states = {name: [token for token in tokens if token["row"] == name] for name in rows}
    old = {name: own for name, own in states.items() if not name.startswith(DRAWN)}
    H: dict[tuple, list[float]] = {}
    for token in tokens:
        if "rank" in token:
            H.setdefault((token["row"], token["seed"]), []).append(token["H"])
    middle = {key: median(values) for key, values in H.items()}
    pairs = with_low(states, lambda token: token["H"] < middle[token["row"], token["seed"]])
    placebo = {name: placebos([x for x in pairs[name] if "rank" in x]) for name in old}
    tables = {
        "All of them": pair_table(pairs, rules=True),
        "Without the first two tokens": pair_table(pairs, lambda x: x["t"] >= 2, rules=True),
        "Before the answer": pair_table(pairs, lambda x: x.get("answered") is False, rules=True),
        "After the answer": pair_table(pairs, lambda x: x.get("answered") is True),
        "The halves of each mini-batch": pair_table(with_low(old, lambda x: x["rank"] < 0.5)),
        "Placebo: rare tokens drawn anew at the same places": pair_table(placebo),
        "Each kind of tokens, q = 0.75": kind_table(with_low(states, lambda x: x["rank"] < 0.75)),
    }
    return "\n\n".join(f"{title}:\n\n{text}" for title, text in tables.items())


def figure(lines: Lines, file: Path) -> None:
    """Q - V of rare tokens as drawn, by entropy and by place, over problems."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, 3.2), layout="constrained")
    axis = picture.add_subplot()
    tokens = [token for token in tokens_of(lines) if token["row"].startswith(DRAWN)]
    states = list(dict.fromkeys(token["row"] for token in tokens))
    for number, state in enumerate(states):
        own = [token for token in tokens if token["row"] == state]
        low = [token for token in own if token["kind"] == KINDS[0] and token["low_h"]]
        groups = {
            "likely": [token for token in own if token["kind"] == KINDS[1]],
            "rare,\nhigh H": [x for x in own if x["kind"] == KINDS[0] and not x["low_h"]],
            "rare,\nlow H": low,
            **{f"low H,\n{name}": list(filter(holds, low)) for name, holds in PLACES.items()},
        }
        for x, part in enumerate(groups.values()):
            if len(part) >= 10 and (found := over_problems(part)):
                mean, lower, _ = found
                place = x + 0.12 * (number - (len(states) - 1) / 2)
                label = state.removeprefix(DRAWN) if x == 0 else None
                axis.errorbar(place, mean, mean - lower, fmt="o", ms=4, c=f"C{number}", label=label)
    axis.set_xticks(range(len(groups)), groups)
    axis.axhline(0, color="grey", lw=0.8)
    axis.set_ylabel("Q - V, points of accuracy")
    picture.legend(loc="outside upper center", ncols=3)
    picture.savefig(file, dpi=200)


if __name__ == "__main__":
    args = runs.parse_args(__doc__, ["tiny", "SmolLM2", "tiny-drawn", "SmolLM2-drawn"])
    made: Lines = []
    for part in args.made:
        made += measure_all(list_states(part)[: args.limit], args)
    args.only = "credit"  # all tables are of one part
    runs.finish(args, made, {"credit": Part([], report, figure)})
