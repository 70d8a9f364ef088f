"""NCCL called through ctypes, for tests of calls that torch.distributed does not make. The process reads RANK and WORLD_SIZE;
gloo carries the ids."""

import ctypes
import os
import sys

TYPES = {"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "fp16": 6, "fp32": 7, "fp64": 8, "bf16": 9,
         "e4m3": 10, "e5m2": 11}
OPERATORS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

_p, _n, _i = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


_SIGNATURES = {
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)], "ncclCommInitRank": [ctypes.POINTER(_p), _i, UniqueId, _i],
    "ncclCommInitAll": [ctypes.POINTER(_p), _i, _p], "ncclCommDestroy": [_p], "ncclGroupStart": [], "ncclGroupEnd": [],
    "ncclAllReduce": [_p, _p, _n, _i, _i, _p, _p], "ncclReduceScatter": [_p, _p, _n, _i, _i, _p, _p],
    "ncclReduce": [_p, _p, _n, _i, _i, _i, _p, _p], "ncclAllGather": [_p, _p, _n, _i, _p, _p],
    "ncclBroadcast": [_p, _p, _n, _i, _i, _p, _p], "ncclBcast": [_p, _n, _i, _i, _p, _p],
    "ncclAlltoAll": [_p, _p, _n, _i, _p, _p], "ncclGather": [_p, _p, _n, _i, _i, _p, _p],
    "ncclScatter": [_p, _p, _n, _i, _i, _p, _p], "ncclSend": [_p, _n, _i, _i, _p, _p], "ncclRecv": [_p, _n, _i, _i, _p, _p],
    "ncclRedOpCreatePreMulSum": [ctypes.POINTER(_i), _p, _i, _i, _p], "ncclRedOpDestroy": [_i, _p]}


def declare(library):
    """The library with the signatures of the functions that it has."""
    for name, signature in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes = signature
    return library


def load():
    """The first definition in the process, which is the preloaded one if there is any, else the copy that torch brought and
    keeps to itself. Call it after torch was imported."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "ncclGetUniqueId"):
        with open("/proc/self/maps") as f:
            library = ctypes.CDLL(next(line.split()[-1] for line in f if "libnccl.so" in line))
    return declare(library)


def share_gpu():
    """For ranks on one GPU: NCCL refuses two of one host, so each names another one and they talk through sockets. To be
    called before NCCL reads its environment."""
    for name, value in {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
                        "NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2", "NCCL_MAX_CTAS": "4"}.items():
        os.environ.setdefault(name, value)


def must(result, what):
    if result != 0:
        sys.exit(f"rank {rank}: {what} failed with {result}")


def meet(shared):
    """Joins gloo and takes the GPU: 0 if it is shared."""
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    torch.cuda.set_device(0 if shared else rank)
    torch.zeros(1, device="cuda")


def exchange_id(library):
    """An id of rank 0, on every rank."""
    import torch.distributed as dist
    unique = UniqueId()
    if rank == 0:
        must(library.ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
    box = [ctypes.string_at(ctypes.byref(unique), 128)]
    dist.broadcast_object_list(box)
    ctypes.memmove(ctypes.byref(unique), box[0], 128)
    return unique


def communicator(library, unique):
    comm = ctypes.c_void_p()
    must(library.ncclCommInitRank(ctypes.byref(comm), world, unique, rank), "ncclCommInitRank")
    return comm
