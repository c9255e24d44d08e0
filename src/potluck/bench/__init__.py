"""Measuring collectives side by side: potluck and other libraries, in turns, in one run.

``comparison`` runs a whole comparison, ``crew`` the processes of one peer, ``worker`` is what each
of those processes does, and ``libraries`` holds one file per library under test.
"""
