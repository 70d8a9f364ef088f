"""Programs that open NCCL themselves and call it by handle are reached too: ctypes, as vLLM's PyNccl does it, and JAX.

    halfwire run --mode wire --min-bytes 0 --log DIR -n N -- python3 tests/gpu/clients.py ctypes [--share-gpu]
    halfwire run --mode wire --min-bytes 0 --comms all --log DIR -n N -- python3 tests/gpu/clients.py jax [--share-gpu]

Each sums over the ranks what it knows the sum of, and fails where the sum has no rounding of the wire in it, or more than
that, or where ranks differ.
"""

import argparse
import ctypes
import hashlib
import os
import sys

import direct_nccl
from direct_nccl import must, rank, world

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("client", choices=["ctypes", "jax"])
parser.add_argument("--share-gpu", action="store_true", help="all ranks use GPU 0")
parser.add_argument("--count", type=int, default=4_000_003)
parser.add_argument("--exact", action="store_true", help="expect the exact sum")
options = parser.parse_args()
if options.share_gpu:
    direct_nccl.share_gpu()


def verdict(total, exact, name):
    """Both as fp32 numpy arrays."""
    import numpy
    error = float(numpy.linalg.norm(total - exact) / numpy.linalg.norm(exact))
    low, high = (0, 1e-6) if options.exact else (1e-3, 0.05)
    words = f"{name}: rank {rank} of {world}, relative error {error:.3e}, sha256 {hashlib.sha256(total.tobytes()).hexdigest()[:16]}"
    good = low <= error <= high
    print(words if good else f"FAILED {words}: expected from {low} to {high}", flush=True)
    return 0 if good else 1


def through_ctypes():
    import torch
    import torch.distributed as dist
    direct_nccl.meet(options.share_gpu)
    # What a program gives to dlopen: the path of the file. Not the handle of the global scope.
    import nvidia.nccl
    path = os.path.join(list(nvidia.nccl.__path__)[0], "lib", "libnccl.so.2")
    nccl = direct_nccl.declare(ctypes.CDLL(path))
    comm = direct_nccl.communicator(nccl, direct_nccl.exchange_id(nccl))
    whole = [torch.randn(options.count, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    data = whole[rank].cuda()
    kind, op = direct_nccl.TYPES["fp32"], direct_nccl.OPERATORS["sum"]
    must(nccl.ncclAllReduce(data.data_ptr(), data.data_ptr(), data.numel(), kind, op, comm,
                            torch.cuda.current_stream().cuda_stream), "ncclAllReduce")
    torch.cuda.synchronize()
    failed = verdict(data.cpu().numpy(), sum(w.double() for w in whole).float().numpy(), "ctypes")
    must(nccl.ncclCommDestroy(comm), "ncclCommDestroy")
    dist.destroy_process_group()
    return failed


def through_jax():
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    import jax
    import numpy
    port = int(os.environ.get("MASTER_PORT", "29500")) + 1
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=world, process_id=rank,
                               local_device_ids=[0 if options.share_gpu else rank])
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    whole = [numpy.random.default_rng(r).standard_normal(options.count, dtype=numpy.float32) for r in range(world)]
    mesh = Mesh(numpy.array(jax.devices()), ("ranks",))
    mine = jax.device_put(whole[rank][None], jax.local_devices()[0])
    data = jax.make_array_from_single_device_arrays((world, options.count), NamedSharding(mesh, P("ranks")), [mine])
    summed = jax.jit(lambda x: jnp.sum(x, axis=0), out_shardings=NamedSharding(mesh, P()))(data)
    total = numpy.asarray(summed.addressable_shards[0].data)
    exact = numpy.sum(numpy.stack(whole).astype(numpy.float64), axis=0).astype(numpy.float32)
    failed = verdict(total, exact, f"jax {jax.__version__}")
    jax.distributed.shutdown()
    return failed


sys.exit(through_ctypes() if options.client == "ctypes" else through_jax())
