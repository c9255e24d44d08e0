"""Everything behind the door: what potluck runs on, and no script imports.

Its floors are in ARCHITECTURE.md; what the packages beside this one take from it is written down in
``tests/architecture/door.toml``.
"""
