"""tokens.py on the tiny model, against plain forwards and loops; its flags and refusals."""

import dataclasses
import errno
import json
import math
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TINY, Page, check_png, example, run

plt = pytest.importorskip("matplotlib.pyplot", reason="tokens.py needs matplotlib")
import tokens  # noqa: E402

import stapo  # noqa: E402
from rollout import load_model  # noqa: E402
from support import distributed, progress  # noqa: E402

# Two steps of three mini-batches; half of the tokens are low.
LOOK = """@tests/tiny/args --data tests/tiny/train.jsonl --batch_size 48 --mini_batch_size 16
    --group_size 4 --max_new_tokens 40 --tau_p 0.1 --batches 2"""
AWKWARD = ["|", "a\nb", "\\", "`", "$x$", "$\\frac$", "<b>", "**", " ", "不", "\ud800"]


def look(output: Path, extra: str = "", flags: str = LOOK) -> Path:
    os.chdir(ROOT)
    tokens.main(f"{flags} --output {output} {extra}".split())
    return output


@pytest.fixture
def undrawn(monkeypatch):
    """For tests of numbers: drawing takes nearly all of the time."""
    monkeypatch.setattr(tokens, "save", lambda fig, path: plt.close(fig))


@pytest.fixture
def collected(monkeypatch):
    """(step, batch) of each time that responses are collected."""
    found, collect = [], stapo.collect

    def spy(policy, reference, task, step, cfg):
        batch, samples = collect(policy, reference, task, step, cfg)
        found.append((step, batch))
        return batch, samples

    monkeypatch.setattr(stapo, "collect", spy)
    return found


def quadrants(out: Path) -> dict[tuple[bool, bool], list[str]]:
    """(p is low, H is low) -> the cells of that line in quadrants.md."""
    rows = re.findall(
        r"\| (low|high) p, (low|high) H \| (.*) \|", (out / "quadrants.md").read_text()
    )
    return {(p == "low", h == "low"): cells.split(" | ") for p, h, cells in rows}


