"""The update of a mini-batch, and whole runs of stapo.py."""

import contextlib
import copy
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers import FLAGS, TINY, padded, read_rows, refused, responses_of, run, to_batch, write_rows
from ranks import launch
from reference import method_loss, row_stats
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig

import eval as evaluation
import rollout
import stapo
from reward import is_correct
from rollout import Response, TokenStats
from stapo import Config, micro_batches, update
from support.distributed import peak_memory_gb
from support.errors import InputError
from support.seeds import generator, mix_seed


def make_mini_batch(model, seed: int = 0, groups=("+--", "++-", "---", "+++", "-+-"), drift=0.3):
    """Groups of random responses, rewards as the strings say, and their statistics under `model`.

    pi_old differs from the current policy by `drift`, so that ratios are not all 1. The reference
    of GRPO's KL is 0.2 nats below the current policy.
    """
    g = torch.Generator().manual_seed(seed)
    responses, advantages, old, current = [], [], [], []
    for group in groups:
        rewards = torch.tensor([[1.0 if sign == "+" else -1.0 for sign in group]])
        for advantage in stapo.group_advantages(rewards)[0].tolist():
            lengths = [int(torch.randint(1, high, (1,), generator=g)) for high in (9, 25)]
            prompt, ids = (torch.randint(2, 100, (n,), generator=g).tolist() for n in lengths)
            responses.append(Response(prompt, ids, False, ""))
            advantages.append(advantage)
            current.append(plain_stats(model, responses[-1]))
            shift = drift * torch.randn(len(ids), generator=g)
            old.append(current[-1]._replace(logp=current[-1].logp + shift))
    seeds = [mix_seed(seed, i) for i in range(len(responses))]
    batch = to_batch(responses, advantages, old, seeds)
    current = TokenStats(*(padded(rows, batch.mask) for rows in zip(*current)))
    return replace(batch, ref_logp=current.logp - 0.2), current


@torch.no_grad()
def plain_stats(model, response) -> TokenStats:
    """The statistics of a response, without rollout.py: (T,) float32 each."""
    return TokenStats(*(stats.float() for stats in row_stats(model, response)))


def ragged(values, mask) -> list[torch.Tensor]:
    """(B, L) -> the response tokens of each row."""
    return [row[here] for row, here in zip(values, mask)]


def choose(batch, stats, **flags):
    """What the method keeps of a mini-batch, and the counts behind its metrics."""
    cfg = Config(**flags)
    choice = stapo.METHODS[cfg.method].choose(batch, stats, cfg)
    return choice, stapo.count_tokens(batch, stats, choice)


class Frozen:
    """An optimiser that leaves the weights and keeps the gradients, which `update` deletes."""

    def __init__(self, model):
        self.model, self.steps = model, 0

    def zero_grad(self):
        self.model.zero_grad()

    def step(self):
        self.steps += 1
        self.gradient = torch.cat([p.grad.flatten() for p in self.model.parameters()])


def gradient_of(model, batch, current, **flags):
    """The gradient of an update, what its method keeps, and its metrics."""
    cfg, optimizer = Config(grad_clip=math.inf, **flags), Frozen(model)
    choice, counts = choose(batch, current, **flags)
    if not stapo.METHODS[cfg.method].kl:
        batch = replace(batch, ref_logp=None)  # as collect makes it without a reference
    totals = update(rollout.Policy(model), optimizer, batch, choice.keep, counts, cfg)
    counts = {key: counts[key] for key in ("candidates", "silenced")}
    return optimizer.gradient, choice.keep, totals | counts


@pytest.fixture
def model(random_model):
    return random_model(spread=0.5)


@pytest.fixture
def policy(model):
    return rollout.Policy(model)


STAPO = {"method": "stapo", "tau_p": 0.005}  # pi_old has one token fewer below it


