"""figures.py on run directories whose numbers are known: its CSV, JSON and markdown, its PNGs."""

import csv
import json
import math
import random
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT

plt = pytest.importorskip("matplotlib.pyplot", reason="figures.py needs matplotlib")
import figures  # noqa: E402

AWKWARD = ["|", "a\nb", "\\", "`", "$x$", "$\\frac$", "<b>", "**", " ", "不", "\ud800"]


def metrics(step: int, accuracy: float, **more) -> dict:
    row = {"step": step, "accuracy": accuracy, "reward": 2 * accuracy - 1, "entropy": 0.5}
    quantiles = {f"entropy_p{p}": p / 100 for p in (50, 80, 95, 99)}
    return row | quantiles | {"silenced_fraction": 0.0, "loss": None} | more


def write_run(path: Path, rows: list[dict], dumps: list[dict] = (), **flags) -> Path:
    (path / "dumps").mkdir(parents=True)
    config = {"method": "stapo", "seed": 0, "tau_p": 0.002, "q": 0.75, "output": str(path)}
    (path / "config.json").write_text(json.dumps(config | flags))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for dump in dumps:
        (path / "dumps" / f"step_{dump['step']:06d}.json").write_text(json.dumps(dump))
    return path


def make_dump(step: int, tau_h: list, n: int = 300, **more) -> dict:
    """Random tokens of random distributions over five words, half of them rare, and AWKWARD."""
    rng, tokens = random.Random(step), []
    for i in range(n):
        logits = [rng.gauss(0, 2) for _ in range(5)]
        logits[0] -= 9 if i % 2 else 0
        total = sum(map(math.exp, logits))
        pi = [math.exp(a) / total for a in logits]
        row = {"token": " Wait", "p": pi[0], "entropy": -sum(p * math.log(p) for p in pi)}
        row |= {"collision": sum(p * p for p in pi), "advantage": rng.choice([2.47, 1.62, 0.35])}
        row |= {"silenced": pi[0] < 0.002 and rng.random() < 0.5, "tau_h": tau_h[i % len(tau_h)]}
        tokens.append(row | {"weight": 1 if pi[0] < 0.002 else 7})
        if i == 0:  # the norm without the lemma: the gradient A (onehot - pi), entry by entry
            norm = math.hypot(*(row["advantage"] * ((v == 0) - p) for v, p in enumerate(pi)))
    for i, token in enumerate(AWKWARD):
        row = {"token": token, "p": 0.001, "entropy": 0.25, "collision": 0.9, "advantage": 1.62}
        row |= {"silenced": True, "weight": 500 + i, "tau_h": tau_h[i % len(tau_h)]}
        tokens.append(row)
    total = sum(row["weight"] for row in tokens)
    dump = {"step": step, "method": "stapo", "tau_p": 0.002, "tokens": tokens}
    response = {"problem": "?", "answer": "", "advantage": 1.62, "start": 0, "length": 1}
    response |= {"token": ["So"], "p": [0.4], "entropy": [0.75], "silenced": [False]}
    response["likeliest"] = [[[" Now", 0.4]] * 5]
    dump["responses"] = [response | {"tau_h": tau} for tau in tau_h[:2]]
    return dump | {"positive_tokens": total, "all_tokens": 3 * total, "first_norm": norm} | more


def read_csv(path: Path) -> list[dict]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def brute_force(dumps: list[dict], thresholds: list[float | None]) -> dict[str, list[float]]:
    """Quadrant -> [count, sum of norms, silenced], token by token; None: the token's own tau_h."""
    found = {f"{p} p, {h} H": [0, 0.0, 0] for p in ("low", "high") for h in ("low", "high")}
    for dump, threshold in zip(dumps, thresholds, strict=True):
        for row in dump["tokens"]:
            p, entropy, collision, advantage, silenced, weight = map(row.get, figures.TOKEN_KEYS)
            low_h = entropy < (row["tau_h"] if threshold is None else threshold)
            name = f"{'low' if p < 0.002 else 'high'} p, {'low' if low_h else 'high'} H"
            found[name][0] += weight
            found[name][1] += weight * abs(advantage) * (1 - 2 * p + collision) ** 0.5
            found[name][2] += weight * silenced
    return found


