"""Where the log of a command goes: stderr, as text or as one JSON object per line. Knows no command."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Literal, get_args

import click

from thermocline.cli.console import one_line
from thermocline.cli.sources import SettingOption

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LogFormat = Literal["text", "json"]
_LOGGER: Final = "thermocline"
_ACCESS: Final = "thermocline.access"


class _TextFormatter(logging.Formatter):
    """The message after its time, on one line but for a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        text = f"{time} {level}{one_line(record.getMessage())}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _JsonFormatter(logging.Formatter):
    """One JSON object with time, level, logger and message; an access line's fields beside them."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON of a record."""
        body = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body)


@contextmanager
def logging_to_stderr(log_format: LogFormat, *, logs_access: bool) -> Iterator[None]:
    """Write this package's log to stderr while the context is open; logs_access: with a line per request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    logger, access = logging.getLogger(_LOGGER), logging.getLogger(_ACCESS)
    before = access.level
    logger.addHandler(handler)
    if logs_access:
        access.setLevel(logging.INFO)
    try:
        yield
    finally:
        access.setLevel(before)
        logger.removeHandler(handler)


def log_options(command: Callable[..., object]) -> Callable[..., object]:
    """Add --access-log and --log-format as arguments `logs_access` and `log_format`."""
    access = click.option(
        "--access-log",
        "logs_access",
        cls=SettingOption,
        is_flag=True,
        help="Log a line per request: client, method, path, status, seconds. Never bodies or keys.",
    )
    form = click.option(
        "--log-format",
        cls=SettingOption,
        type=click.Choice(get_args(LogFormat)),
        default="text",
        show_default=True,
        help="Form of the log on stderr: text, or json (one object per line).",
    )
    return access(form(command))
