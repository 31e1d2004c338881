"""What several commands make of their arguments."""

from __future__ import annotations

from pathlib import Path


def numbers(name: str, text: str) -> list[int]:
    """Parses a comma-separated list. Raises ValueError that names the argument."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} is {text!r}, must be a number, or several: 2,4") from None


def save(name: str, file: str, text: str) -> None:
    """Writes what an argument asks for. Raises ValueError, which names the argument, where that cannot be."""
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{name} {file}: {reason(error)}") from None


def reason(error: Exception) -> str:
    """Why a file could not be read or written, without the file's name, which the caller says."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
