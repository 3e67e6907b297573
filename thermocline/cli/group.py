"""How every command ends: one plain error line, a clean Ctrl-C, silence when the reader has left.

Owns exit codes: 1 for errors, 2 for usage (click's), 130 for Ctrl-C, 141 for a closed pipe. Knows no
command.
"""

from __future__ import annotations

import os
import sys
from typing import IO, Any

import click

from thermocline.cli.console import one_line
from thermocline.errors import ThermoclineError

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class CommandError(click.ClickException):
    """Ends a command with `error: ...` on stderr and exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the error as one line."""
        click.echo(f"error: {one_line(self.message)}", file=file, err=file is None)


class ErrorLineGroup(click.Group):
    """Lists commands in the order of adding, and maps the errors of all of them at this one place."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which they were added."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's own signature
        """Run the command that was asked for."""
        try:
            result = super().invoke(ctx)
            # Here, so that a reader that left is noticed here and not when Python shuts down.
            sys.stdout.flush()
        except ThermoclineError as error:
            raise CommandError(str(error)) from error
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            _discard_stdout()
            ctx.exit(EXIT_BROKEN_PIPE)
        except MemoryError as error:
            raise CommandError(
                "the memory is not enough: give less context (--ctx), or close other programs"
            ) from error
        except OSError as error:
            discard_unwritable()
            where = "" if error.filename is None else f"{error.filename}: "
            what = error.strerror or str(error)
            raise CommandError(
                f"{where}{what}; check the path, the permissions and the free space"
            ) from error
        return result


def discard_unwritable() -> None:
    """Drop buffered output that can not be written: Python would try again when it shuts down."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard_stdout()


def _discard_stdout() -> None:
    """Point stdout at nothing, so that what is still buffered can be flushed at the end."""
    try:
        target = sys.stdout.fileno()
    except (OSError, ValueError):
        return  # not a real file
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, target)
    os.close(nothing)
