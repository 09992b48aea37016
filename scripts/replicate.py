"""How much STAPO helps, and when: methods, base models, learning rates and controls, several seeds.

    python scripts/replicate.py --jobs 2            # everything: about two hours on two cores
    python scripts/replicate.py --short --jobs 2    # two seeds of the main rows: ten minutes

A run is `stapo.py @tests/tiny/args` with other flags or on another base model, which make_tiny.py
makes first. Runs that are whole are not run again, and one that was interrupted begins anew: the
same command goes on with what is left, and says how much that is. Prints tables of what is whole,
writes every run's numbers to runs.csv, and draws replication.png and, with figures.py, the paper's
figures 1, 3 and 5 (methods), 6 (ablations) and 7 (tau_p), and the sweep of q.

Two controls turn the paper's rule around: they silence rare tokens of wrong answers instead of
those of right answers, or of both. They are no flags of stapo.py: `--control` of this script
replaces the rule in a process of its own.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
from tqdm import tqdm

matplotlib.use("Agg")  # files only, no display

ROOT = Path(__file__).resolve().parent.parent
STEPS, LONG = 25, 100  # tests/tiny/args has 28
FIRST_SEED = 2  # 0 and 1 chose the settings of tests/tiny
# Base models by their noise: flags of make_tiny.py, where tests/tiny has 8 %.
BASES = {
    "no noise": "--noise 0",
    "noise 1 %": "--noise 0.01",
    "noise 3 %": "--noise 0.03",
    "tests/tiny": "",
    "another pre-training": "--seed 1",
    "noise 12 %": "--noise 0.12",
}


class Group(NamedTuple):
    """Runs that differ in their seed alone: a row of the tables."""

    name: str
    flags: str  # of stapo.py, beside those of tests/tiny/args; or --control for this script
    runs: int  # with seeds FIRST_SEED, FIRST_SEED + 1, ...
    base: str = "tests/tiny"
    steps: int = STEPS
    reference: str = "STAPO"  # the row from which it is compared, seed by seed
    turn: int = 1  # rows of a lower turn run first

    @property
    def seeds(self) -> range:
        return range(FIRST_SEED, FIRST_SEED + self.runs)

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.name if self.base == "tests/tiny" else f"{self.base}: {self.name}"

    @property
    def key(self) -> str:
        """Its name among all groups and, with a seed, that of its run directories."""
        return f"{self.base}-{self.name}".replace("/", "-").replace(" ", "-").replace("%", "pct")


MAIN = {
    "STAPO": "--method stapo",
    "JustRL": "--method justrl",
    "FullMask": "--method full-mask",
}
OTHERS = {
    "random candidates": "--method random",
    "highest entropy": "--method high-entropy",
    "GRPO": "--method grpo",
    "20-Entropy": "--method 20-entropy",
}
CONTROLS = {"wrong answers instead": "--control wrong", "both": "--control both"}
RATES = {"half": "--lr 1.5e-4", "twice": "--lr 6e-4"}  # of tests/tiny/args' 3e-4
SWEEPS = {"tau_p": (0.0005, 0.01, 0.05), "q": (0.25, 0.5, 1.0)}  # defaults: 0.002 and 0.75


def whole_plan(seeds: int) -> list[Group]:
    """Every row of every table."""
    first = {name: flags for name, flags in OTHERS.items() if name != "20-Entropy"}
    plan = [Group(name, flags, seeds, turn=0) for name, flags in (MAIN | CONTROLS | first).items()]
    plan += [Group("20-Entropy", OTHERS["20-Entropy"], seeds, turn=2)]
    for base in [base for base in BASES if base != "tests/tiny"]:
        plan += [Group(name, MAIN[name], seeds, base) for name in ("STAPO", "JustRL")]
        plan += [Group("FullMask", MAIN["FullMask"], seeds, base, turn=2)]
    for rate, flags in RATES.items():
        stapo, justrl = f"STAPO, {rate} the rate", f"JustRL, {rate} the rate"
        plan += [Group(stapo, f"{MAIN['STAPO']} {flags}", seeds, reference=stapo)]
        plan += [Group(justrl, f"{MAIN['JustRL']} {flags}", seeds, reference=stapo)]
    stapo, justrl = f"STAPO, {LONG} steps", f"JustRL, {LONG} steps"
    for name, flags in {stapo: MAIN["STAPO"], justrl: MAIN["JustRL"]}.items():
        plan += [Group(name, flags, min(seeds, 2), steps=LONG, reference=stapo)]
    for flag, values in SWEEPS.items():
        plan += [Group(f"{flag} {x}", f"--{flag} {x}", 1, turn=2) for x in values]
    return plan


def short_plan(seeds: int) -> list[Group]:
    return [Group(name, flags, min(seeds, 2)) for name, flags in (MAIN | CONTROLS).items()]


# ------------------------------------------------------------------------------------- the runs


def quiet_run(command: list[str]) -> None:
    """A Python program on one thread; what it prints is shown where it fails."""
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *command]
    done = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} has failed:\n{done.stderr[-2000:]}")


def base_folder(base: str, output: Path) -> Path:
    return ROOT / base if base == "tests/tiny" else output / "bases" / base.replace(" ", "-")


def make_base(base: str, output: Path) -> None:
    """Pre-train a base model unless it is there; its folder gets its name when it is whole."""
    folder = base_folder(base, output)
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        quiet_run(["scripts/make_tiny.py", "--output", str(partial), *BASES[base].split()])
        partial.rename(folder)


def read_run(folder: Path, steps: int) -> list[dict[str, Any]] | None:
    """The metrics of each step of a whole run, the last with its evaluation's; else None."""
    log = folder / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in log.open()] if log.exists() else []
    except ValueError:  # a line that was torn
        return None
    scores = [line["eval"] for line in lines if line["step"] == steps and line.get("eval")]
    lines = [line for line in lines if "accuracy" in line]
    if len(lines) < steps or not scores:
        return None
    lines[-1]["eval"] = scores[-1]
    return lines


