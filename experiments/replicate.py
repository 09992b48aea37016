"""How much STAPO helps, when and why: methods, base models, controls and rewards, by seeds.

    python experiments/replicate.py --jobs 2                 # everything: six hours on two cores
    python experiments/replicate.py --only methods --jobs 2  # methods and learning rates: two
    python experiments/replicate.py --only bases --jobs 2    # other base models: one and a half
    python experiments/replicate.py --only why --jobs 2      # weights, gradient, SGD: half an hour
    python experiments/replicate.py --only drift --jobs 2    # the reward says nothing: about two
    python experiments/replicate.py --short --jobs 2         # two seeds, fewer rows: an hour

A run is `stapo.py @tests/tiny/args` with other flags: on tests/tiny, on another base model, or from
the last checkpoint of a finished run. What a run begins from is made first. Runs that are whole are
not run again, and one that was interrupted begins anew: the same command goes on with what is left.
Prints tables of what is whole, and draws replication.png and drift.png. controls.py has the methods
that stapo.py does not have.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import tables
from controls import METHODS as CONTROLS
from matplotlib.axes import Axes
from tqdm import tqdm

from reward import is_correct  # importing controls has put this project's folder into sys.path

matplotlib.use("Agg")  # files only, no display
ROOT = Path(__file__).resolve().parent.parent

STEPS, LONG = 25, 100  # on base models; @tests/tiny/args has 28
EARLY = 20  # of runs that are compared over their first steps alone
DRIFT, SHORT_DRIFT, LONG_DRIFT = 130, 80, 300  # from finished runs
# What runs begin from, and the programs that make it: base models by their noise, of which
# tests/tiny has 8 %, and finished runs, one for each seed.
BASES = {
    "no noise": "experiments/make_tiny.py --noise 0",
    "noise 1 %": "experiments/make_tiny.py --noise 0.01",
    "noise 3 %": "experiments/make_tiny.py --noise 0.03",
    "tests/tiny": "",
    "another pre-training": "experiments/make_tiny.py --seed 1",
    "noise 12 %": "experiments/make_tiny.py --noise 0.12",
}
NOISE_LEVELS = tuple(BASES)
# Five base models for each of two noise levels, from other problems and other first weights.
PRETRAININGS = {
    8: ["tests/tiny", "another pre-training", *(f"pre-training {n}" for n in (2, 3, 4))],
    3: ["noise 3 %", *(f"noise 3 %, pre-training {n}" for n in (1, 2, 3, 4))],
}
for percent, names in PRETRAININGS.items():
    for number, name in enumerate(names):
        program = f"experiments/make_tiny.py --noise {percent / 100} --seed {number}"
        BASES.setdefault(name, program)
FINISHED = {
    "STAPO run": "stapo.py @tests/tiny/args --method stapo",
    "JustRL run": "stapo.py @tests/tiny/args --method justrl",
}


class Group(NamedTuple):
    """Runs that differ in their seed alone: a row of the tables."""

    name: str
    method: str
    seeds: range
    flags: str = ""  # more of stapo.py's, beside those of tests/tiny/args
    base: str = "tests/tiny"  # what a run begins from: one of BASES or FINISHED
    steps: int = STEPS
    reference: str = "STAPO"  # the row from which it is compared, seed by seed

    @property
    def key(self) -> str:
        """Its name among all groups and, with a seed, that of its run directories."""
        return f"{self.base}-{self.name}".replace("/", "-").replace(" ", "-").replace("%", "pct")


# The methods by the names of their rows.
MAIN = {"STAPO": "stapo", "JustRL": "justrl", "FullMask": "full-mask"}
TURNED = {"wrong answers instead": "wrong-answers", "both": "both-answers"}
OTHERS = {"random candidates": "random", "highest entropy": "high-entropy"}
OTHERS |= {"GRPO": "grpo", "20-Entropy": "20-entropy"}
DOSES = {f"candidates times {weight}": f"weight-{weight}" for weight in (0.25, 0.5, 1.5, 2)}
RATES = {  # of 3e-4
    "half the rate": "--lr 1.5e-4",
    "twice the rate": "--lr 6e-4",
    "four times the rate": "--lr 1.2e-3",
}
SGD = "--lr 0.05"  # at 0.1 accuracy falls after 15 steps


def pair(variant: str, flags: str, seeds: range, **where: Any) -> list[Group]:
    """STAPO and JustRL under other conditions than in the main rows."""
    first = f"STAPO, {variant}"
    rows = {first: "stapo", f"JustRL, {variant}": "justrl"}
    return [Group(n, m, seeds, flags, reference=first, **where) for n, m in rows.items()]


def methods_plan() -> list[Group]:
    """Methods, S2T's rule turned around, learning rates; STAPO and JustRL at other noise levels."""
    seeds = range(2, 7)  # 0 and 1 chose the settings of tests/tiny
    plan = [Group(name, method, seeds) for name, method in (MAIN | TURNED | OTHERS).items()]
    for base in [base for base in NOISE_LEVELS if base != "tests/tiny"]:
        plan += [Group(name, MAIN[name], seeds, base=base) for name in ("STAPO", "JustRL")]
    for rate, flags in RATES.items():
        plan += pair(rate, flags, seeds)
    return plan + pair(f"{LONG} steps", "", seeds[:2], steps=LONG)


