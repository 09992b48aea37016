"""The paper's results table for any checkpoint: six benchmarks, two decodings, mean@N.

    python eval.py --model Qwen/Qwen3-1.7B-Base                              # the paper's setup
    python eval.py --model M --benchmarks math500 --limit 50 --samples 1     # a quick look
    torchrun --nproc-per-node 8 eval.py --model M --verifier opencompass/CompassVerifier-3B

Read from top to bottom: flags and benchmarks, the journal that lets a long run survive, sampling
and grading, the verifier, scores, tables, main. --output receives samples.jsonl (every response
with its verdict), scores.json and table.md.

Ctrl-C and SIGTERM end it within a few tokens, with exit status 130: there is no table yet. Every
response that had ended is in the journal, and the same command continues there, on any number of
ranks. So it is after a crash.
"""

import contextlib
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, BinaryIO, NamedTuple

import torch

import rollout
from reward import extract_answer, is_correct
from rollout import Model, Response, Tokenizer, encode_prompt, load_problems
from support import distributed, progress
from support.bookkeeping import Parser, Stopped, fingerprint, flag, stop
from support.distributed import rank, world_size
from support.errors import InputError
from support.seeds import mix_seed


class Benchmark(NamedTuple):
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
DECODINGS = {"training": (1.0, 1.0), "justrl": (0.7, 0.9)}  # temperature, top-p
Suite = dict[Benchmark, list[dict[str, str]]]  # the problems of each, as load_problems gives them


@dataclass
class Config:
    """Every flag; the defaults are the paper's evaluation setup (appendix)."""

    model: str = field(metadata={"help": "Hub id or local folder of a causal LM"})
    benchmarks: list[str] = flag([b.key for b in BENCHMARKS], "names, .jsonl, .parquet files")
    decoding: list[str] = flag(
        list(DECODINGS), "training, justrl or temperature,top-p such as 0.6,0.95; 0,1 is greedy"
    )
    data_dir: str = flag("", "read DIR/<name>.jsonl or .parquet (default: from the Hub)")
    samples: int = flag(0, "responses to a problem (0: the benchmark's own; greedy takes 1)")
    limit: int = flag(0, "first problems of each benchmark (0: all)")
    max_new_tokens: int = flag(20480, "response length at most")
    rollout_batch_size: int = flag(256, "responses decoded at a time, on each rank")
    seed: int = flag(0, "of the sampling")
    instruction: str = flag(rollout.INSTRUCTION, "follows every problem; may be empty")
    verifier: str = flag("", "causal LM that looks again at what the rule refused")
    output: str = flag("", "directory of the results (default: runs/eval-<model>)")


def load_benchmarks(
    names: list[str],
    data_dir: str = "",
    samples: int = 0,
    limit: int = 0,
    flag: str = "--benchmarks",
) -> Suite:
    """Benchmarks, by name or local file, with their problems; InputError names `flag`."""
    known, suite = {benchmark.key: benchmark for benchmark in BENCHMARKS}, {}
    for name in names:
        is_file = Path(name).suffix in (".jsonl", ".parquet")
        key = Path(name).stem if is_file else name
        if not is_file and key not in known:
            raise InputError(f"{flag} {name}: neither a file nor one of {', '.join(known)}")
        if key in [benchmark.key for benchmark in suite]:
            raise InputError(f"{flag} {name}: there is a {key} before it")
        benchmark = known.get(key, Benchmark(key, key, "", "train", 4))
        source = name if is_file else benchmark.hub
        if data_dir and not is_file:
            files = [Path(data_dir, key + suffix) for suffix in (".jsonl", ".parquet")]
            if not any(file.is_file() for file in files):
                raise InputError(f"--data_dir {data_dir}: holds no {key}.jsonl or {key}.parquet")
            source = next(str(file) for file in files if file.is_file())
        problems = load_problems(source, benchmark.split)
        suite[benchmark._replace(samples=samples or benchmark.samples)] = problems[: limit or None]
    return suite


