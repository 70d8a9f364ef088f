"""A group of many small calls over the wire: 200 AllReduces of 64 KiB in one group, against the same 200 each by itself, and
against both without compression. NCCL is called directly.

    for mode in off wire; do
        halfwire run --mode $mode --min-bytes 0 -n N -- python3 tests/gpu/groups.py [--share-gpu] --json DIR/$mode.json
    done
    python3 tests/gpu/groups.py --compare DIR/off.json DIR/wire.json

Within a run grouped and ungrouped alternate; times are medians, in ms, of the slowest rank.
"""

import argparse
import json
import statistics
import sys
import time

import direct_nccl
from direct_nccl import rank

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--share-gpu", action="store_true", help="all ranks use GPU 0")
parser.add_argument("--calls", type=int, default=200)
parser.add_argument("--kib", type=int, default=64, help="of bf16 in each call")
parser.add_argument("--repeat", type=int, default=15)
parser.add_argument("--json", metavar="FILE")
parser.add_argument("--compare", nargs=2, metavar=("OFF", "WIRE"))
options = parser.parse_args()

if options.compare:
    off, wire = (json.load(open(path)) for path in options.compare)
    for kind in ("grouped", "ungrouped"):
        print(f"{kind:9s}  exact {statistics.median(off[kind]):8.2f} ms  wire {statistics.median(wire[kind]):8.2f} ms  "
              f"exact over wire {statistics.median(off[kind]) / statistics.median(wire[kind]):.2f}")
    for name, run in (("exact", off), ("wire", wire)):
        ratios = sorted(u / g for u, g in zip(run["ungrouped"], run["grouped"]))
        print(f"{name}: ungrouped over grouped {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    sys.exit()

if options.share_gpu:
    direct_nccl.share_gpu()

import torch  # noqa: E402  (brings NCCL into the process)
import torch.distributed as dist  # noqa: E402

nccl = direct_nccl.load()
BF16, SUM = direct_nccl.TYPES["bf16"], direct_nccl.OPERATORS["sum"]
direct_nccl.meet(options.share_gpu)
count = options.kib * 512
data = torch.ones(options.calls, count, device="cuda", dtype=torch.bfloat16)
comm = direct_nccl.communicator(nccl, direct_nccl.exchange_id(nccl))
stream = torch.cuda.current_stream().cuda_stream


def calls(grouped):
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    failed = nccl.ncclGroupStart() if grouped else 0
    for row in data:
        failed = failed or nccl.ncclAllReduce(row.data_ptr(), row.data_ptr(), count, BF16, SUM, comm, stream)
    failed = (nccl.ncclGroupEnd() if grouped else 0) or failed
    torch.cuda.synchronize()
    if failed:
        sys.exit(f"rank {rank}: NCCL failed with {failed}")
    took = torch.tensor([(time.perf_counter() - begin) * 1e3])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


times = {"grouped": [], "ungrouped": []}
for turn in range(options.repeat + 2):
    data.fill_(1.0)
    for kind in times:
        times[kind].append(calls(kind == "grouped"))
times = {kind: values[2:] for kind, values in times.items()}
if rank == 0:
    print({kind: round(statistics.median(values), 2) for kind, values in times.items()})
    if options.json:
        with open(options.json, "w") as f:
            json.dump(times, f)
nccl.ncclCommDestroy(comm)
dist.destroy_process_group()
