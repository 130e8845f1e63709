"""Tables in a file or a pipe: nobody can widen those afterwards."""

from __future__ import annotations

import pytest
from rich.table import Table

from dualpace.cli.tables import table_console


def test_rows_are_not_wrapped_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = Table()
    cells = [f"{column} {'x' * 11}" for column in range(7)]
    for column in range(7):
        table.add_column(str(column))
    table.add_row(*cells)
    table_console().print(table)
    assert any(all(cell in line for cell in cells) for line in capsys.readouterr().out.split("\n"))