def parse_decodings(names: list[str]) -> dict[str, tuple[float, float]]:
    """{name: (temperature, top-p)}; a pair that has a name goes by it. Raises InputError."""
    decodings, named = {}, {pair: name for name, pair in DECODINGS.items()}
    for name in names:
        try:
            pair = DECODINGS.get(name) or tuple(map(float, name.split(",")))
            temperature, top_p = pair
        except ValueError:
            temperature = top_p = math.nan
        if not (0 <= temperature < math.inf and 0 < top_p <= 1):
            choices = f"{', '.join(DECODINGS)} or temperature,top-p such as 0.6,0.95"
            raise InputError(f"--decoding {name}: has to be {choices}")
        decodings[named.get(pair, f"{temperature:g},{top_p:g}")] = pair
    return decodings


# ------------------------------------------------------------------------------------ the journal


class Key(NamedTuple):
    """Names one response; problems and samples count from 0."""

    benchmark: str
    decoding: str
    problem: int
    sample: int


def row_key(row: dict) -> Key:
    return Key(*(row[name] for name in Key._fields))


def read_row(line: bytes) -> dict | None:
    """A line of a journal without its text; None where a crash tore it."""
    try:
        row = json.loads(line)
        row_key(row)
    except (ValueError, KeyError, TypeError):
        return None
    return {name: value for name, value in row.items() if name != "response"}


