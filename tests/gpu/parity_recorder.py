"""The recorder of training runs on a GPU: the same bits with and without it, nothing that waits, what it costs, and the
loops it must live with (DDP, FSDP2, GradScaler, accumulation, clipping). Needs one GPU and torch 2.4 or later.

    python3 tests/gpu/parity_recorder.py [--only bits,waits,loops,cost] [--seconds 60] [--cases small,large] [--json FILE]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products, for the check of bits
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "..", "python"), os.path.join(HERE, "..", "..", "examples", "pytorch")]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--only", default="bits,waits,loops,cost")
parser.add_argument("--seconds", type=float, default=60, help="of each case of the cost")
parser.add_argument("--cases", default="small,large", help="of the cost, out of small, item, every, large; or all")
parser.add_argument("--json", metavar="FILE")
args = parser.parse_args()
sys.argv = sys.argv[:1]  # gpt.py reads it when imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import gpt  # noqa: E402
from halfwire.parity import Recorder  # noqa: E402

SMALL = dict(width=384, layers=6, context=256)
LARGE = dict(width=1024, layers=24, context=512, heads=16)
failures = []
report = {}


def check(condition, what):
    print(("  ok    " if condition else "  FAILED ") + what, flush=True)
    if not condition:
        failures.append(what)


class Loop:
    """gpt.py's loop, with what the cases change. It never waits for the GPU unless `item` is set."""

    def __init__(self, shape, batch=8, seed=1, wrap="ddp", fused=False, clip=None, scaler=None, accumulation=1,
                 item=False):
        torch.manual_seed(seed)
        self.model = gpt.GPT(**shape).cuda()
        self.batch, self.context, self.clip, self.scaler, self.item = batch, shape["context"], clip, scaler, item
        self.accumulation, self.wrap = accumulation, wrap
        if wrap == "fsdp2":
            from torch.distributed.fsdp import fully_shard
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
            self.net = self.model
        else:
            self.net = DistributedDataParallel(self.model, device_ids=[0], gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-4, fused=fused)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: min(1.0, (s + 1) / 20))
        self.text = gpt.load_text().cuda()
        self.pick = torch.Generator(device="cuda").manual_seed(seed)
        self.offsets = torch.arange(self.context + 1, device="cuda")
        self.recorder = None

    def attach(self, path, **options):
        self.recorder = Recorder.attach(self.optimizer, path, model=self.net, scaler=self.scaler,
                                        accumulation=self.accumulation, **options)
        return self.recorder

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        for micro in range(self.accumulation):
            if self.wrap == "ddp":
                self.net.require_backward_grad_sync = micro == self.accumulation - 1
            at = torch.randint(0, len(self.text) - self.context - 1, (self.batch, 1), generator=self.pick, device="cuda")
            rows = self.text[at + self.offsets].long()
            with torch.autocast("cuda", dtype=torch.float16 if self.scaler else torch.bfloat16):
                logits = self.net(rows[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
            if self.recorder is not None:
                self.recorder.batch(rows)
                self.recorder.loss(loss)
            loss = loss / self.accumulation
            (self.scaler.scale(loss) if self.scaler else loss).backward()
        if self.clip:
            if self.scaler:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.schedule.step()
        if self.item:
            loss.item()


def lines(path):
    with open(os.path.join(path, "rank0.jsonl")) as f:
        return [json.loads(line) for line in f]


def bits(folder):
    print("bits: 80 steps of the small model with deterministic kernels")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    hashes = []
    for i, recorded in enumerate([False, False, True]):
        loop = Loop(SMALL, clip=1.0)
        if recorded:
            loop.attach(f"{folder}/bits{i}")
        for _ in range(80):
            loop.step()
        if recorded:
            loop.recorder.close()
        hashes.append(gpt.parameter_hash(loop.model))
    torch.use_deterministic_algorithms(False)
    check(hashes[0] == hashes[1], "two runs without the recorder have the same bits")
    check(hashes[0] == hashes[2], "a run with it has them too")
    check(len(lines(f"{folder}/bits2")) == 81, "80 steps recorded")


def waits(folder):
    print("waits: 40 steps in which any synchronisation is an error")
    loop = Loop(SMALL, clip=1.0)
    for _ in range(3):
        loop.step()
    recorder = loop.attach(f"{folder}/waits", dense=20)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            loop.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    recorder.close()
    check(len(lines(f"{folder}/waits")) == 41, "40 steps recorded, none waited")


def loops(folder):
    print("loops")
    cases = {"ddp, clipping": dict(clip=0.5), "accumulation of 3": dict(accumulation=3),
             "FSDP2, clipping": dict(wrap="fsdp2", clip=0.5),
             "GradScaler": dict(scaler="2**30"), "GradScaler, clipping": dict(scaler="2**30", clip=0.5),
             "GradScaler, fused AdamW": dict(scaler="2**30", fused=True)}
    for i, (name, options) in enumerate(cases.items()):
        options = dict(options)
        if "scaler" in options:
            options["scaler"] = torch.amp.GradScaler("cuda", init_scale=2.0**30)
        loop = Loop(SMALL, **options)
        path = f"{folder}/loop{i}"
        loop.attach(path, seed=1)
        for _ in range(50):
            loop.step()
        loop.recorder.close()
        header, *steps = lines(path)
        groups = [s["groups"][0] for s in steps]
        trained = [g for s, g in zip(steps, groups) if "update_norm" in g and not s.get("skipped")]
        check(len(steps) == 50 and [s["step"] for s in steps] == list(range(50)), f"{name}: 50 steps")
        check(all("loss" in s and "batch_hash" in s for s in steps), f"{name}: losses and batches")
        check(len(trained) > 10 and all(g["update_norm"] > 0 and 0 < g["grad_norm"] < 100 for g in trained),
              f"{name}: norms of {len(trained)} steps")
        check(len({g["param_hash"] for g in trained}) == len(trained), f"{name}: parameters change")
        if options.get("clip"):
            check(all(g["grad_norm_clipped"] <= 0.5001 for g in trained) and
                  any(g["grad_norm"] > 0.6 for g in trained), f"{name}: norms before and after clipping")
        check(header["sharded"] == (options.get("wrap") == "fsdp2"), f"{name}: sharded is {header['sharded']}")
        if options.get("scaler"):
            skipped = sum(s["skipped"] for s in steps)
            check(0 < skipped < 30, f"{name}: {skipped} steps skipped")
            scales = [s["loss_scale"] for s in steps]
            check(scales[0] == 2.0**30 and scales[-1] < scales[0], f"{name}: scale {scales[0]:g} to {scales[-1]:g}")


class Timed(Recorder):
    """Adds up the host's time in what the program and the optimizer call, apart for ordinary steps and those in detail."""

    spent = {False: 0.0, True: 0.0}
    depth = 0


def timed(name):
    method = getattr(Recorder, name)

    def call(self, *args, **kwargs):
        if self._closed or self.depth:
            return method(self, *args, **kwargs)
        detailed = self._detailed
        self.depth = 1
        start = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.spent[detailed] += time.perf_counter() - start
            self.depth = 0
    return call


for name in ("batch", "loss", "before_clip", "_clipping", "_before", "_after", "_skipped"):
    setattr(Timed, name, timed(name))


def trimmed(values):
    """Mean of a two-dimensional tensor's rows without their lowest and highest tenths: what interrupts a step is no cost of
    the recorder, and hits steps of both kinds."""
    cut = values.shape[1] // 10
    return values.sort(dim=1).values[:, cut:values.shape[1] - cut].mean(dim=1)


def overhead_of(cycles, share):
    """The recorder's part of a step with its 95 % interval (bootstrap, 2000 times). `cycles`: times of four steps of which the
    second and third were recorded, apart for those with a step in detail, which are `share` of all."""
    pick, total = torch.Generator().manual_seed(1), torch.zeros(2001, dtype=torch.float64)
    for kind, part in (("ordinary", 1 - share), ("detailed", share)):
        if part == 0:
            continue
        t = torch.tensor(cycles[kind], dtype=torch.float64)
        ratios = (t[:, 1] + t[:, 2]) / (t[:, 0] + t[:, 3]) - 1
        again = ratios[torch.randint(0, len(ratios), (2000, len(ratios)), generator=pick)]
        total += part * torch.cat([trimmed(ratios[None]), trimmed(again)])
    again = sorted(total[1:].tolist())
    return total[0].item(), again[49], again[1949]


CASES = {"small": ("small", SMALL, dict(batch=8), {}),
         "item": ("small, loss.item() every step", SMALL, dict(batch=8, item=True), {}),
         "every": ("small, all that is recorded at every step", SMALL, dict(batch=8), dict(every=1)),
         "large": ("large", LARGE, dict(batch=16, fused=True), {})}


def cost(folder):
    print(f"cost: steps with and without the recorder in turn, in one process, {args.seconds:g} s a case")
    for case in CASES if args.cases == "all" else args.cases.split(","):
        name, shape, options, settings = CASES[case]
        loop = Loop(shape, clip=1.0, **options)
        for _ in range(20):
            loop.step()
        loop.recorder = recorder = Timed.attach(loop.optimizer, f"{folder}/cost-{case}", model=loop.net, dense=0, **settings)
        for _ in range(40):
            loop.step()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(101)]
        cycles = {"ordinary": [], "detailed": []}

        def stretch(keep=True):
            """100 steps, recorded or not in the order of 0110; a step ends when the device has ended it."""
            detailed = [False] * 25
            torch.cuda.synchronize()
            events[0].record()
            for k in range(100):
                on = k % 4 in (1, 2)
                recorder._closed = not on  # it stands still while closed
                detailed[k // 4] |= on and recorder._detailed
                loop.step()
                events[k + 1].record()
            torch.cuda.synchronize()
            took = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
            for c in range(1, 25) if keep else ():  # in the first the host gets ahead
                cycles["detailed" if detailed[c] else "ordinary"].append(took[4 * c:4 * c + 4])

        stretch(keep=False)
        recorder.spent = {False: 0.0, True: 0.0}
        stretches, end = 0, time.perf_counter() + args.seconds
        while stretches < 8 or time.perf_counter() < end:
            stretch()
            stretches += 1
        recorder._closed = False
        recorder.close()
        every = recorder._every
        mean, low, high = overhead_of(cycles, min(1, 2 / every))
        parameters, tensors = sum(p.numel() for p in loop.model.parameters()), len(list(loop.model.parameters()))
        recorded = 50 * stretches
        in_detail = max(1, round(recorded / every))
        host = {"ordinary_us": recorder.spent[False] / (recorded - in_detail) * 1e6 if every > 1 else None,
                "detailed_us": recorder.spent[True] / in_detail * 1e6,
                "mean_us": sum(recorder.spent.values()) / recorded * 1e6}
        whole = cycles["ordinary"] + cycles["detailed"]
        step = statistics.median(t for c in whole for t in (c[0], c[3]))
        report[name] = {"parameters": parameters, "tensors": tensors, "step_ms": step, "overhead": mean, "low": low,
                        "high": high, "host": host, "cycles_ms": cycles}
        print(f"  {name}: {parameters / 1e6:.1f} M parameters in {tensors} tensors, step {step:.2f} ms, recorder "
              f"{mean * 100:+.2f} % (95 %: {100 * low:+.2f} to {100 * high:+.2f}), {2 * len(whole)} steps with and as many without\n"
              "    time of the host in the recorder: "
              + (f"ordinary step {host['ordinary_us']:.0f} us, " if every > 1 else "") +
              f"step in detail {host['detailed_us']:.0f} us, mean {host['mean_us']:.0f} us, "
              f"{100 * host['mean_us'] / step / 1e3:.2f} % of the step", flush=True)
        if not settings:
            check(mean < 0.01, f"{name}: under 1 % of the step")
        del loop, recorder, stretch
        torch.cuda.empty_cache()


def main():
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only.split(","):
            {"bits": bits, "waits": waits, "loops": loops, "cost": cost}[name](folder)
    dist.destroy_process_group()
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "cost": report,
                       "failures": failures}, f)
    print(f"parity_recorder: {len(failures)} failures")
    return 1 if failures else 0


sys.exit(main())
