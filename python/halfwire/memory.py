"""Scratch of a preloaded libhalfwire.so from PyTorch's caching allocator, so that torch.cuda's figures contain it.

    import halfwire.memory
    halfwire.memory.use_torch()        # before the first process group; does nothing without the library

Returns whether the library is there. The memory is taken when a communicator is made and given back when it is destroyed.
"""

import ctypes

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_kept = []  # the library calls these for as long as the process lives


def use_torch(library=None):
    """Lends torch's allocator to the library. Raises RuntimeError where it comes too late."""
    import torch
    library = library or ctypes.CDLL(None)
    lend = getattr(library, "halfwire_set_allocator", None)
    if lend is None:
        return False

    def allocate(size, device, _):
        try:
            with torch.cuda.device(device):
                return torch.cuda.caching_allocator_alloc(size, device)
        except Exception:  # noqa: BLE001  the library says what follows from it
            return None

    def release(pointer, size, device, _):
        torch.cuda.caching_allocator_delete(pointer)

    lend.argtypes, lend.restype = [_ALLOCATE, _RELEASE, ctypes.c_void_p], ctypes.c_int
    calls = _ALLOCATE(allocate), _RELEASE(release)
    if lend(*calls, None) != 0:
        words = library.halfwire_last_error
        words.restype = ctypes.c_char_p
        raise RuntimeError(words().decode())
    _kept.append(calls)
    return True
