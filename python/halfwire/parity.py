"""Records a PyTorch training run for `halfwire parity`. The files are described in docs/parity-record.md.

    from halfwire.parity import Recorder
    recorder = Recorder.attach(optimizer, "runs/exact-1", model=model)    # after the optimizer, before the loop
    ...
    recorder.loss(loss)                                                   # between forward and optimizer.step()

It hooks the optimizer's step and changes nothing: no random number is drawn, no tensor of the program is written, no
collective is called, and on a GPU nothing waits. Results stay on the device, are copied to pinned memory beside the
program's own work, and are written one step or a few later. An error inside the recorder ends the recording with a
warning, never the training.

Torch is imported when a recorder is attached, not before.
"""

import atexit
import collections
import ctypes
import functools
import hashlib
import json
import math
import os
import stat
import sys
import warnings
import weakref
import zlib

from . import __version__

_SAMPLE_BYTES = 64 << 20
_LEAST_SAMPLE_BYTES = 1 << 20  # of a group whose tensors all missed the sample
_COLUMNS = 4096
_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15
_SCALARS = 3  # loss, loss scale, found_inf
_MAX_PENDING = 8  # steps whose results may be on their way before the oldest is waited for

torch = None


def _need_torch():
    global torch
    if torch is None:
        import torch as module
        torch = module


