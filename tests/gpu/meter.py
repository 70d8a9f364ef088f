"""The exposure meter against a profiler: DDP and FSDP2 on GPUs, the metered stall of steps beside what `halfwire analyze`
finds stalled in a trace of the same steps, and what a sampled step costs.

    examples/pytorch/shared_gpu.sh halfwire run --mode meter --meter-every 1 --log A -n 4 -- \\
        python3 tests/gpu/meter.py ddp --out A --share-gpu --steps 40
    examples/pytorch/shared_gpu.sh halfwire run --mode meter --meter-every 2 --log B -n 4 -- \\
        python3 tests/gpu/meter.py ddp --out B --share-gpu --profiled 0
    python3 tests/gpu/meter.py compare --out A --halfwire build/release/bin/halfwire
    python3 tests/gpu/meter.py compare --out B

A and B are fresh folders; ddp or fsdp2. The first run meters every step and profiles the last ones, one trace a rank; the
second alternates sampled steps with others. `compare` needs no GPU: it prints the figures and fails where they do not
hold, metered within 10 % or 0.5 ms a step of the trace's stalled time over the same steps, and a sampled step at most 2 %
longer than the others over at least 400 steps.
"""

import argparse
import ctypes
import glob
import json
import os
import statistics
import subprocess
import sys
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("what", choices=["ddp", "fsdp2", "compare"])
parser.add_argument("--out", required=True, metavar="DIR", help="traces, and where --log put the run logs")
parser.add_argument("--share-gpu", action="store_true", help="all ranks use GPU 0")
parser.add_argument("--steps", type=int, default=440)
parser.add_argument("--profiled", type=int, default=16, help="steps in the trace, behind all others")
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--context", type=int, default=512)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--bucket-mb", type=int, default=25)
parser.add_argument("--within", type=float, default=10, help="for compare: per cent")
parser.add_argument("--unknown", type=float, default=2,
                    help="for compare: leave out steps whose unnamed waits could add more, in per cent")
parser.add_argument("--halfwire", default="halfwire", help="for compare: the command")
options = parser.parse_args()


def halfwire_step():
    """The library's function where it is preloaded, else nothing."""
    try:
        function = ctypes.CDLL(None).halfwire_step
    except AttributeError:
        return lambda: None
    function.restype = None
    return function


def train():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sys.argv = ["gpt.py"] + (["--share-gpu"] if options.share_gpu else [])
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, os.path.join(here, "..", "..", "examples", "pytorch"))
    import gpt  # sets NCCL's variables for ranks that share a GPU before NCCL reads them
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    torch.cuda.set_device(0 if options.share_gpu else int(os.environ.get("LOCAL_RANK", "0")))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl")
    torch.manual_seed(1)
    model = gpt.GPT(options.width, options.layers, options.context).to(device)
    if options.what == "ddp":
        from torch.nn.parallel import DistributedDataParallel
        model = DistributedDataParallel(model, device_ids=[device.index], bucket_cap_mb=options.bucket_mb,
                                        gradient_as_bucket_view=True)
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    pick = torch.Generator(device=device).manual_seed(1000 + rank)
    step = halfwire_step()
    times = []

    def one():
        start = time.perf_counter()
        step()
        rows = torch.randint(0, 256, (options.batch, options.context + 1), generator=pick, device=device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)

    for _ in range(options.steps):
        one()
    os.makedirs(options.out, exist_ok=True)
    if options.profiled > 0:
        # Without these events a trace does not say which stream waited for what.
        synchronisation = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, experimental_config=synchronisation) as profile:
            for _ in range(options.profiled):
                with torch.profiler.record_function(f"ProfilerStep#{len(times)}"):
                    one()
        profile.export_chrome_trace(os.path.join(options.out, f"trace-{rank}.json"))
    for _ in range(2):  # the meter reads a step's events when a later one begins
        one()
    step()
    with open(os.path.join(options.out, f"times-{rank}.txt"), "w") as f:
        json.dump({"first_profiled": options.steps, "profiled": options.profiled, "step_ms": times, "model": options.what,
                   "torch": torch.__version__}, f)
    dist.barrier()
    dist.destroy_process_group()


