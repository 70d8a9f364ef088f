"""Device memory: what the report says a communicator took, scratch and connections, is all that is ever taken. One group of
129 AllReduces, 999.8 MB of bf16 together, and one message of 4 GiB, sampled every millisecond.

    halfwire run --mode wire --min-bytes 0 --log DIR -n N -- python3 tests/gpu/memory.py run --out DIR [--share-gpu]
    python3 tests/gpu/memory.py compare --out DIR

DIR is a fresh folder, made before. `compare` needs no GPU; it fails where the peak during the calls exceeds what was taken
before the first of them by more than 4 MiB a rank, or where the report names more than was taken. What was taken contains
NCCL's own memory, which the report does not name.
"""

import argparse
import glob
import json
import os
import sys
import threading
import time

import direct_nccl
from direct_nccl import rank, world

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("what", choices=["run", "compare"])
parser.add_argument("--out", required=True, metavar="DIR")
parser.add_argument("--share-gpu", action="store_true", help="all ranks use GPU 0")
options = parser.parse_args()
CALLS, TOTAL, LARGE = 129, 999_800_000, 4 << 30


def sizes():
    """Elements of each call: from small to large, as the tensors of a model are, without order."""
    weights = [1 + (i * 7919) % 1009 for i in range(CALLS)]
    counts = [TOTAL // 2 * w // sum(weights) for w in weights]
    counts[0] += TOTAL // 2 - sum(counts)
    return counts


def compare():
    failures, ranks = [], sorted(glob.glob(os.path.join(options.out, "memory-*.txt")))
    if not ranks:
        sys.exit(f"{options.out} holds no memory-*.txt: run first")
    sharing = json.load(open(ranks[0]))["sharing"]
    said = []
    for path in glob.glob(os.path.join(options.out, "rank*.json")):
        with open(path) as f:
            log = json.load(f)
        said.append(sum(c["scratch_bytes"] + c["connection_bytes"] for c in log["communicators"] if c["compressed"]))
    mib = 1 << 20
    for path in ranks:
        with open(path) as f:
            m = json.load(f)
        # On a shared GPU every rank sees what all take, and each reports what connecting took of all.
        report = sum(said) / len(said) if sharing == 1 else None
        print(f"rank {m['rank']}: before the first call {m['made'] / mib:.1f} MiB, at most {m['group'] / mib:.1f} in the group, "
              f"{m['large'] / mib:.1f} in 4 GiB" + (f"; the report says {report / mib:.1f}" if report is not None else ""))
        for name in ("group", "large"):
            if m[name] - m["made"] > 4 * mib * sharing:
                failures.append(f"rank {m['rank']}: {name} took {(m[name] - m['made']) / mib:.1f} MiB more")
        if report is not None and report > m["made"] + 4 * mib:
            failures.append(f"rank {m['rank']}: taken {m['made'] / mib:.1f} MiB, reported {report / mib:.1f}")
    if sharing > 1:
        print(f"{sharing} ranks share the GPU: figures are of all together; reported scratch and connections: "
              f"{', '.join(f'{s / mib:.1f}' for s in said)} MiB")
    for failure in failures:
        print("FAILED:", failure)
    sys.exit(1 if failures else 0)


def run():
    if options.share_gpu:
        direct_nccl.share_gpu()
    import torch
    import torch.distributed as dist
    direct_nccl.meet(options.share_gpu)
    nccl = direct_nccl.load()
    tensors = [torch.ones(count, device="cuda", dtype=torch.bfloat16) for count in sizes()]
    large = torch.ones(LARGE // 2, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.current_stream().cuda_stream

    def together():
        torch.cuda.synchronize()
        dist.barrier()

    def used():
        free, total = torch.cuda.mem_get_info()
        return total - free

    class Peak:
        def __enter__(self):
            self.most, self.on = used(), True
            self.thread = threading.Thread(target=self.look)
            self.thread.start()
            return self

        def look(self):
            while self.on:
                self.most = max(self.most, used())
                time.sleep(0.001)

        def __exit__(self, *_):
            self.on = False
            self.thread.join()

    unique = direct_nccl.exchange_id(nccl)
    together()
    before = used()
    comm = direct_nccl.communicator(nccl, unique)
    together()
    result = {"rank": rank, "sharing": world if options.share_gpu else 1, "made": used() - before}
    together()

    def reduce(tensor):
        assert nccl.ncclAllReduce(tensor.data_ptr(), tensor.data_ptr(), tensor.numel(), 9, 0, comm, stream) == 0

    with Peak() as peak:
        for _ in range(3):
            assert nccl.ncclGroupStart() == 0
            for tensor in tensors:
                reduce(tensor)
            assert nccl.ncclGroupEnd() == 0
            together()
        result["group"] = peak.most - before
    together()
    with Peak() as peak:
        reduce(large)
        together()
        result["large"] = peak.most - before
    assert float(large[-1]) == world and float(tensors[-1][-1]) == world**3
    with open(os.path.join(options.out, f"memory-{rank}.txt"), "w") as f:
        json.dump(result, f)
    nccl.ncclCommDestroy(comm)
    dist.barrier()
    dist.destroy_process_group()


compare() if options.what == "compare" else run()
