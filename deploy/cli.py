"""The `tandem` command. Imports of a subcommand's machinery happen when it runs, so that --help is instant."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from tandem.deploy.command_line.closed_output import nobody_reads
from tandem.deploy.command_line.command_parser import CommandParser
from tandem.deploy.command_line.flags import add_flags, add_foreign_flags
from tandem.deploy.command_line.foreign_names import BENCH_WITHOUT_COUNTERPART, WITHOUT_COUNTERPART
from tandem.deploy.command_line.option import Option
from tandem.deploy.options import (
    BENCH_OPTIONS,
    CALIBRATE_OPTIONS,
    CHAT_OPTIONS,
    COMPLETE_OPTIONS,
    DRAIN_OPTIONS,
    EXPLAIN_OPTIONS,
    FIRST,
    KERNELS_OPTIONS,
    NODE_OPTIONS,
    PLAN_OPTIONS,
    PROFILE_OPTIONS,
    ROLE_OPTIONS,
    ROUTER_OPTIONS,
    SCALE_OPTIONS,
    SERVE_OPTIONS,
    STATUS_OPTIONS,
    STORY_OPTIONS,
    TRACE_OPTIONS,
    Values,
    build,
    from_command_line,
)
from tandem.engine.contracts.config import NodeOptions, RouterOptions, Timeouts
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.process.collector import collect_rarely
from tandem.engine.process.descriptors import raise_descriptor_limit
from tandem.engine.process.version import version

EXIT_BAD_CONFIG = 2
EXIT_SIGNAL = 128  # and the signal's number, as shells say it
PRECEDENCE = (
    "Every option can also be given as TANDEM_<OPTION> in the environment, or in the YAML file of --config; the "
    "command line wins over the environment, the environment over the file."
)
ROLES = {
    "prefill": "computes prompts and hands their KV over",
    "decode": "takes KV over and makes tokens",
    "unified": "serves whole requests alone",
}
Run = Callable[[argparse.Namespace], int]
Commands = argparse._SubParsersAction  # of CommandParser
CONFIG_HELP = "YAML file with options by name (max_num_seqs: 32)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code: 0, 1 when it failed, 2 for a bad flag, file or folder."""
    raise_descriptor_limit()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(given)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(f"tandem: {error.message}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except KeyboardInterrupt:
        return EXIT_SIGNAL + signal.SIGINT
    except BrokenPipeError:
        if not nobody_reads(sys.stdout.fileno()):
            raise  # another pipe is meant
        # What is left goes nowhere, or Python would complain when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_SIGNAL + signal.SIGPIPE


def _run(given: list[str]) -> int:
    if given[:1] == ["config"] and given[1:] not in (["-h"], ["--help"]):
        return show_config(given[1:])
    parsed = make_parser().parse_args(given or ["--help"])
    run: Run = parsed.run
    return run(parsed)


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tandem",
        usage="tandem COMMAND [OPTIONS]",
        description="Serve large language models with prefill and decode on separate nodes.",
    )
    parser.add_argument("--version", action="version", version=f"tandem {version()}", help="say the version")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", prog="tandem")
    _add_servers(commands)
    _add_tools(commands)
    _add_operators_tools(commands)
    _add_helpers(commands)
    return parser


def _add_servers(commands: Commands) -> None:
    def add(name: str, run: Run, text: str, options: dict[str, Option]) -> None:
        add_foreign_flags(_add(commands, name, run, text, options, FIRST), WITHOUT_COUNTERPART)

    add("serve", run_serve, "serve a model: a node and a router, or a local cluster", SERVE_OPTIONS)
    add("router", run_router, "run a router: HTTP, placement, the life of each request", ROUTER_OPTIONS)
    for role, text in ROLES.items():
        add(role, _run_node(role), f"run a node that {text}", NODE_OPTIONS)


