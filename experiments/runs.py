"""What the experiments share: runs of stapo.py become lines of a file, and these lines tables.

`main` makes the runs that are not there yet. It writes a line for each run into
experiments/results/NAME.jsonl: flags, seed, processor, versions, numbers, curves, and when and from
which commit the run began. All tables are made from these lines alone. They are printed, and
written into NAME.md beside the lines:

    python experiments/NAME.py            # makes the runs, then the tables
    python experiments/NAME.py --table    # makes the tables

A run whose folder is there is not made again. A run that was stopped is continued.
"""

import argparse
import inspect
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tests" / "tiny"
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
from support import installed  # noqa: E402
from support.files import markdown  # noqa: E402

METHODS = {  # the names in the tables
    "STAPO": "stapo",
    "JustRL": "justrl",
    "FullMask": "full-mask",
    "random candidates": "random",
    "highest entropy": "high-entropy",
}
# By the number of runs: half a 95 % interval in standard errors (Student).
T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
T_95 |= {11: 2.228, 12: 2.201, 13: 2.179, 14: 2.160, 15: 2.145, 16: 2.131, 17: 2.120, 18: 2.110}
T_95 |= {19: 2.101, 20: 2.093, 32: 2.040}


class Run(NamedTuple):
    """A run of stapo.py, and an evaluation of its last checkpoint in the paper's two decodings."""

    row: str  # of the table: the runs of a row differ in their seed alone
    seed: int
    flags: str  # without --seed and --output; {base} stands for the folder of `base`
    base: str  # the program and flags that make what it begins from, {seed} in them; "": tests/tiny
    evaluation: str  # flags of eval.py without --model and --output
    program: str = "stapo.py"

    def folder(self, output: Path) -> Path:
        return named(f"{self.row}-{self.seed}", output)

    def whole_base(self) -> str:
        return self.base.replace("{seed}", str(self.seed))


class Part(NamedTuple):
    """Runs, the function that makes their tables, and the one that draws their picture."""

    runs: list[Run]
    report: Callable[[list[dict]], str]
    figure: Callable[[list[dict], Path], None] | None = None


def list_runs(
    rows: dict[str, tuple[str, Sequence[int]]], flags: str, base: str, evaluation: str
) -> list[Run]:
    """Runs of these rows, seed by seed. A row has flags of its own, and seeds."""
    found = []
    for row, (more, seeds) in rows.items():
        found += [Run(row, seed, f"{flags} {more}", base, evaluation) for seed in seeds]
    return sorted(found, key=lambda run: run.seed)


def named(text: str, output: Path) -> Path:
    return output / re.sub(r"[^\w.]+", "-", text)


# ------------------------------------------------------------------------------------ making runs


def make(program: str, folder: Path, evaluation: str = "") -> None:
    """Run a program of this project, unless the folder for its --output is there.

    The folder gets its name when the program and the evaluation have ended. After an evaluation the
    checkpoints are deleted.
    """
    if folder.exists():
        return
    partial = folder.with_name(f"{folder.name}.partial")
    words = shlex.split(program)
    if list(partial.glob("checkpoints/step_*")):  # it was stopped
        first_flag = next(i for i, word in enumerate(words) if word.startswith(("@", "-")))
        call([*words[:first_flag], "--resume", partial])
    else:
        shutil.rmtree(partial, ignore_errors=True)
        note_beginning(folder)
        call([*words, "--output", partial])
    if evaluation:
        model, results = max(partial.glob("checkpoints/step_*")), partial / "held-out"
        call(["eval.py", *shlex.split(evaluation), "--model", model, "--output", results])
        shutil.rmtree(partial / "checkpoints")
    partial.rename(folder)


def circumstances() -> dict[str, Any]:
    """The processor, the versions, the commit that is checked out, and the time (UTC)."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.exists() else ""
    found = re.search(r"model\s*: (\d+)\s*model name\s*: (.*)", text)
    command = "git rev-parse --short=10 HEAD"
    said = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    return {
        "processor": f"{found[2].strip()}, model {found[1]}" if found else platform.processor(),
        "versions": installed(),
        "commit": said.stdout.strip(),
        "began": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
    }


def note_of(folder: Path) -> Path:
    """A run's beginning is noted beside its folder, because the folder must begin empty."""
    return folder.with_name(f".{folder.name}.began")


