"""How what is optional comes to be installed."""


def install_command(extra: str) -> str:
    """The command that installs an extra of Ratoon, which stands on no package index: it is run in the clone."""
    return f'pip install -e ".[{extra}]" in the clone of Ratoon'
