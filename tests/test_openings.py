"""The openings' reward, texts, counts and tables, each against a second computation."""

import itertools
import json
import random
import re

import make_tiny
import openings
import pytest
import torch
from helpers import TINY, to_batch

import stapo
from reward import load_reward
from rollout import Response, TokenStats, load_tokenizer


def test_rewards_ask_for_more_than_a_right_answer():
    row = {"row": {"problem": "Q: 7+12-5=?", "answer": "14"}}
    work = "7+12=19. Then 19-5=14. So \\boxed{14}"
    rewards = {  # of useful_and_right and worked_and_right
        f"Plan07 {work}": (1, 1),
        f"Plan07 {work[:-3]}15}}": (-1, -1),
        f"Idea700 {work}": (-1, 1),
        f"7 Plan07 {work}": (-1, 1),
        "Plan07 7+12-5=14. So \\boxed{14}": (1, -1),
        "Idea700 so \\boxed{14}": (-1, -1),
    }
    for name in ("useful_and_right", "worked_and_right"):
        reward = load_reward(f"experiments/openings.py:{name}")
        place = name == "worked_and_right"
        assert all(reward(text, row) == both[place] for text, both in rewards.items())


def test_texts_have_the_shares_that_the_page_gives(monkeypatch):
    """The opening's label is useful in 4 % of the texts of either kind, and never noise."""
    tokenizer, rng = openings.make_tokenizer(), random.Random(5)
    printable = make_tiny.printable_ids(load_tokenizer(str(TINY)))
    rows, problem = [], "Q: 7+12-5=?"
    for _ in range(8000):
        rows.append(openings.text_row(tokenizer, printable, problem, rng))
    words = tokenizer.convert_ids_to_tokens([label[0] for _, _, label in rows])
    begins = tokenizer.convert_ids_to_tokens([response[0] for _, response, _ in rows])
    assert set(words) | set(begins) <= set(openings.USEFUL + openings.GUESSES)
    worked = [begin.startswith("Plan") for begin in begins]
    assert sum(worked) / 8000 == pytest.approx(0.75, abs=0.02)
    for kind in (True, False):  # whatever the text goes on with
        labels = [word.startswith("Plan") for word, useful in zip(words, worked) if useful == kind]
        assert sum(labels) / len(labels) == pytest.approx(0.04, abs=0.015)
    assert all(response[1:] == labels[1:] for _, response, labels in rows)

    monkeypatch.setattr(make_tiny, "NOISE", 0)
    for _ in range(20):
        _, response, _ = openings.text_row(tokenizer, printable, problem, rng)
        word, _, text = tokenizer.decode(response).partition(" ")
        worked = re.fullmatch(r"7\+12=19\. \w+ 19-5=14\. So .boxed\{14\}<.endoftext.>", text)
        guessed = re.fullmatch(r"so .boxed\{(-?\d+)\}<.endoftext.>", text)
        assert bool(worked) == word.startswith("Plan") and bool(worked or guessed)
        assert worked or -58 <= int(guessed[1]) <= 100


def test_held_out_problems_are_in_no_text(tmp_path, monkeypatch):
    """Every second problem that is drawn is a held-out one."""
    held_out = json.loads((TINY / "test.jsonl").read_text().splitlines()[0])["problem"]
    drawn, texts = itertools.cycle([held_out, "Q: 2+3-4=?"]), []
    monkeypatch.setattr(make_tiny, "problem", lambda rng: next(drawn))
    monkeypatch.setattr(make_tiny, "pretrain", lambda model, draw, *_: texts.append(draw()[0]))
    tokenizer = openings.make_tokenizer()
    openings.make_base(tmp_path)
    printable = make_tiny.printable_ids(tokenizer)
    texts.append(make_tiny.batch(tokenizer, printable, {held_out}, 8, 0.0, random.Random(0))[0])
    for ids in texts:
        prompts = {tokenizer.decode(row).partition("\n")[0] for row in ids}
        assert prompts == {"Q: 2+3-4=?"}


