"""Says what went wrong between here and the hub: errors of the library, the network and the disk as HubError."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from thermocline.errors import HubError, HubUnreachableError
from thermocline.hub.cache import endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

MAKE_ROOM: Final = (
    "make room (thermocline list shows models, thermocline rm removes one), name a larger disk with HF_HOME, or choose a "
    "smaller quantisation"
)
_DISK_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Raise errors of the library, of the network and of the disk as HubError."""
    from huggingface_hub import errors

    # The library's own base of network errors, whatever client it uses.
    network: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    try:
        yield
    except (network, OSError, errors.EntryNotFoundError, RuntimeError) as error:
        raise _translated(name, error) from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _no_hub(name, error) from error


def _no_hub(name: str, error: BaseException) -> HubError:
    return HubError(
        name,
        f"{endpoint()} answers unlike a hub ({type(error).__name__}: {error})",
        fix="check HF_ENDPOINT",
    )


def _translated(name: str, error: BaseException) -> HubError:
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _translated(name, error.__cause__)
    if isinstance(error, errors.HfHubHTTPError):
        return _refused(name, error, getattr(error.response, "status_code", 0))
    if isinstance(error, errors.FileMetadataError):
        return _no_hub(name, error)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return HubUnreachableError(
            name,
            "HF_HUB_OFFLINE forbids asking the hub",
            fix="unset it, or use a model that thermocline list shows",
        )
    number = getattr(error, "errno", None)
    if isinstance(error, RuntimeError):
        # What the package for Xet raises for everything; the system's words are in its text.
        number = next((n for n in _DISK_ERRORS if f"(os error {n})" in str(error)), None)
    if number in _DISK_ERRORS:
        what = os.strerror(number)
        return HubError(name, f"the cache could not be written: {what}", fix=MAKE_ROOM)
    if isinstance(error, OSError) and number is not None:
        where = "" if error.filename is None else f"{error.filename}: "
        return HubError(
            name,
            f"{where}{os.strerror(number)}",
            fix="check the cache's folder (HF_HOME) and its permissions",
        )
    return HubUnreachableError(
        name,
        f"{endpoint()} can not be reached, or broke off ({error})",
        fix="check the network and pull again; whole files are kept",
    )


def _refused(name: str, error: BaseException, status: int) -> HubError:
    """Return what an answer of the hub with an error's status means."""
    from huggingface_hub import errors

    repo = name.partition(":")[0]
    log_in = "log in (hf auth login) or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return HubError(
            name,
            "this model is gated, and without a token, or with this one, there is no access",
            fix=f"accept its conditions at {endpoint()}/{repo}, then {log_in}",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(
            name,
            f"{endpoint()} has no such model, or it is private",
            fix=f"check the spelling; for a private model {log_in}",
        )
    if isinstance(error, (errors.EntryNotFoundError, errors.RevisionNotFoundError)):
        return HubError(
            name, "the file is not there any more", fix="pull again; the repository has changed"
        )
    if status in (401, 403):
        return HubError(
            name,
            f"the hub refuses the token (HTTP {status})",
            fix=f"give a valid one that may read this model: {log_in}",
        )
    if status == 429:
        return HubUnreachableError(
            name, "the hub gets too many requests from here", fix=f"wait some minutes, or {log_in}"
        )
    what = f"{endpoint()} answers with HTTP {status}"
    if status >= 500:
        return HubUnreachableError(name, what, fix="try again later")
    return HubError(name, what, fix="check HF_ENDPOINT and the model's page there")
