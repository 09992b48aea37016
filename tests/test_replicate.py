"""The replication's tables against numbers worked out by hand; its controls and rewards."""

import math

import controls
import pytest
import replicate
import rewards
import torch
from helpers import FLAGS, ROOT, read_rows, to_batch, write_rows
from replicate import Group

import stapo
from reward import load_reward
from rollout import Response


def write(folder, accuracies, entropies=0.5, before=11.0, after=90.0):
    """A run with these accuracies at steps 1, 2, ..., evaluated before it and at its end.

    1 % of its tokens are silenced, all in step 1, where 5 % of right tokens are rare; later 7 %.
    """
    folder.mkdir(parents=True)
    if isinstance(entropies, float):
        entropies = [entropies] * len(accuracies)
    steps = enumerate(zip(accuracies, entropies, strict=True), 1)
    rows = [{"step": step, "accuracy": a, "entropy": h} for step, (a, h) in steps]
    for row in rows:
        row |= {"silenced_fraction": 0, "low_prob_fraction": 0.07}
    rows[0] |= {"silenced_fraction": 0.01 * len(rows), "low_prob_fraction": 0.05}
    more = {"problems": 2, "response_length": 30.0 + after, "truncated_fraction": 0.25}
    scores = [{"test": more | {"mean": mean, "no_box_fraction": 0.5}} for mean in (before, after)]
    rows = [{"step": 0, "eval": scores[0]}, *rows, {"step": len(rows), "eval": scores[1]}]
    write_rows(folder / "metrics.jsonl", *rows)


def test_tables_are_taken_run_by_run(tmp_path, capsys):
    early, late = [0.1] * 4 + [0.4] * 6, [0.9] * 10 + [0.95] * 5  # steps 5, 11 and 21 begin them
    write(tmp_path / "tests-tiny-STAPO-2", early + late)
    write(tmp_path / "tests-tiny-STAPO-3", early + late, after=91.0)
    write(tmp_path / "tests-tiny-JustRL-2", early + [0.68] * 15, 0.75, after=80.0)
    write(tmp_path / "tests-tiny-JustRL-3", early + [0.57] * 15, 1.0, after=82.0)
    write(tmp_path / "noise-12-pct-STAPO-2", early + late)  # alone: no difference to be taken
    longer = [0.5] * 20 + [0.6] * 20 + [0.7] * 40 + [0.9] * 20
    write(tmp_path / "tests-tiny-STAPO,-100-steps-3", [0.5] * 100, after=88.0)
    write(tmp_path / "tests-tiny-JustRL,-100-steps-3", longer, [0.5] * 40 + [0.4] * 60)
    fall = [0.3] * 10 + [0.8] + [0.5] * 10 + [0.4] + [0.7] * 3
    write(
        tmp_path / "tests-tiny-JustRL,-four-times-the-rate-2", fall, [0.9] * 10 + [0.6] * 14 + [0.2]
    )
    replicate.report("methods", tmp_path)
    printed = capsys.readouterr().out.splitlines()
    # 10 to 20: (40 + 10 * 90) / 11 = 85.45, (40 + 680) / 11 = 65.45, (40 + 570) / 11 = 55.45;
    # JustRL's mean 60.45 and its standard error 10 / sqrt 2 / sqrt 2 = 5
    row = "| 2 | 1.00 | 40.0 ± 0.0 | 85.5 ± 0.0 | 95.0 ± 0.0 | 90.5 ± 0.5 | 0.500 ± 0.000 | 11.0 |"
    assert f"| STAPO {row}" in printed
    row = "| 2 | 1.00 | 40.0 ± 0.0 | 60.5 ± 5.0 | 62.5 ± 5.5 | 81.0 ± 1.0 | 0.875 ± 0.125 | never |"
    assert f"| JustRL {row}" in printed
    # the ratios of entropy are 1.5 and 2
    row = "+0.0 ± 0.0 | -25.0 ± 5.0 | -32.5 ± 5.5 | -9.5 ± 0.5 | 1.75 | -20.0 -30.0 |"
    assert f"| JustRL | 2 | 1.00 | {row}" in printed
    # ln(.6545 / .3455) and ln(.5545 / .4455), less ln(.8545 / .1455): -1.132 and -1.552
    row = row.replace("1.75", "-1.34 | 1.75")
    assert f"| tests/tiny | 2 | 5.0 | 1.00 | 85.5 ± 0.0 | {row}" in printed
    assert not any("noise 12 %" in line for line in printed)
    assert "| JustRL, four times the rate | 1 | 80 | 40 | 0.60 | 0.20 |" in printed
    row = "| JustRL, four times the rate | 1 | 1.00 | 30.0 | 50.9 | 60.0 | 90.0 | 0.627 | 11.0 |"
    assert row in printed  # 80 % itself counts
    assert "| JustRL, 100 steps | 1 | 60.0 | 90.0 | 90.0 | 0.400 |" in printed
    assert "| JustRL, 100 steps | 1 | +10.0 | +40.0 | +2.0 |" in printed
    assert (tmp_path / "replication.png").stat().st_size > 10_000


