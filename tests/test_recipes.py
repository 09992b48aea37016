"""The recipe for a CPU: its reward and its questions. No model is loaded."""

from helpers import ROOT, read_rows

from reward import load_reward

RECIPE = ROOT / "recipes" / "smollm2-135m-cpu"
TRAIN, TEST = (read_rows(RECIPE.with_name(f"{RECIPE.name}.{x}.jsonl")) for x in ("train", "test"))


def reward_of(response: str, answer: str) -> float:
    reward = load_reward(f"{ROOT}/scripts/rewards.py:one_sentence")
    return reward(response, {"row": {"problem": "?", "answer": answer}})


RIGHT = """
Ankara is the capital of Turkey.
 It is "ankara."
The capital is Ankara, a city in the center of Turkey."""

# No end; a part of a word; lists of guesses; more than one sentence; too many words.
WRONG = """
The capital of Turkey is
The capital of Turkey is Ankara
Is it Ankara?
The capital of Turkey is Ankaran.
Istanbul or Ankara.
What is the capital? It is Ankara.
Istanbul Izmir Bursa Adana Konya Antalya Mersin Edirne Rize Sinop Van Mardin Ankara.
It is Ankara. It is Ankara. It is Ankara."""


def test_one_sentence_with_the_answer_is_right_and_no_other_text():
    for response in RIGHT.split("\n")[1:]:
        assert reward_of(response, "Ankara") == reward_of(response + "\n", "Ankara") == 1, response
    for response in WRONG.split("\n"):
        assert reward_of(response, "Ankara") == -1, response


def test_the_answer_is_a_word_and_no_pattern():
    assert reward_of("7 times 4 is 28.", "28") == 1
    assert reward_of("7 times 4 is 128.", "28") == reward_of("It is -28.", "28") == -1
    assert reward_of("The capital of Haiti is Port-au-Prince.", "Port-au-Prince") == 1
    assert reward_of("It is abc.", "a.c") == -1


def test_the_questions():
    """No held-out question is trained on, and the question does not contain its answer."""
    rows = TRAIN + TEST
    assert len({row["problem"].lower() for row in rows}) == len(rows)
    assert len(TRAIN) >= 100 and len(TEST) >= 100
    for row in rows:
        question, answer = row["problem"], row["answer"]
        assert reward_of(f"The answer is {answer}.", answer) == 1, row
        assert reward_of(f"{question.rstrip('?')}.", answer) == -1, row  # an echo
