"""The paper's mathematics, in the paper's order: printed values, loops in float64, autograd.

Open this beside the paper. Each test is named by the section that it checks and by what it shows:

    python -m pytest -v tests/test_paper.py
"""

import math
import re
import statistics
from dataclasses import asdict, fields, replace

import pytest
import torch
from helpers import ROOT, TINY, in_order, pad, read_rows, responses_of
from reference import by_loop, drawn, logit_stats, method_loss, row_logits, row_stats
from transformers import AutoModelForCausalLM

import eval as evaluation
import rollout
import stapo
from stapo import clipped_loss, group_advantages, quantile, spurious_mask, stapo_loss

# ---------------------------------------------------------------------------- Sec. 2.2: advantages

PRINTED = {1: 2.47, 2: 1.62, 3: 1.21, 4: 0.94, 5: 0.72, 6: 0.54, 7: 0.35}


@pytest.mark.parametrize(("right", "printed"), PRINTED.items())
def test_2_2_advantages_are_those_printed_in_the_appendix(right, printed):
    """Eight responses to a prompt, 1 to 7 of them right: A of a right one, to two decimals."""
    rewards = torch.tensor([[1.0] * right + [-1.0] * (8 - right)])
    advantages = group_advantages(rewards)
    assert round(float(advantages[0, 0]), 2) == printed
    assert float(advantages.sum()) == pytest.approx(0, abs=1e-5)


def test_2_2_equal_rewards_have_no_advantage():
    tenths = torch.tensor([[0.1] * 8])
    assert tenths.std(1) != 0  # rounding: a comparison of the std with 0 would not see it
    assert (group_advantages(tenths) == 0).all()
    advantages = group_advantages(torch.tensor([[-1.0] * 8, [1.0, *[-1.0] * 7]]))
    assert (advantages[0] == 0).all() and (advantages[1] != 0).all()


# ---------------------------------------------------------------- Sec. 2.3 and 3.1: the objective


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("tau_p", "q"), [(0.002, 0.75), (0.1, 0.5), (0.0, 0.75)], ids=["paper", "other", "JustRL"]
)
def test_3_1_loss_and_gradient_equal_a_loop(seed, tau_p, q):
    """With tau_p = 0 nothing is silenced and STAPO is JustRL."""
    logp, *rest = drawn(seed)
    logp.requires_grad_()
    loss, counts = stapo_loss(logp, *rest, tau_p=tau_p, q=q)
    loss.backward()
    value, gradient, candidates, silenced = by_loop(logp.detach(), *rest, tau_p, q)
    assert float(loss.detach()) == pytest.approx(value, abs=1e-5)
    torch.testing.assert_close(logp.grad.double(), gradient, atol=1e-6, rtol=1e-4)
    assert (int(counts["candidates"]), int(counts["silenced"])) == (candidates, silenced)
    assert int(counts["tokens"]) == int(rest[-1].sum())


# --------------------------------------------------------- Sec. 3.2: the lemmas and their theorem


@pytest.fixture(scope="module")
def sampled(tiny_model, tokenizer):
    """Tokens that the tiny model sampled: ids (N,), full logits (N, V), and ln p and H of them.

    ln p and H are the project's own: float32, from one padded batch.
    """
    prompts = [rollout.encode_prompt(tokenizer, f"Q: {i}+7-3=?", "") for i in range(2, 34)]
    responses = in_order(rollout.sample(tiny_model, tokenizer, prompts, max_new_tokens=60))
    ids, mask, _ = pad(responses)
    with torch.no_grad():
        logits = torch.cat([row_logits(tiny_model, r) for r in responses]).double()
        stats = rollout.Policy(tiny_model)(ids, mask)
        stats = [values[mask].double() for values in stats]
    return torch.tensor([i for r in responses for i in r.ids]), logits, stats


