"""What tokens are worth: Q - V of rare tokens, on the tiny model and on SmolLM2-135M.

    python experiments/credit.py --model FOLDER --jobs 2    # the runs and the tables: two hours
    python experiments/credit.py --only tiny --jobs 2       # a part: half an hour
    python experiments/credit.py --table --figure docs/credit.png

credit-protocol.md says what is run, and which result would support or refute the paper's premise.
scripts/credit.py measures the tokens of a state. The code in experiments/README.md makes FOLDER.
"""

import argparse
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

import runs
import signs
from credit import CANDIDATES, KINDS, estimate  # of scripts/credit.py
from runs import Lines, Part
from tqdm import tqdm

TINY = "--q 0.5 --continuations 24 --batches 200"
BEFORE = f"{TINY} --tokens 300 --controls 150 --seed 400"
SMOLLM2 = """--q 0.5 --continuations 16 --batch_size 64 --tokens 10000
    --answered scripts/rewards.py:has_answer"""
RECIPE = "@recipes/smollm2-135m-cpu --model {model}"
TRAINING = f"{RECIPE} --eval_every 0 --log_samples 0 --steps 3 --method justrl"
FEWEST = 40  # tokens of each seed, for an interval over the seeds
NEAR_0 = 5  # points


class State(NamedTuple):
    """A model, and the flags with which scripts/credit.py measures its tokens."""

    row: str
    seed: int  # of the training, or before training of the sampling
    flags: str  # {base} stands for the folder of `base`
    base: str = ""  # the program and flags that make the model
    folder: str = ""  # of `base`, in the folder of all runs


def list_states(part: str) -> list[State]:
    """The states of a part, in the order of the protocol."""
    if part == "SmolLM2":
        flags = f"{RECIPE} {SMOLLM2} --batches 8 --controls 60 --seed 309"
        found = [State("SmolLM2, before training", 309, flags)]
        flags = f"{{base}}/checkpoints/step_000003 {SMOLLM2} --batches 4 --controls 30"
        for seed in range(303, 309):
            base = f"stapo.py {TRAINING} --seed {seed}"
            folder = f"credit/SmolLM2-JustRL-{seed}"
            found.append(State("SmolLM2, step 3 of JustRL", seed, flags, base, folder))
        return found
    found = [State("tiny, before training", 400, f"@tests/tiny/args {BEFORE}")]
    for noise in (1, 12):
        flags = f"@tests/tiny/args --model {{base}} --data {{base}}/train.jsonl {BEFORE}"
        base = f"experiments/make_tiny.py --noise {noise / 100} --seed 0"
        name = f"tiny, {noise} % of noise, before training"
        found.append(State(name, 400, flags, base, f"credit/noise-{noise}"))
    for step in (8, 28):
        for run in [run for run in signs.RUNS if run.row in ("STAPO", "JustRL")]:
            flags = f"{{base}}/checkpoints/step_{step:06} {TINY} --tokens 60 --controls 30"
            base, folder = f"{run.program} {run.flags} --seed {run.seed}", run.folder(Path("signs"))
            name = f"tiny, step {step} of {run.row}"
            found.append(State(name, run.seed, flags, base, str(folder)))
    return found


def measure_all(states: list[State], args: argparse.Namespace) -> Lines:
    """Make the models, measure their tokens, --jobs at a time, and read the lines."""

    def make_base(base: tuple[str, str]) -> None:
        program, folder = base
        if program:
            runs.make(program.replace("{model}", args.model), args.output.parent / folder)

    def measure(state: State) -> Lines:
        flags = state.flags.replace("{model}", args.model)
        base = shlex.quote(str(args.output.parent / state.folder))
        folder = runs.named(f"{state.row}-{state.seed}", args.output)
        words = shlex.split(f"{flags.replace('{base}', base)} {args.more}")
        if not folder.exists():
            runs.note_beginning(folder)
        runs.call(["scripts/credit.py", *words, "--output", folder])
        rows = runs.read_rows(folder / "credit.jsonl")
        return [compact(state, row) | runs.beginning(folder) for row in rows]

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(make_base, dict.fromkeys((state.base, state.folder) for state in states)))
        return sum(tqdm(pool.map(measure, states), total=len(states), unit="model"), [])


