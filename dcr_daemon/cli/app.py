"""Assembles the commands, and turns every outcome of one into an exit code.

0 done · 1 unexpected · 2 usage or configuration · 10 incompatible · 11 no such stream or version · 12 fenced
13 corrupt · 14 out of disk or memory · 15 store unavailable · 16 engine refused · 17 input incomplete
130 interrupted · 143 ended by SIGTERM
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import dcr_daemon
from dcr_daemon.cli import Stopped, demo, forget, gc, log, materialize, plan, publish, status, subscribe, trace, verify
from dcr_daemon.cli.output import report_error, wants_json
from dcr_daemon.config import Known, read_config
from dcr_daemon.errors import DcrError, UsageError

INTERRUPTED = 130
_UsageError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="dcr",
    help=(
        "Moves RL policy weights from a trainer to vLLM servers through a bucket, as deltas, bit for bit.\n\n"
        "STREAM is file:///absolute/directory or s3://bucket/prefix. Every option can also be set in a TOML file "
        "(--config), and by the DCR_… variable that its help names. Results go to stdout, logs and errors to stderr."
    ),
    epilog=(
        "Exit codes: 0 done, 1 unexpected, 2 usage or configuration, 10 incompatible store, layout or input, 11 no "
        "such stream or version, 12 fenced, 13 corrupt, 14 resources, 15 store unavailable, 16 engine refused, "
        "17 input incomplete, 130 interrupted, 143 ended by SIGTERM (the daemons: 0)."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _help(docstring: str) -> str:
    """A docstring in paragraphs: typer would keep the line breaks of all but the first, and take [key] for markup."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).replace("[", "\\[")


for module in (publish, subscribe, log, status, forget, verify, gc, materialize, plan, trace, demo):
    name, settings = module.__name__.rpartition(".")[2], None
    if module.command is demo.missing:
        settings = demo.ANY_ARGUMENTS
    app.command(name, help=_help(module.command.__doc__ or ""), context_settings=settings)(module.command)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"dcr {dcr_daemon.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(envvar="DCR_CONFIG", metavar="FILE", help="TOML file with default values of options.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Load the configuration file before the command's own options are read."""
    command = context.invoked_subcommand
    if config is not None and command:
        group: Any = context.command
        context.default_map = {command: read_config(config, command, known=_known(group))}


def _known(group: Any) -> Known:
    """Every command's options, read from the commands themselves, so that file and flags always agree."""
    known = {}
    for name, command in group.commands.items():
        flags = [(p, o) for p in command.params for o in [*p.opts, *p.secondary_opts] if p.name != "help"]
        known[name] = {o.lstrip("-").lower(): p.name for p, o in flags if o.startswith("--") or not o.startswith("-")}
    return known


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Only bugs raise."""
    json = wants_json(arguments)
    try:
        code = app(args=list(arguments), prog_name="dcr", standalone_mode=False)
    except DcrError as error:
        return report_error(error.message, error.hint, error.kind, error.exit_code, json=json)
    except _UsageError as error:
        return _report_usage(error, json=json)
    except (KeyboardInterrupt, typer.Abort):
        return report_error("interrupted", "", "Interrupted", INTERRUPTED, json=json)
    except Stopped:
        raise
    except SystemExit:
        return 0  # only printing help ends so: whoever read it has gone, as after `dcr --help | head`
    if code == INTERRUPTED:  # typer's own answer to a KeyboardInterrupt
        return report_error("interrupted", "", "Interrupted", INTERRUPTED, json=json)
    return code if isinstance(code, int) else 0


def _report_usage(error: Any, *, json: bool) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    context = getattr(error, "ctx", None)
    hint = f"see `{context.command_path} --help`" if context else "see `dcr --help`"
    return report_error(error.format_message(), hint, UsageError.kind, 2, json=json)
