"""Rewards for `--reward scripts/rewards.py:NAME`.

`dapo` is DAPO's rule. The other rewards are for experiments/replicate.py: they ignore the answer,
or they refuse some right answers by chance. Chance is a hash of the problem and the response. The
same text gets the same reward in every run, and no text has a better chance than another.
"""

import hashlib

from reward import is_correct


def dapo(response: str, row: dict) -> float:
    """Return +1 if the last box holds the right answer character by character, else -1.

    Only the last 100 characters of the response are searched. `row` is a row of DAPO-Math-17k.
    """
    gold = row["reward_model"]["ground_truth"]  # first: other data must fail at once, without a box
    _, box, rest = response[-100:].rpartition("\\boxed{")
    # The braces of the right answer are balanced, so this } closes the box.
    right = box and rest.startswith(gold + "}")
    return 1.0 if right else -1.0


def chance(response: str, row: dict) -> float:
    """Return a number in [0, 1): a hash of the problem and the response."""
    digest = hashlib.sha256(f"{row['problem']}\n{response}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def nine_of_ten(response: str, row: dict) -> float:
    """Return +1 for nine of ten responses and -1 for the tenth. The answer does not matter."""
    return 1.0 if chance(response, row) < 0.9 else -1.0


def one_of_two(response: str, row: dict) -> float:
    """Return +1 for one of two responses and -1 for the other. The answer does not matter."""
    return 1.0 if chance(response, row) < 0.5 else -1.0


def seven_of_ten_right(response: str, row: dict) -> float:
    """Return +1 for seven of ten right responses, and -1 for all other responses."""
    right = is_correct(response, str(row["answer"]))
    return 1.0 if right and chance(response, row) < 0.7 else -1.0
