"""support/dumps.py and rollout.likeliest against plain forwards and loops."""

import json
import math

import pytest
import torch
from conftest import run

import rollout
import stapo
from support import dumps
from support.dumps import make_dump, rows_to_show

# Half of the tokens are low.
STEP = """--data tests/tiny/train.jsonl --steps 1 --batch_size 12 --mini_batch_size 12 --lr 0
    --dump_every 1 --tau_p 0.5"""


def make_responses(*rows: tuple[int, tuple]) -> dict:
    """A row for each (length, silenced places), behind a prompt of one token; make_dump's words."""
    width = 1 + max((length for length, _ in rows), default=0)
    g = torch.Generator().manual_seed(0)
    p, entropy, collision = torch.rand(3, len(rows), width, generator=g)
    lengths = torch.tensor([length for length, _ in rows], dtype=torch.long)
    silenced = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (_, places) in enumerate(rows):
        silenced[row, [1 + place for place in places]] = True
    batch = stapo.Batch(
        ids=torch.randint(0, 100, (len(rows), width), generator=g),
        mask=(torch.arange(width) >= 1) & (torch.arange(width) <= lengths[:, None]),
        lengths=1 + lengths,
        old=rollout.TokenStats(p.log(), entropy, collision),
        ref_logp=None,
        rewards=torch.ones(len(rows)),
        advantages=torch.full((len(rows),), 1.5),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        seeds=lengths,
    )
    tau_h = 0.3 + torch.arange(len(rows), dtype=torch.float64) / 777
    samples = [{"problem": "?", "gold": "1"}] * len(rows)
    return {"batch": batch, "samples": samples, "silenced": silenced, "tau_h": tau_h}


def dump_of(responses: dict, decode=str) -> dict:
    """A dump in which the likeliest words are numbers; `calls` counts the forwards."""
    calls = []

    def likeliest(ids, count):
        calls.append((ids.tolist(), count))
        return torch.full((count, 5), 1 / 7), torch.arange(count * 5).view(count, 5)

    options = {"step": 1, "method": "stapo", "tau_p": 0.2, "seed": 0}
    dump = make_dump(**responses, **options, decode=decode, likeliest=likeliest)
    return dump | {"calls": calls}


