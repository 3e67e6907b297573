"""Says whether this machine can compute on a GPU, and what is missing where it can not. Owns no device."""

from __future__ import annotations

from importlib.util import find_spec

from thermocline.errors import DeviceMissingError

_PACKAGES = ("torch", "triton")


def require_packages() -> None:
    """Raise DeviceMissingError unless torch and Triton are there. Imports neither.

    To be called before anything else of this package that computes is imported.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise DeviceMissingError(
            f"computing on a GPU needs the Python packages {' and '.join(missing)}, which are not "
            "installed. Fix: pip install 'thermocline[gpu]', or compute on the CPU"
        )


def require_gpu() -> None:
    """Raise DeviceMissingError unless torch, Triton and a CUDA device are there. Imports torch."""
    require_packages()
    import torch

    if not torch.cuda.is_available():
        raise DeviceMissingError(
            f"torch {torch.__version__} finds no CUDA device on this machine. Fix: install the GPU's "
            "driver and a torch that is built for it (pip install 'thermocline[gpu]'), or compute on the CPU"
        )
