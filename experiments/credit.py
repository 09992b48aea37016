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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median, stdev

import runs
from credit import KINDS, PLACES, estimate, placebos, table  # of scripts/
from runs import Lines, Part
from tqdm import tqdm

FEWEST = 40  # tokens, for a verdict
NEAR_0 = 5  # points
DRAWN = "as drawn: "  # how the rows of the second protocol begin
# Flags of scripts/credit.py, and the programs and flags that make the models.
STEP = "{base}/checkpoints/step_0000"
PAIRS = "--q 0.5 --continuations 24 --batches 200 --drawn 0"
TINY = f"@tests/tiny/args {PAIRS} --tokens 300 --controls 150 --seed {{seed}}"
AFTER = f"{PAIRS} --tokens 60 --controls 30"
OTHER = "--model {base} --data {base}/train.jsonl"
NOISE = "experiments/make_tiny.py --seed 0 --noise"
SIGNS = "stapo.py @tests/tiny/args --save_every 4 --keep_last 7 --log_samples 0 --seed {seed}"
SMALL = "--continuations 24 --batches 8 --batch_size 256 --tokens 0 --controls 0 --drawn"
DRAW = f"@tests/tiny/args {SMALL} 300 --seed {{seed}}"
EIGHT = "stapo.py @tests/tiny/args --log_samples 0 --steps 8 --seed {seed}"
RECIPE = "@recipes/smollm2-135m-cpu --model {model} --seed {seed}"
BOTH = "--continuations 16 --batch_size 64 --answered scripts/rewards.py:has_answer"
ALL = f"{BOTH} --q 0.5 --tokens 10000 --drawn 0 --controls"
LARGE = f"{BOTH} --batches 8 --tokens 0 --controls 0 --drawn"
JUSTRL = f"stapo.py {RECIPE} --eval_every 0 --log_samples 0 --steps 3 --method justrl"
STAPO = f"stapo.py {RECIPE} --eval_every 0 --log_samples 0 --steps 8 --save_every 3 --keep_last 9"
STATES = {  # by the part: row, seeds (before training of the sampling), flags, what makes {base}
    "tiny": [
        ("tiny, before training", [400], TINY, ""),
        ("tiny, 1 % of noise, before training", [400], f"{TINY} {OTHER}", f"{NOISE} 0.01"),
        ("tiny, 12 % of noise, before training", [400], f"{TINY} {OTHER}", f"{NOISE} 0.12"),
        ("tiny, step 8 of STAPO", range(40, 45), f"{STEP}08 {AFTER}", SIGNS),
        ("tiny, step 8 of JustRL", range(40, 45), f"{STEP}08 {AFTER}", f"{SIGNS} --method justrl"),
        ("tiny, step 28 of STAPO", range(40, 45), f"{STEP}28 {AFTER}", SIGNS),
        ("tiny, step 28 of JustRL", range(40, 45), f"{STEP}28 {AFTER}", f"{SIGNS} --method justrl"),
    ],
    "SmolLM2": [
        ("SmolLM2, before training", [309], f"{RECIPE} {ALL} 60 --batches 8", ""),
        ("SmolLM2, step 3 of JustRL", range(303, 309), f"{STEP}03 {ALL} 30 --batches 4", JUSTRL),
    ],
    "tiny-drawn": [
        ("tiny, before training", [410], DRAW, ""),
        ("tiny, 1 % of noise, before training", [410], f"{DRAW} {OTHER}", f"{NOISE} 0.01"),
        ("tiny, step 8 of STAPO", range(80, 85), f"{STEP}08 {SMALL} 60", EIGHT),
    ],
    "SmolLM2-drawn": [
        ("SmolLM2, before training", [319], f"{RECIPE} {LARGE} 250", ""),
        ("SmolLM2, step 3 of STAPO", range(310, 313), f"{STEP}03 {LARGE} 84", STAPO),
    ],
}
State = tuple[str, int, str, str]  # row, seed, flags, what makes {base}


def list_states(part: str) -> list[State]:
    begin, found = DRAWN if part.endswith("drawn") else "", []
    for row, seeds, *texts in STATES[part]:
        for seed in seeds:
            found.append((begin + row, seed, *(x.replace("{seed}", str(seed)) for x in texts)))
    return found


def measure_all(states: list[State], args: argparse.Namespace) -> Lines:
    """Make the models, measure their tokens, --jobs at a time: a line for each state and seed."""
    folders = {base: runs.named(base, args.output) for *_, base in states if base}

    def measure(state: State) -> dict:
        row, seed, flags, base = state
        words = flags.replace("{base}", shlex.quote(str(folders.get(base))))
        words = shlex.split(f"{words.replace('{model}', args.model)} {args.more}")
        folder = runs.named(f"{row}-{seed}", args.output)
        if not folder.exists():
            runs.note_beginning(folder)
        runs.call(["scripts/credit.py", *words, "--output", folder])
        tokens = [compact(token) for token in runs.read_rows(folder / "credit.jsonl")]
        made = {"flags": flags, "base": base, **runs.beginning(folder)}
        return {"row": row, "seed": seed, **made, "tokens": tokens}

    with ThreadPoolExecutor(args.jobs) as pool:
        bases = [base.replace("{model}", args.model) for base in folders]
        list(pool.map(runs.make, bases, folders.values()))
        return list(tqdm(pool.map(measure, states), total=len(states), unit="model"))


