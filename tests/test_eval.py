"""The evaluation: exact scores of a scripted model, interruption, ranks, the verifier, errors."""

import itertools
import json
import math
import os
import random
import re
import shutil
import signal
from pathlib import Path

import pytest
from helpers import BENCHMARKS, TINY, read_rows, write_rows
from ranks import launch

import eval as evaluation
from reward import is_correct
from rollout import INSTRUCTION, Response

real_files = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="STAPO_BENCHMARKS names no folder")


def copy_model(folder: Path, trained: bool = False) -> Path:
    """A folder with the tiny model, or with a model that has another weight."""
    shutil.copytree(TINY, folder)
    file = folder / "model.safetensors"
    if trained:
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    return folder


class Scripted:
    """In place of rollout.sample: answers as told, counts what it is asked.

    `before` maps the number of a response, from 0, to what happens before it. Responses end in
    another order than they are asked for.
    """

    def __init__(self, monkeypatch, script):
        self.script, self.before = script, {}
        self.asked, self.decoded = [], []
        monkeypatch.setattr(evaluation.rollout, "sample", self)

    def __call__(self, model, tokenizer, prompts, *, seed, **options):
        self.decoded.append((options["temperature"], options.get("top_p")))
        for place in sorted(range(len(prompts)), key=lambda place: (place % 3, place)):
            self.before.get(len(self.asked), lambda: None)()
            yield []
            name, prompt = Path(model.name_or_path).name, tokenizer.decode(prompts[place])
            text, length, truncated = self.script(name, prompt, random.Random(seed[place]))
            self.asked.append((name, prompt))
            yield [(place, Response(prompts[place], [0] * length, truncated, text))]


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lucky(model: str, prompt: str, noise: random.Random):
    """Right half of the time, by the seed: what a real sampler looks like from outside."""
    answer = 7 if noise.random() < 0.5 else noise.randint(8, 99)
    return f"∴ \\boxed{{{answer}}}", noise.randint(5, 50), noise.random() < 0.1


def write_problems(path: Path, count: int, gold: str = "7") -> str:
    return write_rows(path, *({"problem": f"problem {i}", "answer": gold} for i in range(count)))


def evaluate(output: Path, *flags: object) -> None:
    """main() with these flags, on every rank; rank 0 may write its last files after others end."""
    own = ["--model", TINY, "--max_new_tokens", 500, "--output", output, *flags]
    evaluation.main([*map(str, own)])


def run(output: Path, *flags: object) -> dict:
    """The same in one process -> {decoding: {benchmark: scores}} of scores.json."""
    evaluate(output, *flags)
    return json.loads((output / "scores.json").read_text())["scores"]


# ------------------------------------------------------------------------------------------ scores


def test_scores_of_a_scripted_model_are_exact(tmp_path, monkeypatch, capsys):
    right = {"0": [1, 1, 0, 0], "1": [0, 0, 0, 0], "2": [1, 1, 1, 1], "3": [0, 0, 1, 0]}
    turns = {name: iter(marks) for name, marks in right.items()}

    def script(model, prompt, noise):
        number = prompt.split("\n")[0].removeprefix("problem ")
        assert prompt == f"problem {number}\n{INSTRUCTION}\n"
        if number == "1":
            return "no idea: \\boxed{ }", 100, True
        return ("\\boxed{7}" if next(turns[number]) else "\\boxed{8}"), 20, False

    Scripted(monkeypatch, script)
    file = write_problems(tmp_path / "four.jsonl", 4)
    found = run(tmp_path / "out", "--benchmarks", file, "--decoding", "training")
    flags = json.loads((tmp_path / "out" / "scores.json").read_text())["flags"]
    assert (flags["model"], flags["benchmarks"], flags["seed"]) == (str(TINY), [file], 0)
    found = found["training"]["four"]
    assert found["mean"] == pytest.approx((50 + 0 + 100 + 25) / 4)
    # rates 50, 0, 100, 25: squared deviations from 43.75 add up to 5468.75
    assert found["standard_error"] == pytest.approx(math.sqrt(5468.75 / 3 / 4))
    assert found["pass_at_k"] == pytest.approx(
        {"1": 43.75, "2": 100 * (5 / 6 + 0 + 1 + 1 / 2) / 4, "4": 75.0}
    )
    assert (found["problems"], found["samples"]) == (4, 4)
    assert found["response_length"] == pytest.approx((3 * 20 + 100) / 4)
    assert (found["truncated_fraction"], found["no_box_fraction"]) == (0.25, 0.25)
    names, _, row = (tmp_path / "out" / "table.md").read_text().splitlines()[-3:]
    cells = dict(zip(*(line.strip("| ").split(" | ") for line in (names, row)), strict=True))
    assert cells == {
        **{"benchmark": "four", "decoding": "training", "problems x samples": "4 x 4"},
        **{"mean@N": "43.75 ± 21.35", "pass@N": "75.00", "tokens": "40.0"},
        **{"truncated": "25.0%", "no box": "25.0%"},
    }


