"""Records a PyTorch training run for `halfwire parity`. The files are described in docs/parity-record.md.

    from halfwire.parity import Recorder
    recorder = Recorder.attach(optimizer, "runs/exact-1", model=model)    # after the optimizer, before the loop
    ...
    recorder.loss(loss)                                                   # between forward and optimizer.step()

It hooks the optimizer's step and changes nothing: no random number is drawn, no tensor of the program is written, no
collective is called, and on a GPU nothing waits. Results stay on the device, are copied to pinned memory beside the
program's own work, and are written later, some steps at once. An error inside the recorder ends the recording with a
warning, never the training.

What it costs is the time of the host, and there the calls into torch, far more than the kernels they start. So an ordinary
step makes one for its loss and one for its batch, both copies: programs may write over either as soon as they have them back.
Hashing, sending and writing are done once for all the steps of a block.

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
_MAX_STEPS = 32  # in a block: what a killed run may lose beside what is on its way
_MAX_PENDING = 8  # blocks whose results may be on their way before the oldest is waited for
_HASHES = 512  # of batches, in a block
_BATCH_BYTES = 64 << 10  # larger batches are hashed where they are, one by one
_RING_BYTES = 1 << 20  # of batches of one shape in a block, before another ring is begun
_RINGS_BYTES = 16 << 20  # all rings together
_RING_COUNT = 64
_RING_SHAPES = 4  # in one block

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


def _bits(size):
    """The integer type of so many bytes."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(size, torch.int64)


def _put(slot, value):
    """A tensor of one element into a place for one, in one call where it can be."""
    if value.requires_grad:
        value = value.detach()
    slot.copy_(value if value.dim() == 0 else value.reshape(()), non_blocking=True)


def _in_one_piece(scalars):
    """The vector of which these tensors of one element are the elements, in order, if there is one: torch makes one for what
    _foreach_norm returns, and to copy it is one call of many less."""
    first, last, count = scalars[0], scalars[-1], len(scalars)
    if not hasattr(first, "untyped_storage"):  # torch before 2.0
        return None
    storage, size = first.untyped_storage(), first.element_size()
    if (storage.nbytes() != count * size or storage.data_ptr() != first.data_ptr()
            or last.untyped_storage().data_ptr() != storage.data_ptr() or last.dtype != first.dtype
            or last.data_ptr() - first.data_ptr() != (count - 1) * size):
        return None
    return first.as_strided((count,), (1,))


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
    fields = {"mode": "off", "format": "e4m3", "block": 128, "scale": "fp32", "rounding": "nearest", "seed": "1",
              "min_bytes": None, "ops": "allreduce,reducescatter"}
    result = {}
    for field, default in fields.items():
        value = os.environ.get("HALFWIRE_" + field.upper()) or default
        if value is not None:
            result[field] = int(value) if field == "block" and str(value).isdigit() else value
    return result


class _Buffer:
    """A segment's values in one piece: as words to hash, as numbers, and as a view for each tensor."""

    def __init__(self, segment, size):
        raw = torch.zeros(segment.rows * segment.columns * 4, dtype=torch.uint8, device=segment.device)
        self.words = raw.view(torch.int32).view(segment.rows, segment.columns)
        self.flat = raw.view(segment.dtype)[:segment.elements]
        self.bits = self.flat.view(_bits(size))
        self.parts = [part.view(shape) for part, shape in zip(self.flat.split(segment.counts), segment.shapes)]


