"""A run is replayed by a second, plain training loop; what the loop wires together."""

import json
import math
import statistics

import pytest
import torch
from conftest import TINY
from transformers import AutoModelForCausalLM, AutoTokenizer

import stapo
from rollout import Episode, Response
from stapo import Config, form_mask, micro_batches

FLAGS = f"""--model {TINY} --data {TINY}/train.jsonl --steps 3 --batch_size 16 --mini_batch_size 4
    --group_size 4 --max_new_tokens 48 --warmup_steps 4 --lr 1e-3 --weight_decay 20
    --grad_clip 0.05 --tau_p 0.4 --q 0.5 --rollout_batch_size 64 --tokens_per_micro_batch 300"""
FLAGS = [*FLAGS.split(), "--instruction", ""]


def run(output, *flags: str) -> list[dict]:
    stapo.main([*FLAGS, *flags, "--output", str(output)])
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def row_stats(model, e):
    """(T,) log-probabilities with gradient, and entropies, of one unpadded row's full logits."""
    logits = model(torch.tensor([e.response.prompt_ids + e.response.ids])).logits[0]
    logits = logits[len(e.response.prompt_ids) - 1 : -1].double().log_softmax(-1)
    logp = logits.gather(1, torch.tensor(e.response.ids)[:, None]).squeeze(1)
    return logp, -(logits.exp() * logits).sum(1).detach()


def replay_update(model, reference, optimizer, episodes, old, cfg: Config) -> list[float]:
    """One optimiser step on a mini-batch, and the sums behind its metrics."""
    rewards = [e.reward for e in episodes]
    groups = [rewards[i : i + 4] for i in range(0, len(rewards), 4)]
    means = [statistics.mean(g) for g in groups for _ in g]
    stds = [statistics.stdev(g) or 1.0 for g in groups for _ in g]
    advantages = [(r - m) / s for r, m, s in zip(rewards, means, stds)]
    lengths = [len(e.response.ids) for e in episodes]
    logp, entropy = map(torch.cat, zip(*(row_stats(model, e) for e in episodes)))
    each = torch.tensor(lengths)
    a = torch.tensor(advantages).double().repeat_interleave(each)
    rho = (logp - torch.cat([old[id(e)] for e in episodes])).exp()
    high = 1.2 if cfg.method == "grpo" else 1.28
    objective = torch.minimum(rho * a, rho.clamp(0.8, high) * a)
    candidates = (a > 0) & (logp.exp() < cfg.tau_p)
    silenced, forwarded = torch.zeros_like(candidates), a != 0
    if cfg.method == "stapo":
        among = entropy if cfg.quantile_over == "all" else entropy[candidates]
        tau_h = among.quantile(cfg.q) if len(among) else -math.inf
        silenced = candidates & (entropy < tau_h)
        loss = -objective[~silenced].sum() / (~silenced).sum()
    elif cfg.method == "20-entropy":
        loss = -objective[entropy >= entropy.quantile(0.8)].sum() / len(a)
    elif cfg.method == "grpo":
        with torch.no_grad():
            log_r = torch.cat([row_stats(reference, e)[0] for e in episodes])
        log_r = log_r - logp
        objective = objective - cfg.beta * (log_r.exp() - log_r - 1)
        loss = -sum(o.mean() for o in objective.split(lengths)) / len(episodes)
        forwarded = torch.ones_like(forwarded)
    optimizer.zero_grad()
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    for p in model.parameters():
        p.grad *= min(1.0, cfg.grad_clip / max(norm, 1e-9))
    optimizer.step()
    sums = [len(a), candidates.sum() if cfg.method == "stapo" else 0, silenced.sum()]
    sums += [((a < 0) & (rho < 0.8)).sum(), ((a > 0) & (rho > high)).sum()]
    sums += [forwarded.sum(), rho[forwarded].sum().detach(), loss.detach(), norm]
    return [float(x) for x in sums]