class Journal:
    """Rows by key, each of them a line of a file too, which is written as soon as the row is known.

    The file is `path`, a .jsonl. Only rank 0 writes there: rank 3 writes samples.rank3.jsonl beside
    samples.jsonl, so that no text goes from rank to rank, and whatever ends a program takes none
    but the line that is being written. `rows` are without texts, on every rank.
    """

    def __init__(self, path: Path):
        self.path = path
        self.merge()

    def file_of(self, rank: int | str) -> Path:
        return self.path.with_suffix(f".rank{rank}.jsonl") if rank else self.path

    def merge(self) -> None:
        """Make one file of the ranks' files and read it. Every rank has to call this."""
        distributed.barrier()
        rows = self.merged() if rank() == 0 else {}
        self.rows: dict[Key, dict] = distributed.broadcast(rows)

    def merged(self) -> dict[Key, dict]:
        """One file in the order of keys, without torn lines; texts are never all in memory."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        parts = [self.path, *self.path.parent.glob(self.file_of("*").name)]
        rows: dict[Key, dict] = {}
        places: dict[Key, tuple[BinaryIO, int]] = {}
        with contextlib.ExitStack() as opened:
            for part in [part for part in parts if part.exists()]:
                file, start = opened.enter_context(part.open("rb")), 0
                for line in file:
                    row = read_row(line)
                    if row:
                        rows[row_key(row)], places[row_key(row)] = row, (file, start)
                    start += len(line)
            whole = self.path.with_suffix(".partial")
            with whole.open("wb") as target:
                for key in sorted(rows):
                    file, start = places[key]
                    file.seek(start)
                    target.write(file.readline().rstrip(b"\n") + b"\n")
        whole.replace(self.path)
        for part in parts[1:]:
            part.unlink()
        return rows

    def complete(
        self, keys: Iterable[Key], work: Callable[[list[Key], Callable[[dict], None]], None]
    ) -> None:
        """Have `work` make the missing rows, a share on each rank.

        work(asked, add): some keys of one decoding; it calls `add` with the row of each as soon as
        that is known. A row depends on its key and the flags alone, so that neither the number of
        ranks nor an interruption changes it.
        """
        keys = list(keys)
        missing = [key for key in keys if key not in self.rows]
        if not missing:
            return
        with self.file_of(rank()).open("a", encoding="utf-8") as file:

            def add(row: dict) -> None:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()

            for _, group in itertools.groupby(missing, lambda key: key.decoding):
                share = list(group)[rank() :: world_size()]
                with stop.together():  # also on a rank without a share
                    if share:
                        work(share, add)
        self.merge()
        if any(key not in self.rows for key in keys):
            where = f"{self.path}: rank 0 does not see the rows of other ranks"
            raise InputError(f"{where}; put it on a file system that all hosts share")


# ----------------------------------------------------------------------------- sampling and grading


def graded(problem: dict[str, str], response: Response) -> dict:
    """What a row of samples.jsonl says of a response, beside its key."""
    return {
        "fingerprint": fingerprint(problem),
        "gold": problem["answer"],
        "answer": extract_answer(response.text),
        "correct": is_correct(response.text, problem["answer"]),
        "length": len(response.ids),  # tokens, the stop id included
        "truncated": response.truncated,
        "response": response.text,
    }


def sample_suite(
    model: Model,
    tokenizer: Tokenizer,
    suite: Suite,
    decodings: dict[str, tuple[float, float]],
    journal: Journal,
    *,
    instruction: str,
    max_new_tokens: int,
    rollout_batch_size: int,
    seed: int,
) -> dict[Key, dict]:
    """{key: row}: a graded response for every benchmark, decoding, problem and sample.

    The keywords are flags of Config. Raises InputError where the journal holds responses to other
    problems, and Stopped on every rank where a stop was asked for.
    """
    problems = {benchmark.key: rows for benchmark, rows in suite.items()}

    def problem_of(key: Key) -> dict[str, str]:
        return problems[key.benchmark][key.problem]

    keys: list[Key] = []
    for decoding, (temperature, _) in decodings.items():
        for benchmark, rows in suite.items():
            samples = range(benchmark.samples if temperature else 1)  # greedy ones are all alike
            pairs = itertools.product(range(len(rows)), samples)
            keys += [Key(benchmark.key, decoding, *pair) for pair in pairs]
    for key in journal.rows.keys() & set(keys):
        if journal.rows[key].get("fingerprint") != fingerprint(problem_of(key)):
            held = f"{journal.path}: holds responses to another {key.benchmark}"
            raise InputError(f"{held}; delete it, or name another --output")

    def work(asked: list[Key], add: Callable[[dict], None]) -> None:
        temperature, top_p = decodings[asked[0].decoding]
        posed = [problem_of(key) for key in asked]

        def ended(place: int, response: Response) -> None:
            add(asked[place]._asdict() | graded(posed[place], response))

        rollout.sample(
            model,
            tokenizer,
            [encode_prompt(tokenizer, problem["problem"], instruction) for problem in posed],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            batch_size=rollout_batch_size,
            seed=[mix_seed(seed, *key) for key in asked],
            progress=f"{asked[0].decoding} decoding",
            ended=ended,
            poll=stop.poll,
        )

    journal.complete(keys, work)
    return {key: journal.rows[key] for key in keys}


def evaluate(
    model: Model, tokenizer: Tokenizer, suite: Suite, path: Path, **flags: Any
) -> dict[str, dict]:
    """{benchmark: scores} of a model in memory under the training decoding.

    path: the journal's file; what it holds is not sampled again. flags: the keywords of
    sample_suite. Every rank calls it and gets the scores. Raises Stopped on every rank where a
    stop was asked for.
    """
    decodings = {"training": DECODINGS["training"]}
    samples = sample_suite(model, tokenizer, suite, decodings, Journal(path), **flags)
    return summarize(samples)["training"]


# ------------------------------------------------------------------------------------- the verifier

TAIL = 2000  # characters of a response that the verifier sees
JUDGE = """You are given a mathematics problem, its reference answer and the end of a solution \
that somebody wrote. Judge only whether the final answer of that solution says the same as the \
reference answer; do not solve the problem yourself and do not judge the reasoning. Notation, \
units that go without saying and rounding beyond the reference's precision do not matter. Where \
the reference has several parts, all of them have to agree.

<problem>
{problem}
</problem>
<reference_answer>
{gold}
</reference_answer>
<end_of_solution>
{tail}
</end_of_solution>

