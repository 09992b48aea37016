"""Evaluate a model as in the paper's results table: six benchmarks, two decodings, mean@N.

    python eval.py --model Qwen/Qwen3-1.7B-Base          # the paper's setup, without its verifier
    python eval.py --model M --benchmarks math500 --limit 50 --samples 1 --decoding training
    torchrun --nproc-per-node 8 eval.py --model M
    python scripts/verify.py --folder runs/eval-M        # the paper's verifier, after one of these

An evaluation has four parts. `run`, near the end, calls them:

1. Load the problems of every benchmark: `load_benchmarks`.
2. Sample responses: `sample_suite`. Each rank writes a response to a file of its own when it ends.
3. Grade all responses, even those that were sampled earlier: `grade`, `summarize`.
4. Write samples.jsonl, scores.json and table.md: `results_table`, `details_table`.

After Ctrl-C or a crash the same command goes on with the responses that are there, on any number of
ranks. flags.json beside them says what they were made from. Another model, template, length, seed
or instruction is refused, and so are other problems.
"""

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, Protocol

import torch

import rollout
from reward import Reward, extract_answer, load_reward, reward_all, unbox
from rollout import Model, Tokenizer, encode_prompt
from support import InputError, progress, ranks
from support.data import load_problems
from support.files import (
    append_jsonl,
    check_same,
    fingerprint,
    folder_name,
    markdown,
    read_flags,
    read_jsonl,
    write_jsonl,
    write_whole,
)
from support.flags import check_least, flag, parse_flags
from support.metrics import right
from support.models import check_length, weights_of
from support.ranks import all_list, on_rank_0, rank, world_size
from support.seeds import mix_seed


class Benchmark(NamedTuple):
    """A benchmark, and where it is."""

    key: str
    title: str
    hub: str  # dataset id on the Hugging Face Hub
    split: str
    samples: int  # responses to each problem


BENCHMARKS = (
    Benchmark("aime24", "AIME24", "HuggingFaceH4/aime_2024", "train", 32),
    Benchmark("aime25", "AIME25", "math-ai/aime25", "test", 32),
    Benchmark("amc23", "AMC23", "math-ai/amc23", "test", 32),
    Benchmark("math500", "MATH500", "HuggingFaceH4/MATH-500", "test", 4),
    Benchmark("minerva", "Minerva", "math-ai/minervamath", "test", 4),
    Benchmark("olympiadbench", "OlympiadBench", "math-ai/olympiadbench", "test", 4),
)
Suite = dict[Benchmark, list[dict]]  # the problems of each, as load_problems gives them
DECODINGS = {"training": (1.0, 1.0), "justrl": (0.7, 0.9)}  # temperature and top-p of each


class Key(NamedTuple):
    """The name of one response. Problems and samples are numbered from 0."""

    benchmark: str
    decoding: str
    problem: int
    sample: int


Rows = dict[Key, dict]  # of responses


class SamplingFlags(Protocol):
    """Flags that stapo.py and eval.py share."""

    instruction: str
    max_new_tokens: int
    rollout_batch_size: int
    cuda_graphs: bool
    seed: int


@dataclass
class EvalConfig:
    """All flags of eval.py. The defaults are the paper's setup (appendix), without its verifier."""

    model: str = field(metadata={"help": "Hub id or local folder of a causal LM"})
    benchmarks: list[str] = flag(
        [b.key for b in BENCHMARKS], "names (from the Hub), or files; DIR/aime24.jsonl is AIME24"
    )
    decoding: list[str] = flag(
        list(DECODINGS), "training (1.0,1.0), justrl (0.7,0.9), or temperature,top-p; 0,1: greedy"
    )
    samples: int = flag(0, "responses to each problem (0: the benchmark's own; greedy takes 1)")
    limit: int = flag(0, "number of problems of each benchmark, its first (0: all)")
    max_new_tokens: int = flag(20480, "longest response, in tokens")
    rollout_batch_size: int = flag(256, "most responses decoded at a time on each rank")
    cuda_graphs: bool = flag(True, "replay recorded decoding steps on CUDA; off: --no_cuda_graphs")
    seed: int = flag(0, "seed of the sampling")
    instruction: str = flag(rollout.INSTRUCTION, "text after every problem; may be empty")
    chat_template: str = flag(
        "", "file with a chat template; none: no template; empty: the tokenizer's own"
    )
    reward: str = flag("", "FILE.py:FUNCTION grades all but the six benchmarks: above 0 is right")
    output: str = flag("", "directory of the results (empty: runs/eval-<model>)")