def replay(collected, cfg: Config):
    """The weights and metrics that the paper's algorithm gives on the responses of a run."""
    model, reference = (AutoModelForCausalLM.from_pretrained(TINY) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=cfg.weight_decay)
    lines = []
    for step, mini_batches in enumerate(collected, start=1):
        with torch.no_grad():
            old = {id(e): row_stats(model, e)[0] for batch in mini_batches for e in batch}
        optimizer.param_groups[0]["lr"] = cfg.lr * min(1, step / cfg.warmup_steps)
        totals = [
            replay_update(model, reference, optimizer, episodes, old, cfg)
            for episodes in mini_batches
        ]
        tokens, n_candidates, n_silenced, low, up, n_forwarded, ratios, loss, norm = (
            sum(column) for column in zip(*totals)
        )
        lines.append(
            {
                "tokens": tokens,
                "candidates": n_candidates,
                "silenced": n_silenced,
                "silenced_fraction": n_silenced / tokens,
                "clip_low": low / n_forwarded,
                "clip_high": up / n_forwarded,
                "ratio_mean": ratios / n_forwarded,
                "loss": loss / len(totals),
                "grad_norm": norm / len(totals),
                "lr": optimizer.param_groups[0]["lr"],
            }
        )
    return model, lines


@pytest.mark.parametrize(
    "flags",
    [
        ["--method", "stapo"],
        ["--method", "stapo", "--quantile_over", "all", "--q", "0.97"],
        ["--method", "20-entropy"],
        ["--method", "grpo", "--beta", "0.3"],
    ],
    ids=lambda flags: " ".join(flags[1:]),
)
def test_a_plain_second_loop_gives_the_same_run(tmp_path, monkeypatch, flags):
    """Advantages, mask, loss, clipping, schedule, AdamW and metrics, from the equations alone."""
    collected, refreshed = [], []
    collect, refresh = stapo.collect, stapo.statistics_pass
    spy = lambda *x: (collected.append(collect(*x)), collected[-1])[1]  # noqa: E731
    monkeypatch.setattr(stapo, "collect", spy)
    spy_refresh = lambda *x: (refreshed.append(x[1]), refresh(*x))[1]  # noqa: E731
    monkeypatch.setattr(stapo, "statistics_pass", spy_refresh)
    lines = run(tmp_path, *flags)
    later = [batch for batches in collected for batch in batches[1:]]
    assert [id(b) for b in refreshed] == [id(b) for b in later] and len(later) == 9
    cfg = Config(**json.loads((tmp_path / "config.json").read_text()))
    model, expected = replay(collected, cfg)
    for line, wanted, batches in zip(lines, expected, collected):
        assert {k: line[k] for k in wanted} == {
            k: pytest.approx(
                v, rel=0.01, abs={"candidates": 1, "silenced": 1, "lr": 0}.get(k, 2e-4)
            )
            for k, v in wanted.items()
        }
        responses = [e.response for batch in batches for e in batch]
        cut = [len(r.ids) == 48 and r.ids[-1] != 0 for r in responses]
        assert line["truncated_fraction"] == sum(cut) / len(cut)
    if cfg.method == "stapo":
        assert sum(line["silenced"] for line in lines) > 10
    assert sum(line["truncated_fraction"] for line in lines) > 0
    start, end = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (TINY, tmp_path / "checkpoints" / "step_000003")
    )
    AutoTokenizer.from_pretrained(tmp_path / "checkpoints" / "step_000003")
    moved = torch.cat([(end[k] - start[k]).flatten() for k in start])
    apart = torch.cat([(end[k] - v).flatten() for k, v in model.state_dict().items()])
    assert float(apart.norm() / moved.norm()) < 0.02 and float(moved.norm()) > 0.5


def test_a_run_is_a_function_of_its_seed(tmp_path):
    timings = {"rollout_seconds", "update_seconds", "tokens_per_second", "peak_memory_gb"}
    runs = [run(tmp_path / str(i), "--steps", "2", "--seed", s) for i, s in enumerate("778")]
    first, again, other = ([{k: r[k] for k in r.keys() - timings} for r in x] for x in runs)
    assert first == again and first != other


