"""The shadow on GPUs against what it stands for: results are those of a run without the library, its errors those of the
wire, and the time it measures of compressed runs the one that the wire then takes.

    for turn in 1 2 3; do for mode in off shadow wire; do
        examples/pytorch/shared_gpu.sh halfwire run --mode $mode --shadow-every 3 --min-bytes 1MiB --log DIR/$turn/$mode \\
            -n 4 -- python3 tests/gpu/shadow.py run --out DIR/$turn/$mode --share-gpu
    done; done
    python3 tests/gpu/shadow.py compare --out DIR/*

The folders are fresh ones, made before. `compare` needs no GPU; it fails where results differ by a bit, the predicted time
is more than 20 % off the measured one (medians, and of several turns their median), or the error more than 1 dB off the
true one.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import sys

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("what", choices=["run", "compare"])
parser.add_argument("--out", required=True, metavar="DIR", nargs="+")
parser.add_argument("--share-gpu", action="store_true", help="all ranks use GPU 0")
parser.add_argument("--calls", type=int, default=60, help="of each size")
parser.add_argument("--mib", default="4,16,48", help="sizes in MiB of bf16")
options = parser.parse_args()
SIZES = [int(s) << 20 for s in options.mib.split(",")]


def run():
    rank = int(os.environ["RANK"])
    if options.share_gpu:
        # NCCL refuses two ranks on one GPU of one host; ranks that name different hosts talk through sockets.
        for name, value in {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
                            "NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2", "NCCL_MAX_CTAS": "4"}.items():
            os.environ.setdefault(name, value)
    import torch
    import torch.distributed as dist
    torch.cuda.set_device(0 if options.share_gpu else int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl")
    digest, report, snr = hashlib.sha256(), {}, {}
    for size in SIZES:
        pick = torch.Generator(device="cuda").manual_seed(1000 * rank + 1)
        # What gradients look like: most of them small, some blocks much larger than others.
        values = torch.randn(size // 2, generator=pick, device="cuda")
        values *= torch.exp(2 * torch.randn(size // 256, generator=pick, device="cuda")).repeat_interleave(128)
        source, data, times = values.bfloat16(), torch.empty(size // 2, device="cuda", dtype=torch.bfloat16), []
        for _ in range(options.calls):
            data.copy_(source)
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            dist.all_reduce(data)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
            torch.cuda.synchronize()  # the shadow runs behind the call
        digest.update(data.cpu().view(torch.uint8).numpy().tobytes())
        report[str(size)] = statistics.median(times)
        if rank == 0:
            torch.save(data.cpu(), os.path.join(options.out, f"result-{size}.pt"))
            exact = torch.load(os.path.join(options.out, "..", "off", f"result-{size}.pt")).double()
            noise = float((data.cpu().double() - exact).square().sum())
            snr[str(size)] = 10 * math.log10(float(exact.square().sum()) / noise) if noise else None
    with open(os.path.join(options.out, f"times-{rank}.txt"), "w") as f:
        json.dump({"ms": report, "hash": digest.hexdigest(), "snr_db": snr}, f)
    dist.barrier()
    dist.destroy_process_group()


def ranks_of(folder):
    out, rank = [], 0
    while os.path.exists(path := os.path.join(folder, f"times-{rank}.txt")):
        with open(path) as f:
            out.append(json.load(f))
        rank += 1
    if not out:
        sys.exit(f"{folder} holds no times-0.txt: run the three modes first")
    return out


def predictions(folder, ranks):
    """Of each size, ms of the slowest rank and the error in dB."""
    predicted, decibels = {}, {}
    for rank in range(ranks):
        with open(os.path.join(folder, f"rank{rank}.json")) as f:
            log = json.load(f)
        for comm in log["communicators"]:
            for s in comm["shadow"]:
                size = str(s["bytes"])
                predicted[size] = max(predicted.get(size, 0), s["compressed_us"] / 1e3)
                decibels.setdefault(size, s["snr_db"])
    return predicted, decibels


def compare():
    failures, turns = [], []
    for folder in options.out:
        off, shadow, wire = (ranks_of(os.path.join(folder, mode)) for mode in ("off", "shadow", "wire"))
        if {r["hash"] for r in shadow} != {off[0]["hash"]} or len({r["hash"] for r in off}) != 1:
            failures.append(f"{folder}: results of the shadow's run differ from those of a plain run")
        if len({r["hash"] for r in wire}) != 1 or wire[0]["hash"] == off[0]["hash"]:
            failures.append(f"{folder}: the wire's results are not its own, or not those of all ranks")
        turns.append((off, wire, *predictions(os.path.join(folder, "shadow"), len(shadow))))
    print("MiB  exact ms  wire ms  predicted ms   ratios of each turn; their median   SNR dB of the wire, of the shadow")
    for size in map(str, SIZES):
        if not all(size in predicted for _, _, predicted, _ in turns):
            failures.append(f"{int(size) >> 20} MiB: not sampled")
            continue
        exact, took, said = [], [], []
        for off, wire, predicted, _ in turns:
            exact.append(max(r["ms"][size] for r in off))
            took.append(max(r["ms"][size] for r in wire))
            said.append(predicted[size])
        ratios = [s / t for s, t in zip(said, took)]
        ratio = statistics.median(ratios)
        true_snr, shadow_snr = turns[0][1][0]["snr_db"][size], turns[0][3][size]
        print(f"{int(size) >> 20:3d}  {statistics.median(exact):8.3f}  {statistics.median(took):7.3f}  "
              f"{statistics.median(said):12.3f}   {' '.join(f'{r:.3f}' for r in ratios)}; {ratio:.3f}   "
              f"{true_snr:.2f}, {shadow_snr:.2f}")
        if abs(ratio - 1) > 0.2:
            failures.append(f"{int(size) >> 20} MiB: predicted over measured is {ratio:.3f}")
        if abs(true_snr - shadow_snr) > 1:
            failures.append(f"{int(size) >> 20} MiB: {shadow_snr:.2f} dB in the shadow, {true_snr:.2f} in truth")
    for failure in failures:
        print("FAILED:", failure)
    sys.exit(1 if failures else 0)


if options.what == "run":
    options.out = options.out[0]
    run()
else:
    compare()
