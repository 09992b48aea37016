"""credit.py against a policy that is small enough to enumerate; stopped and started again."""

import re
import shutil
from collections import Counter, defaultdict
from statistics import fmean, median, pvariance, variance

import pytest
import torch
from helpers import SHAPE, read_rows, refused, write_rows
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import stapo
from support.files import read_jsonl

pytest.importorskip("matplotlib", reason="tokens.py needs matplotlib")
import credit  # noqa: E402

LONGEST = 4  # tokens of a response
VOCABULARY = ["<eos>", "<pad>", *"abcd", r"\boxed{1}", "\n"]  # the model's head has two more
REWARD = """
def odd(text, row):
    return 3.0 if (len(text) + text.count(row["letter"])) % 2 else -1.0
"""
ANSWERED = """
def has_letter(text, row):
    return row["letter"] in text
"""


@pytest.fixture
def small(tmp_path):
    """A random model with ten tokens, and flags of credit.py for it, with a reward of its own."""
    torch.manual_seed(0)
    folder = tmp_path / "run" / "checkpoints" / "step_000003"
    shape = SHAPE | {"vocab_size": 10, "initializer_range": 0.6}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16)).eval()
    model.save_pretrained(folder)
    inner = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(VOCABULARY)}, merges=[]))
    inner.decoder = decoders.Fuse()
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
    problems = [{"problem": x + y, "letter": y, "answer": "1"} for x in "ac" for y in "bc"]
    (tmp_path / "own.py").write_text(REWARD)
    (tmp_path / "answered.py").write_text(ANSWERED)
    return (
        model,
        f"""--model {folder} --data {write_rows(tmp_path / "data.jsonl", *problems)}
        --reward {tmp_path}/own.py:odd --answered {tmp_path}/answered.py:has_letter --instruction=
        --q 0.5 --tau_p 0.15 --batch_size 4 --mini_batch_size 2 --group_size 16
        --max_new_tokens {LONGEST} --rollout_batch_size 512 --batches 1 --threads 1
        --drawn 1000 --tokens 1000 --controls 1000""",
    )


@pytest.fixture
def seen(monkeypatch):
    """{step: batch} of what is collected, and the seeds of all continuations.

    The problems are not in the order of the data, as with dynamic sampling.
    """
    batches, seeds, collect, sample = {}, [], stapo.collect, credit.sample
    order = stapo.batch_indices

    def collected(policy, reference, task, step, cfg):
        with monkeypatch.context() as within:
            within.setattr(stapo, "batch_indices", lambda *x: [3 - i for i in order(*x)])
            batches[step], texts = collect(policy, reference, task, step, cfg)
        return batches[step], texts

    def sampled(*args, seed, **options):
        seeds.extend(seed)
        return sample(*args, seed=seed, **options)

    monkeypatch.setattr(stapo, "collect", collected)
    monkeypatch.setattr(credit, "sample", sampled)
    return batches, seeds


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


