"""The paper's results table for any checkpoint: six benchmarks, two decodings, mean@N.

    python eval.py --model Qwen/Qwen3-1.7B-Base                              # the paper's setup
    python eval.py --model M --benchmarks math500 --limit 50 --samples 1     # a quick look
    torchrun --nproc-per-node 8 eval.py --model M --verifier opencompass/CompassVerifier-3B

Read from top to bottom: flags and benchmarks, the journal that lets a long run survive, sampling
and grading, the verifier, scores, tables, main. --output receives samples.jsonl
(every response with its verdict), scores.json and table.md; the same command continues there.
"""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

import rollout
from reward import extract_answer, is_correct
from rollout import Model, Tokenizer, encode_prompt, load_problems
from support import distributed
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


def flag(default: object, text: str) -> Any:
    make = (lambda: list(default)) if isinstance(default, tuple) else (lambda: default)
    return field(default_factory=make, metadata={"help": text})


@dataclass
class Config:
    """Every flag; the defaults are the paper's evaluation setup (appendix)."""

    model: str = field(metadata={"help": "Hub id or local folder of a causal LM"})
    benchmarks: list[str] = flag(tuple(b.key for b in BENCHMARKS), "names, .jsonl, .parquet files")
    decoding: list[str] = flag(
        tuple(DECODINGS), "training, justrl or temperature,top-p such as 0.6,0.95; 0,1 is greedy"
    )
    data_dir: str = flag("", "read DIR/<name>.jsonl or .parquet (default: from the Hub)")
    samples: int = flag(0, "responses to a problem (0: the benchmark's own; greedy takes 1)")
    limit: int = flag(0, "first problems of each benchmark (0: all)")
    max_new_tokens: int = flag(20480, "response length at most")
    rollout_batch_size: int = flag(256, "sequences decoded at a time, on each rank")
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
    known = {benchmark.key: benchmark for benchmark in BENCHMARKS}
    suite: Suite = {}
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
            temperature, top_p = DECODINGS.get(name) or map(float, name.split(","))
        except ValueError:
            temperature = top_p = math.nan
        if not (0 <= temperature < math.inf and 0 < top_p <= 1):
            choices = f"{', '.join(DECODINGS)} or temperature,top-p such as 0.6,0.95"
            raise InputError(f"--decoding {name}: has to be {choices}")
        decodings[named.get((temperature, top_p), f"{temperature:g},{top_p:g}")] = (
            temperature,
            top_p,
        )
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


def read_rows(path: Path) -> Iterator[dict]:
    """The rows of a .jsonl file; a line that a crash tore is passed over."""
    with path.open("rb") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            yield row


def write_rows(path: Path, rows: Iterable[dict], mode: str) -> None:
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


TAIL = 2000  # characters of a response that the verifier sees
ROUND = 2  # batches between writes: freed slots take the next prompt, so longer rounds waste less


class Stopped(Exception):
    """A wish to stop has ended the sampling of some rank."""


class Journal:
    """The rows of a .jsonl file, by key, appended as they come; without a path, in memory alone.

    Rank 0 writes the file; every rank holds all rows, with the last TAIL characters of a response.
    """

    def __init__(self, path: Path | None = None):
        self.path, self.rows = path, {}
        if path and path.exists():
            self.keep(read_rows(path))
            self.tidy()

    def keep(self, rows: Iterable[dict]) -> None:
        for row in rows:
            self.rows[row_key(row)] = row | {"response": row.get("response", "").strip()[-TAIL:]}

    def append(self, rows: list[dict]) -> None:
        rows = [row for row in rows if row_key(row) not in self.rows]
        self.keep(rows)
        if self.path and rank() == 0:
            write_rows(self.path, rows, "a")

    def tidy(self) -> None:
        """Rewrite the file with its whole rows, each once, in the order of keys."""
        if self.path and rank() == 0:
            rows = {row_key(row): row for row in read_rows(self.path)}
            whole = self.path.with_suffix(".partial")
            write_rows(whole, [rows[key] for key in sorted(rows)], "w")
            whole.replace(self.path)

    def complete(
        self,
        keys: Iterable[Key],
        size: int,
        work: Callable[[list[Key]], list[dict]],
        label: str = "",
    ) -> None:
        """Have `work` make the missing rows, in rounds of ROUND x `size` rows on each rank.

        work: keys of one benchmark and decoding -> what their rows hold beyond the key, in the
        same order. A row depends on its key and the flags alone, so that neither the number of
        ranks nor an interruption changes it. A crash loses the round it happens in. Where a rank's
        work is None, every rank raises Stopped.
        """
        missing = [key for key in keys if key not in self.rows]
        step = ROUND * size * world_size()
        for name in dict.fromkeys(key[:2] for key in missing):
            group = [key for key in missing if key[:2] == name]
            with tqdm(total=len(group), desc=label + " ".join(name), disable=rank() > 0) as bar:
                for start in range(0, len(group), step):
                    asked = group[start : start + step]
                    share = asked[rank() :: world_size()]
                    made = work(share) if share else []
                    rows = made and [key._asdict() | row for key, row in zip(share, made)]
                    parts = distributed.gather(rows)
                    if None in parts:
                        raise Stopped
                    self.append(sorted(itertools.chain(*parts), key=row_key))
                    right = [row["correct"] for key, row in self.rows.items() if key[:2] == name]
                    bar.set_postfix(right=f"{fmean(right):.1%}", refresh=False)
                    bar.update(len(asked))
        self.tidy()


