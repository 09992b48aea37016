"""The replication's tables against numbers worked out by hand; its controls against loops."""

import json
import math

import pytest
import replicate
import torch
from replicate import Group

import stapo


def write(folder, accuracies, entropy=0.5, held_out=90.0):
    """A run with these accuracies at steps 1, 2, ..., evaluated before it and at its end."""
    folder.mkdir(parents=True)
    row = {"entropy": entropy, "silenced_fraction": 0.01, "low_prob_fraction": 0.05}
    rows = [row | {"step": step, "accuracy": a} for step, a in enumerate(accuracies, 1)]
    first, last = ({"test": {"mean": mean}} for mean in (11.0, held_out))
    rows = [{"step": 0, "eval": first}, *rows, {"step": len(rows), "eval": last}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_tables_are_taken_run_by_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(replicate, "draw_paper_figures", lambda *_: None)
    stapo, justrl = Group("STAPO", "", 2), Group("JustRL", "", 2)
    early, late = [0.1] * 4 + [0.4] * 6, [0.9] * 15  # steps 5 to 10 at 40 %, 11 to 25 at 90 %
    write(tmp_path / f"{stapo.key}-2", early + late)
    write(tmp_path / f"{stapo.key}-3", early + late)
    write(tmp_path / f"{justrl.key}-2", early + [0.68] * 15, entropy=0.75, held_out=80.0)
    write(tmp_path / f"{justrl.key}-3", early + [0.57] * 15, entropy=1.0, held_out=82.0)
    replicate.report([stapo, justrl], tmp_path)
    printed = capsys.readouterr().out.splitlines()
    # 10 to 20: (40 + 10 * 90) / 11 = 85.45, (40 + 680) / 11 = 65.45, (40 + 570) / 11 = 55.45;
    # JustRL's mean 60.45 and its standard error 10 / sqrt 2 / sqrt 2 = 5
    row = "| 2 | 1.00 | 40.0 ± 0.0 | 85.5 ± 0.0 | 90.0 ± 0.0 | 90.0 ± 0.0 | 0.500 ± 0.000 | 11.0 |"
    assert f"| STAPO {row}" in printed
    row = "| 2 | 1.00 | 40.0 ± 0.0 | 60.5 ± 5.0 | 62.5 ± 5.5 | 81.0 ± 1.0 | 0.875 ± 0.125 | never |"
    assert f"| JustRL {row}" in printed
    # the ratios of entropy are 1.5 and 2
    row = "+0.0 ± 0.0 | -25.0 ± 5.0 | -27.5 ± 5.5 | -9.0 ± 1.0 | 1.75 | -20.0 -30.0 |"
    assert f"| JustRL | {row}" in printed
    assert "| tests/tiny | 5.0 | 1.00 | 85.5 ± 0.0 | -25.0 ± 5.0 |  | 1.75 |" in printed
    assert (tmp_path / "replication.png").stat().st_size > 10_000
    lines = (tmp_path / "runs.csv").read_text().splitlines()
    assert len(lines) == 5 and lines[4].startswith("tests/tiny,JustRL,3,")


def test_each_method_is_compared_at_its_best_rate():
    """Over steps 5 to 10 both are best at twice the rate, later STAPO is at the usual one."""
    accuracies = {
        "STAPO, half the rate": (10, 20),
        "STAPO": (40, 80),
        "STAPO, twice the rate": (50, 75),
        "JustRL, half the rate": (5, 10),
        "JustRL": (30, 70),
        "JustRL, twice the rate": (52, 72),
    }
    groups = [Group(name, "", 2) for name in accuracies]
    found = {}
    for group in groups:
        early, later = accuracies[group.name]
        run = {"5 to 10": early, "10 to 20": later, "last five": later, "held out": later}
        found[group.key] = {2: run, 3: {span: value + 1 for span, value in run.items()}}
    found[groups[-1].key][3]["10 to 20"] -= 2  # 72 and 71, against 80 and 81
    lines = replicate.best_rates(groups, found).splitlines()[2:]
    twice = "STAPO, twice the rate | JustRL, twice the rate"
    assert lines[0] == f"| 5 to 10 | {twice} | +2.0 ± 0.0 |"
    assert lines[1] == "| 10 to 20 | STAPO | JustRL, twice the rate | -9.0 ± 1.0 |"
    assert replicate.best_rates(groups[:-1], found) == ""


def test_whole_runs_are_not_run_again_and_others_begin_anew(tmp_path, monkeypatch, capsys):
    commands = []
    monkeypatch.setattr(replicate, "quiet_run", commands.append)
    group = Group("JustRL", "--method justrl --lr 1e-4", 2, steps=3)
    write(tmp_path / f"{group.key}-2", [0.1] * 3)
    write(tmp_path / f"{group.key}-3", [0.1] * 2)  # a step is missing
    replicate.run_all([group], tmp_path, jobs=2)
    assert "1 of 2 runs are whole, 3 steps are left" in capsys.readouterr().out
    (command,) = commands
    assert command[:6] == ["stapo.py", "@tests/tiny/args", *group.flags.split()]
    assert command[-4:] == ["--steps", "3", "--seed", "3"]
    assert not (tmp_path / f"{group.key}-3").exists()


def test_a_torn_line_makes_a_run_begin_anew(tmp_path):
    write(tmp_path / "run", [0.1] * 3)
    assert len(replicate.read_run(tmp_path / "run", 3)) == 3
    with (tmp_path / "run" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "accu')
    assert replicate.read_run(tmp_path / "run", 3) is None


def test_every_flag_of_the_plan_is_one_of_stapo():
    plan = replicate.whole_plan(5)
    assert len({group.key for group in plan}) == len(plan)
    for group in plan:
        if "--control" not in group.flags:
            flags = group.flags.split()
            assert (
                stapo.parse_flags(stapo.Config, "", flags) != stapo.Config()
                or "STAPO" in group.name
            )
        assert any(group._replace(name=group.reference).key == other.key for other in plan)


def test_a_failing_program_is_named():
    with pytest.raises(SystemExit, match=r"(?s)stapo.py --tau_p 2 has failed.*--tau_p 2.0"):
        replicate.quiet_run(["stapo.py", "--tau_p", "2"])


@pytest.mark.parametrize("whose", ["wrong", "both"])
def test_controls_silence_rare_tokens_of_the_other_answers(whose, monkeypatch):
    """The rule, token by token, with wrong answers or both in the place of right ones."""
    seen = {}
    for name in ("choose_tokens", "METHODS"):
        monkeypatch.setattr(stapo, name, getattr(stapo, name))
    monkeypatch.setattr(stapo, "METHODS", dict(stapo.METHODS))
    monkeypatch.setattr(stapo, "main", lambda argv: seen.update(argv=argv))
    replicate.train_control(whose, ["--steps", "3"])
    assert seen == {"argv": ["--steps", "3"]} and stapo.METHODS["stapo"].reads == "all"
    draw = torch.Generator().manual_seed(0)
    n = 4000
    p = 10 ** (-4 * torch.rand(n, generator=draw, dtype=torch.float64))
    entropy = torch.rand(n, generator=draw, dtype=torch.float64)
    advantages = torch.randint(-1, 2, (n,), generator=draw).double()
    options = {"tau_p": 0.002, "q": 0.75}
    keep, candidates, tau_h = stapo.choose_tokens(
        "stapo", p.log(), advantages, entropy, None, **options
    )
    asked = {"wrong": (-1,), "both": (-1, 1)}[whose]
    rare = [i for i in range(n) if p[i] < 0.002 and int(advantages[i]) in asked]
    assert candidates.nonzero().flatten().tolist() == rare
    entropies = sorted(float(entropy[i]) for i in rare)
    place = 0.75 * (len(entropies) - 1)
    low = entropies[math.floor(place)]
    assert tau_h == pytest.approx(low + (place % 1) * (entropies[math.floor(place) + 1] - low))
    silenced = [i for i in rare if entropy[i] < tau_h]
    assert (~keep).nonzero().flatten().tolist() == silenced