def bases_plan() -> list[Group]:
    """STAPO and JustRL on five base models for each of two noise levels."""
    bases = [base for names in PRETRAININGS.values() for base in names]
    rows = [(base, name) for base in bases for name in ("STAPO", "JustRL")]
    return [Group(name, MAIN[name], range(2, 4), base=base) for base, name in rows]


def why_plan() -> list[Group]:
    """How much of the gap comes from the candidates' weight, from gradient norms, from AdamW."""
    seeds = range(2, 5)
    plan = [Group(name, method, seeds) for name, method in MAIN.items()]
    for name, method in DOSES.items():
        plan.append(Group(name, method, seeds, steps=EARLY))
    plan.append(Group("as much gradient", "same-gradient", seeds, steps=EARLY))
    for name in ("STAPO", "JustRL"):
        method = MAIN[name] + "-sgd"
        plan.append(Group(f"{name}, SGD", method, seeds, SGD, steps=EARLY, reference="STAPO, SGD"))
    return plan


def drift_plan() -> list[Group]:
    """What methods do to a finished run when the reward says nothing; trials had seeds 0 to 4."""
    reward = "--reward scripts/rewards.py:"
    nothing = reward + "nine_of_ten"
    five, three, one = range(5, 10), range(5, 8), range(5, 6)
    start, short = ({"base": "STAPO run", "steps": steps} for steps in (DRIFT, SHORT_DRIFT))
    return [
        Group("STAPO", "stapo", five, nothing, **start),
        Group("JustRL", "justrl", five, nothing, **start),
        Group("JustRL, eps_high 0.2", "justrl", three, f"--eps_high 0.2 {nothing}", **start),
        Group("FullMask", "full-mask", three, nothing, **start),
        Group("random candidates", "random", three, nothing, **start),
        *pair("chance 0.5", reward + "one_of_two", one, **start),
        *pair("from a JustRL run", nothing, one, base="JustRL run", steps=DRIFT),
        *pair("half the rate", f"{nothing} {RATES['half the rate']}", one, **short),
        *pair("twice the rate", f"{nothing} {RATES['twice the rate']}", one, **short),
        *pair("right answers refused", reward + "seven_of_ten_right", one, **short),
        *pair(f"{LONG_DRIFT} steps", nothing, range(10, 11), base="STAPO run", steps=LONG_DRIFT),
    ]


# ------------------------------------------------------------------------------------- the runs


def quiet_run(command: list[str]) -> None:
    """A Python program on one thread; what it prints is shown where it fails."""
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *command]
    done = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} has failed:\n{done.stderr[-2000:]}")


def base_folder(base: str, seed: int, output: Path) -> Path:
    """A base model, or the finished run with this seed."""
    if base == "tests/tiny":
        return ROOT / base
    name = f"{base}-{seed}" if base in FINISHED else base
    return output / "bases" / name.replace(" ", "-")


