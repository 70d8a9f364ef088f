"""The Python recorder on the CPU, with whatever torch there is: numbers against a plain computation, equal training bits,
accumulation, clipping, loss scalers, ties, shards, hostile paths, what a killed process leaves, how many calls into torch a
step may make, and batches on a device that answers late."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import warnings
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.join(HERE, "..", "..", "python")
sys.path.insert(0, PACKAGE)

import torch  # noqa: E402
from torch import nn  # noqa: E402

from halfwire import parity  # noqa: E402
from halfwire.parity import Recorder  # noqa: E402

torch.set_num_threads(1)  # the tensors are small, and threads that wait for each other are slow on a busy machine
HASH = re.compile("^[0-9a-f]{16}$")
HEADER = {"halfwire_parity": int, "rank": int, "world_size": int, "seed": int, "program": str, "versions": dict,
          "precision": str, "halfwire": (dict, type(None)), "accumulation": int, "sharded": bool, "reduced": bool,
          "elements": int, "sampled_elements": int, "dropout": (int, float), "tied": int, "tied_expected": bool,
          "resumed_from": int, "warmup": int}
STEP = {"step": int, "samples": int, "loss": float, "loss_scale": float, "skipped": bool, "batch_hash": "hash",
        "rng_hash": "hash", "tied_apart": int, "groups": list}
GROUP = {"lr": float, "grad_norm": float, "grad_norm_clipped": float, "grad_hash": "hash", "update_norm": float,
         "unchanged": float, "param_norm": float, "param_sum": float, "param_hash": "hash", "nonfinite": int,
         "state_dtype": str}


def refuse(name):
    raise ValueError(f"{name} is no JSON")


def lines(path, rank=0):
    """Every line of a record, held against docs/parity-record.md."""
    with open(os.path.join(path, f"rank{rank}.jsonl"), encoding="utf-8") as f:
        text = f.read()
    assert text.endswith("\n"), "the last line is not whole"
    result = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    for record in result:
        check(record, HEADER if "halfwire_parity" in record else STEP)
        for group in record.get("groups", []):
            check(group, GROUP)
    return result


def check(record, fields):
    for name, value in record.items():
        kind = fields[name]
        if kind == "hash":
            assert HASH.match(value), (name, value)
        elif kind is float:
            assert isinstance(value, (int, float)) and not isinstance(value, bool) or value in ("nan", "inf", "-inf"), name
        else:
            assert isinstance(value, kind), (name, value)


def network(dtype=torch.float32, dropout=0.0):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(33, 65), nn.Dropout(dropout), nn.ReLU(), nn.Linear(65, 7)).to(dtype)


def batches(count, dtype=torch.float32):
    g = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield torch.randn(16, 33, generator=g).to(dtype), torch.randint(0, 7, (16,), generator=g)


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x).float(), y)


class Scaler:
    """Does what torch's GradScaler does, on the CPU and in every version."""

    def __init__(self, scale, fused=False):
        self._scale, self._enabled, self.fused = torch.tensor(scale), True, fused

    def scale(self, loss):
        return loss * self._scale

    def step(self, optimizer):
        grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
        self.bad = not all(bool(torch.isfinite(g).all()) for g in grads)
        if self.fused:
            optimizer.grad_scale, optimizer.found_inf = self._scale.clone(), torch.tensor(float(self.bad))
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
            return
        for g in grads:
            g.div_(self._scale)
        if not self.bad:
            optimizer.step()

    def update(self):
        self._scale = self._scale * (0.5 if self.bad else 1.0)