@pytest.mark.parametrize(
    "options, seed, budget, shuffled",
    [
        (STAPO, 0, 1, False),
        (STAPO, 0, 60, True),
        (STAPO, 0, 10_000, True),
        ({"method": "justrl"}, 1, 100, False),
        ({"method": "full-mask"}, 1, 100, False),
        ({"method": "high-entropy"}, 1, 100, False),
        ({"method": "random"}, 1, 100, False),
        ({"method": "20-entropy"}, 1, 100, False),
        ({"method": "stapo", "quantile_over": "all"}, 1, 100, False),
        ({"method": "grpo", "beta": 0.1}, 1, 100, False),
    ],
)
def test_update_is_one_loss_over_the_mini_batch(model, options, seed, budget, shuffled):
    """The gradient, the loss and every sum against the objective of each method.

    For every micro-batch size and order; zero-advantage groups are skipped, yet counted.
    """
    batch, current = make_mini_batch(model, seed)
    if shuffled:
        order = torch.randperm(len(batch.ids))
        batch, current = batch.take(order), TokenStats(*(values[order] for values in current))
    responses = responses_of(batch)
    draws = [generator(seed, "noise") for seed in batch.seeds.tolist()]  # a number for each token
    noise = [torch.rand(len(r.ids), generator=draw) for r, draw in zip(responses, draws)]
    given = {"noise": noise, "ref_logp": ragged(batch.ref_logp, batch.mask)}
    old_logp = ragged(batch.old.logp, batch.mask)
    loss, sums = method_loss(
        model, responses, batch.advantages.tolist(), old_logp, **given, **options
    )
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])

    flags = options | {"tokens_per_micro_batch": budget}
    got, keep, totals = gradient_of(model, batch, current, **flags)
    assert {key: totals[key] for key in sums} == pytest.approx(sums, rel=1e-4)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
    if options["method"] in ("stapo", "high-entropy", "random"):
        assert totals["silenced"] > 3
    if options["method"] in ("high-entropy", "random"):  # as many as STAPO, and others
        as_stapo, counts = choose(batch, current, method="stapo")
        assert totals["silenced"] == counts["silenced"]
        assert not torch.equal(keep, as_stapo.keep)


@pytest.mark.parametrize("divides_by", ["kept", "tokens", "responses"])
def test_a_mask_of_ones_own_is_trained_without_its_padding(model, monkeypatch, divides_by):
    """Every denominator leaves out what the mask does. A mask may be true outside responses."""

    def choose(batch, stats, cfg):
        choice = stapo.silence_candidates(batch, stats, cfg)
        return stapo.Choice(choice.keep | ~batch.mask, choice.candidates | ~batch.mask)

    batch, current = make_mini_batch(model)
    monkeypatch.setitem(stapo.METHODS, "own", stapo.Method(choose, "all", divides_by))
    got, keep, totals = gradient_of(model, batch, current, method="own", eps_high=0.2)
    responses, parts = responses_of(batch), []
    for i, (old, kept) in enumerate(zip(batch.old.logp, keep)):
        A, here = float(batch.advantages[i]), batch.mask[i]
        rho = (row_stats(model, responses[i])[0] - old[here]).exp()
        parts.append(torch.minimum(rho * A, rho.clamp(0.8, 1.2) * A)[kept[here]])
    if divides_by == "responses":
        loss = -sum(part.sum() / max(1, len(part)) for part in parts) / len(parts)
    else:
        loss = -torch.cat(parts).sum()
        loss = loss / (len(torch.cat(parts)) if divides_by == "kept" else batch.mask.sum())
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert totals["silenced"] == int((batch.mask & ~keep).sum()) == totals["candidates"] > 3
    assert totals["loss"] == pytest.approx(loss.item(), rel=1e-4)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("method", stapo.METHODS)
def test_a_flag_is_refused_where_it_changes_nothing(model, method, monkeypatch):
    """The gradient with another value than the default; tau_p changes a metric of all methods."""
    batch, current = make_mini_batch(model, seed=1)
    free = {"uses": "q quantile_over", "kl": True, "divides_by": "responses"}
    monkeypatch.setitem(stapo.METHODS, "own", stapo.METHODS[method]._replace(**free))
    plain = gradient_of(model, batch, current, method=method)[0]
    others = {"q": 0.2, "quantile_over": "all", "eps_high": 0.05, "beta": 0.5, "tau_p": 0.02}
    for name, value in others.items():
        flags = {"method": method, name: value}
        same = torch.equal(gradient_of(model, batch, current, **flags)[0], plain)
        of_stapo = name == "quantile_over" and method != "stapo"  # STAPO's alone, by definition
        refusal = contextlib.nullcontext()
        if of_stapo or same and name != "tau_p":
            said = f"--{name} {value}: cannot be used with --method {method}"
            refusal = pytest.raises(InputError, match=said)
        with refusal:
            stapo.check_flags(Config(**flags))
        stapo.check_flags(Config(**flags, resume="RUN"))  # a run that has begun goes on
        if name != "eps_high":  # "responses" clips at eps_low on both sides
            stapo.check_flags(Config(**flags | {"method": "own"}))
    assert {name for row in stapo.METHODS.values() for name in row.uses.split()} <= set(others)


