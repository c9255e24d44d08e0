"""The version of this release; pyproject.toml and the native core say the same."""

VERSION = "0.1.0"