def compact(row: dict) -> dict:
    """A token without its context. V and Q are shares of right answers, K the numbers of them."""
    names = "kind held problem response t token p H low_h A rare_p answered rank".split()
    found = {name: row[name] for name in names if name in row}
    found |= {name: (row[name] + 1) / 2 for name in row["rewards"]}
    short = {key: float(f"{x:.3g}") for key, x in found.items() if isinstance(x, float)}
    return found | short | {"K": [len(each) for each in row["rewards"].values()]}


def tokens_of(lines: Lines) -> dict[str, Lines]:
    """The tokens of each row, with V, Q, rewards (100 for a right answer) and rare p in percent.

    Older lines are a token each, without the number of its continuations. Low candidates, low_h,
    are here those below the median entropy of their model.
    """
    states: dict[str, Lines] = {}
    for line in lines:
        usual = 16 if "SmolLM2" in line["row"] else 24
        for token in line.get("tokens", [line]):
            names = [name for name in ("V", "Q", "placebo") if name in token]
            row = {"held": 0, "seed": line["seed"], **token, "rewards": {}}
            for name, count in zip(names, token.get("K", [usual] * 3)):
                right = round(token[name] * count)
                row["rewards"][name] = [100.0] * right + [0.0] * (count - right)
            row |= {name: 100 * token[name] for name in (*names, "rare_p")}
            states.setdefault(line["row"], []).append(row)
    for rows in states.values():
        for seed in {row["seed"] for row in rows}:
            own = [row for row in rows if "rank" in row and row["seed"] == seed]
            middle = median([row["H"] for row in own] or [0.0])
            for row in own:
                row["low_h"] = row["H"] < middle
    return states


# ----------------------------------------------------------------------------------------- tables


Interval = tuple[float, float, float] | None  # mean, lower and upper end, in points


def interval(rows: Lines, minus: Lines | None = None, over: str = "problems") -> Interval:
    """The mean of Q - V, minus that of other tokens, and its 95 % interval.

    over: "problems" (errors are clustered by problem) or "seeds" of the training (Student's).
    """
    found = []
    for seed in {row["seed"] for row in rows} if over == "seeds" else [None]:
        parts = [[x for x in part if seed in (None, x["seed"])] for part in (rows, minus or [])]
        found.append(estimate(parts[0], None if minus is None else parts[1]))
    if len(found) < 1 + (over == "seeds") or None in found:
        return None
    means, half = [mean for mean, _ in found], 1.96 * found[0][1]
    if over == "seeds":
        half = runs.T_95[len(means)] * stdev(means) / len(means) ** 0.5
    return fmean(means), fmean(means) - half, fmean(means) + half


def names_of(state: str, rows: Lines) -> dict[str, str]:
    """The names of a state's rows, and what their intervals are over."""
    seeds = len({row["seed"] for row in rows})
    names = [(state, "problems"), (f"{state}, over {seeds} seeds", "seeds")]
    return dict(names[:seeds])


def shown(found: Interval) -> str:
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*found) if found else "-"


def verdict(found: Interval, below: str, near: str, above: str) -> str:
    """The words of a rule of the protocol for an interval."""
    if found is None:
        return "-"
    _, low, high = found
    words = {below: high < 0, above: low > 0, near: -NEAR_0 <= low and high <= NEAR_0}
    return ", ".join(word for word, holds in words.items() if holds) or "not resolved"


def pair_table(states: dict, holds: Callable = bool, rules: bool = False) -> str:
    """Q - V of rare tokens of low and of high entropy, where holds(token), and differences."""
    heading = ["", "n", "V, %", "rare p, %", "low", "high", "high minus low", "low minus likely"]
    heading += ["rule 1: they are", "rule 2: H picks", "against likely"] if rules else []
    cells = []
    for state, rows in states.items():
        drawn = state.startswith(DRAWN)
        rare = [x for x in rows if "rank" in x or x["kind"] == KINDS[0]]
        likely = [
            x for x in rows if x["kind"] in ("likely, as drawn", "likely, right") and holds(x)
        ]
        whole = [[x for x in rare if x["low_h"] is said] for said in (True, False)]
        low, high = pair = [list(filter(holds, part)) for part in whole]
        means = [" / ".join(mean_of(part, key) for part in pair) for key in ("V", "rare_p")]
        v = fmean([x["V"] for x in (low if drawn else rare)] or [0.0])
        counts = 15 <= v <= 85 and min(map(len, [low] if drawn else pair + whole)) >= FEWEST
        names, seeds = names_of(state, low + high), {x["seed"] for x in rare}
        each = [sum(x["seed"] == seed for x in part) for part in pair for seed in seeds]
        by_seed = len(names) > 1 and not drawn and min(each) >= FEWEST
        for name, over in names.items():
            parts = [(low, None), (high, None), (high, low), (low, likely)]
            found = [interval(*part, over) for part in parts]
            cells.append([name, f"{len(low)} / {len(high)}", *means, *map(shown, found)])
            if rules and (over == "seeds") == by_seed:  # the interval that decides
                words = [verdict(found[0], "harmful", "contribute nothing", "refuted")]
                words += [verdict(found[2], "the better half", "nothing", "the worse half")]
                last = verdict(found[3], "worth less", "not distinguishable", "worth more")
                words += [last.split(",")[0] if drawn else ""]
                cells[-1] += words if counts else [word and f"({word})" for word in words]
    return runs.markdown([heading, *cells]).rstrip()