class _Segment:
    """The sampled tensors of one group and one type, laid out one behind the other."""

    def __init__(self, group, dtype, device):
        self.group, self.dtype, self.device = group, dtype, device
        self.params, self.counts, self.shapes, self.cut = [], [], [], []

    def add(self, param, count):
        local = _local(param)
        if count != local.numel():
            self.cut.append((len(self.params), count))
        self.shapes.append(local.shape if count == local.numel() else (count,))
        self.params.append(param)
        self.counts.append(count)

    def allocate(self, position):
        self.at = [position[id(p)] for p in self.params]
        self.plain = all(_local(p) is p for p in self.params)
        self.elements = sum(self.counts)
        size = torch.empty((), dtype=self.dtype).element_size()
        words = -(-self.elements * size // 4)
        # Few columns for a small sample, so that padding never outweighs what it pads.
        self.columns = min(_COLUMNS, max(64, 1 << (max(words, 1) - 1).bit_length() // 2))
        self.rows = -(-words // self.columns)
        self.before, self.after, self.grad = (_Buffer(self, size) for _ in range(3))
        self.wide = self.dtype in (torch.float32, torch.float64)

    def values(self):
        return self.params if self.plain else [_local(p) for p in self.params]

    def gather(self, buffer, tensors):
        """Copies the tensors into the buffer, each in the order of its indices; None is zeros. Called without autograd."""
        if self.cut:
            tensors = list(tensors)
            for i, count in self.cut:
                if tensors[i] is not None:
                    tensors[i] = tensors[i].reshape(-1)[:count]
        present = [t for t in tensors if t is not None]
        counts = self.counts
        if hasattr(torch, "_foreach_copy_"):
            parts = buffer.parts
            if len(present) != len(tensors):
                torch._foreach_zero_([part for part, t in zip(parts, tensors) if t is None])
                counts = [n for n, t in zip(counts, tensors) if t is not None]
                parts = [part for part, t in zip(parts, tensors) if t is not None]
            try:
                if [t.numel() for t in present] == counts:
                    return self._copy(parts, present)
            except RuntimeError:  # a parameter has another shape than when recording began
                pass
        pieces = []
        for tensor, count in zip(tensors, self.counts):
            flat = torch.zeros(count, dtype=self.dtype, device=self.device) if tensor is None else tensor.reshape(-1)
            pieces.append(flat if flat.numel() == count else flat[:count])
        torch.cat(pieces, out=buffer.flat)

    @staticmethod
    def _copy(parts, tensors):
        # One tensor laid out in another way would slow down all that are copied with it.
        apart = [i for i, t in enumerate(tensors) if not t.is_contiguous()]
        if apart:
            for i in apart:
                parts[i].copy_(tensors[i])
            apart = set(apart)
            rest = [i for i in range(len(parts)) if i not in apart]
            parts, tensors = [parts[i] for i in rest], [tensors[i] for i in rest]
        if tensors:
            torch._foreach_copy_(parts, tensors)


class _Ring:
    """Batches of one shape and type, copied in one behind the other and hashed all at once."""

    def __init__(self, key, size, device):
        shape, dtype = key
        self.key, self.count = key, max(1, min(_RING_COUNT, _RING_BYTES // size))
        self.bytes = self.count * size
        store = torch.empty((self.count, *shape), dtype=dtype, device=device)
        self.words = store.view(self.count, -1)
        if dtype == torch.bool:
            self.words = self.words.view(torch.uint8)
        self.words = self.words.view(_bits(self.words.element_size()))
        self.places = store.unbind()
        self.used = self.base = 0  # how many are in, and where their hashes go


class _Block:
    """Where the results of some steps land: bytes on the device and their copy on the host. Each step has a row of
    scalars; only the last may be one in detail, and has the rest."""

    def __init__(self, device, rows, params, segments, groups):
        self.capacity, self.params, self.segments = rows, params, segments
        self.width = _SCALARS + groups
        self.apart = 3 * segments  # ints: three for each segment, then of each step: tied weights, batches beyond the hashes
        self.rest = self.apart + rows
        self.hashes = self.rest + rows
        self.tail = rows * self.width  # floats: the rows, then two for each segment, then norms before and after clipping
        self.norms = self.tail + 2 * segments
        # Eight-byte values first, so that every view is aligned.
        f64, i64, f32 = segments, self.hashes + _HASHES, self.norms + 2 * params
        a, b = 8 * f64, 8 * (f64 + i64)
        self.device = torch.zeros(b + 4 * f32, dtype=torch.uint8, device=device)
        cuda = device.type == "cuda"
        self.host = torch.zeros(b + 4 * f32, dtype=torch.uint8, pin_memory=True, device="cpu") if cuda else self.device
        self.event = torch.cuda.Event() if cuda else None

        def views(memory):
            return memory[:a].view(torch.float64), memory[a:b].view(torch.int64), memory[b:].view(torch.float32)

        f64, self.ints, f32 = views(self.device)
        self.on_host = views(self.host)
        self.scalars_on_host = self.on_host[2][:self.tail]
        # Views of single values, made once: making them costs more than the kernels that fill them.
        self.sums = f64.unbind()
        self.of_segments = self.ints[:self.apart].unbind()
        self.rows = [row.unbind() for row in f32[:self.tail].view(rows, self.width).unbind()]
        self.lengths = f32[self.tail:self.norms].unbind()
        self.norm_region = f32[self.norms:]
        self.norm_slots = self.norm_region.unbind()
        self.clear()

    def clear(self):
        self.steps = []
        self.open, self.rings = {}, []  # by shape, those that take more; all
        self.taken = 0  # hashes spoken for

    def send(self):
        if self.event is not None:
            self.host.copy_(self.device, non_blocking=True)
            self.event.record(torch.cuda.current_stream(self.device.device))

    def ready(self):
        return self.event is None or self.event.query()

    def wait(self):
        self.event.synchronize()


class _Step:
    """One step on its way into the file."""

    losses = batches = samples = 0
    loss_value = None  # a loss that was a plain number
    batch_value = 0  # of tensors on the host
    entries = ()  # hashes of tensors on the device, in order
    beyond = 0  # how many more are in one number, because the block's hashes were all taken
    lrs = None
    detail = updated = before_clip = False
    counts = counts_before = None
    scale = None
    scale_on_device = overflowed = apart_on_device = False
    grad_scaled = found_inf = skipped = None
    nonfinite = None
    rng = None
    apart = None
    state_dtype = None

    def __init__(self, index, block):
        self.index, self.block, self.row = index, block, len(block.steps)
        self.slots = block.rows[self.row]


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
                         first `dense` steps, then at steps that `every` divides. lr, loss, scale, batch: at every
                         step. Lines are written with those of the next such step, 32 at most at once, and by close()
        sample_bytes     upper bound of the sample, at most 64 MiB
        samples_per_step of all ranks together; otherwise from the first dimension of what batch() was given
        rank, world_size where torch.distributed and the environment do not say
        sharded, reduced, tied_expected, dropout: where the recorder cannot tell or is wrong
        """
        return cls(optimizer, path, **options)

    def __init__(self, optimizer, path, *, model=None, scaler=None, accumulation=1, seed=None, warmup=None, step=0,
                 dense=32, every=32, sample_bytes=_SAMPLE_BYTES, samples_per_step=None, rank=None, world_size=None,
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
        every_param = self._every_param = [p for group in self._params for p in group]
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
        self._block = self._current = self._held = None
        self._block_steps = min(_MAX_STEPS, every)
        self._shapes, self._spare, self._ring_bytes = {}, {}, 0
        self._writing = False
        self._hashes_on_host = True  # batches that are there
        self._encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
        self._loss_after = False
        self._pending = collections.deque()
        self._weights = {}
        self._state_dtype = None
        self._norm_takes_dtype = True
        self._norm_dtype = torch.float64 if any(p.dtype == torch.float64 for p in every_param) else torch.float32
        self._detailed = self._in_detail(step)  # the step that is being computed or comes next
        self._rng = self._random_state() if self._detailed else None
        self._stepped = False
        self._pid = os.getpid()

        self._open(path)
        try:
            self._write([self._header(model, seed, warmup, sharded, reduced, tied_expected, dropout)])
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

    # What is called at every step has its guard inside and few calls: in the middle of a training step none of this is in
    # the processor's caches, and a call of Python costs ten times what it does in a loop.

    def loss(self, value):
        """The loss of one micro-batch, a tensor of one element or a number. Called between forward and
        optimizer.step(); a program that calls it after its first optimizer.step() is followed in that."""
        if self._closed:
            return
        try:
            step = self._held if self._loss_after and self._held is not None else self._current or self._now()
            if isinstance(value, torch.Tensor):
                slot = step.slots[0]
                value = getattr(value, "_local_tensor", value).detach()
                if value.dim():
                    value = value.reshape(())
                if step.losses == 0:
                    slot.copy_(value, non_blocking=True)
                else:
                    slot.add_(value if value.device == slot.device else value.to(slot.device, non_blocking=True))
            else:
                step.loss_value = (step.loss_value or 0.0) + float(value)
            step.losses += 1
        except Exception as e:  # noqa: BLE001
            self._give_up(e)

    def batch(self, *tensors, samples=None):
        """The tensors of one micro-batch: pass those of the host if both exist. They may be written over afterwards."""
        if self._closed:
            return
        try:
            step = self._current or self._now()
            for t in tensors:
                t = getattr(t, "_local_tensor", t)
                if t.requires_grad:
                    t = t.detach()
                if t.is_cpu and self._hashes_on_host:
                    data = t.contiguous().reshape(-1).view(torch.uint8).numpy()
                    step.batch_value = _join(step.batch_value, zlib.crc32(data) << 32 | zlib.adler32(data))
                    continue
                ring = step.block.open.get((t.shape, t.dtype))
                if ring is None or step.beyond:
                    self._take(step, t)
                    continue
                at = ring.used
                ring.places[at].copy_(t, non_blocking=True)
                step.entries = (*step.entries, ring.base + at)
                ring.used = at + 1
                if at + 1 == ring.count:
                    del step.block.open[ring.key]
            step.batches = True
            if samples is None and tensors:
                shape = tensors[0].shape
                samples = shape[0] if shape else 0
            step.samples += samples or 0
        except Exception as e:  # noqa: BLE001
            self._give_up(e)

    @_guarded
    def before_clip(self):
        """Only for programs that clip with code of their own: called once the gradients are ready, before they
        are clipped. torch.nn.utils.clip_grad_norm_ and its kin are seen without it."""
        if not self._detailed:
            return
        step = self._now()
        if step.before_clip:
            return
        step.before_clip = True
        with torch.no_grad():
            grads, step.counts_before = self._gradients(self._raw_gradients())
            self._norms(grads, step.block, step.block.params)

    def close(self):
        """Writes what is under way. Called at exit if not before."""
        if self._closed or os.getpid() != self._pid:
            return
        try:
            self._write_all()
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
        position = {id(p): i for i, p in enumerate(self._every_param)}
        for s in self._segments:
            s.allocate(position)

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
            self._handles = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]
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
        step = self._current
        if step is None:
            if self._held is not None:
                self._finish_held()
            if self._pending:
                self._drain(wait=False)
            block = self._block
            if block is None:
                block = self._block = self._free.pop() if self._free else _Block(
                    self._device, self._block_steps, len(self._every_param), len(self._segments), len(self._params))
            step = self._current = _Step(self._step, block)
            step.rng = self._rng
        return step

    def _take(self, step, tensor):
        """Sees to the hash of a tensor on the device that no open ring is for."""
        block = step.block
        if not step.beyond:
            key = (tensor.shape, tensor.dtype)
            ring = self._ring(block, key, tensor)
            if ring is not None:
                ring.places[0].copy_(tensor, non_blocking=True)
                ring.used = 1
                step.entries = (*step.entries, ring.base)
                if ring.count == 1:
                    del block.open[key]
                return
            if block.taken < _HASHES:
                self._hash_of(tensor, out=block.ints[block.hashes + block.taken])
                step.entries = (*step.entries, block.taken)
                block.taken += 1
                return
        place = block.ints[block.rest + step.row]
        if step.beyond == 0:
            self._hash_of(tensor, out=place)
        else:
            place.mul_(_signed(_MIX)).add_(self._hash_of(tensor))
        step.beyond += 1

    def _ring(self, block, key, tensor):
        """A ring of this block for tensors of a shape that came before, or None. The caller puts in the first."""
        small = self._shapes.get(key)
        if small is None:
            if len(self._shapes) == 64:
                self._shapes.clear()
            size = tensor.numel() * tensor.element_size()
            self._shapes[key] = (0 < size <= _BATCH_BYTES and tensor.layout == torch.strided
                                 and (tensor.dtype.is_floating_point or tensor.dtype in (
                                     torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)))
            return None
        if not small or len(block.open) == _RING_SHAPES:
            return None
        spare = self._spare.get(key)
        if spare:
            ring = spare.pop()
        else:
            size = tensor.numel() * tensor.element_size()
            if self._ring_bytes + max(_RING_BYTES, size) > _RINGS_BYTES:  # forget shapes that come no more
                self._ring_bytes -= sum(r.bytes for rings in self._spare.values() for r in rings)
                self._spare.clear()
                if self._ring_bytes + max(_RING_BYTES, size) > _RINGS_BYTES:
                    return None
            ring = _Ring(key, size, self._device)
            self._ring_bytes += ring.bytes
        if block.taken + ring.count > _HASHES:
            self._spare.setdefault(key, []).append(ring)
            return None
        ring.base = block.taken
        block.taken += ring.count
        block.open[key] = ring
        block.rings.append(ring)
        return ring

    def _raw_gradients(self):
        return [p.grad for p in self._every_param]

    def _gradients(self, raw):
        """What of them has numbers, as tensors of this rank, and how many each group has. Called without autograd."""
        grads, counts, at, plain = [], [], 0, torch.Tensor
        for group in self._params:
            before = len(grads)
            for grad in raw[at:at + len(group)]:
                if grad is None:
                    continue
                if type(grad) is not plain:
                    grad = _local(grad)
                if grad.is_sparse:
                    grad = grad.coalesce().values()
                if grad.is_complex():
                    grad = torch.view_as_real(grad)
                if grad.numel():
                    grads.append(grad)
            at += len(group)
            counts.append(len(grads) - before)
        return grads, counts

    def _norms(self, grads, block, at):
        """The norm of each tensor into the block's norms, from `at` on."""
        if not grads:
            return
        norms, dtype = None, self._norm_dtype
        if hasattr(torch, "_foreach_norm"):
            if self._norm_takes_dtype:
                try:
                    norms = torch._foreach_norm(grads, 2, dtype=dtype)
                except TypeError:
                    self._norm_takes_dtype = False
            if norms is None and all(g.dtype == dtype for g in grads):
                norms = torch._foreach_norm(grads, 2)
        if norms is None:
            norms = [torch.linalg.vector_norm(g, dtype=dtype) for g in grads]
        whole = _in_one_piece(norms)
        if whole is not None:
            block.norm_region[at:at + len(grads)].copy_(whole, non_blocking=True)
        elif hasattr(torch, "_foreach_copy_"):
            torch._foreach_copy_(block.norm_slots[at:at + len(grads)], norms)
        else:
            block.norm_region[at:at + len(grads)].copy_(torch.stack(norms))

    def _factors(self, columns, rows):
        """Odd numbers for so many columns and rows; fewer of either are the first of more."""
        if not self._weights:
            self._weights = {"columns": self._odd(_COLUMNS, 1), "rows": self._odd(1, 1 << 40)}
        key = (columns, rows)
        result = self._weights.get(key)
        if result is None:
            if len(self._weights["rows"]) < rows:
                self._weights["rows"] = self._odd(rows, 1 << 40)
            if len(self._weights) == 256:  # batches of ever new lengths
                self._weights = {name: self._weights[name] for name in ("columns", "rows")}
            result = self._weights[key] = (self._weights["columns"][:columns], self._weights["rows"][:rows])
        return result

    def _odd(self, n, salt):
        x = torch.arange(n, dtype=torch.int64, device=self._device) + salt
        for factor, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
            x = (x ^ (x >> shift)) * _signed(factor)
        return (x ^ (x >> 31)) | 1

    def _hash(self, words, out=None):
        """A sum over all words, each times an odd factor of its own, modulo 2^64: no order of summation changes it. Of
        three dimensions, one hash for each index of the first."""
        a, b = self._factors(words.shape[-1], words.shape[-2])
        partial = torch.sum(words * a, dim=-1).mul_(b)
        return torch.sum(partial, dim=-1) if out is None else torch.sum(partial, dim=-1, out=out)

    def _hash_rows(self, words, out=None):
        """The hash of each row of words, or of a single one."""
        count = words.shape[-1]
        if count <= _COLUMNS:
            product = words * self._factors(count, 1)[0]
            return torch.sum(product, dim=-1) if out is None else torch.sum(product, dim=-1, out=out)
        whole = count // _COLUMNS * _COLUMNS
        h = self._hash(words[..., :whole].unflatten(-1, (-1, _COLUMNS)))
        if whole < count:
            factors = self._factors(count - whole, 1)[0]
            h = h.mul_(_signed(_MIX)).add_(torch.sum(words[..., whole:] * factors, dim=-1))
        return h if out is None else out.copy_(h)

    def _hash_of(self, tensor, out=None):
        flat = tensor.contiguous().reshape(-1)
        if flat.dtype == torch.bool:
            flat = flat.view(torch.uint8)
        return self._hash_rows(flat.view(_bits(flat.element_size())), out)

    def _clipping(self, parameters):
        if self._detailed and len(parameters) and id(parameters[0]) in self._ids:
            self.before_clip()

    def _before(self, *_):
        if self._closed:
            return
        try:
            self._stepped = True
            step = self._current or self._now()
            self._common(step)
            optimizer = self._optimizer
            found = getattr(optimizer, "found_inf", None)
            if isinstance(found, torch.Tensor):  # a fused optimizer that skips by itself
                _put(step.slots[2], found)
                step.found_inf = True
            if isinstance(getattr(optimizer, "grad_scale", None), torch.Tensor):
                step.grad_scaled = True
            if self._detailed:
                step.detail = True
                with torch.no_grad():
                    self._detail_before(step, step.block)
        except Exception as e:  # noqa: BLE001
            self._give_up(e)

    def _detail_before(self, step, block):
        raw = self._raw_gradients()
        grads, step.counts = self._gradients(raw)
        self._norms(grads, block, 0)
        for i, s in enumerate(self._segments):
            parts = [raw[k] for k in s.at]
            for k, g in enumerate(parts):
                if g is None:
                    continue
                g = _local(g)
                parts[k] = None if g.is_sparse else g if g.dtype == s.dtype else g.to(s.dtype)
            s.gather(s.grad, parts)
            self._hash(s.grad.words, out=block.of_segments[3 * i + 1])
            s.gather(s.before, s.values())
        if self._device.type == "cpu":
            step.nonfinite = self._count_nonfinite(grads, step.counts)

    def _common(self, step):
        lrs = step.lrs = []
        for _, group in zip(self._params, self._optimizer.param_groups):
            lr = group.get("lr")
            if isinstance(lr, torch.Tensor):
                _put(step.slots[_SCALARS + len(lrs)], lr)
            lrs.append(lr)
        if self._scaler is not None:
            scale = getattr(self._scaler, "_scale", None)
            if isinstance(scale, torch.Tensor):
                _put(step.slots[1], scale)
                step.scale_on_device = True
            elif getattr(self._scaler, "_enabled", False):
                step.scale = float(getattr(self._scaler, "_init_scale", 0)) or None
        if self._ties:
            self._compare_ties(step)

    def _compare_ties(self, step):
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
            slot = step.block.ints[step.block.apart + step.row]
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

    def _after(self, *_):
        step = self._current
        if self._closed or step is None or step.lrs is None:
            return
        try:
            if step.detail:
                with torch.no_grad():
                    self._detail_after(step.block)
                step.updated = True
                if self._state_dtype is None or step.index - self._first < 4:
                    self._state_dtype = self._lowest_state()
                step.state_dtype = self._state_dtype
            self._end_step(step)
        except Exception as e:  # noqa: BLE001
            self._give_up(e)

    def _detail_after(self, block):
        for i, s in enumerate(self._segments):
            s.gather(s.after, s.values())
            new, old = s.after.flat, s.before.flat
            change = torch.sub(new, old) if s.wide else new.float().sub_(old)
            for length, values in ((block.lengths[2 * i], change), (block.lengths[2 * i + 1], new)):
                if s.dtype == torch.float64:
                    length.copy_(torch.linalg.vector_norm(values))
                else:
                    torch.linalg.vector_norm(values, dtype=torch.float32, out=length)
            torch.sum(new, dim=0, dtype=torch.float64, out=block.sums[i])
            same = torch.eq(s.after.bits, s.before.bits).logical_and_(s.grad.flat)
            torch.sum(same, dim=0, out=block.of_segments[3 * i + 2])
            self._hash(s.after.words, out=block.of_segments[3 * i])

    @_guarded
    def _skipped(self):
        """The scaler has found gradients that are not finite, has waited for that answer, and left the optimizer out."""
        step = self._now()
        with torch.no_grad():
            self._common(step)
            grads, step.counts = self._gradients(self._raw_gradients())
            self._norms(grads, step.block, 0)
            step.nonfinite = self._count_nonfinite(grads, step.counts)
        step.detail, step.skipped = True, True
        self._end_step(step)

    def _end_step(self, step):
        self._current = None
        index = self._step = self._step + 1
        self._detailed = index - self._first < self._dense or index % self._every == 0
        self._rng = self._random_state() if self._detailed else None
        if step.index == self._first and step.losses == 0:
            self._loss_after = True
        self._held = step
        if not self._loss_after:
            self._finish_held()

    def _finish_held(self):
        step = self._held
        if step is None:
            return
        self._held = None
        block = step.block
        block.steps.append(step)
        if step.detail or len(block.steps) == block.capacity or block.taken > _HASHES // 2:
            self._send()

    def _send(self):
        block, self._block = self._block, None
        for ring in block.rings:
            words = ring.words if ring.used == ring.count else ring.words[:ring.used]
            begin = block.hashes + ring.base
            self._hash_rows(words, out=block.ints[begin:begin + ring.used])
        block.send()
        self._pending.append(block)

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

    def _write_all(self):
        self._finish_held()
        if self._block is not None and self._block.steps:
            self._send()
        self._drain(wait=True)

    def _drain(self, wait):
        while self._pending:
            block = self._pending[0]
            if not block.ready():
                if not wait and len(self._pending) < _MAX_PENDING:
                    return
                block.wait()
            self._writing = True
            self._write(self._lines(block))
            self._writing = False
            self._pending.popleft()
            for ring in block.rings:
                self._spare.setdefault(ring.key, []).append(ring)
            block.clear()
            self._free.append(block)

    def _lines(self, block):
        sums, ints, floats = block.on_host
        if block.steps[-1].detail:
            sums, ints, floats = sums.tolist(), ints.tolist(), floats.tolist()
        else:
            needed = block.taken or self._ties or any(step.beyond for step in block.steps)
            sums, ints, floats = (), ints.tolist() if needed else (), block.scalars_on_host.tolist()
        return [self._line(step, block, sums, ints, floats) for step in block.steps]

    def _line(self, step, block, sums, ints, floats):
        scalars = floats[step.row * block.width:(step.row + 1) * block.width]
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
            h = step.batch_value
            if step.entries or step.beyond:
                on_device = 0
                for i in step.entries:
                    on_device = on_device * _MIX + ints[block.hashes + i] & _MASK
                if step.beyond:
                    on_device = on_device * pow(_MIX, step.beyond, 1 << 64) + ints[block.rest + step.row] & _MASK
                h = _join(h, on_device)
            line["batch_hash"] = f"{h:016x}"
        if step.rng is not None:
            line["rng_hash"] = step.rng
        if self._ties:
            line["tied_apart"] = step.apart + (ints[block.apart + step.row] if step.apart_on_device else 0)
        groups = line["groups"] = []
        factor = scale if step.grad_scaled and scale else 1.0
        for g, lr in enumerate(step.lrs):
            group = {}
            if lr is not None:
                group["lr"] = _number(scalars[_SCALARS + g] if isinstance(lr, torch.Tensor) else float(lr))
            if step.detail:
                self._group(group, step, block, g, sums, ints, floats, factor)
            groups.append(group)
        return line

    def _group(self, group, step, block, g, sums, ints, floats, factor):
        def norm(counts, base):
            at = block.norms + base + sum(counts[:g])
            values = floats[at:at + counts[g]]
            if any(not math.isfinite(v) for v in values):
                return math.nan if any(math.isnan(v) for v in values) else math.inf
            return math.sqrt(math.fsum(v * v for v in values)) / factor

        clipped = norm(step.counts, 0)
        # A norm that is not finite only because the gradients are still scaled says nothing about them.
        if not step.grad_scaled or math.isfinite(clipped) or step.overflowed:
            group["grad_norm"] = _number(norm(step.counts_before, block.params) if step.before_clip else clipped)
            group["grad_norm_clipped"] = _number(clipped)
        if step.nonfinite is not None:
            group["nonfinite"] = step.nonfinite[g]
        elif math.isfinite(clipped):
            group["nonfinite"] = 0
        mine = [i for i, s in enumerate(self._segments) if s.group == g]
        if step.updated and mine:
            base = block.tail
            elements = sum(self._segments[i].elements for i in mine)
            hashes = [0, 0]
            for i in mine:
                for k in (0, 1):
                    hashes[k] = _join(hashes[k], ints[3 * i + k] & _MASK)
            group["grad_hash"] = f"{hashes[1]:016x}"
            group["update_norm"] = _number(math.hypot(*(floats[base + 2 * i] for i in mine)))
            group["unchanged"] = sum(ints[3 * i + 2] for i in mine) / elements
            group["param_norm"] = _number(math.hypot(*(floats[base + 2 * i + 1] for i in mine)))
            group["param_sum"] = _number(sum(sums[i] for i in mine))
            group["param_hash"] = f"{hashes[0]:016x}"
        if step.state_dtype:
            group["state_dtype"] = step.state_dtype

    def _write(self, records):
        data = "".join([self._encode(record) + "\n" for record in records]).encode()
        done = os.write(self._fd, data)
        if done != len(data):  # a full disk: leave whole lines only
            whole = data.rfind(b"\n", 0, done) + 1
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - done + whole)
            raise OSError(f"the disk took {done} of {len(data)} bytes")

    def _give_up(self, error):
        # What came before goes into the file, unless it was that which failed or a graph is being captured.
        if not self._writing and not (self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            try:
                self._write_all()
            except Exception:  # noqa: BLE001
                pass
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