def test_steps_draw_new_problems_and_new_samples(tmp_path, monkeypatch):
    """Two steps on the same eight problems: other order, other responses; later epochs too."""
    (tmp_path / "eight.jsonl").write_text(
        "".join(json.dumps({"problem": f"Q: {n}+7-3=?", "answer": str(n + 4)}) + "\n"
                for n in range(2, 10))
    )  # fmt: skip
    collected, collect = [], stapo.collect
    spy = lambda *x: (collected.append(sum(collect(*x), [])), [collected[-1]])[1]  # noqa: E731
    monkeypatch.setattr(stapo, "collect", spy)
    run(tmp_path / "run", "--data", str(tmp_path / "eight.jsonl"), "--lr", "0", "--batch_size", "8")
    orders = [[e.problem["problem"] for e in episodes[::4]] for episodes in collected]
    assert len(set(map(tuple, orders))) == 3 and all(len(set(order)) == 8 for order in orders)
    answers = [
        {e.problem["problem"]: e.response.ids for e in episodes[::4]} for episodes in collected
    ]
    assert answers[0] != answers[1] != answers[2]
    for episodes in collected:  # groups are of one prompt, and differ
        groups = [episodes[i : i + 4] for i in range(0, 32, 4)]
        assert all(len({e.problem["problem"] for e in group}) == 1 for group in groups)
        assert any(len({tuple(e.response.ids) for e in group}) > 1 for group in groups)


def test_three_updates_that_are_not_finite_stop_the_run(tmp_path, monkeypatch):
    nan = torch.tensor(math.nan)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: nan)
    with pytest.raises(SystemExit, match="three updates"):
        run(tmp_path)


def test_gradient_checkpointing_is_on_and_changes_nothing(tmp_path, monkeypatch):
    asked, lines = [], []
    on = stapo.distributed.load_policy

    def load(*args):
        model = on(*args)
        enable = model.gradient_checkpointing_enable
        model.gradient_checkpointing_enable = lambda x: (asked.append(x), enable(x))
        return model

    monkeypatch.setattr(stapo.distributed, "load_policy", load)
    for flag in ("true", "false"):
        lines += run(tmp_path / flag, "--steps", "1", "--gradient_checkpointing", flag)
    assert len(asked) == 1
    assert lines[0]["grad_norm"] == pytest.approx(lines[1]["grad_norm"], rel=1e-5)


def made(prompt: int, length: int, advantage: float = 1.0, **fields) -> Episode:
    return Episode({}, Response([3] * prompt, [4] * length, False, ""), 1.0, advantage, **fields)


@pytest.mark.parametrize("budget", [1, 20, 50, 10_000])
def test_micro_batches_stay_within_the_budget(budget):
    g = torch.Generator().manual_seed(0)
    episodes = [made(*torch.randint(1, 12, (2,), generator=g).tolist()) for _ in range(30)]
    batches = micro_batches(episodes, budget)
    assert sorted(map(id, sum(batches, []))) == sorted(map(id, episodes))
    for batch in batches:
        longest = max(len(e.response.prompt_ids) + len(e.response.ids) for e in batch)
        assert len(batch) * longest <= budget or len(batch) == 1
    if budget == 50:
        assert len(batches) < 15  # and the budget is used


def test_twenty_entropy_keeps_the_token_at_the_quantile():
    """Six tokens: the 0.8-quantile is the fifth entropy itself, which is kept (>=)."""
    entropy = torch.tensor([0.5, 0.1, 0.9, 0.3, 0.7, 0.2])
    e = made(1, 6, logp=torch.zeros(6), entropy=entropy, noise=torch.zeros(6))
    totals = form_mask([e], Config(method="20-entropy"))
    assert e.keep.tolist() == [False, False, True, False, True, False]
    assert totals["denominator"] == 6