def test_a_checkpoint_has_the_defaults_of_its_run(tmp_path, monkeypatch, capsys):
    """One line says so; a flag goes first. The end says where the results are."""
    Scripted(monkeypatch, lambda _, prompt, __: (f"\\boxed{{{'?' not in prompt}}}", 9, False))
    folder = copy_model(tmp_path / "run" / "checkpoints" / "step_000003")
    stored = {"instruction": "So?", "reward": "", "max_new_tokens": 77, "seed": 5}
    (tmp_path / "run" / "config.json").write_text(json.dumps(stored))
    flags = f"--model {folder} --samples 1 --decoding 0,1 --output {tmp_path}/out --benchmarks "
    flags += write_problems(tmp_path / "few.jsonl", 2, gold="True")
    for more, own, mean in ("", "--instruction='So?' ", 0), (" --instruction=", "", 100):
        evaluation.main((flags + more).split())
        found = json.loads((tmp_path / "out" / "scores.json").read_text())
        assert (found["flags"]["max_new_tokens"], found["flags"]["seed"]) == (77, 0)
        assert found["scores"]["0,1"]["few"]["mean"] == mean
        out, err = capsys.readouterr()
        assert err.startswith(f"eval.py: {own}--max_new_tokens=77 --reward='', as in its run")
        assert out.endswith(f"\nresults in {tmp_path}/out\n")


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    for n in range(1, 8):
        for right in range(n + 1):
            marks = [True] * right + [False] * (n - right)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(marks, k))
                share = sum(map(any, subsets)) / len(subsets)
                assert evaluation.pass_at_k(n, right, k) == pytest.approx(100 * share, abs=1e-10)
    six = evaluation.accuracy([{"problem": 0, "correct": i == 0} for i in range(6)])
    assert list(six["pass_at_k"]) == [1, 2, 4, 6]
    assert six["pass_at_k"][6] == 100 and six["standard_error"] is None


def test_tables_show_the_paper_s_layout(tmp_path, monkeypatch):
    """A file with the name of a benchmark is that benchmark."""
    Scripted(monkeypatch, lucky)
    rows = [{"problem": f"problem {i}", "answer": "7"} for i in (0, 1)]
    files = [str(tmp_path / f"{benchmark.key}.jsonl") for benchmark in evaluation.BENCHMARKS]
    for file in files:
        write_rows(Path(file), *rows)
    scores = run(tmp_path / "out", "--benchmarks", *files)
    header, _, row = (tmp_path / "out" / "table.md").read_text().splitlines()[:3]
    titles = "AIME24 | AIME25 | AMC23 | MATH500 | Minerva | OlympiadBench | mean"
    assert header == f"| model | decoding | graded by | {titles} |"
    means = [[found["mean"] for found in part.values()] for part in scores.values()]
    cells = [f"{first:.2f} ({second:.2f})" for first, second in zip(*means)]
    cells.append(f"{sum(means[0]) / 6:.2f} ({sum(means[1]) / 6:.2f})")
    assert row == f"| {TINY} | training (justrl) | rule | {' | '.join(cells)} |"
    counts = [found["samples"] for found in scores["training"].values()]
    assert counts == [32] * 3 + [4] * 3


