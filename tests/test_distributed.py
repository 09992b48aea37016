"""One, two and four ranks compute the same thing; a rank that fails ends all."""

import contextlib
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import TIMINGS, TINY, in_order, make_random_model, write_rows
from ranks import CASES, fail_in, launch, train_on_canned_rollouts
from transformers import AutoTokenizer

import rollout
import stapo
from support import models, ranks
from support.models import gathered


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every case on its numbers of ranks; a hang is a failure."""
    folder, tokenizer = tmp_path_factory.mktemp("ranks"), AutoTokenizer.from_pretrained(TINY)
    for name, tied in (("tied", True), ("untied", False)):
        # Weights are drawn wide enough for confident, low-probability tokens.
        model = make_random_model(len(tokenizer) + 8, tied, spread=0.6)
        model.config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [{"problem": f"Q: {i}+{i}=?", "answer": str(2 * i)} for i in range(1, 9)]
    write_rows(folder / "problems.jsonl", *rows)
    (folder / "own.py").write_text("def value(response, row):\n    return float(response)\n")
    for world in (4, 2, 1):  # the others go on with what four have left
        log = folder / f"log{world}"
        codes = launch(train_on_canned_rollouts, world, log, folder, timeout=300)
        logs = "".join(Path(f"{log}.{rank}").read_text()[-3000:] for rank in range(world))
        assert codes == [0] * world, logs
    return folder


def seen(folder: Path, case: str, world: int) -> dict:
    return torch.load(folder / f"world{world}-{case}.pt")


def assert_close(ours: list, theirs: list) -> None:
    """Two lists of tensors, relative to the largest number of all."""
    scale = max(float(x.abs().max()) for x in theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("case", [case for case in CASES if case != "moved"])
def test_ranks_agree(folder, case):
    """The gradient of every update, AdamW's moments and all metrics, to rounding."""
    alone, many = (seen(folder, case, world) for world in CASES[case][1])
    first = alone["metrics"][0]
    assert first["lr"] == 1e-6  # all of it at once: --warmup_steps 0
    assert (first["loss"] is None) == first["skipped_updates"] == (case == "poisoned")
    assert (first["silenced"] > 3) == (case in ("stapo", "idle-ranks", "version-1"))
    updates = {"stapo": 4, "poisoned": 1}.get(case, 2)
    assert len(many["gradients"]) == len(alone["gradients"]) == updates
    for ours, theirs in zip(many["gradients"], alone["gradients"], strict=True):
        assert any(bool(g.any()) for g in theirs)
        assert_close(ours, theirs)
    assert_close(many["moments"], alone["moments"])
    for ours, theirs in zip(many["metrics"], alone["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - set(TIMINGS):
            same = theirs[key] if theirs[key] is None else pytest.approx(theirs[key], 1e-4, 1e-6)
            assert ours[key] == same, key


@pytest.mark.parametrize("flag, code", [("--help", 0), ("--no_such_flag", 2)])
def test_the_parsers_exit_ends_all_ranks(tmp_path, flag, code):
    assert launch(stapo.main, 2, tmp_path / "log", [flag]) == [code, code]
    said, silent = ((tmp_path / f"log.{rank}").read_text() for rank in (0, 1))
    assert "usage: " in said and "Traceback" not in said + silent


@pytest.mark.parametrize("world", [1, 2])
def test_other_numbers_of_ranks_go_on_with_a_checkpoint(folder, world):
    moved, whole = seen(folder, "moved", world), seen(folder, "stapo", 4)
    assert [row["step"] for row in moved["metrics"]] == [1, 2]
    for ours, theirs in zip(moved["gradients"], whole["gradients"][2:], strict=True):
        assert_close(ours, theirs)
    assert_close(moved["moments"], whole["moments"])  # a mean over all updates, also of step 1


def test_counts_are_summed_exactly():
    assert ranks.all_sum({"tokens": 2**24 + 1}) == {"tokens": 2**24 + 1}


def test_layers_compute_in_bfloat16_and_gradients_are_reduced_in_float32(monkeypatch):
    """Each group's policy, as FSDP2 gets it on a GPU: two layers, and the root."""
    given = []
    monkeypatch.setattr(ranks, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(models, "init_device_mesh", lambda *_: None)
    monkeypatch.setattr(models, "fully_shard", lambda *_, **options: given.append(options))
    with pytest.raises(AttributeError, match="to_empty"):  # all groups are made before that
        models.load_sharded(SimpleNamespace(model=make_random_model()), None)
    policies = [options.get("mp_policy") for options in given]
    assert [p and (p.param_dtype, p.reduce_dtype, p.cast_forward_inputs) for p in policies] == [
        (torch.bfloat16, torch.float32, False)
    ] * 3


@pytest.mark.parametrize(
    "place, failing, message",
    [
        ("update", 1, "rank 1 has failed"),
        ("load_reward", 1, "stapo.py: a failure in the load_reward (rank 1)"),
        ("model", 0, "stapo.py: a failure in the model (rank 0)"),
        ("flags", 0, "stapo.py: --mini_batch_size 3: not a multiple of 2 ranks (rank 0)"),
    ],
)
def test_a_rank_that_fails_ends_the_job(tmp_path, place, failing, message):
    """With its traceback, or with a line if the input is wrong, although the others wait for it.

    What is wrong with the input of all ranks is every rank's line.
    """
    codes = launch(fail_in, 2, tmp_path / "log", place, tmp_path, timeout=60)
    logs = [(tmp_path / f"log.{rank}").read_text() for rank in (0, 1)]
    assert codes[failing] == 1 and message in logs[failing]
    assert ("Traceback" in logs[failing]) == (place == "update")
    if failing == 0:
        assert codes == [1, 1] and not any("Traceback" in said for said in logs)


# ------------------------------------------------- a model to sample from beside the sharded one


def sample_from_shards(folder: Path) -> None:
    """Rollouts from a sharded model, before an update and after one."""
    ranks.start()
    tokenizer, plain = rollout.load_tokenizer(str(TINY)), rollout.load_model(str(folder))
    if ranks.rank() > 0:
        rollout.load_model = None  # the others are sent their shards
    policy = rollout.load_policy(str(folder))
    # ragged: ranks that gathered anew at each token would wait for each other
    prompts = [[20, 21 + i] for i in range(6 + ranks.rank())]
    options = {"max_new_tokens": 12, "batch_size": 4, "seed": ranks.rank()}
    for fails in (True, False):
        with contextlib.suppress(InterruptedError), gathered(policy) as twin:
            assert rollout.stop_ids(twin, tokenizer) == [0, 3]  # on every rank
            assert [*map(type, twin.modules())] == [*map(type, plain.modules())]
            ours, theirs = (
                in_order(rollout.sample(model, tokenizer, prompts, **options))
                for model in (twin, plain)
            )
            assert [r.ids for r in ours] == [r.ids for r in theirs]
            if fails:
                raise InterruptedError
        assert all(hasattr(p, "to_local") for p in policy.parameters())  # shards again
        with torch.no_grad():
            for parameter in (*policy.parameters(), *plain.parameters()):
                parameter.mul_(1.25)
    torch.distributed.destroy_process_group()


def test_samples_are_those_of_a_whole_model(tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 3]}')
    codes = launch(sample_from_shards, 2, tmp_path / "log", folder)
    assert codes == [0, 0], (tmp_path / "log.0").read_text()[-3000:]