def test_3_2_gradient_norm_lemma_and_the_theorems_bounds(sampled):
    """||dJ/da||^2 by autograd = w^2 (1 - 2 p + sum pi^2), and lies between the bounds of H.

    The right sides hold for float64 statistics to rounding, and for the policy's to float32's.
    """
    tokens, logits, ours = sampled
    n, vocab = logits.shape
    advantages = torch.where(torch.arange(n) % 2 == 0, 1.6, -0.5).double()
    logits = logits.clone().requires_grad_()
    exact = logit_stats(logits, tokens)
    offsets = 0.5 * torch.randn(n, 1, generator=torch.Generator().manual_seed(0)).double()
    chosen, every = exact[0][:, None], torch.ones(n, 1, dtype=torch.bool)
    loss = clipped_loss(chosen, chosen.detach() - offsets, advantages, every, denominator=1)
    (-loss).backward()
    squared = logits.grad.square().sum(-1)  # (N,): every token is a response, denominator is 1
    rho = offsets.exp().squeeze(1)
    flat = ((advantages > 0) & (rho > 1.28)) | ((advantages < 0) & (rho < 0.8))
    w = torch.where(flat, 0.0, rho * advantages)
    assert 0 < flat.sum() < n > 200
    c_v = (vocab - 1) / (vocab * math.log(vocab) ** 2)
    collision = logits.detach().softmax(-1).square().sum(-1)
    for (logp, entropy), atol in (([s.detach() for s in exact], 1e-12), (ours, 2e-5)):
        p = logp.exp()
        torch.testing.assert_close(squared, w**2 * (1 - 2 * p + collision), atol=atol, rtol=1e-9)
        assert (squared >= w**2 * (1 - 2 * p + (-entropy).exp()) - atol).all()
        assert (squared <= w**2 * (2 - 2 * p - c_v * entropy**2) + atol).all()
        low = p < 0.01
        assert squared[low & ~flat].div(w[low & ~flat] ** 2).min() > squared[p > 0.9].max()


def entropy_of(logits):
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def test_3_2_rewarding_an_unlikely_token_raises_the_entropy(sampled):
    """The lemma with A on the sampled token y alone: dH = -eta A p (ln p + H).

    p and H are the policy's own. Where ln p < -H, which every rare token fulfils, H rises.
    """
    tokens, logits, (logp, entropy) = sampled
    eta_a = 1e-3 * 1.6
    only_y = torch.nn.functional.one_hot(tokens, logits.shape[1])
    change = entropy_of(logits + eta_a * only_y) - entropy_of(logits)
    predicted = -eta_a * logp.exp() * (logp + entropy)
    assert (change - predicted).abs().max() < eta_a**2 < 1e-2 * predicted.abs().max()
    rare = logp.exp() < 0.01
    assert rare.sum() > 1 and (change[rare] > 0).all() and (change < 0).any()


# ------------------------------------------------------------------------------ Sec. 3.3: the mask


@pytest.mark.parametrize(
    ("candidates", "silenced"), [(0, 0), (1, 0), (2, 1), (4, 3), (5, 3), (7, 5), (8, 6), (9, 6)]
)
def test_3_3_three_quarters_of_the_candidates_are_silenced(candidates, silenced):
    """With 1, 5, 9, ... of them tau_h is one's own entropy, which a rounding apart would decide."""
    logp = torch.full((2, 10), math.log(0.5))
    logp[0, :candidates] = math.log(0.001)
    logp[1] = math.log(0.001)  # a wrong response has no candidates
    entropy = torch.rand(2, 10)
    mask = torch.ones(2, 10, dtype=torch.bool)
    found, among, tau_h = spurious_mask(logp, torch.tensor([1.0, -1.0]), entropy, mask)
    assert among.sum() == candidates and (tau_h == -math.inf) == (candidates == 0)
    assert found.sum() == silenced and found.dtype == torch.bool and not found[1].any()
    if silenced:  # the lowest entropies go
        assert entropy[found].max() < entropy[0, :candidates][~found[0, :candidates]].min()


