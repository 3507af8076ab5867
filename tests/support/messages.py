"""What a test asks of a message for the user: the key, and what the user needs of the rest; the prose may change."""

import re
from typing import Any

import pytest

from trainer.errors import ConfigError


def refuses(key: str, *named: str, kind: type[Exception] = ConfigError) -> Any:
    """Expect an error `KEY: ...` or `KEY=VALUE: ...` that has the other texts in this order, after key and value.

    Args:
        named: Values, names, settings and commands of the reason and of the fix.
    """
    value = "" if "=" in key else r"(=[^\n]*?)?"
    rest = "".join(f".*{re.escape(text)}" for text in named)
    return pytest.raises(kind, match=rf"(?s)^{re.escape(key)}{value}: {rest}")
