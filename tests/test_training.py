"""The update of a mini-batch, methods of one's own, and whole runs of stapo.py."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from helpers import TINY, lines, padded, read_rows, refused, responses_of, run, to_batch, write_rows
from reference import method_loss, row_stats

import eval as evaluation
import rollout
import stapo
from rollout import Response, TokenStats
from stapo import METHODS, Config
from support.checkpoints import checkpoints
from support.seeds import generator, mix_seed

# ---------------------------------------------------------------------- the update of a mini-batch


def make_mini_batch(model, seed: int = 0, groups=("+--", "++-", "---", "+++", "-+-")):
    """Groups of random responses, rewards as the strings say, and their statistics under `model`.

    pi_old is another policy, so that ratios are not all 1.
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
            stats = row_stats(model, responses[-1])  # without rollout.py
            current.append(TokenStats(*(values.detach().float() for values in stats)))
            shift = 0.3 * torch.randn(len(ids), generator=g)
            old.append(current[-1]._replace(logp=current[-1].logp + shift))
    seeds = [mix_seed(seed, i) for i in range(len(responses))]
    batch = to_batch(responses, advantages, old, seeds)
    return batch, TokenStats(*(padded(rows, batch.mask) for rows in zip(*current)))


class Still(torch.optim.SGD):
    """Leaves the weights, and keeps the gradient, which `update` deletes."""

    gradient = None

    def step(self):
        self.gradient = torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]])


def updated(model, batch, current, own=None, optimizer=None, **flags):
    """Choose and update as train_step does, by --method or a method of one's own.

    The optimiser, what is kept, and the sums of the update.
    """
    cfg = Config(**{"grad_clip": math.inf} | flags)
    method, optimizer = own or METHODS[cfg.method], optimizer or Still(model.parameters())
    choice = method(replace(batch, old=current), None, cfg)  # None: it takes p and H of the batch
    sums = stapo.update(rollout.Policy(model), optimizer, batch, choice, cfg)
    counts = stapo.update_metrics([batch], [choice], [sums])
    sums |= {x: counts[x] for x in ("candidates", "silenced", "tau_h") if counts[x] is not None}
    return optimizer, choice.keep, sums


@pytest.fixture
def model(random_model):
    return random_model(spread=0.5)


STAPO = {"method": "stapo", "tau_p": 0.005}  # pi_old has one token fewer below it


@pytest.mark.parametrize(
    "options, seed, budget",
    [
        (STAPO, 0, 1),
        (STAPO, 0, 60),
        ({"method": "stapo", "quantile_over": "all"}, 1, 100),
        ({"method": "grpo", "beta": 0.1}, 0, 100),
        *(({"method": method}, 1, 100) for method in METHODS.keys() - {"stapo", "grpo"}),
    ],
)
def test_update_is_one_loss_over_the_mini_batch(model, options, seed, budget):
    """The gradient, the loss and every sum against the objective of each method.

    For every micro-batch size and order; zero-advantage groups are skipped, yet counted.
    """
    batch, current = make_mini_batch(model, seed)
    order = torch.randperm(len(batch.ids))
    batch, current = batch.take(order), TokenStats(*(values[order] for values in current))
    responses, ref_logp = responses_of(batch), current.logp - 0.2
    draws = [generator(seed, "noise") for seed in batch.seeds.tolist()]  # a number for each token
    noise = [torch.rand(len(r.ids), generator=draw) for r, draw in zip(responses, draws)]
    if options["method"] == "grpo":
        batch = replace(batch, ref_logp=ref_logp)
    old, ref = ([r[m] for r, m in zip(x, batch.mask)] for x in (batch.old.logp, ref_logp))
    given = options | {"noise": noise, "ref_logp": ref}
    loss, expected = method_loss(model, responses, batch.advantages.tolist(), old, **given)
    flags = options | {"tokens_per_micro_batch": budget}
    optimizer, keep, sums = updated(model, batch, current, **flags)
    assert {key: float(sums[key]) for key in expected} == pytest.approx(expected, rel=1e-4)
    assert ("tau_h" in sums) == (options["method"] == "stapo")
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])
    atol = 1e-5 * float(gradient.abs().max())
    torch.testing.assert_close(optimizer.gradient, gradient, rtol=1e-3, atol=atol)
    if options["method"] in ("stapo", "high-entropy", "random"):
        assert sums["silenced"] > 3
    if options["method"] in ("high-entropy", "random"):  # as many as STAPO, and others
        as_stapo = METHODS["stapo"](replace(batch, old=current), None, Config())
        assert keep.sum() == as_stapo.keep.sum() and not torch.equal(keep, as_stapo.keep)