# ----------------------------------------------------------------------------- sampling and grading


def sample_suite(
    model: Model,
    tokenizer: Tokenizer,
    suite: Suite,
    decodings: dict[str, tuple[float, float]],
    journal: Journal,
    cfg: Any,
    sampler: Callable | None = None,
) -> dict[Key, dict]:
    """{key: row}: a graded response for every benchmark, decoding, problem and sample.

    cfg: rollout_batch_size, max_new_tokens, seed and instruction, as Config has them. sampler
    stands for rollout.sample; where it returns None, Stopped is raised.
    """
    sampler = sampler or rollout.sample
    problems = {benchmark.key: rows for benchmark, rows in suite.items()}
    keys: list[Key] = []
    for decoding, (temperature, _) in decodings.items():
        for benchmark, rows in suite.items():
            samples = range(benchmark.samples if temperature else 1)  # greedy ones are all alike
            pairs = itertools.product(range(len(rows)), samples)
            keys += [Key(benchmark.key, decoding, *pair) for pair in pairs]
    for key in journal.rows.keys() & set(keys):
        if journal.rows[key]["gold"] != problems[key.benchmark][key.problem]["answer"]:
            held = f"--output {journal.path.parent}: holds samples of another {key.benchmark}"
            raise InputError(f"{held}; name another directory")

    def work(asked: list[Key]) -> list[dict] | None:
        temperature, top_p = decodings[asked[0].decoding]
        posed = [problems[key.benchmark][key.problem] for key in asked]
        responses = sampler(
            model,
            tokenizer,
            [encode_prompt(tokenizer, problem["problem"], cfg.instruction) for problem in posed],
            max_new_tokens=cfg.max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            batch_size=cfg.rollout_batch_size,
            seed=[mix_seed(cfg.seed, *key) for key in asked],
            progress="responses" if rank() == 0 else None,
        )
        return responses and [
            {
                "gold": problem["answer"],
                "answer": extract_answer(response.text),
                "correct": is_correct(response.text, problem["answer"]),
                "length": len(response.ids),  # tokens, the stop id included
                "truncated": response.truncated,
                "response": response.text,
            }
            for problem, response in zip(posed, responses, strict=True)
        ]

    journal.complete(keys, cfg.rollout_batch_size, work)
    return {key: journal.rows[key] for key in keys}


def evaluate(
    model: Model, tokenizer: Tokenizer, suite: Suite, cfg: Any, stop: Any = None
) -> dict[str, dict] | None:
    """{benchmark: scores} of a model in memory under the training decoding; writes no file.

    cfg as in sample_suite. Called by every rank, which all get the scores. None where `stop`, a
    run's wish to stop, came first.
    """
    decodings = {"training": DECODINGS["training"]}
    sampler = stop.interruptible(rollout.sample) if stop else None
    try:
        samples = sample_suite(model, tokenizer, suite, decodings, Journal(), cfg, sampler)
    except Stopped:
        return None
    return summarize(samples)["training"]


# ------------------------------------------------------------------------------------- the verifier

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


def verify(
    model: Model,
    tokenizer: Tokenizer,
    suite: Suite,
    samples: dict[Key, dict],
    verdicts: Journal,
    size: int,
) -> None:
    """Fill `verdicts` with the verifier's word on every response that the rule refused.

    samples: what sample_suite returned; size: of a batch.
    """
    problems = {benchmark.key: rows for benchmark, rows in suite.items()}

    def prompt(key: Key) -> list[int]:
        problem, tail = problems[key.benchmark][key.problem], samples[key]["response"]
        text = JUDGE.format(problem=problem["problem"], gold=problem["answer"], tail=tail)
        return encode_prompt(tokenizer, text, "")

    def work(asked: list[Key]) -> list[dict]:
        prompts, options = [prompt(key) for key in asked], {"temperature": 0, "batch_size": size}
        replies = rollout.sample(model, tokenizer, prompts, max_new_tokens=16, **options)
        parsed = [(parse_verdict(reply.text), reply.text) for reply in replies]
        return [{"verdict": v, "correct": v == "CORRECT", "reply": reply} for v, reply in parsed]

    refused = [key for key, row in samples.items() if not row["correct"]]
    verdicts.complete(refused, size, work, "verifier, ")


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


def summarize(
    samples: dict[Key, dict], verdicts: dict[Key, dict] | None = None
) -> dict[str, dict[str, dict]]:
    """{decoding: {benchmark: scores}}; lengths in tokens, fractions 0 to 1, the rest in percent."""
    scores: dict[str, dict[str, dict]] = {}
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


