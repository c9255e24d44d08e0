"""Which workers of a job make its next group, and whether a training step counts. Pure.

``membership`` decides on groups, ``commit`` on steps.
"""
