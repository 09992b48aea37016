"""credit.py against a policy that is small enough to enumerate; stopped and started again."""

import itertools
import json
import os
import re

import pytest
import torch
from helpers import ROOT, SHAPE, TINY, read_rows, refused, write_rows
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import stapo

pytest.importorskip("matplotlib", reason="tokens.py needs matplotlib")
import credit  # noqa: E402

LONGEST = 4  # tokens of a response
VOCABULARY = ["<eos>", "<pad>", *"abcde", "\n"]  # the head of the model has two more
REWARD = """
def odd(text, row):
    return 3.0 if (len(text) + text.count(row["letter"])) % 2 else -1.0

def has_a(text, row):
    return "a" in text
"""


def small_policy(folder):
    """A model with ten tokens, its tokenizer, data with four problems, and a reward."""
    torch.manual_seed(0)
    shape = SHAPE | {"vocab_size": 10, "initializer_range": 0.6}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16)).eval()
    model.save_pretrained(folder / "model")
    inner = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(VOCABULARY)}, merges=[]))
    inner.decoder = decoders.Fuse()
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder / "model")
    letters = [{"problem": x + y, "letter": y} for x in "ac" for y in "bc"]
    (folder / "own.py").write_text(REWARD)
    return (
        model,
        f"""--model {folder}/model --data {write_rows(folder / "data.jsonl", *letters)}
        --reward {folder}/own.py:odd --answered {folder}/own.py:has_a --instruction= --tau_p 0.15
        --batch_size 4 --mini_batch_size 2 --group_size 16 --max_new_tokens {LONGEST}
        --rollout_batch_size 512 --tokens 1000 --controls 1000 --batches 1""",
    )


@torch.no_grad()
def exact_values(model, prompt, letter):
    """For each prefix of a response, as a tuple: its value Q in the range of rewards, and pi."""
    level, values, pis = [()], {}, {}
    levels = [level]
    for _ in range(LONGEST):
        ids = torch.tensor([[*prompt, *prefix] for prefix in level])
        logits = model(ids).logits[:, -1].double().softmax(-1)
        pis |= dict(zip(level, logits))
        level = [(*prefix, v) for prefix in level for v in range(10) if v != 0]
        levels.append(level)
    for level in reversed(levels):
        for prefix in level:
            for ended in [prefix, (*prefix, 0)]:
                text = "".join(VOCABULARY[i] for i in ended if 1 < i < 8)
                values[ended] = float((len(text) + text.count(letter)) % 2)
            if len(prefix) < LONGEST:
                behind = torch.tensor([values[*prefix, v] for v in range(10)]).double()
                values[prefix] = float(pis[prefix] @ behind)
    return values, pis


def test_every_value_is_that_of_all_continuations_enumerated(tmp_path, monkeypatch):
    model, flags = small_policy(tmp_path)
    monkeypatch.chdir(tmp_path)
    credit.main(
        f"{flags} --seed {os.environ.get('SEED', 0)} --continuations 400 --output {tmp_path}/out".split()
    )
    rows = read_rows(tmp_path / "out" / "credit.jsonl")
    tokens = read_rows(tmp_path / "out" / "tokens.jsonl")
    exact = {}
    for number, row in enumerate(read_rows(tmp_path / "data.jsonl")):
        prompt = [VOCABULARY.index(x) for x in row["problem"] + "\n"]
        exact[number] = (prompt, *exact_values(model, prompt, row["letter"]))
    errors = {}
    for row, token in zip(rows, tokens, strict=True):
        prompt, values, pis = exact[row["problem"]]
        assert token["ids"][: len(prompt)] == prompt
        response = tuple(token["ids"][len(prompt) :])
        before, behind = response[: row["t"]], response[: row["t"] + 1]
        pi = pis[before]
        assert row["p"] == pytest.approx(float(pi[behind[-1]]), rel=1e-3)
        assert row["H"] == pytest.approx(float(-pi @ pi.log()), rel=1e-3)
        assert row["rare_p"] == pytest.approx(float(pi[pi < 0.15].sum()), rel=1e-3)
        assert row["answered"] == ("a" in [VOCABULARY[i] for i in before if i < 8])
        assert sum(float(pi[v]) * values[*before, v] for v in range(10)) == pytest.approx(
            values[before]
        )
        found = {"V": before, "Q": behind}
        if row["kind"] in ("silenced", "kept"):
            assert pi[row["placebo_id"]] < 0.15
            found["placebo"] = (*before, row["placebo_id"])
        for name, prefix in found.items():
            value = values[prefix]
            error = (value * (1 - value) / 400) ** 0.5
            assert row[name] == pytest.approx(value, abs=4.5 * error + 1e-9), (name, row)
            if error:
                errors[row["response"], row["t"], name] = (row[name] - value) / error
    errors = list(errors.values())
    print(
        "ZZ",
        len(rows),
        len(errors),
        sum(e * e for e in errors) / len(errors),
        sum(errors) / len(errors) ** 0.5,
    )