def check_png(path: Path, colour: str) -> None:
    """Wide enough, and the colour that a drawn line or bar must have is in it."""
    image = (plt.imread(path)[..., :3] * 255).round().astype(int)
    assert image.shape[0] > 300 and image.shape[1] > 600
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    assert (abs(image - wanted).max(axis=-1) <= 2).sum() > 100, f"{path.name}: no {colour}"


@pytest.fixture
def undrawn(monkeypatch):
    """For tests of numbers: drawing takes nearly all of the time."""
    monkeypatch.setattr(figures, "save", lambda fig, path: plt.close(fig))


def test_seeds_become_a_mean_with_a_band_and_other_flags_another_line(tmp_path, undrawn):
    seeds = [
        [metrics(1, 0.3), metrics(2, 0.7)],
        [metrics(1, 0.1), metrics(2, 0.2), metrics(3, 0.6)],
        [metrics(1, 0.8), {"step": 2, "accuracy": None}],
    ]
    runs = [write_run(tmp_path / f"{seed}", rows, seed=seed) for seed, rows in enumerate(seeds)]
    runs.append(write_run(tmp_path / "other", [metrics(1, 0.5)], tau_p=0.01))
    runs.append(write_run(tmp_path / "base", [metrics(1, 0.4)], method="justrl"))
    figures.main([*map(str, runs), "--output", str(tmp_path / "out")])
    rows = read_csv(tmp_path / "out" / "training.csv")
    found = {
        (row["group"], int(row["step"])): [float(row[k]) for k in ("mean", "min", "max", "runs")]
        for row in rows
        if row["metric"] == "accuracy"
    }
    label = "STAPO, tau_p 0.002 (3 runs)"
    assert found == {
        (label, 1): pytest.approx([0.4, 0.1, 0.8, 3]),
        (label, 2): pytest.approx([0.45, 0.2, 0.7, 2]),
        (label, 3): pytest.approx([0.6, 0.6, 0.6, 1]),
        ("STAPO, tau_p 0.01", 1): [0.5, 0.5, 0.5, 1],
        ("JustRL", 1): [0.4, 0.4, 0.4, 1],
    }
    assert not (tmp_path / "out" / "evaluation.csv").exists()


def test_smoothing_is_the_mean_of_the_last_values_and_spares_evaluations(tmp_path, undrawn):
    rows = [metrics(s, s / 10, silenced_fraction=1e-5 * (s % 2)) for s in range(1, 7)]
    rows[1]["eval"], rows[5]["eval"] = {"aime24": {"mean": 10.0}}, {"aime24": {"mean": 30.0}}
    run = write_run(tmp_path / "run", rows)
    figures.main([str(run), "--smooth", "3"])
    table = read_csv(run / "figures" / "training.csv")
    means = [float(row["mean"]) for row in table if row["metric"] == "accuracy"]
    assert means == pytest.approx([0.1, 0.15, 0.2, 0.3, 0.4, 0.5])
    scores = read_csv(run / "figures" / "evaluation.csv")
    assert [(row["step"], float(row["mean"])) for row in scores] == [("2", 10.0), ("6", 30.0)]


