"""Refuses a `trainer` that Python finds before Echelon's. Such a file may import echelon, so this is imported first."""

from importlib.util import find_spec
from pathlib import Path

found = find_spec("trainer")
if found and found.origin and not Path(found.origin).samefile(Path(__file__).parents[1] / "trainer" / "__init__.py"):
    raise ImportError(f"{found.origin} hides Echelon's package trainer; rename it, or start in another folder")