@pytest.mark.parametrize("method", ["stapo", "justrl", "grpo"])
def test_a_mask_of_ones_own_may_be_true_outside_responses(model, method):
    """With each denominator: the padding changes nothing. Weights are divided by their sum."""

    def choose(batch, policy, cfg):
        choice = METHODS[method](batch, policy, cfg)
        if method == "stapo":
            choice = choice._replace(candidates=choice.candidates | ~batch.mask)
        keep = torch.where(batch.mask, choice.keep, 1)
        return choice._replace(keep=keep if method == "grpo" else keep * 1e-4)

    mini_batch = make_mini_batch(model)
    own, plain = (updated(model, *mini_batch, x, method=method) for x in (choose, None))
    torch.testing.assert_close(own[0].gradient, plain[0].gradient)
    assert own[2] == pytest.approx(plain[2], rel=1e-5) and plain[2]["loss"] != 0


def test_nothing_to_learn_still_steps_the_optimiser(model):
    """A zero gradient is not a missing one: AdamW decays the weights. None stays in memory.

    No response has an advantage, or a mask keeps nothing. A frozen weight has no gradient at all.
    """
    model.model.norm.weight.requires_grad_(False)
    nothing = lambda batch, *_: stapo.Choice(batch.mask & False, batch.old)  # noqa: E731
    for groups, method in ((("---", "+++"), METHODS["stapo"]), (("+--",), nothing)):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        _, _, sums = updated(model, *make_mini_batch(model, groups=groups), method, optimizer)
        assert sums["finite"] and sums["loss"] == sums["grad_norm"] == 0
        for name, value in model.state_dict().items():
            decay = 0 if name == "model.norm.weight" else 0.001
            torch.testing.assert_close(value, before[name] * (1 - decay), rtol=1e-6, atol=0)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "spoilt, value, method",
    [
        ("old", math.nan, "stapo"),  # a ratio
        ("current", math.nan, "stapo"),  # an entropy alone: every quantile would be NaN
        ("reference", -math.inf, "grpo"),  # the loss is infinite, and its gradient is not
    ],
)
def test_not_finite_is_skipped(model, spoilt, value, method):
    batch, current = make_mini_batch(model)
    if method == "grpo":
        batch = replace(batch, ref_logp=current.logp - 0.2)
    places = {"old": batch.old.logp, "current": current.entropy, "reference": batch.ref_logp}
    places[spoilt][0, int(batch.mask[0].nonzero()[0])] = value
    optimizer, _, sums = updated(model, batch, current, method=method)
    assert not sums["finite"] and optimizer.gradient is None
    assert math.isfinite(sums["grad_norm"]) == (spoilt != "old")


def test_p_and_h_are_the_current_policys_where_the_method_asks_for_them(model):
    """Only these responses are forwarded, and none before a step's first update."""
    policy, rows = rollout.Policy(model), []
    policy.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    batch, current = make_mini_batch(model)
    batch = replace(batch, old=TokenStats(*(values + 1 for values in batch.old)))
    right, cfg = batch.advantages > 0, Config(quantile_over="all", tokens_per_micro_batch=60)
    others = {"stapo": right | True, "20-entropy": right | True}
    others |= {"justrl": right & False, "grpo": right & False}
    for method, fresh in (dict.fromkeys(METHODS, right) | others).items():
        rows.clear()
        assert METHODS[method](batch, None, cfg).stats is batch.old and not rows
        found = METHODS[method](batch, policy, cfg).stats
        assert sum(rows) == fresh.sum(), method
        for got, new, old in zip(found, current, batch.old):
            expected = torch.where(fresh[:, None], new, old)
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    rows.clear()
    METHODS["stapo"](batch, policy, replace(cfg, quantile_over="candidates"))
    assert sum(rows) == right.sum()


def test_twenty_entropy_keeps_the_token_at_the_quantile():
    """Six tokens: the 0.8-quantile is the fifth entropy itself, which is kept (>=)."""
    stats = TokenStats(torch.zeros(6), torch.tensor([0.5, 0.1, 0.9, 0.3, 0.7, 0.2]))
    batch = to_batch([Response([3], [4] * 6, False, "")], [1.0], [stats])
    choice = METHODS["20-entropy"](batch, None, Config())
    assert choice.keep[batch.mask].tolist() == [False, False, True, False, True, False]


