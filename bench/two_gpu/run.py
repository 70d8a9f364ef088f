#!/usr/bin/env python3
"""Everything that two GPUs of one host can say about compressed collectives, in one call: over the link they have, and
through host memory (NCCL_P2P_DISABLE=1). Writes RESULTS/two_gpu.json (every sample) and RESULTS/two_gpu.md (tables).

    bench/two_gpu/build.sh BUILD/bin && bench/two_gpu/run.py BUILD RESULTS [--full] [--parts LIST]

BUILD holds bin/ and lib/ of the tree with halfwire, halfwire-bench-nccl and libhalfwire.so; a machine without the
tree's build tools needs only those files. Parts: collectives (every algorithm, alternating, and its stages), library
(`halfwire bench collective`), transport (the prototype for GPUs without P2P), ddp (a PyTorch step).
"""

import argparse
import datetime
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
import time

KIB, MIB = 1024, 1 << 20
LINKS = {"direct": {}, "host": {"NCCL_P2P_DISABLE": "1"}}
FLOORS = {"direct": 64 * MIB, "host": 4 * MIB}  # what the library does not compress below, by default
CHUNKS = {"direct": "256MiB", "host": "64MiB"}  # its chunks, by default

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("build")
parser.add_argument("results")
parser.add_argument("--full", action="store_true", help="more sizes and repetitions: some 20 minutes")
parser.add_argument("--parts", default="collectives,transport,ddp,library")
parser.add_argument("--links", default="direct,host")
parser.add_argument("--sizes", help="bytes of messages, instead of the default list (for a quick trial)")
parser.add_argument("--tables", action="store_true", help="only make the tables anew from RESULTS/two_gpu.json")
options = parser.parse_args()

here = os.path.dirname(os.path.abspath(__file__))
root = os.path.dirname(os.path.dirname(here))
build = os.path.abspath(options.build)
results = os.path.abspath(options.results)
os.makedirs(results, exist_ok=True)
failures = []


def environment(link):
    env = dict(os.environ)
    paths = [os.path.join(build, "lib")]
    try:  # PyTorch's wheels bring NCCL in a folder of their own.
        import nvidia.nccl
        paths.append(os.path.join(list(nvidia.nccl.__path__)[0], "lib"))
    except ImportError:
        pass
    env["LD_LIBRARY_PATH"] = ":".join(paths + [env.get("LD_LIBRARY_PATH", "")])
    env.setdefault("NCCL_NVLS_ENABLE", "0")  # two GPUs gain nothing from multicast
    env.update(LINKS[link])
    return env


def run(name, link, limit, command):
    """The standard output, or None after a failure, which is recorded. Ends everything it started."""
    begin = time.time()
    process = subprocess.Popen(command, cwd=root, env=environment(link), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=limit)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        code = "over its limit"
    with open(os.path.join(results, f"{name}-{link}.log"), "w") as f:
        f.write("$ " + " ".join(command) + "\n" + out[-20000:] + err[-20000:])
    print(f"{name} {link}: {code}, {time.time() - begin:.0f} s", flush=True)
    if code == 0:
        return out
    failures.append(f"{name} over {link}: {code}: {err.strip().splitlines()[-1:] or ''}")
    return None


def lines(path):
    if not os.path.exists(path):
        return []
    rows = []
    for line in open(path):
        try:
            rows.append(json.loads(line))
        except ValueError:
            pass  # the last line of a program that was ended
    os.remove(path)
    return rows