def test_a_method_of_ones_own_refuses_what_it_does_not_use(monkeypatch):
    """And the others refuse the flag that it alone uses; --seed stands for a new flag here."""
    rows = {"own": stapo.Method(stapo.keep_all, "none", "tokens", uses="seed")}
    rows["mean"] = stapo.Method(stapo.keep_all, "none", "responses")
    monkeypatch.setattr(stapo, "METHODS", stapo.METHODS | rows)
    stapo.check_flags(Config(method="own", seed=1, eps_high=0.3))
    for flags in (
        {"method": "own", "q": 0.5},
        {"method": "mean", "eps_high": 0.3},
        {"method": "stapo", "seed": 1},
    ):
        said = "{1}: cannot be used with --method {0}".format(*flags.values())
        with pytest.raises(InputError, match=said):
            stapo.check_flags(Config(**flags))


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"reads": "A>0"}, "reads is 'A>0', not one of 'A > 0', 'all', 'none'"),
        ({"divides_by": "token"}, "divides_by is 'token', not one of 'kept', 'tokens', 'resp"),
        ({"kl": True}, 'a KL term needs divides_by="responses"'),
    ],
)
def test_a_row_of_methods_that_cannot_work_is_refused(monkeypatch, wrong, said):
    monkeypatch.setitem(stapo.METHODS, "own", stapo.METHODS["stapo"]._replace(**wrong))
    with pytest.raises(InputError, match=f"--method own: {said}"):
        stapo.check_flags(Config(method="own"))


def test_every_group_of_parameters_gets_the_rate(tmp_path, monkeypatch):
    """For example weights with decay and norms without."""
    adamw, made = torch.optim.AdamW, []

    def two_groups(parameters, **options):
        first, *others = parameters
        made.append(adamw([{"params": [first]}, {"params": others}], **options))
        return made[0]

    monkeypatch.setattr(torch.optim, "AdamW", two_groups)
    (line,) = run(tmp_path / "run", "--steps 1 --warmup_steps 8")
    assert [group["lr"] for group in made[0].param_groups] == [line["lr"]] * 2


def test_nothing_to_learn_still_steps_the_optimiser(model, policy):
    """A zero gradient is not a missing one: AdamW decays the weights. None stays in memory."""
    batch, current = make_mini_batch(model, groups=("---", "+++"))
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    choice, counts = choose(batch, current)
    totals = update(policy, optimizer, batch, choice.keep, counts, Config())
    assert totals["loss"] == 0 and totals["grad_norm"] == 0
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name] * (1 - 0.001))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_frozen_parameter_does_not_decay(model, policy):
    model.base_model.layers[0].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    batch, current = make_mini_batch(model)
    choice, counts = choose(batch, current)
    update(policy, optimizer, batch, choice.keep, counts, Config())
    same = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert same == {name for name in before if ".layers.0." in name}