def make_base(base: str, seed: int, output: Path) -> None:
    """Make it unless it is there; its folder gets its name when it is whole."""
    folder = base_folder(base, seed, output)
    if folder.exists():
        return
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    program = FINISHED[base] + f" --seed {seed}" if base in FINISHED else BASES[base]
    quiet_run([*program.split(), "--output", str(partial)])
    partial.rename(folder)


def read_run(folder: Path, steps: int) -> list[dict[str, Any]] | None:
    """The metrics of each step of a whole run; else None.

    The first and the last have the evaluations before and after them, under "eval".
    """
    log = folder / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in log.open()] if log.exists() else []
    except ValueError:  # a line that was torn
        return None
    scores = {line["step"]: next(iter(line["eval"].values())) for line in lines if line.get("eval")}
    lines = [line for line in lines if "accuracy" in line]
    if len(lines) < steps or steps not in scores:
        return None
    lines[0]["eval"], lines[-1]["eval"] = scores[0], scores[steps]
    return lines


def train(group: Group, seed: int, output: Path) -> None:
    """One run from its beginning, evaluated on held-out problems before and after."""
    base, folder = base_folder(group.base, seed, output), output / f"{group.key}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    program = "experiments/controls.py" if group.method in CONTROLS else "stapo.py"
    model, data = base, base
    if group.base in FINISHED:
        model, data = base / "checkpoints" / "step_000028", ROOT / "tests/tiny"
    where = ["--model", str(model), "--data", str(data / "train.jsonl"), "--output", str(folder)]
    ends = ["--eval_every", str(group.steps), "--eval_benchmarks", str(data / "test.jsonl")]
    flags = f"--method {group.method} {group.flags}".split()
    rest = f"--save_every 0 --log_samples 0 --steps {group.steps} --seed {seed}".split()
    quiet_run([program, "@tests/tiny/args", *flags, *where, *ends, *rest])


def run_all(plan: list[Group], output: Path, jobs: int) -> None:
    """What is left of the plan, `jobs` at a time; a failure ends it when the others have ended.

    One seed of each row comes before the next seed, so that the tables of a plan that was
    interrupted have as many rows as they can.
    """
    runs = sorted([(g, seed) for g in plan for seed in g.seeds], key=lambda run: run[1])
    left = [(g, s) for g, s in runs if read_run(output / f"{g.key}-{s}", g.steps) is None]
    print(f"{len(runs) - len(left)} of {len(runs)} runs are whole")
    bases = {base_folder(g.base, seed, output): (g.base, seed) for g, seed in left}
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda base: make_base(*base, output), bases.values()))
        trained = pool.map(lambda run: train(*run, output), left)
        list(tqdm(trained, total=len(left), unit="run"))


# ----------------------------------------------------------------------------- numbers and tables


# The columns of a table are numbers of each run, by the name that they have there, with a format.
# What is shown of them is mean ± standard error; with "mean" the mean alone, with "each" every
# run's. These columns are in several tables.
SPANS = ("5 to 10", "10 to 20", "last five", "held out")  # of steps, ends included
LEVELS = {
    "silenced, %": "mean .2f",
    **{f"accuracy, {span}": ".1f" for span in SPANS},
    "entropy, 10 to 20": ".3f",
    "steps to 80 %": "mean .1f",
}
DIFFERENCES = {span: "+.1f" for span in SPANS}
OF_EARLY = {span: DIFFERENCES[span] for span in SPANS[:2]}
OF_EARLY |= {"log-odds, 10 to 20": "mean +.2f", "entropy, ratio": "mean .2f"}
EACH_SEED = {"10 to 20, each seed": "each +.1f"}

Runs = dict[int, dict[str, Any]]  # seed -> numbers of a run, and its "lines"
Results = dict[str, Runs]  # by the key of a group


def mean_of(lines: list[dict], key: str, steps: str) -> float:
    """Over steps like "5 to 10", both ends included."""
    first, last = map(int, steps.split(" to "))
    return fmean(line[key] for line in lines if first <= line["step"] <= last)