def mean_of(rows: Lines, key: str) -> str:
    return f"{fmean(row[key] for row in rows):.0f}" if rows else "-"


def kind_table(states: dict[str, Lines]) -> str:
    """The table of scripts/credit.py for each state, with what q = 0.75 silences."""
    kinds, cells = {True: "silenced", False: "kept"}, []
    for state, rows in states.items():
        rows = [x | {"kind": kinds[x["rank"] < 0.75]} if "rank" in x else x for x in rows]
        for name, over in names_of(state, rows).items():
            heading, *its = table(rows, lambda *x, over=over: shown(interval(*x, over=over)), ".1f")
            cells += [[f"{name}: {x.removeprefix('as drawn, ')}", *rest] for x, *rest in its]
    return runs.markdown([["", *heading[1:]], *cells]).rstrip()


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
    states = tokens_of(lines)
    old = {state: rows for state, rows in states.items() if not state.startswith(DRAWN)}
    drawn = {state: rows for state, rows in states.items() if state not in old}
    pairs = {state: [x for x in rows if "rank" in x] for state, rows in old.items()}
    ranks = {
        state: [x | {"low_h": x["rank"] < 0.5} if "rank" in x else x for x in rows]
        for state, rows in old.items()
    }
    tables = {
        "All of them": pair_table(states, rules=True),
        "Without the first two tokens": pair_table(states, lambda x: x["t"] >= 2, rules=True),
        "Before the answer": pair_table(states, lambda x: x.get("answered") is False, rules=True),
        "After the answer": pair_table(states, lambda x: x.get("answered") is True),
        "As drawn, with A > 0 (the outcome selects)": pair_table(drawn, lambda x: x["A"] > 0),
        "The halves of each mini-batch": pair_table(ranks),
        "Placebos": pair_table({state: placebos(rows) for state, rows in pairs.items()}),
        "Each kind of tokens, q = 0.75": kind_table(states),
    }
    return "\n\n".join(f"{title}:\n\n{text}" for title, text in tables.items())


def figure(lines: Lines, file: Path) -> None:
    """Q - V of tokens as drawn, by entropy and by place, with intervals over problems."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, 3.2), layout="constrained")
    axis = picture.add_subplot()
    states = {k: rows for k, rows in tokens_of(lines).items() if k.startswith(DRAWN)}
    for number, (state, rows) in enumerate(states.items()):
        rare, likely = ([x for x in rows if x["kind"] == kind] for kind in KINDS[:2])
        low, high = ([x for x in rare if x["low_h"] is said] for said in (True, False))
        groups = {"likely": likely, "rare,\nhigh H": high, "rare,\nlow H": low}
        for name, holds in list(PLACES.items())[1:]:  # few first tokens are low
            groups["low H,\n" + name.replace(" ", "\n", 1)] = list(filter(holds, low))
        found = [interval(part) if len(part) >= 10 else None for part in groups.values()]
        xs = [x + 0.12 * (number - (len(states) - 1) / 2) for x, each in enumerate(found) if each]
        means, bars = zip(*((mean, mean - lower) for mean, lower, _ in filter(None, found)))
        name = state.removeprefix(DRAWN)
        axis.errorbar(xs, means, bars, fmt="o", ms=4, color=f"C{number}", label=name)
    axis.set_xticks(range(len(groups)), groups)
    axis.set_xlim(-0.5, len(groups) - 0.5)
    axis.axhline(0, color="grey", lw=0.8)
    axis.set_ylabel("Q - V, points of accuracy")
    picture.legend(loc="outside upper center", ncols=3)
    picture.savefig(file, dpi=200)


if __name__ == "__main__":
    args = runs.parse_args(__doc__, STATES)
    made: Lines = []
    for part in args.made:
        made += measure_all(list_states(part)[: args.limit], args)
    args.only = "credit"  # all tables are of one part
    runs.finish(args, made, {"credit": Part([], report, figure)})
