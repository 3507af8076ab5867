"""Tables of what other people's code may use here, name by name: supported, or refused before the run."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """The names of a library's object. Refusals read `refused`.

    Args:
        given: Name -> the test under tests/ that compares it with the library's own numbers.
        refused: Name -> the reason, and what to use instead.
        notes: Name that is supported -> what it sets here.
        without_effect: Name on which no number depends -> what happens instead.
    """

    title: str
    given: dict[str, str]
    refused: dict[str, str]
    notes: dict[str, str] = field(default_factory=dict)
    without_effect: dict[str, str] = field(default_factory=dict)

    def section(self) -> str:
        """Return the table in Markdown, under its title."""
        notes = {name: f"{note}; " for name, note in self.notes.items()}
        rows = [
            f"| `{name}` | supported | {notes.get(name, '')}{link(test)} |" for name, test in sorted(self.given.items())
        ]
        rows += [f"| `{name}` | without effect | {note} |" for name, note in sorted(self.without_effect.items())]
        rows += [f"| `{name}` | refused | {reason} |" for name, reason in sorted(self.refused.items())]
        return "\n".join(
            [f"## {self.title}", "", "| name | here | test, or what to do instead |", "|---|---|---|", *rows]
        )


def page(tables: Iterable[Table]) -> str:
    """Return the sections of a page, below its introduction."""
    return "\n\n".join(table.section() for table in tables) + "\n"


def link(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[{name.removeprefix('test_').replace('_', ' ')}](../tests/{file})"