def note_beginning(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    note_of(folder).write_text(json.dumps(circumstances()))


def beginning(folder: Path) -> dict[str, Any]:
    note = note_of(folder)
    return json.loads(note.read_text()) if note.exists() else {}


def call(program: list[str | Path]) -> None:
    """Run a program and its flags with one thread."""
    command = [sys.executable, *map(str, program)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} has failed:\n{done.stderr[-2000:]}")


def make_all(runs: Sequence[Run], output: Path, jobs: int, model: str) -> None:
    """Make what is not there yet, `jobs` at a time: first what runs begin from, then the runs."""
    bases = {base: named(base, output) if base else TINY for base in map(Run.whole_base, runs)}

    def make_base(base: str) -> None:
        make(base.replace("{model}", model), bases[base])

    def make_run(run: Run) -> None:
        base = shlex.quote(str(bases[run.whole_base()]))
        program = f"{run.program} {run.flags} --seed {run.seed}".replace("{base}", base)
        evaluation = run.evaluation.replace("{base}", base)
        make(program.replace("{model}", model), run.folder(output), evaluation)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(make_base, bases))
            list(tqdm(pool.map(make_run, runs), total=len(runs), unit="run"))
        except BaseException:  # Ctrl-C has reached the runs, too: they save and end
            pool.shutdown(cancel_futures=True)
            raise


# ---------------------------------------------------------------------------------- reading runs


def read_rows(file: Path) -> list[dict]:
    """The lines of a .jsonl file. None may be torn: the file of results is written anew."""
    return [json.loads(line) for line in file.open()]


def read_metrics(folder: Path) -> list[dict]:
    """A run's metrics of each step."""
    return [line for line in read_rows(folder / "metrics.jsonl") if "accuracy" in line]


def held_out(folder: Path) -> dict[str, float]:
    """The accuracy of a run's last checkpoint on the held-out problems, in %, by its decoding."""
    scores = json.loads((folder / "held-out" / "scores.json").read_text())["scores"]
    names = {"training": "held out at T = 1", "justrl": "held out at T = 0.7"}
    return {name: next(iter(scores[key].values()))["mean"] for key, name in names.items()}


def mean_of(lines: list[dict], key: str) -> float:
    """The mean of a metric over the lines of some steps; steps with null are left out."""
    return fmean(line[key] for line in lines if line[key] is not None)


def line(
    row: str, seed: int, numbers: dict[str, float | None], began: dict[str, Any]
) -> dict[str, Any]:
    """A line of the results: a run's numbers, and the circumstances in which it began."""
    shown = {name: short(value) for name, value in numbers.items()}
    return {"row": row, "seed": seed, **began, "numbers": shown}


def short(value: float | None) -> float | None:
    return value if value is None else float(f"{value:.5g}")


# ----------------------------------------------------------------------------------------- tables

Lines = list[dict[str, Any]]  # of a results file
Measure = Callable[[Path], dict[str, Any]]  # from a run's folder to its numbers
Runs = dict[Any, dict[str, Any]]  # seed -> numbers of the run, by their column
Rows = dict[Any, Runs]


def rows_of(lines: Lines) -> Rows:
    """The numbers of the runs in a results file."""
    rows: Rows = {}
    for line in lines:
        rows.setdefault(line["row"], {})[line["seed"]] = line["numbers"]
    return rows


def minus(mine: Runs, other: Runs, columns: Iterable[str]) -> Runs:
    """The numbers of a row's runs minus those of another row's, paired by the seed."""
    found: Runs = {}
    for seed in sorted(mine.keys() & other.keys()):
        pairs = {key: (mine[seed][key], other[seed][key]) for key in columns}
        found[seed] = {key: None if None in (a, b) else a - b for key, (a, b) in pairs.items()}
    return found


def cell(values: list[float], form: str) -> str:
    """`7.0 ± 0.3`: the mean and its standard error. `form` is a format such as `.1f` or `+.1f`.

    `mean .1f` is the mean, `each .1f` all values, `95 .1f` the mean and its 95 % interval. `ratio
    .2f` shows logarithms as the ratio that they mean: the geometric mean and its 95 % interval.
    """
    *show, form = form.split()
    if show == ["each"]:
        return " ".join(f"{value:{form}}" for value in values)
    mean = fmean(values)
    scale = math.exp if show == ["ratio"] else float
    if show == ["mean"] or len(values) == 1:
        return f"{scale(mean):{form}}"
    error = stdev(values) / len(values) ** 0.5
    if show in (["95"], ["ratio"]):
        half = T_95[len(values)] * error
        low, high = scale(mean - half), scale(mean + half)
        return f"{scale(mean):{form}} ({low:{form}} to {high:{form}})"
    return f"{mean:{form}} ± {error:{form.removeprefix('+')}}"