def test_3_3_the_three_comparisons_are_strict():
    logp = torch.tensor([[0.001, 0.0015, 0.01]]).log()
    entropy, mask = torch.tensor([[0.2, 0.3, 0.1]]), torch.ones(1, 3, dtype=torch.bool)
    a = torch.ones(1)
    assert spurious_mask(logp, a, entropy, mask, tau_h=0.3)[0].tolist() == [[True, False, False]]
    found, candidates, _ = spurious_mask(logp, a, entropy, mask, tau_h=math.inf)
    assert found.tolist() == candidates.tolist() == [[True, True, False]]
    assert not spurious_mask(logp, 0 * a, entropy, mask, tau_h=math.inf)[0].any()
    assert not spurious_mask(logp, a, entropy, mask, tau_p=0.001, tau_h=math.inf)[0][0, 1:].any()
    assert spurious_mask(logp, a, entropy, mask, q=1.0)[0].sum() == 1  # the highest is kept
    assert not spurious_mask(0 * logp, a, entropy, mask, tau_p=1.0, tau_h=math.inf)[0].any()


@pytest.mark.parametrize("over_all", [False, True], ids=["candidates", "version 1"])
def test_3_3_the_quantile_is_over_the_whole_mini_batch(over_all):
    """Over its candidates, or (version 1) over all its tokens; here it is on two ranks."""
    logp, _, advantages, entropy, mask = drawn(width=40)
    candidates = mask & (advantages[:, None] > 0) & (logp < math.log(0.1))
    tokens = mask if over_all else candidates
    expected = candidates & (entropy < entropy[tokens].quantile(0.6))
    options = {"tau_p": 0.1, "q": 0.6}

    def silenced(rows, over_ranks):
        own = [x[rows] for x in (logp, advantages, entropy, mask)]
        tau_h = quantile(over_ranks(entropy[rows][mask[rows]]), 0.6) if over_all else None
        return spurious_mask(*own, **options, tau_h=tau_h, over_ranks=over_ranks)[0]

    alone = lambda values: values  # noqa: E731
    assert torch.equal(silenced(slice(0, 6), alone), expected) and expected.any()
    ranks = slice(0, 4), slice(4, 6)
    for rows, others in (ranks, ranks[::-1]):
        both = lambda values, o=others: torch.cat([values, entropy[o][tokens[o]]])  # noqa: E731
        assert torch.equal(silenced(rows, both), expected[rows])
    assert not torch.equal(torch.cat([silenced(rows, alone) for rows in ranks]), expected)


# --------------------------------------------------------------- Sec. 3.3: Algorithm 1, replayed

RUN = f"""--model {TINY} --data {TINY}/train.jsonl --instruction= --steps 3 --batch_size 12
    --mini_batch_size 4 --group_size 4 --max_new_tokens 48 --warmup_steps 2 --lr 5e-4
    --weight_decay 20 --grad_clip 0.05 --tau_p 0.9 --tokens_per_micro_batch 300"""


