"""`dcr demo`: the command of `demo/dcr_demo` in a checkout; elsewhere an error that says where the demo is."""

from __future__ import annotations

import typer

from dcr_daemon.errors import UsageError

#: Without the demo its options are unknown too: whatever they are, the answer is the same.
ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def missing(context: typer.Context) -> None:
    """Say where the demo is: it is not part of the installed package.

    In a checkout of the source repository, `make demo` trains a small model, publishes it, refits a vLLM server and
    proves the result.
    """
    raise UsageError(
        "the demo is not part of the installed package",
        hint="run `make demo` in a checkout of the source repository",
    )


try:
    from dcr_demo.command import command
except ModuleNotFoundError as error:
    if error.name not in ("dcr_demo", "dcr_demo.command"):
        raise
    command = missing  # type: ignore[assignment]  # typer reads its own signature