def test_a_dump_is_what_a_plain_forward_gives(tmp_path, tiny, tokenizer):
    (line,) = run(tmp_path / "run", STEP)
    dump = json.loads((tmp_path / "run" / "dumps" / "step_000001.json").read_text())
    ids_of = {tokenizer.decode([i]): i for i in range(len(tokenizer))}
    assert dump["all_tokens"] == line["tokens"]
    assert 1 < len(dump["responses"]) <= dumps.RESPONSES and dump["method"] == "stapo"
    assert sum(sum(r["silenced"]) for r in dump["responses"]) == line["silenced"] > 5
    sampled = []
    for r in dump["responses"]:
        ids = [ids_of[text] for text in r["token"]]
        assert (r["start"], r["length"]) == (0, len(ids)) and r["advantage"] > 0
        prompt = tokenizer(r["problem"] + "\n").input_ids
        with torch.no_grad():
            logits = tiny(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        pi = logits.double().softmax(-1)
        close = {"rel": 1e-3, "abs": 1e-6}
        for t, i in enumerate(ids):
            entropy = -float(pi[t] @ pi[t].log())
            assert r["p"][t] == pytest.approx(float(pi[t, i]), **close)
            assert r["entropy"][t] == pytest.approx(entropy, **close)
            assert r["silenced"][t] == (r["p"][t] < 0.5 and r["entropy"][t] < r["tau_h"])
            top = pi[t].topk(5)
            words, shares = zip(*r["likeliest"][t])
            assert shares == pytest.approx(top.values.tolist(), **close)
            assert [ids_of[word] for word in words[:2]] == top.indices[:2].tolist()
            sampled.append([r["token"][t], float(pi[t, i]), entropy, float(pi[t] @ pi[t])])
    # all of them fit into the sample too, each once
    assert len(dump["tokens"]) == dump["positive_tokens"] == len(sampled) < dump["all_tokens"]
    for token in dump["tokens"]:
        found = [token[key] for key in ("p", "entropy", "collision")]
        same = [row for row in sampled if row[0] == token["token"]]
        sampled.remove(next(r for r in same if found == pytest.approx(r[1:], rel=1e-3, abs=1e-6)))
        assert token["silenced"] == (token["p"] < 0.5 and token["entropy"] < token["tau_h"])
        assert token["weight"] == 1 and token["advantage"] > 0
    low = [token["entropy"] for token in dump["tokens"] if token["p"] < 0.5]
    tau_h = float(torch.quantile(torch.tensor(low), 0.75))
    assert all(token["tau_h"] == pytest.approx(tau_h) for token in dump["tokens"])


def test_a_bounded_sample_stands_for_all_tokens(monkeypatch):
    monkeypatch.setattr(dumps, "TOKENS", 20)
    responses = make_responses((40, ()), (25, ()), (33, ()))
    batch = responses["batch"]
    tokens = dump_of(responses)["tokens"]
    low = [token["weight"] for token in tokens if token["p"] < 0.2]
    weight = [token["weight"] for token in tokens]
    assert len(weight) == 20 and len(low) == 10 and min(low) > 1
    assert sum(weight) == pytest.approx(40 + 25 + 33)
    assert sum(low) == pytest.approx(int((batch.old.logp.exp() < 0.2)[batch.mask].sum()))


@pytest.mark.parametrize("count", [1, 5, 11])
def test_likeliest_in_chunks_is_a_softmax_of_plain_logits(random_model, monkeypatch, count):
    monkeypatch.setattr(rollout, "HEAD_CHUNKS", {"cpu": rollout.HeadChunks(4, 2, 4)})
    model = random_model(spread=0.5)
    ids = torch.randint(2, 100, (12,), generator=torch.Generator().manual_seed(1))
    found = rollout.likeliest(model, ids, count, k=3)
    with torch.no_grad():
        pi = model(ids[None]).logits[0, -count - 1 : -1].double().softmax(-1)
    torch.testing.assert_close(found[0].double(), pi.topk(3).values, rtol=1e-4, atol=1e-6)
    assert torch.equal(found[1], pi.topk(3).indices)


@pytest.mark.parametrize(
    "length, silenced, shown",
    [
        (10, (9,), (0, 10)),
        (150, (), (0, 10)),
        (150, (40, 90), (35, 45)),
        (150, (2,), (0, 10)),
        (150, (149,), (140, 150)),
    ],
)
def test_a_long_response_is_cut_around_the_first_silenced(length, silenced, shown, monkeypatch):
    assert (dumps.TOKENS, dumps.RESPONSES, dumps.WINDOW) == (20_000, 20, 1_000)  # 7 MB at most
    monkeypatch.setattr(dumps, "WINDOW", 10)
    responses = make_responses((length, silenced))
    dump, batch = dump_of(responses), responses["batch"]
    found = dump["responses"][0]
    here = slice(1 + shown[0], 1 + shown[1])  # behind the prompt's token
    (ids,) = batch.ids.tolist()
    assert dump["calls"] == [(ids[: here.stop], shown[1] - shown[0])]
    assert (found["start"], found["length"]) == (shown[0], length)
    assert found["token"] == [str([i]) for i in ids[here]]
    assert found["p"] == pytest.approx(batch.old.logp[0, here].exp().tolist(), rel=1e-5)
    assert [shown[0] + t for t, s in enumerate(found["silenced"]) if s] == [
        t for t in silenced if t in range(*shown)
    ]
    assert found["likeliest"][2][4][0] == "[14]" and dump_of(responses) == dump


def test_responses_with_silenced_tokens_are_chosen_first_over_all_ranks(monkeypatch):
    """Three ranks, played one after the other: first to see what each brings, then to decide."""
    brought, chosen, right = [], [], torch.ones(13, 4, dtype=torch.bool)
    silenced = torch.zeros(3, 13, 4, dtype=torch.bool)  # of each rank: 13 responses
    for row in range(13):
        silenced[row % 3, row, row % 4] = row % 5 > 0  # ten are marked
    for r in range(3):
        monkeypatch.setattr(dumps, "rank", lambda r=r: r)
        monkeypatch.setattr(dumps, "all_list", lambda mine: brought.append(mine) or [])
        rows_to_show(right, silenced[r], torch.Generator().manual_seed(r))
    for r in range(3):
        monkeypatch.setattr(dumps, "rank", lambda r=r: r)
        monkeypatch.setattr(dumps, "all_list", lambda mine: brought)
        chosen.append(rows_to_show(right, silenced[r], torch.Generator().manual_seed(r)))
    assert silenced.any(2).sum() == 10 and sum(map(len, chosen)) == dumps.RESPONSES
    assert sum(int(silenced[r, i].any()) for r in range(3) for i in chosen[r]) == 10
    assert all(len(set(rows)) == len(rows) for rows in chosen)


def test_a_rank_without_responses_keeps_in_step(monkeypatch):
    monkeypatch.setattr(dumps, "all_max", lambda value: 3)
    dump = dump_of(make_responses())
    assert dump["tokens"] == dump["responses"] == [] and len(dump["calls"]) == 3
    assert all(len(ids) > count for ids, count in dump["calls"])


def test_no_tau_h_is_null():
    """JSON has no infinity."""
    responses = make_responses((9, (1,)), (8, (2,)))
    responses["tau_h"][0] = -math.inf
    dump = dump_of(responses)
    for key in ("tokens", "responses"):
        assert {entry["tau_h"] is None for entry in dump[key]} == {True, False}
