"""A small GPT trained on real text with DistributedDataParallel or FSDP2, to run with and without Halfwire.

It knows nothing of Halfwire:

    torchrun --nproc-per-node 4 examples/pytorch/gpt.py
    halfwire run --mode wire -- torchrun --nproc-per-node 4 examples/pytorch/gpt.py

The text is the source of Python's own standard library: on every machine that can run this. Several ranks can share one
GPU (--share-gpu); examples/pytorch/shared_gpu.sh starts the MPS daemon that makes this fast.
"""

import argparse
import glob
import hashlib
import json
import os
import sys
import time


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    p.add_argument("--context", type=int, default=256)
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--width", type=int, default=384)
    p.add_argument("--gradients", choices=["bf16", "fp16", "fp32"], default="bf16",
                   help="type in which DDP reduces gradients")
    p.add_argument("--bucket-mb", type=int, default=25)
    p.add_argument("--wrap", choices=["ddp", "fsdp2"], default="ddp")
    p.add_argument("--compile", action="store_true", help="torch.compile the model")
    p.add_argument("--experts", action="store_true", help="mixture of experts: one of each layer on each rank, by all-to-all")
    p.add_argument("--share-gpu", action="store_true", help="all ranks use GPU 0")
    p.add_argument("--json", metavar="FILE", help="rank 0 writes losses, step times and the hash of the parameters here")
    p.add_argument("--record", metavar="DIR", help="record the run for `halfwire parity` into this directory")
    return p.parse_args()


def prepare_shared_gpu(rank):
    """NCCL refuses two ranks on one GPU of one host; ranks that name different hosts talk through sockets."""
    for name, value in {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
                        "NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2", "NCCL_MAX_CTAS": "4"}.items():
        os.environ.setdefault(name, value)


WARMUP = 20
args = parse_arguments()
rank = int(os.environ.get("RANK", "0"))
world = int(os.environ.get("WORLD_SIZE", "1"))
if args.share_gpu:
    prepare_shared_gpu(rank)  # before NCCL reads its environment

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class Experts(nn.Module):
    """One expert a rank and layer: every token goes to the rank of its expert and comes back, as far as there is room."""

    def __init__(self, width, ranks):
        super().__init__()
        self.router = nn.Linear(width, ranks)
        self.expert = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.ranks = ranks

    def forward(self, x):
        from torch.distributed.nn.functional import all_to_all_single
        tokens = x.reshape(-1, x.shape[-1]).bfloat16()
        room = 2 * len(tokens) // self.ranks
        weight, chosen = self.router(x.reshape(len(tokens), -1)).softmax(-1).max(-1)
        place = F.one_hot(chosen, self.ranks).cumsum(0).gather(1, chosen[:, None]).squeeze(1) - 1
        fits = place < room
        slot = torch.where(fits, chosen * room + place, self.ranks * room)
        sent = tokens.new_zeros(self.ranks * room + 1, tokens.shape[1]).index_copy(0, slot, tokens)[:-1]
        got = all_to_all_single(torch.empty_like(sent), sent.contiguous())
        done = self.expert(got).to(tokens.dtype)
        back = all_to_all_single(torch.empty_like(done), done.contiguous())
        back = torch.cat([back, back.new_zeros(1, back.shape[1])])
        return (back[slot] * weight[:, None]).reshape(x.shape)


class GPT(nn.Module):
    def __init__(self, width, layers, context, heads=6):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def load_text():
    files = sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))
    return torch.frombuffer(bytearray(b"\n".join(open(f, "rb").read() for f in files)), dtype=torch.uint8)


def parameter_hash(model):
    h = hashlib.sha256()
    for name, p in model.named_parameters():
        if ".expert." in name:  # each rank's own
            continue
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        h.update(whole.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def wrapped(model, device):
    """The model in what trains it on all ranks, and in front of the loop."""
    if args.wrap == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        return torch.compile(model) if args.compile else model
    # An expert is no replica: nobody else has its gradients.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [name for name, _ in model.named_parameters() if ".expert." in name])
    ddp = DistributedDataParallel(torch.compile(model) if args.compile else model, device_ids=[device.index],
                                  bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True)
    hook = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}.get(args.gradients)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    return ddp


def record(optimizer, model):
    """The one line that records a run, behind the path of a checkout where the package is not installed."""
    sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python"))
    from halfwire.parity import Recorder
    return Recorder.attach(optimizer, args.record, model=model, seed=args.seed, warmup=WARMUP,
                           samples_per_step=args.batch * world)


def main():
    device = torch.device("cuda", 0 if args.share_gpu else int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.manual_seed(args.seed)
    model = GPT(args.width, args.layers, args.context).to(device)
    if args.experts:
        for block in model.blocks:
            block.mlp = Experts(args.width, world).to(device)
    ddp = wrapped(model, device)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    recorder = record(optimizer, ddp) if args.record else None
    text = load_text().to(device)
    pick = torch.Generator().manual_seed(args.seed * 1000 + rank)

    losses, times = [], []
    for step in range(args.steps):
        start = time.perf_counter()
        at = torch.randint(0, len(text) - args.context - 1, (args.batch,), generator=pick)
        rows = torch.stack([text[i:i + args.context + 1] for i in at.tolist()]).long()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = ddp(rows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        if recorder is not None:
            recorder.batch(at)
            recorder.loss(loss)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean.item())
        times.append(time.perf_counter() - start)
        if rank == 0 and (step % 20 == 0 or step == args.steps - 1):
            print(f"step {step:4d}  loss {losses[-1]:.4f}  {times[-1] * 1e3:.1f} ms", flush=True)

    if recorder is not None:
        recorder.close()
    hashes = [None] * world
    dist.all_gather_object(hashes, parameter_hash(model))
    if rank == 0:
        tail = losses[-20:]
        result = {"world": world, "steps": args.steps, "seed": args.seed,
                  "parameters": sum(p.numel() for p in model.parameters()), "loss_tail": sum(tail) / len(tail),
                  "step_ms": sorted(times)[len(times) // 2] * 1e3, "identical": len(set(hashes)) == 1,
                  "hash": hashes[0], "losses": losses}
        print(f"loss {result['loss_tail']:.4f} (mean of the last {len(tail)} steps), median step {result['step_ms']:.1f} ms, "
              f"replicas {'identical' if result['identical'] else 'DIFFER'}")
        if args.json:
            with open(args.json, "w") as f:
                json.dump(result, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
