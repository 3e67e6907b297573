"""Imports the compiled core, and says how to build it when it is missing or of another version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.errors import NativeModuleError

if TYPE_CHECKING:
    from types import ModuleType

_BUILD_HINT = (
    "build it with `pip install --no-build-isolation -e .` in the source folder, or `make install`"
)


# What the compiled core must say of itself; see native/src/bindings.cpp.
_INTERFACE = 36


def load_native() -> ModuleType:
    """Import the compiled core. Raises NativeModuleError, which names the build command."""
    try:
        from thermocline.kernels import _native
    except ImportError as error:
        raise NativeModuleError(
            f"the compiled core of thermocline is missing ({error}): {_BUILD_HINT}"
        ) from error
    found = getattr(_native, "interface", 1)
    if found != _INTERFACE:
        raise NativeModuleError(
            f"the compiled core of thermocline is of another version (interface {found}, needed is "
            f"{_INTERFACE}): {_BUILD_HINT}"
        )
    return _native
