"""The performance of a machine: constants with their origin, and the errors of their predictions."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ep import _simulate
from megatron_ep.config import is_number, nearest_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CARD = tuple(name for name in _simulate.CONSTANTS if name.startswith("card"))
FOLDER = Path(__file__).parent / "machines"
# The largest allowed errors of predictions of measurements that were not fitted: median, p90, worst. Calls of the
# low-latency mode take only a few dozen us, so that single microseconds matter.
MAX_ERROR = {"normal": (0.05, 0.10, 0.20), "low-latency": (0.20, 0.25, 0.25)}


@dataclass(frozen=True)
class HeldOut:
    """The relative errors of predictions of measurements that no constant was fitted to.

    figures: number of measurements.
    measured: their date and the version of this project, which may be older.
    """

    figures: int
    median: float
    p90: float
    worst: float
    measured: str

    def __str__(self) -> str:
        return f"median {self.median:.1%}, p90 {self.p90:.1%}, worst {self.worst:.1%} of {self.figures} figures"


@dataclass(frozen=True)
class Machine:
    """A machine file.

    sms: SMs of a GPU.
    constants: ns and GB/s, with the names of csrc/tools/simulate/cluster.h.
    held_out: errors of the GPU's constants, by mode (`Case.mode`); none for a machine that was not measured.
    unmeasured: origin of the constants of a machine whose predictions were never compared with measurements; else "".
    band: constants of the network card that have not been measured, and their bounds.
    """

    name: str
    sms: int
    constants: dict[str, float]
    held_out: dict[str, HeldOut]
    band: dict[str, tuple[float, ...]]
    unmeasured: str = ""

    @staticmethod
    def load(name: str) -> Machine:
        """Loads a machine. name: a machine of the package, or a file.

        Raises ValueError if the file is not a machine file, or if its prediction errors are too large.
        """
        path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
        try:
            with open(path, "rb") as file:
                found = tomllib.load(file)
        except FileNotFoundError:
            known = sorted(file.stem for file in FOLDER.glob("*.toml"))
            raise ValueError(f"machine is {name!r}, must be a TOML file or one of {', '.join(known)}") from None
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"machine {name}: {error}") from None
        return parse(path.stem, found)

    @staticmethod
    def default(uses_network: bool) -> Machine:
        """Returns the default machine. uses_network: whether there are several nodes."""
        return Machine.load("h200_cx7" if uses_network else "h200_nvlink")

    def with_constants(self, **constants: float) -> Machine:
        """Returns a copy with some constants replaced."""
        return dataclasses.replace(self, constants=self.constants | constants)

    @property
    def has_card(self) -> bool:
        """Returns whether its GPUs have network cards."""
        return CARD[0] in self.constants

    def compiled(self) -> _simulate.Machine:
        """Returns the machine for the extension, which does not use the constants of a card that is absent."""
        return _simulate.Machine(sms=self.sms, constants=dict.fromkeys(CARD, 1.0) | self.constants)


def parse(name: str, found: dict[str, Any]) -> Machine:
    """Builds a machine from the content of a machine file. `base` names another one, whose constants it inherits."""

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise ValueError(f"machine {name}: {what}")

    base = Machine.load(found["base"]) if "base" in found else None
    constants = dict(base.constants) if base else {}
    for constant, entry in found.get("constants", {}).items():
        near = nearest_name(constant, _simulate.CONSTANTS)
        require(constant in _simulate.CONSTANTS, f"there is no constant {constant}{near}")
        require(
            isinstance(entry, dict) and is_number(entry.get("value")) and entry["value"] >= 0,
            f"{constant} must have a value >= 0",
        )
        require(bool(entry.get("origin")) and bool(entry.get("date")), f"{constant} must have an origin and a date")
        constants[constant] = float(entry["value"])
    optional = CARD if constants.keys().isdisjoint(CARD) else ()
    missing = [constant for constant in _simulate.CONSTANTS if constant not in constants and constant not in optional]
    require(not missing, f"lacks {', '.join(missing)}")
    sms = found.get("sms", base.sms if base else None)
    if not isinstance(sms, int) or sms < 1:
        raise ValueError(f"machine {name}: sms must be an int > 0")
    unmeasured = found.get("unmeasured", "")
    require(isinstance(unmeasured, str), "unmeasured must be a text")
    held_out = dict(base.held_out) if base and not unmeasured else {}
    try:
        held_out |= {mode: HeldOut(**of) for mode, of in found.get("held_out", {}).items()}
    except TypeError as error:
        raise ValueError(f"machine {name}: held_out: {error}") from None
    require(not (unmeasured and held_out), "has held_out, so it is not unmeasured")
    for mode, (median, p90, worst) in MAX_ERROR.items() if not unmeasured else ():
        require(mode in held_out, f"its prediction error is unknown: held_out.{mode} is missing")
        off = held_out[mode]
        require(
            off.median <= median and off.p90 <= p90 and off.worst <= worst,
            f"predicts mode {mode} too badly: {off}; may be {median:.0%}, {p90:.0%}, {worst:.0%}",
        )
    band = {constant: tuple(map(float, values)) for constant, values in found.get("band", {}).items()}
    for constant in band:
        require(constant in constants, f"band: there is no constant {constant}")
    return Machine(name, sms, constants, held_out, band, unmeasured)
