"""tokens.py on the tiny model, against plain forwards and loops; the page that it writes."""

import os
import re
import statistics
from collections import Counter
from html.parser import HTMLParser

import pytest
import torch
from helpers import ROOT, TINY, check_png, refused, run
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import stapo

pytest.importorskip("matplotlib", reason="tokens.py needs matplotlib")
import responses  # noqa: E402
import tokens  # noqa: E402

# A step of three mini-batches; half of the tokens are low.
LOOK = """@tests/tiny/args --data tests/tiny/train.jsonl --batch_size 48 --mini_batch_size 16
    --group_size 4 --max_new_tokens 40 --tau_p 0.1"""


@pytest.fixture
def collected(monkeypatch):
    """(step, config, batch) of each time that responses are collected."""
    found, collect = [], stapo.collect

    def spy(policy, reference, task, step, cfg):
        batch, texts = collect(policy, reference, task, step, cfg)
        found.append((step, cfg, batch))
        return batch, texts

    monkeypatch.setattr(stapo, "collect", spy)
    return found


def plain_tokens(model, tokenizer, batch, tau_p: float, over: str) -> list[dict]:
    """Every token with A > 0, by a softmax of plain logits, and tau_h over three mini-batches."""
    found, every = [], [[], [], []]
    for row, (ids, mask) in enumerate(zip(batch.ids, batch.mask)):
        group = batch.rewards[row // 4 * 4 :][:4]
        advantage = float((batch.rewards[row] - group.mean()) / group.std())
        mini = row // (len(batch.ids) // 3)
        with torch.no_grad():
            pi = model(ids[None, : batch.lengths[row]]).logits[0].double().softmax(-1)
        for t in mask.nonzero().flatten().tolist():
            here, i = pi[t - 1], int(ids[t])
            entropy = -float(here @ here.log())
            every[mini].append(entropy)
            if not advantage > 0:  # NaN where the group is all alike
                continue
            gradient = advantage * (torch.nn.functional.one_hot(ids[t], len(here)) - here)
            token = {"row": row, "text": tokenizer.decode([i]), "p": float(here[i]), "mini": mini}
            token |= {"prompt": tokenizer.decode(ids[: int(mask.nonzero()[0])]), "A": advantage}
            token |= {"norm": float(gradient.norm()), "entropy": entropy, "top": here.topk(5)}
            found.append(token)
    for mini in range(3):
        own = [r for r in found if r["mini"] == mini]
        low = [r["entropy"] for r in own if r["p"] < tau_p] if over == "candidates" else every[mini]
        low, q = (low, 0.75) if low else ([r["entropy"] for r in found], 0.8)
        for r in own:
            r["tau_h"] = float(torch.quantile(torch.tensor(low, dtype=torch.float64), q))
            r["low"] = (r["p"] < tau_p, r["entropy"] < r["tau_h"])
    return found


class Page(HTMLParser):
    """The tokens of each response with their attributes, and every tag and attribute of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.attributes, self.responses, self.token = set(), set(), [], None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.add(tag)
        self.attributes |= attributes.keys()
        if attributes.get("class") == "tokens":
            self.responses.append([])
        if "data-about" in attributes:
            self.token = attributes | {"tag": tag, "text": ""}
            self.responses[-1].append(self.token)

    def handle_endtag(self, tag):
        assert not self.token or tag == self.token["tag"]
        self.token = None

    def handle_data(self, data):
        if self.token:
            self.token["text"] += data


@pytest.mark.parametrize("over, tau_p", [("candidates", 0.1), ("all", 0.1), ("candidates", 0)])
def test_everything_equals_a_plain_second_computation(
    tmp_path, tiny, tokenizer, collected, capsys, monkeypatch, over, tau_p
):
    """Whatever the method; also without candidates. @FILE gives flags, as in training."""
    os.chdir(ROOT)
    figure, drawn = tokens.Figure, []
    monkeypatch.setattr(tokens, "WINDOW", 12)
    monkeypatch.setattr(tokens, "Figure", lambda **size: drawn.append(figure(**size)) or drawn[0])
    flags = f"--quantile_over {over} --tau_p {tau_p} --method justrl --output {tmp_path}"
    tokens.main([*LOOK.split(), *flags.split()])
    printed, batch = capsys.readouterr().out, collected[0][2]
    truth = plain_tokens(tiny, tokenizer, batch, tau_p, over)
    every, silenced = int(batch.mask.sum()), [r for r in truth if all(r["low"])]
    candidates = sum(r["low"][0] for r in truth)
    assert collected[0][0] == 1 and (10 < len(silenced) < candidates or tau_p == candidates == 0)
    assert len(set(batch.seeds.tolist())) == len(batch.seeds)  # --method random draws by them
    said = f"STAPO silences {len(silenced)} of {every:,} tokens, "
    said += f"{100 * len(silenced) / every:.3g} %\ncandidates in a mini-batch: {candidates / 3:.1f}"
    assert f"{said}\n" in printed
    assert f", reward {float(batch.rewards.mean()):.4g}, accuracy " in printed
    table = (tmp_path / "quadrants.md").read_text()
    rows = re.findall(r"\| (low|high) p, (low|high) H.*? \| (.*) \|", table)
    texts = {text.get_position(): text.get_text().split("\n") for text in drawn[0].axes[2].texts}
    labels = {(x > 0.5, y > 0.5): text for (x, y), text in texts.items()}
    assert table in printed and len(rows) == 4
    for p, h, cells in rows:
        row = cells.split(" | ")
        own = [r for r in truth if r["low"] == (p == "low", h == "low")]
        assert int(row[0]) == len(own) and bool(own) == (tau_p > 0 or p == "high")
        shares = [100 * len(own) / total for total in (len(truth), every)]
        assert [float(share.strip("%")) for share in row[1:3]] == pytest.approx(shares, rel=0.005)
        count, *norms = labels[p == "high", h == "high"]  # p grows to the right, H upwards
        assert count == f"{len(own):,} tokens"
        if own:
            norm = sum(r["norm"] for r in own) / len(own)
            assert float(row[3]) == pytest.approx(norm, abs=6e-4)
            assert float(norms[0].removeprefix("norm ")) == pytest.approx(norm, abs=6e-3)
    if silenced:
        sure = statistics.median_low(float(r["top"].values[0]) for r in silenced)
        said = re.search(r"the likeliest word has p = (\S+) \(the median\)", table)[1]
        assert float(said) == pytest.approx(sure, rel=0.01)
    check_png(tmp_path / "gradients.png", "#D55E00")
    for low_h, name in ((True, "silenced tokens"), (False, "candidates that are kept")):
        words = Counter(r["text"].replace(" ", "␣") for r in truth if r["low"] == (True, low_h))
        listed = "   ".join(f"{word}\xa0({n})" for word, n in words.most_common(20))
        assert f"{name} (with their counts):   {listed or 'none'}" in table
    moved = check_page((tmp_path / "responses.html").read_text(), truth, tokenizer)
    assert moved or (over, tau_p) != ("candidates", 0.1)


def check_page(text: str, truth: list[dict], tokenizer) -> bool:
    """Its responses are 20 of those sampled, token by token: marked ones, then others.

    Whether any of them is shown from a later token on, around its first silenced one.
    """
    sampled = {}
    for r in truth:
        sampled.setdefault(r["row"], []).append(r)
    marked = {row for row, own in sampled.items() if any(all(r["low"]) for r in own)}
    rows = sorted(sampled, key=lambda row: (row not in marked, row % 4, row))
    shown = [response for response in Page(text).responses if response]  # without the legend
    assert len(shown) == 20 < len(sampled)
    facts, moved = re.findall('<p class="facts soft">(.*)</p>', text), []
    for problem, fact, response, row in zip(re.findall("<h2>(.*)</h2>", text), facts, shown, rows):
        own = sampled[row]
        first = next((t for t, r in enumerate(own) if all(r["low"])), 0)  # silenced
        start = max(0, min(first - 6, len(own) - 12))
        moved.append(start)
        part = f" · only tokens {start + 1} to {start + 12} are shown" if len(own) > 12 else ""
        assert fact.endswith(f"{sum(all(r['low']) for r in own)} silenced{part}")
        own = own[start : start + 12]
        assert problem.replace("↵", "\n") + "\n" == own[0]["prompt"]
        assert [token["text"] for token in response] == [r["text"] for r in own]
        for token, r in zip(response, own, strict=True):
            marks = {(True, True): "del", (True, False): "b", (False, False): "i"}
            assert token["tag"] == marks.get(r["low"], "span")
            about = token["data-about"].split("\n")
            assert about[0].endswith(" · silenced" if all(r["low"]) else " · kept")
            signs = ["<" if low else "≥" for low in r["low"]]
            for line, value, sign in zip(about[2:4], (r["p"], r["entropy"]), signs):
                assert float(line.split()[1]) == pytest.approx(value, rel=0.01, abs=1e-6)
                assert line.split()[2] == sign
            assert about[3].endswith(f" τ_h = {r['tau_h']:.3g} nats")
            assert float(about[4].removeprefix("A ")) == pytest.approx(r["A"], abs=0.006)
            share, word = about[-5].split(maxsplit=1)
            assert float(share) == pytest.approx(float(r["top"].values[0]), rel=0.01)
            assert word.replace("␣", " ") == tokenizer.decode([r["top"].indices[0]])
    return any(moved)


def test_a_run_gives_its_flags_and_a_checkpoint(tmp_path, collected, capsys):
    """The newest or the one that is given; a flag beside it counts; the steps go on.

    The checkpoint has the chat template of the run, whatever has become of its file.
    """
    folder, template = tmp_path / "run", tmp_path / "template"
    template.write_text("{{ messages[0].content }}\n")
    run(folder, f"--save_every 1 --tau_p 0.3 --seed 7 --chat_template {template} --method justrl")
    collected.clear()
    large = ["--tau_p", "0.01", "--batch_size", "32"]
    tokens.main([str(folder), "--model", str(TINY), "--output", f"{tmp_path}/base", *large])
    template.unlink()
    tokens.main([str(folder)])
    tokens.main([f"{folder}/checkpoints/step_000001", *large])
    assert [step for step, *_ in collected] == [1, 3, 2]
    base, newest, older = (cfg for _, cfg, _ in collected)
    assert newest.model == f"{folder}/checkpoints/step_000002" and base.model == str(TINY)
    assert (newest.tau_p, newest.seed, newest.batch_size) == (0.3, 7, 4)
    assert (older.tau_p, older.seed, older.batch_size) == (0.01, 7, 32)
    for out in (folder / "figures", tmp_path / "base"):
        names = "gradients.png quadrants.md responses.html".split()
        assert sorted(path.name for path in out.iterdir()) == names
    assert tokens.parse(["--model", "a/b"]).output == "runs/tokens-a-b"
    assert tokens.parse(["--model", newest.model]).instruction == ""  # its run's
    assert "--q 2.0: a quantile is" in refused(capsys, "--model a/b --q 2", tokens.main)


# piece -> its text
SENTENCE_PIECE = {"9": "9", "▁9": " 9", "▁": " ", "▁.": " .", "é": "é", "▁a▁b": " a b", "�": "�"}
SENTENCE_PIECE |= {"<0xE6>": "<0xE6>", "<0x80>": "<0x80>", "<0x0A>": "\n"}
BYTE_LEVEL = {"9": "9", "Ġ9": " 9", "Ġ": " ", "Ċ": "\n", "Ã©": "é", "æī": "\\xe6\\x89"}
BYTE_LEVEL |= {"Ģ": "\\x80", "ĠæīĢ": " 所", "Ġæ": " \\xe6", "©Ã": "\\xa9\\xc3"}
LLAMA_2 = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
LLAMA_2.append(decoders.Strip(" ", 1, 0))


@pytest.mark.parametrize(
    "texts, decoder",
    [(SENTENCE_PIECE, decoders.Sequence(LLAMA_2)), (BYTE_LEVEL, decoders.ByteLevel())],
    ids=["Llama 2", "Qwen"],
)
def test_a_token_has_its_blanks_and_its_bytes(texts, decoder):
    """Two tokens share no count, and a special token keeps its name."""
    inner = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(texts)}, merges=[]))
    inner.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    shown = [tokens.token_text(tokenizer, i) for i in range(len(texts) + 2)]
    assert shown == [*texts.values(), "<|im_end|>", ""]  # the last one is above the vocabulary


HOSTILE = ["<b>", "</script><script>x()</script>", '"', '" onfocus="x()', "'", "&amp;", "<!--"]
HOSTILE += ["</div></article>", "\\frac{1}{2}", "$x^2$", "{style}", "%s", " 所以", "�", "مرحبا"]
HOSTILE += ["\u202e", "\u200b", "\ud800", "\x00", "\r\n", "\n\n", ".\n", "\n x", "\t", "    ", ""]


def test_hostile_text_stays_text_and_nothing_comes_from_elsewhere():
    """Its tokens are in all quadrants."""
    count = len(HOSTILE)
    response = {"problem": "".join(HOSTILE), "gold": "</h2><script>", "advantage": 1.62, "start": 0}
    response |= {"token": HOSTILE, "length": count, "marked": 3}
    response |= dict.fromkeys(("p", "entropy", "threshold"), [0.4] * count)
    response["low_p"] = response["silenced"] = [t % 2 == 0 for t in range(count)]
    response["low_h"] = [t % 4 < 2 for t in range(count)]
    likeliest = [(HOSTILE * 2)[t : t + 5] for t in range(count)]
    response["likeliest"] = [[(word, 0.5) for word in words] for words in likeliest]
    text = responses.page("runs/<b>", "p < τ_p <script>", [response], 0.002)
    text.encode("utf-8")  # what is not a character of its own is spelt out
    found = Page(text)
    (written,) = filter(None, found.responses)  # without the legend
    shown = [*HOSTILE]
    for character in ("\u202e", "\u200b", "\ud800", "\x00", "\r"):
        shown = [word.replace(character, ascii(character)[1:-1]) for word in shown]
    shown = [word.replace("\n", "↵").replace("\t", "⇥") or "∅" for word in shown]
    assert [token["text"] for token in written] == shown
    for t, token in enumerate(written):
        words = [line.split(maxsplit=1)[1] for line in token["data-about"].split("\n")[-5:]]
        assert words == [word.replace(" ", "␣") for word in (shown * 2)[t : t + 5]]
    own = {"html", "meta", "title", "style", "h1", "h2", "p", "dl", "dt", "dd", "aside"}
    assert found.tags == own | {"article", "div", "span", "del", "i", "b"}
    assert found.attributes == {*"lang charset name content class tabindex data-about".split()}
    assert not re.search(r"https?:|url\(|@import|//[a-z]", text)