A: CORRECT - the final answer agrees with the reference answer.
B: INCORRECT - there is a final answer and it disagrees.
C: INVALID - there is no final answer: the solution breaks off, repeats itself or is no solution.
Reply with one letter, A, B or C, and nothing else."""
LETTERS = {"A": "CORRECT", "B": "INCORRECT", "C": "INVALID"}
VERDICTS = (*LETTERS.values(), "UNREADABLE")


def parse_verdict(reply: str) -> str:
    """One of VERDICTS; the reply's first line has to be a verdict and nothing else.

    A verdict is its letter, its word or both: `A`, `CORRECT`, `A: CORRECT`.
    """
    line = reply.strip().split("\n")[0]
    match = re.fullmatch(r"\W*(?:([ABC])\b)?\W*(CORRECT|INCORRECT|INVALID)?\W*", line)
    verdicts = {LETTERS.get(part, part) for part in match.groups() if part} if match else set()
    return verdicts.pop() if len(verdicts) == 1 else "UNREADABLE"


def read_tails(path: Path, keys: set[Key]) -> dict[Key, str]:
    """The ends of these responses, from the file of a journal that is complete."""
    tails: dict[Key, str] = {}
    with path.open("rb") as lines:
        for row in map(json.loads, lines):
            if row_key(row) in keys:
                tails[row_key(row)] = row["response"].strip()[-TAIL:]
    return tails


def verify(
    model: Model,
    tokenizer: Tokenizer,
    suite: Suite,
    samples: dict[Key, dict],
    journal: Journal,
    verdicts: Journal,
    batch_size: int,
) -> None:
    """Fill `verdicts` with the verifier's word on every response that the rule refused.

    samples: what sample_suite returned, whose texts are in the file of `journal`. Raises Stopped on
    every rank where a stop was asked for.
    """
    problems = {benchmark.key: rows for benchmark, rows in suite.items()}
    refused = [key for key, row in samples.items() if not row["correct"]]
    tails = read_tails(journal.path, set(refused))

    def work(asked: list[Key], add: Callable[[dict], None]) -> None:
        prompts = []
        for key in asked:
            problem = problems[key.benchmark][key.problem]
            about = {"problem": problem["problem"], "gold": problem["answer"], "tail": tails[key]}
            prompts.append(encode_prompt(tokenizer, JUDGE.format(**about), instruction=""))

        def ended(place: int, reply: Response) -> None:
            verdict = parse_verdict(reply.text)
            row = {"verdict": verdict, "correct": verdict == "CORRECT", "reply": reply.text}
            add(asked[place]._asdict() | row)

        rollout.sample(
            model,
            tokenizer,
            prompts,
            max_new_tokens=16,
            temperature=0,
            batch_size=batch_size,
            progress=f"verdicts, {asked[0].decoding} decoding",
            ended=ended,
            poll=stop.poll,
        )

    verdicts.complete(refused, work)


# ------------------------------------------------------------------------------------------ scores


def pass_at_k(n: int, right: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that k of n samples, c right, hold a right one."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def accuracy(rows: list[dict]) -> dict:
    """mean@N with its standard error over problems, and pass@k: all in percent.

    rows: those of one benchmark and decoding, problem by problem, N each. The standard error is
    None where there is a single problem.
    """
    problems = [list(group) for _, group in itertools.groupby(rows, lambda row: row["problem"])]
    counts, n = [sum(row["correct"] for row in group) for group in problems], len(problems[0])
    rates = [100 * count / n for count in counts]
    ks = sorted({2**i for i in range(n.bit_length())} | {n})  # 1, 2, 4, ... and N
    return {
        "mean": fmean(rates),
        "standard_error": stdev(rates) / len(rates) ** 0.5 if len(rates) > 1 else None,
        "pass_at_k": {k: 100 * fmean(pass_at_k(n, count, k) for count in counts) for k in ks},
    }


Scores = dict[str, dict[str, dict]]  # {decoding: {benchmark: summary}}


def summarize(samples: dict[Key, dict], verdicts: dict[Key, dict] | None = None) -> Scores:
    """The summary of every benchmark: lengths in tokens, fractions 0 to 1, the rest in percent."""
    scores: Scores = {}
    for (name, decoding), keys in itertools.groupby(samples, lambda key: key[:2]):
        rows = [samples[key] for key in keys]
        scores.setdefault(decoding, {})[name] = summary = accuracy(rows) | {
            "problems": len({row["problem"] for row in rows}),
            "samples": len({row["sample"] for row in rows}),
            "response_length": fmean(row["length"] for row in rows),
            "truncated_fraction": fmean(row["truncated"] for row in rows),
            "no_box_fraction": fmean(row["answer"] is None for row in rows),
        }
        if verdicts is not None:
            final = [row if row["correct"] else verdicts[row_key(row)] for row in rows]
            counts = Counter(row["verdict"] for row in final if "verdict" in row)
            summary["verified"] = accuracy(final) | {name: counts[name] for name in VERDICTS}
    return scores


# ------------------------------------------------------------------------------------------ tables


def results_table(model: str, suite: Suite, scores: Scores, graders: list[str]) -> str:
    """The paper's table in Markdown: mean@N in percent, the second decoding in brackets."""

    def cell(values: list[str]) -> str:
        return values[0] + (f" ({', '.join(values[1:])})" if values[1:] else "")

    rows = [["model", "decoding", "graded by", *(b.title for b in suite), "mean"]]
    for grader in graders:
        means = []  # for each column its number under each decoding
        for benchmark in suite:
            found = [summaries[benchmark.key] for summaries in scores.values()]
            graded = found if grader == "rule" else [summary["verified"] for summary in found]
            means.append([summary["mean"] for summary in graded])
        means.append([fmean(column) for column in zip(*means, strict=True)])
        cells = [cell([f"{mean:.2f}" for mean in column]) for column in means]
        rows.append([model, cell(list(scores)), grader, *cells])
    return markdown(rows)