def train(group: Group, seed: int, output: Path) -> None:
    """One run from its beginning, evaluated after its last step on the held-out problems."""
    base, folder = base_folder(group.base, output), output / f"{group.key}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    flags = group.flags.split()
    program = "scripts/replicate.py" if "--control" in flags else "stapo.py"
    where = ["--model", str(base), "--data", str(base / "train.jsonl"), "--output", str(folder)]
    ends = ["--eval_every", str(group.steps), "--eval_benchmarks", str(base / "test.jsonl")]
    files = ["--save_every", "0", "--dump_every", "0", "--log_samples", "0"]
    often = ["--steps", str(group.steps), "--seed", str(seed)]
    quiet_run([program, "@tests/tiny/args", *flags, *where, *ends, *files, *often])


def train_control(whose: str, argv: list[str]) -> None:
    """stapo.main with S2T applied to the rare tokens of wrong answers, or of both."""
    sys.path.insert(0, str(ROOT))
    import stapo

    s2t = stapo.choose_tokens

    def choose_tokens(method: str, logp: Any, advantages: Any, *args: Any, **flags: Any) -> Any:
        # The rule looks at positive advantages: of -A these are the wrong answers, of |A| both.
        seen = -advantages if whose == "wrong" else advantages.abs()
        return s2t(method, logp, seen, *args, **flags)

    stapo.choose_tokens = choose_tokens
    stapo.METHODS["stapo"] = stapo.Method(reads="all", divides_by="kept")
    stapo.main(argv)


def run_all(plan: list[Group], output: Path, jobs: int) -> None:
    """What is left of the plan, `jobs` at a time; a failure ends it when the others have ended.

    Of every turn one seed of each row comes before the next seed, so that the tables of a plan that
    was interrupted have as many rows as they can.
    """
    runs = [(group, seed) for group in plan for seed in group.seeds]
    runs.sort(key=lambda run: (run[0].turn, run[1]))
    left = [(g, s) for g, s in runs if read_run(output / f"{g.key}-{s}", g.steps) is None]
    steps = sum(group.steps for group, _ in left)
    whole = len(runs) - len(left)
    print(f"{whole} of {len(runs)} runs are whole, {steps} steps are left", flush=True)
    bases = dict.fromkeys(group.base for group, _ in left)
    missing = [base for base in bases if not base_folder(base, output).exists()]
    with ThreadPoolExecutor(jobs) as pool, tqdm(total=steps, unit="step") as bar:
        made = {base: pool.submit(make_base, base, output) for base in missing}

        def one(group: Group, seed: int) -> int:
            if group.base in made:
                made[group.base].result()
            train(group, seed, output)
            return group.steps

        # The base models are first in the queue, so that no run waits for one behind it.
        runs = [pool.submit(one, *run) for run in left]
        try:
            for done in as_completed(runs):
                bar.update(done.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)  # those that run end, no other begins
            raise


