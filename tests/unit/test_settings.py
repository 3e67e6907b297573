"""Settings by name: each has one place, and a value of another kind is refused."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from thermocline import ConfigError, EngineConfig, MemoryConfig
from thermocline.config import ALL_LAYERS
from thermocline.settings import engine_settings, with_settings


def test_every_flag_is_a_setting_of_its_own_name():
    """What any config class flags is a setting, and no two have one name."""
    kinds = [EngineConfig, *filter(is_dataclass, get_type_hints(EngineConfig).values())]
    flagged = [field for kind in kinds for field in fields(kind) if "flag" in field.metadata]
    keys = [setting.key for setting in engine_settings()]
    assert len(keys) == len(set(keys)) == len(flagged) > 30


@pytest.mark.parametrize(
    ("values", "section", "name", "held"),
    [
        ({"ctx": 77}, "memory", "max_context_tokens", 77),
        ({"ctx": None}, "memory", "max_context_tokens", None),
        ({"device_memory": "12GiB"}, "placement", "device_memory_bytes", 12 << 30),
        ({"device_memory": 1 << 30}, "placement", "device_memory_bytes", 1 << 30),
        ({"gpu_layers": "all"}, "placement", "gpu_layers", ALL_LAYERS),
        ({"gpu_layers": 3}, "placement", "gpu_layers", 3),
        ({"hot": "3:17"}, "placement", "hot", ("3:17",)),
        ({"hot": ["3:17", "4"]}, "placement", "hot", ("3:17", "4")),
        ({"heat": False}, "heat", "enabled", False),
        ({"heat_file": Path("a.json")}, "heat", "file", "a.json"),
        ({"hot_fraction": 1}, "placement", "hot_fraction", 1),
        ({"memory": MemoryConfig(kv_type="q8_0")}, "memory", "kv_type", "q8_0"),
    ],
)
def test_a_setting_arrives_in_its_place(values, section, name, held):
    """And nothing else changes."""
    config = with_settings(EngineConfig(), values)
    assert getattr(getattr(config, section), name) == held
    others = {field.name for field in fields(EngineConfig)} - {section}
    assert all(getattr(config, other) == getattr(EngineConfig(), other) for other in others)


def test_what_is_not_named_stays():
    """A config is changed, not made anew, and a top-level field is a setting too."""
    config = with_settings(EngineConfig(memory=MemoryConfig(kv_type="f32")), {"ctx": 5})
    assert config.memory == MemoryConfig(5, "f32")
    assert with_settings(config, {"kernels": "reference"}).kernels == "reference"
    assert repr(config) == (
        "EngineConfig(memory=MemoryConfig(max_context_tokens=5, kv_type='f32'))"
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hot_devise": "cpu"}, "did you mean hot_device"),
        ({"zzz": 1}, "there are "),
        ({"ctx": "8k"}, "ctx is '8k': give an integer"),
        ({"ctx": True}, "ctx is True: give an integer"),
        ({"ctx": 0}, "--ctx is 0"),
        ({"hot_device": "gpu"}, "--hot-device is 'gpu'; choose one of"),
        ({"heat": "no"}, "heat is 'no': give true or false"),
        ({"hot": [1]}, "hot is .1.: give a text, or several"),
        ({"device_memory": "12"}, "12GiB"),
        ({"gpu_layers": "few"}, "a number, all or auto"),
        ({"kernels": None}, "--kernels is None"),
        ({"memory": 5}, "memory is 5: give a MemoryConfig"),
    ],
)
def test_what_can_not_be_is_refused(values, said):
    """The error names the setting and the fix."""
    with pytest.raises(ConfigError, match=said):
        with_settings(EngineConfig(), values)
