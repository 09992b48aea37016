"""What tokens are worth: Q - V of rare tokens, on the tiny model and on SmolLM2-135M.

    python experiments/credit.py --model FOLDER --jobs 2    # the runs and the tables: four hours
    python experiments/credit.py --only tiny --jobs 2       # a part: half an hour
    python experiments/credit.py --table --only tiny --figure docs/credit.png

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
from credit import estimate  # noqa: E402  # of scripts/credit.py

TINY = "--q 0.5 --continuations 24 --batches 200"
BEFORE = f"{TINY} --tokens 300 --controls 150 --seed 400"
SMOLLM2 = """--q 0.5 --continuations 16 --batch_size 64 --batches 8 --tokens 10000 --controls 60
    --answered scripts/rewards.py:has_answer"""
RECIPE = "@recipes/smollm2-135m-cpu --model {model}"
TRAINING = f"{RECIPE} --eval_every 0 --log_samples 0 --steps 3 --method justrl"
FEWEST = 40  # tokens in each seed, for an interval over the seeds
NEAR_0 = 0.05


class State(NamedTuple):
    """A model, and the flags with which scripts/credit.py measures its tokens."""

    row: str
    seed: int  # of the training, or before training of the sampling
    flags: str


def list_states(part: str, output: Path) -> list[State]:
    """The states of a part, in the order of the protocol. The runs that they need are in folders."""
    if part == "SmolLM2":
        found = [State("SmolLM2, before training", 309, f"{RECIPE} {SMOLLM2} --seed 309")]
        for run in SMOLLM2_RUNS:
            flags = f"{run.folder(output)}/checkpoints/step_000003 {SMOLLM2}"
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


TINY_RUNS = [run for run in signs.RUNS if run.row in ("STAPO", "JustRL")]
SMOLLM2_RUNS = runs.list_runs({"SmolLM2 JustRL": ("", range(303, 309))}, TRAINING, "", "")
NOISE = (1, 12)  # %

if __name__ == "__main__":
    parts = {name: Part([], lambda lines: "") for name in ("tiny", "SmolLM2")}
    parser = runs.make_parser(__doc__, parts)
    parser.add_argument("--output", type=Path, default=Path("runs/credit"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    args = parser.parse_args()
    made: Lines = []
    if not args.table:
        for part in [args.only] if args.only else parts:
            made += measure_all(part, args.output.resolve(), args.jobs, args.model)
    import json
    args.results.write_text("".join(json.dumps(line) + "\n" for line in made))
