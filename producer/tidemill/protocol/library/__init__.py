"""The library of Redis Functions, written in Lua, by version.

Its functions carry the version in their names, because a server refuses a second library that
defines a name again; so processes of two versions can work on the same keys while an upgrade lasts.
"""

from functools import cache
from importlib.resources import files

#: Of the functions' names, arguments and replies; a change of any needs the next number.
VERSION = 2

#: What the Lua parts have in place of the version's name.
_PLACEHOLDER = "tmN"


def library_name(version: int = VERSION) -> str:
    """Return the name of a version's library, which its functions' names start with."""
    return f"tm{version}"


@cache
def library_source(version: int = VERSION) -> str:
    """Return the library as ``FUNCTION LOAD`` takes it."""
    parts = sorted(
        (part for part in files(__name__).iterdir() if part.name.endswith(".lua")),
        key=lambda part: part.name,
    )
    lua = "\n".join(part.read_text("utf-8") for part in parts)
    return f"#!lua name={_PLACEHOLDER}\n{lua}".replace(_PLACEHOLDER, library_name(version))
