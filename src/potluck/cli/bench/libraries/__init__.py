"""The libraries under test, one file each: ``open_library`` joins this process to its group."""