def plain_tokens(model, tokenizer, step: int, batch, tau_p: float) -> list[dict]:
    """Every token with A > 0, by a softmax of plain logits, and tau_h over three mini-batches."""
    found = []
    for row, (ids, mask) in enumerate(zip(batch.ids, batch.mask)):
        group = batch.rewards[row // 4 * 4 :][:4]
        advantage = float((batch.rewards[row] - group.mean()) / group.std())
        if not advantage > 0:  # NaN where the group is all alike
            continue
        with torch.no_grad():
            pi = model(ids[None, : batch.lengths[row]]).logits[0].double().softmax(-1)
        for t in mask.nonzero().flatten().tolist():
            here, i = pi[t - 1], int(ids[t])
            gradient = advantage * (torch.nn.functional.one_hot(ids[t], len(here)) - here)
            token = {"response": (step, row), "text": tokenizer.decode([i]), "p": float(here[i])}
            token |= {"prompt": tokenizer.decode(ids[: int(mask.nonzero()[0])]), "A": advantage}
            token["norm"] = float(gradient.norm())
            token |= {"entropy": -float(here @ here.log()), "top": here.topk(5)}
            found.append(token | {"mini": row // (len(batch.ids) // 3)})
    for mini in range(3):
        own = [r for r in found if r["mini"] == mini]
        low = torch.tensor([r["entropy"] for r in own if r["p"] < tau_p], dtype=torch.float64)
        for r in own:
            r["tau_h"] = float(torch.quantile(low, 0.75))
            r["low"] = (r["p"] < tau_p, r["entropy"] < r["tau_h"])
    return found


def test_everything_equals_a_plain_second_computation(
    tmp_path, tiny, tokenizer, collected, capsys, monkeypatch
):
    drawn, draw, shown, save = [], tokens.draw_gradients, {}, tokens.save

    def read_picture(fig, path):
        shown[path.stem] = fig.axes[0]
        save(fig, path)

    monkeypatch.setattr(tokens, "save", read_picture)
    monkeypatch.setattr(tokens, "draw_gradients", lambda t, *x: (drawn.append(t), draw(t, *x)))
    monkeypatch.setattr(tokens, "SHOWN", 40)
    out = look(tmp_path / "out")
    printed = capsys.readouterr().out
    truth = [
        r for step, batch in collected for r in plain_tokens(tiny, tokenizer, step, batch, 0.1)
    ]
    every = sum(int(batch.mask.sum()) for _, batch in collected)
    silenced = [r for r in truth if all(r["low"])]
    assert [step for step, _ in collected] == [1, 2] and len(silenced) > 20
    candidates = sum(r["low"][0] for r in truth) / 6
    said = f"stapo silences {len(silenced)} of {every:,} tokens, "
    said += f"{100 * len(silenced) / every:.3g} %; candidates in a mini-batch: {candidates:.1f}\n"
    assert said in printed
    assert (out / "quadrants.md").read_text() in printed and len(quadrants(out)) == 4
    for low, row in quadrants(out).items():
        own = [r for r in truth if r["low"] == low]
        assert int(row[0]) == len(own) > 0
        shares = [100 * len(own) / total for total in (len(truth), every)]
        assert [float(share.strip("* %")) for share in row[1:3]] == pytest.approx(shares, rel=0.005)
        norm = sum(r["norm"] for r in own) / len(own)
        assert float(row[3]) == pytest.approx(norm, abs=6e-4)
        assert int(row[4]) == (len(own) if all(low) else 0)
    for name in ("p", "norm"):
        right = pytest.approx([r[name] for r in truth], rel=1e-3, abs=2e-3)  # float32
        assert drawn[0][name].tolist() == right
    halo, dots = shown["gradients"].collections
    assert len(halo.get_offsets()) == len(silenced) and len(dots.get_offsets()) == len(truth)
    assert sorted(dots.get_array()) == pytest.approx(sorted(r["entropy"] for r in truth), abs=2e-3)
    assert set(shown["gradients"].lines[0].get_xdata()) == {0.1}
    bars = [bar.get_width() for bar in shown["tokens"].patches]  # from below
    assert bars == sorted(bars) and bars[0] < bars[-1]
    frequent = json.loads((out / "tokens.json").read_text())
    for kind, fate in (("spurious", True), ("exploratory", False)):
        words = Counter(r["text"] for r in truth if r["low"] == (True, fate))
        assert frequent[kind] == words and next(iter(frequent[kind].values())) == max(
            words.values()
        )
    check_page((out / "responses.html").read_text(), truth, tokenizer)
    files = "gradients.png quadrants.md responses.html tokens.json tokens.png".split()
    assert sorted(path.name for path in out.iterdir()) == files
    for name in ("gradients", "tokens"):
        check_png(out / f"{name}.png", "#D55E00")


def check_page(text: str, truth: list[dict], tokenizer) -> None:
    """Its responses are 40 of those sampled, token by token: all marked ones, then others."""
    sampled = {}
    for r in truth:
        sampled.setdefault(r["response"], []).append(r)
    sampled = {own[0]["prompt"] + "".join(r["text"] for r in own): own for own in sampled.values()}
    problems = re.findall("<h2>(.*)</h2>", text)
    shown = []
    for problem, response in zip(problems, Page(text).responses, strict=True):
        prompt = re.sub("<.*?>", "", problem) + "\n"
        own = sampled[prompt + "".join(token["text"] for token in response)]
        shown.append(own[0]["response"])
        for token, r in zip(response, own, strict=True):
            assert (token["tag"] == "del") == all(r["low"])
            about = token["data-about"].split("\n")
            assert about[3].endswith(f"below {r['tau_h']:.3g}")
            share, word = about[-5].split(maxsplit=1)
            assert float(share) == pytest.approx(float(r["top"].values[0]), rel=0.01)
            assert word.replace("␣", " ") == tokenizer.decode([r["top"].indices[0]])
    marked = {r["response"] for r in truth if all(r["low"])}
    assert len(marked) < len(shown) == 40 < len(sampled)
    first = shown[: len(marked)]
    assert set(first) == marked and first != sorted(first)


@pytest.mark.parametrize("method, fate", [("justrl", "kept"), ("high-entropy", "silenced")])
def test_a_method_without_an_entropy_threshold_is_split_at_the_quantile(
    tmp_path, undrawn, tiny, tokenizer, collected, method, fate
):
    out = look(tmp_path / "out", f"--method {method} --batches 1")
    entropy = sorted(r["entropy"] for r in plain_tokens(tiny, tokenizer, *collected[0], 0.1))
    low = sum(int(row[0]) for (_, low_h), row in quadrants(out).items() if low_h)
    assert low == pytest.approx(0.8 * len(entropy), abs=1)
    threshold = entropy[low - 1], entropy[low]
    page = (out / "responses.html").read_text()
    (said,) = set(re.findall(r"\nH  .* below (\S+)\n", page))
    assert threshold[0] - 0.01 < float(said) < threshold[1] + 0.01
    assert f"· {fate}\n" in page and ("· silenced\n" in page) == (fate == "silenced")


def test_a_mini_batch_without_tau_h_takes_the_quantile():
    """Nothing is below a threshold that it equals."""
    nan, t = math.nan, {"advantage": torch.ones(6), "collision": torch.zeros(6)}
    t |= {"p": torch.tensor([0.1, 0.2, 0.1, 0.1, 0.1, 1.0]), "kept": torch.arange(6) % 5 > 0}
    t |= {"entropy": torch.tensor([0.5, 0.7, 0.75, 0.9, 0.8, 0.6])}
    t |= {"tau_h": torch.tensor([0.7, 0.7, 0.7, 0.9, nan, nan]), "candidate": t["p"] < 0}
    t = tokens.with_quadrants(t, 0.2)
    assert t["threshold"].tolist() == pytest.approx([0.7, 0.7, 0.7, 0.9, 0.8, 0.8])
    assert t["low_h"].tolist() == [True, False, False, False, False, True]
    assert t["low_p"].tolist() == [True, False, True, True, True, False]
    assert t["silenced"].tolist() == [True] + [False] * 5
    assert t["norm"][5] == 0  # 1 - 2 p + the sum is below 0


@pytest.mark.parametrize(
    "length, silenced, shown",
    [(10, (9,), (0, 10)), (50, (), (0, 10)), (50, (20, 40), (15, 25)), (50, (49,), (40, 50))],
)
def test_a_long_response_is_cut_around_the_first_silenced(monkeypatch, length, silenced, shown):
    monkeypatch.setattr(tokens, "WINDOW", 10)
    t = {"row": torch.tensor([3] + [4] * length + [5] * 7), "id": torch.arange(length + 8)}
    t |= {"silenced": torch.isin(t["id"] - 1, torch.tensor(silenced)), "threshold": t["id"] / 10}
    t |= {"likeliest_id": t["id"][:, None] + torch.arange(5), "likeliest_p": torch.rand(60, 5)}
    t["silenced"][0] = t["silenced"][-1] = True  # other responses'
    sample = {"problem": "?", "gold": "7", "advantage": 1.5}
    found = tokens.describe(t, 4, sample, str)
    assert (found["start"], found["length"]) == (shown[0], length)
    assert found["silenced_count"] == len(silenced)  # also of tokens that are not shown
    ids = [1 + place for place in range(*shown)]
    assert found["token"] == [str(i) for i in ids]
    assert [word for word, _ in found["likeliest"][2]] == [str(ids[2] + k) for k in range(5)]
    assert [shown[0] + t for t, s in enumerate(found["silenced"]) if s] == [
        t for t in silenced if t in range(*shown)
    ]


def test_thinning_keeps_every_rare_token(monkeypatch):
    """They come last, which means on top. Of 750 others every fifth is drawn."""
    monkeypatch.setattr(tokens, "MAX_DRAWN", 160)
    drawn = tokens.thinned(torch.arange(900) < 150).tolist()
    assert drawn == [*range(150, 900, 5), *range(150)]


def test_frequent_tokens_with_awkward_texts(tmp_path):
    """Ids that are spelt alike count together."""
    ids = torch.tensor([i for i in range(len(AWKWARD)) for _ in range(i + 1)] + [50, 51, 51, 60])
    t = {"id": ids, "low_p": ids < 60, "silenced": ids < 50}
    tokens.draw_frequent(t, "$\\frac$", lambda i: AWKWARD[i] if i < 50 else "Wait", tmp_path)
    found = json.loads((tmp_path / "tokens.json").read_text())
    assert found["spurious"] == {token: i + 1 for i, token in enumerate(AWKWARD)}
    assert list(found["spurious"]) == AWKWARD[::-1] and found["exploratory"] == {"Wait": 3}
    check_png(tmp_path / "tokens.png", "#0072B2")


# ------------------------------------------------------------------------------- flags and models


def parse(*argv: str) -> tuple[tokens.Config, str]:
    cfg = tokens.parse([str(arg) for arg in argv])
    return cfg, cfg.output


def test_a_run_gives_its_flags_and_a_checkpoint(tmp_path, undrawn, collected, monkeypatch):
    """The newest or the one that is named; a flag beside it counts; the steps go on.

    The checkpoint has the chat template of the run, whatever has become of its file.
    """
    folder, template = tmp_path / "run", tmp_path / "template"
    template.write_text("{{ messages[0].content }}\n")
    flags = f"--chat_template {template}"
    run(folder, f"--save_every 1 --eval_limit 3 --tau_p 0.3 --seed 7 {flags}")
    template.unlink()
    cfg, output = parse(folder)
    newest = str(folder / "checkpoints" / "step_000002")
    assert (cfg.model, output) == (newest, f"{folder}/figures")
    assert (cfg.tau_p, cfg.seed, cfg.batch_size, cfg.instruction) == (0.3, 7, 4, "")
    assert (cfg.eval_every, cfg.resume) == (0, "")  # nothing is evaluated or resumed
    cfg, output = parse(folder, "--tau_p", 0.01, "--method", "justrl", "--output", "here")
    changed = {"tau_p": 0.01, "method": "justrl", "output": "here"}
    assert cfg == dataclasses.replace(parse(folder)[0], **changed)
    assert output == "here"
    config = json.loads((folder / "config.json").read_text()) | {"q": 0.5}
    (folder / "config.json").write_text(json.dumps(config))
    assert (parse(folder)[0].q, parse(folder, "--method", "justrl")[0].q) == (0.5, 0.75)
    cfg, output = parse("--model", TINY, folder)
    assert (cfg.model, cfg.seed) == (str(TINY), 7) and Path(output).parent == Path("runs")
    older = folder / "checkpoints" / "step_000001"
    assert parse(folder, "--checkpoint", older)[0].model == str(older)

    collected.clear()
    policies, head = [], tokens.check_head
    monkeypatch.setattr(tokens, "check_head", lambda model: (policies.append(model), head(model)))
    monkeypatch.chdir(folder)  # so its checkpoint's name begins with "checkpoints"
    data = ["--data", str(TINY / "test.jsonl")]
    tokens.main([".", *data, "--checkpoint", "step_000001", "--batches", "2"])
    assert [step for step, _ in collected] == [2, 3] and len(collected[0][1].ids) == 16
    saved, base = load_model(str(older)).state_dict(), load_model(str(TINY)).state_dict()
    loaded = policies[0].state_dict()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert not all(torch.equal(loaded[name], base[name]) for name in base)
    assert (folder / "figures" / "quadrants.md").exists()


def test_an_arguments_file_is_read_as_training_reads_it(tmp_path):
    """Later flags count. A flag that is misspelt is an error."""
    recipe = ROOT / "recipes" / "qwen3-0.6b-one-24gb"
    cfg, output = parse(f"@{recipe}", "--max_new_tokens", 9, "--batches", 3)
    assert (cfg.batch_size, cfg.mini_batch_size, cfg.max_new_tokens, cfg.batches) == (16, 4, 9, 3)
    assert cfg.model == "Qwen/Qwen3-0.6B-Base"
    assert output == "runs/tokens-Qwen-Qwen3-0.6B-Base"
    (tmp_path / "args").write_text("--modle x")
    with pytest.raises(SystemExit):
        parse(f"@{tmp_path}/args")


@pytest.mark.parametrize(
    "argv, said",
    [
        ("--modle x", "unrecognized arguments: --modle"),
        ("@{here}/nothing", "nothing"),
        ("{here}", "holds no run (config.json is missing or another program's)"),
        ("tests/tiny", "RUN tests/tiny: holds no run"),  # it has the config.json of a model
        ("{here}/run", "run/checkpoints: no such checkpoint; there are: none yet"),
        ("{here}/run --checkpoint step_000001 --model x", "needs a RUN, and no --model"),
        ("--checkpoint step_000001", "--checkpoint step_000001: needs a RUN"),
        ("@tests/tiny/args --batches 0", "--batches 0: must be at least 1"),
        ("@tests/tiny/args --tau_p 2", "--tau_p 2.0: a probability"),
        ("@tests/tiny/args --batch_size 30", "--batch_size 30: not a multiple"),
        ("@tests/tiny/args --method own", "--method own: not one of"),
        ("@tests/tiny/args --model {here}", "no tokenizer there"),
        ("@tests/tiny/args --data {here}/a.jsonl", "a.jsonl: no such file"),
        ("@tests/tiny/args --output {here}/run/config.json", "config.json cannot be written"),
    ],
)
def test_a_refusal_is_one_line(tmp_path, capsys, argv, said):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"resume": ""}')
    os.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        tokens.main(argv.format(here=tmp_path).split())
    message = str(end.value) if end.value.code != 2 else capsys.readouterr().err.splitlines()[-1]
    assert said in message and (end.value.code == 2 or message.startswith("tokens.py: "))
    assert "\n" not in message and end.value.code not in (0, None)


def test_ranks_are_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        tokens.main(["@tests/tiny/args"])
    said = "tokens.py: works in one process: start it without torchrun (rank 0)\n"
    assert capsys.readouterr().err == said


# ------------------------------------------------------------------------------------- what it says


def test_the_sampler_is_checked(tmp_path, undrawn, capsys, monkeypatch):
    monkeypatch.setattr(progress, "said", set())  # the warning comes once in a process
    measured, wrong = stapo.entropy_metrics, {"sampling_gap": 0.1, "sampling_z": 9.0}
    monkeypatch.setattr(stapo, "entropy_metrics", lambda batch: measured(batch) | wrong)
    look(tmp_path / "out", "--batch_size 4 --mini_batch_size 2 --batches 1")
    out, err = capsys.readouterr()
    assert "the sampler does not draw from the policy" in err
    assert "sampling_gap 0.1, sampling_z 9\n" in out


def test_without_a_right_answer_there_is_nothing_to_draw(tmp_path, capsys, monkeypatch):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    (tmp_path / "own.py").write_text("def same(response, row):\n    return 1.0\n")
    small = f"--reward {tmp_path}/own.py:same --batch_size 4 --mini_batch_size 4 --threads 3"
    out = look(tmp_path / "out", small)
    said = capsys.readouterr().out
    assert "accuracy 1, zero_advantage_fraction 1," in said and "nothing to draw" in said
    assert "silences 0 of " in said and not list(out.iterdir()) and threads == [3]


def test_a_file_of_anybody_else_stays_as_it_is(tmp_path, undrawn, collected):
    (tmp_path / "tokens.json").write_text("mine")
    with pytest.raises(SystemExit, match="tokens.json: was not written by this script"):
        look(tmp_path, "--batches 1")
    assert (tmp_path / "tokens.json").read_text() == "mine" and not collected


@pytest.mark.parametrize("place, ending", [("rollout", 130), ("gradients", 130), ("figures", "")])
def test_an_interruption_is_one_line(tmp_path, undrawn, monkeypatch, place, ending):
    """A stop while it samples or reads gradients draws nothing. A full disk is the user's error."""
    out, words = tmp_path / "out", tokens.next_words
    out.mkdir()
    (out / "quadrants.md").write_text("old")

    def ask(*_) -> None:
        tokens.stop.asked = True

    def fill_disk(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tokens.stop, "asked", False)
    if place == "rollout":
        monkeypatch.setattr(tokens.stop, "listen", ask)
    elif place == "gradients":
        monkeypatch.setattr(tokens, "next_words", lambda *x: (ask(), words(*x))[1])
    else:
        monkeypatch.setattr(tokens, "draw_frequent", fill_disk)
    with pytest.raises(SystemExit) as end:
        look(out, "--batches 1")
    assert end.value.code == ending or f"{out} cannot be written" in end.value.code
    assert [path.name for path in out.iterdir()] == ["quadrants.md"]
    assert ((out / "quadrants.md").read_text() == "old") == (ending == 130)


def test_a_method_of_ones_own_is_looked_at(tmp_path, undrawn, monkeypatch):
    """The example of the page, whose threshold is one nat."""
    monkeypatch.setattr(stapo, "METHODS", dict(stapo.METHODS))
    exec(example("own-mask"), {"__name__": "own_mask"})
    out = look(tmp_path / "out", "--method fixed --batches 1")
    assert "This is 1 to 1 nats." in (out / "quadrants.md").read_text()
    low, *others = quadrants(out).values()
    assert low[4] == low[0] != "0" and {row[4] for row in others} == {"0"}


def test_a_method_that_silences_likely_tokens_shows_them(tmp_path, undrawn, monkeypatch, capsys):
    def likely(batch, stats, cfg):
        candidates = stapo.spurious_candidates(stats.logp, batch.advantages, batch.mask, tau_p=0.5)
        return stapo.Choice(batch.mask & ~candidates, candidates)

    monkeypatch.setitem(stapo.METHODS, "own", stapo.Method(likely, "A > 0", "kept"))
    out = look(tmp_path / "out", "--method own --batches 1")
    shown = sum(int(row[-1]) for row in quadrants(out).values())
    assert f"own silences {shown:,} of " in capsys.readouterr().out
    assert quadrants(out)[False, False][-1] != "0"