@pytest.mark.parametrize(
    "flags",
    [
        "--method stapo --q 0.5",
        "--method stapo --quantile_over all --q 0.97",
        "--method 20-entropy",
        "--method grpo --beta 0.3",
    ],
)
def test_3_3_algorithm_1_replayed_by_a_plain_second_loop(tmp_path, monkeypatch, flags):
    """Advantages, mask, loss, clipping, schedule, AdamW and metrics, from the equations alone.

    The second loop is given the responses and rewards of a run, and begins with its weights.
    """
    steps, step = [], stapo.train_step
    spy = lambda *x: (steps.append(step(*x)), steps[-1])[1]  # noqa: E731
    monkeypatch.setattr(stapo, "train_step", spy)
    cfg = stapo.parse_flags(stapo.Config, "", f"{RUN} {flags} --output {tmp_path}".split())
    stapo.train(cfg)
    lines = read_rows(tmp_path / "metrics.jsonl")
    collected = [(responses_of(s.batch), s.batch.rewards.tolist()) for s in steps]
    model, expected = replay(collected, cfg)
    within = {"candidates": 1, "silenced": 1, "lr": 0}
    for line, wanted, (responses, _) in zip(lines, expected, collected, strict=True):
        for key, value in wanted.items():
            close = pytest.approx(value or 0, rel=0.01, abs=within.get(key, 2e-4))
            assert line[key] == (value if value is None else close), key
        cut = [len(r.ids) == 48 and r.ids[-1] != 0 for r in responses]
        assert line["truncated_fraction"] == sum(cut) / len(cut)
        seconds = line["rollout_seconds"] + line["update_seconds"]
        assert line["tokens_per_second"] * seconds == pytest.approx(line["tokens"])
    assert (sum(line["silenced"] for line in lines) > 10) == (cfg.method == "stapo")
    assert any(line["tau_h"] for line in lines) == (cfg.method == "stapo")
    assert sum(line["truncated_fraction"] for line in lines) > 0
    saved = tmp_path / "checkpoints" / "step_000003"
    start, end = (AutoModelForCausalLM.from_pretrained(x).state_dict() for x in (TINY, saved))
    assert all(weight.dtype == torch.float32 for weight in end.values())
    moved = torch.cat([(end[k] - start[k]).flatten() for k in start])
    apart = torch.cat([(end[k] - v).flatten() for k, v in model.state_dict().items()])
    assert float(apart.norm() / moved.norm()) < 0.02 and float(moved.norm()) > 0.5


def replay(collected, cfg):
    """Algorithm 1 on the responses of a run: the weights, and the metrics of each step."""
    model, reference = (AutoModelForCausalLM.from_pretrained(TINY) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=cfg.weight_decay)
    lines = []
    for step, (responses, rewards) in enumerate(collected, start=1):
        with torch.no_grad():
            old_logp, entropy = zip(*(row_stats(model, response) for response in responses))
        lr = optimizer.param_groups[0]["lr"] = cfg.lr * min(1, step / cfg.warmup_steps)
        updates = []
        for start in range(0, len(responses), 16):  # 4 prompts of 4 responses
            part = slice(start, start + 16)
            rows = responses[part], rewards[part], old_logp[part]
            updates.append(replay_update(model, reference, optimizer, *rows, cfg))
        names = updates[0].keys() - {"tau_h"}
        total = {key: sum(update[key] for update in updates) for key in names}
        line = rollout_line(old_logp, torch.cat(entropy), rewards, cfg.tau_p) | {"lr": lr}
        line |= {key: total[key] for key in ("candidates", "silenced")}
        line |= {"silenced_fraction": total["silenced"] / line["tokens"]}
        sums = {"clip_low": "clip_low", "clip_high": "clip_high"}
        sums |= {"ratio_mean": "ratio_sum", "approx_kl": "kl_sum"}
        n = total["tokens"]  # none, if no group has an advantage
        line |= {key: total[name] / n if n else None for key, name in sums.items()}
        line |= {key: total[key] / len(updates) for key in ("loss", "grad_norm")}
        thresholds = [update["tau_h"] for update in updates if "tau_h" in update]
        lines.append(line | {"tau_h": statistics.mean(thresholds) if thresholds else None})
    return model, lines


def replay_update(model, reference, optimizer, responses, rewards, old_logp, cfg):
    """One optimiser step on a mini-batch, and the sums behind its metrics: a dict of floats."""
    groups = [rewards[i : i + 4] for i in range(0, len(rewards), 4)]
    means = [statistics.mean(group) for group in groups for _ in group]
    stds = [statistics.stdev(group) or 1.0 for group in groups for _ in group]
    advantages = [(r - mean) / std for r, mean, std in zip(rewards, means, stds)]
    with torch.no_grad():
        kl = responses if cfg.method == "grpo" else []
        ref_logp = [row_stats(reference, response)[0] for response in kl]
    options = {key: getattr(cfg, key) for key in ("method", "tau_p", "q", "quantile_over", "beta")}
    loss, sums = method_loss(model, responses, advantages, old_logp, ref_logp=ref_logp, **options)
    optimizer.zero_grad()
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    for p in model.parameters():
        p.grad *= min(1.0, cfg.grad_clip / max(norm, 1e-9))
    optimizer.step()
    return sums | {"grad_norm": norm}


