"""Bad numbers through torch.distributed: an element that is not finite on any rank comes out not finite on every rank and
only such elements do, a sum that overflows its type comes out not finite, a finite result stays finite, and a GradScaler
skips exactly the step it must skip. Run under `halfwire run --mode wire --min-bytes 0 -n N -- python3 bad_numbers.py`.
"""

import hashlib
import os
import sys

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if "--share-gpu" in sys.argv:
    for name, value in {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
                        "NCCL_MAX_CTAS": "4"}.items():
        os.environ.setdefault(name, value)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

COUNT = 100_000
failures = []


def check(ok, what):
    if not ok:
        failures.append(f"rank {rank}: {what}")


def same_on_all_ranks(t):
    mine = hashlib.sha256(t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    hashes = [None] * world
    dist.all_gather_object(hashes, mine)
    return len(set(hashes)) == 1


def reduced(fill, dtype, op=dist.ReduceOp.SUM):
    generator = torch.Generator().manual_seed(rank)
    t = torch.randn(COUNT, generator=generator).to(dtype)
    fill(t)
    t = t.cuda()
    dist.all_reduce(t, op=op)
    return t.cpu()


def set_at(index, value, on):
    def fill(t):
        if rank == on:
            t[index] = value
    return fill


def law3(dtype):
    info = torch.finfo(dtype)
    last = world - 1
    for name, value in {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}.items():
        for index in (0, 777, COUNT - 1):
            out = reduced(set_at(index, value, last), dtype)
            bad = (~torch.isfinite(out)).nonzero().flatten().tolist()
            check(bad == [index], f"{dtype} {name} at {index} on rank {last}: not finite at {bad[:5]}")
            check(same_on_all_ranks(out), f"{dtype} {name}: ranks differ")

    def largest(t):
        t[:] = 0
        if rank == 0:
            t[5] = info.max
    out = reduced(largest, dtype)
    check(bool(torch.isfinite(out).all()) and float(out[5]) > 0.9 * info.max, f"{dtype} maximum became {float(out[5])}")

    def too_large(t):
        t[9] = info.max * 0.9
    out = reduced(too_large, dtype)
    bad = (~torch.isfinite(out)).nonzero().flatten().tolist()
    check(bad == [9], f"{dtype} overflow of the sum: not finite at {bad[:5]}")
    out = reduced(too_large, dtype, dist.ReduceOp.AVG)
    check(bool(torch.isfinite(out).all()), f"{dtype} average of large values is not finite")

    def tiny(t):
        t[:] = info.smallest_normal / 4
    out = reduced(tiny, dtype)
    check(bool(torch.isfinite(out).all()) and float(out.abs().max()) < 1e-3, f"{dtype} denormals became {float(out.abs().max())}")


def grad_scaler():
    """One good step, one whose gradient overflows on one rank: all ranks must skip it."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(COUNT, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for bad in (False, True, False):
        before = weight.detach().clone()
        scale = scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale((weight * 1e-3).sum()).backward()
        half = weight.grad.to(torch.float16)
        if bad and rank == world - 1:
            half[123] = float("inf")
        dist.all_reduce(half)
        weight.grad.copy_(half.float() / world)
        scaler.step(optimizer)
        scaler.update()
        skipped = bool(torch.equal(before, weight.detach()))
        check(skipped == bad, f"GradScaler {'did not skip a bad' if bad else 'skipped a good'} step")
        check((scaler.get_scale() < scale) == bad, "GradScaler's scale")
    check(same_on_all_ranks(weight), "weights differ after GradScaler steps")


torch.cuda.set_device(0 if "--share-gpu" in sys.argv else int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    law3(dtype)
grad_scaler()
everyone = [None] * world
dist.all_gather_object(everyone, failures)
flat = [f for per_rank in everyone for f in per_rank]
if rank == 0:
    for f in flat:
        print("FAILED", f)
    print(f"bad numbers on {world} ranks: {'all as they must be' if not flat else f'{len(flat)} failures'}", flush=True)
dist.destroy_process_group()
sys.exit(1 if flat else 0)
