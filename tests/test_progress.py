"""The time that is left, in the line of each step."""

import re

import pytest
from helpers import run

import stapo
from support import progress


def a_step(rollout: float, update: float) -> dict:
    return {"step": 1, "rollout_seconds": rollout, "update_seconds": update}


@pytest.mark.parametrize(
    ("seconds", "steps", "words"),
    [
        ([(1.5, 0.5)], 3, "6 s"),
        ([(80, 20)] * 3, 78, "2.2 h"),
        ([(80, 20), (900, 300), (80, 24)], 10, "17 min"),  # one slow step does not count: 1,040 s
        ([(1, 0)] * 20 + [(1200, 60)] * 10, 2920, "42.6 days"),  # the last ten alone
    ],
)
def test_what_is_left_is_as_long_as_a_usual_recent_step(seconds, steps, words):
    lines = [a_step(*both) for both in seconds]
    lines.insert(1, {"step": 0, "eval": {}})
    assert progress.time_left(lines, steps) == words


def test_responses_are_shown_at_powers_of_two_and_at_the_end(capsys):
    """Without a right answer in the data, step 1 has none that boxes could be compared with."""
    line = dict.fromkeys("accuracy entropy silenced_fraction sampling_z sampling_gap".split(), 0.0)
    line |= {"response_length": 9.0, "rollout_seconds": 1.0, "update_seconds": 1.0}
    sample = {"problem": "1+1", "gold": "", "response": "?", "reward": -1.0}
    for step in range(1, 7):
        progress.report_step(line | {"step": step}, sample, 6, [])
    out, err = capsys.readouterr()
    assert re.findall(r"^--- step (\d)", out, re.MULTILINE) == ["1", "2", "4", "6"]
    assert "no response is right" not in err


def test_the_line_of_a_step_ends_with_the_time_left(tmp_path, capsys, monkeypatch):
    """The last step has none; a resumed run counts the steps that it has left."""
    asked, real = [], progress.time_left

    def time_left(lines, steps):
        asked.append(([line["step"] for line in lines], steps))
        return real(lines, steps)

    monkeypatch.setattr(progress, "time_left", time_left)
    run(tmp_path / "run", "--steps 2")
    stapo.main(f"--resume {tmp_path / 'run'} --steps 4".split())
    lines = re.findall("^step .*", capsys.readouterr().err, re.MULTILINE)
    left = [re.fullmatch(r"step \d of \d: .* s, about \d+ s left", line) for line in lines]
    assert list(map(bool, left)) == [True, False, True, False]
    assert asked == [([1], 1), ([1, 2, 3], 1)]
