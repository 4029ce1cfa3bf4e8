"""The plugin's environment variables. Every process of a vLLM server reads them once and checks all of them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dcr_daemon.vllm_plugin.compat import UnsupportedVllm

STAGE_SHARE = 0.10  #: of a rank's weight bytes: at 12 bytes per change of a BF16 element, 1.67 % of them
STAGE_FLOOR = 2 << 30
STAGE_WHOLE = 12  #: bytes per weight byte that suffice for a change of every element, of any width
COMPUTED_SHARE = 0.001  #: of the model's canonical bytes: the BF16 routers of the largest mixtures are 0.02 %
COMPUTED_FLOOR = 64 << 20
WATCHDOG = 900.0
SOCKET_LIMIT = 107  #: bytes of a unix socket's path, the kernel's limit


@dataclass(frozen=True, slots=True)
class Settings:
    """`docs/VLLM.md` explains each variable.

    `socket`: None switches the plugin off. `stage_cap`: bytes of host memory each rank may hold for one transaction,
    None for a share of its weights. `computed_cap` (`DCR_LOADED_CAP`): bytes of all tensors that the loader computes
    with, None for a share of the model. `background_cpus`: cores for the workers' threads, None for the default.
    `watchdog`: seconds after which a worker that does not return ends the engine, 0 for never.
    `gate`: "port" keeps the port shut until the engine is proved, "health" opens it and lets /health say so.
    """

    socket: Path | None = None
    pause: str = "keep"
    caches: str = "reset"
    stage_cap: int | None = None
    computed_cap: int | None = None
    background_cpus: tuple[int, ...] | None = None
    watchdog: float = WATCHDOG
    gate: str = "port"

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Raises `UnsupportedVllm` naming the variable and what it may be."""
        socket = environ.get("DCR_SOCKET", "")
        if len(socket.encode()) > SOCKET_LIMIT:
            raise UnsupportedVllm(f"dcr: DCR_SOCKET is longer than {SOCKET_LIMIT} bytes, the limit of a unix socket")
        if socket and not Path(socket).is_absolute():
            raise UnsupportedVllm(f"dcr: DCR_SOCKET={socket} is not an absolute path")
        return cls(
            socket=Path(socket) if socket else None,
            pause=_one_of(environ, "DCR_PAUSE", ("keep", "wait", "abort")),
            caches=_one_of(environ, "DCR_CACHES", ("reset", "keep")),
            stage_cap=_bytes(environ, "DCR_STAGE_CAP", least=1 << 20),
            computed_cap=_bytes(environ, "DCR_LOADED_CAP", least=0),
            background_cpus=_cpus(environ.get("DCR_BACKGROUND_CPUS", "")),
            watchdog=_number(environ, "DCR_WATCHDOG", WATCHDOG, least=0),
            gate=_one_of(environ, "DCR_GATE", ("port", "health")),
        )


def stage_cap(cap: int | None, weight_bytes: int) -> int:
    """Bytes of host memory that a rank with these weights reserves for one transaction, unless `cap` sets them."""
    if cap is not None:
        return cap
    return min(max(STAGE_FLOOR, int(STAGE_SHARE * weight_bytes)), STAGE_WHOLE * weight_bytes + (1 << 20))


def computed_cap(cap: int | None, model_bytes: int) -> int:
    """Bytes of tensors of a model that the loader may compute with, unless `cap` sets them."""
    return max(COMPUTED_FLOOR, int(COMPUTED_SHARE * model_bytes)) if cap is None else cap


def _bytes(environ: Mapping[str, str], name: str, *, least: int) -> int | None:
    if not environ.get(name):
        return None
    return int(_number(environ, name, 0, least=least))


def _one_of(environ: Mapping[str, str], name: str, values: tuple[str, ...]) -> str:
    value = environ.get(name) or values[0]
    if value not in values:
        raise UnsupportedVllm(f"dcr: {name}={value} is not one of {', '.join(values)}")
    return value


def _number(environ: Mapping[str, str], name: str, default: float, *, least: float) -> float:
    text = environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not (math.isfinite(value) and value >= least):
        raise UnsupportedVllm(f"dcr: {name}={text} is not a finite number of at least {least:g}")
    return value


def _cpus(text: str) -> tuple[int, ...] | None:
    """A kernel-style list: `0-3,8`."""
    if not text:
        return None
    cpus: set[int] = set()
    for item in text.split(","):
        first, _, last = item.partition("-")
        if not first.strip().isdigit() or (last and not last.strip().isdigit()):
            raise UnsupportedVllm(f"dcr: DCR_BACKGROUND_CPUS={text} is not a list of cores such as 0-3,8")
        cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))
