"""Services: functions that one process offers to others, outside of any group.

``definition.py``: ``@potluck.service``, a method's ``Call``, and running a method. ``access.py``:
the services of a context, inside of a job; ``node.py``: those of a program outside of jobs, found
through its machine's agent (``own_agent.py``). ``server.py``: the serving side; ``client.py``: the
calling side; ``channel.py``: the frames between them (``wire/services.py``). ``waits.py``: calls
that wait for a change; ``presence.py``: which workers still call.
"""

from potluck.services.access import Services
from potluck.services.client import Remote
from potluck.services.definition import Call, service
from potluck.services.node import NodeServices

__all__ = ["Call", "NodeServices", "Remote", "Services", "service"]
