"""However a run ends, --resume gives what an uninterrupted run gives; and flags beside --resume."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import FLAGS, ROOT, TINY, lines, refused, run, weights, write_rows
from ranks import launch

import stapo
from support.checkpoints import checkpoints
from support.files import write_jsonl

# A reward to which something happens once, at one of its calls on the last rank.
OWN = """import os, signal, time
from pathlib import Path
calls = []
def letters(response, row):
    calls.append(1)
    happening = Path(__file__).with_name("happening")
    last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
    if happening.exists() and len(calls) == NUMBER and last:
        text = happening.read_text()
        happening.unlink()
        exec(text)
    return len(response) % row["scale"]
"""
STOP = "for each in 15, 15, 2, 1: os.kill(os.getpid(), each)"  # SIGTERM twice, SIGINT, SIGHUP
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def flags(folder: Path, number: int = 0, happening: str = "") -> str:
    """Four steps of 16 responses each, and evaluations of 8 before step 1, after 2 and after 4.

    Both are rewarded by OWN. A gold has a character that ends a line, but not a line of a file.
    """
    rows = [{"problem": f"Q: {i}+1=?", "answer": "7\u20288", "scale": 2 + i} for i in range(6)]
    data = write_rows(folder / "problems.jsonl", *rows)
    (folder / "own.py").write_text(OWN.replace("NUMBER", str(number)))
    if happening:
        (folder / "happening").write_text(happening)
    return f"""{FLAGS} --steps 4 --data {data} --reward {folder}/own.py:letters --eval_every 2
        --eval_benchmarks {data} --eval_samples 2 --eval_limit 4 --method grpo --beta 0.5"""


def left(output: Path) -> tuple:
    texts = {file.name: file.read_bytes() for file in output.glob("evaluations/*")}
    return texts, (output / "samples.jsonl").read_bytes(), lines(output), weights(output)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run(folder / "run", flags(folder))
    return left(folder / "run")


@pytest.mark.parametrize(
    "number, happening, code, steps, said",
    [
        (3, STOP, 130, [], "stopped after step 0 of 4; continue with"),  # in the first evaluation
        (51, STOP, 130, [2, 3], "stopped after step 3 of 4; continue with"),
        (35, STOP, 130, [2], "stopped after step 2 of 4; continue with"),
        (67, STOP, 130, [2, 4], "stopped after step 4 of 4; continue with"),
        (43, "raise ValueError", 1, [2], r"stapo.py: --reward .*: ValueError\(\) at .*, line 1"),
        # A reward that fails in a step: the run is saved at the step before it.
        (3, "raise ValueError", 1, [], "stopped after step 0 of 4; continue with: python"),
        (35, "raise BaseException", 1, [1], "stopped after step 1 of 4; continue with: python"),
        (67, "raise ValueError", 1, [2, 3], "stopped after step 3 of 4; continue with: python"),
        (67, KILL, -9, [2], "step 3 of 4: "),  # step 3 has no checkpoint
        (51, "os.chdir(Path(__file__).parent)", 0, [2, 4], "the run is in "),
    ],
)
def test_what_goes_on_equals_what_was_never_interrupted(
    whole, tmp_path, number, happening, code, steps, said
):
    """In an evaluation, in a step; by signals that are repeated, a reward that fails, a kill.

    A stop waits for the end of the step. --output is relative: a reward may change the directory.
    """
    output = tmp_path / "run"
    argv = flags(tmp_path, number, happening).split()
    argv += ["--output", os.path.relpath(output, ROOT)]
    assert launch(stapo.main, 1, tmp_path / "log", argv) == [code]
    log = (tmp_path / "log.0").read_text()
    assert re.search(said, log), log
    assert log.count("stopping after this step") == (code == 130)
    assert [path.name for path in checkpoints(output)] == [f"step_00000{n}" for n in steps]
    # A stop in step 2 does not wait for the evaluation after it.
    assert (output / "evaluations" / "step_000002.jsonl").exists() == (number > 43)
    # What a kill can leave: a torn line, and half of a checkpoint.
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "acc')
    (output / "checkpoints" / "step_000007.partial" / "trainer").mkdir(parents=True)
    stapo.main(["--resume", str(output)])
    assert left(output) == whole
    assert not list(output.glob("checkpoints/*.partial"))


def test_a_stop_on_one_of_two_ranks_ends_both_after_the_step(whole, tmp_path):
    """And what two ranks evaluate and save is what one does."""
    output = tmp_path / "run"
    argv = [*flags(tmp_path, 4 + 3, STOP).split(), "--output", str(output)]
    assert launch(stapo.main, 2, tmp_path / "log", argv, timeout=60) == [130, 130]
    said, silent = ((tmp_path / f"log.{rank}").read_text() for rank in (0, 1))
    assert "step 1 of 4" in said and "step 1 of" not in silent  # rank 0 speaks for all
    assert [path.name for path in checkpoints(output)] == ["step_000001"]
    again = f"--resume {output} --steps 2".split()
    for _ in "ab":  # the second time both know that nothing is left to evaluate
        assert launch(stapo.main, 2, tmp_path / "log", again, timeout=60) == [0, 0]
    assert [line["step"] for line in lines(output)] == [0, 1, 2, 2]
    assert (output / "evaluations/step_000000.jsonl").read_bytes() == whole[0]["step_000000.jsonl"]
    assert len(weights(output)) == len(whole[-1])  # tied weights are there once


def test_a_reward_that_fails_on_one_of_two_ranks_saves_the_run(tmp_path):
    """In step 2: the other rank waits for its word, and both save step 1."""
    argv = [*flags(tmp_path, 4 + 8 + 3, "raise ValueError").split(), "--output", f"{tmp_path}/run"]
    assert launch(stapo.main, 2, tmp_path / "log", argv, timeout=60) == [1, 1]
    for rank in (0, 1):
        log = (tmp_path / f"log.{rank}").read_text()
        assert re.search(rf"ValueError\(\) at row {{'problem': 'Q: .* \(rank {rank}\)", log), log
    assert "stopped after step 1 of 4" in (tmp_path / "log.0").read_text()
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step_000001"]


def test_signals_are_as_before_after_a_run(tmp_path):
    """Also if it was stopped. Within it nohup's SIGHUP stays ignored, and SIGTERM ends a child."""
    reward = """os.kill(os.getpid(), signal.SIGHUP)
child = os.fork()
if child == 0:
    time.sleep(9)
    os._exit(0)
time.sleep(1)
os.kill(child, signal.SIGTERM)
assert os.waitpid(child, 0)[1] == signal.SIGTERM
"""
    mine = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: lambda *_: None}
    mine[signal.SIGHUP] = signal.SIG_IGN
    before = {number: signal.signal(number, handler) for number, handler in mine.items()}
    try:
        run(tmp_path / "run", flags(tmp_path, 3, reward) + " --steps 2 --eval_every 0")
        assert {number: signal.getsignal(number) for number in mine} == mine
        with pytest.raises(SystemExit, match="^130$"):
            run(tmp_path / "stopped", flags(tmp_path, 3, STOP) + " --eval_every 0")
        assert {number: signal.getsignal(number) for number in mine} == mine
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------- flags beside --resume


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps, saved at the end: tests continue a copy of it."""
    output = tmp_path_factory.mktemp("runs") / "finished"
    run(output, "--method full-mask --seed 3 --max_prompt_tokens 20")
    return output


def test_flags_beside_resume_win_and_are_kept_with_their_step(finished, tmp_path, capsys):
    """The run is by a version that has no --beta yet."""
    output = shutil.copytree(finished, tmp_path / "run")
    config = json.loads((output / "config.json").read_text())
    del config["beta"]
    (output / "config.json").write_text(json.dumps(config))
    stapo.main(f"--resume {output} --steps 3 --tau_p 0.01 --seed 3".split())
    said = "\nchanged after step 2: tau_p 0.002 -> 0.01, steps 2 -> 3\n"
    assert said in capsys.readouterr().err
    stapo.main(f"--resume {output} --tau_p 0.1 --steps 3".split())
    config = json.loads((output / "config.json").read_text())
    assert config["changes"] == [
        {"step": 2, "tau_p": [0.002, 0.01], "steps": [2, 3]},
        {"step": 3, "tau_p": [0.01, 0.1]},
    ]
    assert (config["method"], config["seed"], config["steps"]) == ("full-mask", 3, 3)
    assert [line["step"] for line in lines(output)] == [1, 2, 3]


def test_a_weight_decay_beside_resume_wins_over_the_optimisers(finished, tmp_path):
    for decay in ("0.1", "100"):
        output = shutil.copytree(finished, tmp_path / decay)
        stapo.main(f"--resume {output} --steps 3 --weight_decay {decay}".split())
    assert weights(tmp_path / "0.1") != weights(tmp_path / "100")


def test_what_a_run_cannot_change_is_refused_by_name(finished, tmp_path, capsys):
    text = (TINY / "test.jsonl").read_text().replace('"answer": "', '"answer": "1', 1)
    (tmp_path / "other.jsonl").write_text(text)
    before = {file: file.read_bytes() for file in finished.glob("*.json*")}
    changed = {
        f"--data {tmp_path}/other.jsonl": f"test.jsonl' -> '{tmp_path}/other.jsonl'",
        "--reward scripts/rewards.py:dapo": "reward '' -> 'scripts/rewards.py:dapo'",
        "--max_prompt_tokens 13": "max_prompt_tokens 20 -> 13",
        "--instruction 1": "instruction '' -> '1'",
    }
    # Step 3 of another batch size would begin elsewhere in the list of problems.
    own = {"--batch_size 8": "batch_size 4 -> 8", "--chat_template none": "template '' -> 'none'"}
    for given, name in (changed | own).items():
        message = refused(capsys, f"--resume {finished} --steps 3 {given}")
        assert "a run keeps its problems, its chat template and its batch_size" in message
        assert name in message and (given in own or "data_fingerprint" in message)
        assert before == {file: file.read_bytes() for file in finished.glob("*.json*")}


def test_the_model_and_the_data_may_move(finished, tmp_path):
    """The checkpoint has tokenizer and config. Another text of the same problems is no change."""
    model = shutil.copytree(TINY, tmp_path / "model")
    data = shutil.copy(TINY / "test.jsonl", tmp_path / "data.jsonl")
    more = f"--method full-mask --seed 3 --max_prompt_tokens 20 --model {model} --data {data}"
    run(tmp_path / "run", f"{more} --steps 1")
    shutil.rmtree(model)
    os.remove(data)
    stapo.main(f"--steps 2 --data {TINY}/test.jsonl --resume {tmp_path}/run".split())
    assert lines(tmp_path / "run") == lines(finished)
    assert weights(tmp_path / "run") == weights(finished)


def test_a_checkpoint_has_its_name_when_it_is_whole(tmp_path, monkeypatch):
    """Here a disk is full before AdamW's moments are written."""

    def fail(*_args, **_options):
        raise OSError("No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.save", fail)
    with pytest.raises(OSError, match="No space"):
        run(tmp_path / "run", "--steps 1")
    assert (tmp_path / "run" / "checkpoints").exists() and not checkpoints(tmp_path / "run")


def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": 1}])
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError("No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_jsonl(tmp_path / "metrics.jsonl", [{"step": 2}])
    assert lines(tmp_path) == [{"step": 1}]


def test_a_lost_terminal_ends_no_run_before_it_is_saved(tmp_path, monkeypatch):
    """Nothing can be written to it: no line of a step, and not what SIGHUP says."""
    fail = Mock(side_effect=OSError(5, "Input/output error"))
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, Mock(write=fail, flush=fail))
    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(SystemExit, match="^130$"):
        run(tmp_path / "run", flags(tmp_path, 3, "os.kill(os.getpid(), 1)") + " --eval_every 0")
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step_000001"]