def compact(state: State, row: dict) -> dict:
    """A line of the results: a token, without its context. V and Q are shares of right answers."""
    names = ["kind", "problem", "t", "token", "p", "H", "A", "rare_p", "V", "Q"]
    if row["kind"] in CANDIDATES:
        names += ["rank", "answered", "placebo"]
    row = row | {name: (row[name] + 1) / 2 for name in ("V", "Q", "placebo") if name in row}
    numbers = {key: float(f"{row[key]:.3g}") for key in names if isinstance(row[key], float)}
    return {"row": state.row, "seed": state.seed} | {key: row[key] for key in names} | numbers


# ----------------------------------------------------------------------------------------- tables


Interval = tuple[float, float, float] | None  # mean, lower and upper end, in points


def interval(rows: Lines, minus: Lines | None = None, name: str = "Q") -> Interval:
    """The mean of Q - V, minus that of other tokens, and its 95 % interval, in points.

    Student's over the training seeds, or if some seed has few tokens, or there is one seed,
    clustered by problem. None for too few problems.
    """
    parts = [rows] if minus is None else [rows, minus]
    seeds = {row["seed"] for part in parts for row in part}
    by_seed = [[[x for x in part if x["seed"] == seed] for part in parts] for seed in seeds]
    if len(seeds) > 1 and min(len(part) for each in by_seed for part in each) >= FEWEST:
        values = [estimate(*each, name=name)[0] for each in by_seed]
        mean, half = fmean(values), runs.T_95[len(values)] * stdev(values) / len(values) ** 0.5
    elif found := estimate(rows, minus, name):
        mean, half = found[0], 1.96 * found[1]
    else:
        return None
    return 100 * mean, 100 * (mean - half), 100 * (mean + half)


def shown(found: Interval) -> str:
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*found) if found else "-"


def verdict(found: Interval, below: str, near: str, above: str) -> str:
    """The words of a rule of the protocol for an interval."""
    if found is None:
        return "-"
    _, low, high = found
    words = {below: high < 0, above: low > 0, near: -NEAR_0 <= low and high <= NEAR_0}
    return ", ".join(word for word, holds in words.items() if holds) or "not resolved"


def halves(rows: Lines) -> tuple[Lines, Lines]:
    """The candidates below the median entropy of their model, and the others."""
    found: tuple[Lines, Lines] = ([], [])
    for seed in {row["seed"] for row in rows}:
        own = [row for row in rows if row["seed"] == seed and row["kind"] in CANDIDATES]
        middle = median([row["H"] for row in own] or [0.0])
        for row in own:
            found[row["H"] >= middle].append(row)
    return found


def by_rank(rows: Lines, q: float) -> tuple[Lines, Lines]:
    """The candidates that S2T with q silences in their mini-batch, and those that it keeps."""
    own = [row for row in rows if row["kind"] in CANDIDATES]
    return [row for row in own if row["rank"] < q], [row for row in own if row["rank"] >= q]


def pair_table(
    states: dict[str, tuple[Lines, Lines]], premise: set[str] | None = None, name: str = "Q"
) -> str:
    """Q - V of two sets of candidates in each state, and the difference.

    premise: the states in which the protocol's premise holds; then with the words of its rules.
    """
    heading = ["", "n", "V, %", "rare p, %", "low", "high", "high minus low"]
    cells = []
    for state, (low, high) in states.items():
        found = [interval(low, name=name), interval(high, name=name), interval(high, low, name)]
        means = [f"{mean_of(low, key)} / {mean_of(high, key)}" for key in ("V", "rare_p")]
        row = [state, f"{len(low)} / {len(high)}", *means, *map(shown, found)]
        if premise is not None:
            row.append(verdict(found[0], "harmful", "contribute nothing", "refuted"))
            row.append(verdict(found[2], "the better half", "nothing", "the worse half"))
            if state not in premise:
                row[-2:] = ["premise absent"] * 2
            elif min(len(low), len(high)) < FEWEST:
                row[-2:] = ["too few"] * 2
        cells.append(row)
    with_rules = ["rule 1: they are", "rule 2: H picks"] if premise is not None else []
    return runs.markdown(heading + with_rules, cells)


def mean_of(rows: Lines, key: str) -> str:
    """A mean in percent."""
    return f"{100 * fmean(row[key] for row in rows):.0f}" if rows else "-"