def details_table(suite: Suite, scores: Scores) -> str:
    """A row for each benchmark and decoding, in Markdown: what is behind the results table."""

    def with_error(summary: dict) -> str:
        error = summary["standard_error"]
        return f"{summary['mean']:.2f}" + ("" if error is None else f" ± {error:.2f}")

    found = [(b, name, summaries[b.key]) for name, summaries in scores.items() for b in suite]
    ks, rows = sorted({k for *_, summary in found for k in summary["pass_at_k"]}), []
    for benchmark, decoding, summary in found:
        chances = {k: f"{chance:.2f}" for k, chance in summary["pass_at_k"].items()}
        row = {
            "benchmark": benchmark.title,
            "decoding": decoding,
            "problems x samples": f"{summary['problems']} x {summary['samples']}",
            "mean@N": with_error(summary),
            **{f"pass@{k}": chances.get(k, "") for k in ks},
            "tokens": f"{summary['response_length']:.1f}",
            "truncated": f"{summary['truncated_fraction']:.1%}",
            "no box": f"{summary['no_box_fraction']:.1%}",
        }
        if "verified" in summary:
            again = summary["verified"]
            row["mean@N with verifier"] = with_error(again)
            row["CORRECT (changed)"] = str(again["CORRECT"])
            row |= {verdict: str(again[verdict]) for verdict in VERDICTS[1:]}
        rows.append(row)
    return markdown([list(rows[0]), *(list(row.values()) for row in rows)])


def markdown(rows: list[list[str]]) -> str:
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


# -------------------------------------------------------------------------------------------- main


def file_name(model: str) -> str:
    return re.sub(r"[^\w.]+", "-", model).strip("-")


