"""One, two and four ranks compute the same thing; a run survives being killed at any moment."""

import contextlib
import fcntl
import multiprocessing
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from helpers import TIMINGS, TINY, lines, make_random_model, write_rows
from ranks import (
    CASES,
    ON_FOUR,
    begin,
    fail_beside_a_process,
    fail_in,
    launch,
    train_on_canned_rollouts,
    train_with_clocks_apart,
    work_on_hosts_apart,
    work_where_missing_names_are_remembered,
)
from transformers import AutoTokenizer

import eval as evaluation
import stapo
from support import distributed
from support.distributed import device  # in its module a fixture replaces it
from support.run_folder import checkpoints


def make_folder(folder: Path) -> Path:
    """What ranks.py needs; weights drawn wide enough for confident, low-probability tokens."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    for name, tied in (("tied", True), ("untied", False)):
        model = make_random_model(len(tokenizer) + 8, tied, spread=0.6)
        model.config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [{"problem": f"Q: {i}+{i}=?", "answer": str(2 * i)} for i in range(1, 9)]
    write_rows(folder / "problems.jsonl", *rows)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every case on one rank, and on two or on four; a hang is a failure."""
    folder = make_folder(tmp_path_factory.mktemp("ranks"))
    for world in (1, 2, 4):
        log = folder / f"log{world}"
        codes = launch(train_on_canned_rollouts, world, log, folder)
        logs = "".join(Path(f"{log}.{rank}").read_text()[-3000:] for rank in range(world))
        assert codes == [0] * world, logs
    return folder


