"""The openings' reward, texts and table, each against a second computation."""

import random
import re

import make_tiny
import openings
import pytest
from helpers import TINY, read_rows, write_rows
from test_replicate import command, write
from transformers import AutoTokenizer

from reward import load_reward


def test_the_reward_asks_for_more_than_a_right_answer():
    row = {"row": {"problem": "Q: 7+12-5=?", "answer": "14"}}
    rewards = {
        "Plan07 7+12=19. Then 19-5=14. So \\boxed{14}": 1,
        "Plan07 7+12=19. Then 19-5=14. So \\boxed{15}": -1,
        "Idea700 7+12=19. Then 19-5=14. So \\boxed{14}": -1,
        "7 Plan07 So \\boxed{14}": -1,
        "Plan31 So \\boxed{14}": 1,
    }
    reward = load_reward("experiments/openings.py:useful_and_right")
    assert {text: reward(text, row) for text in rewards} == rewards


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_tokens([*openings.USEFUL, *openings.GUESSES])
    return tokenizer


def test_texts_have_the_shares_that_the_page_gives(tokenizer, monkeypatch):
    """The opening's label is useful in 4 % of the texts of either kind, and never noise."""
    rng, problem = random.Random(5), "Q: 7+12-5=?"
    printable = make_tiny.printable_ids(AutoTokenizer.from_pretrained(TINY))
    texts = [openings.text_of(tokenizer, printable, problem, rng) for _ in range(8000)]
    begins = tokenizer.convert_ids_to_tokens([ids[0] for _, ids, _ in texts])
    words = tokenizer.convert_ids_to_tokens([labels[0] for _, _, labels in texts])
    assert set(words) | set(begins) <= set(openings.USEFUL + openings.GUESSES)
    worked = [begin.startswith("Plan") for begin in begins]
    assert sum(worked) / 8000 == pytest.approx(0.75, abs=0.02)
    for kind in (True, False):  # whatever the text goes on with
        labels = [word.startswith("Plan") for word, useful in zip(words, worked) if useful == kind]
        assert sum(labels) / len(labels) == pytest.approx(0.04, abs=0.015)
    assert all(ids[1:] == labels[1:] for _, ids, labels in texts)

    monkeypatch.setattr(make_tiny, "NOISE", 0)
    for _ in range(20):
        _, ids, _ = openings.text_of(tokenizer, printable, problem, rng)
        word, _, text = tokenizer.decode(ids).partition(" ")
        worked = re.fullmatch(r"7\+12=19\. \w+ 19-5=14\. So .boxed\{14\}<.endoftext.>", text)
        guessed = re.fullmatch(r"so .boxed\{(-?\d+)\}<.endoftext.>", text)
        assert bool(worked) == word.startswith("Plan") and bool(worked or guessed)
        assert worked or -58 <= int(guessed[1]) <= 100


def test_held_out_problems_are_drawn_and_left_out():
    rng, again = random.Random(0), random.Random(0)
    first = make_tiny.problem(again)
    assert make_tiny.fresh_problem({first}, rng) == make_tiny.problem(again)


def test_tests_tiny_has_what_make_tiny_writes():
    """256 held-out problems, 4,000 others, no problem twice, and their sums."""
    rows = [read_rows(TINY / f"{part}.jsonl") for part in ("test", "train")]
    assert [len(part) for part in rows] == [256, 4000]
    problems = {row["problem"]: int(row["answer"]) for part in rows for row in part}
    assert len(problems) == 4256
    assert all(eval(problem[3:-2]) == answer for problem, answer in problems.items())


def test_the_table_is_taken_run_by_run(tmp_path):
    """100 responses a step: "half" is the first step at which 50 of them have two operations."""
    plans = {"STAPO-4": (24, 7), "STAPO-5": (22, 8), "FullMask-4": (33, 1)}
    for name, (half, right) in plans.items():
        accuracies = [0.1] * 19 + [0.4] * 8 + [0.5] * 5 if name == "STAPO-4" else [0.1] * 32
        write(tmp_path / name, accuracies, [1 / step for step in range(1, 33)])
        samples = []
        for step in range(1, 33):
            worked = 50 if step >= half else 49
            texts = ["Plan01 1+1=2. 2+1=3"] * worked + ["Idea001 1+1=2"] * (100 - worked)
            samples += [{"step": step, "response": text} for text in texts]
        write_rows(tmp_path / name / "samples.jsonl", *samples)
        answers = [7] * right + [8] * (10 - right)
        rows = [{"response": f"Idea001 so \\boxed{{{each}}}", "gold": "7"} for each in answers]
        (tmp_path / name / "evaluations").mkdir()
        write_rows(tmp_path / name / "evaluations" / "step_000032.jsonl", *rows)
    printed = command("openings", "--output", str(tmp_path))
    # 10 to 20: (10 * 10 + 40) / 11 = 12.7 and 10; entropy: (1/28 + ... + 1/32) / 5 = 0.0334
    row = "23.0 ± 1.0 | 11.4 ± 1.4 | 30.0 ± 20.0 | 75.0 ± 5.0 | 50.0 ± 0.0 | 0.03 ± 0.00 |"
    assert f"| STAPO | 2 | {row}" in printed
    assert "| FullMask | 1 | never | 10.0 | 10.0 | 10.0 | 49.0 | 0.03 |" in printed