def accuracy(rank, times, log, failures):
    """Metered and traced time of the same steps, in ms a step."""
    trace = os.path.join(options.out, f"trace-{rank}.json")
    if not os.path.exists(trace):
        return
    analyzed = json.loads(subprocess.run([options.halfwire, "analyze", "--json", trace], check=True,
                                         capture_output=True, text=True).stdout)
    file = analyzed["files"][0]
    count = times["profiled"]
    # The library counts steps from the first one that began with it at work; the last two belong to no profile.
    last = max(s["number"] for s in log["meter"]["steps"])
    steps = {s["number"] + len(times["step_ms"]) - 1 - last: s for s in log["meter"]["steps"]}
    wanted = range(times["first_profiled"], times["first_profiled"] + count)
    traced = {s["number"]: s for s in file["steps"]}
    whole = [n for n in wanted if steps.get(n, {}).get("exposed_ns") is not None and not steps[n]["unmeasured"]]
    if len(whole) < count / 2:
        failures.append(f"rank {rank}: {len(whole)} of {count} steps were metered whole (use --meter-every 1)")
        return
    known = [n for n in whole if n in traced and traced[n]["stalled_us"] is not None
             and traced[n]["stalled_at_most_us"] <= (1 + options.unknown / 100) * traced[n]["stalled_us"]]
    if len(known) < min(count, 4):
        failures.append(f"rank {rank}: the trace says what was waited for in {len(known)} of {count} steps")
        return
    metered = [steps[n]["exposed_ns"] / 1e6 for n in known]
    stalled = [traced[n]["stalled_us"] / 1e3 for n in known]
    blocked = statistics.fmean(steps[n]["host_blocked_ns"] / 1e6 for n in known)
    parts = [statistics.fmean(traced[n][key] / 1e3 for n in known) for key in ("exposed_comm_us", "compute_us", "comm_us", "span_us")]
    print(f"{rank:4d}  {len(known):5d}  {statistics.fmean(metered):8.3f}  {statistics.fmean(stalled):8.3f}  "
          f"{'  '.join(f'{p:8.3f}' for p in parts)}  {blocked:8.3f}")
    ratios = [m / s for m, s in zip(metered, stalled) if s]
    print(f"      by step, metered over stalled: {' '.join(f'{r:.3f}' for r in ratios)}")
    off = abs(statistics.fmean(metered) - statistics.fmean(stalled))
    if off > max(options.within / 100 * statistics.fmean(stalled), 0.5):
        failures.append(f"rank {rank}: metered {statistics.fmean(metered):.3f} ms a step, stalled in the trace "
                        f"{statistics.fmean(stalled):.3f}")


def cost(rank, times, log, failures):
    counted = [s for s in log["meter"]["steps"] if log["meter"]["warmup"] <= s["number"] < times["first_profiled"]]
    sampled = [s["duration_ns"] / 1e6 for s in counted if s["sampled"]]
    others = [s["duration_ns"] / 1e6 for s in counted if not s["sampled"]]
    if not sampled or not others:
        return
    # Of neighbours, so that what changes slowly falls out; the interval is that of a median by order statistics.
    pairs = sorted(a / b for a, b in zip(sampled, others))
    reach = round(0.98 * len(pairs) ** 0.5)
    low, high = (100 * (pairs[max(0, min(len(pairs) - 1, len(pairs) // 2 + k))] - 1) for k in (-reach, reach))
    more = 100 * (statistics.median(sampled) / statistics.median(others) - 1)
    print(f"rank {rank}: {len(sampled)} sampled steps {statistics.median(sampled):.3f} ms, {len(others)} others "
          f"{statistics.median(others):.3f} ms by medians: {more:+.2f} %, of pairs of neighbours "
          f"{100 * (statistics.median(pairs) - 1):+.2f} % (95 %: {low:+.2f} to {high:+.2f})")
    if more > 2:
        failures.append(f"rank {rank}: a sampled step is {more:.2f} % longer")
    if len(counted) < 400:
        failures.append(f"rank {rank}: {len(counted)} steps for the cost, 400 are wanted")


def compare():
    failures = []
    ranks = sorted(int(os.path.basename(p)[6:-4]) for p in glob.glob(os.path.join(options.out, "times-*.txt")))
    if not ranks:
        sys.exit(f"{options.out} holds no times-*.txt: run ddp or fsdp2 first")
    runs = []
    for rank in ranks:
        with open(os.path.join(options.out, f"times-{rank}.txt")) as f:
            times = json.load(f)
        with open(os.path.join(options.out, f"rank{rank}.json")) as f:
            log = json.load(f)
        m = log["meter"]
        print(f"rank {rank}: {times['model']}, torch {times['torch']}; meter {m['state']} {m['words']}, steps "
              f"{m['steps_from']}, {m['collectives']} collectives, {m['event_calls']} event calls, {m['waits']} waits "
              f"measured, {m['unmeasured']} not, {m['captured']} captured")
        runs.append((rank, times, log))
    if any(times["profiled"] for _, times, _ in runs):
        print("ms a step, metered and stalled over the steps in which the trace says what was waited for:\nrank  steps   metered   stalled   exposed   compute      comm      span  host-blocked")
        for run in runs:
            accuracy(*run, failures)
        print("metered: by the meter; the rest as `halfwire analyze` has it from the trace. exposed: communication runs and no\n"
              "compute does")
    for run in runs:
        cost(*run, failures)
    for failure in failures:
        print("FAILED:", failure)
    sys.exit(1 if failures else 0)


compare() if options.what == "compare" else train()