# ----------------------------------------------------------------------------- numbers and tables

WINDOWS = {"5 to 10": (5, 10), "10 to 20": (10, 20)}  # steps, both ends included


def mean_of(lines: list[dict], key: str, first: int, last: int) -> float:
    return fmean(line[key] for line in lines if first <= line["step"] <= last)


def measure(lines: list[dict]) -> dict[str, float | None]:
    """A run's numbers: accuracies in percent, entropy in nats, shares of tokens in percent.

    silenced: the mean over steps of the share of all tokens; candidates: the share of the tokens of
    right answers in step 1.
    """
    found: dict[str, float | None] = {
        name: 100 * mean_of(lines, "accuracy", *window) for name, window in WINDOWS.items()
    }
    end = lines[-1]["step"]
    found["last five"] = 100 * mean_of(lines, "accuracy", end - 4, end)
    found["held out"] = next(iter(lines[-1]["eval"].values()))["mean"]
    found["entropy"] = mean_of(lines, "entropy", *WINDOWS["10 to 20"])
    found["silenced"] = 100 * mean_of(lines, "silenced_fraction", 1, end)
    found["candidates"] = 100 * (lines[0]["low_prob_fraction"] or 0)
    found["to 80 %"] = next((line["step"] for line in lines if line["accuracy"] >= 0.8), None)
    return found


ACCURACIES = ("5 to 10", "10 to 20", "last five", "held out")