def _add_tools(commands: Commands) -> None:
    _add(commands, "chat", run_chat, "talk with a running server", CHAT_OPTIONS)
    _add(commands, "complete", run_complete, "have a running server complete a text", COMPLETE_OPTIONS)
    options, first = {**BENCH_OPTIONS, **TRACE_OPTIONS}, {*BENCH_OPTIONS, "trace", "simulate", "config"}
    bench = _add(commands, "bench", run_bench, "measure a running server", options, first)
    add_foreign_flags(bench, BENCH_WITHOUT_COUNTERPART)
    text = "say how many nodes a measured load needs for given targets, from a simulation"
    _add(commands, "plan", run_plan, text, PLAN_OPTIONS)
    _add(commands, "explain", run_explain, "say what each node would cost for a prompt now, and why", EXPLAIN_OPTIONS)
    text = "measure the scales of fp8 KV on prompts, for --kv-scales"
    _add(commands, "calibrate", run_calibrate, text, CALIBRATE_OPTIONS)
    text = "have a server's nodes profile themselves, and show where the time of their steps goes"
    _add(commands, "profile", run_profile, text, PROFILE_OPTIONS)
    text = "say which kernels this machine has, which would serve a layer and why, and test them"
    _add(commands, "kernels", run_kernels, text, KERNELS_OPTIONS)


def _add_operators_tools(commands: Commands) -> None:
    _add(commands, "status", run_status, "show a running server's nodes: load, memory, cache hits", STATUS_OPTIONS)
    text = "have a node take nothing new, while what runs there ends or moves"
    _add(commands, "drain", _operates("run_drain", DRAIN_OPTIONS), text, DRAIN_OPTIONS)
    _add(commands, "role", _operates("run_role", ROLE_OPTIONS), "give a node another role", ROLE_OPTIONS)
    text = "tell what happened to a request, and when; without one, list the newest"
    _add(commands, "trace", _operates("run_trace", STORY_OPTIONS), text, STORY_OPTIONS)
    text = "keep pools of nodes in Kubernetes as large as the router's reports ask for"
    _add(commands, "scale", run_scale, text, SCALE_OPTIONS)


def _add_helpers(commands: Commands) -> None:
    config = commands.add_parser(
        "config",
        usage="tandem config [COMMAND] [OPTIONS of COMMAND]",
        help="show what is in force for a command (default: serve), and where it is set",
    )
    config.add_argument("command", nargs="?", choices=sorted(commands.choices), help="with its options")
    completion = commands.add_parser("completion", help="print completions of this command for a shell")
    completion.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"), help="whose completions")
    completion.set_defaults(run=run_completion)
    hash_key = commands.add_parser("hash-key", help="say an API key as its hash, for a keys file (docs/keys.md)")
    hash_key.add_argument("--new", action="store_true", help="make a key up, too")
    hash_key.set_defaults(run=run_hash_key)
    commands.add_parser("version", help="say the version").set_defaults(run=run_version)


def _add(
    commands: Commands, name: str, run: Run, text: str, options: dict[str, Option], first: Collection[str] | None = None
) -> CommandParser:
    """A command with an option table; `first` as for CommandParser."""
    positional = "".join(f" [{option.name.upper()}]" for option in options.values() if option.is_positional)
    command = commands.add_parser(
        name,
        help=text,
        usage=f"tandem {name}{positional} [OPTIONS]",
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=PRECEDENCE,
        first=first,
    )
    command.add_argument("--config", default=argparse.SUPPRESS, metavar="FILE", help=CONFIG_HELP)
    add_flags(command, options)
    command.set_defaults(run=run, options=options)
    return command


def show_config(given: Sequence[str]) -> int:
    from tandem.deploy.config_report import report

    is_named = bool(given) and not given[0].startswith("-")
    name, rest = (given[0], given[1:]) if is_named else ("serve", given)
    parsed = make_parser().parse_args([name, *rest])
    if "options" not in parsed:
        raise ConfigError(f"`tandem {name}` has no options")
    print(report(name, parsed.options, vars(parsed), os.environ))
    return 0


def run_completion(arguments: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(make_parser(), arguments.shell))
    return 0


def run_chat(arguments: argparse.Namespace) -> int:
    from tandem.deploy import talk

    return talk.run_chat(filled(CHAT_OPTIONS, arguments))


def run_complete(arguments: argparse.Namespace) -> int:
    from tandem.deploy import talk

    return talk.run_complete(filled(COMPLETE_OPTIONS, arguments))


def run_version(arguments: argparse.Namespace) -> int:
    print(f"tandem {version()}")
    return 0


def run_hash_key(arguments: argparse.Namespace) -> int:
    from tandem.deploy.hash_key import run

    return run(arguments.new)


def run_serve(arguments: argparse.Namespace) -> int:
    from tandem.deploy.launch.launcher import serve

    return serve(_checked(from_command_line(SERVE_OPTIONS, arguments)))


