"""The version of this release, equal to that in pyproject.toml and in the native core."""

VERSION = "0.1.0"
