"""What the command line says when it cannot go on."""

import sys
from contextlib import suppress


def complain(command: str, message: object) -> None:
    """One paragraph on standard error, whatever line breaks a quoted error holds."""
    lines = (line.strip() for line in str(message).splitlines())
    with suppress(OSError, ValueError):  # nobody may read it any more; the exit status says it too
        print(f"ratoon {command}: {' '.join(line for line in lines if line)}", file=sys.stderr)
