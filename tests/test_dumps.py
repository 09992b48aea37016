"""support/dumps.py and rollout.likeliest against plain forwards and loops."""

import json
import math

import pytest
import torch
from conftest import ROOT

import rollout
import stapo
from support import dumps
from support.dumps import make_dump, rows_to_show

FLAGS = "@tests/tiny/args --steps 1 --batch_size 12 --mini_batch_size 12 --group_size 4 --lr 0"
FLAGS += " --max_new_tokens 40 --dump_every 1 --tau_p 0.5"


def run(output, monkeypatch) -> tuple[dict, dict]:
    """The metrics line and the dump of a step on the tiny model; half of the tokens are low."""
    monkeypatch.chdir(ROOT)
    stapo.main([*FLAGS.split(), "--output", str(output)])
    dump = (output / "dumps" / "step_000001.json").read_text()
    return json.loads((output / "metrics.jsonl").read_text()), json.loads(dump)


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


def test_a_dump_is_what_a_plain_forward_gives(tmp_path, monkeypatch, tiny, tokenizer):
    line, dump = run(tmp_path / "run", monkeypatch)
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


def test_a_bounded_sample_stands_for_all_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(dumps, "TOKENS", 20)
    line, dump = run(tmp_path / "run", monkeypatch)
    low = [token["weight"] for token in dump["tokens"] if token["p"] < 0.5]
    weight = [token["weight"] for token in dump["tokens"]]
    assert len(weight) == 20 and len(low) == 10 and min(weight) > 1
    assert sum(weight) == pytest.approx(dump["positive_tokens"])
    assert sum(low) == pytest.approx(line["candidates"])


@pytest.mark.parametrize("count", [1, 5, 11])
def test_likeliest_in_chunks_is_a_softmax_of_plain_logits(random_model, monkeypatch, count):
    monkeypatch.setattr(rollout, "HEAD_ROWS", {"cpu": rollout.HeadRows(4, 2, 4)})
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
        (1_000, (999,), (0, 1_000)),
        (15_360, (), (0, 1_000)),
        (15_360, (4_000, 9_000), (3_500, 4_500)),
        (15_360, (20,), (0, 1_000)),
        (15_360, (15_359,), (14_360, 15_360)),
    ],
)
def test_a_long_response_is_cut_around_its_first_silenced_token(length, silenced, shown):
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


def test_the_largest_dump_is_as_large_as_the_docstring_says():
    """Words of eight characters. A tau_h that is none becomes null, as JSON has no infinity."""
    responses = make_responses(*((2_000, (i,)) for i in range(40)))
    responses["tau_h"][::2] = -math.inf
    dump = dump_of(responses, decode=lambda ids: " because")
    assert (len(dump["tokens"]), len(dump["responses"])) == (20_000, 20)
    assert 6.5e6 < len(json.dumps(dump | {"calls": 0})) < 7.5e6
    for key in ("tokens", "responses"):
        assert None in {entry["tau_h"] for entry in dump[key]}