def load_benchmarks(names: list[str], samples: int = 0, whole_rows: bool = False) -> Suite:
    """Load benchmarks by name or from files: {benchmark: problems}. Raises InputError.

    A file with the name of one of the six, such as aime24.jsonl, is that benchmark. With
    `whole_rows` each problem of any other file also has its "row", for a reward of your own.
    """
    known = {benchmark.key: benchmark for benchmark in BENCHMARKS}
    suite: Suite = {}
    for name in names:
        key = Path(name).stem
        if name not in known and not Path(name).suffix:
            raise InputError(f"benchmark {name}: neither a file nor one of {', '.join(known)}")
        if key in [benchmark.key for benchmark in suite]:
            raise InputError(f"benchmark {name}: there is a {key} before it")
        benchmark = known.get(key, Benchmark(key, key, "", "train", 4))
        own_rows = whole_rows and key not in known
        source = benchmark.hub if name in known else name
        problems = load_problems(source, benchmark.split, whole_rows=own_rows, unbox=unbox)
        suite[benchmark._replace(samples=samples or benchmark.samples)] = problems
    return suite


def first_problems(suite: Suite, limit: int) -> Suite:
    """Return the first `limit` problems of each benchmark (0: all)."""
    return {benchmark: problems[: limit or None] for benchmark, problems in suite.items()}


def parse_decodings(texts: list[str]) -> dict[str, tuple[float, float]]:
    """Read the values of --decoding: {value: (temperature, top-p)}. Raises InputError."""
    decodings = {}
    for text in texts:
        match = re.fullmatch(r"(\d*\.?\d+),(\d*\.?\d+)", text)
        pair = tuple(map(float, match.groups())) if match else DECODINGS.get(text)
        if pair is None or not 0 < pair[1] <= 1:
            choices = f"{', '.join(DECODINGS)} or temperature,top-p such as 0.6,0.95"
            raise InputError(f"--decoding {text}: must be {choices}")
        decodings[text] = pair
    return decodings


# ----------------------------------------------------------------------------- sampling and grading


def problems_by_key(suite: Suite, decodings: dict) -> dict[Key, dict]:
    """Return {key: problem} for every response of an evaluation, in the order of the tables.

    decodings: {name: (temperature, top-p)}, here and in the functions below.
    """
    return {
        Key(benchmark.key, decoding, number, sample): problem
        for decoding, (temperature, _) in decodings.items()
        for benchmark, problems in suite.items()
        for number, problem in enumerate(problems)
        for sample in range(benchmark.samples if temperature else 1)  # greedy ones are all alike
    }


def sample_suite(
    model: Model,
    tokenizer: Tokenizer,
    problems: dict[Key, dict],
    decodings: dict[str, tuple[float, float]],
    cfg: SamplingFlags,
) -> Iterator[tuple[Key, dict]]:
    """Sample a response for each of this rank's keys, and yield (key, row) when it ends.

    problems: {key: problem} of all ranks. A response depends only on its key and the flags, not on
    the number of ranks or an interruption, unless `sample` leaves its model to plain `generate`.
    Raises InputError if a response can outgrow the model.
    """
    for decoding, (temperature, top_p) in decodings.items():
        # Ranks share by problem, so that the samples of a problem share its prefill.
        keys = [key for key in problems if key.decoding == decoding]
        mine = set(sorted({(key.benchmark, key.problem) for key in keys})[rank() :: world_size()])
        keys = [key for key in keys if (key.benchmark, key.problem) in mine]
        prompts = [
            encode_prompt(tokenizer, problems[key]["problem"], cfg.instruction) for key in keys
        ]
        longest = max(all_list(max(map(len, prompts), default=0)))
        check_length(model.config, longest, cfg.max_new_tokens)
        for index, response in rollout.sample(
            model,
            tokenizer,
            prompts,
            max_new_tokens=cfg.max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            batch_size=cfg.rollout_batch_size,
            cuda_graphs=cfg.cuda_graphs,
            seed=[mix_seed(cfg.seed, *key) for key in keys],
            progress=f"{decoding} decoding",
        ):
            row = {
                "length": len(response.ids),  # tokens, the stop id included
                "truncated": response.truncated,
                "response": response.text,
            }
            yield keys[index], row


def grade(sampled: Rows, problems: dict[Key, dict], reward: Reward) -> Rows:
    """Grade all responses: {key: row}, in the order of `problems`, {key: problem}.

    sampled: the rows of all ranks. Each rank grades a share of them, and gets all. Raises
    InputError if a reward of your own fails.
    """
    share = list(problems)[rank() :: world_size()]
    texts = [sampled[key]["response"] for key in share]
    infos = [
        {"tokens": sampled[key]["length"], "truncated": sampled[key]["truncated"]} for key in share
    ]
    asked = [problems[key] for key in share]
    mine = ranks.together(lambda: reward_all(reward, texts, asked, infos))
    values = all_rows(dict(zip(share, mine)))
    rows = {}
    for key, problem in problems.items():
        row = sampled[key]
        rows[key] = {
            "question": problem["problem"],
            "gold": problem["answer"],
            "answer": extract_answer(row["response"]),
            "correct": right(values[key]),
            "reward": values[key],
            **row,
        }
    return rows