def run_router(arguments: argparse.Namespace) -> int:
    from tandem.router.process.main import run_router

    values = _checked(from_command_line(ROUTER_OPTIONS, arguments), with_weights=False)
    if not values.get("redis_url") and not values.get("nodes"):
        raise ConfigError("a router finds its nodes through --redis-url, or by --node for each: give one of them")
    return run_router(build(RouterOptions, values))


def _run_node(role: Any) -> Run:
    def run(arguments: argparse.Namespace) -> int:
        options = build(NodeOptions, _checked(from_command_line(NODE_OPTIONS, arguments)), role=role)
        collect_rarely()
        if role == "prefill":
            from tandem.prefill_node.main import run_node as run_prefill_node

            return run_prefill_node(options)
        from tandem.decode_node.main import run_node as run_decode_node

        return run_decode_node(options)

    return run


def run_bench(arguments: argparse.Namespace) -> int:
    arguments = filled({**BENCH_OPTIONS, **TRACE_OPTIONS}, arguments)
    if arguments.simulate and (arguments.json or arguments.output or arguments.picture):
        raise ConfigError("a simulation prints its table alone: leave --json, --output and --picture out")
    if arguments.trace and arguments.simulate:
        from tandem.deploy.bench.simulated.command import run
    elif arguments.trace:
        from tandem.deploy.bench.trace_replay import run
    elif arguments.simulate:
        raise ConfigError("--simulate replays a --trace; name one")
    else:
        from tandem.deploy.bench.load import run
    return run(arguments)


def run_plan(arguments: argparse.Namespace) -> int:
    from tandem.deploy.bench.plan import run

    arguments = filled(PLAN_OPTIONS, arguments)
    if not arguments.trace:
        raise ConfigError("--trace names the load to plan for: a trace, or a router's request log (docs/planning.md)")
    return run(arguments)


def run_explain(arguments: argparse.Namespace) -> int:
    from tandem.deploy.explain import run

    return run(filled(EXPLAIN_OPTIONS, arguments))


def run_calibrate(arguments: argparse.Namespace) -> int:
    from tandem.deploy.calibrate import run

    return run(filled(CALIBRATE_OPTIONS, arguments))


def run_profile(arguments: argparse.Namespace) -> int:
    from tandem.deploy.profile.command import run

    return run(filled(PROFILE_OPTIONS, arguments))


def run_status(arguments: argparse.Namespace) -> int:
    from tandem.deploy.cluster_status import run

    return run(filled(STATUS_OPTIONS, arguments))


def _operates(name: str, options: dict[str, Option]) -> Run:
    def run(arguments: argparse.Namespace) -> int:
        from tandem.deploy import operate

        found: int = getattr(operate, name)(filled(options, arguments))
        return found

    return run


def run_scale(arguments: argparse.Namespace) -> int:
    from tandem.deploy.scale.command import run

    return run(filled(SCALE_OPTIONS, arguments))


def run_kernels(arguments: argparse.Namespace) -> int:
    from tandem.deploy.kernels_report import run

    return run(filled(KERNELS_OPTIONS, arguments))


def filled(options: dict[str, Option], arguments: argparse.Namespace) -> argparse.Namespace:
    """Every option's value, from wherever it is set."""
    defaults = {name: option.default for name, option in options.items()}
    return argparse.Namespace(**{**defaults, **from_command_line(options, arguments)})


def _checked(values: Values, with_weights: bool = True) -> Values:
    """`values` with the model's folder in place of its hub name, so that all processes serve the same revision of it.

    What can't be served fails here, before anything slow is imported. Raises ConfigError.
    """
    from tandem.engine.contracts.model_config import is_native, load_model_config
    from tandem.engine.contracts.model_folder import resolve_model, served_name
    from tandem.engine.models.weights import stored_tensors

    timeouts = build(Timeouts, values)
    if timeouts.heartbeat_s >= timeouts.peer_lost_s:
        raise ConfigError(
            f"--heartbeat-s {timeouts.heartbeat_s:g} must be less than --peer-lost-s {timeouts.peer_lost_s:g}"
        )
    folder = resolve_model(values["model"], values.get("revision", ""), with_weights)
    if is_native(folder) and values.get("model_impl") != "transformers":
        load_model_config(folder)
    if with_weights and values.get("load_format") != "dummy":
        stored_tensors(folder)
    if folder == Path(values["model"]).expanduser():
        return values
    return {**values, "model": str(folder), "served_name": values.get("served_name") or served_name(values["model"])}


if __name__ == "__main__":
    sys.exit(main())