def report(lines: Lines) -> str:
    """Q - V in points of accuracy, with 95 % intervals, by the rules of credit-protocol.md.

    low, high: the candidates below and above the median entropy, or as a heading says. n: their
    numbers. V: the share of right answers from before these tokens. rare p: the probability of all
    tokens with p < 0.002 at their places.
    """
    names = dict.fromkeys(line["row"] for line in lines)
    rows = {name: [line for line in lines if line["row"] == name] for name in names}
    pairs = {name: halves(own) for name, own in rows.items()}
    premise = set()
    for name, both in pairs.items():
        v = fmean([row["V"] for part in both for row in part] or [0.0])
        if min(map(len, both)) >= FEWEST and 0.15 <= v <= 0.85:
            premise.add(name)

    def some(condition: Callable[[dict], bool]) -> dict[str, tuple[Lines, Lines]]:
        return {
            name: tuple(list(filter(condition, part)) for part in pairs[name]) for name in pairs
        }

    tables = {
        "All candidates": pair_table(pairs, premise),
        "Without the first two tokens": pair_table(some(lambda row: row["t"] >= 2), premise),
        "Before the answer": pair_table(some(lambda row: row["answered"] is False), premise),
        "After the answer": pair_table(some(lambda row: row["answered"] is True)),
        "The halves of each mini-batch": pair_table({k: by_rank(v, 0.5) for k, v in rows.items()}),
        "What q = 0.75 silences (low), and keeps (high)": pair_table(
            {name: by_rank(own, 0.75) for name, own in rows.items()}
        ),
        "Placebo: rare tokens drawn anew at the same places": pair_table(pairs, name="placebo"),
    }
    cells = []
    for name, own in rows.items():
        for kind in KINDS:
            its = [row for row in own if row["kind"] == kind]
            if its:
                given = f"{fmean(row['A'] for row in its):+.2f}"
                means = [mean_of(its, key) for key in ("rare_p", "V")]
                cells.append([f"{name}: {kind}", len(its), given, *means, shown(interval(its))])
    heading = ["", "n", "A", "rare p, %", "V, %", "Q - V"]
    tables["Each kind of tokens"] = runs.markdown(heading, cells)
    return "\n\n".join(f"{title}:\n\n{text}" for title, text in tables.items())


def figure(lines: Lines, file: Path) -> None:
    """Q - V by the kind of tokens, for some states."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, 3.2), layout="constrained")
    axis = picture.add_subplot()
    for place, (name, color) in enumerate(DRAWN.items()):
        own = [line for line in lines if line["row"] == name]
        low, high = halves(own)
        kinds = {kind: [row for row in own if row["kind"] == kind] for kind in KINDS}
        found = {
            "candidates,\nlow H": interval(low),
            "candidates,\nhigh H": interval(high),
            "placebo,\nlow H": interval(low, name="placebo"),
            "placebo,\nhigh H": interval(high, name="placebo"),
            "rare tokens of\nwrong answers": interval(kinds["rare, wrong"]),
            "likely tokens of\nright answers": interval(kinds["likely, right"]),
        }
        xs = [i + 0.15 * (place - 1.5) for i in range(len(found))]
        means = [value[0] for value in found.values()]
        bars = [[mean - value[1] for mean, value in zip(means, found.values())]]
        bars.append([value[2] - mean for mean, value in zip(means, found.values())])
        axis.errorbar(xs, means, bars, fmt="o", ms=4, color=color, label=name)
    axis.set_xticks(range(len(found)), found)
    axis.axhline(0, color="grey", lw=0.8)
    axis.set_ylabel("Q - V, points of accuracy")
    picture.legend(loc="outside upper center", ncols=2)
    picture.savefig(file, dpi=200)


DRAWN = {  # states and colours
    "tiny, before training": "C0",
    "tiny, step 28 of STAPO": "C9",
    "SmolLM2, before training": "C1",
    "SmolLM2, step 3 of JustRL": "C3",
}
if __name__ == "__main__":
    args = runs.parse_args(__doc__, ["tiny", "SmolLM2"])
    made: Lines = []
    for part in args.made:
        made += measure_all(list_states(part)[: args.limit], args)
    args.only = "credit"  # all tables are of one part
    runs.finish(args, made, {"credit": Part([], report, figure)})