def mean_and_error(values: list[float], digits: int = 1) -> str:
    """`7.0 ± 0.3`: a mean and its standard error."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{error}"


def signed(values: list[float]) -> str:
    text = mean_and_error(values)
    return text if text.startswith("-") else f"+{text}"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


Results = dict[str, dict[int, dict[str, Any]]]  # key of a group -> seed -> what measure found


def level_table(groups: list[Group], found: Results) -> str:
    """What each row reaches: means over its seeds."""
    head = ["", "runs", "silenced, %", *(f"accuracy, {name}" for name in ACCURACIES)]
    head += ["entropy, 10 to 20", "steps to 80 %"]
    rows = []
    for group in groups:
        runs = list(found[group.key].values())
        cells = [f"{fmean(run['silenced'] for run in runs):.2f}"]
        cells += [mean_and_error([run[name] for run in runs]) for name in ACCURACIES]
        cells.append(mean_and_error([run["entropy"] for run in runs], 3))
        reached = [run["to 80 %"] for run in runs if run["to 80 %"]]
        count = "" if len(reached) == len(runs) else f" ({len(reached)} of {len(runs)} runs)"
        cells.append(f"{fmean(reached):.1f}{count}" if reached else "never")
        rows.append([group.label, str(len(runs)), *cells])
    return markdown(head, rows)


def difference_table(groups: list[Group], found: Results) -> str:
    """Each row minus its reference, seed by seed: mean ± standard error, then every seed."""
    head = ["minus its STAPO", *ACCURACIES, "entropy, ratio", "10 to 20, each seed"]
    rows = []
    for group in groups:
        reference = found.get(group._replace(name=group.reference).key, {})
        seeds = sorted(found[group.key].keys() & reference.keys())
        if group.name == group.reference or not seeds:
            continue
        pairs = [(found[group.key][seed], reference[seed]) for seed in seeds]
        differences = {name: [a[name] - b[name] for a, b in pairs] for name in ACCURACIES}
        cells = [signed(values) for values in differences.values()]
        cells.append(f"{fmean(a['entropy'] / b['entropy'] for a, b in pairs):.2f}")
        each = " ".join(f"{value:+.1f}" for value in differences["10 to 20"])
        rows.append([group.label, *cells, each])
    return markdown(head, rows)


def base_table(groups: list[Group], found: Results) -> str:
    """For each base model: its rare tokens, and how far JustRL and FullMask are from STAPO."""
    head = ["base model", "candidates in its right answers, %", "silenced by STAPO, %"]
    head += [
        "STAPO, 10 to 20",
        "JustRL minus STAPO",
        "FullMask minus STAPO",
        "entropy, JustRL / STAPO",
    ]
    rows = []
    for base, runs in by_base(groups, found).items():
        stapo = runs["STAPO"]
        row = [base, f"{fmean(run['candidates'] for run in stapo.values()):.1f}"]
        row.append(f"{fmean(run['silenced'] for run in stapo.values()):.2f}")
        row.append(mean_and_error([run["10 to 20"] for run in stapo.values()]))
        for name in ("JustRL", "FullMask"):
            pairs = [(runs[name][s], stapo[s]) for s in runs.get(name, {}) if s in stapo]
            row.append(signed([a["10 to 20"] - b["10 to 20"] for a, b in pairs]) if pairs else "")
        pairs = [(runs["JustRL"][s], stapo[s]) for s in runs.get("JustRL", {}) if s in stapo]
        row.append(f"{fmean(a['entropy'] / b['entropy'] for a, b in pairs):.2f}" if pairs else "")
        rows.append(row)
    return markdown(head, rows)


def by_base(groups: list[Group], found: Results) -> dict[str, dict[str, dict[int, dict]]]:
    """Base model -> main row -> seed -> numbers, from no noise to the most."""
    made: dict[str, dict] = {base: {} for base in BASES}
    for group in groups:
        if group.name in MAIN:
            made[group.base][group.name] = found[group.key]
    return {base: runs for base, runs in made.items() if "STAPO" in runs}


def best_rates(groups: list[Group], found: Results) -> str:
    """JustRL minus STAPO, seed by seed, each at its best rate: once over each span of steps.

    The best rate is the one with the highest mean over the very steps that are compared, on the
    seeds that all rates have.
    """
    rates = ["", *(f", {rate} the rate" for rate in RATES)]
    names = {method: [method + rate for rate in rates] for method in ("STAPO", "JustRL")}
    tiny = {group.name: found[group.key] for group in groups if group.base == "tests/tiny"}
    tried = {name: tiny.get(name, {}) for row in names.values() for name in row}
    seeds = sorted(set.intersection(*map(set, tried.values())))
    if not seeds:
        return ""
    rows = []
    for span in ACCURACIES:
        means = {name: fmean(tried[name][seed][span] for seed in seeds) for name in tried}
        stapo, justrl = (max(row, key=means.get) for row in names.values())
        differences = [tried[justrl][seed][span] - tried[stapo][seed][span] for seed in seeds]
        rows.append([span, stapo, justrl, signed(differences)])
    return markdown(["accuracy over", "best STAPO", "best JustRL", "JustRL minus STAPO"], rows)


def long_table(groups: list[Group], curves: dict[str, dict[int, list[dict]]]) -> str:
    """Accuracy and entropy of the longer runs, twenty steps at a time."""
    windows = [(first, first + 19) for first in range(1, LONG, 20)]
    head = ["", *(f"{first} to {last}" for first, last in windows)]
    rows = []
    for group in groups:
        runs = curves[group.key].values()
        for key, factor, digits in (("accuracy", 100, 1), ("entropy", 1, 3)):
            cells = [
                mean_and_error([factor * mean_of(run, key, *window) for run in runs], digits)
                for window in windows
            ]
            rows.append([f"{group.name}: {key}", *cells])
    return markdown(head, rows)


# ------------------------------------------------------------------------------------ the picture

COLOURS = {  # those of figures.py where it has the row
    "STAPO": "#D55E00",
    "JustRL": "#0072B2",
    "wrong answers instead": "#444444",
    "both": "#E69F00",
}


def draw(groups: list[Group], found: Results, curves: dict, file: Path) -> None:
    """Accuracy and entropy of the main rows and the controls; the gain against the share."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    tiny = [g for g in groups if g.base == "tests/tiny" and g.name in COLOURS]
    for group in tiny:
        runs = list(curves[group.key].values())
        steps = [line["step"] for line in runs[0]]
        label = group.name if group.name in MAIN else f"silence rare tokens of {group.name}"
        for axes, key, factor in ((left, "accuracy", 100), (middle, "entropy", 1)):
            columns = list(zip(*([factor * line[key] for line in run] for run in runs)))
            colour = COLOURS[group.name]
            axes.plot(steps, [fmean(column) for column in columns], color=colour, label=label)
            ends = [min(c) for c in columns], [max(c) for c in columns]
            axes.fill_between(steps, *ends, color=colour, alpha=0.15, linewidth=0)
    left.set(xlabel="step", ylabel="accuracy of the rollouts (%)", ylim=(0, 100))
    middle.set(xlabel="step", ylabel="policy entropy (nats)", ylim=(0, None))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=4)
    for base, runs in by_base(groups, found).items():
        stapo, justrl = runs["STAPO"], runs.get("JustRL", {})
        seeds = sorted(stapo.keys() & justrl.keys())
        if seeds:
            share = fmean(stapo[s]["silenced"] for s in seeds)
            gains = [stapo[s]["10 to 20"] - justrl[s]["10 to 20"] for s in seeds]
            error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0
            right.errorbar(share, fmean(gains), yerr=error, fmt="o", color=COLOURS["STAPO"])
            on_its_left = base in ("tests/tiny", "another pre-training")  # the next point is near
            place = {"xytext": (-8, -4), "ha": "right"} if on_its_left else {"xytext": (6, -14)}
            right.annotate(base, (share, fmean(gains)), textcoords="offset points", **place)
    right.axhline(0, color="grey", linewidth=0.8)
    right.set(xlabel="silenced share of all tokens (%)")
    right.set(ylabel="STAPO minus JustRL, steps 10 to 20 (points)")
    right.margins(x=0.5, y=0.2)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def draw_paper_figures(plan: list[Group], output: Path, curves: dict) -> None:
    """The paper's own comparisons, from the run directories alone, by figures.py."""
    named = {group.name: group for group in plan if group.base == "tests/tiny"}

    def folders(*names: str) -> list[str]:
        """The runs of these rows, if there is more than one row to compare."""
        groups = [named[name] for name in names if name in named and curves[named[name].key]]
        runs = [str(output / f"{g.key}-{seed}") for g in groups for seed in curves[g.key]]
        return runs if len(groups) > 1 else []

    figures = {
        "methods": folders("GRPO", "20-Entropy", "JustRL", "STAPO", "FullMask"),
        "ablation": folders("STAPO", "highest entropy", "random candidates"),
    }
    for flag, values in SWEEPS.items():
        figures[flag] = folders("STAPO", *(f"{flag} {x}" for x in values))
    for name, runs in figures.items():
        if runs:
            where = ["--smooth", "5", "--output", str(output / f"figures-{name}")]
            quiet_run(["scripts/figures.py", *runs, *where])


