"""Rewards for `--reward scripts/rewards.py:NAME`."""


def dapo(response: str, row: dict) -> float:
    """DAPO's rule: return +1 if the last box holds the answer character by character, else -1.

    Only the last 100 characters of the response are searched. `row` is a row of DAPO-Math-17k.
    """
    gold = row["reward_model"]["ground_truth"]  # first: other data must fail at once, without a box
    _, box, rest = response[-100:].rpartition("\\boxed{")
    # The braces of the right answer are balanced, so this } closes the box.
    right = box and rest.startswith(gold + "}")
    return 1.0 if right else -1.0
