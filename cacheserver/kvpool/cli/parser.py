# SPDX-License-Identifier: Apache-2.0
"""Every command and option, declared once; docs/reference/cli.md is generated from it. Imports argparse alone."""

import argparse

from kvpool._version import __version__

__all__ = ["build_parser"]

EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 wrong usage or configuration."


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; the parsed arguments name the command's module as ``module``."""
    parser = argparse.ArgumentParser(
        prog="kvpool", description="Node-local KV cache server for vLLM.", epilog=EXIT_CODES, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"kvpool {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _server(_command(commands, "server", "Run a cache server until SIGTERM or Ctrl-C."))
    _status(
        _command(
            commands,
            "status",
            "Show what a server holds, and in words why it does not hit; or how an engine stands to its servers.",
        )
    )
    _keys(_command(commands, "keys", "Make a CURVE key pair for a server that listens on TCP."))
    doctor = _command(commands, "doctor", "Look for what would stop kvpool from working on this machine.")
    doctor.set_defaults(module="kvpool.cli.doctor.command")
    _doctor(doctor)
    _sweep(_command(commands, "sweep", "Remove what deleted pools left on this node; nothing that lives is touched."))
    _bench(commands.add_parser("bench", help=(text := "Measure a server."), description=text))
    return parser


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, epilog=EXIT_CODES, allow_abbrev=False)
    parser.set_defaults(module=f"kvpool.cli.{name}")
    return parser


def _server_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="JSON file with the server's configuration")
    parser.add_argument(
        "--set",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        help="one setting, e.g. l1.size_bytes=8GiB; overrides the file and the environment; may be repeated",
    )


def _connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server",
        metavar="ADDRESS",
        help="ipc:///path or tcp://host:port (default: KVPOOL_CLIENT__SERVER, then ipc:///run/kvpool/kvpool.sock)",
    )
    parser.add_argument("--server-key", metavar="KEY", help="the server's public CURVE key; needed with tcp://")
    parser.add_argument("--secret-file", metavar="FILE", help="file with the secret shared with the server")
    parser.add_argument("--token-file", metavar="FILE", help="file with a service-account token for the pool")


def _server(parser: argparse.ArgumentParser) -> None:
    _server_config(parser)


def _status(parser: argparse.ArgumentParser) -> None:
    _connection(parser)
    parser.add_argument("--admin", metavar="SOCKET", help="the server's admin socket: also shows the clients")
    parser.add_argument(
        "--engine", metavar="URL", help="a vLLM server's address: shows how it stands to its cache servers, instead"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        type=float,
        nargs="?",
        const=2.0,
        help="repeat until Ctrl-C (every 2 seconds unless given)",
    )


def _keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", metavar="FILE", required=True, help="new file for the secret key, mode 0600; the public key is printed"
    )


def _doctor(parser: argparse.ArgumentParser) -> None:
    _server_config(parser)
    _connection(parser)
    parser.add_argument(
        "--engine-python", metavar="FILE", help="interpreter of the engine's environment: checks vLLM in it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pools",
        metavar="FILE",
        required=True,
        help="all pools, as `kubectl get kvp --all-namespaces --output json` prints them; - for standard input",
    )
    parser.add_argument("--none-exist", action="store_true", help="take an empty list for the truth")
    parser.add_argument(
        "--directory",
        metavar="DIR",
        default="/dev/shm/kvpool",  # noqa: S108 - the folder's place, not a file
        help="folder of L1 (default: /dev/shm/kvpool)",
    )
    parser.add_argument(
        "--sockets", metavar="DIR", default="/run/kvpool", help="folder of all pools' sockets (default: /run/kvpool)"
    )
    parser.add_argument(
        "--older-than",
        metavar="SECONDS",
        type=float,
        default=600.0,
        help="leave alone what was used later than that before now (default: 600)",
    )
    parser.add_argument("--dry-run", action="store_true", help="remove nothing, say what would be")


def _bench(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    text = (
        "Measure the control plane: lookups, plans, pings under load, stores and loads, restart, a killed client. "
        "A number is printed only after the bytes behind it were compared. Starts its own server unless given one."
    )
    control = kinds.add_parser(
        "control", help="Measure the control plane.", description=text, epilog=EXIT_CODES, allow_abbrev=False
    )
    control.set_defaults(module="kvpool.cli.bench.control")
    _connection(control)
    control.add_argument("--cells", metavar="NAMES", help="only these, separated by commas (default: all)")
    _number(control, "--tokens", 131072, "tokens of one request")
    _number(control, "--clients", 3, "processes that make load")
    control.add_argument("--seconds", type=float, metavar="S", default=5.0, help="length of a timed cell (default: 5)")
    control.add_argument("--shard-bytes", metavar="SIZE", default="256KiB", help="bytes of one chunk (default: 256KiB)")
    control.add_argument(
        "--restart-bytes", metavar="SIZE", default="1GiB", help="L1 of the restart cell (default: 1GiB)"
    )
    _number(control, "--metadata-chunks", 65536, "chunks of the metadata cell")
    _number(control, "--seed", 1, "seed of tokens and bytes")
    control.add_argument("--directory", metavar="DIR", help="folder on a tmpfs for own servers (default: /dev/shm)")
    control.add_argument("--json", metavar="FILE", help="also write the results, with facts of the machine")

    _bench_gpu(kinds)


def _bench_gpu(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = (
        "Measure what moves between a CUDA device and a server of the command's own, end to end from the client's "
        "call, beside the copy ceiling of the same run, and what the engine's own work loses meanwhile. Needs torch "
        "and Triton."
    )
    gpu = kinds.add_parser(
        "gpu", help="Measure moves between a GPU and a server.", description=text, epilog=EXIT_CODES, allow_abbrev=False
    )
    gpu.set_defaults(module="kvpool.cli.bench.gpu")
    gpu.add_argument("--cells", metavar="NAMES", help="only these, separated by commas (default: all)")
    gpu.add_argument(
        "--runs",
        metavar="SIZES",
        default="32KiB,8KiB,4KiB,2KiB",
        help="bytes that lie together in a block (default: 32KiB,8KiB,4KiB,2KiB)",
    )
    gpu.add_argument("--job", metavar="SIZE", default="2GiB", help="bytes of one request (default: 2GiB)")
    gpu.add_argument("--l1", metavar="SIZE", default="16GiB", help="L1 of the server (default: 16GiB)")
    gpu.add_argument("--seconds", type=float, metavar="S", default=1.0, help="length of an idle cell (default: 1)")
    gpu.add_argument(
        "--busy-seconds", type=float, metavar="S", default=2.5, help="length of a cell beside other work (default: 2.5)"
    )
    gpu.add_argument("--directory", metavar="DIR", help="folder on a tmpfs for the server (default: /dev/shm)")
    gpu.add_argument("--json", metavar="FILE", help="also write the results, with facts of the machine")


def _number(parser: argparse.ArgumentParser, option: str, default: int, text: str) -> None:
    parser.add_argument(option, type=int, metavar="N", default=default, help=f"{text} (default: {default})")
