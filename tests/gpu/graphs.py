"""Collectives captured into CUDA graphs: replays with changing inputs give the bits of the same calls made eagerly, also
where graphs and eager calls on other streams follow each other without the host waiting. NCCL is called directly.

    halfwire run --mode wire --min-bytes 0 --ops allreduce,reducescatter,alltoall-fp32 -n N -- \\
        python3 tests/gpu/graphs.py [--share-gpu] [--replays 1000]
"""

import argparse
import sys

import direct_nccl
from direct_nccl import must, rank, world

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--share-gpu", action="store_true", help="all ranks use GPU 0")
parser.add_argument("--replays", type=int, default=1000)
options = parser.parse_args()
if options.share_gpu:
    direct_nccl.share_gpu()

import torch  # noqa: E402  (brings NCCL into the process)
import torch.distributed as dist  # noqa: E402

nccl = direct_nccl.load()
FP32, SUM = direct_nccl.TYPES["fp32"], direct_nccl.OPERATORS["sum"]


class Calls:
    """What a training step might send: one call by itself, three in a group, of which one moves data."""

    def __init__(self, comm):
        self.comm = comm
        self.a, self.b = (torch.empty(30_001 * world, device="cuda") for _ in range(2))
        self.part, self.out = torch.empty(30_001, device="cuda"), torch.empty(30_001 * world, device="cuda")

    def run(self):
        stream = torch.cuda.current_stream().cuda_stream
        a, b, part, out = (t.data_ptr() for t in (self.a, self.b, self.part, self.out))
        count = self.a.numel()
        must(nccl.ncclAllReduce(a, a, count, FP32, SUM, self.comm, stream), "ncclAllReduce")
        must(nccl.ncclGroupStart(), "ncclGroupStart")
        must(nccl.ncclReduceScatter(a, part, count // world, FP32, SUM, self.comm, stream), "ncclReduceScatter")
        must(nccl.ncclAllReduce(b, b, count, FP32, SUM, self.comm, stream), "ncclAllReduce")
        must(nccl.ncclAlltoAll(b, out, count // world, FP32, self.comm, stream), "ncclAlltoAll")
        must(nccl.ncclGroupEnd(), "ncclGroupEnd")

    def fill(self, source, turn):
        torch.mul(source[0], 1.0 + turn % 17, out=self.a)
        torch.mul(source[1], 3.0 - turn % 5, out=self.b)

    def results(self):
        return self.a, self.b, self.part, self.out


def main():
    direct_nccl.meet(options.share_gpu)
    comm = direct_nccl.communicator(nccl, direct_nccl.exchange_id(nccl))
    pick = torch.Generator(device="cuda").manual_seed(rank)
    source = [torch.randn(30_001 * world, generator=pick, device="cuda") for _ in range(2)]
    eager, captured, other = Calls(comm), Calls(comm), Calls(comm)
    graphs = []
    for calls in (captured, other):
        calls.fill(source, 0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            calls.run()
        graphs.append(graph)
    torch.cuda.synchronize()
    dist.barrier()
    # Three streams in turns, nothing but the library between them orders the scratch.
    streams = [torch.cuda.Stream() for _ in range(3)]
    different = torch.zeros((), device="cuda", dtype=torch.int64)
    keep = [[torch.empty_like(t) for t in eager.results()] for _ in range(3)]
    for turn in range(options.replays):
        first, second, third = (streams[(turn + k) % 3] for k in range(3))
        with torch.cuda.stream(first):
            captured.fill(source, turn)
            graphs[0].replay()
        with torch.cuda.stream(second):
            other.fill(source, turn + 1)
            graphs[1].replay()
        with torch.cuda.stream(third):
            eager.fill(source, turn)
            eager.run()
        torch.cuda.current_stream().wait_stream(first)
        torch.cuda.current_stream().wait_stream(second)
        torch.cuda.current_stream().wait_stream(third)
        for x, y in zip(captured.results(), eager.results()):
            different += (x.view(torch.int32) != y.view(torch.int32)).sum()
        # The other graph ran with the inputs of the next turn: what the first will give then.
        if turn > 0:
            for x, y in zip(keep[(turn - 1) % 3], captured.results()):
                different += (x.view(torch.int32) != y.view(torch.int32)).sum()
        for x, y in zip(keep[turn % 3], other.results()):
            x.copy_(y)
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    wrong = int(different)
    box = [None] * world
    dist.all_gather_object(box, (wrong, eager.a.view(torch.int32).sum(dtype=torch.int64).item()))
    if rank == 0:
        print(f"graphs: {options.replays} replays of two graphs beside eager calls on {world} ranks, "
              f"{sum(w for w, _ in box)} elements differ, replicas {'identical' if len({h for _, h in box}) == 1 else 'DIFFER'}")
    del graphs, graph  # NCCL keeps a communicator until no graph needs it
    must(nccl.ncclCommDestroy(comm), "ncclCommDestroy")
    dist.destroy_process_group()
    sys.exit(1 if any(w for w, _ in box) or len({h for _, h in box}) != 1 else 0)


main()