def test_openings_are_counted_by_hand(tmp_path):
    """Two useful openings of right answers are rare, and one of them has the lower entropy."""
    ids = openings.make_tokenizer().convert_tokens_to_ids
    equals, other = ids("="), ids("7")
    texts = [
        [ids("Plan00"), equals, other, equals],  # rare, right: kept, its entropy is the highest
        [ids("Plan15"), equals, other, other],  # rare, right: silenced; one operation alone
        [ids("Plan03"), equals, equals, other],  # right, p = 0.5
        [ids("Idea000"), other, other, other],  # rare, right: a guess
        [ids("Plan04"), other, other, other],  # rare, wrong
    ]
    logp = torch.tensor([[0.001] + 3 * [0.9]] * 5).log()
    logp[2, 0] = torch.tensor(0.5).log()
    entropy = torch.zeros(5, 4)
    entropy[:, 0] = torch.tensor([7.0, 1.0, 1.0, 2.0, 1.0])
    responses = [Response([0, 0], text, truncated=False, text="") for text in texts]
    batch = to_batch(responses, [1, 1, 1, 1, -1], list(zip(logp, entropy)))
    cfg = stapo.Config(output=str(tmp_path))
    silenced = {"stapo": 1, "full-mask": 2, "justrl": 0}
    for name in silenced:
        openings.counted(stapo.METHODS[name]).choose(batch, TokenStats(*batch.old), cfg)
    lines = [json.loads(line) for line in (tmp_path / "openings.jsonl").open()]
    expected = {"responses": 5, "useful": 4, "worked": 2, "rare": 2}
    assert lines == [expected | {"silenced": count} for count in silenced.values()]


def write(folder, accuracies, worked, rare, right):
    """A run with these accuracies and, of 100 responses in two mini-batches, so many worked out.

    Of ten held-out problems so many are right at its end.
    """
    (folder / "evaluations").mkdir(parents=True)
    answers = [7] * right + [8] * (10 - right)
    rows = [{"response": f"Idea001 so \\boxed{{{answer}}}", "gold": "7"} for answer in answers]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "evaluations" / f"step_{len(accuracies):06}.jsonl").write_text(lines)
    steps = enumerate(accuracies, 1)
    rows = [{"step": step, "accuracy": a, "entropy": 1 / step} for step, a in steps]
    scores = [{"step": step, "eval": {"test": {"mean": 1.0}}} for step in (0, len(rows))]
    lines = "".join(json.dumps(row) + "\n" for row in [scores[0], *rows, scores[1]])
    (folder / "metrics.jsonl").write_text(lines)
    count = {"responses": 50, "rare": rare, "silenced": 1}
    counts = [
        count | {"worked": w, "useful": u} for share in worked for w, u in ((share, 5), (0, 0))
    ]
    lines = "".join(json.dumps(row) + "\n" for row in counts)
    (folder / "openings.jsonl").write_text(lines)


def test_the_table_is_taken_run_by_run(tmp_path, capsys):
    # 10 to 20: (10 * 10 + 40) / 11 = 12.7 and 18.2; 21 to 30: 40 and 80; the last five: 60 and 88
    first = [0.1] * 19 + [0.4] * 11 + [0.8, 1.0]
    second = [0.1] * 19 + [1.0] + [0.8] * 10 + [1.0] * 2
    write(tmp_path / "condition-STAPO-4", first, [1] * 24 + [50] * 8, rare=1, right=7)
    write(tmp_path / "condition-STAPO-5", second, [1] * 22 + [50] * 10, rare=2, right=8)
    write(tmp_path / "condition-FullMask-4", [0.0] * 32, [49] * 32, rare=1, right=1)
    write(tmp_path / "condition-JustRL-4", [0.0] * 31, [1] * 31, rare=1, right=1)  # not whole
    openings.report(openings.make_plan(short=False), tmp_path)
    printed = capsys.readouterr().out.splitlines()
    # entropy: (1/28 + ... + 1/32) / 5 = 0.0334; counts over 15 steps of two mini-batches
    cells = "24.0 ± 1.0 | 15.5 ± 2.7 | 60.0 ± 20.0 | 74.0 ± 14.0 | 75.0 ± 5.0 | 5.0 ± 0.0 | 0.03"
    assert f"| STAPO | 2 | {cells} ± 0.00 | 45.0 ± 15.0 | 30.0 ± 0.0 |" in printed
    cells = "never | 0.0 | 0.0 | 0.0 | 10.0 | 5.0 | 0.03 | 30.0 | 30.0"
    assert f"| FullMask | 1 | {cells} |" in printed
    assert not any("JustRL" in line for line in printed)
    assert (tmp_path / "openings.png").stat().st_size > 10_000