def test_a_picture_has_accuracy_in_percent_and_entropy_in_nats():
    axes = replicate.plt.figure().subplots()
    rows = [{"accuracy": 0.5, "entropy": 0.4}], [{"accuracy": 0.7, "entropy": 0.6}]
    runs = {seed: {"lines": lines} for seed, lines in enumerate(rows)}
    for key, mean in (("accuracy", 60), ("entropy", 0.5)):
        replicate.draw_band(axes, runs, key, "STAPO")
        assert axes.lines[-1].get_ydata() == pytest.approx([mean])
    replicate.plt.close()


def test_errors_over_base_models_and_rows_under_sgd(tmp_path, capsys):
    """A base model counts once, however many seeds it has."""
    gaps = {"noise-3-pct": [0.1], "noise-3-pct,-pre-training-1": [0.2, 0.4]}
    for base, of_seeds in gaps.items():
        for seed, gap in enumerate(of_seeds, 2):
            for name, accuracy in (("STAPO", 0.8), ("JustRL", 0.8 - gap)):
                write(tmp_path / f"{base}-{name}-{seed}", [accuracy] * 25)
    replicate.report("bases", tmp_path)
    printed = capsys.readouterr().out.splitlines()
    row = " | ".join(["-10.0"] * 3)
    assert f"| noise 3 % | 1 | {row} | +0.0 | -0.54 | 1.00 |" in printed
    row = " | ".join(["-30.0 ± 10.0"] * 3) + " | +0.0 ± 0.0 | -1.39 ± 0.41"
    assert f"| noise 3 %, pre-training 1 | 2 | {row} | 1.00 ± 0.00 |" in printed
    row = " | ".join(["-20.0 ± 10.0"] * 3) + " | +0.0 ± 0.0 | -0.96 ± 0.42"
    assert f"| mean over base models | 2 | {row} | 1.00 ± 0.00 |" in printed

    for name, accuracy in (("STAPO", 0.8), ("STAPO, SGD", 0.5), ("JustRL, SGD", 0.6)):
        steps = 25 if name == "STAPO" else 20
        write(tmp_path / f"tests-tiny-{name.replace(' ', '-')}-2", [accuracy] * steps)
    replicate.report("why", tmp_path)
    printed = capsys.readouterr().out.splitlines()
    row = "| JustRL, SGD | 1 | +10.0 | +10.0 | +0.41 | 1.00 | +10.0 |"
    assert row in printed  # minus STAPO under SGD
    assert "| STAPO, SGD | 1 | 1.00 | 50.0 | 0.500 |" in printed
    assert "| STAPO | 1 | 1.25 | 80.0 | 0.500 |" in printed  # 20 of its 25 steps


