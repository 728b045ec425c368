"""The `tandem` command. Imports of a subcommand's machinery happen when it runs, so that --help is instant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tandem.deploy.bench_options import add_bench_flags
from tandem.deploy.explain import add_explain_flags
from tandem.deploy.kernels_options import add_kernels_flags
from tandem.deploy.options import (
    NODE_OPTIONS,
    ROUTER_OPTIONS,
    SERVE_OPTIONS,
    Option,
    Values,
    add_flags,
    build,
    from_command_line,
)
from tandem.engine.config import NodeOptions, RouterOptions
from tandem.engine.errors import ConfigError

EXIT_BAD_CONFIG = 2
PRECEDENCE = (
    "Every option can also be given as TANDEM_<OPTION> in the environment, or in the YAML file of --config; the "
    "command line wins over the environment, the environment over the file."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code: 0, 1 when it failed, 2 for a bad flag, file or folder."""
    parsed = make_parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except ConfigError as error:
        print(f"tandem: {error.message}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem", description="Serve large language models with prefill and decode on separate nodes."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str, options: dict[str, Option]) -> None:
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=PRECEDENCE)
        add_flags(command, options)
        command.set_defaults(run=run)

    add("serve", run_serve, "serve a model: one node and a router, or a local cluster of processes", SERVE_OPTIONS)
    add("router", run_router, "run a router: HTTP, placement, the life of each request", ROUTER_OPTIONS)
    add("prefill", _run_node("prefill"), "run a node that computes prompts and hands their KV over", NODE_OPTIONS)
    add("decode", _run_node("decode"), "run a node that takes KV over and makes tokens", NODE_OPTIONS)
    add("unified", _run_node("unified"), "run a node that serves whole requests alone", NODE_OPTIONS)
    bench = commands.add_parser("bench", help="measure a running server", description="Measure a running server.")
    add_bench_flags(bench)
    bench.set_defaults(run=run_bench)
    text = "say what each node would cost for a prompt now, and why"
    explain = commands.add_parser("explain", help=text, description=f"{text[0].upper()}{text[1:]}.")
    add_explain_flags(explain)
    explain.set_defaults(run=run_explain)
    text = "say which kernels this machine has, which would serve a layer and why, and test them"
    kernels = commands.add_parser("kernels", help=text, description=f"{text[0].upper()}{text[1:]}.")
    add_kernels_flags(kernels)
    kernels.set_defaults(run=run_kernels)
    return parser


def run_serve(arguments: argparse.Namespace) -> int:
    from tandem.deploy.launcher import serve

    return serve(_checked(from_command_line(SERVE_OPTIONS, arguments)))


def run_router(arguments: argparse.Namespace) -> int:
    from tandem.router.main import run_router

    return run_router(build(RouterOptions, _checked(from_command_line(ROUTER_OPTIONS, arguments), with_weights=False)))


def _run_node(role: Any) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        options = build(NodeOptions, _checked(from_command_line(NODE_OPTIONS, arguments)), role=role)
        if role == "prefill":
            from tandem.prefill_node.main import run_node as run_prefill_node

            return run_prefill_node(options)
        from tandem.decode_node.main import run_node as run_decode_node

        return run_decode_node(options)

    return run


def run_bench(arguments: argparse.Namespace) -> int:
    if arguments.trace and arguments.simulate:
        from tandem.deploy.trace_simulation import run
    elif arguments.trace:
        from tandem.deploy.trace_replay import run
    elif arguments.simulate:
        raise ConfigError("--simulate replays a --trace; name one")
    else:
        from tandem.deploy.bench import run
    return run(arguments)


def run_explain(arguments: argparse.Namespace) -> int:
    from tandem.deploy.explain import run

    return run(arguments)


def run_kernels(arguments: argparse.Namespace) -> int:
    from tandem.deploy.kernels_report import run

    return run(arguments)


def _checked(values: Values, with_weights: bool = True) -> Values:
    """A model folder that can't be served fails here, before anything slow is imported. Raises CheckpointError."""
    from tandem.engine.model_config import load_model_config
    from tandem.engine.model_folder import resolve_model
    from tandem.engine.weights import stored_tensors

    folder = resolve_model(values["model"], values.get("revision", ""), with_weights)
    load_model_config(folder)
    if with_weights and values.get("load_format") != "dummy":
        stored_tensors(folder)
    return values


if __name__ == "__main__":
    sys.exit(main())