# --------------------------------------------------------------------------------- several ranks


@pytest.fixture
def many(tmp_path) -> list:
    """Flags of 2 x 28 responses."""
    return ["--benchmarks", write_problems(tmp_path / "many.jsonl", 7)]


def run_and_read(output: Path, flags: list) -> tuple[dict, bytes]:
    return run(output, *flags), (output / "samples.jsonl").read_bytes()


def scripted_rank(output: Path, flags: list, before: dict) -> None:
    """main() on a rank with a scripted model; `before` is for the last of three."""
    fake = Scripted(pytest.MonkeyPatch(), lucky)
    rank = os.environ.get("RANK", "0")
    fake.before = before if rank == "2" else {}
    evaluate(output, *flags)
    output.with_name(f"count-{rank}").write_text(str(len(fake.asked)))


def test_three_ranks_share_the_work_and_write_what_one_writes(tmp_path, monkeypatch, many):
    Scripted(monkeypatch, lucky)
    parts, whole = tmp_path / "parts", run_and_read(tmp_path / "whole", many)
    assert launch(scripted_rank, 3, tmp_path / "log", parts, many, {}) == [0, 0, 0]
    assert (parts / "samples.jsonl").read_bytes() == whole[1]
    assert json.loads((parts / "scores.json").read_text())["scores"] == whole[0]
    files = {".lock", "samples.jsonl", "scores.json", "table.md"}
    assert {path.name for path in parts.iterdir()} == files
    counts = [(tmp_path / f"count-{rank}").read_text() for rank in range(3)]
    assert counts == ["20", "18", "18"]
    said = [Path(f"{tmp_path}/log.{rank}").read_text() for rank in range(3)]
    assert ["| model | decoding |" in text for text in said] == [True, False, False]


@pytest.mark.parametrize("how, code, ranks_after", [(terminate, 130, 2), (kill, -9, 1)])
def test_what_ends_one_rank_costs_none_of_the_responses(
    tmp_path, monkeypatch, many, how, code, ranks_after
):
    """In the second decoding, whose responses are 10, 9 and 9 on the three ranks."""
    Scripted(monkeypatch, lucky)
    parts, whole = tmp_path / "parts", run_and_read(tmp_path / "whole", many)[1]
    codes = launch(scripted_rank, 3, tmp_path / "log", parts, many, {12: how})
    assert codes[2] == code and all(codes)
    rows = [row for file in parts.glob("samples*.jsonl") for row in read_rows(file)]
    assert len(rows) == 10 + 10 + 9 + 9 + 12  # all of the others', who then wait for it
    first = (parts / "samples.jsonl").read_bytes()
    (parts / "samples.rank3.jsonl").write_bytes(first[:-9])  # of a crash amid merging, and torn
    copy = parts / "samples.rank1.old.jsonl"  # a user's
    copy.write_bytes(first)
    codes = launch(scripted_rank, ranks_after, tmp_path / "log", parts, many, {})
    assert codes == [0] * ranks_after
    assert (parts / "samples.jsonl").read_bytes() == whole and copy.read_bytes() == first
    counts = [int((tmp_path / f"count-{rank}").read_text()) for rank in range(ranks_after)]
    assert sum(counts) == 56 - len(rows), "no response is sampled twice"


# ------------------------------------------------------------------------- what a rerun may change


def test_more_samples_and_decodings_join(tmp_path, monkeypatch):
    fake = Scripted(monkeypatch, lucky)
    flags = ["--benchmarks", write_problems(tmp_path / "few.jsonl", 3)]
    run(tmp_path / "out", *flags, "--decoding", "training", "--samples", 2)
    first = run(tmp_path / "out", *flags, "--decoding", "training")
    assert first == run(tmp_path / "whole", *flags, "--decoding", "training")
    assert len(fake.asked) == 2 * 12, "samples that are there are kept"
    several = ["training", "0.6,0.95", "0,1"]
    found = run(tmp_path / "out", *flags, "--decoding", *several)
    assert found["training"] == first["training"] and list(found) == several
    assert fake.decoded[-3:] == [(1, 1), (0.6, 0.95), (0, 1)]
    assert [found[name]["few"]["samples"] for name in several] == [4, 4, 1], "greedy takes one"
    assert len(fake.asked) == 3 * 12 + 3
    found = run(tmp_path / "out", *flags, "--decoding", "training", "--limit", 1, "--samples", 2)
    found = found["training"]["few"]
    assert (found["problems"], found["samples"]) == (1, 2), "the rest stays, and is not scored"
    assert len(read_rows(tmp_path / "out/samples.jsonl")) == 2 * 12 + 3


