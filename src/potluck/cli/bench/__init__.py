"""Benchmarks of collectives: potluck and other libraries, measured in turns in one run.

A *peer* is a library under test with its settings (``peers``). ``comparison`` runs a comparison of
peers, ``crew`` the processes of one peer; ``worker`` is the program of these processes, and
``libraries`` has one file for each library.
"""