class FusedSGD(torch.optim.Optimizer):
    """Unscales and skips by itself, as torch's fused optimizers do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        if self.found_inf.item():
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / self.grad_scale * group["lr"])


class LateBlock(parity._Block):
    """Results as from a device: on their way when sent, there only when asked for the third time or waited for."""

    def __init__(self, *args):
        super().__init__(*args)
        counts = [len(view) for view in self.on_host]
        self.host = torch.full_like(self.device, 0xA5)
        a, b = 8 * counts[0], 8 * (counts[0] + counts[1])
        self.on_host = (self.host[:a].view(torch.float64), self.host[a:b].view(torch.int64),
                        self.host[b:].view(torch.float32))
        self.scalars_on_host = self.on_host[2][:self.tail]

    def send(self):
        self.sent, self.asked = self.device.clone(), 0

    def ready(self):
        self.asked += 1
        if self.asked == 3:
            self.host.copy_(self.sent)
        return self.asked >= 3

    def wait(self):
        self.host.copy_(self.sent)


MASK, MIX = 2**64 - 1, 0x9E3779B97F4A7C15


def factor(i, salt):
    x = i + salt
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        x ^= x >> shift
        x = x * multiplier & MASK
        if x >> 63:  # the shifts are of signed numbers
            x -= 1 << 64
    return (x ^ (x >> 31)) | 1


COLUMNS = [factor(i, 1) for i in range(4096)]


def plain_hash(tensor):
    """What the recorder says of a tensor on a device, computed one word after the other."""
    tensor = tensor.contiguous().reshape(-1)
    tensor = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    words = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)).tolist()
    whole = len(words) // 4096 * 4096 if len(words) > 4096 else 0
    h = sum(sum(w * c for w, c in zip(words[at:at + 4096], COLUMNS)) * factor(at // 4096, 1 << 40)
            for at in range(0, whole, 4096))
    rest = sum(w * c for w, c in zip(words[whole:], COLUMNS))
    return (h * MIX + rest if whole < len(words) and whole else h + rest) & MASK


def batch_hash(tensors):
    h = 0
    for t in tensors:
        h = h * MIX + plain_hash(t) & MASK
    return f"{h:016x}"


class RecorderTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name="run"):
        return os.path.join(self.folder.name, name)

    def test_numbers_are_those_of_a_plain_computation(self):
        model = network()
        groups = [list(model[0].parameters()), list(model[3].parameters())]
        optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "lr": 1e-2}], lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 4))
        recorder = Recorder.attach(optimizer, self.path(), model=model, seed=3, warmup=4)
        expected = []
        for step, (x, y) in enumerate(batches(6)):
            loss = loss_of(model, x, y)
            recorder.batch(x, y)
            recorder.loss(loss)
            optimizer.zero_grad()
            loss.backward()

            def norm(tensors):
                return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors))

            whole = [norm([p.grad for p in g]) for g in groups]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
            clipped = [norm([p.grad for p in g]) for g in groups]
            before = [[p.detach().clone() for p in g] for g in groups]
            rates = [g["lr"] for g in optimizer.param_groups]
            optimizer.step()
            schedule.step()
            for i, g in enumerate(groups):
                n = sum(p.numel() for p in g)
                expected.append({
                    "lr": rates[i], "grad_norm": whole[i], "grad_norm_clipped": clipped[i],
                    "update_norm": norm([p.detach() - b for p, b in zip(g, before[i])]),
                    "param_norm": norm([p.detach() for p in g]),
                    "param_sum": sum(float(p.detach().double().sum()) for p in g),
                    "unchanged": sum(int(((p.detach() == b) & (p.grad != 0)).sum()) for p, b in zip(g, before[i])) / n})
        recorder.close()
        header, *steps = lines(self.path())
        self.assertEqual((header["elements"], header["sampled_elements"], header["precision"], header["warmup"]),
                         (2672, 2672, "fp32", 4))
        self.assertEqual([s["step"] for s in steps], list(range(6)))
        self.assertEqual([s["samples"] for s in steps], [16 * (i + 1) for i in range(6)])
        got = [g for s in steps for g in s["groups"]]
        for g, e in zip(got, expected):
            for name, value in e.items():
                self.assertAlmostEqual(g[name], value, delta=1e-5 * abs(value) + 1e-7, msg=name)
            self.assertEqual((g["nonfinite"], g["state_dtype"]), (0, "float32"))
        self.assertTrue(any(g["grad_norm"] > g["grad_norm_clipped"] * 1.01 for g in got))
        self.assertEqual(len({g["param_hash"] for g in got}), len(got))

    def train(self, recorded, dtype, optimizer_of, dropout=0.1):
        model = network(dtype, dropout)
        optimizer = optimizer_of(model.parameters())
        recorder = Recorder.attach(optimizer, self.path(recorded), model=model) if recorded else None
        for x, y in batches(40, dtype):
            loss = loss_of(model, x, y)
            if recorder:
                recorder.batch(x, y)
                recorder.loss(loss)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        if recorder:
            recorder.close()
        return [p.detach().clone() for p in model.parameters()]

    def test_training_bits_are_the_same_with_and_without(self):
        kinds = {"adamw": lambda p: torch.optim.AdamW(p, lr=1e-2), "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}
        for name, kind in kinds.items():
            for dtype in (torch.float32, torch.bfloat16):
                with self.subTest(name=name, dtype=dtype):
                    label = f"{name}-{dtype}"
                    plain, recorded = self.train(None, dtype, kind), self.train(label, dtype, kind)
                    self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain, recorded)))
                    header, *steps = lines(self.path(label))
                    self.assertEqual(header["precision"], "fp32" if dtype == torch.float32 else "bf16")
                    self.assertEqual(header["dropout"], 0.1)
                    self.assertEqual(len(steps), 40)
                    # Equal runs have equal hashes.
                    self.train(label + "-again", dtype, kind)
                    again = lines(self.path(label + "-again"))[1:]
                    for a, b in zip(steps, again):
                        self.assertEqual(a, b)

    def test_detail_at_the_first_steps_and_then_now_and_then(self):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Recorder.attach(optimizer, self.path(), model=model, dense=3, every=5)
        for x, y in batches(12):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        for r in list(parity._observers):
            r.close()
        steps = lines(self.path())[1:]
        self.assertEqual([s["step"] for s in steps if "update_norm" in s["groups"][0]], [0, 1, 2, 5, 10])
        self.assertTrue(all("lr" in s["groups"][0] for s in steps))
        self.assertEqual([s["step"] for s in steps if "rng_hash" in s], [0, 1, 2, 5, 10])

    def test_losses_and_batches_of_micro_batches(self):
        def run(name, after=False, swap=False):
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            recorder = Recorder.attach(optimizer, self.path(name), accumulation=2)
            losses, data = [], list(batches(8))
            for i in range(0, 8, 2):
                optimizer.zero_grad()
                mean = 0.0
                for x, y in reversed(data[i:i + 2]) if swap else data[i:i + 2]:
                    recorder.batch(x, y)
                    loss = loss_of(model, x, y)
                    if not after:
                        recorder.loss(loss)
                    mean += loss.item() / 2
                    (loss / 2).backward()
                optimizer.step()
                if after:
                    recorder.loss(mean)
                losses.append(mean)
            recorder.close()
            steps = lines(self.path(name))[1:]
            for s, loss in zip(steps, losses):
                self.assertAlmostEqual(s["loss"], loss, places=5)
            return [s["batch_hash"] for s in steps]

        hashes = run("before")
        self.assertEqual(len(set(hashes)), 4)
        self.assertEqual(run("after", after=True), hashes)
        self.assertTrue(set(run("swapped", swap=True)).isdisjoint(hashes))

    def test_device_hash_depends_on_every_bit_and_its_place(self):
        model = network()
        recorder = Recorder.attach(torch.optim.SGD(model.parameters(), lr=0.1), self.path())
        for n in (1, 3, 64, 5000):
            base = torch.zeros(n, dtype=torch.int32)
            seen = {int(recorder._hash_of(base))}
            for i in range(0, n, max(1, n // 40)):
                for bit in (0, 13, 31):
                    t = base.clone()
                    t[i] = -2**31 if bit == 31 else 1 << bit
                    seen.add(int(recorder._hash_of(t)))
            self.assertEqual(len(seen), 1 + 3 * len(range(0, n, max(1, n // 40))))
        recorder.close()

    def follow(self, name, steps, batch_of, dense=0, every=20, start=0, skip=(), close=True):
        """Trains with batches as on a device, written over as soon as batch() and loss() return, and holds the record of
        them against what was there. Returns the step lines of this run."""
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = Scaler(8.0) if skip else None
        memory, loss_memory, expected = {}, torch.zeros(()), []
        with mock.patch.object(parity, "_Block", LateBlock):
            recorder = Recorder.attach(optimizer, self.path(name), scaler=scaler, dense=dense, every=every, step=start)
            recorder._hashes_on_host = False
            for step, (x, y) in zip(range(start, start + steps), batches(steps)):
                optimizer.zero_grad()
                hashed, total, micro = [], 0.0, batch_of(step)
                loss = loss_of(model, x, y)
                for k, tensors in enumerate(micro):
                    hashed.extend(t.clone() for t in tensors)
                    static = []
                    for t in tensors:  # a loop with buffers of its own, as those of a captured graph
                        key = (len(static), tuple(t.shape), t.dtype)
                        static.append(memory.setdefault(key, torch.empty_like(t)))
                        static[-1].copy_(t)
                    loss_memory.copy_(loss.detach() * (1 + k))
                    recorder.batch(*static, samples=1)
                    recorder.loss(loss_memory)
                    total += float(loss_memory)
                    loss_memory.fill_(float("nan"))
                    for t in static:
                        t.zero_()
                (scaler.scale(loss) if scaler else loss).backward()
                if step in skip:
                    next(model.parameters()).grad[0, 0] = float("inf")
                expected.append((step, batch_hash(hashed), total / len(micro)))
                if scaler:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
            if close:
                recorder.close()
        self.assertFalse([r for r in recorder._pending] if close else [])
        got = [r for r in lines(self.path(name)) if "step" in r][-steps:]
        self.assertEqual([(s["step"], s["batch_hash"]) for s in got], [e[:2] for e in expected])
        for s, e in zip(got, expected):
            self.assertAlmostEqual(s["loss"], e[2], delta=1e-5 * e[2])
        return got

    def test_batches_on_a_device(self):
        g = torch.Generator().manual_seed(9)

        def tokens(*shape, dtype=torch.int64):
            t = torch.randint(0, 2 if dtype == torch.bool else 120, shape, generator=g)
            return t.to(dtype)

        def two(step):
            return [(tokens(4, 33), tokens(4, 33, dtype=torch.int32))]

        with self.subTest("one shape, closed in the middle of a block"):
            for steps in (1, 19, 20, 21, 47):
                self.follow(f"same{steps}", steps, two)
        with self.subTest("blocks that no step in detail ends"):
            self.follow("sparse", 75, two, every=1000)
        with self.subTest("every step in detail"):
            self.follow("detail", 25, two, every=1)
        with self.subTest("types"):
            for dtype in (torch.bool, torch.uint8, torch.int16, torch.float32, torch.bfloat16):
                self.follow(str(dtype), 25, lambda step: [(tokens(3, 50, dtype=dtype),)])
        with self.subTest("shapes that change and come back, more of them than rings"):
            self.follow("shapes", 60, lambda step: [(tokens(2, 8 + step % 7), tokens(2, 8 + step % 3))])
            self.follow("new", 30, lambda step: [(tokens(2, 8 + step),)])
        with self.subTest("accumulation, of as many batches in some steps as in others or not"):
            self.follow("accumulation", 45, lambda step: [(tokens(2, 9),)] * 3)
            self.follow("uneven", 45, lambda step: [(tokens(2, 9), tokens(2))] * (1 + step % 5))
            self.follow("ring", 3, lambda step: [(tokens(2, 9),)] * 70)
        with self.subTest("more batches than a block has hashes for"):
            self.follow("many", 3, lambda step: [(tokens(2, 3),)] * 600)
            self.follow("many-new", 2, lambda step: [(tokens(2 + i),) for i in range(530)])
            self.follow("many-mixed", 4, lambda step: [(tokens(2, 3),)] + [(tokens(2 + i),) for i in range(520 * (step == 2))]
                        + [(tokens(2, 3),)])
        with self.subTest("more words than columns, and too many to be copied"):
            for n in (4096, 4097, 8192):
                self.follow(f"long{n}", 22, lambda step: [(tokens(n),)] if step % 8 == 0 else [(tokens(n)[:5],)])
            self.follow("large", 3, lambda step: [(tokens(9000),)])
        with self.subTest("skipped in the middle of a block"):
            got = self.follow("skipped", 47, two, skip=(7, 8, 30))
            self.assertEqual([s["step"] for s in got if s["skipped"]], [7, 8, 30])
            self.assertEqual([s["step"] for s in got if "grad_norm" in s["groups"][0]], [0, 7, 8, 20, 30, 40])
            scales = [s["loss_scale"] for s in got]
            self.assertEqual([scales[i] for i in (0, 7, 8, 9, 30, 31)], [8.0, 8.0, 4.0, 2.0, 2.0, 1.0])
        with self.subTest("resumed"):
            self.follow("resumed", 27, two)
            got = self.follow("resumed", 30, two, start=23)
            record = lines(self.path("resumed"))
            self.assertEqual([r.get("step", -1) for r in record], [-1, *range(27), -1, *range(23, 53)])
            self.assertEqual([s["step"] for s in got if "rng_hash" in s], [40])

    def test_batches_not_contiguous(self):
        model = network()
        recorder = Recorder.attach(torch.optim.SGD(model.parameters(), lr=0.1), self.path(), dense=0)
        recorder._hashes_on_host = False
        data = torch.arange(60).reshape(3, 4, 5)
        for _ in range(3):
            recorder.batch(data.permute(2, 0, 1))
            recorder._before()
            recorder._after()
        recorder.close()
        self.assertEqual({s["batch_hash"] for s in lines(self.path())[1:]}, {batch_hash([data.permute(2, 0, 1)])})

    def test_a_batch_without_its_step_is_not_recorded(self):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = Recorder.attach(optimizer, self.path(), dense=0)
        recorder._hashes_on_host = False
        for i in range(7):
            recorder.batch(torch.arange(i, i + 5))
            recorder.loss(float(i))
            if i < 6:
                optimizer.step()
        recorder.close()
        steps = lines(self.path())[1:]
        self.assertEqual([s["batch_hash"] for s in steps], [batch_hash([torch.arange(i, i + 5)]) for i in range(6)])

    @unittest.skipUnless(hasattr(torch, "_foreach_copy_"), "torch is too old to copy many tensors at once")
    def test_calls_into_torch_are_few(self):
        """Each costs a step on a GPU as much as one of its own kernels does."""
        from torch.utils._python_dispatch import TorchDispatchMode

        class Count(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                counts[-1] += 1
                return function(*args, **(kwargs or {}))

        def counted(name):
            method = getattr(Recorder, name)

            def call(self, *args, **kwargs):
                with Count():
                    return method(self, *args, **kwargs)
            return call

        names = ("batch", "loss", "_before", "_after", "_clipping")
        Counted = type("Counted", (Recorder,), {n: counted(n) for n in names})
        for scaled, bound, detail_bound in ((False, 3, 32), (True, 4, 33)):
            counts = []
            model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(40)])
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            scaler = Scaler(2.0) if scaled else None
            # On a device elements that are not finite are not counted, and batches hashed there.
            with mock.patch.object(Recorder, "_count_nonfinite", lambda *_: None):
                recorder = Counted.attach(optimizer, self.path(f"scaled{scaled}"), model=model, dense=0, every=20, scaler=scaler)
                recorder._hashes_on_host = False
                for i in range(121):
                    counts.append(0)
                    optimizer.zero_grad(set_to_none=True)
                    x = torch.arange(20.0).reshape(4, 5) + i
                    loss = model(x).square().mean()
                    recorder.batch(x.long())
                    recorder.loss(loss)
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    scaler.step(optimizer) if scaler else optimizer.step()
                recorder.close()
            self.assertEqual(len(lines(self.path(f"scaled{scaled}"))), 122)
            ordinary = [n for i, n in enumerate(counts) if i % 20 and i > 20]
            # Some reads from the host memory of the block before count as calls.
            self.assertLessEqual(max(ordinary), bound + 3)
            self.assertLessEqual(sum(ordinary), bound * len(ordinary) + 3 * 5)
            detailed = counts[40::20]
            self.assertLessEqual(max(detailed), detail_bound)
            self.assertGreater(min(detailed), 15)  # it does count

    def test_layout_in_memory_changes_nothing(self):
        def run(name, lay_out):
            torch.manual_seed(2)
            params = [nn.Parameter(torch.randn(6, 10)), nn.Parameter(torch.randn(2, 3, 4, 5)), nn.Parameter(torch.randn(7))]
            optimizer = torch.optim.SGD(params, lr=0.1)
            if lay_out:
                params[0].data = params[0].data.t().contiguous().t()
                params[1].data = params[1].data.to(memory_format=torch.channels_last)
            recorder = Recorder.attach(optimizer, self.path(name))
            g = torch.Generator().manual_seed(3)
            for step in range(3):
                for p in params:
                    grad = torch.randn(p.shape, generator=g)
                    p.grad = torch.empty_like(p).copy_(grad) if lay_out else grad
                if step == 1:
                    params[2].grad = None if lay_out else torch.zeros(7)
                optimizer.step()
                if step == 1 and lay_out:
                    params[0].data = params[0].data.contiguous()
            recorder.close()
            return lines(self.path(name))[1:]

        for a, b in zip(run("rows", False), run("columns", True)):
            a, b = a["groups"][0], b["groups"][0]
            for name in ("grad_hash", "param_hash", "unchanged", "update_norm", "param_sum"):
                self.assertEqual(a[name], b[name])

    def test_a_parameter_that_takes_another_shape(self):
        p = nn.Parameter(torch.arange(12.0).reshape(3, 4))
        optimizer = torch.optim.SGD([p], lr=1.0)
        recorder = Recorder.attach(optimizer, self.path())
        for shape in ((3, 4), (4, 3), (12,), (1, 12)):
            p.grad = None
            p.data = p.data.reshape(shape)
            p.grad = torch.ones(shape)
            optimizer.step()
        recorder.close()
        sums = [s["groups"][0]["param_sum"] for s in lines(self.path())[1:]]
        self.assertEqual(sums, [54.0, 42.0, 30.0, 18.0])

    def test_double_precision(self):
        params = [nn.Parameter(torch.ones(5, dtype=torch.float64)), nn.Parameter(torch.ones(4))]
        optimizer = torch.optim.SGD(params, lr=0.5)
        recorder = Recorder.attach(optimizer, self.path())
        for p in params:
            p.grad = torch.full_like(p, 2.0)
        torch.nn.utils.clip_grad_norm_(params, 3.0)
        optimizer.step()
        recorder.close()
        group = lines(self.path())[1]["groups"][0]
        for name, value in {"grad_norm": 6.0, "grad_norm_clipped": 3.0, "update_norm": 1.5, "param_norm": 1.5,
                            "param_sum": 4.5}.items():
            self.assertAlmostEqual(group[name], value, places=5, msg=name)

    def test_scaler_that_skips(self):
        for fused in (False, True):
            with self.subTest(fused=fused):
                model = network()
                optimizer = (FusedSGD if fused else torch.optim.SGD)(model.parameters(), lr=0.1)
                scaler = Scaler(2.0**127, fused)  # gradients overflow until it has been halved some times
                recorder = Recorder.attach(optimizer, self.path(f"fused{fused}"), model=model, scaler=scaler)
                for x, y in batches(12):
                    optimizer.zero_grad()
                    loss = loss_of(model, x, y)
                    recorder.loss(loss)
                    scaler.scale(loss * 8).backward()
                    scaler.step(optimizer)
                    scaler.update()
                recorder.close()
                steps = lines(self.path(f"fused{fused}"))[1:]
                self.assertEqual(len(steps), 12)
                skipped = [s["skipped"] for s in steps]
                self.assertTrue(skipped[0] and not skipped[-1] and 0 < sum(skipped) < 12, skipped)
                scales = [s["loss_scale"] for s in steps]
                self.assertEqual(scales[0], 2.0**127)
                for before, after, skip in zip(scales, scales[1:], skipped):
                    self.assertEqual(after, before / 2 if skip else before)
                self.assertIn(steps[0]["groups"][0]["grad_norm"], ("inf", "nan"))
                self.assertGreater(steps[0]["groups"][0]["nonfinite"], 0)
                if not fused:
                    self.assertTrue(0 < steps[-1]["groups"][0]["grad_norm"] < 100)
                    self.assertNotIn("update_norm", steps[0]["groups"][0])

    def test_fused_gradients_are_unscaled(self):
        model = network()
        optimizer = FusedSGD(model.parameters(), lr=0.1)
        recorder = Recorder.attach(optimizer, self.path(), model=model, scaler=Scaler(1024.0, True))
        x, y = next(batches(1))
        loss = loss_of(model, x, y)
        loss.backward()
        norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in model.parameters()))
        for p in model.parameters():
            p.grad.mul_(1024)
        recorder._scaler.step(optimizer)
        recorder.close()
        self.assertAlmostEqual(lines(self.path())[1]["groups"][0]["grad_norm"], norm, delta=1e-5 * norm)

    def test_ties(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
                self.head.weight = self.embedding.weight
                self.config = type("Config", (), {"tie_word_embeddings": True})()

        for lost in (None, "copy", "change"):
            model = Tied()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            recorder = Recorder.attach(optimizer, self.path(str(lost)), model=model)
            for step in range(4):
                if step == 2 and lost:
                    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
                    if lost == "change":
                        model.head.weight.data[0, 0] += 1
                model.head(model.embedding(torch.tensor([1, 2]))).sum().backward()
                optimizer.step()
            recorder.close()
            header, *steps = lines(self.path(str(lost)))
            self.assertEqual((header["tied"], header["tied_expected"]), (1, True))
            apart = [s["tied_apart"] for s in steps]
            # A copy parts from its twin with the first update after it.
            self.assertEqual(apart, {None: [0, 0, 0, 0], "copy": [0, 0, 0, 1], "change": [0, 0, 1, 1]}[lost])

    def test_the_optimizer_keeps_its_recorder(self):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Recorder.attach(optimizer, self.path())
        import gc
        gc.collect()
        for x, y in batches(3):
            loss_of(model, x, y).backward()
            optimizer.step()
        self.assertEqual(len(parity._observers), 1)
        next(iter(parity._observers)).close()
        self.assertEqual(len(lines(self.path())), 4)
        loss_of(model, x, y).backward()
        optimizer.step()  # closed: nothing happens
        self.assertEqual(len(lines(self.path())), 4)

    def test_gradients_that_come_and_go(self):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = Recorder.attach(optimizer, self.path(), model=model)
        x, y = next(batches(1))
        for step in range(4):
            optimizer.zero_grad(set_to_none=True)
            loss_of(model, x, y).backward()
            if step == 1:
                for p in model[0].parameters():
                    p.grad = None
            if step == 2:
                for p in model.parameters():
                    p.grad = None
            optimizer.step()
        recorder.close()
        norms = [s["groups"][0]["grad_norm"] for s in lines(self.path())[1:]]
        self.assertTrue(norms[0] > norms[1] > 0 and norms[2] == 0 and norms[3] > 0, norms)

    def test_paths(self):
        model = network()

        def attach(path, **options):
            return Recorder.attach(torch.optim.SGD(model.parameters(), lr=0.1), path, **options)

        attach(self.path("a")).close()
        with self.assertRaisesRegex(FileExistsError, "directory of its own"):
            attach(self.path("a"))
        with open(self.path("plain"), "w") as f:
            f.write("text")
        for bad in (self.path("plain"), self.path("plain/below"), ""):
            with self.assertRaises(OSError):
                attach(bad)
        os.mkdir(self.path("link"))
        os.symlink(self.path("plain"), self.path("link/rank0.jsonl"))
        os.mkdir(self.path("fifo"))
        os.mkfifo(self.path("fifo/rank0.jsonl"))
        os.makedirs(self.path("dir/rank0.jsonl"))
        for name in ("link", "fifo", "dir"):
            for step in (0, 5):
                with self.assertRaises(OSError, msg=name):
                    attach(self.path(name), step=step)
        with open(self.path("plain")) as f:
            self.assertEqual(f.read(), "text")
        for options in (dict(rank=2, world_size=2), dict(dense=-1), dict(every=0), dict(sample_bytes=0),
                        dict(sample_bytes=1 << 40), dict(step=-1)):
            with self.assertRaises(ValueError):
                attach(self.path("never"), **options)
        with self.assertRaises(ValueError):
            Recorder.attach(torch.optim.SGD([{"params": []}], lr=0.1), self.path("never"))
        self.assertFalse(os.path.exists(self.path("never")))

    def test_a_resumed_run_goes_on_after_the_last_whole_line(self):
        def steps(step, count):
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            recorder = Recorder.attach(optimizer, self.path(), step=step)
            for x, y in batches(count):
                loss_of(model, x, y).backward()
                optimizer.step()
            recorder.close()

        steps(0, 4)
        with open(self.path("run/rank0.jsonl"), "a") as f:
            f.write('{"step":4,"gr')
        steps(3, 2)
        record = lines(self.path())
        self.assertEqual([r.get("step", r.get("resumed_from", "header")) for r in record], ["header", 0, 1, 2, 3, 3, 3, 4])

    def test_an_error_ends_the_recording_and_not_the_training(self):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = Recorder.attach(optimizer, self.path())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for i, (x, y) in enumerate(batches(5)):
                if i == 2:
                    os.close(recorder._fd)
                    recorder._fd = os.open(os.devnull, os.O_RDONLY)  # writing fails
                loss_of(model, x, y).backward()
                optimizer.step()
        told = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
        self.assertEqual(len(told), 1, told)
        self.assertIn("recording ended", told[0])
        self.assertGreaterEqual(len(lines(self.path())), 2)

    def test_an_error_loses_no_step_before_it(self):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            recorder = Recorder.attach(optimizer, self.path(), dense=0)
            for i, (x, y) in enumerate(batches(40)):
                recorder.batch(x if i != 33 else "no tensor")
                loss_of(model, x, y).backward()
                optimizer.step()
        self.assertEqual(len([w for w in caught if issubclass(w.category, RuntimeWarning)]), 1)
        self.assertEqual([s["step"] for s in lines(self.path())[1:]], list(range(33)))

    def test_a_full_disk_leaves_whole_lines(self):
        program = f"""
