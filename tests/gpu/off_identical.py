"""Off is off: every operation, type, operator and size under `halfwire run --mode off` gives the bits of plain NCCL.

    examples/pytorch/shared_gpu.sh python3 -m torch.distributed.run --nproc-per-node 4 \\
        tests/gpu/off_identical.py run --out DIR/plain --share-gpu
    examples/pytorch/shared_gpu.sh halfwire run --mode off -n 4 -- \\
        python3 tests/gpu/off_identical.py run --out DIR/off --share-gpu
    python3 tests/gpu/off_identical.py compare --out DIR

NCCL is called directly: torch.distributed passes on only some of its operations and types.
"""

import argparse
import ctypes
import glob
import json
import os
import sys

import direct_nccl
from direct_nccl import rank, world

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("what", choices=["run", "compare"])
parser.add_argument("--out", required=True, metavar="DIR")
parser.add_argument("--share-gpu", action="store_true", help="all ranks use GPU 0")
options = parser.parse_args()

# Of the largest buffer of a rank; ragged ones between the powers.
SIZES = [8, 64, 520, 4096, 33000, 262144, 2 << 20, (16 << 20) + 1000, 64 << 20]
FUNCTIONS = ["AllReduce", "ReduceScatter", "Reduce", "AllGather", "Broadcast", "Bcast", "AlltoAll", "Gather", "Scatter", "Send",
             "Recv"]
OPERATORS = ["sum", "prod", "max", "min", "avg", "premulsum"]


def compare():
    files = {k: sorted(glob.glob(os.path.join(options.out, k, "hashes-*.json"))) for k in ("plain", "off")}
    if not files["plain"] or len(files["plain"]) != len(files["off"]):
        sys.exit(f"{options.out}: both runs must have written a file a rank; found {files}")
    cases, different, preloaded = 0, [], []
    for plain, off in zip(files["plain"], files["off"]):
        with open(plain) as f, open(off) as g:
            a, b = json.load(f), json.load(g)
        preloaded.append((a["library"], b["library"]))
        if set(a["hashes"]) != set(b["hashes"]):
            sys.exit("the runs made different calls")
        cases += len(a["hashes"])
        different += [case for case, value in a["hashes"].items() if b["hashes"][case] != value]
    if any(a or not b for a, b in preloaded):
        sys.exit(f"libhalfwire.so must be absent from the first run and present in the second: {preloaded}")
    print(f"{cases} results on {len(preloaded)} ranks, {len(different)} differ from plain NCCL")
    for case in different[:20]:
        print("FAILED:", case)
    sys.exit(1 if different else 0)


def run():
    if options.share_gpu:
        direct_nccl.share_gpu()
    import torch
    import torch.distributed as dist
    direct_nccl.meet(options.share_gpu)
    nccl = direct_nccl.load()
    # torch's types of the same bytes.
    types = {"int8": torch.int8, "uint8": torch.uint8, "int32": torch.int32, "uint32": torch.int32, "int64": torch.int64,
             "uint64": torch.int64, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64,
             "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    comm = direct_nccl.communicator(nccl, direct_nccl.exchange_id(nccl))
    call = {name: getattr(nccl, "nccl" + name) for name in FUNCTIONS if hasattr(nccl, "nccl" + name)}

    pick = torch.Generator(device="cuda").manual_seed(7 + rank)
    largest = SIZES[-1]
    floats = torch.randn(largest, generator=pick, device="cuda")
    ints = torch.randint(-100, 100, (largest,), generator=pick, device="cuda", dtype=torch.int8)
    odd = torch.arange(largest // 8, device="cuda") * 2 + 0x5851F42D4C957F2D
    hashes, stream = {}, torch.cuda.current_stream().cuda_stream

    def bits(tensor):
        """Wraps around in int64: the same whatever order the GPU adds in."""
        data = tensor.view(torch.uint8)
        whole = data[:data.numel() // 8 * 8].view(torch.int64)
        rest = data[data.numel() // 8 * 8:].cpu().tolist()
        return [int((whole * odd[:whole.numel()]).sum()), rest]

    def check(result, case):
        if result != 0:
            sys.exit(f"rank {rank}: {case} failed with {result}")

    for type_name, kind in types.items():
        number = direct_nccl.TYPES[type_name]
        size_of = torch.empty(0, dtype=kind).element_size()
        full = (floats[:largest // size_of].to(kind) if kind.is_floating_point else ints[:largest // size_of].to(kind))
        for size in SIZES:
            whole = max(world, size // size_of)
            part = max(1, whole // world)
            source = full[:part * world]
            for op in call:
                if op in ("Bcast", "Recv"):
                    continue
                operators = OPERATORS if op in ("AllReduce", "ReduceScatter", "Reduce") else [""]
                for operator in operators:
                    case = f"{op} {type_name} {operator} {size}"
                    out = torch.zeros_like(source)
                    s, o, root, count = source.data_ptr(), out.data_ptr(), 1 % world, part * world
                    redop = ctypes.c_int(OPERATORS.index(operator) if operator else 0)
                    if operator == "premulsum":
                        scalar = torch.tensor([3.0 if not kind.is_floating_point else 0.5]).to(kind)
                        check(nccl.ncclRedOpCreatePreMulSum(ctypes.byref(redop), scalar.data_ptr(), number, 1, comm), case)
                    if op == "AllReduce":
                        check(call[op](s, o, count, number, redop, comm, stream), case)
                    elif op == "ReduceScatter":
                        check(call[op](s, o, part, number, redop, comm, stream), case)
                    elif op == "Reduce":
                        check(call[op](s, o, count, number, redop, root, comm, stream), case)
                    elif op in ("AllGather", "AlltoAll"):
                        check(call[op](s, o, part, number, comm, stream), case)
                    elif op == "Broadcast":
                        check(call[op](s, o, count, number, root, comm, stream), case)
                        if size == SIZES[4]:
                            check(call["Bcast"](o, count, number, root, comm, stream), case)
                    elif op in ("Gather", "Scatter"):
                        check(call[op](s, o, part, number, root, comm, stream), case)
                    elif op == "Send":
                        check(nccl.ncclGroupStart(), case)
                        check(call["Send"](s, count, number, (rank + 1) % world, comm, stream), case)
                        check(call["Recv"](o, count, number, (rank - 1) % world, comm, stream), case)
                        check(nccl.ncclGroupEnd(), case)
                    if operator == "premulsum":
                        check(nccl.ncclRedOpDestroy(redop, comm), case)
                    hashes[case] = bits(out)
    torch.cuda.synchronize()
    library = hasattr(nccl, "halfwire_version")
    os.makedirs(options.out, exist_ok=True)
    with open(os.path.join(options.out, f"hashes-{rank}.json"), "w") as f:
        json.dump({"library": library, "hashes": hashes}, f)
    nccl.ncclCommDestroy(comm)
    if rank == 0:
        print(f"{len(hashes)} results, {len(call)} functions of NCCL, {world} ranks")
    dist.destroy_process_group()


run() if options.what == "run" else compare()
