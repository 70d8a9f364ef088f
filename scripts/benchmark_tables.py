#!/usr/bin/env python3
"""Prints docs/benchmarks.md's tables of kernels from halfwire-cuda-check's measure.json. Usage: benchmark_tables.py FILE"""
import json
import sys

m = json.load(open(sys.argv[1]))


def rate(r):
    return f"{r['bytes_per_s'] / 1e9:.0f} GB/s, {r['ratio']:.3f} ({r['ratio_low']:.3f}-{r['ratio_high']:.3f})"


print("| kernel | path | input | MiB | time us | rate, ratio to copy |\n|---|---|---|---|---|---|")
for r in m["rows"]:
    if r["format"] == "e4m3" and r["block"] == 128 and r["scale"] == "fp32":
        w = f", W = {r['packets']}" if r["packets"] > 1 else ""
        print(f"| {r['op']}{w} | {r['path']} | {r['input']} | {r['message_bytes'] >> 20} | {r['seconds'] * 1e6:.1f} | {rate(r)} |")
print()
print("| format | quantize bf16 | dequantize bf16 | reduce, W = 8 |\n|---|---|---|---|")
best = {}
for r in m["rows"]:
    if r["path"] == "hardware" and r["input"] == "bf16" and (r["packets"] in (1, 8)):
        key = (r["format"], r["block"], r["scale"])
        best.setdefault(key, {}).setdefault(r["op"], r["ratio"])
for (f, b, s), ops in sorted(best.items()):
    cell = lambda op: f"{ops[op]:.3f}" if op in ops else "-"
    print(f"| {f}/{b}/{s} | {cell('quantize')} | {cell('dequantize')} | {cell('reduce')} |")
print()
print("| launches in one graph | us each |\n|---|---|")
for g in m["graph"]:
    print(f"| {g['what']} | {g['us_per_launch']:.2f} |")
print()
print("| fused reduce, W = 8 | path | fused us | kernel by kernel us | time ratio | byte ratio | same bits |\n|---|---|---|---|---|---|---|")
for f in m["fused"]:
    print(f"| {f['message_bytes'] >> 20} MiB of bf16 | {f['path']} | {f['fused_seconds'] * 1e6:.1f} | {f['unfused_seconds'] * 1e6:.1f} "
          f"| {f['time_ratio']:.2f} ({f['time_ratio_low']:.2f}-{f['time_ratio_high']:.2f}) | {f['byte_ratio']:.2f} | {'yes' if f['same_bits'] else 'NO'} |")