def open_output(cfg: Config) -> Path:
    """The output directory; samples drawn under other flags are not mixed. Raises InputError."""
    folder = Path(cfg.output or f"runs/eval-{file_name(cfg.model)}")
    names = "model max_new_tokens seed instruction".split()
    flags, path = {name: getattr(cfg, name) for name in names}, folder / "settings.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        begun = any(file.stat().st_size > 0 for file in folder.glob("*.jsonl"))
        held = json.loads(path.read_text()) if begun else flags
        distributed.barrier()  # every rank has looked before rank 0 writes
        if rank() == 0 and not begun:
            path.write_text(json.dumps(flags, indent=2) + "\n")
        distributed.barrier()
        if not path.exists():
            raise OSError("this host does not see what rank 0 writes: all hosts have to share it")
    except (OSError, ValueError) as error:
        raise InputError(f"--output {folder}: {error}; name another directory") from error
    for name in [name for name in names if held.get(name) != flags[name]]:
        was = f"samples drawn with --{name} {held.get(name)!r}, not {flags[name]!r}"
        raise InputError(f"--output {folder}: holds {was}; name another directory")
    return folder


def load(name: str) -> tuple[Model, Tokenizer]:
    """A model and its tokenizer: bfloat16 on this rank's GPU, float32 on a CPU.

    The ranks of a host take turns: what training saves is float32 and becomes bfloat16 in the
    host's memory, where one such copy at a time is enough. (A bfloat16 checkpoint is a mapped file
    that ranks share.)
    """
    device = distributed.device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    own, turns = distributed.place_on_host()
    for turn in range(turns):
        if turn == own:
            model = rollout.load_model(name, dtype, device)
        distributed.barrier()
    return model, rollout.load_tokenizer(name)


def run(cfg: Config) -> None:
    """Sample, grade, judge and print. Raises InputError, and Stopped where a stop was asked for."""
    least = {"samples": 0, "limit": 0, "max_new_tokens": 1, "rollout_batch_size": 1}
    for name in [name for name in least if getattr(cfg, name) < least[name]]:
        raise InputError(f"--{name} {getattr(cfg, name)}: has to be at least {least[name]}")
    decodings = parse_decodings(cfg.decoding)
    suite = load_benchmarks(cfg.benchmarks, cfg.data_dir, cfg.samples, cfg.limit)
    for name in [cfg.model, cfg.verifier] if cfg.verifier else [cfg.model]:
        rollout.load_tokenizer(name)  # a wrong name fails here, not after hours
    folder = open_output(cfg)
    journal, verdicts = Journal(folder / "samples.jsonl"), None
    model, tokenizer = load(cfg.model)
    if not tokenizer.chat_template:
        progress.say(f"{cfg.model} has no chat template: problems go in as plain text")
    stop.listen()
    names = ("instruction", "max_new_tokens", "rollout_batch_size", "seed")
    flags = {name: getattr(cfg, name) for name in names}
    samples = sample_suite(model, tokenizer, suite, decodings, journal, **flags)
    if cfg.verifier:
        del model  # its memory is the verifier's
        verdicts = Journal(folder / f"verdicts-{file_name(cfg.verifier)}.jsonl")
        size = cfg.rollout_batch_size
        verify(*load(cfg.verifier), suite, samples, journal, verdicts, size)
    scores = summarize(samples, verdicts and verdicts.rows)
    if rank() == 0:
        graders = ["rule", "rule, then verifier"] if cfg.verifier else ["rule"]
        text = results_table(cfg.model, suite, scores, graders)
        text += "\n" + details_table(suite, scores)
        (folder / "table.md").write_text(text, encoding="utf-8")
        document = json.dumps({"flags": asdict(cfg), "scores": scores}, indent=2)
        (folder / "scores.json").write_text(document + "\n", encoding="utf-8")
        print(f"\n{text}")


def main(argv: list[str] | None = None) -> None:
    with distributed.session("eval.py"):
        parser = Parser(Config, __doc__.split("\n")[0])
        cfg = Config(**vars(parser.parse_args(argv)))
        progress.quiet_libraries()
        try:
            run(cfg)
        except Stopped:
            progress.warn("eval.py: stopped; the same command continues where it was")
            sys.exit(130)  # what shells expect after an interruption


if __name__ == "__main__":
    main()