def test_quadrants_equal_a_loop_over_weighted_tokens(tmp_path, capsys):
    """Each token has its own mini-batch's tau_h; where there is none, the mean of the others'.

    So has each response of the page. The second dump misses tokens.
    """
    dumps = [make_dump(10, [0.7, None, 0.9]), make_dump(20, [0.6])]
    written = [dumps[0], dumps[1] | {"positive_tokens": 5000}]
    steps = [metrics(step, step / 10, eval={"aime24": {"mean": step}}) for step in (1, 2, 3)]
    run = write_run(tmp_path / "run", steps, written)
    figures.main([str(run)])
    page = (run / "figures" / "responses.html").read_text("utf-8")
    said = [("τ_h", "0.6"), ("τ_h", "0.7"), ("mean τ_h", "0.8")]
    assert re.findall(r"below (.*τ_h) = (\S+)", page) == said
    assert re.findall(r'class="(\w+)" tabindex', page) == ["choosing", "choosing", "sure"]
    for row in dumps[0]["tokens"]:
        row["tau_h"] = row["tau_h"] or 0.8
    rows = read_csv(run / "figures" / "quadrants.csv")
    assert [row["step"] for row in rows] == ["10"] * 4 + ["20"] * 4 + ["all"] * 4
    parts = [
        (rows[:4], dumps[:1], [None]),
        (rows[4:8], dumps[1:], [None]),
        (rows[8:], dumps, [None, None]),
    ]
    for part, of, thresholds in parts:
        truth = brute_force(of, thresholds)
        total = sum(dump["positive_tokens"] for dump in of)
        for row in part:
            count, norms, silenced = truth[row["quadrant"]]
            assert count > 0, "an empty quadrant tests nothing"
            assert float(row["tokens"]) == count
            assert float(row["share"]) == pytest.approx(count / total)
            assert float(row["share_of_all"]) == pytest.approx(count / (3 * total))
            assert float(row["mean_gradient_norm"]) == pytest.approx(norms / count)
            assert float(row["silenced"]) == silenced
    count = brute_force(dumps, [None, None])["low p, low H"][0]
    share = count / sum(dump["positive_tokens"] for dump in dumps)
    printed, warned = capsys.readouterr()
    assert warned.count("weights do not add up") == 1 and "step_000020.json: the weights" in warned
    assert f"| low p, low H | {count} | **{100 * share:.3g} %** |" in printed
    assert printed.count("**") == 4 and "the τ_h of its mini-batch, 0.6 to 0.9 nats" in printed
    points = read_csv(run / "figures" / "gradients.csv")
    for dump in dumps:
        p = dump["tokens"][0]["p"]
        point = next(row for row in points if float(row["p"]) == p)
        assert float(point["norm"]) == pytest.approx(dump["first_norm"])
        assert float(point["step"]) == dump["step"]
    assert len(points) == 2 * (300 + len(AWKWARD))
    for name in ("training", "evaluation", "gradients", "tokens"):
        check_png(run / "figures" / f"{name}.png", "#D55E00")


@pytest.mark.parametrize("method, tau_h", [("justrl", [None]), ("high-entropy", [-0.3])])
def test_without_tau_h_the_split_is_the_weighted_quantile(tmp_path, undrawn, method, tau_h):
    dump = make_dump(10, tau_h, method=method)
    every = sorted(row["entropy"] for row in dump["tokens"] for _ in range(row["weight"]))
    threshold = every[math.ceil(0.8 * len(every)) - 1]
    run = write_run(tmp_path / "run", [metrics(1, 0.5)], [dump], method=method)
    figures.main([str(run)])
    truth = brute_force([dump], [threshold])
    for row in read_csv(run / "figures" / "quadrants.csv")[4:]:
        assert float(row["tokens"]) == truth[row["quadrant"]][0]
    assert "the 0.8-quantile of H" in (run / "figures" / "quadrants.md").read_text("utf-8")
    page = (run / "figures" / "responses.html").read_text("utf-8")
    assert page.count(f"below 0.8-quantile = {threshold:.3g}") == len(dump["responses"])


def test_thinning_keeps_every_rare_token(tmp_path, undrawn, monkeypatch):
    monkeypatch.setattr(figures, "MAX_DRAWN", 160)
    dump = make_dump(10, [0.8], n=900)
    dump["tokens"] = dump["tokens"][:900]
    for i, row in enumerate(dump["tokens"]):
        row |= {"p": 0.001 if i < 150 else 0.5, "weight": 1}
    dump["positive_tokens"] = 900
    run = write_run(tmp_path / "run", [metrics(1, 0.5)], [dump])
    figures.main([str(run)])
    points = read_csv(run / "figures" / "gradients.csv")
    assert sum(row["low_p"] == "True" for row in points) == 150
    assert len(points) == 150 + 150  # 750 in strides of 5
    rows = read_csv(run / "figures" / "quadrants.csv")
    assert sum(float(row["tokens"]) for row in rows if row["step"] == "all") == 900


