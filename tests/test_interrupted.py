"""However a program ends, what continues it gives what the program gives uninterrupted."""

import json
import os
import signal

import pytest
import torch.distributed.checkpoint as dcp
from helpers import TINY, lines, read_rows, run, weights

import eval as evaluation
import stapo
from support.run_folder import checkpoints

ROWS = "--samples 2 --limit 6 --instruction= --max_new_tokens 40 --rollout_batch_size 4"
ROUND = "--eval_every 1 --eval_samples 2 --eval_limit 6 --rollout_batch_size 4"
PROGRAMS = {  # a run of two steps; one of a step between two evaluations; an evaluation
    "run": "--method full-mask --seed 3",
    "evaluated": f"--steps 1 {ROUND} --eval_benchmarks {TINY}/test.jsonl",
    "eval.py": f"--model {TINY} --decoding training {ROWS} --benchmarks {TINY}/test.jsonl",
}


def start(program: str, output, more: str = "") -> None:
    if program == "eval.py":
        evaluation.main(f"{PROGRAMS[program]} --output {output}".split())
    else:
        run(output, PROGRAMS[program] + more)


def go_on(program: str, output) -> None:
    start(program, output) if program == "eval.py" else stapo.main(["--resume", str(output)])


def left(program: str, output) -> tuple:
    """What two programs of the same flags have in common."""
    files = [*output.glob("samples.jsonl"), *output.glob("evaluations/*")]
    texts = {file.name: file.read_bytes() for file in files}
    if program == "eval.py":
        return texts, json.loads((output / "scores.json").read_text())["scores"]
    return texts, lines(output), weights(output)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """{program: what it leaves uninterrupted}."""
    folder = tmp_path_factory.mktemp("whole")
    for program in PROGRAMS:
        start(program, folder / program)
    return {program: left(program, folder / program) for program in PROGRAMS}


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    raise stapo.RewardError("a failure")


def count(monkeypatch, owner, name: str, number: int, happens) -> list:
    """What owner's sampler or reward is asked for; `happens` at its number-th response."""
    real, seen = getattr(owner, name), []

    def sample(*args, **options):
        for ended in real(*args, **options):
            due = len(seen) < number <= len(seen) + len(ended)
            seen.extend(ended)
            if due and happens is stop:
                stop()
            yield ended
            if due and happens is fail:
                fail()

    def load_reward(spec):
        def reward(*args):
            seen.append(args)
            if len(seen) == number:
                happens()
            return given(*args)

        given = real(spec)
        return reward

    monkeypatch.setattr(owner, name, sample if name == "sample" else load_reward)
    return seen


@pytest.mark.parametrize(
    "program, name, number, happens, steps",
    [
        ("run", "sample", 3, stop, 0),
        ("run", "sample", 19, stop, 1),
        ("run", "load_reward", 3, stop, 0),
        ("run", "load_reward", 19, stop, 1),
        ("run", "load_reward", 19, fail, 1),
        ("evaluated", "sample", 5, stop, 0),
        ("evaluated", "sample", 12 + 5, fail, 1),
        ("eval.py", "sample", 5, stop, 0),
        ("eval.py", "sample", 5, fail, 0),
    ],
)
def test_interrupted_equals_uninterrupted(
    whole, tmp_path, monkeypatch, capsys, program, name, number, happens, steps
):
    """Amid the responses or the rewards of a program, after so many whole steps.

    It is left at the next response, not at its rollout's end. No whole step and no response of an
    evaluation is made twice. What is missing is said, and the signals are given back.
    """
    output, owner = tmp_path / "run", stapo if program == "run" else evaluation.rollout
    seen = count(monkeypatch, owner, name, number, happens)
    with pytest.raises(SystemExit) as end:
        start(program, output)
    assert (end.value.code == 130) == (happens is stop)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    said = f"stopped after step {steps} of 1, before its evaluation; continue"
    assert (said in capsys.readouterr().out) == (program == "evaluated")
    assert number <= len(seen) < (number + 1 if name == "load_reward" else (steps + 1) * 12)
    assert [path.name for path in checkpoints(output)] == ["step_000001"] * steps
    if program != "run":
        file = "samples.jsonl" if program == "eval.py" else f"evaluations/step_00000{steps}.jsonl"
        assert len(read_rows(output / file)) == len(seen) - 12 * steps
    go_on(program, output)
    assert left(program, output) == whole[program]
    assert program == "run" or len(seen) == (12 if program == "eval.py" else 24)


def test_a_full_disk_amid_a_checkpoint_costs_nothing(whole, tmp_path, monkeypatch):
    """The checkpoint before it is whole, and the half is removed when the run goes on."""
    output, write = tmp_path / "run", dcp.FileSystemWriter.write_data

    def write_data(self, *args):
        if "step_000002" in str(self.path):
            raise OSError("No space left on device")
        return write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(dcp.FileSystemWriter, "write_data", write_data)
        with pytest.raises((OSError, dcp.api.CheckpointException)):
            start("run", output, " --save_every 1 --keep_last 1")
    names = sorted(path.name for path in output.glob("checkpoints/*"))
    assert names == ["step_000001", "step_000002.partial"]
    go_on("run", output)
    assert left("run", output) == whole["run"]
    assert not list(output.glob("checkpoints/*.partial"))