def evaluate(
    model: Model, tokenizer: Tokenizer, suite: Suite, cfg: SamplingFlags, reward: Reward
) -> tuple[dict[str, dict], list[dict]]:
    """Evaluate a model during training, under the training decoding.

    Returns ({benchmark: scores}, rows of all responses) on every rank.
    """
    decodings = {"training": DECODINGS["training"]}
    problems = problems_by_key(suite, decodings)
    sampled = dict(sample_suite(model, tokenizer, problems, decodings, cfg))
    rows = grade(all_rows(sampled), problems, reward)
    return summarize(rows)["training"], [key._asdict() | row for key, row in rows.items()]


def all_rows(mine: dict[Key, Any]) -> dict[Key, Any]:
    """Merge the dicts of all ranks. Every rank gets the result."""
    return {key: row for each in all_list(mine) for key, row in each.items()}


# ------------------------------------------------------------------------------------------ scores


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the chance in percent that of k samples at least one is right.

    The k samples are drawn from n samples, of which `right` are right. The chance is
    1 - C(n - right, k) / C(n, k). It is rounded once: with k = 1 it equals 100 * right / n.
    """
    subsets = math.comb(n, k)
    return 100 * (subsets - math.comb(n - right, k)) / subsets


def accuracy(rights: list[list[bool]]) -> dict:
    """Compute mean@N, its standard error over problems, and pass@k, all in percent.

    rights: for each problem of a benchmark, whether each of its N responses is right. With a single
    problem the standard error is None.
    """
    n = len(rights[0])
    counts = [sum(each) for each in rights]
    rates = [100 * count / n for count in counts]
    ks = sorted({2**i for i in range(n.bit_length())} | {n})  # 1, 2, 4, ... and N
    return {
        "mean": fmean(rates),
        "standard_error": stdev(rates) / len(rates) ** 0.5 if len(rates) > 1 else None,
        "pass_at_k": {k: fmean(pass_at_k(n, count, k) for count in counts) for k in ks},
    }


def summarize(rows: Rows) -> dict[str, dict[str, dict]]:
    """Return the scores {decoding: {benchmark: summary}}.

    A summary has accuracies in percent, lengths in tokens, and fractions from 0 to 1.
    """
    groups: dict[tuple[str, str], dict[int, list[dict]]] = {}  # problem -> its responses
    for key, row in rows.items():
        group = groups.setdefault((key.decoding, key.benchmark), {})
        group.setdefault(key.problem, []).append(row)
    scores: dict[str, dict[str, dict]] = {}
    for (decoding, name), group in groups.items():
        rights = [[row["correct"] for row in responses] for responses in group.values()]
        of_all = [row for responses in group.values() for row in responses]
        scores.setdefault(decoding, {})[name] = accuracy(rights) | {
            "problems": len(rights),
            "samples": len(rights[0]),
            "reward": fmean(row["reward"] for row in of_all),
            "response_length": fmean(row["length"] for row in of_all),
            "truncated_fraction": fmean(row["truncated"] for row in of_all),
            "no_box_fraction": fmean(row["answer"] is None for row in of_all),
        }
    return scores


# ------------------------------------------------------------------------------------------ tables


def results_table(model: str, grader: str, suite: Suite, scores: dict) -> str:
    """Write the paper's table in Markdown: mean@N in percent, later decodings in brackets."""

    def cell(values: tuple[str, ...]) -> str:
        return values[0] + (f" ({', '.join(values[1:])})" if values[1:] else "")

    lines = []  # for each decoding: the mean of each benchmark, and the mean of these
    for by_benchmark in scores.values():
        means = [by_benchmark[benchmark.key]["mean"] for benchmark in suite]
        lines.append([f"{mean:.2f}" for mean in [*means, fmean(means)]])
    header = ["model", "decoding", "graded by", *(b.title for b in suite), "mean"]
    cells = [cell(column) for column in zip(*lines, strict=True)]
    return markdown([header, [model, cell(tuple(scores)), grader, *cells]])


def details_table(suite: Suite, scores: dict) -> str:
    """Write the details in Markdown: a row for each benchmark and decoding."""
    lines = []
    for decoding in scores:
        for benchmark in suite:
            summary = scores[decoding][benchmark.key]
            lines.append(
                {
                    "benchmark": benchmark.title,
                    "decoding": decoding,
                    "problems x samples": f"{summary['problems']} x {summary['samples']}",
                    "mean@N": progress.with_error(summary, digits=2),
                    "pass@N": f"{summary['pass_at_k'][summary['samples']]:.2f}",
                    "tokens": f"{summary['response_length']:.1f}",
                    "truncated": f"{summary['truncated_fraction']:.1%}",
                    "no box": f"{summary['no_box_fraction']:.1%}",
                }
            )
    return markdown([list(lines[0]), *(list(line.values()) for line in lines)])