def test_frequent_tokens_add_up_over_dumps(tmp_path, undrawn):
    run = write_run(tmp_path / "run", [metrics(1, 0.5)], [make_dump(s, [0.8]) for s in (10, 20)])
    figures.main([str(run)])
    found = json.loads((run / "figures" / "tokens.json").read_text())
    rare = [r for s in (10, 20) for r in make_dump(s, [0.8])["tokens"][:300] if r["p"] < 0.002]
    silenced = sum(row["silenced"] for row in rare)
    awkward = {token: 2 * (500 + i) for i, token in enumerate(AWKWARD)}
    assert found["spurious"] == awkward | {" Wait": silenced} and silenced > 100
    assert found["exploratory"] == {" Wait": len(rare) - silenced}
    assert list(found["spurious"])[:2] == AWKWARD[:-3:-1]  # the most frequent first


def test_a_run_that_goes_on_can_be_drawn_at_any_time(tmp_path, undrawn, capsys):
    """After the evaluation before step 1, and again amid the writing of the third step's line."""
    first = {"step": 0, "eval": {"aime24": {"mean": 10.0}}}
    run = write_run(tmp_path / "run", [first])
    figures.main([str(run)])
    assert [path.name for path in (run / "figures").iterdir()] == ["evaluation.csv"]
    rows = [first, metrics(1, 0.4), metrics(2, 0.5), {"step": 2, "eval": {"aime24": {"mean": 20}}}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text(text + '{"step": 3, "accu')
    figures.main([str(run)])
    output = capsys.readouterr()
    assert "the last line (5) is torn" in output.err and "--dump_every" in output.out
    assert [row["step"] for row in read_csv(run / "figures" / "evaluation.csv")] == ["0", "2"]
    assert {row["step"] for row in read_csv(run / "figures" / "training.csv")} == {"1", "2"}
    assert not (run / "figures" / "quadrants.md").exists()


def test_errors_are_one_line_that_names_the_file(tmp_path, undrawn):
    def error(*argv) -> str:
        with pytest.raises(SystemExit) as caught:
            figures.main([*map(str, argv)])
        message = str(caught.value)
        assert message.startswith("figures.py: ") and "\n" not in message
        return message

    run = write_run(tmp_path / "run", [metrics(1, 0.5)])
    assert "nowhere" in error(run, tmp_path / "nowhere")
    assert "--smooth 0" in error(run, "--smooth", 0)
    assert str(run / "config.json") in error(run, "--output", run / "config.json")
    (run / "metrics.jsonl").unlink()
    assert "wait for the first" in error(run)
    other = json.dumps(make_dump(10, [None]) | {"responses": [{}]})
    spoiled = [
        ("config.json", "[]", "no run directory"),
        ("metrics.jsonl", "", "holds no step"),
        ("metrics.jsonl", '{"step": 1, "acc\n{"step": 2, "accuracy": 0.5}\n', "line 1"),
        ("dumps/step_000010.json", '{"step": 1', "torn"),
        ("dumps/step_000010.json", other, "no dump"),
    ]
    for number, (file, text, said) in enumerate(spoiled):
        run = write_run(tmp_path / str(number), [metrics(1, 0.5)])
        (run / file).write_text(text)
        message = error(run)
        assert said in message and str(run) in message
        assert file in message or file == "config.json"  # then the directory is no run's


def test_labels_leave_folders_out_unless_two_runs_would_look_alike():
    paths = ["", "/a/own.py:f", "/b/own.py:g"]
    assert [figures.short(path, paths) for path in paths] == ["", "own.py:f", "own.py:g"]
    paths = ["run-1/checkpoints/step_9", "run-2/checkpoints/step_9"]
    assert [figures.short(path, paths) for path in paths] == paths
    assert figures.short(0.002, [0.002, 0.01]) == "0.002"


def test_figures_imports_nothing_of_the_project():
    text = "".join((ROOT / "scripts" / name).read_text() for name in ("figures.py", "responses.py"))
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported - sys.stdlib_module_names == {"matplotlib", "numpy", "responses"}
