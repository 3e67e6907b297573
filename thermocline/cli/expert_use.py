"""Where `thermocline plan` takes the use of experts from: a file of either kind, or what is kept of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from thermocline.experts.heat import HeatRecord
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.spec import ModelSpec


class KnownUse(NamedTuple):
    """heat: how often each expert was chosen, [layers][experts]. repeats: by layer, the share of a token's experts that the
    token before chose too. None where that is not known.
    """

    heat: Sequence[Sequence[float]] | None = None
    repeats: Sequence[float] | None = None


def expert_use(
    file: ModelFile, spec: ModelSpec, recorded: Path | None, heat_file: str | None, *, no_heat: bool
) -> KnownUse:
    """Return what is known, or wanted, of the use of experts.

    recorded, heat_file, no_heat: --heat, --heat-file and --no-heat, of which one may be given. Raises ConfigError.
    """
    from thermocline.experts.heat_file import find_heat, heat_home, load_heat

    given = {"--heat": recorded, "--heat-file": heat_file, "--no-heat": no_heat or None}
    flags = [flag for flag, value in given.items() if value is not None]
    if len(flags) > 1:
        raise ConfigError(f"{' and '.join(flags)} exclude each other: leave one out")
    if no_heat:
        return KnownUse()
    if recorded is not None:
        return _read(recorded, spec)
    home = heat_home(file, spec, heat_file)
    if home.is_given and find_heat(home) is None:
        raise ConfigError(
            f"--heat-file is {heat_file}, which is not there: give it to run first, or leave it out"
        )
    known = load_heat(home)
    return KnownUse() if known is None else _of_record(known)


def _of_record(known: HeatRecord) -> KnownUse:
    return KnownUse(known.warmth.tolist(), known.repeat_shares())


def _read(path: Path, spec: ModelSpec) -> KnownUse:
    from thermocline.experts.heat_file import is_heat_file, read_heat
    from thermocline.traces.chrome_reader import read_chrome

    if is_heat_file(path):
        found = _of_record(read_heat(path)[1])
    else:
        use = read_chrome(path).expert_use
        if use is None:
            raise ConfigError(f"{path} says nothing of experts: record it with run --trace")
        found = KnownUse(use.counts)
    rows = found.heat or ()
    if len(rows) != spec.num_layers or {len(row) for row in rows} != {spec.router.num_experts}:
        raise ConfigError(f"{path} was recorded with another model: its layers or experts differ")
    return found