def rollout_line(old_logp, entropy, rewards, tau_p):
    """What a step's metrics say of its responses under pi_old, four to a prompt."""
    groups = [rewards[i : i + 4] for i in range(0, len(rewards), 4)]
    right = [logp for logp, reward in zip(old_logp, rewards) if reward > 0]
    low_prob = float((torch.cat(right).exp() < tau_p).double().mean()) if right else None
    return {
        "tokens": len(entropy),
        "response_length": len(entropy) / len(rewards),
        "entropy": float(entropy.mean()),
        **{f"entropy_p{p}": float(entropy.quantile(p / 100)) for p in (50, 80, 95, 99)},
        "low_prob_fraction": low_prob,
        "accuracy": rewards.count(1) / len(rewards),
        "reward": statistics.mean(rewards),
        "zero_advantage_fraction": sum(len(set(g)) == 1 for g in groups) / len(groups),
    }


# --------------------------------------------------- appendix: the setup of training and evaluation


def test_appendix_the_recipe_is_the_papers_training_setup():
    """The recipe names each of these itself. So it does not change when a default does."""
    papers = {"batch_size": 256, "group_size": 8, "mini_batch_size": 64, "max_prompt_tokens": 1024}
    papers |= {"max_new_tokens": 15360, "eps_low": 0.2, "eps_high": 0.28, "lr": 1e-6, "q": 0.75}
    papers |= {"warmup_steps": 10, "grad_clip": 1.0, "weight_decay": 0.1, "tau_p": 0.002}
    papers |= {"steps": 3000, "method": "stapo", "quantile_over": "candidates"}
    papers |= {"reward": "scripts/rewards.py:dapo"}
    papers |= {"data": "BytedTsinghua-SIA/DAPO-Math-17k", "model": "Qwen/Qwen3-1.7B-Base"}
    recipe = ROOT / "recipes" / "paper-1.7b"
    flags = asdict(stapo.parse_flags(stapo.Config, "", [f"@{recipe}"]))
    assert {name: flags[name] for name in papers} == papers
    lines = [line for line in recipe.read_text().splitlines() if line.startswith("--")]
    assert set(papers) <= set(re.findall(r"--(\w+)", " ".join(lines)))
    asked = flags["instruction"]
    assert "step by step" in asked and asked.endswith("final answer within \\boxed{}.")


def test_the_defaults_are_the_papers_method():
    """They are a night on one GPU: what the method is does not differ, and help gives the rest."""
    papers = stapo.parse_flags(stapo.Config, "", [f"@{ROOT}/recipes/paper-1.7b"])
    differing = {"reward": "DAPO's rule", "steps": "3,000", "batch_size": "256"}
    differing |= {"mini_batch_size": "64", "max_new_tokens": "15,360", "warmup_steps": "10"}
    ours = replace(papers, **{name: getattr(stapo.Config, name) for name in differing})
    assert replace(ours, save_every=10) == stapo.Config()
    assert ours.beta == 0.04  # DeepSeekMath's: the paper gives none
    assert stapo.Config.batch_size == 4 * stapo.Config.mini_batch_size  # four updates a step
    for field in fields(stapo.Config):
        assert ("(paper: " in field.metadata["help"]) == (field.name in differing)
        assert differing.get(field.name, "") in field.metadata["help"]


def test_appendix_the_defaults_are_the_papers_evaluation_setup():
    config = evaluation.EvalConfig(model="")
    samples = {"aime24": 32, "aime25": 32, "amc23": 32}
    samples |= {"math500": 4, "minerva": 4, "olympiadbench": 4}
    assert {b.key: b.samples for b in evaluation.BENCHMARKS} == samples
    assert config.benchmarks == list(samples) and config.samples == config.limit == 0
    assert config.max_new_tokens == 20480
    found = evaluation.parse_decodings(config.decoding)
    assert found == {"training": (1.0, 1.0), "justrl": (0.7, 0.9)}