def table(columns: dict[str, str], rows: Rows) -> str:
    """`columns` are the numbers to show of each run, and how `cell` shows them.

    A number that is None in some runs is taken over the others.
    """
    shown: list[list[object]] = [["", "n", *columns]]
    for row, runs in [(row, runs) for row, runs in rows.items() if runs]:
        shown.append([row, len(runs)])
        for key, form in columns.items():
            values = [runs[seed][key] for seed in sorted(runs) if runs[seed][key] is not None]
            some = f" ({len(values)} of {len(runs)})" if 0 < len(values) < len(runs) else ""
            shown[-1].append(cell(values, form) + some if values else "never")
    return markdown(shown).rstrip()


def p_value(values: Sequence[float]) -> float:
    """Student's two-sided test of mean 0: the paired test, where values are paired differences."""
    n = len(values)
    if n < 2 or stdev(values) == 0:
        return 1.0
    t = fmean(values) / (stdev(values) / n**0.5)
    # With x = sqrt(n - 1) tan(a), the density of Student's distribution is cos(a)^(n - 2).
    grid = [math.pi / 2 * (i + 0.5) / 20_000 for i in range(20_000)]
    inside = sum(math.cos(a) ** (n - 2) for a in grid if a < math.atan(abs(t) / (n - 1) ** 0.5))
    return max(0.0, 1 - inside / sum(math.cos(a) ** (n - 2) for a in grid))


def resolved(columns: Sequence[str], rows: Rows) -> str:
    """Which differences have p < 0.05: after Holm's correction over the table's tests, and alone.

    The correction leaves out identical runs and rows of fewer than five runs: they rarely resolve
    anything among many tests, and make the other tests stricter.
    """
    tests = {}
    for row, key in [(row, key) for row in rows for key in columns]:
        values = [run[key] for run in rows[row].values()]
        if any(values):
            tests[row, key] = p_value(values)
    ranked = sorted((test for test in tests if len(rows[test[0]]) >= 5), key=tests.get)
    fails = (i for i, test in enumerate(ranked) if tests[test] >= 0.05 / (len(ranked) - i))
    passed = ranked[: next(fails, len(ranked))]
    alone = [test for test in tests if tests[test] < 0.05 and test not in passed]
    names = "; ".join(f"{row} ({key})" for row, key in passed) or "none"
    text = f"{len(ranked)} paired tests, corrected by Holm: p < 0.05 in {names}."
    names = "; ".join(f"{row} ({key}: {tests[row, key]:.3f})" for row, key in alone)
    return f"{text} Alone, also in {names}." if alone else text


def differences(columns: dict[str, str], gaps: Rows, tested: Sequence[str]) -> str:
    """A table of paired differences, and which of the `tested` are resolved."""
    return f"{table(columns, gaps)}\n\n{resolved(tested, gaps)}"


# --------------------------------------------------------------------------------------- pictures

Curves = dict[str, dict[float, list[float]]]  # label -> x -> a value of each run


def by_step(lines: Lines, row: str, key: str, unit: float = 1) -> dict[float, list[float]]:
    """A curve of `draw`: a metric of a row's runs by the step."""
    series = [[unit * x for x in line["steps"][key]] for line in lines if line["row"] == row]
    return {step: list(values) for step, values in enumerate(zip(*series), 1)}


def draw(file: Path, panels: dict[str, Curves], x_label: str) -> None:
    """Draw means over runs, with bands from the lowest to the highest run; panels by the title.

    A method has its colour of scripts/figures.py, also with a setting behind a comma in its label.
    A second line of a method is dashed.
    """
    import figures
    from matplotlib.figure import Figure

    colors = {name: figures.METHODS[method][1] for name, method in METHODS.items()}
    picture = Figure(figsize=(2.2 * len(panels), 2.5), layout="constrained")
    lines: dict[str, Any] = {}  # by the label
    for place, (title, curves) in enumerate(panels.items(), start=1):
        axis = picture.add_subplot(1, len(panels), place)
        for label, curve in curves.items():
            xs, runs = list(curve), list(curve.values())
            color = colors[label.partition(",")[0]]
            style = "--" if color in [line.get_color() for line in axis.lines] else "-"
            means = [fmean(values) for values in runs]
            (lines[label],) = axis.plot(xs, means, color=color, linestyle=style)
            low, high = [min(values) for values in runs], [max(values) for values in runs]
            axis.fill_between(xs, low, high, color=color, alpha=0.2, lw=0)
        axis.set_title(title, fontsize="medium")
        axis.set_xlabel(x_label)
    picture.legend(lines.values(), lines, loc="outside lower center", ncols=len(panels))
    picture.savefig(file, dpi=200)


