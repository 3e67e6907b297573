"""Keeps a model's heat in a small file: its form, its place, and the check that it is this model's.

The place is in the user's cache directory, or the one that the user names; never beside the model, whose folder
may be shared. Knows no engine.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
import numpy as np

from thermocline.config import HALF_LIFE_TOKENS
from thermocline.environment import user_cache_folder
from thermocline.errors import ConfigError
from thermocline.experts.heat import NO_REPEATS, HeatRecord
from thermocline.experts.heat_lock import locked
from thermocline.models.footprint import Role, tensor_role
from thermocline.whole_files import whole_file

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
# What is added every few minutes must not get lost in the rounding of what is there.
_DECIMALS: Final = 4
_PACKAGE: Final = Path(__file__).resolve().parents[1]

_Choices = Annotated[float, msgspec.Meta(ge=0, le=2**53)]
_Repeats = tuple[_Choices, _Choices]


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which model a heat is of: its shape, and a digest that a model of other weights does not have."""

    name: str
    architecture: str
    num_layers: int
    num_experts: int
    digest: str


class _Body(msgspec.Struct):
    """The file, as JSON; numbers of heat have four decimals."""

    format: Literal["thermocline-heat"]
    version: int
    model: ModelIdentity
    half_life_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    num_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    heat: list[list[_Choices]]
    repeats: list[_Repeats] = []  # which former versions did not write


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
    """Where the heat of one model is kept, as absolute paths. model: its own path.

    place: the file that is read and written, None for a user without a cache directory. is_given: the user named it.
    earlier: the file beside the model in which former versions kept it. It is read while `place` has nothing,
    and never written.
    """

    model: Path
    identity: ModelIdentity
    place: Path | None
    earlier: Path | None
    is_given: bool = False


def heat_home(file: ModelFile, spec: ModelSpec, given: str | None = None) -> HeatHome:
    """Return the home of an open model's heat. given: the file that the user names for it.

    Raises ModelFileError for a closed file, ConfigError for a name that can not be a file.
    """
    first = next((t.path for t in file.tensors.values() if t.shard == 0), file.path)
    model, identity = Path(first).absolute(), identify(file, spec)
    if given is None:
        place, earlier = heat_places(model, identity)
        return HeatHome(model, identity, place, earlier)
    named = Path(given).absolute()
    if not named.parent.is_dir():
        raise ConfigError(
            f"--heat-file is {given}, but there is no folder {named.parent}: make it or name another file"
        )
    if named.exists() and not named.is_file():
        raise ConfigError(f"--heat-file is {given}, which is no file: name a file")
    return HeatHome(model, identity, named, None, is_given=True)


def heat_places(model: Path, identity: ModelIdentity) -> tuple[Path | None, Path | None]:
    """Return the place in the user's cache directory, and the one beside the model of former versions.

    The first has the model's name and digest, not its folder: a file that was moved keeps its heat, and two
    files of one name have one each. Beside the built-in model there never was one.
    """
    beside, folder = model.with_name(model.name + _SUFFIX), user_cache_folder()
    earlier = None if _PACKAGE in beside.resolve().parents else beside
    if folder is None:
        return None, earlier
    name = f"{model.name}-{identity.digest[:12]}{_SUFFIX}"
    return folder.absolute() / "heat" / name, earlier


def find_heat(home: HeatHome) -> Path | None:
    """Return the file in which this model's heat is; None where there is none."""
    for place in (home.place, home.earlier):
        with suppress(OSError):
            if place is not None and place.is_file():
                return place
    return None


def why_not_kept(home: HeatHome) -> str | None:
    """Return why heat can not be written and what to do about it; None where it can, as far as permissions tell."""
    if home.place is None:
        return (
            "the use of experts is not kept, because this user has no cache directory: "
            "set THERMOCLINE_CACHE to a folder or give --heat-file"
        )
    folder = home.place.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return None
    return (
        f"the use of experts is not kept, because {home.place} can not be written: "
        "set THERMOCLINE_CACHE to another folder or give --heat-file"
    )


def load_heat(home: HeatHome) -> HeatRecord | None:
    """Return the heat that was kept of this model, None where there is none.

    Raises ConfigError when it is damaged or of another model.
    """
    place = find_heat(home)
    if place is None:
        return None
    found, record = read_heat(place)
    if found.digest != home.identity.digest or record.warmth.shape != _shape(home.identity):
        way = (
            "name another with --heat-file"
            if home.is_given
            else f"run `thermocline heat --reset {home.model}`, or give --no-heat"
        )
        raise ConfigError(f"{place} is of another model than {home.model}: {way}")
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
    if len(body.repeats) not in {0, len(body.heat)} or any(a > b for a, b in body.repeats):
        raise ConfigError(
            f"{path} has more repeated choices than choices, or of other layers: delete it or name another"
        )
    repeats = np.array(body.repeats) if body.repeats else NO_REPEATS
    record = HeatRecord(np.array(body.heat), body.num_tokens, body.half_life_tokens, repeats)
    return body.model, record


def write_heat(path: Path, identity: ModelIdentity, record: HeatRecord) -> None:
    """Write the file whole or not at all. Raises OSError."""
    heat = record.warmth.round(_DECIMALS).tolist()
    repeats = np.broadcast_to(record.repeats, (len(heat), 2)).round(_DECIMALS).tolist()
    body = _Body(
        *(_FORMAT, _VERSION, identity, record.half_life_tokens, record.num_tokens, heat, repeats)
    )
    with whole_file(path) as file:
        file.write(msgspec.json.encode(body))


def keep_heat(home: HeatHome, fresh: HeatRecord) -> Path | None:
    """Add what was seen to what was kept before, and return where it is now; None where it can not be written.

    What other processes keep at the same time counts. What can not be used is replaced, except in a file that
    the user named, which may be anything. Blocks while another process keeps heat there.
    """
    place = home.place
    if place is None:
        return None
    with suppress(OSError):
        if not home.is_given:
            place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place):
            known = _known_or_nothing(home)
            if known is not None:
                write_heat(place, home.identity, known.followed_by(fresh))
                return place
    return None


def _known_or_nothing(home: HeatHome) -> HeatRecord | None:
    """Return what is known, if only nothing; None where the user named a file that is not this model's heat."""
    nothing = HeatRecord(np.zeros(_shape(home.identity)), 0, HALF_LIFE_TOKENS)
    try:
        return load_heat(home) or nothing
    except ConfigError:
        return None if home.is_given else nothing


def reset_heat(home: HeatHome) -> tuple[Path, ...]:
    """Delete what is kept of this model and return the files that were, one beside the model included.

    Raises ConfigError for a file that can not be deleted, or that the user named and that is no heat file.
    """
    found = []
    for place in (home.place, home.earlier):
        if place is None or not place.is_file():
            continue
        if home.is_given and not is_heat_file(place):
            raise ConfigError(f"--heat-file is {place}, which is no heat file: name another")
        try:
            place.unlink()
        except OSError as error:
            raise ConfigError(
                f"{place} can not be deleted ({error.strerror}): delete it, or give --no-heat"
            ) from error
        found.append(place)
    return tuple(found)


def _shape(identity: ModelIdentity) -> tuple[int, int]:
    return identity.num_layers, identity.num_experts
