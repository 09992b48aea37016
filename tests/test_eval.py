"""The evaluation: exact scores of a scripted model, interruption, ranks, the verifier, errors."""

import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import BENCHMARKS, ROOT, TINY

import eval as evaluation
from reward import is_correct
from rollout import INSTRUCTION, Response, encode_prompt, load_model, load_tokenizer

real_files = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="STAPO_BENCHMARKS names no folder")


class Letters:
    """A tokenizer whose ids are code points, so that a fake model can read its prompts."""

    chat_template = None

    def __call__(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])


class Scripted:
    """In place of rollout.sample: answers as told, counts what it is asked, fails on demand."""

    def __init__(self, monkeypatch, script):
        self.script, self.asked, self.fail_at, self.calls = script, [], None, 0
        monkeypatch.setattr(evaluation.rollout, "sample", self)
        monkeypatch.setattr(evaluation.rollout, "load_tokenizer", lambda name: Letters())
        monkeypatch.setattr(evaluation.rollout, "load_model", lambda name, *_: name)

    def __call__(self, model, tokenizer, prompts, *, seed=0, temperature, **options):
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        self.calls += 1
        seeds, responses = seed if seed else range(len(prompts)), []
        for prompt, own in zip(prompts, seeds, strict=True):
            text, noise = "".join(map(chr, prompt)), random.Random(own)
            text, length, truncated = self.script(model, text, noise)
            responses.append(Response(prompt, [0] * length, truncated, text))
            self.asked.append((model, "".join(map(chr, prompt))))
        return responses


def lucky(model: str, prompt: str, noise: random.Random):
    """Right half of the time, by the seed: what a real sampler looks like from outside."""
    answer = 7 if noise.random() < 0.5 else noise.randint(8, 99)
    return f"so \\boxed{{{answer}}}", noise.randint(5, 50), noise.random() < 0.1