def write_csv(groups: list[Group], found: Results, file: Path) -> None:
    """A row for each run: base model, row, seed and what measure found."""
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        for number, group in enumerate(groups):
            for seed, run in found[group.key].items():
                if number == 0 and seed == min(found[group.key]):
                    writer.writerow(["base", "row", "seed", *run])
                writer.writerow([group.base, group.name, seed, *run.values()])


def report(plan: list[Group], output: Path) -> None:
    """Tables, runs.csv and pictures of the runs that are whole."""
    curves: dict[str, dict[int, list[dict]]] = {group.key: {} for group in plan}
    for group in plan:
        for seed in group.seeds:
            lines = read_run(output / f"{group.key}-{seed}", group.steps)
            if lines:
                curves[group.key][seed] = lines
    groups = [group for group in plan if curves[group.key]]
    if not groups:
        return
    found = {k: {s: measure(run) for s, run in runs.items()} for k, runs in curves.items()}
    tiny = [group for group in groups if group.base == "tests/tiny"]
    others = [group for group in groups if group.base != "tests/tiny"]
    for title, rows in {"tests/tiny": tiny, "Other base models": others}.items():
        if rows:
            print(f"\n{title}\n\n{level_table(rows, found)}\n\n{difference_table(rows, found)}")
    print(f"\nBase models\n\n{base_table(groups, found)}")
    rates = best_rates(groups, found)
    if rates:
        print(f"\nEach at its best rate\n\n{rates}")
    long = [group for group in groups if group.steps == LONG]
    if long:
        print(f"\nLonger runs\n\n{long_table(long, curves)}")
    write_csv(groups, found, output / "runs.csv")
    draw(groups, found, curves, output / "replication.png")
    draw_paper_figures(groups, output, curves)


def main() -> None:
    if "--control" in sys.argv:
        place = sys.argv.index("--control")
        whose, rest = sys.argv[place + 1], sys.argv[1:place] + sys.argv[place + 2 :]
        return train_control(whose, rest)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/replication"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="the main rows and controls, 2 seeds")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each")
    args = parser.parse_args()
    output = args.output.resolve()
    plan = short_plan(args.seeds) if args.short else whole_plan(args.seeds)
    output.mkdir(parents=True, exist_ok=True)
    try:
        run_all(plan, output, args.jobs)
    finally:
        report(plan, output)


if __name__ == "__main__":
    main()