# ------------------------------------------------------------------------------------------- main


def make_parser(doc: str, parts: Iterable[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--only", choices=parts, help="one of these parts")
    parser.add_argument("--seeds", type=int, nargs="+", help="in place of the seeds of each row")
    parser.add_argument("--table", action="store_true", help="make no runs")
    parser.add_argument("--figure", type=Path, help="draw the picture of --only into this file")
    committed = ROOT / "experiments" / "results" / f"{Path(sys.argv[0]).stem}.jsonl"
    parser.add_argument("--results", type=Path, default=committed, help="file of the lines")
    return parser


def by_run(lines: Lines) -> dict[tuple[str, int], Lines]:
    """The lines of each row and seed: one for a run, or many for the tokens of a model."""
    found: dict[tuple[str, int], Lines] = {}
    for line in lines:
        found.setdefault((line["row"], line["seed"]), []).append(line)
    return found


def finish(args: argparse.Namespace, made: Lines, parts: dict[str, Part]) -> None:
    """Put the lines that were made into the file of results, and make the tables of all lines.

    The tables of all parts are written into a page beside the lines, and those of --only printed.
    """
    stored = read_rows(args.results) if args.results.exists() else []
    lines = sum((by_run(stored) | by_run(made)).values(), [])
    if made:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        args.results.write_text(text)
    program = Path(sys.argv[0]).name
    page = [f"# Tables of {program}\n\n`experiments/{program} --table` writes this page."]
    page[0] += " ± is one standard error, brackets are 95 % intervals."
    for name, part in parts.items():
        tables = part.report(lines)
        page += [f"## {name}", inspect.getdoc(part.report), tables]
        if args.only in (None, name):
            print(tables, end="\n\n")
    args.results.with_suffix(".md").write_text("\n\n".join(page) + "\n")
    if args.figure:
        parts[args.only].figure(lines, args.figure)


def parse_args(doc: str, parts: Iterable[str]) -> argparse.Namespace:
    """The command line of a program that makes runs. `made` are the parts whose runs are made."""
    parser = make_parser(doc, parts)
    output = Path("runs", Path(sys.argv[0]).stem)
    parser.add_argument("--output", type=Path, default=output, help="folder of the runs")
    parser.add_argument("--limit", type=int, help="only the first so many runs of each part")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each")
    parser.add_argument("--more", default="", help="more flags of a run, to try a smaller one")
    model = "HuggingFaceTB/SmolLM2-135M-Instruct"
    parser.add_argument("--model", default=model, help="of SmolLM2: Hub id or folder")
    args = parser.parse_args()
    args.output = args.output.resolve()
    args.made = [] if args.table else [args.only] if args.only else list(parts)
    return args


def main(doc: str, measure: Measure, curves: Sequence[str], parts: dict[str, Part]) -> None:
    """Make runs, and their tables. `curves` are the metrics of which every step is kept."""
    args, made = parse_args(doc, parts), []
    output = args.output
    for name in args.made:
        runs = parts[name].runs
        if args.seeds:
            rows = {run.row: run for run in runs}
            runs = [run._replace(seed=seed) for seed in args.seeds for run in rows.values()]
        runs = [run._replace(flags=f"{run.flags} {args.more}") for run in runs[: args.limit]]
        make_all(runs, output, args.jobs, args.model)
        for run in runs:
            folder = run.folder(output)
            if folder.exists():
                steps = read_metrics(folder)
                kept = {name: [short(step.get(name)) for step in steps] for name in curves}
                numbers = line(run.row, run.seed, measure(folder), beginning(folder))
                flags = {"flags": " ".join(run.flags.split()), "base": run.whole_base()}
                made.append(numbers | flags | {"steps": kept})
    finish(args, made, parts)
