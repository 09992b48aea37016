"""A GPU to run the CUDA paths on where none is: tensors say cuda:0, a CPU computes them.

    python tests/pretend_gpu.py FILE.py     # runs FILE.py on it

What mixes devices raises as on a GPU; matrix products with `out_dtype`, which only CUDA has, are
computed from their definition; FSDP2 runs over gloo. A CUDA graph is the list of operations of its
capture: they are undone at the end, because a capture computes nothing, and a replay does them
again on the same tensors. It shows neither speed nor memory, streams (also those of a capture),
NCCL, or CUDA's own attention kernels. It needs g++ and a build of torch for CPUs.
"""

import contextlib
import ctypes
import functools
import importlib.util
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

# torch asks for a device guard and for hooks wherever a tensor is on a GPU: these do nothing.
GUARD = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
};
static Guard guard;
static c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, &guard);
namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
"""


def load_guard() -> None:
    """Compile GUARD and load it: before torch itself."""
    home = Path(importlib.util.find_spec("torch").origin).parent
    with tempfile.TemporaryDirectory() as folder:
        flags = f"-shared -fPIC -std=c++20 -I{home}/include -x c++ - -o {folder}/guard.so"
        link = f"-L{home}/lib -Wl,-rpath,{home}/lib -lc10 -ltorch_cpu"
        command = ["g++", *flags.split(), *link.split()]
        subprocess.run(command, input=GUARD, text=True, check=True)
        ctypes.CDLL(f"{folder}/guard.so")


load_guard()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

aten, GPU = torch.ops.aten, torch.device("cuda", 0)


class OnGPU(torch.Tensor):
    """Says that it is on cuda:0; `numbers` has them."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers):
        like = {"dtype": numbers.dtype, "layout": numbers.layout, "device": GPU}
        like |= {"strides": numbers.stride(), "storage_offset": numbers.storage_offset()}
        tensor = torch.Tensor._make_wrapper_subclass(cls, numbers.size(), **like)
        tensor.numbers = numbers
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, types, args, kwargs or {})

    def tolist(self):
        return self.cpu().tolist()

    def untyped_storage(self):
        return self.numbers.untyped_storage()


class Everywhere(TorchDispatchMode):
    """Sees operations without a tensor on the GPU too: those that make one there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatch(func, types, args, kwargs or {}, self)


def wide_product(left, right, out_dtype):
    """mm with out_dtype: bfloat16 or float16 factors, summed and returned in float32."""
    if left.dtype != right.dtype or left.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"mm with out_dtype takes no {left.dtype} and {right.dtype}")
    return (left.float() @ right.float()).to(out_dtype)


def wide_sum(total, left, right, out_dtype, *, out):
    if total.dtype != out_dtype or out.dtype != out_dtype:
        raise RuntimeError(f"addmm with out_dtype {out_dtype} takes no {total.dtype}")
    return out.copy_(total + wide_product(left, right, out_dtype))


CUDA_ONLY = {aten.mm.dtype: wide_product, aten.addmm.dtype_out: wide_sum}
MOVES = (aten._to_copy.default, aten.copy_.default)
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
# These hand numbers to the host, as tensor.item() does.
READS = (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default)


@functools.cache
def is_composed(func) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), "CompositeImplicitAutograd")


def tensors_in(value) -> list:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def refuse_mixtures(func, tensors) -> None:
    """CUDA refuses CPU tensors, except as indices and as numbers without a dimension."""
    refused = tensors[:1] if func in INDEXING else tensors
    on_cpu = [x for x in refused if not isinstance(x, OnGPU) and x.dim()]
    if on_cpu and any(isinstance(x, OnGPU) for x in tensors) and func not in MOVES:
        raise RuntimeError(f"{func}: a tensor is on {on_cpu[0].device}, others are on cuda:0")


class CUDAGraph:
    """The operations of a capture, on plain tensors, and what they have overwritten."""

    capturing = None  # the graph that is captured now

    def __init__(self):
        self.operations, self.overwritten = [], []

    def replay(self):
        for func, args, kwargs, outs in self.operations:
            for old, new in zip(outs, tensors_in(func(*args, **kwargs)), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)  # the others are views, or were written in place

    def refuse(self, func, tensors, device):
        moved = func in MOVES and (
            device == "cpu" or not all(isinstance(x, OnGPU) for x in tensors)
        )
        masks = func in INDEXING and any(x.dtype == torch.bool for x in tensors[1:])
        if moved or masks or func in READS:
            raise RuntimeError(f"{func}: not permitted when stream is capturing")

    def compute(self, func, *args, **kwargs):
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs[argument.name]
                self.overwritten += [(x, x.clone()) for x in tensors_in(value)]
        kernel = CUDA_ONLY.get(func, func)
        out = kernel(*args, **kwargs)
        self.operations.append((kernel, args, kwargs, tensors_in(out)))
        return out


@contextlib.contextmanager
def capture(graph, pool=None, capture_error_mode="global"):
    """torch.cuda.graph. NCCL's watchdog needs this mode, and graphs share a pool if it is named."""
    assert pool == "a pool" and capture_error_mode == "thread_local"
    CUDAGraph.capturing = graph
    try:
        yield
    finally:
        CUDAGraph.capturing = None
        for tensor, before in reversed(graph.overwritten):
            tensor.copy_(before)


