"""`halfwire bench step` on GPUs: the training step in miniature with real matrix products. Each collective goes out as its
gradients are there, beside the compute (overlapped), or as one at the end of the pass (merged). Knows nothing of Halfwire
but halfwire_step(), which it calls where the library is there:

    halfwire run --mode meter --log logs/overlapped -n 4 -- python3 bench/step/step.py --schedule overlapped
    halfwire run --mode meter --log logs/merged -n 4 -- python3 bench/step/step.py --schedule merged
    halfwire report --compare logs/overlapped logs/merged
"""

import argparse
import ctypes
import json
import os
import statistics
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--preset", choices=["ddp", "zero2", "fsdp", "many-small"], default="ddp")
parser.add_argument("--schedule", choices=["overlapped", "merged"], required=True)
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--size", type=int, default=2048, help="rows and columns of the matrices")
parser.add_argument("--products", type=int, default=24, help="matrix products of a stage")
parser.add_argument("--mib", type=float, default=4.0, help="MiB of bf16 that a stage reduces or gathers")
parser.add_argument("--share-gpu", action="store_true", help="all ranks use GPU 0")
parser.add_argument("--json", metavar="FILE", help="rank 0 writes its figures here")
parser.add_argument("--trace", metavar="FILE", help="rank 0 profiles 8 more steps, for `halfwire analyze`")
options = parser.parse_args()

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if options.share_gpu:
    # NCCL refuses two ranks on one GPU of one host; ranks that name different hosts talk through sockets.
    for name, value in {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
                        "NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2", "NCCL_MAX_CTAS": "4"}.items():
        os.environ.setdefault(name, value)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

WARMUP = 10


def step_function():
    try:
        function = ctypes.CDLL(None).halfwire_step
    except AttributeError:
        return lambda: None
    function.restype = None
    return function


def stages():
    """Forward and backward: matrix products of a stage, MiB gathered before it, MiB reduced behind it."""
    products, mib = options.products, options.mib
    return {
        "ddp": ([(products, 0, 0)] * 4, [(products, 0, mib)] * 8),
        "zero2": ([(products, mib, 0)] * 8, [(products, 0, mib)] * 8),
        "fsdp": ([(products, mib, 0)] * 8, [(2 * products, mib, mib)] * 8),
        "many-small": ([(products, 0, 0)] * 4, [(max(1, products // 4), 0, mib / 4)] * 32),
    }[options.preset]


class Step:
    def __init__(self):
        self.forward, self.backward = stages()
        self.scatter = options.preset in ("zero2", "fsdp")
        self.compute, self.communication = torch.cuda.Stream(), torch.cuda.Stream()
        self.a = torch.randn(options.size, options.size, device="cuda", dtype=torch.bfloat16) / options.size**0.5
        self.x = torch.randn(options.size, options.size, device="cuda", dtype=torch.bfloat16)
        self.y = torch.empty_like(self.x)
        most = max(sum(max(g, r) for _, g, r in p) for p in (self.forward, self.backward))
        self.data = torch.zeros(self.elements(most) + world, device="cuda", dtype=torch.bfloat16)
        self.part = torch.zeros(self.elements(most) // world + 1, device="cuda", dtype=torch.bfloat16)

    def elements(self, mib):
        return int(mib * 2**20 / 2) // world * world

    def products(self, count):
        with torch.cuda.stream(self.compute):
            for _ in range(count):
                torch.mm(self.x, self.a, out=self.y)

    def gather(self, mib):
        n = self.elements(mib)
        with torch.cuda.stream(self.communication):
            dist.all_gather_into_tensor(self.data[:n], self.part[:n // world])
            return torch.cuda.current_stream().record_event()

    def reduce(self, mib):
        n = self.elements(mib)
        self.communication.wait_stream(self.compute)
        with torch.cuda.stream(self.communication):
            if self.scatter:
                dist.reduce_scatter_tensor(self.part[:n // world], self.data[:n])
            else:
                dist.all_reduce(self.data[:n])
            return torch.cuda.current_stream().record_event()

    def run_pass(self, stages):
        gathered, reduced = sum(g for _, g, _ in stages), sum(r for _, _, r in stages)
        if options.schedule == "merged":
            if gathered:
                self.compute.wait_event(self.gather(gathered))
            for products, _, _ in stages:
                self.products(products)
            if reduced:
                self.compute.wait_event(self.reduce(reduced))
            return
        ahead, last = [], None
        for i, (products, _, reduce) in enumerate(stages):
            while len(ahead) <= min(i + 1, len(stages) - 1):
                mib = stages[len(ahead)][1]
                ahead.append(self.gather(mib) if mib else None)
            if ahead[i] is not None:
                self.compute.wait_event(ahead[i])
            self.products(products)
            if reduce:
                last = self.reduce(reduce)
        if last is not None:
            self.compute.wait_event(last)

    def run(self):
        self.run_pass(self.forward)
        self.run_pass(self.backward)
        self.products(options.products)
        self.compute.synchronize()


def profile(step, path):
    # Without these events a trace does not say which stream waited for what.
    waits = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities if rank == 0 else activities[:1], experimental_config=waits) as p:
        for number in range(8):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                step.run()
    if rank == 0:
        p.export_chrome_trace(path)


def main():
    torch.cuda.set_device(0 if options.share_gpu else int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl")
    halfwire_step = step_function()
    step = Step()
    torch.cuda.synchronize()
    times = []
    for _ in range(options.steps):
        start = time.perf_counter()
        halfwire_step()
        step.run()
        times.append((time.perf_counter() - start) * 1e3)
    halfwire_step()
    if options.trace:
        profile(step, options.trace)
    if rank == 0:
        figures = {"preset": options.preset, "schedule": options.schedule, "ranks": world,
                   "step_ms": statistics.median(times[WARMUP:])}
        print(json.dumps(figures), flush=True)
        if options.json:
            with open(options.json, "w") as f:
                json.dump(figures, f)
    dist.destroy_process_group()


main()
