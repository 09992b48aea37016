"""FSDP2's hooks rest while the weights are gathered: on one rank and on two.

Run with FOLDER as its argument, by torchrun or alone, this file is the worker of its own tests.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
TINY = str(ROOT / "tests" / "tiny")


def worker(folder: Path) -> None:
    """Writes what a rollout, and a gradient after it, look like with and without the hooks."""
    sys.path.insert(0, str(ROOT))
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    import rollout
    from support import distributed

    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    distributed.start()
    tokenizer, plain = rollout.load_tokenizer(TINY), rollout.load_model(TINY)
    model = distributed.load_policy(TINY)
    seen = []
    model.register_forward_hook(lambda *_: seen.append("mine"))  # not FSDP2's: it stays
    ids = torch.arange(20, 60).view(2, 20) + distributed.rank()
    mask = torch.ones_like(ids, dtype=torch.bool)
    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    prompts = [[20, 21 + i] for i in range(6)]
    found = {"same_samples": [], "order": [], "hooks": [], "sharded": []}
    for _ in range(2):  # before the first backward and after one
        with distributed.unsharded(model), torch.no_grad():
            kept = [f for m in model.modules() for f in m._forward_pre_hooks.values()]
            found["hooks"].append(len(kept))
            found["logits"] = (model(ids).logits - plain(ids).logits).abs().max()
            options = {"max_new_tokens": 12, "batch_size": 4, "seed": distributed.rank()}
            ours, theirs = (
                rollout.sample(m, tokenizer, prompts, **options) for m in (model, plain)
            )
            found["same_samples"].append([r.ids for r in ours] == [r.ids for r in theirs])
        orders = [getattr(state._comm_ctx, "post_forward_order", []) for state in states]
        found["order"].append(sum(map(len, orders)))
        found["sharded"].append(all(hasattr(p, "to_local") for p in model.parameters()))
        model.zero_grad()
        model.token_stats(ids, mask, mask)[0].sum().backward()
    assert len(seen) > 12
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    plain.zero_grad()
    for rank in range(distributed.world_size()):
        ids = torch.arange(20, 60).view(2, 20) + rank
        logp = rollout.token_stats(plain, ids, mask, mask)[0]
        (logp.sum() / distributed.world_size()).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    errors = [(gradients[n] - expected[n]).abs().max() / expected[n].abs().max() for n in expected]
    found["gradient"] = max(errors)
    torch.save(found, folder / f"rank{distributed.rank()}.pt")
    distributed.finish()


@pytest.mark.parametrize("ranks", [1, 2])
def test_hooks_rest_and_come_back(ranks, tmp_path):
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if ranks == 2 else []
    command = [sys.executable, *launch, __file__, str(tmp_path)]
    options = {"env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(ranks):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        assert found["hooks"] == [0, 0]  # at rest
        assert found["logits"] == 0 and found["same_samples"] == [True, True]
        assert found["order"] == [0, 0]  # nothing grows while tokens are decoded
        assert found["sharded"] == [True, True]
        assert found["gradient"] < 1e-5  # the hooks are back


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
