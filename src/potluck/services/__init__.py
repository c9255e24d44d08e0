"""Services: functions that one process offers to others, outside of any group.

``definition.py``: ``@potluck.service`` and what a method learns of its caller. ``access.py``: what
a context has of services, inside of a job; ``node.py``: what a program outside of jobs has of them,
by its machine's agent (``own_agent.py``). ``server.py``: the offering side; ``client.py``: the
calling side; ``channel.py``: the frames between them (``wire/services.py``).
"""

from potluck.services.access import Services
from potluck.services.client import Remote
from potluck.services.definition import Call, service
from potluck.services.node import NodeServices

__all__ = ["Call", "NodeServices", "Remote", "Services", "service"]