def test_tau_h_is_the_mean_over_the_mini_batches_that_have_candidates():
    stats = TokenStats(torch.zeros(1), torch.ones(1))
    batch = to_batch([Response([3], [4], False, "")], [1.0], [stats])
    choices = [stapo.Choice(batch.mask, batch.old, tau_h=x) for x in (0.5, -math.inf, 0.7)]
    sums = dict.fromkeys(("finite", "loss", "grad_norm"), 0)
    for some, mean in ((choices, pytest.approx(0.6)), (choices[1:2], None)):
        line = stapo.update_metrics([batch] * len(some), some, [sums] * len(some))
        assert line["tau_h"] == mean


def test_right_is_a_reward_above_zero():
    """And not an advantage above 0. Of the right response's two tokens one is rare."""
    ps = torch.tensor([0.001]), torch.tensor([0.5, 0.001]), torch.tensor([0.001])
    responses = [Response([3], [4] * len(p), False, "") for p in ps]
    old = [TokenStats(p.log(), torch.ones(len(p))) for p in ps]
    batch = to_batch(responses, [0.5, 0.0, -0.5], old)
    rewards = torch.tensor([0.0, 0.5, -1.0], dtype=torch.float64)
    line = stapo.rollout_metrics(replace(batch, rewards=rewards), tau_p=0.002)
    assert line["accuracy"] == pytest.approx(1 / 3) and line["low_prob_fraction"] == 0.5


def test_micro_batches_stay_within_the_budget():
    assert rollout.micro_batches([3, 9, 4, 2], budget=9) == [[1], [2, 0], [3]]
    assert rollout.micro_batches([3, 9, 4, 2], budget=1) == [[1], [2], [0], [3]]
    assert rollout.micro_batches([3, 9, 4, 2], budget=36) == [[1, 2, 0, 3]]


def test_epochs_visit_every_problem_once():
    """Batches of 3 from 7 problems: each run of 7 is a shuffle, and another one each epoch."""
    stream = [i for step in range(1, 15) for i in stapo.batch_indices(step, 7, 3, seed=5)]
    epochs = [stream[i : i + 7] for i in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 3
    assert stream[:3] == stapo.batch_indices(1, 7, 3, 5) != stapo.batch_indices(1, 7, 3, 6)
    assert sorted(stapo.batch_indices(1, 2, 4, 5)) == [0, 0, 1, 1]  # fewer problems than prompts


# ------------------------------------------------------------------------------------ whole runs


def test_two_steps_without_a_finite_update_end_the_run(tmp_path, monkeypatch, capsys):
    """Steps 1 and 3 are without one, and so is step 4. Each is told. The run is saved."""
    norms = iter(torch.tensor([math.nan, math.inf, 1.0, math.nan] + 4 * [math.nan]))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: next(norms))
    with pytest.raises(SystemExit, match="step 4: no update of two steps in a row was finite$"):
        run(tmp_path / "run", "--steps 6")
    found = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["skipped_updates"] for row in found] == [2, 1, 2, 2]
    assert "step 2: 1 updates were not finite, and were skipped\n" in capsys.readouterr().err
    assert [row["grad_norm"] for row in found] == [None] * 4  # JSON has no NaN and no infinity
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step_000004"]


@pytest.mark.parametrize(
    "pair, equal",
    [
        ((0.7 + 0.2 + 0.1, 1.0), True),  # else the sign of the rounding would be an advantage
        ((0.7 + 0.2 + 0.1 - 1, 0.0), True),
        ((1e8, math.nextafter(1e8, 0)), True),
        ((1e8, 1e8 + 1), False),  # in float32 these are one number
        ((0.5, 0.5 + 2**-20), False),
    ],
)
def test_rewards_are_equal_if_only_rounding_tells_them_apart(tmp_path, pair, equal):
    (tmp_path / "own.py").write_text(f"def f(text, row):\n    return {pair}[len(text) % 2]\n")
    run(tmp_path / "run", f"--steps 1 --reward {tmp_path}/own.py:f --log_samples 16")
    rows = read_rows(tmp_path / "run" / "samples.jsonl")
    rewards = torch.tensor([row["reward"] for row in rows], dtype=torch.float64).view(4, 4)
    assert (rewards.amax(1) > rewards.amin(1)).any()
    expected = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True).clamp(1e-9)
    expected = torch.zeros(16) if equal else expected.flatten()
    assert [row["advantage"] for row in rows] == pytest.approx(expected.tolist())