def test_responses_of_other_flags_problems_or_weights_stay_and_are_not_used(tmp_path, monkeypatch):
    """In one directory each command samples once, and gives what it gives in a new directory."""
    fake, file = Scripted(monkeypatch, lucky), tmp_path / "few.jsonl"
    (tmp_path / "own.jinja").write_text("a template")
    text = Path(write_problems(file, 3)).read_text()
    cases = [  # number of responses that are new, flags, file
        (6, [], text),
        (6, ["--seed", 5], text),
        (6, ["--max_new_tokens", 9], text),
        (6, ["--instruction", "other words"], text),
        (6, ["--chat_template", tmp_path / "own.jinja"], text),
        (2, [], text.replace("problem 1", "problem 11")),
        (6, [], text.replace("7", "9")),
        (0, ["--model", copy_model(tmp_path / "copied")], text),
        (6, ["--model", copy_model(tmp_path / "trained", trained=True)], text),
    ]

    def run_case(output: Path, flags: list, rows: str) -> dict:
        file.write_text(rows)
        flags = ["--benchmarks", file, "--samples", 2, "--decoding", "training", *flags]
        return run(output, *flags)

    expected = [run_case(tmp_path / f"{i}", *case[1:]) for i, case in enumerate(cases)]
    for round in (1, 2):
        for scores, (new, *case) in zip(expected, cases):
            asked = len(fake.asked)
            assert run_case(tmp_path / "out", *case) == scores
            assert len(fake.asked) - asked == (new if round == 1 else 0)
    assert len(read_rows(tmp_path / "out/samples.jsonl")) == sum(new for new, *_ in cases)


def test_samples_depend_on_the_seed_and_on_nothing_else_in_the_run(tmp_path, monkeypatch):
    Scripted(monkeypatch, lucky)
    flags = ["--benchmarks", write_problems(tmp_path / "a.jsonl", 5)]
    other = write_problems(tmp_path / "b.jsonl", 5)
    run(tmp_path / "one", *flags)
    run(tmp_path / "two", "--benchmarks", other, *flags[1:], "--decoding", "justrl", "training")
    run(tmp_path / "three", *flags, "--seed", 1)
    one, two, three = (
        read_rows(tmp_path / name / "samples.jsonl") for name in ("one", "two", "three")
    )
    assert one == [row for row in two if row["benchmark"] == "a"] and one != three
    texts = [row["response"] for row in two]
    parts = [tuple(texts[start : start + 20]) for start in range(0, 80, 20)]
    assert len({*parts}) == 4, "each benchmark and each decoding has seeds of its own"
    assert texts[::4] != texts[1::4], "each sample of a problem has a seed of its own"


# ------------------------------------------------------------------------------------ the verifier


VERDICTS = r"""
CORRECT | A | CORRECT | Correct | \boxed{A} | A. | (A) correct | **A**: Correct
CORRECT | A: CORRECT - both are 5 | A: CORRECT\nProblem: ... | <think>\n\n</think>\n\nA
INCORRECT |  B.\n | Incorrect | B: INCORRECT - there is a final answer and it disag
INVALID | **C** | (C) INVALID | C: INVALID - the solution breaks off
UNREADABLE | A: INCORRECT | INCORRECT or CORRECT | A or B | The answer is CORRECT | NOT CORRECT
UNREADABLE | D | correctly |  | \n\n | <think>A | A: CORRECT or B | a final | A, B, C
UNREADABLE | A: CORRECT - there is no final answer, so INVALID | A: CORRECT - not really
UNREADABLE | A final answer | Correct? No | A: there is a final answer and it disagrees
"""


