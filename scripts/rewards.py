"""Rewards for `--reward scripts/rewards.py:NAME`."""

import re


def dapo(response: str, row: dict) -> float:
    """DAPO's rule: return +1 if the last box holds the answer character by character, else -1.

    Only the last 100 characters of the response are searched. `row` is a row of DAPO-Math-17k.
    """
    gold = row["reward_model"]["ground_truth"]  # first: other data must fail at once, without a box
    _, box, rest = response[-100:].rpartition("\\boxed{")
    # The braces of the right answer are balanced, so this } closes the box.
    right = box and rest.startswith(gold + "}")
    return 1.0 if right else -1.0


def one_sentence(response: str, row: dict) -> float:
    """Return +1 for one sentence that ends, with the answer as a whole word, else -1.

    "The capital of Turkey is Ankara, a large city." is right for the answer Ankara. The answer must
    be among the first 12 words, and before the first comma, colon, slash, "or" and "and": a list of
    guesses counts as its first guess. "The opposite of far is far." is right for the answer far.
    """
    # It ends, and it holds no other sentence.
    sentence = re.fullmatch(r"[^.!?\n]+[.!]", response.replace('"', "").strip())
    return 1.0 if sentence and has_answer(response, row) else -1.0


def has_answer(text: str, row: dict) -> bool:
    """Whether a text has the answer where one_sentence looks for it. The text may go on."""
    start = re.split(r"[,;:/]|\bor\b|\band\b", text.replace('"', "").strip())[0]
    start = " ".join(start.split()[:12])
    answer = re.escape(row["answer"])
    return bool(re.search(rf"(?<![\w-]){answer}(?![\w-])", start, re.IGNORECASE))
