"""Asks the device how much memory it has. Owns nothing of it."""

from __future__ import annotations


def device_memory() -> tuple[int, int] | None:
    """Return (total, free) bytes of the first device; None without torch or a device.

    Free is what the driver says: where memory is unified it may be more than the total.
    """
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return total, free