def tables(model: str, suite: Suite, scores: dict[str, dict[str, dict]]) -> str:
    """Markdown: the paper's table, the second decoding in brackets, and all that is behind it."""

    def bracket(values: list[str]) -> str:
        return values[0] + (f" ({', '.join(values[1:])})" if values[1:] else "")

    def with_error(summary: dict) -> str:
        error = summary["standard_error"]
        return f"{summary['mean']:.2f}" + ("" if error is None else f" ± {error:.2f}")

    every = [(b.title, name, summary[b.key]) for name, summary in scores.items() for b in suite]
    verified = "verified" in every[0][2]
    results = [["model", "decoding", "graded by", *(b.title for b in suite), "mean"]]
    for grader in ["rule", "rule, then verifier"][: 1 + verified]:
        pick = (
            (lambda summary: summary) if grader == "rule" else (lambda summary: summary["verified"])
        )
        means = [[pick(summary[b.key])["mean"] for summary in scores.values()] for b in suite]
        means.append([fmean(column) for column in zip(*means, strict=True)])
        cells = [bracket([f"{mean:.2f}" for mean in row]) for row in means]
        results.append([model, bracket(list(scores)), grader, *cells])

    ks = sorted({k for *_, summary in every for k in summary["pass_at_k"]})
    header = ["benchmark", "decoding", "problems x samples", "mean@N", *(f"pass@{k}" for k in ks)]
    extra = ["mean@N with verifier", "CORRECT (changed)", *VERDICTS[1:]] if verified else []
    details = [[*header, "tokens", "truncated", "no box", *extra]]
    for title, decoding, summary in every:
        row = [
            title,
            decoding,
            f"{summary['problems']} x {summary['samples']}",
            with_error(summary),
        ]
        row += [f"{summary['pass_at_k'][k]:.2f}" if k in summary["pass_at_k"] else "" for k in ks]
        row += [f"{summary['response_length']:.1f}", f"{summary['truncated_fraction']:.1%}"]
        row += [f"{summary['no_box_fraction']:.1%}"]
        if verified:
            again = summary["verified"]
            row += [with_error(again), *(str(again[verdict]) for verdict in VERDICTS)]
        details.append(row)
    return f"{markdown(results)}\n{markdown(details)}"


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
        samples = folder / "samples.jsonl"
        begun = samples.exists() and samples.stat().st_size > 0
        held = json.loads(path.read_text()) if begun else flags
        if rank() == 0 and not begun:
            path.write_text(json.dumps(flags, indent=2) + "\n")
    except (OSError, ValueError) as error:
        raise InputError(f"--output {folder}: {error}; name another directory") from error
    for name in [name for name in names if held.get(name) != flags[name]]:
        was = f"samples drawn with --{name} {held.get(name)!r}, not {flags[name]!r}"
        raise InputError(f"--output {folder}: holds {was}; name another directory")
    return folder


def load(name: str) -> tuple[Model, Tokenizer]:
    """A model and its tokenizer: bfloat16 on this rank's GPU, float32 on a CPU."""
    device = distributed.device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return rollout.load_model(name, dtype, device), rollout.load_tokenizer(name)


def run(cfg: Config) -> None:
    """Sample, grade, judge and print; raises InputError."""
    least = {"samples": 0, "limit": 0, "max_new_tokens": 1, "rollout_batch_size": 1}
    for name in [name for name in least if getattr(cfg, name) < least[name]]:
        raise InputError(f"--{name} {getattr(cfg, name)}: has to be at least {least[name]}")
    decodings = parse_decodings(cfg.decoding)
    suite = load_benchmarks(cfg.benchmarks, cfg.data_dir, cfg.samples, cfg.limit)
    for name in [cfg.model, cfg.verifier][: 1 + bool(cfg.verifier)]:
        rollout.load_tokenizer(name)  # a wrong name fails here, not after hours
    folder = open_output(cfg)
    journal = Journal(folder / "samples.jsonl")
    model, tokenizer = load(cfg.model)
    if not tokenizer.chat_template and rank() == 0:
        print(f"{cfg.model} has no chat template: problems go in as plain text")
    samples, verdicts = sample_suite(model, tokenizer, suite, decodings, journal, cfg), None
    if cfg.verifier:
        del model  # its memory is the verifier's
        verdicts = Journal(folder / f"verdicts-{file_name(cfg.verifier)}.jsonl")
        judge = load(cfg.verifier)
        verify(*judge, suite, samples, verdicts, cfg.rollout_batch_size)
    scores = summarize(samples, verdicts and verdicts.rows)
    if rank() == 0:
        text = tables(cfg.model, suite, scores)
        (folder / "table.md").write_text(text, encoding="utf-8")
        document = json.dumps({"flags": asdict(cfg), "scores": scores}, indent=2)
        (folder / "scores.json").write_text(document + "\n", encoding="utf-8")
        print(f"\n{text}")


def main(argv: list[str] | None = None) -> None:
    with distributed.session("eval.py"):
        parser = distributed.Parser(Config, description=__doc__.split("\n")[0])
        run(Config(**vars(parser.parse_args(argv))))


if __name__ == "__main__":
    main()
