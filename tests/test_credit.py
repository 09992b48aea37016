"""credit.py against a policy that is small enough to enumerate; stopped and started again."""

import re
from collections import defaultdict
from statistics import fmean, median

import pytest
import torch
from helpers import SHAPE, read_rows, refused, write_rows
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from support.run import read_lines

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


@pytest.fixture
def small(tmp_path):
    """A random model with ten tokens, and flags of credit.py for it, with a reward of its own."""
    torch.manual_seed(0)
    shape = SHAPE | {"vocab_size": 10, "initializer_range": 0.6}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16)).eval()
    model.save_pretrained(tmp_path / "model")
    inner = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(VOCABULARY)}, merges=[]))
    inner.decoder = decoders.Fuse()
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(tmp_path / "model")
    problems = [{"problem": x + y, "letter": y} for x in "ac" for y in "bc"]
    (tmp_path / "own.py").write_text(REWARD)
    return (
        model,
        f"""--model {tmp_path}/model --data {write_rows(tmp_path / "data.jsonl", *problems)}
        --reward {tmp_path}/own.py:odd --answered {tmp_path}/own.py:has_a --instruction= --q 0.5
        --tau_p 0.15 --batch_size 4 --mini_batch_size 2 --group_size 16 --max_new_tokens {LONGEST}
        --rollout_batch_size 512 --tokens 1000 --controls 1000 --batches 1 --threads 1""",
    )


@torch.no_grad()
def exact_values(model, prompt, letter):
    """The value of each prefix of a response, 0 to 1, by all continuations; and pi."""
    levels, values, pis = [[()]], {}, {}
    for _ in range(LONGEST):
        ids = torch.tensor([[*prompt, *prefix] for prefix in levels[-1]])
        pis |= zip(levels[-1], model(ids).logits[:, -1].double().softmax(-1))
        levels.append([(*prefix, v) for prefix in levels[-1] for v in range(1, 10)])
    for prefix in [prefix for level in reversed(levels) for prefix in level]:
        text = "".join(VOCABULARY[i] for i in prefix if 1 < i < 8)
        values[prefix] = values[*prefix, 0] = float((len(text) + text.count(letter)) % 2)
        if len(prefix) < LONGEST:
            behind = torch.tensor([values[*prefix, v] for v in range(10)]).double()
            values[prefix] = float(pis[prefix] @ behind)
    return values, pis


def test_the_values_are_those_of_all_continuations(tmp_path, small):
    model, flags = small
    credit.main(f"{flags} --continuations 400 --output {tmp_path}/out".split())
    rows = read_rows(tmp_path / "out" / "credit.jsonl")
    exact = {}
    for number, row in enumerate(read_rows(tmp_path / "data.jsonl")):
        prompt = [VOCABULARY.index(x) for x in row["problem"] + "\n"]
        exact[number] = exact_values(model, prompt, row["letter"])
    errors, entropies = {}, defaultdict(list)
    for row, token in zip(rows, read_rows(tmp_path / "out" / "tokens.jsonl"), strict=True):
        values, pis = exact[row["problem"]]
        response = tuple(token["ids"][3:])
        before, behind = response[: row["t"]], response[: row["t"] + 1]
        pi = pis[before]
        assert row["p"] == pytest.approx(float(pi[behind[-1]]), rel=1e-3)
        assert row["H"] == pytest.approx(float(-pi @ pi.log()), rel=1e-3)
        assert row["rare_p"] == pytest.approx(float(pi[pi < 0.15].sum()), rel=1e-3)
        assert row["answered"] == (2 in before)
        assert (row["p"] < 0.15) == ("likely" not in row["kind"])
        assert (row["A"] < 0) == ("wrong" in row["kind"])
        found = {"V": before, "Q": behind}
        if row["kind"] in ("silenced", "kept"):
            entropies[int(row["response"][2:]) // 32].append(row["H"])  # of a mini-batch
            found["placebo"] = (*before, row["placebo_id"])
            assert pi[row["placebo_id"]] < 0.15
        for name, prefix in found.items():
            error = (values[prefix] * (1 - values[prefix]) / 400) ** 0.5
            share = (row[name] + 1) / 4  # of the reward 3
            assert share == pytest.approx(values[prefix], abs=4.5 * error + 1e-9)
            if error:
                errors[row["response"], row["t"], name] = (share - values[prefix]) / error
    assert len(errors) > 100
    assert fmean(z * z for z in errors.values()) == pytest.approx(1, abs=0.4)
    assert abs(sum(errors.values())) / len(errors) ** 0.5 < 3
    for row in [row for row in rows if row["kind"] in ("silenced", "kept")]:
        of_mini_batch = entropies[int(row["response"][2:]) // 32]
        assert (row["kind"] == "silenced") == (row["H"] < median(of_mini_batch))
        assert (row["kind"] == "silenced") == (row["rank"] < 0.5)
    check_table((tmp_path / "out" / "table.md").read_text(), rows)


def check_table(table: str, rows: list[dict]) -> None:
    """Its means and errors of silenced tokens, by a plain second computation."""
    cells = re.search(r"\| silenced \| (.*) \|", table)[1].split(" | ")
    own = [row for row in rows if row["kind"] == "silenced"]
    worth = [row["Q"] - row["V"] for row in own]
    by_problem = defaultdict(float)
    for row, value in zip(own, worth):
        by_problem[row["problem"]] += value - fmean(worth)
    squares, n = sum(x * x for x in by_problem.values()), len(by_problem)
    error = (n / (n - 1) * squares) ** 0.5 / len(own)
    assert cells[0] == str(len(own)) and cells[4] == f"{fmean(worth):+.3f} ± {error:.3f}"
    assert float(cells[3]) == pytest.approx(fmean(row["V"] for row in own), rel=0.01)


def test_a_run_that_was_stopped_goes_on(tmp_path, small, capsys):
    """With the same values, to the digit; and other flags are refused."""
    flags = f"{small[1]} --continuations 8 --output {tmp_path}/out"
    credit.main(flags.split())
    out = tmp_path / "out"
    whole = {name: (out / name).read_text() for name in ("table.md", "credit.jsonl", "tokens.html")}
    lines = (out / "rewards.jsonl").read_text()
    (out / "rewards.jsonl").write_text(lines[: len(lines) // 2])  # within a line
    for name in whole:
        (out / name).unlink()
    credit.main(flags.split())
    assert whole == {name: (out / name).read_text() for name in whole}
    numbers = [line["number"] for line in read_lines(out / "rewards.jsonl")]
    assert sorted(numbers) == list(range(whole["credit.jsonl"].count("\n")))  # each once
    assert whole["tokens.html"].count("<article>") == min(
        40, whole["credit.jsonl"].count("placebo_")
    )
    assert "--seed: " in refused(capsys, f"{flags} --seed 1", credit.main)
    (tmp_path / "own.py").write_text(REWARD.replace("3.0", "2.0"))
    assert "--reward_file: " in refused(capsys, flags, credit.main)
