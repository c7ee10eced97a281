"""The version: the one place it is written down; pyproject.toml reads it from here."""

__version__ = "0.1.0"
