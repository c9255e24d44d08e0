"""Services: functions that one worker offers to others, outside of any group.

``definition.py``: ``@potluck.service`` and what a method learns of its caller. ``access.py``: what
a context has of services. ``server.py``: the offering side; ``client.py``: the calling side;
``channel.py``: the frames between them (``wire/services.py``).
"""

from potluck.services.access import Services
from potluck.services.client import Remote
from potluck.services.definition import Call, service

__all__ = ["Call", "Remote", "Services", "service"]