def test_the_values_are_those_of_all_continuations(tmp_path, small, seen):
    """Tokens, their statistics, V and Q, placebos by the model's probabilities, and the table."""
    model, flags = small
    credit.main(f"{flags} --continuations 200 --output {tmp_path}/out".split())
    rows = read_rows(tmp_path / "out" / "credit.jsonl")
    exact = {}
    for number, row in enumerate(read_rows(tmp_path / "data.jsonl")):
        prompt = [VOCABULARY.index(x) for x in row["problem"] + "\n"]
        exact[number] = exact_values(model, prompt, row["letter"])
    errors, entropies, true, placebos = {}, defaultdict(list), defaultdict(list), []
    ((step, batch),), seeds = seen[0].items(), seen[1]
    assert step == 4  # the model is the checkpoint after step 3
    groups = batch.rewards.view(4, 16)
    true_a = (
        ((groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True))
        .nan_to_num()
        .flatten()
    )
    tokens = read_rows(tmp_path / "out" / "tokens.jsonl")
    for row, token in zip(rows, tokens, strict=True):
        values, pis = exact[row["problem"]]
        response = tuple(token["ids"][3:])
        before, behind = response[: row["t"]], response[: row["t"] + 1]
        pi, number = pis[before], int(row["response"][2:])
        assert row["p"] == pytest.approx(float(pi[behind[-1]]), rel=1e-3)
        assert row["H"] == pytest.approx(float(-pi @ pi.log()), rel=1e-3)
        assert row["rare_p"] == pytest.approx(float(pi[pi < 0.15].sum()), rel=1e-3)
        text = "".join(VOCABULARY[i] for i in before if 1 < i < 8)
        assert row["answered"] == (VOCABULARY[token["ids"][1]] in text)  # the letter
        assert (row["p"] < 0.15) == ("likely" not in row["kind"])
        if "drawn" not in row["kind"]:
            assert (row["A"] < 0) == ("wrong" in row["kind"])
        assert row["A"] == pytest.approx(float(true_a[number]), rel=1e-5)
        found = {"V": before, "Q": behind}
        if "drawn" in row["kind"]:
            true[row["kind"]].append(values[behind] - values[before])
        if row["kind"] in ("silenced", "kept"):
            entropies[number // 32].append(row["H"])  # of a mini-batch
            found["placebo"] = (*before, row["placebo_id"])
            assert pi[row["placebo_id"]] < 0.15
            odds = pi.where(pi < 0.15, 0) / row["rare_p"]  # of each rare token to be drawn
            mean = float(odds @ odds)
            square = float(odds @ odds**2) - mean**2
            placebos.append((float(odds[row["placebo_id"]]) - mean, square))
        for name, prefix in found.items():
            error = (values[prefix] * (1 - values[prefix]) / 200) ** 0.5
            rewards, share = row["rewards"][name], (row[name] + 1) / 4  # of the reward 3
            assert {*rewards} <= {-1, 3} and row[name] == pytest.approx(fmean(rewards))
            assert len(rewards) == (200 if len(prefix) < LONGEST and 0 not in prefix else 1)
            assert share == pytest.approx(values[prefix], abs=4.5 * error + 1e-9)
            if error:
                errors[row["response"], row["t"], name] = (share - values[prefix]) / error
    assert len(errors) > 80
    assert fmean(z * z for z in errors.values()) == pytest.approx(1, abs=0.4)
    assert abs(sum(errors.values())) / len(errors) ** 0.5 < 3
    assert len({*seeds}) == 200 * len(errors)  # sets: two rows can be the same token
    apart, spreads = map(sum, zip(*placebos))
    assert abs(apart) / spreads**0.5 < 3, "not drawn by their probabilities"
    for row in rows:
        of_mini_batch = entropies[int(row["response"][2:]) // 32]
        if "rank" in row:
            below = sum(entropy <= row["H"] for entropy in of_mini_batch) - 1
            assert row["rank"] == pytest.approx(below / (len(of_mini_batch) - 1))
            assert (row["kind"] == "silenced") == row["low_h"]
        low = row["H"] < median(of_mini_batch) if of_mini_batch else None
        assert row["low_h"] is low
    of_all = Counter((row["response"], row["t"]) for row in rows if "drawn" in row["kind"])
    assert {*of_all.values()} == {1} and len(of_all) == int(batch.mask.sum())
    rare, right = batch.old.logp.exp() < 0.15, batch.advantages[:, None] > 0
    likely = {
        "as drawn": batch.mask & ~rare,
        "right": right,
        "wrong": batch.advantages[:, None] < 0,
    }
    for name, mask in likely.items():
        held = {row["held"] for row in rows if row["kind"] == f"likely, {name}"}
        assert held == {int((batch.mask & ~rare & mask).sum())}
    numbers = Counter(row["kind"] for row in rows)  # all of the others are measured
    assert all(row["held"] == numbers[row["kind"]] for row in rows if "likely" not in row["kind"])
    for kind, gains in true.items():
        own = [row for row in rows if row["kind"] == kind]
        assert credit.spread(own) / 4 == pytest.approx(variance(gains) ** 0.5, rel=0.02)
    check_table((tmp_path / "out" / "table.md").read_text(), rows)


def worth(own: list[dict], minus: list[dict] | None) -> str:
    """A cell of the table, by least squares: Q - V is a constant, or one for either group.

    The error is a sandwich estimate, clustered by problem.
    """
    groups = [own] if minus is None else [own, minus]
    if any(len({row["problem"] for row in group}) < 2 for group in groups):
        return "-"
    rows = [(row, number) for number, group in enumerate(groups) for row in group]
    x = torch.nn.functional.one_hot(torch.tensor([number for _, number in rows])).double()  # (N, 2)
    y = torch.tensor([row["Q"] - row["V"] for row, _ in rows]).double()
    bread = (x.T @ x).inverse()
    constants = bread @ x.T @ y
    scores = x * (y - x @ constants)[:, None]
    problem = torch.tensor([row["problem"] for row, _ in rows])
    sums = torch.stack([scores[problem == number].sum(0) for number in problem.unique()])
    meat = len(sums) / (len(sums) - 1) * sums.T @ sums
    difference = torch.tensor([1.0, -1.0][: len(groups)]).double()
    error = (difference @ bread @ meat @ bread @ difference).sqrt()
    return f"{difference @ constants:+.3f} ± {error:.3f}"


def wide(own: list[dict]) -> str:
    """The spread of the true Q - V, from sums of squares."""
    if len(own) < 2:
        return "-"
    gains = torch.tensor([row["Q"] - row["V"] for row in own]).double()
    found = ((gains - gains.mean()) ** 2).sum() / (len(own) - 1)
    for row in own:
        for each in (row["rewards"]["V"], row["rewards"]["Q"]):
            mean = sum(each) / len(each)
            squares = sum((reward - mean) ** 2 for reward in each)
            found -= squares / max(1, len(each) - 1) / len(each) / len(own)
    return f"{max(0, found) ** 0.5:.3f}"


# The rows of the table: a name, the likely tokens to compare with, and whether places follow.
ROWS = {
    "rare, as drawn": ("likely, as drawn", False),
    "as drawn, low H": ("likely, as drawn", True),
    "as drawn, high H": ("likely, as drawn", True),
    "likely, as drawn": (None, False),
    "silenced": ("likely, right", True),
    "kept": ("likely, right", True),
    "placebo of silenced": ("likely, right", False),
    "placebo of kept": ("likely, right", False),
    "likely, right": (None, False),
    "rare, wrong": ("likely, wrong", False),
    "likely, wrong": (None, False),
}


def check_table(table: str, rows: list[dict]) -> None:
    """Each of its cells, by a plain second computation."""
    lines = [line[2:-2].split(" | ") for line in table.splitlines() if line[:2] == "| "]
    of = {kind: [row for row in rows if row["kind"] == kind] for kind in credit.KINDS}
    for low, name in ((True, "low"), (False, "high")):
        of[f"as drawn, {name} H"] = [row for row in of["rare, as drawn"] if row["low_h"] is low]
    for kind in ("silenced", "kept"):
        of[f"placebo of {kind}"] = [
            row
            | {"Q": row["placebo"], "rewards": row["rewards"] | {"Q": row["rewards"]["placebo"]}}
            for row in of[kind]
        ]
    expected = []
    for title, (likely, split) in ROWS.items():
        places = {title: lambda row: True}
        if split:
            places[f"{title}: first token"] = lambda row: row["t"] == 0
            places[f"{title}: second token"] = lambda row: row["t"] == 1
            places[f"{title}: later"] = lambda row: row["t"] > 1
            places[f"{title}: before the answer"] = lambda row: not row["answered"]
            places[f"{title}: after the answer"] = lambda row: row["answered"]
        for name, holds in places.items():
            if part := [row for row in of[title] if holds(row)]:
                held = part[0]["held"] if name in credit.KINDS else ""
                means = [f"{fmean(row[key] for row in part):.3g}" for key in ("A", "rare_p", "V")]
                others = [row for row in of[likely] if holds(row)] if likely else None
                worths = [worth(part, None), worth(part, others) if likely else ""]
                expected.append([name, str(len(part)), str(held), *means, *worths, wide(part)])
    for title, high, low in (
        ("as drawn, high minus low H", "as drawn, high H", "as drawn, low H"),
        ("kept minus silenced", "kept", "silenced"),
    ):
        expected.append([title, *[""] * 5, worth(of[high], of[low]), "", ""])
    headings = ["tokens", "n", "held", "A", "rare p", "V", "Q - V", "minus likely", "spread"]
    assert lines[0] == headings
    for line, row in zip(lines[1:], expected, strict=True):
        assert line[:3] == row[:3]
        for cell, other in zip(line[3:], row[3:], strict=True):
            numbers, others = (re.findall(r"[-+]?\d[\d.]*", text) for text in (cell, other))
            assert [*map(float, numbers)] == pytest.approx([*map(float, others)], abs=0.0011), row
            assert re.sub(r"[\d.]+", "", cell) == re.sub(r"[\d.]+", "", other), row


def test_tokens_are_drawn_evenly_from_as_many_batches_as_are_needed(tmp_path, small, seen):
    """A likely token is drawn beside each rare one, from the same response, if it has any."""
    flags = "--drawn 20 --tokens 20 --controls 20 --batches 9 --continuations 1"
    credit.main(f"{small[1]} {flags} --output {tmp_path}/out".split())
    held, likely, enough = {kind: [] for kind in credit.KINDS[:5]}, defaultdict(dict), []
    for step, batch in seen[0].items():
        low = batch.mask & (batch.old.logp.exp() < 0.15)
        for i, at in (batch.mask & ~low).nonzero().tolist():
            likely[f"{step}-{i}"][at - 3] = float(batch.old.logp[i, at].exp())
            held["likely, as drawn"].append((f"{step}-{i}", at - 3))
        for i, at in low.nonzero().tolist():
            held["rare, as drawn"].append((f"{step}-{i}", at - 3))
            kind, entropy = "rare, wrong", batch.old.entropy
            if batch.advantages[i] > 0:
                part = slice(i // 32 * 32, i // 32 * 32 + 32)  # a mini-batch
                among = low[part] & (batch.advantages[part, None] > 0)
                is_low = entropy[i, at] < entropy[part][among].quantile(0.5)
                kind = "silenced" if is_low else "kept"
            if batch.advantages[i] != 0:
                held[kind].append((f"{step}-{i}", at - 3))
        enough.append(min(map(len, held.values())) >= 20)
    assert 2 < len(enough) < 9 and enough.index(True) == len(enough) - 1
    rows, chosen = read_rows(tmp_path / "out" / "tokens.jsonl"), defaultdict(list)
    for row in rows:
        chosen[row["kind"]].append((row["response"], row["t"]))
        if row["kind"] in held:
            assert row["held"] == len(held[row["kind"]])
    draws = defaultdict(list)  # a number of each token that was drawn, and those it was drawn from
    for kind, places in held.items():
        assert len({*chosen[kind]}) == 20
        draws[kind] = [(places.index(at), range(len(places))) for at in chosen[kind]]
    kept = {response for response, _ in chosen["kept"]}
    beside = {"likely, right": chosen["silenced"] + chosen["kept"]}
    beside |= {"likely, wrong": chosen["rare, wrong"]}
    for kind, places in beside.items():
        responses = [response for response, _ in places if likely[response]]
        assert Counter(response for response, _ in chosen[kind]) <= Counter(responses)
        for response, at in chosen[kind]:
            draws[kind].append((response in kept, [each in kept for each in responses]))
            draws["t"].append((at, [*likely[response]]))
            draws["p"].append((likely[response][at], likely[response].values()))
    del draws["likely, wrong"]  # none of them is beside a candidate
    for name, each in draws.items():
        apart = sum(value - fmean(among) for value, among in each)
        assert abs(apart) / sum(pvariance(among) for _, among in each) ** 0.5 < 3, name


def test_without_a_reward_a_box_is_the_answer(tmp_path, small, capsys):
    """And --answered, which cannot be read then, is refused."""
    flags = f"{small[1]} --reward= --batches 9 --continuations 2 --output {tmp_path}/out"
    assert "--answered " in refused(capsys, flags, credit.main)
    credit.main(f"{flags} --answered=".split())
    rows = read_rows(tmp_path / "out" / "credit.jsonl")
    for row, token in zip(rows, read_rows(tmp_path / "out" / "tokens.jsonl"), strict=True):
        assert row["answered"] == (6 in token["ids"][3 : 3 + row["t"]])
    assert {row["answered"] for row in rows} == {False, True}


def test_a_run_that_was_stopped_goes_on(tmp_path, small):
    """With the same values, to the digit."""
    more = "--continuations 8 --drawn 10 --tokens 30 --controls 10 --batches 9 --answered="
    flags, out = f"{small[1]} {more} --output {tmp_path}/out", tmp_path / "out"
    credit.main(flags.split())
    whole = {name: (out / name).read_text() for name in ("table.md", "credit.jsonl")}
    lines = (out / "rewards.jsonl").read_text()
    (out / "rewards.jsonl").write_text(lines[: len(lines) // 2])  # within a line
    for name in whole:
        (out / name).unlink()
    credit.main(flags.split())
    assert whole == {name: (out / name).read_text() for name in whole}
    numbers, rows = read_jsonl(out / "rewards.jsonl"), read_rows(out / "credit.jsonl")
    assert sorted(line["number"] for line in numbers) == list(range(len(rows)))  # each once
    assert {row["answered"] for row in rows} == {None}


# Each flag that decides the numbers, with another value.
OTHERS = """--seed 1, --continuations 9, --drawn 11, --tokens 31, --controls 11, --batches 2,
    --tau_p 0.2, --q 0.6, --quantile_over all, --batch_size 8, --mini_batch_size 4, --group_size 8,
    --max_new_tokens 3, --max_prompt_tokens 9, --instruction So?, --chat_template none, --answered=,
    --reward {}/answered.py:has_letter, --model {}/other, --data {}/other.jsonl"""


def test_tokens_of_something_else_are_refused_by_name(tmp_path, small, capsys):
    """And a folder of another program: no table is written over."""
    flags = f"{small[1]} --continuations 1 --output {tmp_path}/out"
    credit.main(flags.split())
    model = tmp_path / "run" / "checkpoints" / "step_000003"
    weights = shutil.copytree(model, tmp_path / "other") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    write_rows(tmp_path / "other.jsonl", {"problem": "a", "letter": "a", "answer": "1"})
    for other in OTHERS.replace("{}", str(tmp_path)).split(","):
        name = other.split()[0].strip("=")
        assert f"{name}: " in refused(capsys, f"{flags} {other}", credit.main)
    for file, name in (("answered", "--answered_file: "), ("own", "--reward_file: ")):
        with (tmp_path / f"{file}.py").open("a") as lines:
            lines.write("# another one\n")
        assert name in refused(capsys, flags, credit.main)
    (tmp_path / "table.md").write_text("another program's")
    message = refused(capsys, f"{flags} --output {tmp_path}", credit.main)
    assert "name an empty directory" in message
    assert (tmp_path / "table.md").read_text() == "another program's"
