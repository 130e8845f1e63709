"""The `dualpace` command. Each subcommand lives in a module of its name."""

from __future__ import annotations

from typing import Annotated

import typer

from dualpace.cli.bench import bench_app
from dualpace.cli.chat import chat
from dualpace.cli.demo import demo
from dualpace.cli.profile import profile_app
from dualpace.cli.serve import serve
from dualpace.cli.simulate import simulate
from dualpace.core.version import __version__

app = typer.Typer(
    name="dualpace",
    help="LLM serving on a GPU and its host.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Rich cuts long names of options on a narrow terminal
)
app.command()(serve)
app.command()(chat)
app.command()(demo)
app.command()(simulate)
app.add_typer(bench_app, name="bench")
app.add_typer(profile_app, name="profile")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dualpace {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """LLM serving on a GPU and its host."""


if __name__ == "__main__":
    app()