def write_problems(path: Path, count: int, gold: str = "7") -> str:
    rows = [{"problem": f"problem {i}", "answer": gold} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(output: Path, *flags: object) -> dict:
    """main() with these flags -> {decoding: {benchmark: scores}} of scores.json."""
    evaluation.main(["--model", "M", "--output", str(output), *map(str, flags)])
    return json.loads((output / "scores.json").read_text())["scores"]


def rows_of(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------------------ scores


def test_scores_of_a_scripted_model_are_exact(tmp_path, monkeypatch):
    right = {"0": [1, 1, 0, 0], "1": [0, 0, 0, 0], "2": [1, 1, 1, 1], "3": [0, 0, 1, 0]}
    turns = {name: iter(marks) for name, marks in right.items()}

    def script(model, prompt, noise):
        number = prompt.split("\n")[0].removeprefix("problem ")
        assert prompt == f"problem {number}\n{INSTRUCTION}\n"
        if number == "1":
            return "no idea", 100, True
        return ("\\boxed{7}" if next(turns[number]) else "\\boxed{8}"), 20, False

    Scripted(monkeypatch, script)
    file = write_problems(tmp_path / "four.jsonl", 4)
    found = run(tmp_path / "out", "--benchmarks", file, "--decoding", "training")
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


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    for n in range(1, 8):
        for right in range(n + 1):
            marks = [True] * right + [False] * (n - right)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(marks, k))
                share = sum(map(any, subsets)) / len(subsets)
                assert evaluation.pass_at_k(n, right, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_of_a_sample_count_that_is_no_power_of_two():
    rows = [{"problem": 0, "correct": i == 0} for i in range(6)]
    found = evaluation.accuracy(rows)
    assert list(found["pass_at_k"]) == [1, 2, 4, 6]
    assert found["pass_at_k"][6] == 100 and found["standard_error"] is None


def test_tables_show_the_paper_s_layout(tmp_path, monkeypatch):
    Scripted(monkeypatch, lucky)
    for benchmark in evaluation.BENCHMARKS:
        write_problems(tmp_path / f"{benchmark.key}.jsonl", 2)
    scores = run(tmp_path / "out", "--data_dir", tmp_path)
    header, _, row = (tmp_path / "out" / "table.md").read_text().splitlines()[:3]
    titles = "AIME24 | AIME25 | AMC23 | MATH500 | Minerva | OlympiadBench | mean"
    assert header == f"| model | decoding | graded by | {titles} |"
    pairs = [
        [scores[decoding][benchmark.key]["mean"] for decoding in ("training", "justrl")]
        for benchmark in evaluation.BENCHMARKS
    ]
    pairs.append([sum(column) / 6 for column in zip(*pairs, strict=True)])
    cells = " | ".join(f"{first:.2f} ({second:.2f})" for first, second in pairs)
    assert row == f"| M | training (justrl) | rule | {cells} |"
    assert [scores["training"][b.key]["samples"] for b in evaluation.BENCHMARKS] == [32] * 3 + [
        4
    ] * 3


# ------------------------------------------------------------------------------ long runs survive


def damage(path: Path, how: str) -> None:
    """Leave the file as a crash might: whole, its last line torn, or half a line after it."""
    data = path.read_bytes() if path.exists() else b""
    if how == "torn" and data:
        path.write_bytes(data[:-9])
    elif how == "newline lost" and data:
        path.write_bytes(data[:-1])
    elif how == "half a line":
        path.write_bytes(data + b'{"benchmark": "many", "decoding": "tr\xc3')


@pytest.mark.parametrize("how", ["whole", "torn", "newline lost", "half a line"])
@pytest.mark.parametrize("fail_at", [0, 1, 3, 4])
def test_interrupted_and_continued_equals_uninterrupted(tmp_path, monkeypatch, fail_at, how):
    file = write_problems(tmp_path / "many.jsonl", 7)  # 2 x 28 responses, in rounds of 10, 10, 8
    flags = ("--benchmarks", file, "--rollout_batch_size", 10)
    monkeypatch.setattr(evaluation, "ROUND", 1)
    whole = run_and_read(Scripted(monkeypatch, lucky), tmp_path / "whole", flags)
    fake = Scripted(monkeypatch, lucky)
    fake.fail_at = fail_at
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", *flags)
    finished = len(fake.asked)
    damage(tmp_path / "parts" / "samples.jsonl", how)
    fake.fail_at = None
    assert run_and_read(fake, tmp_path / "parts", flags) == whole
    torn = how == "torn" and fail_at > 0  # that row alone is sampled once more
    assert finished == [0, 10, None, 28, 38][fail_at] and len(fake.asked) == 56 + torn
    calls = fake.calls
    assert run_and_read(fake, tmp_path / "parts", flags) == whole
    assert fake.calls == calls, "a finished evaluation samples nothing"


def test_another_number_of_samples_keeps_those_that_are_there(tmp_path, monkeypatch):
    fake = Scripted(monkeypatch, lucky)
    flags = ("--benchmarks", write_problems(tmp_path / "many.jsonl", 7), "--decoding", "training")
    run(tmp_path / "out", *flags, "--samples", 2)
    scores = run(tmp_path / "out", *flags, "--samples", 4)["training"]["many"]
    assert len(fake.asked) == 28 and scores["samples"] == 4
    assert run(tmp_path / "whole", *flags, "--samples", 4)["training"]["many"] == scores


def run_and_read(fake: Scripted, output: Path, flags) -> tuple[dict, bytes]:
    return run(output, *flags), (output / "samples.jsonl").read_bytes()


def test_another_decoding_joins_and_other_flags_are_refused(tmp_path, monkeypatch):
    fake = Scripted(monkeypatch, lucky)
    flags = ["--benchmarks", write_problems(tmp_path / "few.jsonl", 3)]
    first = run(tmp_path / "out", *flags, "--decoding", "training")
    both = run(tmp_path / "out", *flags, "--decoding", "training", "0.6,0.95", "1.0,1")
    assert both["training"] == first["training"] and list(both) == ["training", "0.6,0.95"]
    assert len(fake.asked) == 2 * 12 == len(rows_of(tmp_path / "out"))
    with pytest.raises(
        SystemExit, match=r"--output .*out: holds samples drawn with --seed 0, not 5"
    ):
        run(tmp_path / "out", *flags, "--seed", 5)
    write_problems(tmp_path / "few.jsonl", 3, gold="9")
    with pytest.raises(SystemExit, match="holds samples of another few; name another directory"):
        run(tmp_path / "out", *flags)
    assert len(fake.asked) == 24


def test_samples_depend_on_the_seed_and_on_nothing_else_in_the_run(tmp_path, monkeypatch):
    Scripted(monkeypatch, lucky)
    flags = ["--benchmarks", write_problems(tmp_path / "a.jsonl", 5)]
    other = write_problems(tmp_path / "b.jsonl", 3)
    run(tmp_path / "one", *flags)
    run(tmp_path / "two", "--benchmarks", other, *flags[1:], "--decoding", "justrl", "training")
    run(tmp_path / "three", *flags, "--seed", 1)
    one, two, three = (
        [row for row in rows_of(tmp_path / name) if row["benchmark"] == "a"]
        for name in ("one", "two", "three")
    )
    assert one == two and one != three
    training, justrl = (
        [row["response"] for row in one if row["decoding"] == name]
        for name in ("training", "justrl")
    )
    assert training != justrl, "each decoding has seeds of its own"


def test_greedy_decoding_takes_one_sample(tmp_path, monkeypatch):
    fake = Scripted(monkeypatch, lucky)
    flags = ["--benchmarks", write_problems(tmp_path / "a.jsonl", 5), "--decoding", "0,1"]
    found = run(tmp_path / "out", *flags)["0,1"]["a"]
    assert found["samples"] == 1 and len(fake.asked) == 5


# ------------------------------------------------------------------------------------ the verifier


@pytest.mark.parametrize(
    "reply, verdict",
    [
        ("A", "CORRECT"),
        (" B.\n", "INCORRECT"),
        ("**C**", "INVALID"),
        ("CORRECT", "CORRECT"),
        ("A: CORRECT\nProblem: ...", "CORRECT"),
        ("(C) INVALID", "INVALID"),
        ("A: INCORRECT", "UNREADABLE"),
        ("INCORRECT or CORRECT", "UNREADABLE"),
        ("A or B", "UNREADABLE"),
        ("The answer is CORRECT", "UNREADABLE"),
        ("NOT CORRECT", "UNREADABLE"),
        ("D", "UNREADABLE"),
        ("correctly", "UNREADABLE"),
        ("", "UNREADABLE"),
        ("\n\n", "UNREADABLE"),
    ],
)
def test_verdicts_are_parsed_strictly(reply, verdict):
    assert evaluation.parse_verdict(reply) == verdict


def judged(model: str, prompt: str, noise: random.Random):
    """The policy M is right on problem 0 alone; the judge J accepts problem 1, and so on."""
    if model == "M":
        number = int(prompt.split("\n")[0].removeprefix("problem "))
        return "x" * 5000 + f"\\boxed{{{7 if number == 0 else 100 + number}}}", 10, False
    number = int(prompt.split("problem ")[-1].split("\n")[0])
    return ["never asked", "A", "B", "C", "who knows"][number], 1, False


def test_verifier_looks_again_at_what_the_rule_refused(tmp_path, monkeypatch):
    fake = Scripted(monkeypatch, judged)
    flags = ["--benchmarks", write_problems(tmp_path / "five.jsonl", 5), "--decoding", "training"]
    flags += ["--samples", 2, "--rollout_batch_size", 3]
    monkeypatch.setattr(evaluation, "ROUND", 1)
    plain = run(tmp_path / "out", *flags)["training"]["five"]
    assert plain["mean"] == 20 and "verified" not in plain
    fake.fail_at, policy_calls = fake.calls + 1, fake.calls
    with pytest.raises(KeyboardInterrupt):  # in the second of the judge's three rounds
        run(tmp_path / "out", *flags, "--verifier", "org/J")
    fake.fail_at = None
    found = run(tmp_path / "out", *flags, "--verifier", "org/J")["training"]["five"]
    again = found.pop("verified")
    assert found == plain
    assert again.pop("mean") == 40 and again.pop("pass_at_k") == {"1": 40, "2": 40}
    assert again.pop("standard_error") == pytest.approx(math.sqrt(2 * 60**2 + 3 * 40**2) / 20**0.5)
    assert again == {"CORRECT": 2, "INCORRECT": 2, "INVALID": 2, "UNREADABLE": 2}
    assert fake.calls == policy_calls + 3, "no verdict is asked for twice"
    asked = [prompt for model, prompt in fake.asked if model == "org/J"]
    assert len(asked) == 8 and not any("problem 0\n" in prompt for prompt in asked)
    for prompt in asked:
        assert "<reference_answer>\n7\n</reference_answer>" in prompt
        tail = prompt.split("<end_of_solution>\n")[1].split("\n</end_of_solution>")[0]
        assert len(tail) == evaluation.TAIL and tail.endswith("}")
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| M | training | rule | 20.00 | 20.00 |" in text
    assert "| M | training | rule, then verifier | 40.00 | 40.00 |" in text
    assert text.splitlines()[-1].endswith(" 2 | 2 | 2 | 2 |")


# ------------------------------------------------------------------------- real files, tiny model


@real_files
def test_the_real_benchmarks_load_with_their_row_counts():
    keys = [benchmark.key for benchmark in evaluation.BENCHMARKS]
    suite = evaluation.load_benchmarks(keys, str(BENCHMARKS))
    assert [len(problems) for problems in suite.values()] == [30, 30, 40, 500, 272, 674]
    assert [benchmark.samples for benchmark in suite] == [32, 32, 32, 4, 4, 4]
    for problems in suite.values():
        golds = [f"\\boxed{{{problem['answer']}}}" for problem in problems]
        assert all(is_correct(gold, p["answer"]) for gold, p in zip(golds, problems, strict=True))


@real_files
def test_tiny_model_runs_end_to_end_over_all_six(tmp_path):
    flags = ["--model", TINY, "--data_dir", BENCHMARKS, "--limit", 3, "--samples", 2]
    flags += ["--decoding", "training", "0,1", "--max_new_tokens", 12, "--rollout_batch_size", 5]
    scores = run(tmp_path / "out", *flags)
    assert [len(found) for found in scores.values()] == [6, 6]
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 6 * 3 * (2 + 1)
    for row in rows:
        assert row["correct"] == is_correct(row["response"], row["gold"])
        assert 1 <= row["length"] <= 12 and (row["length"] == 12 or not row["truncated"])
    # the greedy responses are those of one plain generate call
    model, tokenizer = load_model(str(TINY)), load_tokenizer(str(TINY))
    for row in [row for row in rows if row["decoding"] == "0,1" and row["problem"] == 2]:
        problem = evaluation.load_problems(str(BENCHMARKS / f"{row['benchmark']}.jsonl"))[2][
            "problem"
        ]
        ids = torch.tensor([encode_prompt(tokenizer, problem)])
        out = model.generate(ids, do_sample=False, max_new_tokens=12, top_k=None, top_p=None)
        assert row["response"] == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    run(tmp_path / "again", *flags)
    assert rows_of(tmp_path / "again") == rows
    run(tmp_path / "other", *flags, "--seed", 1)
    greedy, other = (
        [r for r in some if r["decoding"] == "0,1"] for some in (rows, rows_of(tmp_path / "other"))
    )
    assert greedy == other and rows_of(tmp_path / "other") != rows


HELD_OUT = ["--benchmarks", TINY / "test.jsonl", "--limit", 6, "--instruction", ""]
HELD_OUT += ["--max_new_tokens", 48, "--rollout_batch_size", 5]


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> Path:
    """An evaluation of the tiny model by a single process."""
    output, threads = tmp_path_factory.mktemp("held_out") / "out", torch.get_num_threads()
    torch.set_num_threads(1)
    run(output, "--model", TINY, *HELD_OUT)
    torch.set_num_threads(threads)
    return output


def test_evaluate_gives_a_training_run_the_same_scores(held_out):
    suite = evaluation.load_benchmarks([str(TINY / "test.jsonl")], limit=6)
    cfg = evaluation.Config("", max_new_tokens=48, rollout_batch_size=5, instruction="")
    model, tokenizer = load_model(str(TINY)).train(), load_tokenizer(str(TINY))
    found = evaluation.evaluate(model, tokenizer, suite, cfg)
    wanted = json.loads((held_out / "scores.json").read_text())["scores"]["training"]
    assert json.loads(json.dumps(found)) == wanted and wanted["test"]["no_box_fraction"] < 1
    assert model.training


def test_ranks_share_every_round_evenly(monkeypatch):
    """Three ranks, 2 x 5 rows each a round: 13 and 8 missing rows are 5, 4, 4 and 3, 3, 2."""
    keys = [evaluation.Key("a", "d", p, 0) for p in range(23)]
    keys += [evaluation.Key("b", "d", p, 0) for p in range(9)]
    held, shares = [*keys[5:15], keys[23]], []
    monkeypatch.setattr(evaluation, "ROUND", 2)
    for rank in range(3):
        monkeypatch.setattr(evaluation, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(evaluation, "world_size", lambda: 3)
        monkeypatch.setattr(evaluation.distributed, "gather", lambda rows: [rows])
        journal, share = evaluation.Journal(), []
        journal.keep(key._asdict() | {"correct": True} for key in held)

        def work(asked, share=share):
            share.append(asked)
            return [{"correct": True} for key in asked]

        journal.complete(keys, 5, work)
        shares.append(share)
    assert [[len(asked) for asked in share] for share in shares] == [[5, 3], [4, 3], [4, 2]]
    worked = [key for share in shares for asked in share for key in asked]
    assert sorted(worked) == sorted(set(keys) - set(held))


def test_two_ranks_give_what_one_gives(held_out, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    for name in ("settings.json", "samples.jsonl"):  # the two ranks finish what one began
        (output / name).write_bytes((held_out / name).read_bytes())
    lines = (output / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (output / "samples.jsonl").write_bytes(b"".join(lines[:7])[:-20])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [ROOT / "eval.py", "--model", TINY, "--output", output, *HELD_OUT]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (output / "samples.jsonl").read_bytes() == (held_out / "samples.jsonl").read_bytes()
    one, two = (json.loads((at / "scores.json").read_text())["scores"] for at in (held_out, output))
    assert one == two
    assert done.stdout.count("| model | decoding |") == 1, "rank 0 alone prints the table"
    assert sorted(path.name for path in output.iterdir()) == sorted(
        path.name for path in held_out.iterdir()
    )


# ------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--benchmarks", "aime26"], "--benchmarks aime26: neither a file nor one of aime24, "),
        (["--benchmarks", "aime24"], "--data_dir .*: holds no aime24.jsonl or aime24.parquet"),
        (["--benchmarks", "{}/none.jsonl"], "none.jsonl: no such file"),
        (["--benchmarks", "{}/empty.jsonl"], "empty.jsonl: the file is empty"),
        (["--benchmarks", "{}/mute.jsonl"], "mute.jsonl: row 2 has no answer"),
        (["--benchmarks", "{}/good.jsonl", "{}/good.jsonl"], "there is a good before it"),
        (["--decoding", "hot"], "--decoding hot: has to be training, justrl or temperature,top-p"),
        (["--decoding", "0.5"], "--decoding 0.5: has to be"),
        (["--decoding=-1,1"], "--decoding -1,1: has to be"),
        (["--decoding", "1,0"], "--decoding 1,0: has to be"),
        (["--decoding", "nan,1"], "--decoding nan,1: has to be"),
        (["--samples", "-2"], "--samples -2: has to be at least 0"),
        (["--max_new_tokens", "0"], "--max_new_tokens 0: has to be at least 1"),
        (["--verifier", "{}/nobody"], "nobody: no tokenizer there"),
        (["--output", "{}/good.jsonl"], "--output .*good.jsonl: .*name another directory"),
        (["--model", "{}/nobody"], "nobody: no tokenizer there"),
    ],
)
def test_wrong_input_ends_in_one_clear_line(tmp_path, monkeypatch, flags, message):
    write_problems(tmp_path / "good.jsonl", 2)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "mute.jsonl").write_text('{"problem": "a", "answer": "1"}\n{"problem": "b"}\n')
    monkeypatch.setattr(evaluation.rollout, "sample", None)  # wrong input is found before sampling
    own = [text.format(tmp_path) for text in flags]
    if "--benchmarks" not in own:
        own += ["--benchmarks", str(tmp_path / "good.jsonl")]
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "out", "--model", TINY, "--data_dir", tmp_path, *own)
    line = str(stop.value)
    assert re.search(message, line), line
    assert line.startswith("eval.py: ") and "\n" not in line
