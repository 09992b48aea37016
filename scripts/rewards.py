"""Rewards for `--reward scripts/rewards.py:NAME`: DAPO's rule, and replicate.py's.

replicate.py's say nothing, or refuse right answers by chance. Chance is a hash of the problem and
the response alone: the same text gets the same reward in every run, and nothing about a text makes
its reward more likely.
"""

import hashlib

from reward import is_correct


def dapo(response: str, row: dict) -> float:
    """DAPO's strict rule: +1 where the last box is the right answer to the letter, else -1.

    The box has to stand in the last 100 characters. The row is one of DAPO-Math-17k.
    """
    _, box, rest = response[-100:].rpartition("\\boxed{")
    # Braces of a right answer are balanced, so that the box ends where the answer does.
    right = box and rest.startswith(row["reward_model"]["ground_truth"] + "}")
    return 1.0 if right else -1.0


def chance(response: str, row: dict) -> float:
    """A number in [0, 1), drawn by a hash of the problem and the response."""
    digest = hashlib.sha256(f"{row['problem']}\n{response}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def nine_of_ten(response: str, row: dict) -> float:
    """+1 for nine responses of ten, whatever they say."""
    return 1.0 if chance(response, row) < 0.9 else -1.0


def one_of_two(response: str, row: dict) -> float:
    """+1 for one response of two, whatever it says."""
    return 1.0 if chance(response, row) < 0.5 else -1.0


def seven_of_ten_right(response: str, row: dict) -> float:
    """+1 for seven of ten right responses; the other three and all wrong ones get -1."""
    right = is_correct(response, str(row["answer"]))
    return 1.0 if right and chance(response, row) < 0.7 else -1.0