def test_a_reward_is_told_the_length_of_a_response(tmp_path):
    """In the rollouts and in evaluations. Some responses are cut off."""
    own = "def f(text, row, info): return info['tokens'] - 0.5 * info['truncated']"
    (tmp_path / "own.py").write_text(own)
    flags = f"--eval_every 1 --eval_benchmarks {TINY}/test.jsonl --eval_limit 6 --eval_samples 4"
    flags += f" --reward {tmp_path}/own.py:f --max_new_tokens 12 --steps 1"
    for line in run(tmp_path / "run", flags):
        told = line["eval"]["test"] if "eval" in line else line
        expected = told["response_length"] - 0.5 * told["truncated_fraction"]
        assert 0 < told["truncated_fraction"] < 1 and told["reward"] == pytest.approx(expected)


def test_each_step_and_each_seed_has_random_numbers_of_its_own(tmp_path):
    """Four times the responses to one problem, by weights that do not change."""
    one, texts = write_rows(tmp_path / "one.jsonl", read_rows(TINY / "train.jsonl")[0]), set()
    for seed in (0, 1):
        run(tmp_path / f"{seed}", f"--data {one} --lr 0 --seed {seed} --log_samples 16")
        rows = [row["response"] for row in read_rows(tmp_path / f"{seed}" / "samples.jsonl")]
        texts |= {tuple(rows[:16]), tuple(rows[16:])}
    assert len(texts) == 4


def test_prompts_as_long_as_the_limit_are_kept(tokenizer, tmp_path, capsys):
    problems = [row["problem"] for row in read_rows(TINY / "test.jsonl")]
    lengths = [len(rollout.encode_prompt(tokenizer, problem, "")) for problem in problems]
    limit = sorted(lengths)[len(lengths) // 2]
    kept = sum(length <= limit for length in lengths)
    run(tmp_path / "run", f"--steps 1 --max_prompt_tokens {limit}")
    said = f"{kept} problems, {len(lengths) - kept} over --max_prompt_tokens dropped\n"
    assert said in capsys.readouterr().out and kept < len(lengths)


def test_evaluations_of_a_run_are_those_of_eval_py(tmp_path, capsys):
    """With a reward and a chat template of one's own. An evaluation changes no step.

    A resumed run keeps its template, whatever the file says.
    """
    write_rows(tmp_path / "few.jsonl", *read_rows(TINY / "test.jsonl")[:6])
    source = "def of_problem(response, row):\n    return len(row['problem'] + response) % 2\n"
    (tmp_path / "own.py").write_text(source)
    template = "{{ messages[0].content }} =\n"
    (tmp_path / "own.jinja").write_text(template)
    both = f"--reward {tmp_path}/own.py:of_problem --chat_template {tmp_path}/own.jinja"
    found = run(tmp_path / "run", f"--eval_every 2 --eval_benchmarks {tmp_path}/few.jsonl {both}")
    assert [line["step"] for line in found if "eval" in line] == [0, 2]
    run(tmp_path / "without", both)
    assert lines(tmp_path / "run")[1:-1] == lines(tmp_path / "without")
    flags = f"--model {TINY} --benchmarks {tmp_path}/few.jsonl --decoding training --instruction="
    flags += f" --max_new_tokens 40 --rollout_batch_size 512 --output {tmp_path}/eval {both}"
    evaluation.main(flags.split())
    expected = json.loads((tmp_path / "eval/scores.json").read_text())["scores"]["training"]
    assert found[0]["eval"] == expected and expected["few"]["mean"] > 0
    again = f"--resume {tmp_path}/without --steps 3"
    assert "-> 'none'" in refused(capsys, f"{again} --chat_template none")
    (tmp_path / "own.jinja").write_text(f"Another. {template}")
    stapo.main(again.split())
    saved = rollout.load_tokenizer(str(checkpoints(tmp_path / "without")[-1]))
    assert saved.chat_template == template


def test_dropout_is_off_and_gradient_checkpointing_changes_nothing(tmp_path):
    """A model that has dropout: in the first mini-batch every ratio is 1 all the same."""
    shutil.copytree(TINY, tmp_path / "model")
    config = json.loads((TINY / "config.json").read_text()) | {"attention_dropout": 0.5}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("def letters(response, row):\n    return len(response)\n")
    flags = f"--model {tmp_path}/model --reward {tmp_path}/own.py:letters --steps 1"
    flags += " --mini_batch_size 4 --gradient_checkpointing"
    found = [run(tmp_path / on, f"{flags} {on}")[-1] for on in ("true", "false")]
    for line in found:
        assert line["ratio_mean"] == pytest.approx(1, abs=1e-5) and line["grad_norm"] > 0
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=1e-5)
