"""The version of the package, and how its extras are installed: the only place where either is written."""

__version__ = "0.1.0"


def install_extra(name: str) -> str:
    """The command that installs an extra: from the folder of the package, as long as no index has a release."""
    return f"pip install '.[{name}]' in the folder of sigsoftmax"