# -------------------------------------------------------------------------------------------- main


def load(name: str, chat_template: str = "") -> tuple[Model, Tokenizer]:
    """Load a model and its tokenizer: in bfloat16 on this rank's GPU, in float32 on a CPU."""
    device = ranks.device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return rollout.load_model(name, dtype, device), rollout.load_tokenizer(name, chat_template)


def what_decides(cfg: EvalConfig, tokenizer: Tokenizer, suite: Suite, decodings: dict) -> dict:
    """Return what responses are made from: {name: value}. Equal values give equal responses."""
    made_from = {
        "--max_new_tokens": cfg.max_new_tokens,
        "--seed": cfg.seed,
        "--model": weights_of(cfg.model),
        "--instruction": cfg.instruction,
        "--chat_template": fingerprint(tokenizer.chat_template),
    }
    for benchmark, problems in suite.items():  # without the answers: one may be mended
        texts = fingerprint([problem["problem"] for problem in problems])
        made_from[f"benchmark {benchmark.key}"] = texts
    return made_from | {f"--decoding {name}": list(pair) for name, pair in decodings.items()}


def read_responses(*files: Path) -> Rows:
    """Read the lines of responses, or of graded ones: {key: row without the key}."""
    rows = {}
    for file in files:
        for row in read_jsonl(file):
            rows[Key(*(row.pop(name) for name in Key._fields))] = row
    return rows


def open_folder(
    folder: Path, cfg: EvalConfig, tokenizer: Tokenizer, suite: Suite, decodings: dict
) -> Rows:
    """Return the responses that are in the folder, and write flags.json beside them.

    Raises InputError if they were made from something else, or if other files are there alone.
    """
    document, now = read_flags(folder), what_decides(cfg, tokenizer, suite, decodings)
    rows = read_responses(*folder.glob("responses.rank*.jsonl"))
    # A command that was refused has left flags and no responses.
    before = document["made_from"] if rows else {}
    check_same(folder, now | before, now, "responses that were made")  # other benchmarks may come
    document = {"flags": asdict(cfg), "made_from": before | now}
    write_whole(folder / "flags.json", json.dumps(document, indent=2) + "\n")
    return rows


def run(cfg: EvalConfig) -> None:
    """Sample, grade, write and print. Raises InputError."""
    check_least(cfg, samples=0, limit=0, max_new_tokens=1, rollout_batch_size=1)
    decodings, reward = parse_decodings(cfg.decoding), load_reward(cfg.reward)
    suite = load_benchmarks(cfg.benchmarks, cfg.samples, bool(cfg.reward))
    # Whole, because a reward may change the directory.
    folder = Path(cfg.output or f"runs/eval-{folder_name(cfg.model)}").resolve()
    model, tokenizer = load(cfg.model, cfg.chat_template)
    # What is stored is read before any rank appends.
    rows = on_rank_0(lambda: open_folder(folder, cfg, tokenizer, suite, decodings))
    problems = problems_by_key(first_problems(suite, cfg.limit), decodings)
    missing = {key: problem for key, problem in problems.items() if key not in rows}
    file = folder / f"responses.rank{rank()}.jsonl"
    with file.open("a") as lines:
        lines.write("\n")  # ends a line that a crash tore
    sampled = {}
    for key, row in sample_suite(model, tokenizer, missing, decodings, cfg):
        append_jsonl(file, [key._asdict() | row])
        sampled[key] = row
    rows = grade(rows | all_rows(sampled), problems, reward)
    scores = summarize(rows)
    if rank() == 0:
        grader = f"{cfg.reward} (the six: rule)" if cfg.reward else "rule"
        text = results_table(cfg.model, grader, suite, scores)
        text += "\n" + details_table(suite, scores)
        write_jsonl(folder / "samples.jsonl", [key._asdict() | row for key, row in rows.items()])
        write_whole(folder / "table.md", text)
        (folder / "verified.md").unlink(missing_ok=True)  # of the verifier, from earlier rows
        document = {"flags": asdict(cfg), "scores": scores}
        write_whole(folder / "scores.json", json.dumps(document, indent=2) + "\n")
        progress.say(f"\n{text}\nresults in {folder}")


def main(argv: list[str] | None = None) -> None:
    with ranks.session("eval.py"):
        cfg = parse_flags(EvalConfig, __doc__.split("\n")[0], argv, program="eval.py")
        progress.quiet_libraries()
        progress.report_environment()
        try:
            run(cfg)
        except KeyboardInterrupt:
            progress.log("eval.py: interrupted; the same command goes on with what it has")
            sys.exit(130)


if __name__ == "__main__":
    main()
