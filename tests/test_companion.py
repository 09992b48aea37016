"""The loss in other hands: the examples of docs/using-the-loss.md, run, and compared."""

import importlib.util
import json
import re
import subprocess
import sys
import types

import pytest
import torch
from helpers import ROOT, TINY, example, in_order, read_rows
from ranks import launch
from reference import drawn

import stapo
from reward import load_reward
from rollout import encode_prompt, load_model, pad_batch, sample, sampling_gap
from stapo import clipped_loss, group_advantages, spurious_mask, stapo_loss
from support import ranks


def test_the_copied_section_needs_torch_alone(tmp_path):
    page = (ROOT / "docs" / "using-the-loss.md").read_text()
    command = re.search(r"```sh\n(.*?)```", page, re.DOTALL)[1].replace("> ", f"> {tmp_path}/")
    subprocess.run(["bash", "-c", command], cwd=ROOT, check=True)
    exec((tmp_path / "stapo_loss.py").read_text(), copied := {})
    logp, old_logp, advantages, entropy, mask = drawn()
    assert copied["stapo_loss"](logp, old_logp, advantages, entropy, mask)[0].isfinite()
    assert copied["group_advantages"](torch.tensor([[1.0, -1.0, -1.0]])).isfinite().all()
    others = mask.long()  # other frameworks have masks of 0 and 1
    assert copied["sampling_gap"](logp, entropy, others) == sampling_gap(logp, entropy, mask)


def mini_batch() -> dict:
    """Six responses of the tiny model after some updates, as the page's examples name them."""
    generator = torch.Generator().manual_seed(0)
    lengths = [(5, 9), (12, 4), (7, 20), (3, 1), (9, 15), (4, 12)]  # of prompts and responses
    rows = [torch.randint(2, 100, (sum(n),), generator=generator) for n in lengths]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
    is_response = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (prompt, response) in enumerate(lengths):
        is_response[row, prompt : prompt + response] = True
    names = {"model": load_model(str(TINY)), "ids": ids, "is_response": is_response}
    names["rewards"] = torch.tensor([[1.0, -1.0, -1.0], [1.0, 1.0, -1.0]])
    names["advantages"] = group_advantages(names["rewards"]).flatten()
    exec(example("statistics"), names)
    names["old_logp"] += 0.3 * torch.randn(names["mask"].shape, generator=generator)
    return names


def gradient_of(loop: str, names: dict) -> torch.Tensor:
    exec(loop, names)
    return torch.cat([p.grad.flatten() for p in names["model"].parameters()])


def two_passes_on_ranks(folder) -> None:
    """This rank's rows of the mini-batch; the gradient is averaged as FSDP and DDP average."""
    ranks.start()
    names, rank, world = mini_batch(), ranks.rank(), ranks.world_size()
    for name in ("ids", "is_response", "mask", "old_logp", "advantages"):
        names[name] = names[name][rank::world]
    passes = re.sub(r"silenced, .*\n.*\n.*\n", example("ranks"), example("two-passes"))
    gradient = gradient_of(passes, names) / world
    torch.distributed.all_reduce(gradient)
    torch.save(gradient, f"{folder}/gradient.pt")
    torch.distributed.destroy_process_group()