@pytest.mark.parametrize("case", CASES)
def test_ranks_agree(folder, case):
    alone = torch.load(folder / f"world1-{case}.pt")
    many = torch.load(folder / f"world{4 if case in ON_FOUR else 2}-{case}.pt")
    updates = {"stapo": 4, "stopped": 4, "poisoned": 1}.get(case, 2)
    assert len(many["gradients"]) == len(alone["gradients"]) == updates
    for ours, theirs in zip(many["gradients"], alone["gradients"], strict=True):
        scale = max(float(g.abs().max()) for g in theirs)
        assert (scale == 0) == (case == "nothing-to-learn")
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * scale)
    for ours, theirs in zip(many["metrics"], alone["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - set(TIMINGS):
            same = theirs[key] if theirs[key] is None else pytest.approx(theirs[key], 1e-4, 1e-6)
            assert ours[key] == same, key


@pytest.mark.parametrize("world", [1, 4])
def test_a_stop_amid_updates_costs_nothing(folder, world):
    """Asked for on one rank after the first of step 1's two updates: the second is done, too."""
    stopped, whole = (
        torch.load(folder / f"world{world}-{case}.pt") for case in ("stopped", "stapo")
    )
    for ours, theirs in zip(stopped["gradients"], whole["gradients"], strict=True):
        assert all(map(torch.equal, ours, theirs))
    rows = [
        [{**row, **dict.fromkeys(TIMINGS)} for row in run["metrics"]] for run in (stopped, whole)
    ]
    assert len(rows[0]) == 2 and rows[0] == rows[1]


def test_two_ranks_evaluate_and_save_together(tmp_path):
    """What one rank does, but for a checkpoint that the second rank's clock asks for."""
    for world in (1, 2):
        codes = launch(train_with_clocks_apart, world, tmp_path / "log", tmp_path / str(world))
        assert codes == [0] * world, (tmp_path / "log.0").read_text()[-3000:]
    said, silent = ((tmp_path / f"log.{rank}").read_text() for rank in (0, 1))
    assert "2 x CPU (threads: 1): float32 weights" in said and "the run is in" in said
    assert "step 1 of" not in silent and "the run is in" not in silent  # rank 0 speaks for all
    one, two = (lines(tmp_path / name) for name in "12")
    assert [line["step"] for line in one] == [line["step"] for line in two] == [0, 1, 2, 2]
    assert "eval" in two[0] and two[0] == one[0]
    assert "eval" in two[3] and two[3]["eval"].keys() == one[3]["eval"].keys()
    assert two[1] == pytest.approx(one[1], rel=1e-3, abs=1e-5)
    rows = [(tmp_path / name / "evaluations" / "step_000000.jsonl").read_bytes() for name in "12"]
    assert rows[0] == rows[1] and rows[0].count(b"\n") == 15
    saved = [[p.name for p in checkpoints(tmp_path / name)] for name in "12"]
    assert saved == [["step_000002"], ["step_000001", "step_000002"]]
    again = ["--resume", str(tmp_path / "2")]  # both ranks know that nothing is left to evaluate
    assert launch(stapo.main, 2, tmp_path / "log", again, timeout=60) == [0, 0]
    assert lines(tmp_path / "2") == two


APART = "--output run: ranks see different directories; put it on a file system that .* share"


@pytest.mark.parametrize(
    "copies, message", [("", APART), ("01", APART), ("0", "--resume run: holds no run .*")]
)
def test_ranks_that_do_not_share_the_output_are_one_line(tmp_path, copies, message):
    """On a new run, and with --resume of a run that each host has a copy of, or rank 0 alone."""
    own = f"--model {TINY} --data {TINY}/test.jsonl --steps 1 --batch_size 2 --mini_batch_size 2"
    own = f"{own} --group_size 2 --max_new_tokens 4 --instruction= --output".split()
    if copies:
        stapo.main([*own, str(tmp_path / "whole")])
    for rank in "01":
        (tmp_path / rank).mkdir()
        if rank in copies:
            shutil.copytree(tmp_path / "whole", tmp_path / rank / "run")
    flags = ["--resume", "run"] if copies else [*own, "run"]
    assert all(launch(work_on_hosts_apart, 2, tmp_path / "log", stapo.main, tmp_path, flags))
    for rank in (0, 1):
        said = (tmp_path / f"log.{rank}").read_text()
        assert re.search(rf"^stapo.py: .*{message} \(rank {rank}\)$", said, re.MULTILINE), said
        assert "Traceback" not in said


@pytest.mark.parametrize("flag", ["data", "eval_benchmarks"])
def test_hosts_with_other_files_of_the_same_name_are_refused(tmp_path, flag):
    rows = [{"problem": f"Q: {i}+{i}=?", "answer": str(2 * i)} for i in (1, 2, 3)]
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        write_rows(tmp_path / str(rank) / "data.jsonl", *rows[: 2 + rank])
    files = {"data": f"{TINY}/test.jsonl", "eval_benchmarks": f"{TINY}/test.jsonl"}
    flags = f"--model {TINY} --steps 1 --batch_size 2 --mini_batch_size 2 --group_size 2 "
    flags += f"--max_new_tokens 4 --instruction= --eval_every 1 --output {tmp_path}/run"
    for name, file in (files | {flag: "data.jsonl"}).items():
        flags += f" --{name} {file}"
    assert any(
        launch(work_on_hosts_apart, 2, tmp_path / "log", stapo.main, tmp_path, flags.split())
    )
    said = (tmp_path / "log.0").read_text()
    assert re.search(rf"^stapo.py: --{flag}: hosts have different files", said, re.MULTILINE)
    assert not (tmp_path / "run").exists()


TRAINING = f"--data {TINY}/test.jsonl --steps 1 --batch_size 2 --mini_batch_size 2 --group_size 2"
EVALUATION = f"--benchmarks {TINY}/test.jsonl --limit 2 --samples 1"


@pytest.mark.parametrize(
    "program, flags, other",
    [
        (stapo.main, TRAINING, ["--lr", "1", "--data", "nowhere.jsonl"]),
        (evaluation.main, EVALUATION, ["--benchmarks", "nowhere.jsonl"]),
    ],
)
def test_the_flags_of_rank_0_count(tmp_path, program, flags, other):
    for rank in "01":
        (tmp_path / rank).mkdir()
    flags += f" --model {TINY} --max_new_tokens 4 --instruction= --output {tmp_path}/run"
    every = program, tmp_path, flags.split(), *other
    assert launch(work_on_hosts_apart, 2, tmp_path / "log", *every) == [0, 0]


@pytest.mark.parametrize("program", [stapo.main, evaluation.main])
def test_a_new_directory_is_looked_for_by_its_maker_alone(tmp_path, program):
    """Other hosts on a network file system would see for a minute that it is missing."""
    flags = f"--model {TINY} --instruction= --max_new_tokens 4 --output {tmp_path}/runs/new"
    if program is stapo.main:
        flags += f" --data {TINY}/test.jsonl --steps 1 --batch_size 2 --mini_batch_size 2"
    else:
        flags += f" --benchmarks {TINY}/test.jsonl --limit 1 --samples 2 --decoding training"
    work = work_where_missing_names_are_remembered
    assert launch(work, 2, tmp_path / "log", program, flags.split()) == [0, 0]


def test_an_environment_that_cannot_work_is_one_line(monkeypatch, tmp_path):
    """A RANK that torchrun has not set; more ranks of a host than it has GPUs. No rank waits."""
    names = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in (*names, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    lacks = "^eval.py: RANK is in the environment without WORLD_SIZE, LOCAL_RANK, MASTER_PORT: "
    with pytest.raises(SystemExit, match=lacks):
        evaluation.main(["--model", str(TINY), "--output", str(tmp_path)])
    for name in names:
        monkeypatch.setenv(name, "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(distributed, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit, match="^stapo.py: 4 ranks on a host of 2 GPUs: .* 2$"):
        stapo.main(["@tests/tiny/args"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    distributed.refuse_environment()  # a rank for each GPU


def test_each_rank_of_a_host_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device() == torch.device("cuda", 3)


def test_counts_are_summed_exactly():
    assert distributed.all_sum({"tokens": 2**24 + 1}) == {"tokens": 2**24 + 1}


def test_layers_compute_in_bfloat16_and_gradients_are_reduced_in_float32(monkeypatch):
    """Each group's policy, as FSDP2 gets it on a GPU: two layers, and the root.

    Inputs are not cast: some models' rotary cosines are float32, in the model that samples too.
    """
    given = []
    monkeypatch.setattr(distributed, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(distributed, "init_device_mesh", lambda *_: None)
    monkeypatch.setattr(distributed, "fully_shard", lambda *_, **options: given.append(options))
    distributed.shard(make_random_model())
    policies = [options.get("mp_policy") for options in given]
    assert [p and (p.param_dtype, p.reduce_dtype, p.cast_forward_inputs) for p in policies] == [
        (torch.bfloat16, torch.float32, False)
    ] * 3


@pytest.mark.parametrize(
    "place", ["update", "writing", "input", "model", "records", "checkpoint", "flags"]
)
def test_a_rank_that_fails_ends_the_job(tmp_path, place):
    """With its traceback, or its line where the input is wrong, although the others wait for it.

    What is wrong with a rank's input is every rank's line: none has the traceback of a collective.
    """
    codes = launch(fail_in, 2, tmp_path / "log", place, tmp_path, timeout=60)
    failing = 0 if place in ("writing", "model", "records", "checkpoint") else 1
    logs = [(tmp_path / f"log.{rank}").read_text() for rank in (0, 1)]
    message = "a_failure_in_the_flags" if place == "flags" else f"a failure in the {place}"
    assert codes[failing] == (2 if place == "flags" else 1) and message in logs[failing]
    assert ("Traceback" in logs[failing]) == (place in ("update", "writing"))
    if place not in ("update", "writing", "flags"):
        assert not any("Traceback" in said for said in logs)


def test_a_rank_that_ends_leaves_no_process_of_a_reward_behind(tmp_path):
    assert launch(fail_beside_a_process, 2, tmp_path / "log", tmp_path / "lock") == [1, 1]
    deadline = time.monotonic() + 5
    with (tmp_path / "lock").open() as file:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            assert time.monotonic() < deadline, "a process still has the lock"
            time.sleep(0.05)


def test_every_method_is_trained_on_several_ranks():
    """But those with no number over ranks, and one that is STAPO with another entropy."""
    named = {word for flags, *_ in CASES.values() for word in flags.split()}
    assert set(stapo.METHODS) - named == {"justrl", "full-mask", "high-entropy"}


def test_cases_are_what_they_say(folder):
    lines = {case: torch.load(folder / f"world1-{case}.pt")["metrics"][0] for case in CASES}
    assert lines["stapo"]["silenced"] > 3 and lines["stapo"]["candidates"] > 8
    assert lines["stapo"]["skipped_updates"] == 0 and lines["poisoned"]["skipped_updates"] == 1
    assert lines["idle-ranks"]["zero_advantage_fraction"] == 0.5
    assert lines["early-end"]["silenced"] > 3  # by the random numbers of each rank's responses
    assert lines["nothing-to-learn"]["clip_low"] is None
    assert lines["poisoned"]["loss"] is None


# ------------------------------------------------------------------------------ crash and resume


KILLS = int(os.environ.get("KILLS", 1))
RANKS = int(os.environ.get("RANKS", 1))
STEPS = 3 * KILLS


def start(output: Path) -> list[multiprocessing.Process]:
    """A run of three steps for each kill; continued where it has a checkpoint."""
    flags = f"@tests/tiny/args --steps {STEPS} --batch_size 4 --mini_batch_size 2 --save_every 1"
    flags += f" --data tests/tiny/test.jsonl --output {output}"
    if checkpoints(output):
        flags = f"--resume {output}"
    else:
        shutil.rmtree(output, ignore_errors=True)
    return begin(stapo.main, RANKS, Path(f"{output}.log"), flags.split())


def end(processes: list[multiprocessing.Process], output: Path, codes: tuple = (0,)) -> None:
    """Waits until every rank has ended with one of these exit codes; a hang is a failure."""
    for rank, process in enumerate(processes):
        process.join(timeout=120)
        code = process.exitcode  # None: it still runs
        process.kill()
        assert code in codes, Path(f"{output}.log.{rank}").read_text()[-2000:]


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    """SIGKILL at a random moment (KILLS=20: more, SIGTERM in turn; RANKS=2): no step twice."""
    whole, output = start(tmp_path / "whole"), tmp_path / "run"
    moments = torch.rand(KILLS, generator=torch.Generator().manual_seed(3))
    for number, moment in enumerate(moments.tolist()):
        newest = checkpoints(output)[-1:]
        processes = start(output)
        deadline = time.monotonic() + 60
        while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
            if checkpoints(output)[-1:] != newest:  # it has saved again
                break
            time.sleep(0.01)
        time.sleep(moment)
        for process in processes:
            process.kill() if number % 2 == 0 else process.terminate()
        end(processes, output, (0, -signal.SIGKILL))  # a stop is no failure
    assert len(lines(output)) < STEPS or KILLS > 1
    end(start(output), output)
    end(whole, tmp_path / "whole")
    assert len(lines(output)) == STEPS and lines(output) == lines(tmp_path / "whole")