def _fnv1a(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 & _MASK
    return h


def _join(a, b):
    """Two hashes as one; order matters."""
    return ((a ^ (a >> 29)) * _MIX + b) & _MASK


def _number(x):
    if math.isfinite(x):
        return x
    return "nan" if math.isnan(x) else "inf" if x > 0 else "-inf"


def _signed(x):
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


def _local(tensor):
    """What this rank holds of a tensor: the shard of a DTensor."""
    return getattr(tensor, "_local_tensor", tensor)


def _plain_name(name):
    for part in ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name


def _library():
    """Settings of a preloaded libhalfwire.so in this process, or None without one."""
    try:
        if not hasattr(ctypes.CDLL(None), "halfwire_version"):
            return None
    except OSError:
        return None
    fields = {"mode": "off", "format": "e4m3", "block": 128, "scale": "fp32", "min_bytes": None,
              "ops": "allreduce,reducescatter"}
    result = {}
    for field, default in fields.items():
        value = os.environ.get("HALFWIRE_" + field.upper()) or default
        if value is not None:
            result[field] = int(value) if field == "block" and str(value).isdigit() else value
    return result


class _Segment:
    """The sampled tensors of one group and one type, laid out one behind the other."""

    def __init__(self, group, dtype, device):
        self.group, self.dtype, self.device = group, dtype, device
        self.params, self.counts = [], []
        self.addresses, self.views = None, None

    def add(self, param, count):
        self.params.append(param)
        self.counts.append(count)

    def allocate(self):
        self.elements = sum(self.counts)
        size = torch.empty((), dtype=self.dtype).element_size()
        words = -(-self.elements * size // 4)
        # Few columns for a small sample, so that padding never outweighs what it pads.
        self.columns = min(_COLUMNS, max(64, 1 << (max(words, 1) - 1).bit_length() // 2))
        self.rows = -(-words // self.columns)
        self.before, self.after, self.grad = self._buffer(size), self._buffer(size), self._buffer(size)
        self.moved = None  # elements with a gradient that is not zero
        self.size = size

    def _buffer(self, size):
        raw = torch.zeros(self.rows * self.columns * 4, dtype=torch.uint8, device=self.device)
        return raw.view(torch.int32).view(self.rows, self.columns), raw.view(self.dtype)[:self.elements]

    def values(self):
        """Flat views of the parameters, made again where one has moved: 100 views cost as much as the rest."""
        addresses = [_local(p).data_ptr() for p in self.params]
        if addresses != self.addresses:
            self.addresses = addresses
            flat = [_local(p).detach() for p in self.params]
            # A view of what is not contiguous would be a copy that does not follow its parameter.
            self.views = [t.view(-1)[:n] for t, n in zip(flat, self.counts)] if all(t.is_contiguous() for t in flat) else None
        return self.views if self.views is not None else [_local(p).detach() for p in self.params]

    def gather(self, buffer, tensors):
        parts = []
        for tensor, count in zip(tensors, self.counts):
            flat = tensor.reshape(-1)
            parts.append(flat if flat.numel() == count else flat[:count])
        torch.cat(parts, out=buffer[1])


class _Slots:
    """Where the results of one step land: one block of bytes on the device and its copy on the host."""

    def __init__(self, device, params, segments, groups):
        # Eight-byte values first, so that every view is aligned.
        self.f64, self.i64, self.f32 = segments, 3 * segments + 2, 2 * params + 3 * segments + _SCALARS + groups
        total = 8 * (self.f64 + self.i64) + 4 * self.f32
        self.device = torch.zeros(total, dtype=torch.uint8, device=device)
        cuda = device.type == "cuda"
        self.host = torch.zeros(total, dtype=torch.uint8, pin_memory=True) if cuda else self.device
        self.event = torch.cuda.Event() if cuda else None
        a, b = 8 * self.f64, 8 * (self.f64 + self.i64)
        self.on_device = [self.device[:a].view(torch.float64), self.device[a:b].view(torch.int64),
                          self.device[b:].view(torch.float32)]
        self.on_host = [self.host[:a].view(torch.float64), self.host[a:b].view(torch.int64),
                        self.host[b:].view(torch.float32)]
        # Views of single values, made once: making them costs more than the kernels that fill them.
        self.sums = [self.on_device[0][i] for i in range(self.f64)]
        self.ints = [self.on_device[1][i] for i in range(self.i64)]
        self.params = params
        self.scalars = _SCALARS + groups  # first, then three for each segment, then norms
        self.norms = self.scalars + 3 * segments
        self.floats = [self.on_device[2][i] for i in range(self.norms)]

    def send(self):
        if self.event is not None:
            self.host.copy_(self.device, non_blocking=True)
            self.event.record()

    def ready(self):
        return self.event is None or self.event.query()


class _Step:
    """One step on its way into the file."""

    def __init__(self, index, slots):
        self.index, self.slots = index, slots
        self.losses = self.batches = self.samples = 0
        self.loss_value = None  # a loss that was a plain number
        self.batch_value = 0
        self.lrs = None
        self.detail = self.updated = self.before_clip = False
        self.counts = self.counts_before = None
        self.scale = self.scale_on_device = None
        self.grad_scaled = self.found_inf = self.skipped = None
        self.overflowed = False
        self.nonfinite = None
        self.rng = None
        self.apart = None
        self.apart_on_device = False
        self.state_dtype = None


_observers = weakref.WeakSet()
_observing = False


def _observe_clipping():
    """Lets recorders see the gradients as they are when torch's own functions are about to clip them."""
    global _observing
    if _observing:
        return
    _observing = True
    from torch.nn.utils import clip_grad
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "_clip_grads_with_norm_"):
        original = getattr(clip_grad, name, None)
        if original is None:
            continue

        def observed(parameters, *args, _original=original, **kwargs):
            if not isinstance(parameters, torch.Tensor):
                parameters = list(parameters)
            for recorder in list(_observers):
                recorder._clipping([parameters] if isinstance(parameters, torch.Tensor) else parameters)
            return _original(parameters, *args, **kwargs)

        observed = functools.wraps(original)(observed)
        setattr(clip_grad, name, observed)
        if getattr(torch.nn.utils, name, None) is original:
            setattr(torch.nn.utils, name, observed)


def _guarded(method):
    """A fault of the recorder ends the recording, not the training."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if self._closed:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as e:  # noqa: BLE001
            self._give_up(e)
            return None

    return call


class Recorder:
    """Writes `rank<R>.jsonl` into a directory. One for each optimizer; make it with `attach`."""

    @classmethod
    def attach(cls, optimizer, path, **options):
        """Starts recording `optimizer`'s steps into the directory `path`, which is made if missing. All ranks name the
        same directory. Raises FileExistsError if this rank's file is there already: a record is never overwritten. A
        resumed run (`step` above 0) goes on with the file, or begins one in a directory of its own.

        model            for names of the sample, tied weights, dropout; also tells DDP from others
        scaler           the GradScaler: loss scale, skipped steps
        accumulation     micro-batches in one optimizer step
        seed, warmup     for the header
        step             number of the first step; above 0 on a resumed run
        dense, every     norms of gradients, all that is said of the sample, and random states: at the
                         first `dense` steps, then at steps that `every` divides. lr, loss, scale, batch: at every step
        sample_bytes     upper bound of the sample, at most 64 MiB
        samples_per_step of all ranks together; otherwise from the first dimension of what batch() was given
        rank, world_size where torch.distributed and the environment do not say
        sharded, reduced, tied_expected, dropout: where the recorder cannot tell or is wrong
        """
        return cls(optimizer, path, **options)

    def __init__(self, optimizer, path, *, model=None, scaler=None, accumulation=1, seed=None, warmup=None, step=0,
                 dense=32, every=20, sample_bytes=_SAMPLE_BYTES, samples_per_step=None, rank=None, world_size=None,
                 sharded=None, reduced=None, tied_expected=None, dropout=None):
        _need_torch()
        self._closed, self._fd = True, -1  # until all is set up
        if dense < 0 or every < 1 or step < 0 or accumulation < 1:
            raise ValueError("dense and step must be at least 0, every and accumulation at least 1")
        if not 0 < sample_bytes <= _SAMPLE_BYTES:
            raise ValueError(f"sample_bytes is {sample_bytes}: it must be from 1 to {_SAMPLE_BYTES}")
        self._optimizer, self._scaler = optimizer, scaler
        self._step, self._first, self._dense, self._every = step, step, dense, every
        self._accumulation, self._samples_per_step = accumulation, samples_per_step
        self._samples = (samples_per_step or 0) * step
        self._count_samples = samples_per_step is not None or step == 0
        self._params = [[p for p in g["params"]] for g in optimizer.param_groups]
        every_param = [p for group in self._params for p in group]
        if not every_param:
            raise ValueError("the optimizer has no parameters")
        devices = {_local(p).device for p in every_param}
        if len(devices) > 1:
            raise ValueError(f"parameters are on {len(devices)} devices; record one device for each process")
        self._device = devices.pop()
        self._ids = {id(p) for p in every_param}
        self._rank, self._world = self._place(rank, world_size)

        self._names(model)
        self._choose_sample(sample_bytes)
        self._find_ties(model)
        self._free = []
        self._current = self._held = None
        self._loss_after = False
        self._pending = collections.deque()
        self._weights = {}
        self._state_dtype = None
        self._norm_takes_dtype = True
        self._rng = self._random_state() if self._in_detail(step) else None
        self._stepped = False
        self._pid = os.getpid()

        self._open(path)
        try:
            self._write(self._header(model, seed, warmup, sharded, reduced, tied_expected, dropout))
        except BaseException:
            os.close(self._fd)
            raise
        self._closed = False
        self._hook()
        _observe_clipping()
        _observers.add(self)
        weak = weakref.ref(self)
        self._at_exit = lambda: weak() and weak().close()
        atexit.register(self._at_exit)

    # What the program calls.

    @_guarded
    def loss(self, value):
        """The loss of one micro-batch, a tensor of one element or a number. Called between forward and
        optimizer.step(); a program that calls it after its first optimizer.step() is followed in that."""
        step = self._held if self._loss_after and self._held is not None else self._now()
        if isinstance(value, torch.Tensor):
            value = _local(value.detach()).reshape(())
            slot = step.slots.floats[0]
            if step.losses == 0:
                slot.copy_(value, non_blocking=True)
            else:
                slot.add_(value.to(slot.device, non_blocking=True))
        else:
            step.loss_value = (step.loss_value or 0.0) + float(value)
        step.losses += 1

    @_guarded
    def batch(self, *tensors, samples=None):
        """The tensors of one micro-batch, hashed where they are: pass those of the host if both exist."""
        step = self._now()
        for t in tensors:
            t = _local(t.detach())
            if t.device.type == "cpu":
                data = t.contiguous().reshape(-1).view(torch.uint8).numpy()
                step.batch_value = _join(step.batch_value, zlib.crc32(data) << 32 | zlib.adler32(data))
            else:
                slot = step.slots.ints[3 * len(self._segments)]
                if step.batches & 1 == 0:
                    self._hash_of(t, out=slot)
                else:
                    slot.mul_(_signed(_MIX)).add_(self._hash_of(t))
                step.batches |= 1
        step.batches |= 2
        step.samples += samples if samples is not None else (len(tensors[0]) if tensors and tensors[0].dim() else 0)

    @_guarded
    def before_clip(self):
        """Only for programs that clip with code of their own: called once the gradients are ready, before they
        are clipped. torch.nn.utils.clip_grad_norm_ and its kin are seen without it."""
        step = self._now()
        if step.before_clip or not self._in_detail(step.index):
            return
        step.before_clip = True
        grads, step.counts_before = self._gradients()
        self._norms(grads, step.slots, step.slots.norms + step.slots.params)

    def close(self):
        """Writes what is under way. Called at exit if not before."""
        if self._closed or os.getpid() != self._pid:
            return
        try:
            self._finish_held()
            self._drain(wait=True)
        except Exception as e:  # noqa: BLE001
            self._give_up(e)
        self._end()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # Setting up.

    @staticmethod
    def _place(rank, world_size):
        import torch.distributed as dist
        alive = dist.is_available() and dist.is_initialized()
        if rank is None:
            rank = dist.get_rank() if alive else int(os.environ.get("RANK", "0"))
        if world_size is None:
            world_size = dist.get_world_size() if alive else int(os.environ.get("WORLD_SIZE", "1"))
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size} ranks")
        return rank, world_size

    def _names(self, model):
        named = {id(p): _plain_name(n) for n, p in model.named_parameters()} if model is not None else {}
        self._name = {}
        for g, group in enumerate(self._params):
            for i, p in enumerate(group):
                self._name[id(p)] = named.get(id(p), f"group{g}.{i}")

    def _choose_sample(self, limit):
        ordered = []
        for g, group in enumerate(self._params):
            for p in group:
                if _local(p).numel() and _local(p).is_floating_point():
                    ordered.append((_fnv1a(self._name[id(p)].encode()), self._name[id(p)], g, p))
        ordered.sort(key=lambda entry: entry[:2])
        chosen, left, groups = [], limit, set()
        for _, _, g, p in ordered:
            size = _local(p).element_size()
            count = _local(p).numel()
            if not chosen:
                count = min(count, limit // size)
            if count and count * size <= left:
                chosen.append((g, p, count))
                left -= count * size
                groups.add(g)
        for _, _, g, p in ordered:
            if g not in groups:
                groups.add(g)
                chosen.append((g, p, min(_local(p).numel(), _LEAST_SAMPLE_BYTES // _local(p).element_size())))
        segments = {}
        for g, p, count in chosen:
            key = (g, _local(p).dtype)
            segments.setdefault(key, _Segment(g, key[1], self._device)).add(p, count)
        self._segments = [segments[key] for key in sorted(segments, key=str)]
        for s in self._segments:
            s.allocate()

    def _find_ties(self, model):
        self._ties, owners = [], {}
        if model is None:
            return
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is None or _local(p).numel() == 0:
                    continue
                key = (_local(p).data_ptr(), tuple(p.shape))
                if key in owners and owners[key] != (module, name):
                    self._ties.append((owners[key], (module, name)))
                else:
                    owners[key] = (module, name)

    def _open(self, path):
        os.makedirs(path, exist_ok=True)
        name = os.path.join(os.fspath(path), f"rank{self._rank}.jsonl")
        goes_on = self._first > 0  # a resumed run may go on with its file
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if goes_on else os.O_EXCL)
        try:
            self._fd = os.open(name, flags, 0o644)
        except FileExistsError:
            raise FileExistsError(f"{name} exists: a run needs a directory of its own") from None
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise OSError(f"{name} is not a plain file")
            end = os.fstat(self._fd).st_size
            while end > 0:  # a killed run may have left half a line
                begin = max(0, end - 65536)
                newline = os.pread(self._fd, end - begin, begin).rfind(b"\n")
                end = begin + newline + 1 if newline >= 0 else begin
                if newline >= 0:
                    break
            os.ftruncate(self._fd, end)
        except BaseException:
            os.close(self._fd)
            raise

    def _header(self, model, seed, warmup, sharded, reduced, tied_expected, dropout):
        every_param = [p for group in self._params for p in group]
        kinds = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        precisions = {kinds.get(p.dtype, "mixed") for p in every_param}
        if sharded is None:
            sharded = any(hasattr(p, "_local_tensor") and any(x.is_shard() for x in p.placements)
                          or type(p).__name__ == "FlatParameter" for p in every_param)
        if reduced is None and model is not None and type(model).__name__ == "DistributedDataParallel":
            reduced = True
        if dropout is None and model is not None:
            dropout = max([float(m.p) for m in model.modules()
                           if type(m).__name__.endswith("Dropout") or type(m).__name__.startswith("Dropout")] +
                          [float(m.dropout) for m in model.modules() if isinstance(getattr(m, "dropout", None), float)],
                          default=0.0)
        if tied_expected is None and model is not None:
            config = getattr(getattr(model, "module", model), "config", None)
            tied_expected = getattr(config, "tie_word_embeddings", None)
        versions = {"halfwire": __version__, "torch": str(torch.__version__), "python": sys.version.split()[0]}
        if torch.version.cuda:
            versions["cuda"] = torch.version.cuda
        header = {"halfwire_parity": 1, "rank": self._rank, "world_size": self._world, "seed": seed,
                  "program": " ".join(sys.argv)[:4096], "versions": versions,
                  "precision": precisions.pop() if len(precisions) == 1 else "mixed",
                  "accumulation": self._accumulation, "sharded": bool(sharded), "reduced": reduced,
                  "elements": sum(_local(p).numel() for p in every_param),
                  "sampled_elements": sum(s.elements for s in self._segments), "dropout": dropout,
                  "tied": len(self._ties) if model is not None else None,
                  "tied_expected": bool(tied_expected) if tied_expected is not None else None,
                  "resumed_from": self._first or None, "warmup": warmup}
        header = {k: v for k, v in header.items() if v is not None}
        header["halfwire"] = _library()
        return header

    def _hook(self):
        # The optimizer keeps its recorder alive: a program need not.
        optimizer = self._optimizer
        self._handles = []
        if hasattr(optimizer, "register_step_pre_hook"):
            self._handles = [optimizer.register_step_pre_hook(lambda *_: self._before()),
                             optimizer.register_step_post_hook(lambda *_: self._after())]
        else:  # torch before 2.0
            plain = optimizer.step

            @functools.wraps(plain)
            def step(*args, **kwargs):
                self._before()
                result = plain(*args, **kwargs)
                self._after()
                return result

            optimizer.step = step
        if self._scaler is not None:
            whole = self._scaler.step

            @functools.wraps(whole)
            def scaler_step(which, *args, **kwargs):
                self._stepped = False
                result = whole(which, *args, **kwargs)
                if which is optimizer and not self._stepped:
                    self._skipped()
                return result

            self._scaler.step = scaler_step

    # One step.

    def _in_detail(self, index):
        return index - self._first < self._dense or index % self._every == 0

    def _now(self):
        """The step that is being computed; begins one where none is."""
        if self._current is None:
            self._finish_held()
            self._drain(wait=False)
            self._current = _Step(self._step, self._slots())
            self._current.rng = self._rng
        return self._current

    def _slots(self):
        if self._free:
            return self._free.pop()
        return _Slots(self._device, sum(len(g) for g in self._params), len(self._segments),
                      len(self._params))

    def _gradients(self):
        grads, counts = [], []
        for group in self._params:
            before = len(grads)
            for p in group:
                grad = p.grad
                if grad is not None:
                    grad = _local(grad).detach()
                    if grad.is_sparse:
                        grad = grad.coalesce().values()
                    if grad.is_complex():
                        grad = torch.view_as_real(grad)
                    if grad.numel():
                        grads.append(grad)
            counts.append(len(grads) - before)
        return grads, counts

    def _norms(self, grads, slots, at):
        """The norm of each tensor into `slots`, from `at` on."""
        if not grads:
            return
        norms = None
        if hasattr(torch, "_foreach_norm"):
            if self._norm_takes_dtype:
                try:
                    norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
                except TypeError:
                    self._norm_takes_dtype = False
            if norms is None and all(g.dtype == torch.float32 for g in grads):
                norms = torch._foreach_norm(grads, 2)
        if norms is None:
            norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]
        torch.stack(norms, out=slots.on_device[2][at:at + len(grads)])

    def _factors(self, columns, rows):
        key = (columns, rows)
        if key not in self._weights:
            def odd(n, salt):
                x = torch.arange(n, dtype=torch.int64, device=self._device) + salt
                for factor, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
                    x = (x ^ (x >> shift)) * _signed(factor)
                return (x ^ (x >> 31)) | 1
            self._weights[key] = (odd(columns, 1), odd(rows, 1 << 40))
        return self._weights[key]

    def _hash(self, words, out=None):
        """A sum over all words, each times an odd factor of its own, modulo 2^64: no order of summation changes it."""
        rows, columns = words.shape
        a, b = self._factors(columns, rows)
        partial = torch.sum(words * a, dim=1).mul_(b)
        return torch.sum(partial, dim=0, out=out) if out is not None else torch.sum(partial)

    def _hash_of(self, tensor, out=None):
        flat = tensor.contiguous().reshape(-1)
        if flat.dtype == torch.bool:
            flat = flat.view(torch.uint8)
        size = flat.element_size()
        flat = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(size, torch.int64))
        if flat.numel() <= _COLUMNS:
            product = flat * self._factors(flat.numel(), 1)[0]
            return torch.sum(product) if out is None else torch.sum(product, dim=0, out=out)
        whole = flat.numel() // _COLUMNS * _COLUMNS
        h = self._hash(flat[:whole].view(-1, _COLUMNS))
        if whole < flat.numel():
            h = h.mul_(_signed(_MIX)).add_(torch.sum(flat[whole:] * self._factors(flat.numel() - whole, 1)[0]))
        return h if out is None else out.copy_(h)

    @_guarded
    def _clipping(self, parameters):
        if any(id(p) in self._ids for p in parameters[:1]):
            self.before_clip()

    @_guarded
    def _before(self):
        self._stepped = True
        step = self._now()
        slots = step.slots
        with torch.no_grad():
            self._common(step)
            found = getattr(self._optimizer, "found_inf", None)
            if isinstance(found, torch.Tensor):  # a fused optimizer that skips by itself
                slots.floats[2].copy_(found.reshape(()), non_blocking=True)
                step.found_inf = True
            step.grad_scaled = isinstance(getattr(self._optimizer, "grad_scale", None), torch.Tensor)
            step.detail = self._in_detail(step.index)
            if not step.detail:
                return
            grads, step.counts = self._gradients()
            self._norms(grads, slots, slots.norms)
            for i, s in enumerate(self._segments):
                parts = []
                for p, count in zip(s.params, s.counts):
                    g = p.grad
                    if g is None or g.is_sparse:
                        parts.append(torch.zeros(count, dtype=s.dtype, device=self._device))
                    else:
                        g = _local(g).detach()
                        parts.append(g if g.dtype == s.dtype else g.to(s.dtype))
                s.gather(s.grad, parts)
                self._hash(s.grad[0], out=slots.ints[3 * i + 1])
                s.moved = s.grad[1] != 0
                s.gather(s.before, s.values())
            if self._device.type == "cpu":
                step.nonfinite = self._count_nonfinite(grads, step.counts)

    def _common(self, step):
        step.lrs = []
        for g, group in enumerate(self._optimizer.param_groups[:len(self._params)]):
            lr = group.get("lr")
            if isinstance(lr, torch.Tensor):
                step.slots.floats[_SCALARS + g].copy_(lr.reshape(()), non_blocking=True)
            step.lrs.append(lr)
        if self._scaler is not None:
            scale = getattr(self._scaler, "_scale", None)
            if isinstance(scale, torch.Tensor):
                step.slots.floats[1].copy_(scale.reshape(()), non_blocking=True)
                step.scale_on_device = True
            elif getattr(self._scaler, "_enabled", False):
                step.scale = float(getattr(self._scaler, "_init_scale", 0)) or None
        apart = 0
        for (a, name_a), (b, name_b) in self._ties:
            x, y = a._parameters.get(name_a), b._parameters.get(name_b)
            if x is y:
                continue
            if x is None or y is None or x.shape != y.shape:
                apart += 1
                continue
            x, y = _local(x.detach()), _local(y.detach())
            if x.data_ptr() == y.data_ptr():
                continue
            slot = step.slots.ints[3 * len(self._segments) + 1]
            differ = torch.any(x != y).to(torch.int64)
            slot.add_(differ) if step.apart_on_device else slot.copy_(differ)
            step.apart_on_device = True
        step.apart = apart

    def _count_nonfinite(self, grads, counts):
        """Of each group. Waits for the device, so it is called where waiting costs nothing."""
        result, at = [], 0
        for n in counts:
            result.append(sum(int(g.numel() - torch.isfinite(g).sum()) for g in grads[at:at + n]))
            at += n
        return result

    @_guarded
    def _after(self):
        step = self._current
        if step is None or step.lrs is None:
            return
        if step.detail:
            slots = step.slots
            with torch.no_grad():
                for i, s in enumerate(self._segments):
                    s.gather(s.after, s.values())
                    new, old = s.after[1], s.before[1]
                    wide = s.dtype in (torch.float32, torch.float64)
                    change = torch.sub(new, old) if wide else new.float().sub_(old)
                    slots.floats[slots.scalars + 3 * i].copy_(torch.linalg.vector_norm(change))
                    slots.floats[slots.scalars + 3 * i + 1].copy_(torch.linalg.vector_norm(new, dtype=None if wide else torch.float32))
                    torch.sum(new, dim=0, dtype=torch.float64, out=slots.sums[i])
                    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(s.size, torch.int64)
                    same = torch.eq(new.view(bits), old.view(bits)).logical_and_(s.moved)
                    torch.sum(same, dim=0, out=slots.ints[3 * i + 2])
                    s.moved = None
                    self._hash(s.after[0], out=slots.ints[3 * i])
            step.updated = True
            if self._state_dtype is None or step.index - self._first < 4:
                self._state_dtype = self._lowest_state()
            step.state_dtype = self._state_dtype
        self._end_step(step)

    @_guarded
    def _skipped(self):
        """The scaler has found gradients that are not finite, has waited for that answer, and left the optimizer out."""
        step = self._now()
        with torch.no_grad():
            self._common(step)
            grads, step.counts = self._gradients()
            self._norms(grads, step.slots, step.slots.norms)
            step.nonfinite = self._count_nonfinite(grads, step.counts)
        step.detail, step.skipped = True, True
        self._end_step(step)

    def _end_step(self, step):
        self._current = None
        self._step += 1
        self._rng = self._random_state() if self._in_detail(self._step) else None
        if step.index == self._first and step.losses == 0:
            self._loss_after = True
        self._held = step
        if not self._loss_after:
            self._finish_held()

    def _finish_held(self):
        if self._held is not None:
            step, self._held = self._held, None
            step.slots.send()
            self._pending.append(step)

    def _random_state(self):
        if self._device.type == "cuda":
            state = torch.cuda.get_rng_state(self._device)
        else:
            state = torch.get_rng_state()
        return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()

    def _lowest_state(self):
        order = ["int8", "float8", "float16", "bfloat16", "float32", "float64"]
        lowest = None
        for state in self._optimizer.state.values():
            if not isinstance(state, dict):
                continue
            for value in state.values():
                if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.numel() < 2:
                    continue
                name = str(value.dtype).replace("torch.", "")
                name = "float8" if name.startswith("float8") else "int8" if name in ("uint8", "int8") else name
                if name in order and (lowest is None or order.index(name) < order.index(lowest)):
                    lowest = name
        return "float32" if lowest == "float64" else lowest

    # Into the file.

    def _drain(self, wait):
        while self._pending:
            step = self._pending[0]
            if not step.slots.ready():
                if not wait and len(self._pending) < _MAX_PENDING:
                    return
                step.slots.event.synchronize()
            self._pending.popleft()
            self._write(self._line(step))
            self._free.append(step.slots)

    def _line(self, step):
        host = step.slots.on_host
        sums, ints = (host[0].tolist(), host[1].tolist()) if step.detail or step.batches or self._ties else ((), ())
        scalars = floats = (host[2] if step.detail else host[2][:step.slots.scalars]).tolist()
        n = len(self._segments)
        line = {"step": step.index}
        if self._samples_per_step:
            self._samples += self._samples_per_step
        else:
            self._samples += step.samples * self._world
            self._count_samples = self._count_samples and step.samples > 0
        if self._count_samples:
            line["samples"] = self._samples
        if step.losses:
            total = step.loss_value if step.loss_value is not None else scalars[0]
            line["loss"] = _number(total / step.losses)
        scale = scalars[1] if step.scale_on_device else step.scale
        step.overflowed = bool(step.skipped or (step.found_inf and scalars[2] != 0))
        if scale is not None:
            line["loss_scale"] = _number(scale)
        if self._scaler is not None:
            line["skipped"] = step.overflowed
        if step.batches:
            h = _join(step.batch_value, ints[3 * n] & _MASK) if step.batches & 1 else step.batch_value
            line["batch_hash"] = f"{h:016x}"
        if step.rng is not None:
            line["rng_hash"] = step.rng
        if self._ties:
            line["tied_apart"] = step.apart + (ints[3 * n + 1] if step.apart_on_device else 0)
        factor = scale if step.grad_scaled and scale else 1.0
        line["groups"] = [self._group(step, g, sums, ints, floats, factor) for g in range(len(step.lrs))]
        return line

    def _group(self, step, g, sums, ints, floats, factor):
        group = {}
        lr = step.lrs[g]
        if lr is not None:
            group["lr"] = _number(floats[_SCALARS + g] if isinstance(lr, torch.Tensor) else float(lr))
        if not step.detail:
            return group

        def norm(counts, base):
            at = step.slots.norms + base + sum(counts[:g])
            values = floats[at:at + counts[g]]
            if any(not math.isfinite(v) for v in values):
                return math.nan if any(math.isnan(v) for v in values) else math.inf
            return math.sqrt(math.fsum(v * v for v in values)) / factor

        clipped = norm(step.counts, 0)
        # A norm that is not finite only because the gradients are still scaled says nothing about them.
        if not step.grad_scaled or math.isfinite(clipped) or step.overflowed:
            group["grad_norm"] = _number(norm(step.counts_before, step.slots.params) if step.before_clip else clipped)
            group["grad_norm_clipped"] = _number(clipped)
        if step.nonfinite is not None:
            group["nonfinite"] = step.nonfinite[g]
        elif math.isfinite(clipped):
            group["nonfinite"] = 0
        mine = [i for i, s in enumerate(self._segments) if s.group == g]
        if step.updated and mine:
            base = step.slots.scalars
            elements = sum(self._segments[i].elements for i in mine)
            hashes = [0, 0]
            for i in mine:
                for k in (0, 1):
                    hashes[k] = _join(hashes[k], ints[3 * i + k] & _MASK)
            group["grad_hash"] = f"{hashes[1]:016x}"
            group["update_norm"] = _number(math.hypot(*(floats[base + 3 * i] for i in mine)))
            group["unchanged"] = sum(ints[3 * i + 2] for i in mine) / elements
            group["param_norm"] = _number(math.hypot(*(floats[base + 3 * i + 1] for i in mine)))
            group["param_sum"] = _number(sum(sums[i] for i in mine))
            group["param_hash"] = f"{hashes[0]:016x}"
        if step.state_dtype:
            group["state_dtype"] = step.state_dtype
        return group

    def _write(self, record):
        data = (json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n").encode()
        done = os.write(self._fd, data)
        if done != len(data):  # a full disk: leave whole lines only
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - done)
            raise OSError(f"the disk took {done} of {len(data)} bytes")

    def _give_up(self, error):
        self._end()
        warnings.warn(f"halfwire parity: recording ended at step {self._step}: {type(error).__name__}: {error}",
                      RuntimeWarning, stacklevel=3)

    def _end(self):
        self._closed = True
        _observers.discard(self)
        for handle in self._handles:
            handle.remove()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        atexit.unregister(self._at_exit)


def attach(optimizer, path, **options):
    """`Recorder.attach`."""
    return Recorder.attach(optimizer, path, **options)