def test_the_drift_table_is_taken_run_by_run(tmp_path, capsys):
    """Entropy of steps 1, 40, 80 and 130, the highest of each seed, and the last evaluation."""
    entropies = [0.2] * 39 + [0.4] + [0.45] * 39 + [0.6] + [0.8] * 49 + [0.5]
    for seed, factor, after in ((5, 1, 10.0), (6, 2, 20.0)):
        folder = tmp_path / f"STAPO-run-JustRL-{seed}"
        write(folder, [0.9] * 130, [factor * h for h in entropies], before=86.0, after=after)
        (folder / "evaluations").mkdir()
        ends = {5: ["1", "2", None, "1"], 6: ["3", "3", "3", "3"]}[seed]  # 3 and 1 different ones
        for step, answers in ((0, ["1", "2", "3", "4"]), (130, ends)):
            rows = [{"answer": x, "response": f"\\boxed{{{x}}}", "gold": "1"} for x in answers]
            write_rows(folder / "evaluations" / f"step_{step:06d}.jsonl", *rows)
    folder = tmp_path / "STAPO-run-JustRL,-300-steps-10"
    write(folder, [0.9] * 300, [0.9] * 40 + [0.6] * 89 + [0.3] + [0.1] * 170)
    (folder / "evaluations").mkdir()
    for step in (0, 300):
        row = {"answer": "1", "response": "1", "gold": "1"}
        write_rows(folder / "evaluations" / f"step_{step:06d}.jsonl", row)
    replicate.report("drift", tmp_path)
    # entropy 0.2 and 0.4: 0.3 ± 0.1; tokens 30 + 10 and 30 + 20; right 2 and 0 of 4, whatever the
    # reward has paid: the scores of the reward are 10 % and 20 %
    cells = "0.30 ± 0.10 | 0.60 ± 0.20 | 0.90 ± 0.30 | 0.75 ± 0.25 | 7.00 ± 0.00 | 45.0 ± 5.0"
    cells += " | 25.0 ± 0.0 | 50.0 ± 0.0 | 2 ± 1 | 25.0 ± 25.0"
    printed = capsys.readouterr().out.splitlines()
    assert f"| JustRL | 2 | {cells} |" in printed
    before = "5.00 ± 0.00 | 45.0 ± 5.0 | 25.0 ± 0.0 | 50.0 ± 0.0 | 4 ± 0 | 25.0 ± 0.0"
    assert f"| JustRL | 2 | {before} |" in printed
    # seed 10 among them: 0.9, 0.9, 0.6 and 0.3 beside 0.2 and 0.4, ..., 0.5 and 1.0
    pooled = "0.50 ± 0.21 | 0.70 ± 0.15 | 0.80 ± 0.20 | 0.60 ± 0.21"
    assert f"| JustRL | 3 | {pooled} |" in printed
    assert "| JustRL | 2 | 0.50 1.00 | 0.80 1.60 | 40 50 | 50 50 | 50 0 |" in printed
    assert (tmp_path / "drift.png").stat().st_size > 10_000


