"""Turns the config section `nccl` into environment variables for NCCL. Imports no torch."""

import socket
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from trainer.annotated import AtLeast, AtMost, PositiveInt, check_fields, check_names
from trainer.errors import ConfigError, nearest

ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
FUNCTIONS = ("allreduce", "broadcast", "reduce", "allgather", "reducescatter")
DISTANCES = ("LOC", "PIX", "PXB", "PHB", "SYS")
LEVELS = ("VERSION", "WARN", "INFO", "TRACE")

VARIABLES = {
    "net": "NCCL_NET",
    "interface": "NCCL_SOCKET_IFNAME",
    "socket_threads": "NCCL_SOCKET_NTHREADS",
    "sockets_per_thread": "NCCL_NSOCKS_PERTHREAD",
    "ib_disable": "NCCL_IB_DISABLE",
    "ib_hca": "NCCL_IB_HCA",
    "gpu_direct": "NCCL_NET_GDR_LEVEL",
    "collnet": "NCCL_COLLNET_ENABLE",
    "algo": "NCCL_ALGO",
    "proto": "NCCL_PROTO",
    "buffer_mib": "NCCL_BUFFSIZE",
    "min_channels": "NCCL_MIN_CTAS",
    "max_channels": "NCCL_MAX_CTAS",
    "debug": "NCCL_DEBUG",
}


@check_names("nccl.")
@dataclass(frozen=True)
class NCCLOptions:
    """Settings of NCCL; None leaves the choice to NCCL.

    Names and values follow "Environment Variables" in the user guide of NCCL 2.30
    (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html). `algo` and `proto` are one name, a list of names, or
    that page's form: "^NVLS", "allreduce:Tree;broadcast:Ring".
    """

    net: str | None = None  # IB, Socket, or a plugin's name; NCCL then uses no other network
    interface: str | None = None  # prefixes: eth; exactly: =eth0; all but: ^docker
    socket_threads: Annotated[PositiveInt, AtMost(16)] | None = None  # per connection
    sockets_per_thread: Annotated[PositiveInt, AtMost(64)] | None = None
    ib_disable: bool | None = None  # InfiniBand and RoCE
    ib_hca: str | None = None  # prefixes: mlx5; exactly, with a port: =mlx5_0:1,mlx5_1:1
    gpu_direct: str | None = None  # largest distance of network card and GPU for direct reads: LOC (never) to SYS
    collnet: bool | None = None  # sums inside the network by a plugin such as SHARP
    algo: str | list[str] | None = None
    proto: str | list[str] | None = None
    buffer_mib: Annotated[float, AtLeast(2**-10)] | None = None  # between two GPUs; NCCL has 4
    min_channels: Annotated[PositiveInt, AtMost(64)] | None = None  # each channel occupies one thread block of the GPU
    max_channels: Annotated[PositiveInt, AtMost(64)] | None = None
    debug: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "nccl.")
        sockets = (self.socket_threads or 1) * (self.sockets_per_thread or 1)
        if sockets > 64:
            raise ConfigError(
                f"nccl.sockets_per_thread={self.sockets_per_thread}: with nccl.socket_threads={self.socket_threads} "
                f"that makes {sockets} sockets per connection; NCCL has at most 64"
            )
        if (self.min_channels or 1) > (self.max_channels or 64):
            most = f"nccl.max_channels={self.max_channels}"
            raise ConfigError(f"nccl.min_channels={self.min_channels}: must be at most {most}")
        for key in ("net", "interface", "ib_hca"):
            value = getattr(self, key)
            if value is not None and (not value or " " in value):
                raise ConfigError(f"nccl.{key}={value}: must be names, separated by commas without spaces")
        for key, names in (("gpu_direct", DISTANCES), ("debug", LEVELS)):
            if getattr(self, key) is not None:
                refuse_unknown(f"nccl.{key}={getattr(self, key)}", getattr(self, key), names)
        for key, names in (("algo", ALGORITHMS), ("proto", PROTOCOLS)):
            if getattr(self, key) is not None:
                refuse_names(key, as_text(getattr(self, key)), names)
        if self.ib_disable and (self.net or "").upper() == "IB":
            raise ConfigError("nccl.ib_disable=true: nccl.net=IB needs InfiniBand; set one of them to null")

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the keys that are set."""
        values = {name: getattr(self, name) for name in VARIABLES}
        if self.buffer_mib is not None:
            values["buffer_mib"] = int(self.buffer_mib * 2**20)
        return {VARIABLES[name]: as_text(value) for name, value in values.items() if value is not None}


def as_text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(value)
    return str(int(value)) if isinstance(value, bool) else str(value)


def refuse_unknown(setting: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise ConfigError(f"{setting}: NCCL knows no {name or 'empty name'}; {nearest(name, names)}")


def refuse_names(key: str, text: str, names: tuple[str, ...]) -> None:
    """Refuse any text but NAMES, or FUNCTION:NAMES;FUNCTION:NAMES;... A leading ^ in NAMES means all except those."""
    for part in text.split(";"):
        function, colon, listed = part.rpartition(":")
        if colon:
            refuse_unknown(f"nccl.{key}={text}", function, FUNCTIONS)
        for name in listed.removeprefix("^").split(","):
            refuse_unknown(f"nccl.{key}={text}", name, names)
    # Since 2.24 NCCL does not fall back to Ring, the only algorithm for a broadcast (NVIDIA/nccl issue 317).
    if key == "algo" and not {":", ";"} & set(text) and text.startswith("^") == ("Ring" in text.strip("^").split(",")):
        raise ConfigError(
            f"nccl.algo={text}: DDP's broadcast needs Ring; add it, or limit this to nccl.algo=allreduce:{text}"
        )


@contextmanager
def applied(options: NCCLOptions, environ: MutableMapping[str, str]) -> Iterator[None]:
    """Set the variables for processes that start in this context, and for groups that first communicate in it.

    The command does this. A Trainer made in Python needs it:

        with applied(NCCLOptions(interface="=eth0"), os.environ):
            Trainer(recipe, batch=64).fit()

    Raise ConfigError if `environ` already has another value.
    """
    variables = options.environment()
    for key, variable in VARIABLES.items():
        if variable in variables and environ.get(variable, variables[variable]) != variables[variable]:
            raise ConfigError(
                f"nccl.{key}={as_text(getattr(options, key))}: {variable}={environ[variable]} is set in the "
                f"environment; unset it, or nccl.{key}=null"
            )
    added = variables.keys() - environ.keys()
    environ.update(variables)
    try:
        yield
    finally:
        for variable in added:
            environ.pop(variable, None)


def interface(environ: Mapping[str, str]) -> str:
    """Return NCCL_SOCKET_IFNAME if it names one interface of this host; empty for prefixes, lists and exclusions."""
    name = environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
    return name if name in {known for _, known in socket.if_nameindex()} else ""


def in_words(options: NCCLOptions, backend: str, world: int, environ: Mapping[str, str]) -> str:
    """Describe NCCL's variables, from the config and from the environment, in one line; empty if there are none."""
    variables = options.environment()
    own = " ".join(f"{name}={value}" for name, value in variables.items())
    if backend != "nccl" or world == 1:
        why = f"the backend is {backend}" if backend != "nccl" else "one rank does not communicate"
        return f"nccl: {own} has no effect: {why}" if own else ""
    others = sorted(name for name in environ if name.startswith("NCCL_") and name not in variables)
    inherited = " ".join(f"{name}={environ[name]}" for name in others)
    parts = filter(None, [own, inherited and f"from the environment {inherited}"])
    return f"nccl: {'; '.join(parts)}" if own or inherited else ""
