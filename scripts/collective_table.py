#!/usr/bin/env python3
"""Prints the rows of `halfwire bench collective --json` as a Markdown table. Usage: collective_table.py FILE..."""
import json
import sys

print("| ranks | MiB | algorithm | exact us | wire us | packets us | exact/wire (95 %) | wire/packets (95 %) | launches | host us (exact, packets) | rel rms | same bits |")
print("|---|---|---|---|---|---|---|---|---|---|---|---|")
for path in sys.argv[1:]:
    text = open(path).read()
    for r in json.loads(text[text.index("{"):])["rows"]:
        interval = "{:.2f} ({:.2f}-{:.2f})".format
        print(f"| {r['ranks']} | {r['bytes'] / 1048576:g} | {r['algorithm']} | {r['exact_us']:.0f} | {r['wire_us']:.0f} "
              f"| {r['packet_us']:.0f} | {interval(r['speedup'], *r['speedup_ci95'])} "
              f"| {interval(r['wire_over_packet'], *r['wire_over_packet_ci95'])} | {r['launches']:g} | {r['host_us']:.0f} ({r['exact_host_us']:.0f}, {r['packet_host_us']:.0f}) "
              f"| {r['rel_rms_error']:.4f} | {'yes' if r['identical'] else 'NO'} |")
