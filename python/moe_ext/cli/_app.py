"""All commands, and what becomes of their errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

import typer

from moe_ext._version import __version__
from moe_ext.cli import bench, calibrate, convert, doctor, explain, kernels, plan, report
from moe_ext.cli._console import console

NAME = "moe-ext"
# ClickException, of typer's own copy of click or of click: by a name that all versions have.
_ArgumentError = cast("type[Exception]", typer.BadParameter.__mro__[2])
_INTERRUPTED = 130
_FAILURES = (ValueError, OSError, RuntimeError, ModuleNotFoundError, MemoryError)
"""What commands raise for inputs and machines; everything else is a fault of theirs."""

app = typer.Typer(
    name=NAME,
    help="Mixture-of-Experts kernels: what this machine runs, and which experts stay in BF16.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("calibrate")(calibrate.calibrate)
app.command("plan")(plan.plan)
app.command("convert")(convert.convert)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)
app.command("kernels")(kernels.kernels)
app.add_typer(explain.app, name="explain")
app.add_typer(bench.app, name="bench")


def _say_version(wanted: bool) -> None:
    if wanted:
        console().print(f"{NAME} {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_say_version, is_eager=True, help="Say the version."
    ),
) -> None:
    pass


def run(arguments: Sequence[str] | None) -> int:
    """Run a command and return its exit code."""
    command = typer.main.get_command(app)
    args = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = command.main(args=args or ["--help"], prog_name=NAME, standalone_mode=False)
    except _ArgumentError as error:
        context = getattr(error, "ctx", None)
        name = NAME if context is None else context.command_path
        return _say(_message(error), 2, name)
    except (typer.Abort, KeyboardInterrupt):
        return _say("interrupted", 1)
    except BrokenPipeError:
        return 1  # whoever read the output has gone
    except _FAILURES as error:
        return _say(_message(error), 1)
    if code == _INTERRUPTED:  # which typer makes of it
        return _say("interrupted", 1)
    if not args:
        return 2
    return code if isinstance(code, int) else 0


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = str(getattr(error, "format_message", error.__str__)())
    return " ".join(text.split()).removeprefix("moe_ext: ") or type(error).__name__


def _say(text: str, code: int, name: str = NAME) -> int:
    print(f"{name}: {text}", file=sys.stderr)
    return code
