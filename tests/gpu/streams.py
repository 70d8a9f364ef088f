"""One communicator on several streams of the program, with delays that make them race, and several GPUs driven by one
thread of one process: every result must have the bits of the same calls made one after the other, on every rank.
NCCL is called directly: torch.distributed would put all calls on one stream of its own.

    halfwire run --mode wire --min-bytes 0 -n N -- python3 tests/gpu/streams.py [--share-gpu]
    halfwire run --mode wire --comms all --min-bytes 0 -- python3 tests/gpu/streams.py --one-process
"""

import ctypes
import hashlib
import random
import sys

import direct_nccl
from direct_nccl import must, rank, world

ONE_PROCESS = "--one-process" in sys.argv
if "--share-gpu" in sys.argv:
    direct_nccl.share_gpu()

import torch  # noqa: E402  (brings NCCL into the process)
import torch.distributed as dist  # noqa: E402

nccl = direct_nccl.load()
BF16, FP32, SUM = direct_nccl.TYPES["bf16"], direct_nccl.TYPES["fp32"], direct_nccl.OPERATORS["sum"]
COUNTS = {"a": 1_000_003, "b": 300_001, "c": 17}
ROUNDS = 25


def connect():
    """The communicators of this process, one for each of its devices."""
    if ONE_PROCESS:
        count = torch.cuda.device_count()
        for device in range(count):
            torch.zeros(1, device=f"cuda:{device}")
        comms = (ctypes.c_void_p * count)()
        must(nccl.ncclCommInitAll(comms, count, None), "ncclCommInitAll")
        return {device: ctypes.c_void_p(comms[device]) for device in range(count)}
    shared = "--share-gpu" in sys.argv
    direct_nccl.meet(shared)
    return {0 if shared else rank: direct_nccl.communicator(nccl, direct_nccl.exchange_id(nccl))}


def all_reduce(comm, tensor, stream):
    kind = BF16 if tensor.dtype == torch.bfloat16 else FP32
    must(nccl.ncclAllReduce(tensor.data_ptr(), tensor.data_ptr(), tensor.numel(), kind, SUM, comm,
                            stream.cuda_stream), "ncclAllReduce")


def run(comms, racing):
    """Results by device and buffer after ROUNDS of calls on three streams; with `racing` nothing waits."""
    data, streams = {}, {}
    for device in comms:
        member = device if ONE_PROCESS else rank
        torch.cuda.set_device(device)
        for i, (name, count) in enumerate(COUNTS.items()):
            generator = torch.Generator().manual_seed(1000 * member + i)
            values = torch.randn(count, generator=generator)
            data[device, name] = values.to("cuda", torch.float32 if name == "b" else torch.bfloat16)
            streams[device, name] = torch.cuda.Stream()
    torch.cuda.synchronize()
    order = random.Random(5)  # the same on every rank, as NCCL wants it
    delays = random.Random(rank)
    for _ in range(ROUNDS):
        for name in order.sample(list(COUNTS), len(COUNTS)):
            grouped = ONE_PROCESS or order.random() < 0.3
            if grouped:
                must(nccl.ncclGroupStart(), "ncclGroupStart")
            for device, comm in comms.items():
                torch.cuda.set_device(device)
                tensor, stream = data[device, name], streams[device, name]
                with torch.cuda.stream(stream):
                    if racing and delays.random() < 0.5:
                        torch.cuda._sleep(delays.randrange(1, 400_000))
                    tensor.mul_(0.5)
                    all_reduce(comm, tensor, stream)
            if grouped:
                must(nccl.ncclGroupEnd(), "ncclGroupEnd")
            if not racing:
                for device in comms:
                    torch.cuda.synchronize(device)
    for device in comms:
        torch.cuda.synchronize(device)
    return data


def digest(tensor):
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def main():
    comms = connect()
    want = {key: digest(t) for key, t in run(comms, racing=False).items()}
    failures = []
    for attempt in range(3):
        got = {key: digest(t) for key, t in run(comms, racing=True).items()}
        failures += [f"rank {rank}: attempt {attempt}, device {key[0]}, buffer {key[1]}: {got[key]} is not {want[key]}"
                     for key in want if got[key] != want[key]]
    by_name = {}
    for (_, name), value in want.items():
        by_name.setdefault(name, set()).add(value)
    if not ONE_PROCESS:
        everybody = [None] * world
        dist.all_gather_object(everybody, by_name)
        for other in everybody:
            for name, values in other.items():
                by_name[name] |= values
    failures += [f"rank {rank}: ranks differ in buffer {name}: {sorted(v)}" for name, v in by_name.items() if len(v) > 1]
    for comm in comms.values():
        must(nccl.ncclCommDestroy(comm), "ncclCommDestroy")
    for line in failures:
        print(line)
    members = len(comms) if ONE_PROCESS else world
    if rank == 0 and not failures:
        print(f"streams: {members} ranks{' in one process' if ONE_PROCESS else ''}, {len(COUNTS)} streams, "
              f"{3 * ROUNDS} racing rounds: the bits of serial calls")
    if not ONE_PROCESS:
        dist.destroy_process_group()
    sys.exit(1 if failures else 0)


main()
