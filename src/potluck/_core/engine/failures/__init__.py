"""The failures of a group: its state, the errors that end it, and the detection of hangs.

- ``group_state.py``: whether the group is alive; the first failure ends it for good
- ``group_errors.py``: which error a failure becomes, and how it travels to the other ranks
- ``hang_detection.py``: which rank holds up an operation that does not end
"""