import resource, signal, sys, warnings; sys.path.insert(0, {PACKAGE!r})
import torch
from halfwire.parity import Recorder
p = torch.nn.Parameter(torch.ones(100))
optimizer = torch.optim.SGD([p], lr=0.1)
recorder = Recorder.attach(optimizer, {self.path()!r}, dense=0)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for i in range(200):
        recorder.loss(float(i))
        p.grad = torch.ones(100)
        optimizer.step()
assert len(caught) == 1 and "recording ended" in str(caught[0].message), caught
assert bool((p == p[0]).all()) and float(p[0]) < -18, "the training went on"
"""
        subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
        steps = lines(self.path())[1:]
        self.assertGreater(len(steps), 21)  # more than the whole blocks that fit
        self.assertEqual([s["step"] for s in steps], list(range(len(steps))))
        self.assertGreater(os.path.getsize(self.path("run/rank0.jsonl")), 2900)

    def test_a_killed_process_leaves_whole_lines(self):
        # Lost: in detail the step under way and the last, otherwise a block and one.
        program = f"""
import os, sys; sys.path.insert(0, {PACKAGE!r})
import torch
from halfwire.parity import Recorder
p = torch.nn.Parameter(torch.ones(100))
optimizers = [torch.optim.SGD([p], lr=0.1) for _ in range(2)]
recorders = [Recorder.attach(optimizers[0], {self.path("detail")!r}, dense=10**9),
             Recorder.attach(optimizers[1], {self.path("blocks")!r}, dense=0)]