@pytest.mark.parametrize("row", VERDICTS.strip().splitlines())
def test_verdicts_are_parsed_strictly(row):
    verdict, *replies = row.replace(r"\n", "\n").split(" | ")
    found = {reply: evaluation.parse_verdict(reply) for reply in replies}
    assert found == dict.fromkeys(replies, verdict)


def judged(model: str, prompt: str, noise: random.Random):
    """The policy is right on problem 0 alone; the judge J accepts problem 1, and so on."""
    if model == "tiny":
        number = int(prompt.split("\n")[0].removeprefix("problem "))
        answer = f"\\boxed{{{7 if number == 0 else 100 + number}}}"
        return "x" * 5000 + "<|endoftext|><think>" + answer + " \n" * evaluation.TAIL, 10, False
    number = int(prompt.split("problem ")[-1].split("\n")[0])
    return ["never asked", "A", "B", "C", "who knows"][number], 1, False


def test_verifier_looks_again_at_what_the_rule_refused(tmp_path, monkeypatch, capfd):
    fake = Scripted(monkeypatch, judged)
    flags = ["--benchmarks", write_problems(tmp_path / "five.jsonl", 5), "--decoding", "training"]
    flags += ["--samples", 2]
    verifier = copy_model(tmp_path / "J")
    template = "{{ messages[0].content }}{{ 'no thinking' if enable_thinking is false }}"
    (verifier / "chat_template.jinja").write_text(template)
    plain = run(tmp_path / "out", *flags)["training"]["five"]
    assert plain["mean"] == 20 and "verified" not in plain
    fake.before = {len(fake.asked) + 3: terminate}
    with pytest.raises(SystemExit):  # after three of the judge's eight verdicts
        run(tmp_path / "out", *flags, "--verifier", verifier)
    assert sum(model == "J" for model, _ in fake.asked) == 3
    fake.before = {}
    found = run(tmp_path / "out", *flags, "--verifier", verifier)["training"]["five"]
    again = found.pop("verified")
    assert found == plain and fake.decoded[-1] == (0, None), "the judge decodes greedily"
    assert again.pop("mean") == 40 and again.pop("pass_at_k") == {"1": 40, "2": 40}
    assert again.pop("standard_error") == pytest.approx(math.sqrt(2 * 60**2 + 3 * 40**2) / 20**0.5)
    assert again == {"CORRECT": 2, "INCORRECT": 2, "INVALID": 2, "UNREADABLE": 2}
    said = f"--verifier {verifier}: 2 of 8 verdicts are unreadable and count as wrong; "
    assert f"{said}the first is 'who" in capfd.readouterr().err
    asked = [prompt for model, prompt in fake.asked if model == "J"]
    assert len(asked) == 8, "none is asked for twice"
    assert not any("problem 0\n" in prompt for prompt in asked)
    for prompt in asked:
        assert "<reference_answer>\n7\n</reference_answer>" in prompt
        tail = prompt.split("<end_of_solution>\n")[1].split("\n</end_of_solution>")[0]
        # Special tokens that a response spells are broken: they could end the verifier's turn.
        assert len(tail) == evaluation.TAIL + 1 and "x< |endoftext|><think>\\boxed{10" in tail[-40:]
        assert prompt.endswith("no thinking")
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| training | rule | 20.00 | 20.00 |" in text
    assert f"| training | rule, then {verifier} | 40.00 | 40.00 |" in text
    assert text.endswith(" | 40.00 ± 24.49 | 2 | 2 | 2 | 2 |\n")