def test_an_update_is_the_same_in_one_call_in_two_passes_and_on_three_ranks(tmp_path):
    whole = gradient_of(example("bare"), names := mini_batch())
    assert 3 < names["counts"]["silenced"] < names["counts"]["candidates"]
    assert launch(two_passes_on_ranks, 3, tmp_path / "log", tmp_path) == [0, 0, 0]
    others = gradient_of(example("two-passes"), mini_batch()), torch.load(tmp_path / "gradient.pt")
    for gradient in others:
        torch.testing.assert_close(gradient, whole, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method, tau_h", [("below", 1), ("dr-grpo", None)])
def test_methods_of_ones_own(tmp_path, monkeypatch, method, tau_h):
    """The page's file trains. Of the tokens with p < tau_p `below` silences some."""
    monkeypatch.setattr(stapo, "METHODS", dict(stapo.METHODS))
    exec(example("own-mask"), {"__name__": "own_mask"})
    flags = f"""@{TINY}/args --method {method} --model {TINY} --data {TINY}/train.jsonl --steps 1
        --batch_size 32 --mini_batch_size 16 --output {tmp_path}/run"""
    stapo.main(flags.split())
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert (method == "dr-grpo") or 3 < line["silenced"] < line["candidates"] - 3
    assert line["skipped_updates"] == 0 < line["grad_norm"] and line["tau_h"] == tau_h


def test_a_term_of_ones_own(tmp_path):
    """The page's bonus, a hundred times as large: it keeps the entropy up, and out of `loss`."""
    text, changes = (ROOT / "stapo.py").read_text(), example("bonus").replace("0.01", "1.0")
    for old, new in re.findall(r"^-(.*\n)\+(.*\n)", changes, re.MULTILINE):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "stapo_with_bonus.py").write_text(text)
    spec = importlib.util.spec_from_file_location("bonus", tmp_path / "stapo_with_bonus.py")
    bonus = sys.modules["bonus"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bonus)
    flags = f"""@{TINY}/args --model {TINY} --data {TINY}/train.jsonl --steps 4 --batch_size 16
        --mini_batch_size 16 --lr 1e-3 --warmup_steps 0 --method justrl --output {tmp_path}"""
    found = []
    for program in (stapo, bonus):
        program.main(f"{flags}/{program.__name__}".split())
        found.append(read_rows(tmp_path / program.__name__ / "metrics.jsonl"))
    (first, *_, last), (with_bonus, *_, higher) = found
    assert with_bonus["loss"] == pytest.approx(first["loss"], rel=1e-4)
    assert with_bonus["grad_norm"] != pytest.approx(first["grad_norm"], rel=0.1)
    assert higher["entropy"] > last["entropy"] + 0.1


def test_sampler_example(capsys, tiny_model, tokenizer):
    """It sees logits that are shifted by one token: `statistics` with [:, 1:] for [:, :-1]."""
    prompts = [encode_prompt(tokenizer, f"Q: {i}+7-3=?", "") for i in range(64)]
    responses = in_order(sample(tiny_model, tokenizer, prompts, max_new_tokens=60))
    ids, is_response, _ = pad_batch(responses)
    right = example("statistics")
    wrong = right.replace("logits[:, :-1]", "logits[:, 1:]")
    for code in (right, wrong):
        names = {"model": tiny_model, "ids": ids, "is_response": is_response}
        exec(code + example("sampler"), names)
        here = names["mask"]
        d = -names["old_logp"].double()[here] - names["old_entropy"].double()[here]
        assert float(names["gap"]) == pytest.approx(float(d.mean()))
        assert float(names["z"]) == pytest.approx(float(d.sum() / d.square().sum().sqrt()))
    said = [float(z) for z in re.findall(r"z ([+-][\d.]+)", capsys.readouterr().out)]
    assert abs(said[0]) < 4 and said[1] > 15


def test_dapos_rule_by_hand():
    dapo = load_reward(f"{ROOT}/scripts/rewards.py:dapo")
    row = {"question": "6 + 28?", "reward_model": {"ground_truth": "34"}, "level": 3}
    end = "x" * (100 - len(r"\boxed{34}"))
    for right in (r"so \boxed{34}.", r"\boxed{3} no, \boxed{34}", r"\boxed{34}" + end):
        assert dapo(right, {"row": row}) == 1.0
    wrong = r"\boxed{34.0}", r"\boxed{ 34}", r"\boxed{34}x" + end, r"\boxed{34} \boxed{3", "34}", ""
    assert all(dapo(text, {"row": row}) == -1.0 for text in wrong)
    half = {"reward_model": {"ground_truth": r"\frac{1}{2}"}}
    assert dapo(r"\boxed{\frac{1}{2}}", {"row": half}) == 1.0
    assert dapo(r"\boxed{\frac{1}{2}+1}", {"row": half}) == -1.0