done = os.open({self.path("done")!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    p.grad = torch.ones(100)
    for recorder, optimizer in zip(recorders, optimizers):
        recorder.loss(1.0)
        optimizer.step()
    os.write(done, b".")
"""
        child = subprocess.Popen([sys.executable, "-c", program])
        try:
            name = self.path("blocks/rank0.jsonl")
            for _ in range(600):
                if os.path.exists(name) and os.path.getsize(name) > 20000:
                    break
                time.sleep(0.1)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
        for name, lost in (("detail", 2), ("blocks", 33)):
            steps = lines(self.path(name))[1:]
            self.assertGreater(len(steps), 20)
            self.assertEqual([s["step"] for s in steps], list(range(len(steps))))
            self.assertLessEqual(os.path.getsize(self.path("done")) - len(steps), lost)

    def test_end_of_the_program_writes_the_last_step(self):
        program = f"""
import sys; sys.path.insert(0, {PACKAGE!r})
import torch
from halfwire.parity import Recorder
p = torch.nn.Parameter(torch.ones(100))
optimizer = torch.optim.SGD([p], lr=0.1)
Recorder.attach(optimizer, {self.path()!r})
for _ in range(5):
    p.grad = torch.ones(100)
    optimizer.step()
"""
        subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
        self.assertEqual(len(lines(self.path())), 6)

    def test_import_needs_no_torch(self):
        program = f"import sys; sys.modules['torch'] = None; sys.path.insert(0, {PACKAGE!r}); import halfwire.parity"
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

    def test_data_parallel(self):
        """Two processes under DistributedDataParallel, and shards by fully_shard where there is such a thing."""
        worker = os.path.join(self.folder.name, "worker.py")
        with open(worker, "w") as f:
            f.write(f"""
import os, sys
sys.path.insert(0, {PACKAGE!r})
import torch, torch.distributed as dist
from torch import nn
from halfwire.parity import Recorder
kind, path = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
if kind == "ddp":
    net = nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.fsdp import fully_shard
    net = fully_shard(model)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
recorder = Recorder.attach(optimizer, path, model=net, accumulation=2)
g = torch.Generator().manual_seed(dist.get_rank())
for step in range(6):
    optimizer.zero_grad()
    for micro in range(2):
        if kind == "ddp":
            net.require_backward_grad_sync = micro == 1
        x = torch.randn(4, 32, generator=g)
        recorder.batch(x)
        loss = net(x).square().mean()
        recorder.loss(loss)
        (loss / 2).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    optimizer.step()
recorder.close()
dist.destroy_process_group()
""")
        kinds = ["ddp"]
        try:
            from torch.distributed.fsdp import fully_shard  # noqa: F401
            kinds.append("fsdp2")
        except Exception:  # noqa: BLE001  (some versions do not even import)
            pass
        for port, kind in enumerate(kinds):
            env = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000 + port),
                       WORLD_SIZE="2", OMP_NUM_THREADS="1")
            ranks = [subprocess.Popen([sys.executable, worker, kind, self.path(kind)], env=dict(env, RANK=str(r)))
                     for r in range(2)]
            self.assertEqual([p.wait(timeout=120) for p in ranks], [0, 0])
            records = [lines(self.path(kind), r) for r in range(2)]
            for record in records:
                self.assertEqual(len(record), 7)
                self.assertEqual(record[0]["world_size"], 2)
                self.assertEqual(record[0]["sharded"], kind == "fsdp2")
                self.assertEqual(record[1]["samples"], 16)
            elements = [r[0]["elements"] for r in records]
            whole = 32 * 64 + 64 + 64 * 8 + 8
            self.assertEqual(sum(elements), whole if kind == "fsdp2" else 2 * whole)
            for a, b in zip(records[0][1:], records[1][1:]):
                self.assertNotEqual(a["batch_hash"], b["batch_hash"])
                ga, gb = a["groups"][0], b["groups"][0]
                if kind == "ddp":
                    self.assertEqual({k: v for k, v in ga.items()}, {k: v for k, v in gb.items()})
                    norm, clipped = ga["grad_norm"], ga["grad_norm_clipped"]
                else:
                    norm = math.hypot(ga["grad_norm"], gb["grad_norm"])
                    clipped = math.hypot(ga["grad_norm_clipped"], gb["grad_norm_clipped"])
                self.assertGreater(norm, 0.051)
                self.assertAlmostEqual(clipped, 0.05, delta=1e-4)
        norms = {kind: [math.hypot(*(r[i]["groups"][0]["grad_norm"] for r in [lines(self.path(kind), k) for k in range(2)]))
                        for i in range(1, 7)] for kind in kinds}
        if "fsdp2" in norms:  # the same training, so the shards' norms joined are DDP's
            for a, b in zip(norms["ddp"], norms["fsdp2"]):
                self.assertAlmostEqual(a / math.sqrt(2), b, delta=1e-4 * b)

    def test_the_command_reads_it(self):
        command = os.environ.get("HALFWIRE_COMMAND")
        if not command:
            self.skipTest("HALFWIRE_COMMAND is not set")
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        recorder = Recorder.attach(optimizer, self.path(), model=model, seed=3)
        g = torch.Generator().manual_seed(1)
        for _ in range(150):
            x = torch.randn(32, 33, generator=g)
            loss = loss_of(model, x, x[:, :7].argmax(1))
            recorder.batch(x)
            recorder.loss(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        recorder.close()
        result = subprocess.run([command, "parity", "--json", self.path()], capture_output=True, text=True, timeout=60)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual([f for f in json.loads(result.stdout)["findings"] if f["severity"] != "note"], [])


if __name__ == "__main__":
    unittest.main()
