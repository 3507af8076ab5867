"""Builds HTML in which every text is escaped, unless this module has made it."""

from html import escape


class Html(str):
    """Text that is HTML already."""


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element. Its attributes, and children that are not `Html`, are escaped.

    An attribute `class_` is `class`, `data_x` is `data-x`. True gives the name alone; None and False omit it.
    """
    words = [name]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(key)
        elif value is not None and value is not False:
            words.append(f'{key}="{escape(str(value))}"')
    opened = f"<{' '.join(words)}>"
    return Html(opened) if name in VOID else Html(f"{opened}{join(*children)}</{name}>")


VOID = ("meta", "input", "br")


def join(*children: object) -> Html:
    """Join pieces of HTML, and texts, which are escaped. None is omitted."""
    return Html("".join(c if isinstance(c, Html) else escape(str(c)) for c in children if c is not None))


def script_json(text: str) -> Html:
    """Escape JSON so that it can stand inside a script element."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(text)
