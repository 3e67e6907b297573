"""Keeps a model's heat in a small file: its form, its place, and the check that it is this model's.

The place is beside the model; where that folder can not be written, the user's cache directory. Knows no engine.
"""

from __future__ import annotations

import hashlib
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
import numpy as np

from thermocline.config import HALF_LIFE_TOKENS
from thermocline.errors import ConfigError
from thermocline.experts.heat import HeatRecord
from thermocline.machine import user_cache_folder
from thermocline.models.footprint import Role, tensor_role

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.spec import ModelSpec

_FORMAT: Final = "thermocline-heat"
_SNIFF_BYTES: Final = 64
_VERSION: Final = 1
_SUFFIX: Final = ".heat.json"
# A thousand layers of a thousand experts stay below it.
_MAX_BYTES: Final = 64 << 20
_ROUTER_SAMPLE_BYTES: Final = 4096
_PACKAGE: Final = Path(__file__).resolve().parents[1]

_Choices = Annotated[float, msgspec.Meta(ge=0, le=2**53)]


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which model a heat is of: its shape, and a digest that a model of other weights does not have."""

    name: str
    architecture: str
    num_layers: int
    num_experts: int
    digest: str


class _Body(msgspec.Struct):
    """The file, as JSON; numbers of heat have four digits."""

    format: Literal["thermocline-heat"]
    version: int
    model: ModelIdentity
    half_life_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    num_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    heat: list[list[_Choices]]


def identify(file: ModelFile, spec: ModelSpec) -> ModelIdentity:
    """Return the identity of an open model: of its tensor table and of the first router's first weights.

    Raises ModelFileError for a closed file.
    """
    router = spec.router
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{spec.architecture}:{router.num_experts}:{router.num_experts_used}".encode())
    for tensor in file.tensors.values():
        digest.update(f"|{tensor.name}:{tensor.shape}:{tensor.format.name}".encode())
    for name in file.tensors:
        if tensor_role(name) is Role.ROUTER:
            digest.update(file.view(name).reshape(-1)[:_ROUTER_SAMPLE_BYTES].tobytes())
            break
    return ModelIdentity(
        spec.name, spec.architecture, spec.num_layers, router.num_experts, digest.hexdigest()
    )


@dataclass(frozen=True, slots=True)
class HeatHome:
    """Where the heat of one model is kept: absolute paths, the best place first. model: its own path."""

    model: Path
    identity: ModelIdentity
    places: tuple[Path, ...]


def heat_home(file: ModelFile, spec: ModelSpec) -> HeatHome:
    """Return the home of an open model's heat. Raises ModelFileError for a closed file."""
    first = next((t.path for t in file.tensors.values() if t.shard == 0), file.path)
    model, identity = Path(first).absolute(), identify(file, spec)
    return HeatHome(model, identity, heat_places(model, identity))


def heat_places(model: Path, identity: ModelIdentity) -> tuple[Path, ...]:
    """Return the files in which heat may be kept: beside the model, and in the user's cache.

    Nothing is kept inside of this package, so that the built-in model's heat is the user's own.
    """
    beside, folder = model.with_name(model.name + _SUFFIX), user_cache_folder()
    places = () if _PACKAGE in beside.resolve().parents else (beside,)
    if folder is None:
        return places
    own = folder.absolute() / "heat" / f"{model.name}-{identity.digest[:12]}{_SUFFIX}"
    return (*places, own)


def find_heat(home: HeatHome) -> Path | None:
    """Return the file in which this model's heat is, the newest of several; None where there is none."""
    found = []
    for place in home.places:
        with suppress(OSError):
            if place.is_file():
                found.append((place.stat().st_mtime_ns, place))
    return max(found)[1] if found else None


def load_heat(home: HeatHome) -> HeatRecord | None:
    """Return the heat that was kept of this model, None where there is none.

    Raises ConfigError when it is damaged or of another model.
    """
    place = find_heat(home)
    if place is None:
        return None
    found, record = read_heat(place)
    if found.digest != home.identity.digest or record.warmth.shape != _shape(home.identity):
        raise ConfigError(
            f"{place} is of another model than {home.model}: run `thermocline heat --reset {home.model}`"
        )
    return record


def is_heat_file(path: Path) -> bool:
    """Return whether a file says that it is one; False for what can not be read."""
    with suppress(OSError), path.open("rb") as file:
        return _FORMAT.encode() in file.read(_SNIFF_BYTES)
    return False


def read_heat(path: Path) -> tuple[ModelIdentity, HeatRecord]:
    """Return what a file says, of whatever model. Raises ConfigError if it is none that `write_heat` wrote."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise ConfigError(f"{path} is larger than any heat file: delete it or name another")
        body = msgspec.json.decode(raw, type=_Body)
    except OSError as error:
        raise ConfigError(f"{path} can not be read ({error.strerror}): name another") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no heat file ({error}): delete it or name another") from error
    if body.version != _VERSION:
        raise ConfigError(
            f"{path} has version {body.version} of the heat file, this program has {_VERSION}: "
            "delete it or update thermocline"
        )
    if {len(row) for row in body.heat} != {body.model.num_experts} or (
        len(body.heat) != body.model.num_layers
    ):
        raise ConfigError(
            f"{path} has other layers or experts than it says: delete it or name another"
        )
    return body.model, HeatRecord(np.array(body.heat), body.num_tokens, body.half_life_tokens)


def write_heat(path: Path, identity: ModelIdentity, record: HeatRecord) -> None:
    """Write the file whole or not at all. Raises OSError."""
    heat = [[float(f"{value:.4g}") for value in row] for row in record.warmth.tolist()]
    body = _Body(_FORMAT, _VERSION, identity, record.half_life_tokens, record.num_tokens, heat)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(msgspec.json.encode(body))
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def keep_heat(home: HeatHome, fresh: HeatRecord) -> Path | None:
    """Add what was seen to what was kept before, and return where it is now; None where nothing can be written.

    What was kept meanwhile by another process counts; what can not be used is replaced.
    """
    known = HeatRecord(np.zeros(_shape(home.identity)), 0, HALF_LIFE_TOKENS)
    with suppress(ConfigError):
        known = load_heat(home) or known
    for place in home.places:
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_heat(place, home.identity, known.followed_by(fresh))
            return place
    return None


def reset_heat(home: HeatHome) -> tuple[Path, ...]:
    """Delete what is kept of this model and return the files that were. Raises OSError."""
    found = tuple(place for place in home.places if place.is_file())
    for place in found:
        place.unlink()
    return found


def _shape(identity: ModelIdentity) -> tuple[int, int]:
    return identity.num_layers, identity.num_experts
