"""What tokens are worth: Q - V of rare tokens, on the tiny model and on SmolLM2-135M.

    python experiments/credit.py --model FOLDER --jobs 2    # the runs and the tables: four hours
    python experiments/credit.py --only tiny --jobs 2       # a part: half an hour
    python experiments/credit.py --table --figure docs/credit.png

credit-protocol.md says what is run, and which result would support or refute the paper's premise.
scripts/credit.py measures the tokens of a state. The code in experiments/README.md makes FOLDER.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

import runs
import signs
from runs import Lines, Part

sys.path.insert(0, str(runs.ROOT / "scripts"))
from credit import CANDIDATES, KINDS, estimate  # noqa: E402  # of scripts/credit.py

TINY = "--q 0.5 --continuations 24 --batches 200"
BEFORE = f"{TINY} --tokens 300 --controls 150 --seed 400"
SMOLLM2 = """--q 0.5 --continuations 16 --batch_size 64 --tokens 10000
    --answered scripts/rewards.py:has_answer"""
RECIPE = "@recipes/smollm2-135m-cpu --model {model}"
TRAINING = f"{RECIPE} --eval_every 0 --log_samples 0 --steps 3 --method justrl"
FEWEST = 40  # tokens in each seed, for an interval over the seeds
NEAR_0 = 5  # points


class State(NamedTuple):
    """A model, and the flags with which scripts/credit.py measures its tokens."""

    row: str
    seed: int  # of the training, or before training of the sampling
    flags: str


def list_states(part: str, output: Path) -> list[State]:
    """The states of a part, in the order of the protocol. The runs that they need are in folders."""
    if part == "SmolLM2":
        found = [
            State(
                "SmolLM2, before training",
                309,
                f"{RECIPE} {SMOLLM2} --batches 8 --controls 60 --seed 309",
            )
        ]
        for run in SMOLLM2_RUNS:
            flags = (
                f"{run.folder(output)}/checkpoints/step_000003 {SMOLLM2} --batches 4 --controls 30"
            )
            found.append(State("SmolLM2, step 3 of JustRL", run.seed, flags))
        return found
    found = [State("tiny, before training", 400, f"@tests/tiny/args {BEFORE}")]
    for noise in NOISE:
        base = output / f"noise-{noise}"
        flags = f"@tests/tiny/args --model {base} --data {base}/train.jsonl {BEFORE}"
        found.append(State(f"tiny, {noise} % of noise, before training", 400, flags))
    for step in (8, 28):
        for run in TINY_RUNS:
            checkpoint = run.folder(output.parent / "signs") / f"checkpoints/step_{step:06}"
            flags = f"{checkpoint} {TINY} --tokens 60 --controls 30"
            found.append(State(f"tiny, step {step} of {run.row}", run.seed, flags))
    return found


def measure_all(part: str, output: Path, jobs: int, model: str) -> Lines:
    """Make the runs that a part needs, measure its states, `jobs` at a time, and read the lines."""
    if part == "tiny":
        runs.make_all(TINY_RUNS, output.parent / "signs", jobs, model)
        for noise in NOISE:
            program = f"experiments/make_tiny.py --noise {noise / 100} --seed 0"
            runs.make(program, output / f"noise-{noise}")
    else:
        runs.make_all(SMOLLM2_RUNS, output, jobs, model)
    states = list_states(part, output)

    def measure(state: State) -> Lines:
        folder = runs.named(f"{state.row}-{state.seed}", output)
        flags = state.flags.replace("{model}", model).split()
        runs.call(["scripts/credit.py", *flags, "--output", folder])
        return [compact(state, row) for row in runs.read_rows(folder / "credit.jsonl")]

    with ThreadPoolExecutor(jobs) as pool:
        return sum(pool.map(measure, states), [])


def compact(state: State, row: dict) -> dict:
    """A line of the results: a token, without its context."""
    numbers = {key: runs.short(row[key]) for key in ("p", "H", "A", "rank", "rare_p", "V", "Q")}
    if "placebo" in row:
        numbers["placebo"] = runs.short(row["placebo"])
    words = {key: row[key] for key in ("kind", "problem", "response", "t", "token", "answered")}
    return {"row": state.row, "seed": state.seed, **words, **numbers}


# ----------------------------------------------------------------------------------------- tables


def interval(rows: Lines, minus: Lines = (), name: str = "Q") -> tuple[float, float, float] | None:
    """The mean of Q - V, minus that of other tokens, and its 95 % interval, in points.

    Student's over the training seeds, or if some seed has few tokens, or there is one seed,
    clustered by problem. None for too few problems.
    """
    seeds = sorted({row["seed"] for row in [*rows, *minus]})
    by_seed = [
        [[row for row in part if row["seed"] == seed] for part in (rows, minus)] for seed in seeds
    ]
    fewest = min((len(part) for parts in by_seed for part in parts[: 1 + bool(minus)]), default=0)
    if len(seeds) > 1 and fewest >= FEWEST:
        values = [estimate(*parts, name)[0] for parts in by_seed]
        mean, half = fmean(values), runs.T_95[len(values)] * stdev(values) / len(values) ** 0.5
    elif found := estimate(rows, minus, name):
        mean, half = found[0], 1.96 * found[1]
    else:
        return None
    return 100 * mean, 100 * (mean - half), 100 * (mean + half)


def shown(found: tuple[float, float, float] | None) -> str:
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*found) if found else "-"


def verdict(found: tuple[float, float, float] | None, below: str, near: str, above: str) -> str:
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
        middle = median(row["H"] for row in own)
        for row in own:
            found[row["H"] >= middle].append(row)
    return found


def by_rank(rows: Lines, q: float) -> tuple[Lines, Lines]:
    """The candidates that S2T with q silences in their mini-batch, and those that it keeps."""
    own = [row for row in rows if row["kind"] in CANDIDATES]
    return [row for row in own if row["rank"] < q], [row for row in own if row["rank"] >= q]


def pair_table(states: dict[str, tuple[Lines, Lines]], name: str = "Q", rules: bool = False) -> str:
    """Q - V of two sets of candidates in each state, and the difference; with the rules' words."""
    heading, cells = ["", "n", "V, %", "low", "high", "high minus low"], []
    for state, (low, high) in states.items():
        both = low + high
        if not both:
            continue
        v = fmean(row["V"] for row in both)
        found = [interval(low, name=name), interval(high, name=name)]
        found.append(interval(high, low, name) if low and high else None)
        cells.append([state, f"{len(low)} + {len(high)}", f"{100 * v:.0f}", *map(shown, found)])
        if rules and min(len(low), len(high)) >= FEWEST and 0.15 <= v <= 0.85:
            cells[-1].append(verdict(found[0], "harmful", "contribute nothing", "refuted"))
            words = ("the better half", "nothing", "the worse half")
            cells[-1].append(verdict(found[2], *words))
        elif rules:
            cells[-1] += ["premise absent"] * 2
    return runs.markdown(heading + ["rule 1: they are", "rule 2: H picks"] * rules, cells)