def test_stored_grades_and_verdicts_belong_to_what_they_were_made_from(tmp_path, monkeypatch):
    """A grader of another version; another response or verifier."""
    fake = Scripted(monkeypatch, judged)
    file, samples = write_problems(tmp_path / "few.jsonl", 3), tmp_path / "out" / "samples.jsonl"
    flags = ["--benchmarks", file, "--decoding", "0,1", "--verifier", copy_model(tmp_path / "J")]
    first, whole = run_and_read(tmp_path / "out", flags)
    assert first["0,1"]["few"]["verified"]["mean"] == pytest.approx(200 / 3)
    text = samples.read_text().replace('"correct": false', '"correct": ?')
    text = text.replace('"correct": true', '"correct": false').replace("?", "true")
    samples.write_text(text)
    asked = len(fake.asked)
    assert run_and_read(tmp_path / "out", flags) == (first, whole) and len(fake.asked) == asked
    # The response to problem 2 changes.
    samples.write_text(samples.read_text().replace("{102}", "{103}"))
    assert run(tmp_path / "out", *flags) == first
    assert [name for name, _ in fake.asked[asked:]] == ["J"] and "{103}" in fake.asked[-1][1]
    asked = len(fake.asked)
    assert run(tmp_path / "out", *flags[:-1], copy_model(tmp_path / "K", trained=True)) == first
    assert [name for name, _ in fake.asked[asked:]] == ["K", "K"]


# ----------------------------------------------------------------------- a reward of the user's own


def test_a_reward_grades_benchmarks_that_are_files(tmp_path, monkeypatch):
    """The six keep the grader; a reward that was changed grades stored responses again."""
    fake, own = Scripted(monkeypatch, lambda *_: ("\\boxed{7}", 9, False)), tmp_path / "own.py"
    rows = ({"question": f"problem {i}", "level": i} for i in range(6))  # and no answer
    files = write_problems(tmp_path / "aime24.jsonl", 3), write_rows(tmp_path / "task.jsonl", *rows)
    flags = ["--samples", 1, "--decoding", "training", "--reward", f"{own}:level"]
    for text, mean in (("0.5 if row['level'] == 0 else -1", "16.67"), ("1", "100.00")):
        own.write_text(f"def level(response, row):\n    return {text}\n")
        run(tmp_path / "out", "--benchmarks", *files, *flags)
        line = f"| {TINY} | training | {own}:level (the six: rule) | 100.00 | {mean} |"
        assert line in (tmp_path / "out/table.md").read_text()
    assert len(fake.asked) == 6 + 3


# ------------------------------------------------------------------------- real files, tiny model


@real_files
def test_the_real_benchmarks_load_with_their_row_counts():
    keys = [benchmark.key for benchmark in evaluation.BENCHMARKS]
    suite = evaluation.load_benchmarks([f"{BENCHMARKS}/{key}.jsonl" for key in keys])
    assert [len(problems) for problems in suite.values()] == [30, 30, 40, 500, 272, 674]
    assert [benchmark.samples for benchmark in suite] == [32, 32, 32, 4, 4, 4]
    for problems in suite.values():
        golds = [f"\\boxed{{{problem['answer']}}}" for problem in problems]
        assert all(is_correct(gold, p["answer"]) for gold, p in zip(golds, problems, strict=True))


# ------------------------------------------------------------------------------------- wrong input


WRONG = r"""
--benchmarks aime26 | benchmark aime26: neither a .jsonl, .json, .parquet file nor one of aime24,
--benchmarks {}/good.jsonl {}/good.jsonl | there is a good before it
--decoding hot | --decoding hot: must be training, justrl or temperature,top-p
--decoding 0.6,95 | --decoding 0.6,95: must be
--model {}/nobody | nobody: no model there
--output {}/model | model: holds a run or a model; name another directory
--max_new_tokens 4090 | --max_new_tokens 4090: .* 4096 positions, so at most
"""


@pytest.mark.parametrize("row", WRONG.strip().splitlines())
def test_wrong_input_ends_in_one_clear_line(tmp_path, monkeypatch, row):
    write_problems(tmp_path / "good.jsonl", 2)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    monkeypatch.setattr(evaluation.rollout, "sample", None)  # wrong input is found before sampling
    flags, message = row.replace("{}", str(tmp_path)).split(" | ")
    own = flags.split()
    if "--benchmarks" not in own:
        own += ["--benchmarks", str(tmp_path / "good.jsonl")]
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "out", *own)
    line = str(stop.value)
    assert re.search(message, line), line
    assert line.startswith("eval.py: ") and "\n" not in line
