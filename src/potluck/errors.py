"""Every error potluck raises.

    PotluckError
     ├── ConfigurationError      a setting, argument or environment variable is unusable: fix it
     ├── MissingDependency       an optional package is absent: run the pip command it names
     ├── SecurityError           a peer or a key file was not trusted; nothing was exchanged
     │    ├── WrongSecret        the peer holds another cluster secret
     │    ├── WrongCode          a pairing code is wrong or too old: run `potluck pair` for another
     │    └── IdentityError      my own key file is unreadable, readable by others, or damaged
     ├── ProtocolError           bytes that are not potluck's, or another version of it
     ├── LinkError               no link to a peer could be made, or it ended
     │    └── Refused            the peer answered and said no; its reason is in the text
     ├── GroupError              this group is over: every later call on it raises the same
     │    ├── PeerLost           a member is gone: form the next group and repeat the step
     │    ├── OperationTimeout   a member did not take part in time: as for PeerLost
     │    ├── Desync             ranks made different calls: a bug in the script, do not retry
     │    ├── RemoteError        another rank's own code failed: stop, its reason is in the text
     │    ├── Evicted            the others went on without me: form the next group as a newcomer
     │    └── GroupClosed        the group was closed here, by close() or by a newer epoch
     ├── AgentLost               the agent that started this worker is lost: stop
     ├── Diverged                replicas no longer hold equal parameters: resume from a checkpoint
     ├── CallbackError           a callback of the script raised; the text says which: fix it
     └── CheckpointError         a checkpoint can't be written or read; the previous one still can

Caller's mistakes (a wrong dtype, a rank out of range) are ``TypeError`` and ``ValueError``.
"""

from __future__ import annotations


class PotluckError(Exception):
    """Base of all errors raised by potluck."""


class ConfigurationError(PotluckError):
    """A setting, argument or environment variable can't be used; the text says how to fix it."""


class MissingDependency(PotluckError, ImportError):
    """An optional package is not installed; the text holds the pip command that installs it."""


class SecurityError(PotluckError):
    """A peer or a key file was not trusted. No payload was exchanged."""


class WrongSecret(SecurityError):
    """The peer's certificate was not issued under this cluster's secret, or mine not under its.

    To bring a machine into the cluster: ``potluck pair`` here, ``potluck join`` there.
    """


class WrongCode(SecurityError):
    """A pairing code was wrong or has expired. No machine got the secret: pair again."""


class IdentityError(SecurityError):
    """The node's own key file is unreadable, damaged, or readable by other users.

    The text names the file, and how to mend or replace it.
    """


class ProtocolError(PotluckError):
    """The peer sent bytes that potluck does not understand, or speaks another version.

    Install the same release of potluck on both machines; a port may also belong to another program.
    """


class LinkError(PotluckError):
    """A link could not be made within its deadline and retries, or it ended.

    The text names the address. Check that the peer runs, and that no firewall is between.
    """


class Refused(LinkError):
    """The peer answered and refused. ``code`` is one word, the text its reason."""

    def __init__(self, text: str, code: str = "refused") -> None:
        super().__init__(text)
        self.code = code


class GroupError(PotluckError, RuntimeError):
    """The group this call ran in is over; every later call on it raises the same error.

    ``rank`` is the member the error is about, -1 when it is about none in particular.
    ``certain`` says that the member's process is known to be gone, not only silent.
    """

    def __init__(
        self,
        text: str,
        *,
        rank: int = -1,
        epoch: int = -1,
        operation: str = "",
        certain: bool = False,
    ) -> None:
        super().__init__(text)
        self.rank = rank
        self.epoch = epoch
        self.operation = operation
        self.certain = certain


class PeerLost(GroupError):
    """A member is gone. Nothing of the interrupted step was applied: run it in the next group.

    ``ElasticLoop`` does that by itself; without the loop call ``ctx.reform(error)`` where
    ``ctx.elastic``, else start the job again from its last checkpoint.
    """

    PHRASE = "Connection closed by peer"
    """Part of the text: what Gloo says when a peer is lost, and what other programs search for."""


class OperationTimeout(GroupError):
    """A member did not take part before the deadline (``timeout``, ``POTLUCK_PEER_TIMEOUT_S``).

    Handle it as PeerLost. If the member is only slow, raise the deadline.
    """


class Desync(GroupError):
    """Ranks called different operations, or with different shapes, dtypes or options.

    A mistake in the script, such as a collective in a branch that only some ranks take: fix it.
    """


class RemoteError(GroupError):
    """Another rank's own code raised; the text carries that rank and its reason. Stop, and fix the
    error there."""


class Evicted(GroupError):
    """The others formed a group without this worker; it may come back as a newcomer."""


class GroupClosed(GroupError):
    """The group was closed on this rank before or while the operation ran.

    Sub-groups and Works of an old group end so when the context closes or re-forms.
    """


class AgentLost(PotluckError):
    """The agent that started this worker has ended, or can't be heard any more. Stop: no process
    watches this worker."""


class Diverged(PotluckError):
    """Replicas disagree about the parameters they should share.

    Raised on every rank. Resume from the last checkpoint, and look for what differs between ranks:
    seeds, data, versions, or an update that was applied outside the step.
    """


class CallbackError(PotluckError):
    """A callback or hook that the script gave to the training raised; the text names it."""


class CheckpointError(PotluckError):
    """A checkpoint can't be written or read; whatever was there before is untouched."""
