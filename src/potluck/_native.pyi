"""What the extension offers, for type checkers: kept by hand beside native/bind*.cpp."""

version: str
has_openssl: bool

def cpu_features() -> list[str]: ...