def command_output(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def describe():
    cpu = next((line.split(": ", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "kernel": platform.release(), "cpu": cpu, "cpus": os.cpu_count(),
        "gpus": command_output("nvidia-smi", "--query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current",
                               "--format=csv,noheader").splitlines(),
        "topology": command_output("nvidia-smi", "topo", "-m"),
        "command": " ".join(sys.argv), "setting": "full" if options.full else "quick",
        "environment": {k: v for k, v in environment("direct").items() if k.startswith(("NCCL_", "HALFWIRE_"))},
    }


# ---- measuring ----

# After every part, so that what was measured outlives a run that is cut short.
def save(data):
    with open(os.path.join(results, "two_gpu.json"), "w") as f:
        json.dump(data, f)


def measure():
    parts = options.parts.split(",")
    links = options.links.split(",")
    data = {"machine": describe(), "rows": [], "library": [], "ddp": [], "failures": failures}
    sizes = [16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB]
    if options.full:
        sizes = sorted(sizes + [s * 2 for s in sizes[:-1]])
    if options.sizes:
        sizes = [int(s) for s in options.sizes.split(",")]
    text = ",".join(map(str, sizes))
    repeat = 31 if options.full else 11
    scratch = os.path.join(results, "rows.jsonl")
    if "collectives" in parts:
        for link in links:
            run("collectives", link, 900 if options.full else 150,
                [f"{build}/bin/two-gpu-collectives", scratch, link, str(repeat), text])
            data["rows"] += lines(scratch)
            save(data)
    if "transport" in parts and "host" in links:
        # 64 MiB first: larger sizes than 256 MiB keep the shape of the one before, and bit patterns take the first size.
        order = [64 * MIB] + [s for s in sizes if s >= MIB and s != 64 * MIB]
        run("transport", "host", 240 if options.full else 75,
            [f"{build}/bin/two-gpu-host-transport", scratch, "host", str(2 * repeat - 1), ",".join(map(str, order))])
        data["rows"] += lines(scratch)
        save(data)
    if "ddp" in parts:
        for link in links:
            for turn in range(3 if options.full else 2):
                # A B, then B A, so that a drift of the machine hits both.
                for mode in ("off", "wire") if turn % 2 == 0 else ("wire", "off"):
                    path = os.path.join(results, "step.json")
                    logs = os.path.join(results, "logs")
                    out = run(f"ddp-{mode}-{turn}", link, 90,
                              [f"{build}/bin/halfwire", "run", "--mode", mode, "-n", "2", "--log", logs, "--",
                               "python3", os.path.join(here, "ddp_step.py"), "--json", path])
                    if out is None:
                        continue
                    row = json.load(open(path))
                    row.update(link=link, mode=mode, turn=turn)
                    log = json.load(open(os.path.join(logs, "rank0.json")))
                    calls = [c for comm in log["communicators"] for c in comm["calls"] if c["operation"] == "AllReduce"]
                    row["sent_bytes"] = sum(c["bytes_sent"] for c in calls)
                    row["exact_ring_bytes"] = sum(c["bytes_exact_ring"] for c in calls)
                    row["compressed_calls"] = sum(c["calls"] for c in calls if c["compressed"])
                    row["compressed_host_us"] = (sum(c["host_ns"] for c in calls if c["compressed"]) / 1e3
                                                 / max(1, row["compressed_calls"]))
                    data["ddp"].append(row)
                    os.remove(path)
                    save(data)
    if "library" in parts:
        for link in links:
            for op in ("allreduce", "reducescatter", "allgather"):
                for element, amounts in (("e4m3", "1MiB,4MiB,16MiB,32MiB,64MiB,128MiB,256MiB,1GiB"), ("int8", "64MiB")):
                    out = run(f"library-{op}-{element}", link, 300 if options.full else 90,
                              [f"{build}/bin/halfwire", "bench", "collective", "--engine", "nccl", "-n", "2", "--op", op,
                               "--format", element, "--bytes", amounts, "--chunk-bytes", CHUNKS[link], "--repeat", str(repeat), "--json"])
                    if out is not None:
                        data["library"] += [dict(r, link=link, format=element) for r in json.loads(out[out.index("{"):])["rows"]]
            save(data)
    save(data)
    return data


# ---- statistics ----

def median(v):
    v = sorted(v)
    n = len(v)
    return v[n // 2] if n % 2 else (v[n // 2 - 1] + v[n // 2]) / 2


def interval(v):
    """95 % interval of the median from order statistics; the range where there are too few values."""
    v = sorted(v)
    n = len(v)
    if n < 6:
        return v[0], v[-1]
    half = 1.96 * math.sqrt(n) / 2
    return v[max(0, math.floor(n / 2 - half))], v[min(n - 1, math.ceil(n / 2 + half))]


def ratio(a, b):
    """Median and interval of a/b, of rows whose samples ran side by side."""
    r = [x / y for x, y in zip(a["us"], b["us"])]
    return (median(r), *interval(r))


def show(r, digits=2):
    return "{:.{d}f} ({:.{d}f}-{:.{d}f})".format(*r, d=digits)


def size(n):
    return f"{n / MIB:.4g} MiB" if n >= MIB else f"{n / KIB:.4g} KiB"


def us(row):
    if row is None:
        return "-"
    m = median(row["us"])
    return f"{m:.1f}" if m < 100 else f"{m:.0f}"


def rms(row):
    if row is None or "rel_rms" not in row:
        return "-"
    return "NaN" if row["rel_rms"] is None else f"{row['rel_rms']:.4f}"


# ---- tables ----

class Report:
    def __init__(self, data):
        self.data = data
        self.out = []
        self.index = {(r["link"], r["op"], r["bytes"], r["variant"], r["format"]): r
                      for r in data["rows"] if r["kind"] == "row"}

    def line(self, text=""):
        self.out.append(text)

    def table(self, head, rows):
        self.line("| " + " | ".join(head) + " |")
        self.line("|" + "---|" * len(head))
        for r in rows:
            self.line("| " + " | ".join(map(str, r)) + " |")
        self.line()

    def get(self, link, op, n, variant, form="e4m3"):
        return self.index.get((link, op, n, variant, form))

    def exact(self, link, op, n):
        return self.get(link, op, n, "exact", "bf16"), self.get(link, op, n, "exact-best", "bf16")

    def keys(self):
        links = [k for k in LINKS if any(i[0] == k for i in self.index)]
        for link in links:
            for op in ("AllReduce", "ReduceScatter", "AllGather", "AlltoAll"):
                sizes = sorted({i[2] for i in self.index if i[0] == link and i[1] == op})
                if sizes:
                    yield link, op, sizes

    def machine(self):
        m = self.data["machine"]
        found = next((r for r in self.data["rows"] if r["kind"] == "machine"), None)
        self.line("# Two GPUs")
        self.line()
        self.line(f"{'; '.join(m['gpus'])} (name, driver, PCIe generation, lanes); {m['cpu']}, {m['cpus']} CPUs; "
                  + (f"NCCL {found['nccl']:g}, CUDA driver {found['cuda_driver']:g}; " if found else "")
                  + f"{m['date']}; `{m['command']}` ({m['setting']} setting). bf16. \"direct\" is the GPUs' own link, \"host\" is "
                  "NCCL_P2P_DISABLE=1. Medians; in brackets the 95 % interval of the median of the ratios of what ran side by "
                  "side. us: from the first rank's start to the last rank's end, for one of several calls in a row.")
        self.line()

    def collectives(self):
        for link, op, sizes in self.keys():
            first = "one-shot" if op == "AllReduce" else "wire"
            self.line(f"## {op}, {link}")
            self.line()
            head = ["size", "exact us", "best exact us (CTAs)", "fp8 us (call alone)", f"{first} us", "int8 us",
                    "packets us", "best wire us (CTAs)", "exact/wire", "best exact/best wire", "wire/packets"]
            head += ["uncut us (packets)"]
            if op == "AllReduce":
                head += ["overlapped us", "two-shot us (packets)", "ring us (packets)"]
            rows = []
            for n in sizes:
                e, b = self.exact(link, op, n)
                w, p = self.get(link, op, n, first), self.get(link, op, n, "packets")
                wb = self.get(link, op, n, first + "-best")
                row = [size(n), us(e), f"{us(b)} ({b['min_ctas'] or 'default'})",
                       us(self.get(link, op, n, "fp8")) + f" ({us(self.get(link, op, n, 'fp8-no-casts'))})", us(w),
                       us(self.get(link, op, n, first, "int8")), us(p), f"{us(wb)} ({wb['min_ctas'] or 'default'})",
                       show(ratio(e, w)), show(ratio(b, wb)), show(ratio(w, p))]
                uncut = self.get(link, op, n, first + "-uncut")
                row.append(f"{us(uncut)} ({us(self.get(link, op, n, 'packets-uncut'))})" if uncut else "-")
                if op == "AllReduce":
                    row.append(us(self.get(link, op, n, "one-shot-overlapped")))
                    row += [f"{us(self.get(link, op, n, a))} ({us(self.get(link, op, n, a + '-packets'))})"
                            for a in ("two-shot", "ring")]
                rows.append(row)
            self.table(head, rows)
            head = ["size", "exact", "fp8", f"{first} e4m3", f"{first} int8"]
            algorithms = [(first, "e4m3"), (first, "int8")]
            if op == "AllReduce":
                algorithms += [(a, f) for a in ("two-shot", "ring") for f in ("e4m3", "int8")]
                head += [f"{a} {f}" for a, f in algorithms[2:]]
            rows = []
            for n in sizes:
                of = [self.exact(link, op, n)[0], self.get(link, op, n, "fp8")]
                of += [self.get(link, op, n, a, f) for a, f in algorithms]
                bad = [r["variant"] + " " + r["format"] for r in of if r is not None and not r["same_bits"]]
                rows.append([size(n)] + [rms(r) for r in of] + ["yes" if not bad else "NO: " + ", ".join(bad)])
            self.line("Relative rms error against an fp64 sum; same bits: "
                      + ("on both GPUs and in two runs." if op in ("AllReduce", "AllGather") else "in two runs.")
                      + (" The half that stays on its GPU is exact." if op == "AlltoAll" else ""))
            self.line()
            self.table(head + ["same bits"], rows)

    def best_cut(self, link, op, n, first):
        """The fastest of the wire in passes of 64 MiB, in one piece, and with its passes overlapped."""
        variants = (self.get(link, op, n, first + v) for v in ("", "-uncut", "-overlapped"))
        return min((v for v in variants if v is not None), key=lambda v: median(v["us"]))

    @staticmethod
    def crossover(ratios):
        """Of [(size, ratio)]: the longest run of sizes whose intervals lie above 1, and the size at which the ratio passes
        1 before it (linear in the logarithms)."""
        best, run = [], []
        for i, (_, r) in enumerate(ratios):
            run = run + [i] if r[1] > 1 else []
            if len(run) > len(best):
                best = run
        if not best:
            return None, None, None
        (n1, r1), at = ratios[best[0]], best[0]
        point = float(n1)
        if at > 0:
            n0, r0 = ratios[at - 1]
            point = float(n0)
            if r0[0] < 1:
                t = -math.log(r0[0]) / (math.log(r1[0]) - math.log(r0[0]))
                point = n0 * (n1 / n0) ** t
        return point, n1, ratios[best[-1]][0]

    def crossovers(self):
        self.line("## From which size the wire is faster")
        self.line()
        self.line("\"best CTAs\": NCCL's least number of thread blocks at which it is fastest, chosen for each size, for the exact "
                  "call and for the packets; \"best cut\": the wire in passes of 64 MiB, in one piece or overlapped.")
        self.line()
        rows, unmet, starts = [], [], {}
        for link, op, sizes in self.keys():
            first = "one-shot" if op == "AllReduce" else "wire"
            for against, numerator, denominator in (
                    ("default", lambda n: self.exact(link, op, n)[0], lambda n: self.get(link, op, n, first)),
                    ("best CTAs on both sides", lambda n: self.exact(link, op, n)[1],
                     lambda n: self.get(link, op, n, first + "-best")),
                    ("best CTAs, wire at default", lambda n: self.exact(link, op, n)[1],
                     lambda n: self.get(link, op, n, first)),
                    ("default, wire at best cut", lambda n: self.exact(link, op, n)[0],
                     lambda n: self.best_cut(link, op, n, first))):
                ratios = [(n, ratio(numerator(n), denominator(n))) for n in sizes]
                point, start, end = self.crossover(ratios)
                starts.setdefault((link, against), []).append((op, start, end, sizes[-1]))
                best = max(ratios, key=lambda r: r[1][0])
                rows.append([op, link, against, size(round(point / KIB) * KIB) if point else "none",
                             "never" if start is None else size(start) + (" on" if end == sizes[-1] else f" to {size(end)}"),
                             show(ratios[-1][1]), f"{best[1][0]:.2f} at {size(best[0])}"])
                unmet += [f"* {op}, {link}, {size(n)}, {against}: exact/wire {show(r)}: "
                          + ("slower" if r[2] < 1 else "not shown to be faster") for n, r in ratios if n >= FLOORS[link] and r[1] <= 1]
        self.table(["operation", "link", "exact", "ratio passes 1 at", "faster from", "ratio at the largest size",
                    "largest ratio"], rows)
        for (link, against), of in starts.items():
            known = [s for _, s, _, _ in of if s is not None]
            floor = size(max(known)) if known else "none"
            never = [o for o, s, _, _ in of if s is None]
            ends = [f"{o} only up to {size(e)}" for o, s, e, last in of if s is not None and e != last]
            self.line(f"* {link}, {against}: floor that follows for all operations: {floor}"
                      + (f"; never faster: {', '.join(never)}" if never else "") + (f"; {', '.join(ends)}" if ends else "") + ".")
        self.line()
        self.line("### \"Never slower\" from the floors (" + ", ".join(f"{link} {size(n)}" for link, n in FLOORS.items()) + "): "
                  + ("met at every size measured" if not unmet else "NOT MET"))
        self.line()
        self.out += unmet
        self.line()

    def stages(self):
        self.line("## Between the wire and its packets")
        self.line()
        self.line("Microseconds. \"quantize\" and \"finish\" (reduce or dequantize) are what the whole loses when that stage is left "
                  "out, in brackets the kernel by itself; \"rest\" is what neither explains: both stages left out save it together. "
                  "Host: until the call was enqueued.")
        self.line()
        rows = []
        for link, op, sizes in self.keys():
            first = "one-shot" if op == "AllReduce" else "wire"
            for n in sizes:
                q = self.get(link, op, n, "quantize-only")
                if q is None:
                    continue
                m = {v: median(self.get(link, op, n, v)["us"]) for v in
                     (first, "packets", "no-quantize", "no-finish", "quantize-only", "finish-only", "codec-only")}
                gap = m[first] - m["packets"]
                causes = {"quantize": m[first] - m["no-quantize"], "finish": m[first] - m["no-finish"]}
                causes["rest"] = gap - causes["quantize"] - causes["finish"]
                order = ", ".join(f"{k} {v:.0f}" for k, v in sorted(causes.items(), key=lambda c: -c[1]))
                whole, packets, exact = (self.get(link, op, n, first), self.get(link, op, n, "packets"),
                                         self.exact(link, op, n)[0])
                rows.append([op, link, size(n), f"{m[first]:.0f}", f"{m['packets']:.0f}", f"{gap:.0f}",
                             f"{causes['quantize']:.0f} ({m['quantize-only']:.0f})",
                             f"{causes['finish']:.0f} ({m['finish-only']:.0f})", f"{causes['rest']:.0f}",
                             f"{m['codec-only']:.0f}", order,
                             f"{whole['launches']:g} ({exact['launches']:g}, {packets['launches']:g})",
                             f"{whole['host_us']:.0f} ({exact['host_us']:.0f}, {packets['host_us']:.0f})"])
        self.table(["operation", "link", "size", "wire", "packets", "gap", "quantize", "finish", "rest", "codec alone",
                    "causes in order", "launches (exact, packets)", "host us (exact, packets)"], rows)

    def small(self):
        rows = [r for r in self.data["rows"] if r["kind"] == "small-values"]
        if not rows:
            return
        self.line("Inputs of N(0, 1) times 2^-16, AllReduce of 4 MiB: "
                  + "; ".join(f"{r['variant']} {r['format']} {rms(r)}" for r in rows[:3])
                  + " (relative rms error): FP8 without scales flushes them to zero.")
        self.line()

    def transport(self):
        rows = [r for r in self.data["rows"] if r["kind"].startswith("transport")]
        if not rows:
            return
        self.line("## A transport of our own through pinned host memory, AllReduce")
        self.line()
        table = []
        for n in sorted({r["bytes"] for r in rows}):
            of = {r["variant"]: r for r in rows if r["bytes"] == n and r["kind"] == "transport"}
            if not {"exact", "exact-best", "host-transport", "host-transport-bytes", "packets"} <= of.keys():
                continue
            t, bare = of["host-transport"], of["host-transport-bytes"]
            packet = n / 2 * (1 + 4 / 128)
            table.append([size(n), us(of["exact"]), f"{us(of['exact-best'])} ({of['exact-best']['min_ctas'] or 'default'})",
                          us(of["packets"]), us(t), us(bare), f"{packet / median(t['us']) / 1e3:.1f}",
                          f"{n / median(t['us']) / 1e3:.1f}", show(ratio(of["exact"], t)), show(ratio(of["exact-best"], t)),
                          show(ratio(t, bare)), rms(t), "yes" if t["same_bits"] else "NO",
                          f"{t['elements_unlike_reference']:g}" if "elements_unlike_reference" in t else "not compared",
                          f"{t['host_us']:.0f}", f"{t['channels']:g} x {t['chunk_elements']:g} x {t['slots']:g}",
                          f"{t['window_bytes'] / MIB:.1f}"])
        self.table(["size", "NCCL bf16 us", "best NCCL bf16 us (CTAs)", "NCCL, packets alone us", "host transport us",
                    "its bytes without codec us", "GB/s each way a GPU", "algbw GB/s", "exact/transport",
                    "best exact/transport", "transport/its bytes", "rel rms", "same bits", "elements unlike reference",
                    "host us", "thread blocks x elements of a chunk x slots", "pinned MiB a rank"], table)
        for r in rows:
            if r["kind"] == "transport-bit-patterns":
                self.line(f"Random bit patterns, {size(r['bytes'])}: {r['elements_unlike_reference']:g} elements unlike the scalar "
                          f"reference over both GPUs, same bits on both: {'yes' if r.get('same_bits') else 'NO'}.")
        shapes = [r for r in self.data["rows"] if r["kind"] == "shape" and r["bytes"] == 64 * MIB]
        if shapes:
            self.line("Fastest shape at 64 MiB by thread blocks: " + "; ".join(
                "{:g}: {:.0f} us ({:g} x {:g})".format(c, median(b["us"]), b["chunk_elements"], b["slots"])
                for c in sorted({r["channels"] for r in shapes})
                for b in [min((r for r in shapes if r["channels"] == c), key=lambda r: median(r["us"]))]) + ".")
        self.line()

    def library(self):
        if not self.data["library"]:
            return
        self.line("## The library itself (`halfwire bench collective --engine nccl -n 2`)")
        self.line()
        self.line("Single calls, one at a time: launches are not hidden behind a call before.")
        self.line()
        rows = []
        for r in self.data["library"]:
            rows.append([r["op"], r["link"], r.get("format", "e4m3"), size(r["bytes"]), f"{r['exact_us']:.0f}", f"{r['wire_us']:.0f}",
                         f"{r['packet_us']:.0f}", show((r["speedup"], *r["speedup_ci95"])),
                         show((r["wire_over_packet"], *r["wire_over_packet_ci95"])), f"{r['wire_bytes'] / r['exact_bytes']:.4f}",
                         f"{r['launches']:g}", f"{r['host_us']:.0f} ({r['exact_host_us']:.0f}, {r['packet_host_us']:.0f})",
                         f"{r['rel_rms_error']:.4f}", "yes" if r["identical"] else "NO"])
        self.table(["operation", "link", "format", "size", "exact us", "wire us", "packets us", "exact/wire", "wire/packets", "bytes",
                    "codec launches", "host us (exact, packets)", "rel rms", "same bits"], rows)
        slow = [r for r in self.data["library"] if r["bytes"] >= FLOORS[r["link"]] and r["speedup_ci95"][0] <= 1]
        self.line("\"Never slower\" from the floors: " + ("met." if not slow else "NOT MET: " + "; ".join(
            f"{r['op']} {r['link']} {size(r['bytes'])} {show((r['speedup'], *r['speedup_ci95']))}" for r in slow) + "."))
        self.line()

    def ddp(self):
        runs = self.data["ddp"]
        if not runs:
            return
        self.line("## A DDP step")
        self.line()
        s = runs[0]["settings"]
        self.line(f"`examples/pytorch/gpt.py`'s model, {runs[0]['parameters'] / 1e6:.0f} M parameters (width {s['width']}, {s['layers']} layers), "
                  f"{s['context']} tokens a sequence, bf16 gradients, buckets of {s['bucket_mb']} MB of fp32, by bench/two_gpu/ddp_step.py. "
                  "\"alone\": the same step under no_sync, step by step beside the other. Compute kernels: those that both kinds of step "
                  "launch equally often; slow-down: their time beside collectives over their time alone. Exposed: step minus alone, the casts of "
                  "the bf16 hook included.")
        self.line()
        rows = []
        for r in sorted(runs, key=lambda r: (r["link"], r["turn"], r["mode"])):
            for b in r["batches"]:
                steps = max(1, r["synchronised_steps"])
                rows.append([r["link"], b["batch"], r["mode"], r["turn"],
                             "{:.2f} ({:.2f}-{:.2f})".format(median(b["step_ms"]), *interval(b["step_ms"])),
                             f"{median(b['compute_step_ms']):.2f}",
                             f"{median([x - y for x, y in zip(b['step_ms'], b['compute_step_ms'])]):.2f}",
                             f"{r['exact_ring_bytes'] / MIB / steps:.0f}",
                             f"{r['sent_bytes'] / MIB / steps:.0f} ({r['sent_bytes'] / max(1, r['exact_ring_bytes']):.4f})",
                             f"{b['compute_kernels_ms']:.2f} ({b['compute_kernels_alone_ms']:.2f})",
                             f"{b['compute_kernels_ms'] / b['compute_kernels_alone_ms']:.3f}",
                             f"{b['nccl_kernels_ms']:.2f}", f"{b['codec_kernels_ms']:.2f} ({b['codec_launches']:g})",
                             f"{r['compressed_host_us']:.0f}", "yes" if r["identical"] else "NO", f"{r['loss']:.4f}"])
        self.table(["link", "batch", "mode", "run", "step ms (95 %)", "alone ms", "exposed ms", "exact ring MiB a step", "sent MiB a step",
                    "compute kernels ms (alone)", "slow-down", "NCCL kernels ms, waiting included", "codec kernels ms (launches)",
                    "host us a compressed call", "replicas identical", "loss"], rows)
        draw = random.Random(1)
        for link in LINKS:
            for batch in sorted({b["batch"] for r in runs for b in r["batches"]}, reverse=True):
                of = {mode: [b for r in runs if r["link"] == link and r["mode"] == mode for b in r["batches"] if b["batch"] == batch]
                      for mode in ("off", "wire")}
                if not of["off"] or not of["wire"]:
                    continue
                each = [median(a["step_ms"]) / median(b["step_ms"]) for a, b in zip(of["off"], of["wire"])]
                pool = {mode: sum((b["step_ms"] for b in of[mode]), []) for mode in of}
                bootstrap = sorted(median(draw.choices(pool["off"], k=len(pool["off"])))
                                   / median(draw.choices(pool["wire"], k=len(pool["wire"]))) for _ in range(1000))
                r = (median(pool["off"]) / median(pool["wire"]), bootstrap[25], bootstrap[974])
                slow = {mode: median([b["compute_kernels_ms"] / b["compute_kernels_alone_ms"] for b in of[mode]]) for mode in of}
                self.line(f"* {link}, batch {batch}: exact {median(pool['off']):.2f} ms, wire {median(pool['wire']):.2f} ms, exact/wire {show(r, 3)}, "
                          "by run " + ", ".join(f"{p:.3f}" for p in each)
                          + f"; compute slow-down {slow['off']:.3f} exact, {slow['wire']:.3f} wire."
                          + ("" if r[1] > 1 else " \"Never slower\" is NOT MET: slower." if r[2] < 1
                             else " \"Never slower\" is not shown."))
        self.line()

    def text(self):
        self.machine()
        for part in (self.collectives, self.small, self.crossovers, self.stages, self.library, self.transport, self.ddp):
            if part in (self.collectives, self.crossovers, self.stages) and not self.index:
                continue
            part()
        if self.data.get("failures"):
            self.line("## What failed")
            self.line()
            self.out += [f"* {f}" for f in self.data["failures"]]
        return "\n".join(self.out) + "\n"


path = os.path.join(results, "two_gpu.json")
data = json.load(open(path)) if options.tables else measure()
with open(os.path.join(results, "two_gpu.md"), "w") as f:
    f.write(Report(data).text())
for failure in failures:
    print("FAILED", failure)
sys.exit(1 if failures else 0)