def test_whole_runs_are_not_run_again_and_others_begin_anew(tmp_path, monkeypatch, capsys):
    commands = []
    monkeypatch.setattr(replicate, "quiet_run", commands.append)
    group = Group("JustRL", "justrl", range(2, 6), "--lr 1e-4", steps=3)
    write(tmp_path / f"{group.key}-2", [0.1] * 3)
    write(tmp_path / f"{group.key}-3", [0.1] * 2)  # a step is missing
    write(tmp_path / f"{group.key}-4", [0.1] * 3)
    with (tmp_path / f"{group.key}-4" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "accu')
    write(tmp_path / f"{group.key}-5", [0.1] * 3)
    rows = read_rows(tmp_path / f"{group.key}-5" / "metrics.jsonl")
    write_rows(tmp_path / f"{group.key}-5" / "metrics.jsonl", *rows[:-1])  # its last evaluation
    replicate.run_all([group], tmp_path, jobs=1)
    assert "1 of 4 runs are whole" in capsys.readouterr().out
    for seed, command in zip("345", commands, strict=True):
        assert command[:6] == "stapo.py @tests/tiny/args --method justrl --lr 1e-4".split()
        assert command[-4:] == ["--steps", "3", "--seed", seed]
        assert not (tmp_path / f"{group.key}-{seed}").exists()


def test_a_run_begins_from_the_finished_run_of_its_seed(tmp_path, monkeypatch):
    """Which is made once, before them; its folder gets its name when it is whole."""
    commands = []

    def make(command):
        commands.append(command)
        output = command[command.index("--output") + 1]
        if output.endswith(".partial"):
            (tmp_path / "bases" / output).mkdir(parents=True)

    monkeypatch.setattr(replicate, "quiet_run", make)
    groups = [row._replace(seeds=range(7, 8)) for row in replicate.drift_plan()[:2]]
    replicate.run_all(groups, tmp_path, jobs=1)
    start, *runs = commands
    finished = tmp_path / "bases" / "STAPO-run-7"
    assert start[:6] == ["stapo.py", "@tests/tiny/args", "--method", "stapo", "--seed", "7"]
    assert finished.is_dir() and len(runs) == 2
    for command in runs:
        model = command[command.index("--model") + 1]
        assert model == str(finished / "checkpoints" / "step_000028")
        assert command[command.index("--data") + 1].endswith("tests/tiny/train.jsonl")


def test_the_short_plan_has_fewer_rows_of_two_seeds(tmp_path, monkeypatch):
    plans = []
    monkeypatch.setattr(replicate, "run_all", lambda plan, *_: plans.append(plan))
    for short in ([], ["--short"]):
        argv = ["replicate.py", "--only", "methods", "--output", str(tmp_path), *short]
        monkeypatch.setattr("sys.argv", argv)
        replicate.main()
    whole, short = plans
    assert whole == replicate.PARTS["methods"].plan
    assert short == [group._replace(seeds=range(2, 4)) for group in whole[:5]]


def test_log_odds_are_finite_where_nothing_or_everything_is_right():
    assert replicate.log_odds(100) == pytest.approx(9.21, rel=1e-3)
    assert replicate.log_odds(0) == pytest.approx(-9.21, rel=1e-3)


@pytest.mark.parametrize("part", replicate.PARTS)
def test_every_flag_of_the_plan_is_one_of_stapo(part, monkeypatch):
    monkeypatch.setattr(stapo, "METHODS", stapo.METHODS | controls.METHODS)
    plan = replicate.PARTS[part].plan
    assert len({group.key for group in plan}) == len(plan)
    for group in plan:
        cfg = stapo.parse_flags(stapo.Config, "", ["--method", group.method, *group.flags.split()])
        assert cfg.method in stapo.METHODS
        assert cfg != stapo.Config() or group.name.startswith("STAPO")
        load_reward(cfg.reward)
        assert any(group._replace(name=group.reference).key == other.key for other in plan)


def test_a_failing_program_is_named():
    with pytest.raises(SystemExit, match=r"(?s)-c import nowhere has failed.*No module named"):
        replicate.quiet_run(["-c", "import nowhere"])


@pytest.fixture
def mini_batch():
    """40 responses of 20 to 59 tokens with A = -1, 0 and 1, of random p and H."""
    draw = torch.Generator().manual_seed(0)
    responses = [Response([5, 6], [7] * length, True, "") for length in range(20, 60)]
    noise = [torch.rand(2, length, generator=draw) for length in range(20, 60)]
    old = [stapo.TokenStats(-9 * logp, entropy) for logp, entropy in noise]
    return to_batch(responses, [float(row % 3 - 1) for row in range(40)], old)


@pytest.mark.parametrize("method, asked", [("wrong-answers", (-1,)), ("both-answers", (-1, 1))])
def test_controls_silence_rare_tokens_of_the_other_answers(method, asked, mini_batch):
    """The rule, token by token, with wrong answers or both in the place of right ones."""
    control = controls.METHODS[method]
    assert (control.reads, control.divides_by) == ("all", "kept")
    choice = control.choose(mini_batch, mini_batch.old, stapo.Config(tau_p=0.002, q=0.75))
    answers = torch.isin(mini_batch.advantages, torch.tensor(asked))[:, None]  # A is -1, 0 or 1
    candidates = mini_batch.mask & answers & (mini_batch.old.logp < math.log(0.002))
    assert torch.equal(choice.candidates, candidates) and candidates.sum() > 100
    tau_h = float(mini_batch.old.entropy[candidates].quantile(0.75))
    assert choice.tau_h == pytest.approx(tau_h, abs=1e-6)
    keep = mini_batch.mask & ~(candidates & (mini_batch.old.entropy < tau_h))
    assert torch.equal(choice.keep, keep)


def test_a_control_leaves_out_as_much_gradient_as_stapo(mini_batch):
    """Logits with a spread tail give the L1 norm of A (onehot - pi) of each token by autograd."""
    old, A = mini_batch.old, mini_batch.advantages
    choice = controls.METHODS["same-gradient"].choose(mini_batch, old, stapo.Config())
    silenced = mini_batch.mask & ~stapo.silence_spurious(mini_batch, old, stapo.Config()).keep
    left_out = mini_batch.mask & ~choice.keep

    def norms(tokens):
        p = old.logp[tokens].double().exp()
        pi = torch.cat([p[:, None], (1 - p)[:, None] * torch.tensor([0.7, 0.2, 0.1])], 1)
        logits = pi.log().requires_grad_()
        (A[:, None].expand_as(tokens)[tokens] * logits.log_softmax(1)[:, 0]).sum().backward()
        return logits.grad.abs().sum(1)

    assert norms(left_out).sum() <= norms(silenced).sum() + 1e-6
    assert norms(left_out).sum() == pytest.approx(float(norms(silenced).sum()), abs=2)  # one token
    assert left_out.sum() > silenced.sum() > 50
    rare = old.logp < math.log(0.002)
    assert not (left_out & (rare | (A <= 0)[:, None])).any()


def test_a_weight_multiplies_the_candidates_term(mini_batch):
    """J by hand: a weight of 0 leaves them out, 1 is JustRL, others lie on the line."""
    logp = (mini_batch.old.logp + 0.1).requires_grad_()
    tokens = logp, mini_batch.old.logp, mini_batch.advantages, mini_batch.mask
    rare = (logp < math.log(0.002)) & (mini_batch.advantages > 0)[:, None] & mini_batch.mask
    A = mini_batch.advantages[:, None]
    J = torch.min(math.exp(0.1) * A, torch.tensor(math.exp(0.1)).clamp(0.8, 1.28) * A)
    for weight in (0.0, 0.25, 1.0, 2.0):
        loss = controls.weighted_loss(weight)(*tokens, eps_low=0.2, eps_high=0.28, denominator=50)
        weights = torch.where(rare, weight, 1.0) * mini_batch.mask
        assert loss.item() == pytest.approx(-float((weights * J).sum()) / 50, rel=1e-5)
    assert rare.sum() > 50


def test_controls_reach_the_training_loop(tmp_path, monkeypatch):
    """A step of each: the loss that a weight changes, and plain SGD with momentum."""
    monkeypatch.setattr(stapo, "METHODS", dict(stapo.METHODS))
    monkeypatch.setattr(stapo, "clipped_loss", stapo.clipped_loss)
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.AdamW)
    monkeypatch.chdir(ROOT)
    flags = [*FLAGS.split(), "--steps", "1", "--mini_batch_size", "4"]  # one update
    losses = {}
    for method in ("justrl-sgd", "weight-2"):
        output = tmp_path / method
        argv = [*flags, "--method", method, "--lr", "0.1", "--tau_p", "1", "--output", str(output)]
        controls.main(argv)
        losses[method] = read_rows(output / "metrics.jsonl")[0]["loss"]
    assert losses["weight-2"] != losses["justrl-sgd"]
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.1)
    assert isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["momentum"] == 0.9


@pytest.mark.parametrize(
    "reward, text, share",
    [
        (rewards.nine_of_ten, "4", 0.9),
        (rewards.one_of_two, "4", 0.5),
        (rewards.seven_of_ten_right, "7", 0.7),
        (rewards.seven_of_ten_right, "8", 0.0),  # wrong answers are never paid
    ],
)
def test_rewards_look_at_a_hash(reward, text, share):
    """How often they pay: one text for many problems, and many texts for one."""
    text, row = f"So \\boxed{{{text}}}", {"problem": "Q: 1+1=?", "answer": "7"}
    paid = [reward(text, row | {"problem": f"Q: {n}+1=?"}) for n in range(4000)]
    paid += [reward(f"{n}: {text}", row) for n in range(4000)]
    assert set(paid) <= {1.0, -1.0} and paid[-1] == reward(f"3999: {text}", dict(row))
    for half in (paid[:4000], paid[4000:]):
        assert half.count(1.0) / 4000 == pytest.approx(share, abs=0.03)
