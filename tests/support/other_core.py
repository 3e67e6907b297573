"""A pytest plugin that tests the compiled core at $THERMOCLINE_NATIVE instead of the installed one."""

from __future__ import annotations

import importlib.util
import os
import sys

NAME = "thermocline.kernels._native"

_spec = importlib.util.spec_from_file_location(NAME, os.environ["THERMOCLINE_NATIVE"])
assert _spec is not None
assert _spec.loader is not None
sys.modules[NAME] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[NAME])