def report(lines: Lines) -> str:
    """Q - V in points of accuracy, with 95 % intervals, by the rules of credit-protocol.md.

    low, high: the candidates below and above the median entropy, or as a heading says. n: their
    numbers. V: the share of right answers from before these tokens.
    """
    names = dict.fromkeys(line["row"] for line in lines)
    rows = {name: [line for line in lines if line["row"] == name] for name in names}
    pairs = {name: halves(own) for name, own in rows.items()}

    def some(condition: Callable[[dict], bool]) -> dict[str, tuple[Lines, Lines]]:
        return {
            name: tuple([row for row in part if condition(row)] for part in both)
            for name, both in pairs.items()
        }

    tables = {
        "All candidates": pair_table(pairs, rules=True),
        "Without the first two tokens": pair_table(some(lambda row: row["t"] >= 2), rules=True),
        "Before the answer": pair_table(some(lambda row: row["answered"] == 0), rules=True),
        "Behind the answer": pair_table(some(lambda row: row["answered"] == 1)),
        "The halves of each mini-batch": pair_table({k: by_rank(v, 0.5) for k, v in rows.items()}),
        "What q = 0.75 silences (low), and keeps (high)": pair_table(
            {name: by_rank(own, 0.75) for name, own in rows.items()}
        ),
        "Placebo: other rare tokens at the same places": pair_table(pairs, "placebo"),
    }
    cells = []
    for name, own in rows.items():
        for kind in KINDS:
            its = [row for row in own if row["kind"] == kind]
            means = [fmean(row[key] for row in its) for key in ("A", "rare_p", "V")]
            worth = shown(interval(its))
            cells.append([f"{name}: {kind}", len(its), f"{means[0]:+.2f}"])
            cells[-1] += [f"{100 * means[1]:.1f}", f"{100 * means[2]:.0f}", worth]
    heading = ["", "n", "A", "rare tokens' p, %", "V, %", "Q - V"]
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


TINY_RUNS = [run for run in signs.RUNS if run.row in ("STAPO", "JustRL")]
SMOLLM2_RUNS = runs.list_runs({"SmolLM2 JustRL": ("", range(303, 309))}, TRAINING, "", "")
NOISE = (1, 12)  # %
DRAWN = {  # states and colours
    "tiny, before training": "C0",
    "tiny, step 28 of STAPO": "C9",
    "SmolLM2, before training": "C1",
    "SmolLM2, step 3 of JustRL": "C3",
}
PARTS = {"credit": Part([], report, figure)}

if __name__ == "__main__":
    parser = runs.make_parser(__doc__, ["tiny", "SmolLM2"])
    parser.add_argument("--output", type=Path, default=Path("runs/credit"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    args = parser.parse_args()
    made: Lines = []
    for part in [] if args.table else [args.only] if args.only else ["tiny", "SmolLM2"]:
        made += measure_all(part, args.output.resolve(), args.jobs, args.model)
    args.only = "credit"  # all tables are of one part
    runs.finish(args, made, PARTS)
