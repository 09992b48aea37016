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
        ([(1.5, 0.5)], 3, "00:06"),
        ([(80, 20)] * 3, 78, "2:10:00"),
        ([(80, 20), (900, 300), (80, 24)], 10, "17:20"),  # one slow step does not count: 1,040 s
        ([(1, 0)] * 20 + [(1200, 60)] * 10, 2920, "1022:00:00"),  # the last ten alone
    ],
)
def test_what_is_left_is_as_long_as_a_usual_recent_step(seconds, steps, words):
    lines = [a_step(*both) for both in seconds]
    lines.insert(1, {"step": 0, "eval": {}})
    assert progress.time_left(lines, steps) == words


LINE = dict.fromkeys("accuracy entropy silenced_fraction skipped_updates".split(), 0.0)
LINE |= {"sampling_z": 0.0, "sampling_gap": 0.0}
LINE |= {"response_length": 9.0, "rollout_seconds": 1.0, "update_seconds": 1.0}
LINE |= {"zero_advantage_fraction": 1.0}


def test_responses_are_shown_at_powers_of_two_and_at_the_end(capsys):
    """A reward of your own may read no box, so that none is asked for."""
    sample = {"problem": "1+1", "gold": "2", "response": "?", "reward": -1.0}
    for step in range(1, 7):
        progress.report_step(LINE | {"step": step}, sample, 6, [], boxes=False)
    out, err = capsys.readouterr()
    assert re.findall(r"^--- step (\d)", out, re.MULTILINE) == ["1", "2", "4", "6"]
    assert "no response is right" not in err


@pytest.mark.parametrize(("equal", "hint"), [(1.0, True), (0.25, False)])
def test_negative_rewards_that_differ_are_not_taken_for_a_wrong_form(capsys, equal, hint):
    """A reward of penalties alone has accuracy 0 and trains."""
    sample = {"problem": "1+1", "gold": "2", "response": "?", "reward": -0.3}
    line = LINE | {"step": 1, "zero_advantage_fraction": equal}
    progress.report_step(line, sample, 6, [], boxes=True)
    assert ("no response is right" in capsys.readouterr().err) == hint


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
    left = [re.fullmatch(r"step \d of \d: .* s, about \d\d:\d\d left", line) for line in lines]
    assert list(map(bool, left)) == [True, False, True, False]
    assert asked == [([1], 1), ([1, 2, 3], 1)]
