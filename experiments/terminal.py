"""What programs print: lines as they are, and tables that fit however narrow the terminal is."""

from collections.abc import Iterator
from typing import ClassVar

from rich import markdown
from rich.console import Console, ConsoleOptions
from rich.table import Table


def say(text: str, console: Console | None = None) -> None:
    """Prints a line as it is, on stderr unless told where: no markup, and no breaks in paths."""
    console = Console(stderr=True) if console is None else console
    console.print(text, highlight=False, markup=False, soft_wrap=True)


class _Table(markdown.TableElement):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        for table in super().__rich_console__(console, options):
            assert isinstance(table, Table)
            for column in table.columns:
                texts = map(str, (column.header, *column.cells))
                column.no_wrap = not any(" " in text for text in texts)  # the others give way
                column.overflow = "fold"
            yield table


class Markdown(markdown.Markdown):
    """As Rich's, but that a table's cells are wrapped where Rich would cut them."""

    elements: ClassVar = markdown.Markdown.elements | {"table_open": _Table}