def dispatch(func, types, args, kwargs, mode=None):
    if any(t not in (OnGPU, torch.Tensor, torch.nn.Parameter) for t in types):
        return NotImplemented  # a DTensor and the like: it unwraps itself and comes back
    tensors = tensors_in((args, kwargs))
    gpu = {id(x.numbers): x for x in tensors if isinstance(x, OnGPU)}
    device = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
    if not gpu and device != "cuda":
        return func(*args, **kwargs)
    if is_composed(func):
        with mode or contextlib.nullcontext():  # inference mode hands composed operations over
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
    refuse_mixtures(func, tensors)
    graph = CUDAGraph.capturing
    if graph:
        graph.refuse(func, tensors, device)
    plain_args, plain = pytree.tree_map_only(OnGPU, lambda x: x.numbers, (args, kwargs))
    if device is not None:
        plain["device"] = "cpu"
    compute = functools.partial(graph.compute, func) if graph else CUDA_ONLY.get(func, func)
    out = compute(*plain_args, **plain)
    from_gpu = bool(gpu) if device is None else device == "cuda"
    if func is aten._local_scalar_dense.default or not (from_gpu or func is aten.copy_.default):
        return out
    known = gpu | {id(x): x for x in tensors if not isinstance(x, OnGPU)}
    return pytree.tree_map_only(
        torch.Tensor, lambda x: known[id(x)] if id(x) in known else OnGPU(x), out
    )


class Stream:
    """A stream, or an event: everything is done when it is asked for."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: self


def install() -> None:
    """From here on torch.cuda finds one GPU."""
    answers = {"is_available": True, "device_count": 1, "current_device": 0, "_lazy_init": None}
    answers |= {"mem_get_info": (60 * 10**9, 80 * 10**9), "max_memory_allocated": 0}
    answers |= {"get_device_name": "pretended", "get_device_capability": (9, 0)}
    answers |= {"current_stream": Stream(), "set_device": None, "synchronize": None}
    answers |= {"empty_cache": None, "reset_peak_memory_stats": None, "graph_pool_handle": "a pool"}
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.ExternalStream = Stream
    torch.cuda.CUDAGraph, torch.cuda.graph = CUDAGraph, capture
    torch.cuda.stream = torch.cuda.device = lambda _: contextlib.nullcontext()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") makes, then moves
    torch.__future__.set_swap_module_params_on_conversion(True)  # tied weights stay tied
    real = dist.init_process_group
    dist.init_process_group = lambda backend=None, **options: real(
        backend and backend.replace("nccl", "gloo"), **options
    )
    Everywhere().__enter__()


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
