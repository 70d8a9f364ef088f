#!/usr/bin/env python3
"""Makes a large trace of a small one: its events N times, one copy after the other, with correlation ids of their own.
Usage: repeat_trace.py TRACE[.gz] BYTES OUT   (stops after the copy that reaches BYTES)"""
import gzip
import json
import sys

source, least, out = sys.argv[1], int(float(sys.argv[2])), sys.argv[3]
with (gzip.open if source.endswith(".gz") else open)(source, "rt") as f:
    document = json.load(f, strict=False)
events = document.pop("traceEvents")
timed = [e for e in events if e.get("ph") == "X" and "ts" in e]
first = min(e["ts"] for e in timed)
length = max(e["ts"] + e.get("dur", 0) for e in timed) - first + 1000
ids = 1 + max((e["args"].get("correlation", 0) for e in timed if isinstance(e.get("args"), dict)), default=0)
with open(out, "w") as f:
    f.write(json.dumps(document)[:-1] + (", " if document else "") + '"traceEvents": [\n')
    copies = 0
    while copies == 0 or f.tell() < least:
        for i, e in enumerate(events):
            if copies and "ts" in e:
                e["ts"] += length
                args = e.get("args")
                if isinstance(args, dict) and "correlation" in args:
                    args["correlation"] += ids
            f.write((",\n" if i or copies else "") + json.dumps(e))
        copies += 1
    f.write("\n]}\n")
print(f"{copies} copies of {len(events)} events")
