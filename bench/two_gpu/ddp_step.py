"""One training step of examples/pytorch/gpt.py's model on one GPU a rank, taken apart: how long it is with gradients
synchronised and without, and how much the kernels of the backward pass slow down while collectives run beside them.

Knows nothing of Halfwire. Usage, once with --mode off and once with --mode wire:
    halfwire run --mode wire -n 2 -- python3 bench/two_gpu/ddp_step.py --json step.json
"""

import argparse
import json
import os
import sys
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=20, help="timed steps of each kind and batch size")
parser.add_argument("--width", type=int, default=1536)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--context", type=int, default=512)
parser.add_argument("--batches", default="24,8", help="sequences a rank and step, one measurement after the other")
parser.add_argument("--bucket-mb", type=int, default=25)
parser.add_argument("--json", required=True, metavar="FILE", help="rank 0 writes its result here")
options = parser.parse_args()

# The model's file reads the command line when it is imported.
sys.argv = ["gpt.py"]
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples", "pytorch"))
import gpt  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

TRAINED = 20  # synchronised steps before the replicas are compared
PROFILED, ROUNDS = 3, 2


def device_time(event):
    return getattr(event, "self_device_time_total", None) or getattr(event, "self_cuda_time_total", 0)


def kernels(work):
    """{name: [launches, microseconds]} of the GPU work of `work`."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return {e.key: [e.count, device_time(e)] for e in profile.key_averages() if device_time(e) > 0}


def is_communication(name):
    return "nccl" in name or "halfwire" in name


def main():
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.manual_seed(1)
    model = gpt.GPT(options.width, options.layers, options.context).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device.index], bucket_cap_mb=options.bucket_mb,
                                  gradient_as_bucket_view=True)
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-4, fused=True)
    text = gpt.load_text().to(device)
    pick = torch.Generator().manual_seed(1000 + rank)

    def batch(sequences):
        at = torch.randint(0, len(text) - options.context - 1, (sequences,), generator=pick)
        return torch.stack([text[i:i + options.context + 1] for i in at.tolist()]).long()

    synchronised_steps = 0

    def step(rows):
        nonlocal synchronised_steps
        synchronised_steps += ddp.require_backward_grad_sync
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = ddp(rows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def alone(rows):
        with ddp.no_sync():
            return step(rows)

    def milliseconds(one, rows):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        one(rows)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    def slowest_rank(times):
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, times)
        return [max(of_step) for of_step in zip(*gathered)]

    def measure(sequences):
        for _ in range(3):
            step(batch(sequences))
            alone(batch(sequences))
        with_ms, alone_ms = [], []
        for _ in range(options.steps):
            with_ms.append(milliseconds(step, batch(sequences)))
            alone_ms.append(milliseconds(alone, batch(sequences)))
        beside, undisturbed = {}, {}
        for _ in range(ROUNDS):
            for one, sums in ((step, beside), (alone, undisturbed)):
                for name, (launches, us) in kernels(lambda: [one(batch(sequences)) for _ in range(PROFILED)]).items():
                    old = sums.get(name, (0, 0.0))
                    sums[name] = (old[0] + launches, old[1] + us)
        # Kernels that both kinds of step launch equally often: neither the collectives nor the casts around them.
        both = [n for n in beside if n in undisturbed and beside[n][0] == undisturbed[n][0] and not is_communication(n)]
        per_step = 1e3 * PROFILED * ROUNDS
        largest = sorted(both, key=lambda n: -undisturbed[n][1])[:8]
        return {
            "batch": sequences, "step_ms": slowest_rank(with_ms), "compute_step_ms": slowest_rank(alone_ms),
            "compute_kernels_ms": sum(beside[n][1] for n in both) / per_step,
            "compute_kernels_alone_ms": sum(undisturbed[n][1] for n in both) / per_step,
            "nccl_kernels_ms": sum(t for n, (_, t) in beside.items() if "nccl" in n) / per_step,
            "codec_kernels_ms": sum(t for n, (_, t) in beside.items() if "halfwire" in n) / per_step,
            "codec_launches": sum(c for n, (c, _) in beside.items() if "halfwire" in n) / PROFILED / ROUNDS,
            "largest_kernels": [{"name": n[:80], "beside_us": beside[n][1] / beside[n][0],
                                 "alone_us": undisturbed[n][1] / undisturbed[n][0]} for n in largest],
        }

    sizes = [int(b) for b in options.batches.split(",")]
    for _ in range(TRAINED):
        loss = step(batch(sizes[0]))
    hashes = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, gpt.parameter_hash(model))
    # From here on steps without synchronisation alternate with the others: the replicas drift apart, which changes
    # nothing of what a step costs.
    result = {
        "parameters": sum(p.numel() for p in model.parameters()), "loss": loss.item(),
        "identical": len(set(hashes)) == 1, "hash": hashes[0], "batches": [measure(b) for b in sizes],
        "settings": {k: getattr(options, k) for k in ("steps", "width", "layers", "context", "batches", "bucket_mb")},
    }
    result["synchronised_steps"] = synchronised_steps
    if rank == 0:
        with open(options.json, "w") as f:
            json.dump(result, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
