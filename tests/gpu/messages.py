"""What moves data without summing it, compressed because asked for: all-to-all with uneven splits, Send and Recv by themselves,
Gather, Scatter, Broadcast and Reduce of torch.distributed. What arrives is what was sent within the rounding of its block,
bad numbers arrive where they were sent, repeats have the same bits, and the library's scratch is in torch's accounts.

    halfwire run --mode wire --min-bytes 0 --ops sendrecv,alltoall,gather,scatter,broadcast,reduce -n N -- \\
        python3 tests/gpu/messages.py [--share-gpu]
"""

import argparse
import os
import sys

import direct_nccl
from direct_nccl import rank, world

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--share-gpu", action="store_true", help="all ranks use GPU 0")
parser.add_argument("--width", type=int, default=1024, help="elements of a row")
parser.add_argument("--turns", type=int, default=20)
options = parser.parse_args()
if options.share_gpu:
    direct_nccl.share_gpu()
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import halfwire.memory  # noqa: E402

BLOCK = 128
failures = []


def rows(source, to, turn):
    """How many rows `source` sends `to` in this turn; none at times."""
    n = (source * 7919 + to * 104729 + turn * 1299709) % 4099
    return 0 if n % 11 == 0 else n


def content(source, to, turn):
    pick = torch.Generator(device="cuda").manual_seed((turn * world + source) * world + to)
    x = torch.randn(rows(source, to, turn), options.width, generator=pick, device="cuda")
    x *= torch.exp2(torch.randint(-9, 9, (len(x), 1), generator=pick, device="cuda").float())
    if len(x) > 3:
        x[3, 5], x[2, 7] = float("inf"), float("nan")
    return x.bfloat16()


def check(good, what):
    if not good:
        failures.append(f"rank {rank}: {what}")


def rounded(got, sent, what, steps=1.0):
    """e4m3 keeps four bits; the scale of a block is its largest finite magnitude over 448. `steps` roundings."""
    got, sent = got.float().flatten(), sent.float().flatten()
    check(got.numel() == sent.numel(), f"{what}: {got.numel()} elements for {sent.numel()}")
    finite = sent.isfinite()
    check(torch.equal(got.isfinite(), finite), f"{what}: bad numbers in other places")
    pad = -sent.numel() % BLOCK
    largest = torch.nn.functional.pad(torch.where(finite, sent, 0).abs(), (0, pad)).view(-1, BLOCK).amax(1)
    limit = torch.maximum(sent.abs() / 16, largest.repeat_interleave(BLOCK)[:sent.numel()] / 448 / 1024)
    off = ((got - sent).abs()[finite] - 1.01 * steps * (limit + sent.abs() / 256)[finite]).max() if finite.any() else 0
    check(off <= 0, f"{what}: beyond the rounding of its block")
    return int((got != sent)[finite].sum())


def all_to_all(turn):
    sent = [content(rank, to, turn) for to in range(world)]
    came = [content(source, rank, turn) for source in range(world)]
    ins, outs = [len(s) for s in sent], [len(c) for c in came]
    buffer = torch.cat(sent)
    got = torch.zeros(sum(outs), options.width, device="cuda", dtype=torch.bfloat16)
    dist.all_to_all_single(got, buffer, outs, ins)
    again = torch.zeros_like(got)
    dist.all_to_all_single(again, buffer, outs, ins)
    check(torch.equal(got.view(torch.int16), again.view(torch.int16)), f"turn {turn}: a repeat has other bits")
    return sum(rounded(g, c, f"turn {turn}: all-to-all from {s}") for s, (g, c) in enumerate(zip(got.split(outs), came)))


def neighbours(turn):
    """A ring, even ranks send first."""
    to, source = (rank + 1) % world, (rank - 1) % world
    sent, came = content(rank, to, turn), content(source, rank, turn)
    got = torch.zeros_like(came)
    first, second = (dist.isend, dist.irecv) if rank % 2 == 0 else (dist.irecv, dist.isend)
    for call in (first, second):
        part, peer = (sent, to) if call is dist.isend else (got, source)
        if part.numel() > 0:
            call(part, peer).wait()
    return rounded(got, came, f"turn {turn}: from the neighbour")


def rooted(turn):
    root, changed = turn % world, 0
    mine = content(rank, rank, 4096)[:1000]
    parts = [content(r, r, 4096)[:1000] for r in range(world)]
    least = min(len(p) for p in parts)
    mine, parts = mine[:least].contiguous(), [p[:least].contiguous() for p in parts]
    got = [torch.zeros_like(mine) for _ in range(world)] if rank == root else None
    dist.gather(mine, got, dst=root)
    if rank == root:
        changed += sum(rounded(g, p, f"turn {turn}: gathered from {r}") for r, (g, p) in enumerate(zip(got, parts))
                       if r != rank)
    one = torch.zeros_like(mine)
    dist.scatter(one, parts if rank == root else None, src=root)
    if rank != root:
        changed += rounded(one, parts[rank], f"turn {turn}: scattered")
    every = parts[root].clone()
    dist.broadcast(every, src=root)
    if rank != root:
        changed += rounded(every, parts[root], f"turn {turn}: broadcast")
    finite = torch.randn(1_000_003, device="cuda", generator=torch.Generator(device="cuda").manual_seed(5)).bfloat16()
    total = finite.clone()
    dist.reduce(total, dst=root)
    if rank == root:
        error = (total.float() - world * finite.float()).norm() / (world * finite.float()).norm()
        check(1e-4 < error < 0.05, f"turn {turn}: error of the reduced sum {error:.2e}")
    return changed


torch.cuda.set_device(0 if options.share_gpu else rank)
torch.zeros(1, device="cuda")
lent = halfwire.memory.use_torch()
before = torch.cuda.memory_allocated()
dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
dist.barrier()
taken = torch.cuda.memory_allocated() - before
check(lent and taken > 1 << 20, f"torch accounts for {taken} bytes of scratch")
changed = {"all_to_all": 0, "neighbours": 0, "rooted": 0}
for turn in range(options.turns):
    for call in (all_to_all, neighbours, rooted):
        changed[call.__name__] += call(turn)
torch.cuda.synchronize()
for name, count in changed.items():
    check(count > 0, f"{name}: not compressed, every element came as it was sent")
everyone = [None] * world
dist.all_gather_object(everyone, failures)
flat = [f for per_rank in everyone for f in per_rank]
dist.destroy_process_group()
if rank == 0:
    for f in flat[:20]:
        print("FAILED", f)
    print(f"messages on {world} ranks, {options.turns} turns: {'within the rounding' if not flat else f'{len(flat)} failures'}; "
          f"elements changed by it {changed}; torch accounts for {taken >> 10} KiB of scratch")
sys.exit(1 if flat else 0)