def test_a_model_is_frozen_where_its_class_says_so(tmp_path):
    """from_pretrained makes all parameters trainable. With several ranks some are not."""
    sizes = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 8}
    config = Ernie4_5_MoeConfig(**sizes, moe_num_experts=2, moe_k=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    named = rollout.load_policy(str(tmp_path)).model.named_parameters()
    frozen = [name for name, parameter in named if not parameter.requires_grad]
    assert len(frozen) == 1 and frozen[0].endswith("e_score_correction_bias")


def test_a_mask_that_keeps_nothing_is_a_step_of_zero_gradients(model, policy):
    batch, current = make_mini_batch(model)
    choice, counts = choose(batch, current)
    nothing = torch.zeros_like(choice.keep)
    totals = update(policy, Frozen(model), batch, nothing, counts | {"kept": 0}, Config())
    assert totals["finite"] and totals["loss"] == totals["grad_norm"] == 0


def test_not_finite_is_skipped(model, policy):
    """NaN in a ratio, or in an entropy alone, which would make every quantile NaN.

    GRPO's loss is infinite, and its gradient is not, if the starting model rules a token out.
    """
    for spoil, value, method in (
        ("old", math.nan, "stapo"),
        ("current", math.nan, "stapo"),
        ("reference", -math.inf, "grpo"),
    ):
        batch, current = make_mini_batch(model)
        places = {"old": batch.old.logp, "current": current.entropy, "reference": batch.ref_logp}
        places[spoil][0, int(batch.mask[0].nonzero()[0])] = value
        optimizer, cfg = Frozen(model), Config(method=method)
        choice, counts = choose(batch, current, method=method)
        totals = update(policy, optimizer, batch, choice.keep, counts, cfg)
        assert not totals["finite"] and optimizer.steps == 0
        assert math.isfinite(totals["grad_norm"]) == (spoil != "old")


def test_statistics_pass_reads_the_current_policy_of_what_it_needs(model, policy):
    rows = []
    policy.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    batch, _ = make_mini_batch(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    for flags, fresh in (
        ({"method": "justrl"}, lambda advantage: False),
        ({"method": "stapo"}, lambda advantage: advantage > 0),
        ({"method": "20-entropy"}, lambda advantage: True),
        ({"quantile_over": "all"}, lambda advantage: True),
    ):
        rows.clear()
        found = stapo.statistics_pass(policy, batch, Config(**flags))
        assert sum(rows) == sum(map(fresh, batch.advantages.tolist()))
        for row, response in enumerate(responses_of(batch)):
            here = batch.mask[row]
            expected = [values[row][here] for values in batch.old]
            if fresh(float(batch.advantages[row])):
                expected = plain_stats(model, response)
            for got, wanted in zip(found, expected):
                torch.testing.assert_close(got[row][here], wanted, atol=1e-4, rtol=1e-4)
                assert not got[row][~here].any()


def test_the_token_at_the_threshold_is_kept(model, policy):
    """With 33 candidates tau_h is the 25th lowest entropy itself: the strict < keeps its token.

    The update is handed the mask and never compares again: its own entropies would differ by
    rounding, which is why it computes none.
    """
    batch, current = make_mini_batch(model, seed=20, drift=0)  # ratio 1: the clip hides nothing
    choice, counts = choose(batch, current)
    assert (counts["candidates"], counts["silenced"]) == (33, 24)
    at = batch.mask & (current.entropy == choice.tau_h)
    assert at.sum() == 1 and choice.keep[at].all()
    asked = []
    policy.register_forward_pre_hook(lambda *call: asked.append(call[2]), with_kwargs=True)
    update(policy, Frozen(model), batch, choice.keep, counts, Config())
    assert asked and all(options["logp_only"] for options in asked)


class Waits(TorchDispatchMode):
    """Counts what a GPU is waited for: a number or a list of places that the host reads."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        reads = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default
        self.count += func in reads
        return func(*args, **(kwargs or {}))


def test_an_update_waits_twice_for_each_micro_batch(model, policy):
    """For transformers' mask and for the places of the response tokens, however many these are."""
    batch, current = make_mini_batch(model)
    choice, counts = choose(batch, current)
    found, forwards = [], []
    policy.register_forward_pre_hook(lambda *_: forwards.append(1))
    for budget in (10_000, 1):  # one micro-batch, and one for each row with A != 0
        with Waits() as waits:
            cfg = Config(tokens_per_micro_batch=budget)
            update(policy, Frozen(model), batch, choice.keep, counts, cfg)
        found.append((len(forwards), waits.count))
    (one, few), (more, many) = found
    assert one == 1 < more and many - few == 2 * (more - one - 1)


@pytest.mark.parametrize("budget", [1, 20, 50, 10_000])
def test_micro_batches_stay_within_the_budget(budget):
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 24, (30,), generator=g).tolist()
    batches = micro_batches(lengths, budget)
    assert sorted(sum(batches, [])) == list(range(30))
    for batch in batches:
        longest = max(lengths[place] for place in batch)
        assert len(batch) * longest <= budget or len(batch) == 1
    if budget == 50:
        assert len(batches) < 15  # and the budget is used
    assert micro_batches([3, 9, 4, 2], budget=9) == [[1], [2, 0], [3]]
    assert micro_batches([12, 3], budget=9) == [[0], [1]]


def batch_of(*rows) -> stapo.Batch:
    """Responses to one prompt: A of each, p and H of its tokens under pi_old."""
    stats = [TokenStats(torch.tensor(p).log(), torch.tensor(h)) for _, p, h in rows]
    responses = [Response([3], [4] * len(p), False, "") for _, p, _ in rows]
    return to_batch(responses, [advantage for advantage, _, _ in rows], stats)


def test_the_example_of_silence_spurious(monkeypatch):
    """Two candidates, of which the quantile leaves the one of high entropy.

    The function to copy is the one that runs: replaced, it silences other tokens.
    """
    right, wrong = (0.71, [0.9, 0.001, 0.001], [0.2, 0.1, 1.5]), (-0.71, [0.001], [0.1])
    batch = batch_of(right, wrong)
    choice, counts = choose(batch, batch.old)
    assert choice.keep[batch.mask].tolist() == [True, False, True, True]
    assert choice.tau_h == pytest.approx(1.15) and not choice.keep[~batch.mask].any()
    expected = {"responses": 2, "tokens": 4, "kept": 3, "candidates": 2, "silenced": 1}
    assert counts == expected | {"not_finite": 0}
    monkeypatch.setattr(stapo, "spurious_mask", lambda *_, **__: batch.mask)
    assert not choose(batch, batch.old)[0].keep.any()


def test_right_is_a_reward_above_zero():
    """And not an advantage above 0. Of the right response's two tokens one is rare."""
    batch = batch_of((0.5, [0.001], [1.0]), (0.0, [0.5, 0.001], [1.0, 1.0]), (-0.5, [0.001], [1.0]))
    rewards = torch.tensor([0.0, 0.5, -1.0], dtype=torch.float64)
    line = stapo.rollout_metrics(replace(batch, rewards=rewards), tau_p=0.002)
    assert line["accuracy"] == pytest.approx(1 / 3) and line["low_prob_fraction"] == 0.5


def test_twenty_entropy_keeps_the_token_at_the_quantile():
    """Six tokens: the 0.8-quantile is the fifth entropy itself, which is kept (>=)."""
    batch = batch_of((1.0, [1.0] * 6, [0.5, 0.1, 0.9, 0.3, 0.7, 0.2]))
    choice, counts = choose(batch, batch.old, method="20-entropy")
    assert choice.keep[batch.mask].tolist() == [False, False, True, False, True, False]
    assert counts["tokens"] == 6 and counts["silenced"] == 0


@pytest.mark.parametrize(
    "ranks, expected", [(1, ["a1 a2 b1 b2 c1 c2 d1 d2"]), (2, ["a1 a2 c1 c2", "b1 b2 d1 d2"])]
)
def test_the_example_of_collect(ranks, expected, monkeypatch):
    """Which problem and member each rank's rows are, in the order of rank_rows.

    The order of the problems and the seeds of the sampling follow from the run's seed, here 5.
    """
    problems = [{"problem": name, "answer": "", "prompt_ids": [i]} for i, name in enumerate("abcd")]
    orders = {(7, 4, 4, 5): [0, 1, 2, 3]}
    monkeypatch.setattr(stapo, "batch_indices", lambda *asked: orders[asked])
    monkeypatch.setattr(stapo, "world_size", lambda: ranks)

    def sample(model, tokenizer, prompts, *, max_new_tokens, batch_size, **_):
        assert (max_new_tokens, batch_size) == (9, 3)
        yield [(place, Response(ids, [5], False, "")) for place, ids in enumerate(prompts)]

    monkeypatch.setattr(stapo, "sample", sample)
    zeros = lambda model, ids, *_: TokenStats(*(torch.zeros(ids.shape) for _ in "12"))  # noqa: E731
    monkeypatch.setattr(stapo, "response_stats", zeros)
    sizes = {"max_new_tokens": 9, "rollout_batch_size": 3}
    cfg = Config(batch_size=4, mini_batch_size=2, group_size=2, seed=5, **sizes)
    task = stapo.Task(None, problems, lambda text, row: 1.0, {}, {})
    seeds = {
        mix_seed(5, 7, i, m): f"{name}{m + 1}" for i, name in enumerate("abcd") for m in (0, 1)
    }
    for rank, names in enumerate(expected):
        monkeypatch.setattr(stapo, "rank", lambda rank=rank: rank)
        batch, samples = stapo.collect(rollout.Policy(torch.nn.Linear(1, 1)), None, task, 7, cfg)
        assert " ".join(seeds[seed] for seed in batch.seeds.tolist()) == names
        assert [sample["problem"] for sample in samples] == [name[0] for name in names.split()]
        assert batch.ids[:, 0].tolist() == ["abcd".index(name[0]) for name in names.split()]
        parts = batch.mini_batches(2)  # views of the same memory, a mini-batch each
        assert torch.equal(torch.cat([part.seeds for part in parts]), batch.seeds)
        assert parts[1].ids.data_ptr() == batch.ids[len(batch.ids) // 2 :].data_ptr()
        with pytest.raises(ValueError, match="are not 3 equal mini-batches"):
            batch.mini_batches(3)


# ------------------------------------------------------------------------------------ whole runs


def test_three_updates_that_are_not_finite_stop_the_run(tmp_path, monkeypatch):
    """The second is finite, so the third to the fifth are the first three in a row."""
    norms = iter(torch.tensor([math.nan, 1.0, math.inf, math.nan, math.nan]))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: next(norms))
    with pytest.raises(SystemExit, match="step 5: three updates"):
        run(tmp_path / "run", "--steps 6 --mini_batch_size 4")
    written = [row["grad_norm"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")]
    assert written == [None, 1.0, None, None]  # JSON has neither


def test_prompts_as_long_as_the_limit_are_kept(tokenizer, capsys):
    problems = [row["problem"] for row in read_rows(TINY / "test.jsonl")]
    lengths = [len(rollout.encode_prompt(tokenizer, problem, "")) for problem in problems]
    limit = sorted(lengths)[len(lengths) // 2]
    flags = {"model": str(TINY), "data": str(TINY / "test.jsonl"), "instruction": ""}
    task = stapo.load_task(Config(**flags, max_prompt_tokens=limit, max_new_tokens=9))
    kept = len(task.problems)
    assert kept == sum(length <= limit for length in lengths) < len(lengths)
    said = f"{kept} problems, {len(lengths) - kept} over --max_prompt_tokens dropped\n"
    assert said in capsys.readouterr().out


def test_a_chat_template_is_the_runs_own_and_so_are_wrong_golds(tmp_path, capsys):
    """The checkpoint's tokenizer has the template; a resumed run keeps it. No answer is right.

    config.json tells it from another template in a file of the same name.
    """
    rows = [{"problem": f"Q: {i}+1=?", "answer": "work #### none"} for i in range(8)]
    write_rows(tmp_path / "rows.jsonl", *rows)
    template = "{{ messages[0].content }} =\n"
    (tmp_path / "own.jinja").write_text(template)
    flags = f"--data {tmp_path}/rows.jsonl --chat_template {tmp_path}/own.jinja --steps 1"
    (line,) = run(tmp_path / "run", flags)
    said = capsys.readouterr().err
    assert line["accuracy"] == 0 and line["low_prob_fraction"] is None
    assert "step 1: no response is right; an answer in the data is 'none'" in said
    saved = rollout.load_tokenizer(str(tmp_path / "run/checkpoints/step_000001"))
    assert saved.chat_template == template
    again = f"--resume {tmp_path}/run --steps 2"
    assert "--chat_template none: " in refused(capsys, f"{again} --chat_template none")
    (tmp_path / "own.jinja").write_text(f"Another. {template}")
    stapo.main(again.split())
    said = capsys.readouterr().err
    assert "step 2 of 2" in said and "no response is right" not in said
    run(tmp_path / "other", flags)
    configs = [json.loads((tmp_path / x / "config.json").read_text()) for x in ("run", "other")]
    assert len({config["chat_template_fingerprint"] for config in configs}) == 2


@pytest.mark.parametrize("reward", ["", "--reward {}/own.py:of_problem"])
def test_evaluations_of_a_run_are_those_of_eval_py(tmp_path, reward):
    rows = (TINY / "test.jsonl").read_text().splitlines(keepends=True)
    reward = reward.format(tmp_path)
    (tmp_path / "few.jsonl").write_text("".join(rows[:6]))
    source = "def of_problem(response, row):\n    return len(row['problem'] + response) % 2\n"
    (tmp_path / "own.py").write_text(source)
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }} =\n")
    reward += f" --chat_template {tmp_path}/own.jinja" if reward else ""
    flags = f"--eval_every 2 --eval_benchmarks {tmp_path}/few.jsonl {reward}"
    found = run(tmp_path / "run", flags)
    assert [line["step"] for line in found if "eval" in line] == [0, 2]
    flags = f"--model {TINY} --benchmarks {tmp_path}/few.jsonl --decoding training --instruction="
    flags += f" --max_new_tokens 40 --rollout_batch_size 512 --output {tmp_path}/eval {reward}"
    evaluation.main(flags.split())
    expected = json.loads((tmp_path / "eval/scores.json").read_text())["scores"]["training"]
    assert found[0]["eval"] == expected and expected["few"]["mean"] > 0
    for row in read_rows(tmp_path / "eval/samples.jsonl"):
        problem = json.loads(rows[row["problem"]])["problem"]
        own = len(problem + row["response"]) % 2 == 1
        assert row["correct"] == (own if reward else is_correct(row["response"], row["gold"]))


def test_dropout_is_off_and_gradient_checkpointing_changes_nothing(tmp_path, monkeypatch):
    """A model that has dropout: in the first mini-batch every ratio is 1 all the same."""
    shutil.copytree(TINY, tmp_path / "model")
    config = json.loads((TINY / "config.json").read_text()) | {"attention_dropout": 0.5}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("def letters(response, row):\n    return len(response)\n")
    flags = f"--model {tmp_path}/model --reward {tmp_path}/own.py:letters --steps 1"
    real, on, found = stapo.load_policy, [], []

    def load(*args):
        policy = real(*args)
        on.append(any(getattr(m, "gradient_checkpointing", False) for m in policy.modules()))
        return policy

    monkeypatch.setattr(stapo, "load_policy", load)
    for checkpointing in ("true", "false"):
        flags += f" --mini_batch_size 4 --gradient_checkpointing {checkpointing}"
        found += run(tmp_path / checkpointing, flags)
        assert found[-1]["ratio_mean"] == pytest.approx(1, abs=1e-5) and found[-1]["grad_norm"] > 0
        assert found[-1]["clip_low"] == found[-1]["clip_high"] == 0
    assert on == [True, False]
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_in_bytes_times_1e9():
    """Another source of Linux, which is in KiB, too."""
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak_memory_gb() == pytest.approx(1024 * int(peak) / 1e9, rel=0.005)


def test_peak_memory_of_a_gpu_is_its_largest(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 10**9)
    assert peak_memory_gb() == 3


def test_memory_stays_flat_over_25_steps(tmp_path):
    """Peak resident memory of a process, read in each metrics line, in GB."""
    flags = f"{FLAGS} --steps 25 --batch_size 2 --group_size 2 --max_new_tokens 8"
    argv = f"{flags} --output {tmp_path}/run".split()
    assert launch(stapo.main, 1, tmp_path / "log", argv) == [0]
    peaks = [row["peak_memory_gb"] for row in read_rows(tmp_path / "run/metrics.jsonl")]
    assert len(peaks) == 25 and peaks[-1] < 1.02 * peaks[12]


REWARDS = """
def words(response, row):
    return "good"

def nan(response, row):
    return float("nan")

def missing(response, row):
    return row["none"]
"""


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--method ppo", "--method"),
        ("--model no/such/model", "no/such/model: no tokenizer"),
        ("--data nowhere.jsonl", "nowhere.jsonl"),
        ("--batch_size 5", "--mini_batch_size"),
        ("--q 1.5", "--q 1.5"),
        ("--group_size 1", "--group_size"),
        ("--max_prompt_tokens 1", "--max_prompt_tokens"),
        ("--steps 0", "--steps"),
        ("--threads -1", "--threads -1: must be at least 0"),
        ("--lr nan", "--lr"),
        ("--lr 0", "--lr"),
        # before the weights are asked for
        ("--model {folder}/shell --max_new_tokens 4090", "--max_new_tokens 4090: the longest"),
        (
            "--eval_every 1 --eval_benchmarks {folder}/long.jsonl",
            "--max_new_tokens 40: the longest",
        ),
        ("--grad_clip 0", "--grad_clip"),
        ("--output {folder}/torn.jsonl/run", "--output"),
        ("--eval_every 1 --eval_benchmarks nothing", "nothing"),
        ("--model {folder}/no_weights", "no_weights: no model there"),
        ("--data {folder}/torn.jsonl", "torn.jsonl: cannot be read"),
        ("--data {folder}/hollow.parquet", "hollow.parquet"),
        ("--reward {folder}/own.py:words", "own.py:words: returned 'good', which is no finite"),
        ("--reward {folder}/own.py:nan", "own.py:nan: returned nan, which is no finite"),
        ("--reward {folder}/own.py:missing", "KeyError('none') at {folder}/own.py, line 9"),
        ("--reward {folder}/own.py:gone", "has no function gone"),
        ("--reward {folder}/gone.py:length", "gone.py is no Python file"),
        ("--reward {folder}/own.py", "FILE.py:FUNCTION"),
        ("--reward {folder}/broken.py:words", "cannot be imported: ZeroDivisionError"),
    ],
)
def test_wrong_input_is_one_clear_line(tmp_path, tokenizer, capsys, flags, names):
    (tmp_path / "torn.jsonl").write_text('{"problem": "1+1", "ans')
    Dataset.from_dict({"problem": [], "answer": []}).to_parquet(tmp_path / "hollow.parquet")
    for name in ("no_weights", "shell"):
        tokenizer.save_pretrained(tmp_path / name)
    shutil.copy(TINY / "config.json", tmp_path / "shell")
    (tmp_path / "long.jsonl").write_text(json.dumps({"problem": "1+" * 5000, "answer": "2"}))
    (tmp_path / "own.py").write_text(REWARDS)
    (tmp_path / "broken.py").write_text("1 / 0")
    message = refused(capsys, f"{FLAGS} --output {tmp_path}/run {flags.format(folder=tmp_path)}")
    assert names.format(folder=tmp_path) in message.strip().splitlines()[-1]