def measure_methods(lines: list[dict], folder: Path) -> dict[str, float | None]:
    """A run's numbers: accuracies in percent, entropy in nats, shares of tokens in percent.

    silenced: the mean over steps of the share of all tokens; candidates: the share of the tokens of
    right answers in step 1.
    """
    end = len(lines)
    spans = ["5 to 10", "10 to 20", *(["21 to 40", "81 to 100"] if end == LONG else [])]
    found = {f"accuracy, {steps}": 100 * mean_of(lines, "accuracy", steps) for steps in spans}
    found |= {f"entropy, {steps}": mean_of(lines, "entropy", steps) for steps in spans}
    found["accuracy, last five"] = 100 * mean_of(lines, "accuracy", f"{end - 4} to {end}")
    found["accuracy, held out"] = lines[-1]["eval"]["mean"]
    found["silenced, %"] = 100 * mean_of(lines, "silenced_fraction", f"1 to {end}")
    early = f"1 to {EARLY}"
    found[f"silenced, {early}, %"] = 100 * mean_of(lines, "silenced_fraction", early)
    found["candidates, %"] = 100 * (lines[0]["low_prob_fraction"] or 0)
    accuracies = [100 * line["accuracy"] for line in lines]
    highest = accuracies.index(max(accuracies))
    found["highest accuracy"] = accuracies[highest]
    found["lowest after it"] = min(accuracies[highest:])
    found["entropy at the highest"] = lines[highest]["entropy"]
    found["entropy, end"] = lines[-1]["entropy"]
    reached = [line["step"] for line in lines if line["accuracy"] >= 0.8]
    return found | {"steps to 80 %": min(reached, default=None)}


def measure_texts(line: dict, responses: Path) -> dict[str, float]:
    """From a step and the evaluation beside it.

    rare: the share of p < 0.002 among the tokens of the responses with reward +1. The others are
    about the responses to the held-out sums; answers: how many different final answers they give,
    none counted as one; right: the share of right answers, whatever --reward pays.
    """
    rows = [json.loads(row) for row in responses.open()]
    return {
        "rare, %": 100 * line["low_prob_fraction"],
        "tokens": line["eval"]["response_length"],
        "cut off, %": 100 * line["eval"]["truncated_fraction"],
        "no box, %": 100 * line["eval"]["no_box_fraction"],
        "answers": len({row["answer"] for row in rows}),
        "right, %": 100 * fmean(is_correct(row["response"], row["gold"]) for row in rows),
    }


def measure_drift(lines: list[dict], folder: Path) -> dict[str, Any]:
    """A run's numbers: entropy in nats, and of its texts at the end; "before": of those before."""
    end, folder = len(lines), folder / "evaluations"
    times = {"start": 1, 40: 40, 80: 80, "end": end}
    times |= {DRIFT: DRIFT} if end >= DRIFT else {}
    found = {f"entropy, {time}": lines[step - 1]["entropy"] for time, step in times.items()}
    found["entropy, highest"] = max(line["entropy"] for line in lines)
    found["before"] = measure_texts(lines[0], folder / "step_000000.jsonl")
    return found | measure_texts(lines[-1], folder / f"step_{end:06d}.jsonl")


def log_odds(percent: float) -> float:
    percent = min(max(percent, 0.01), 99.99)  # finite where nothing or everything is right
    return math.log(percent / (100 - percent))


def differences(runs: Runs, references: Runs) -> Runs:
    """Each run minus the reference's run with the same seed, where there is one.

    A span of steps: the difference of the two accuracies in points. Over steps 10 to 20 also the
    difference of their log-odds, and the ratio of the entropies. "silenced, %" is the run's own.
    """
    found = {}
    for seed in runs.keys() & references.keys():
        run, other = runs[seed], references[seed]
        spans = [key for key in run.keys() & other.keys() if key.startswith("accuracy, ")]
        found[seed] = {key.removeprefix("accuracy, "): run[key] - other[key] for key in spans}
        mine, its = run["accuracy, 10 to 20"], other["accuracy, 10 to 20"]
        found[seed]["log-odds, 10 to 20"] = log_odds(mine) - log_odds(its)
        found[seed]["10 to 20, each seed"] = found[seed]["10 to 20"]
        found[seed]["entropy, ratio"] = run["entropy, 10 to 20"] / other["entropy, 10 to 20"]
        found[seed]["silenced, %"] = run["silenced, %"]
    return found