def test_own_reward_example_and_its_trial(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(example("own-reward"))
    for answer, value in ((34, "1.0"), (34.0, "1.0"), ("3", "-1.0")):  # numbers and a text
        row = {"question": "6 + 28?", "answer": answer, "level": 3}
        (tmp_path / "data.jsonl").write_text(json.dumps(row))
        exec(example("try-reward"), {})
        assert capsys.readouterr().out == f"{value} {row}\n"


def test_the_readmes_block_is_the_loss():
    """All of the method in the README's first block: loss and gradient are stapo_loss's own."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    exec(block, names := {})
    logp, *others = drawn()
    logp.requires_grad_()
    for tau_p in (0.1, 0.05, 0.0):  # six candidates; five, of which one has H = tau_h; none
        losses = (
            names["stapo"](logp, *others, tau_p=tau_p),
            stapo_loss(logp, *others, tau_p=tau_p)[0],
        )
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*(torch.autograd.grad(loss, logp) for loss in losses))


def test_micro_batches_of_one_response_are_another_objective():
    """What the page says of two right responses and a wrong one: tokens silenced, and losses.

    Two errors, each alone and both: a quantile of each response, and the mean of their means. The
    page's check passes what is right, and refuses a quantile of each response.
    """
    p = torch.tensor([[0.5, 0.001, 0.001], [0.5, 0.001, 0.001], [0.5, 0.5, 0.5]])
    entropy = torch.tensor([[1.0, 0.1, 0.2], [1.0, 1.5, 1.6], [1.0, 1.0, 1.0]])
    rho = torch.tensor([[1.0, 1.2, 0.5], [1.0, 1.1, 1.2], [1.0, 0.9, 1.1]])
    mask = torch.tensor([[True, True, True], [True, True, True], [True, False, False]])
    advantages = group_advantages(torch.tensor([[1.0, 1.0, -1.0]]))[0]
    tensors = (p.log(), p.log() - rho.log(), advantages, entropy, mask)

    whole, sums = stapo_loss(*tensors)
    micro_batches = [[tensor[i : i + 1] for tensor in tensors] for i in range(3)]
    parts = [stapo_loss(*each) for each in micro_batches]
    silenced = [int(sums["silenced"]) for _, sums in parts]
    assert int(sums["silenced"]) == 3 and silenced == [1, 1, 0]
    page = " ".join((ROOT / "docs" / "using-the-loss.md").read_text().split())
    both = sum(loss for loss, _ in parts) / 3
    kept = [3 - 1, 3 - 1, 1 - 0]
    quantiles = sum(loss * count for (loss, _), count in zip(parts, kept)) / sum(kept)
    keep = mask & ~spurious_mask(tensors[0], advantages, entropy, mask)[0]
    rows = [(*each[:3], row) for each, row in zip(micro_batches, keep.split(1))]
    means = sum(clipped_loss(*each) for each in rows) / 3
    assert f"the loss of a mini-batch is {whole:+.3f}. With a quantile of each response" in page
    assert f"it is {quantiles:+.3f}, with the mean of each response's mean {means:+.3f}" in page
    assert f"with both {both:+.3f}." in page
    given = {"denominator": keep.sum()}
    right = [clipped_loss(*each, **given) for each in rows]
    exec(example("check-whole"), {"tensors": micro_batches, "losses": right})
    wrong = [stapo_loss(*each, **given)[0] for each in micro_batches]
    with pytest.raises(AssertionError, match="not close"):
        exec(example("check-whole"), {"tensors": micro_batches, "losses": wrong})


def test_verl_example_is_registered_and_equals_verls_token_mean():
    verl = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed")
    exec(example("verl"), {})
    ours = verl.get_policy_loss_fn("stapo")
    logp, old_logp, advantages, entropy, mask = drawn()
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    config = types.SimpleNamespace(**clip, global_batch_info={})
    repeated = advantages[:, None] * mask
    args = old_logp, logp, repeated, mask.float()
    loss, _ = ours(*args, config=config, entropy=entropy)
    assert float(loss) == pytest.approx(float(stapo_loss(*drawn())[0]), rel=1e-5)
    theirs = verl.compute_policy_loss(
        *args, cliprange_low=0.2, cliprange_high=0.28, cliprange=0.2, clip_ratio_c=1e6
    )[0]
    justrl = stapo_loss(logp, old_logp, advantages, entropy, mask, tau_p=0.0)[0]
    assert float(justrl) == pytest.approx(float(theirs), rel=1e-5)
    # with verl's count of the mini-batch, micro-batches add up, on any number of ranks
    config.global_batch_info = {"batch_num_tokens": 100, "dp_size": 2}
    counted, _ = ours(*args, config=config, entropy=entropy)
    expected = stapo_loss(*drawn(), denominator=50.0)[0]
    assert float(counted) == pytest.approx(float(expected), rel=1e-5)
