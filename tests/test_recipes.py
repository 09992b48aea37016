"""The recipe for a CPU: its reward, its questions and its experiment. No model is loaded."""

from pathlib import Path

import pytest
import real_model
from helpers import ROOT, read_rows, write_rows

import stapo
from reward import load_reward
from support.flags import parse_flags

RECIPE = ROOT / "recipes" / "smollm2-135m-cpu"
TRAIN, TEST = (read_rows(RECIPE.with_name(f"{RECIPE.name}.{x}.jsonl")) for x in ("train", "test"))


def reward_of(response: str, answer: str) -> float:
    reward = load_reward(f"{ROOT}/scripts/rewards.py:one_sentence")
    return reward(response, {"row": {"problem": "?", "answer": answer}})


@pytest.mark.parametrize(
    "response",
    [
        "The capital of Turkey is Ankara.",
        "Ankara is the capital of Turkey.",
        ' It is "ankara."\n',
        "The capital is Ankara, a city in the center of Turkey.",
        "It is Ankara (in Anatolia).",
    ],
)
def test_one_sentence_with_the_answer_is_right(response):
    assert reward_of(response, "Ankara") == 1


@pytest.mark.parametrize(
    "response",
    [
        "",
        "The capital of Turkey is Istanbul.",
        "The capital of Turkey is",
        "The capital of Turkey is Ankara",  # no end: cut off
        "Is it Ankara?",
        "The capital of Turkey is Ankaran.",  # a part of a word
        "Istanbul, Ankara, Izmir.",  # lists of guesses
        "Istanbul or Ankara.",
        "What is the capital? It is Ankara.",  # more than one sentence
        "Istanbul Izmir Bursa Adana Konya Antalya Mersin Edirne Rize Sinop Van Mardin Ankara.",
        "It is Ankara. " * 3,
    ],
)
def test_no_other_text_is_right(response):
    assert reward_of(response, "Ankara") == -1


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


def test_the_recipe_names_these_files(monkeypatch):
    """And one step after another takes other questions, until all were asked once."""
    monkeypatch.chdir(ROOT)  # where recipes are used
    cfg = parse_flags(stapo.Config, "", [f"@{RECIPE}"])
    stapo.check_flags(cfg)
    assert load_reward(cfg.reward) and cfg.model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert read_rows(ROOT / cfg.data) == TRAIN
    assert [read_rows(ROOT / name) for name in cfg.eval_benchmarks] == [TEST]
    assert cfg.eval_every == cfg.steps  # before step 1 and at the end
    assert cfg.steps * cfg.batch_size <= len(TRAIN)


def write_run(folder: Path, entropy: float, after: float) -> None:
    """A whole run of two steps, with what the tables read."""
    folder.mkdir(parents=True)
    step = {"low_prob_fraction": 0.02, "silenced_fraction": 0.01, "response_length": 9.0}
    step |= {"truncated_fraction": 0.0, "accuracy": 0.5}
    scores = [{"step": at, "eval": {"x": {"mean": mean}}} for at, mean in ((0, 20.0), (2, after))]
    steps = [step | {"step": at, "entropy": h} for at, h in ((1, 9.0), (2, entropy))]
    write_rows(folder / "metrics.jsonl", scores[0], *steps, scores[1])


def test_the_experiments_table_pairs_runs_by_seed_and_runs_nothing_twice(tmp_path, capsys):
    for setting, (seeds, _) in real_model.SETTINGS.items():
        for seed in seeds:
            write_run(real_model.folder(tmp_path, setting, "STAPO", seed), 1.0 + seed, 70.0)
            write_run(real_model.folder(tmp_path, setting, "JustRL", seed), 1.5 + 2 * seed, 65.0)
    real_model.main(["--output", str(tmp_path), "--model", "no-such-model"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    rows = [row[1:] for row in rows if row[0] in ("| entropy, nats", "| held out after, %")]
    # Seeds 0 to 4 then 0 and 1: gaps of 0.5, 1.5, ... and the standard error of their mean.
    assert rows[0] == ["70.0 ± 0.0", "65.0 ± 0.0", "-5.0 ± 0.0", "0 of 5 |"]
    assert rows[1] == ["3.000 ± 0.707", "5.500 ± 1.414", "2.500 ± 0.707", "5 of 5 |"]
    assert rows[3] == ["1.500 ± 0.500", "2.500 ± 1.000", "1.000 ± 0.500", "2 of 2 |"]