def minus_reference(groups: list[Group], found: Results) -> dict[str, Runs]:
    """Rows of differences, for all groups but the references themselves."""
    rows = {}
    for group in groups:
        references = found.get(group._replace(name=group.reference).key, {})
        if group.name != group.reference and references:
            rows[group.name] = differences(found[group.key], references)
    return rows


def cell(values: list[float], form: str) -> str:
    """`7.0 ± 0.3`: a mean and its standard error, unless `form` says otherwise."""
    *show, form = form.split()
    if show == ["each"]:
        return " ".join(f"{value:{form}}" for value in values)
    return f"{fmean(values):{form}}" if show else tables.with_error(values, form)


def table(rows: dict[str, Runs], columns: dict[str, str]) -> str:
    """Rows of runs by seed in Markdown; runs that lack a number of the table have no part in it.

    A number that is None in some runs is taken over the others, and their number is shown.
    """
    lines = [tables.head(["", "runs", *columns])]
    for name, by_seed in rows.items():
        runs = [by_seed[seed] for seed in sorted(by_seed)]
        runs = [run for run in runs if columns.keys() <= run.keys()]
        row = [name, len(runs)]
        for key, form in columns.items():
            values = [run[key] for run in runs if run[key] is not None]
            row.append(cell(values, form) if values else "never")
            if 0 < len(values) < len(runs):
                row[-1] += f" ({len(values)} of {len(runs)} runs)"
        lines += [tables.line(row)] if runs else []
    return "\n".join(lines)


# ----------------------------------------------------------------------------------- the pictures

COLOURS = {  # those of figures.py where it has the row
    "STAPO": "#D55E00",
    "JustRL": "#0072B2",
    "wrong answers instead": "#444444",
    "both": "#E69F00",
    "JustRL, eps_high 0.2": "#56B4E9",
    "FullMask": "#CC79A7",
    "random candidates": "#444444",
}


def draw_band(axes: Axes, runs: dict[int, list[dict]], key: str, name: str, **style: str) -> None:
    """A row's mean against the step, in a band from its smallest run to its largest."""
    factor = 1 if key == "entropy" else 100
    every = [run["lines"] for run in runs.values()]
    columns = [[factor * line[key] for line in lines] for lines in zip(*every)]
    steps = range(1, len(columns) + 1)
    axes.plot(steps, [fmean(column) for column in columns], color=COLOURS[name], **style)
    ends = [min(column) for column in columns], [max(column) for column in columns]
    axes.fill_between(steps, *ends, color=COLOURS[name], alpha=0.15, linewidth=0)