def test_a_number_below_its_least_is_refused_by_name(monkeypatch):
    counts = "steps batch_size mini_batch_size max_new_tokens rollout_batch_size keep_last "
    counts += "tokens_per_micro_batch"
    others = "warmup_steps weight_decay eps_low eps_high beta save_every save_minutes eval_every "
    others += "eval_limit eval_samples log_samples threads"
    least = dict.fromkeys(counts.split(), 1) | dict.fromkeys(others.split(), 0)
    for name, value in least.items():
        with pytest.raises(InputError, match=f"^--{name} {value - 1}: must be at least {value}"):
            stapo.check_flags(Config(**{name: value - 1}))
    for ends in ({"q": 0.0, "tau_p": 1.0}, {"q": 1.0, "tau_p": 0.0}):
        stapo.check_flags(Config(**ends))
    with pytest.raises(InputError, match="^--beta inf: "):
        stapo.check_flags(Config(beta=math.inf))
    monkeypatch.setattr(stapo, "world_size", lambda: 3)
    with pytest.raises(InputError, match="^--mini_batch_size 8: not a multiple of 3 ranks"):
        stapo.check_flags(Config())


def test_the_cost_of_a_step_by_hand(monkeypatch):
    """5 s of rollout, 15 s of updates."""
    monkeypatch.setattr(stapo.time, "monotonic", lambda: 30.0)
    cost = stapo.cost_metrics(600, began=10.0, collected=15.0)
    assert (cost["rollout_seconds"], cost["update_seconds"]) == (5, 15)
    assert cost["tokens_per_second"] == 30


def test_epochs_visit_every_problem_once():
    """Batches of 3 from 7 problems: each run of 7 is a shuffle, and another one each epoch."""
    stream = [i for step in range(1, 15) for i in stapo.batch_indices(step, 7, 3, seed=5)]
    epochs = [stream[i : i + 7] for i in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 3
    assert stream[:3] == stapo.batch_indices(1, 7, 3, 5) != stapo.batch_indices(1, 7, 3, 6)
    assert sorted(stapo.batch_indices(1, 2, 4, 5)) == [0, 0, 1, 1]  # fewer problems than prompts