def draw_methods(groups: list[Group], found: Results, by_base: dict[str, Runs], file: Path) -> None:
    """Accuracy and entropy of the main rows and the turned rule; the gain against the share."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for group in groups:
        if group.base == "tests/tiny" and group.name in ("STAPO", "JustRL", *TURNED):
            silence = "silence rare tokens of " if group.name in TURNED else ""
            draw_band(left, found[group.key], "accuracy", group.name, label=silence + group.name)
            draw_band(middle, found[group.key], "entropy", group.name)
    for base, runs in by_base.items():
        share = fmean(run["silenced by STAPO, %"] for run in runs.values())
        gains = [-run["10 to 20"] for run in runs.values()]
        error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0
        right.errorbar(share, fmean(gains), yerr=error, fmt="o", color=COLOURS["STAPO"])
        on_its_left = base in ("tests/tiny", "another pre-training")  # the next is near
        place = {"xytext": (-8, -4), "ha": "right"} if on_its_left else {"xytext": (6, -14)}
        right.annotate(base, (share, fmean(gains)), textcoords="offset points", **place)
    left.set(xlabel="step", ylabel="accuracy of the rollouts (%)", ylim=(0, 100))
    middle.set(xlabel="step", ylabel="policy entropy (nats)", ylim=(0, None))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=4)
    right.axhline(0, color="grey", linewidth=0.8)
    right.set(xlabel="silenced share of all tokens (%)")
    right.set(ylabel="STAPO minus JustRL, steps 10 to 20 (points)")
    right.margins(x=0.5, y=0.2)
    figure.savefig(file, dpi=110)


def justrl_by_base(groups: list[Group], found: Results, bases: Sequence[str]) -> dict[str, Runs]:
    """JustRL minus STAPO on each base model, with numbers of the STAPO run of the same seed."""
    rows = {}
    for group in groups:
        if group.name == "JustRL" and group.base in bases:
            references = found.get(group._replace(name="STAPO").key, {})
            runs = differences(found[group.key], references)
            for seed, run in runs.items():
                stapo = references[seed]
                run["STAPO, 10 to 20"] = stapo["accuracy, 10 to 20"]
                run["silenced by STAPO, %"] = stapo["silenced, %"]
                run["candidates in its right answers, %"] = stapo["candidates, %"]
            rows |= {group.base: runs} if runs else {}
    return {base: rows[base] for base in bases if base in rows}


def show(title: str, rows: dict[str, Runs], columns: dict[str, str]) -> None:
    print(f"\n{title}\n\n{table(rows, columns)}")


def report_methods(groups: list[Group], found: Results, output: Path) -> None:
    """The tables and the picture."""
    by_base = justrl_by_base(groups, found, NOISE_LEVELS)
    columns = {
        "candidates in its right answers, %": "mean .1f",
        "silenced by STAPO, %": "mean .2f",
        "STAPO, 10 to 20": ".1f",
    }
    columns |= DIFFERENCES | OF_EARLY | EACH_SEED
    show("JustRL on each base model, minus STAPO", by_base, columns)
    whole = [group for group in groups if group.steps == STEPS and group.base == "tests/tiny"]
    pairs = {g.name: found[g.key] for g in whole if g.name.startswith(("STAPO", "JustRL"))}
    show("STAPO and JustRL on tests/tiny", pairs, LEVELS)
    columns = {"silenced, %": "mean .2f"} | DIFFERENCES | {"entropy, ratio": "mean .2f"} | EACH_SEED
    show("Each row on tests/tiny, minus STAPO", minus_reference(whole, found), columns)
    fast = {name: runs for name, runs in pairs.items() if name.endswith("four times the rate")}
    columns = {"highest accuracy": "each .0f", "lowest after it": "each .0f"}
    columns |= {"entropy at the highest": "each .2f", "entropy, end": "each .2f"}
    show("At the highest rate, seed by seed", fast, columns)
    longer = [group for group in groups if group.steps == LONG]
    spans = ("21 to 40", "81 to 100", "held out")
    columns = {f"accuracy, {span}": ".1f" for span in spans} | {"entropy, 81 to 100": ".3f"}
    show("Longer runs", {g.name: found[g.key] for g in longer}, columns)
    columns = {span: "+.1f" for span in spans}
    show("The second minus the first", minus_reference(longer, found), columns)
    draw_methods(groups, found, by_base, output / "replication.png")


def report_bases(groups: list[Group], found: Results, output: Path) -> None:
    """For each noise level a row for each base model, and one with the error over base models."""
    columns = DIFFERENCES | {"log-odds, 10 to 20": "+.2f", "entropy, ratio": ".2f"}
    for percent, bases in PRETRAININGS.items():
        rows = justrl_by_base(groups, found, bases)
        if rows:
            over = [
                {key: fmean(run[key] for run in runs.values()) for key in columns}
                for runs in rows.values()
            ]
            rows["mean over base models"] = dict(enumerate(over))
            show(f"Noise {percent} %: JustRL minus STAPO", rows, columns)


def report_why(groups: list[Group], found: Results, output: Path) -> None:
    """Every row minus STAPO, or minus STAPO under SGD."""
    show("Why it helps", minus_reference(groups, found), OF_EARLY | EACH_SEED)
    rows = {group.name: found[group.key] for group in groups}
    columns = {f"silenced, 1 to {EARLY}, %": LEVELS["silenced, %"]}  # some runs are longer
    columns |= {name: LEVELS[name] for name in ("accuracy, 10 to 20", "entropy, 10 to 20")}
    show("The rows themselves", rows, columns)


def report_drift(groups: list[Group], found: Results, output: Path) -> None:
    """The tables; entropy of the rows with several seeds and, dashed, of the longer pair."""
    rows = {group.name: found[group.key] for group in groups}
    pooled = {}  # the longer pair is, for its first steps, a seed more of the first two rows
    for name in ("STAPO", "JustRL"):
        pooled[name] = rows.get(name, {}) | rows.get(f"{name}, {LONG_DRIFT} steps", {})
    first = {seed: run["before"] for seed, run in found[groups[0].key].items()}
    texts = {"rare, %": ".2f", "tokens": ".1f", "cut off, %": ".1f", "no box, %": ".1f"}
    texts |= {"answers": ".0f", "right, %": ".1f"}
    entropies = {f"entropy, {time}": ".2f" for time in ("start", 40, 80, "end")}
    show("A reward that says nothing", rows, entropies | texts)
    show("Before it, in the first row", {groups[0].name: first}, texts)
    columns = {f"entropy, {time}": ".2f" for time in ("start", 40, 80, DRIFT)}
    show(f"The first {DRIFT} steps", pooled, columns)
    columns = {"entropy, end": "each .2f", "entropy, highest": "each .2f"}
    columns |= {key: "each .0f" for key in ("tokens", "no box, %", "right, %")}
    show("Seed by seed", rows, columns)
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for group in groups:
        name = group.name.removesuffix(f", {LONG_DRIFT} steps")
        if name in COLOURS:
            style = {"label": group.name, "linestyle": "-" if name == group.name else "--"}
            draw_band(axes, found[group.key], "entropy", name, **style)
    axes.set(xlabel="step", ylabel="policy entropy (nats)", ylim=(0, None))
    figure.legend(loc="outside lower left", ncols=5)
    figure.savefig(output / "drift.png", dpi=110)


class Part(NamedTuple):
    """One of the questions that --only chooses."""

    plan: list[Group]
    short: int  # rows of the plan that --short runs, with two seeds each
    measure: Callable[[list[dict], Path], dict[str, Any]]  # the numbers of a run
    report: Callable[[list[Group], Results, Path], None]  # tables and picture


PARTS = {
    "methods": Part(methods_plan(), len(MAIN | TURNED), measure_methods, report_methods),
    "bases": Part(bases_plan(), 4, measure_methods, report_bases),
    "why": Part(why_plan(), len(MAIN | DOSES), measure_methods, report_why),
    "drift": Part(drift_plan(), 2, measure_drift, report_drift),
}


def report(part: str, output: Path) -> None:
    """Tables and the picture of the runs that are whole."""
    found = {}
    for group in PARTS[part].plan:
        for seed in group.seeds:
            folder = output / f"{group.key}-{seed}"
            lines = read_run(folder, group.steps)
            if lines:
                found.setdefault(group.key, {})[seed] = PARTS[part].measure(lines, folder)
                found[group.key][seed]["lines"] = lines
    groups = [group for group in PARTS[part].plan if group.key in found]
    if groups:
        PARTS[part].report(groups, found, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/replication"))
    parser.add_argument("--only", choices=PARTS, help="one of these parts")
    parser.add_argument("--short", action="store_true", help="two seeds, fewer rows")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each")
    args = parser.parse_args()
    output = args.output.resolve()
    for part in [args.only] if args.only else PARTS:
        plan = PARTS[part].plan
        if args.short:
            plan = [group._replace(seeds=group.seeds[:2]) for group in plan[: PARTS[part].short]]
        try:
            run_all(plan, output, args.jobs)
        finally:
            report(part, output)


if __name__ == "__main__":
    main()
