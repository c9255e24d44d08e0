"""Every error potluck raises.

    PotluckError
     ├── ConfigurationError      a setting, argument or environment variable is unusable: fix it
     ├── MissingDependency       an optional package is absent: run the pip command it names
     ├── SecurityError           a peer or a key file was not trusted; nothing was exchanged
     │    ├── WrongSecret        the peer holds another cluster secret
     │    ├── WrongCode          a pairing code is wrong or expired: run `potluck pair` again
     │    └── IdentityError      this node's key file is unreadable, readable by others, or damaged
     ├── ProtocolError           the peer sent invalid bytes, or uses another protocol version
     ├── LinkError               no link to a peer could be made, or it ended
     │    └── Refused            the peer answered and refused; its reason is in the text
     ├── ServiceError            a call of a service has no result; no group is touched
     │    ├── UnknownService     there is no such service or method; the text says which there are
     │    ├── HandlerError       the method raised there; the text has its error and its place
     │    ├── ServiceTimeout     no result by the deadline: the call may have run
     │    └── ServiceLost        the service's worker ended, or can't be reached
     ├── GroupError              this group is over: every later call on it raises the same error
     │    ├── PeerLost           a member is lost: form the next group and repeat the step
     │    ├── OperationTimeout   a member did not take part in time: as for PeerLost
     │    ├── Desync             ranks made different calls: a bug in the script, do not retry
     │    ├── RemoteError        another rank's script failed: stop; its error is in the text
     │    ├── Evicted            the others went on without this rank: join the next group anew
     │    └── GroupClosed        the group was closed here, by close() or by a newer epoch
     ├── AgentLost               the agent that started this worker is lost: stop
     ├── ForkedProcess           the object belongs to the process that this one was forked from
     ├── FederationError         a federated round has too few clients, and was asked to end the run
     ├── Diverged                replicas no longer hold equal parameters: resume from a checkpoint
     ├── DataError               a file of the training's data is missing, damaged or does not fit
     ├── CallbackError           a callback of the script raised; the text says which: fix it
     └── CheckpointError         a checkpoint can't be written or read; earlier ones are untouched

Caller's mistakes (a wrong dtype, a rank out of range) are ``TypeError`` and ``ValueError``.
"""

from __future__ import annotations

from potluck._core.printable import lines_of


class PotluckError(Exception):
    """Base of all errors raised by potluck. Its text may quote a peer, and is safe to print."""

    def __str__(self) -> str:
        return lines_of(super().__str__())


class ConfigurationError(PotluckError):
    """A setting, argument or environment variable can't be used; the text says how to fix it."""


class MissingDependency(PotluckError, ImportError):
    """An optional package is not installed; the text has the pip command that installs it."""


class SecurityError(PotluckError):
    """A peer or a key file was not trusted. No payload was exchanged."""


class WrongSecret(SecurityError):
    """This node and the peer hold different cluster secrets, or the peer is no potluck.

    To add a machine to the cluster: ``potluck pair`` here, ``potluck join`` there.
    """


class WrongCode(SecurityError):
    """A pairing code was wrong or has expired. The secret was not sent; run ``potluck pair``
    again."""


class IdentityError(SecurityError):
    """The node's own key file is unreadable, damaged, or readable by other users.

    The text names the file, and how to repair or replace it.
    """


class ProtocolError(PotluckError):
    """The peer sent bytes that are invalid, or uses another version of the protocol.

    Install the same release of potluck on both machines, or check whether the port belongs to
    another program.
    """


class LinkError(PotluckError):
    """A link could not be made within its deadline and retries, or it ended.

    The text names the address. Check that the peer runs, and that no firewall blocks the port.
    """


class Refused(LinkError):
    """The peer answered and refused. ``code`` is a word for programs, the text the peer's
    reason."""

    def __init__(self, text: str, code: str = "refused") -> None:
        super().__init__(text)
        self.code = code


class ServiceError(PotluckError):
    """A call of a service has no result. Groups go on; other calls may still succeed."""


class UnknownService(ServiceError):
    """There is no service or method of this name; the text names those that there are. Nothing was
    run."""


class HandlerError(ServiceError):
    """The method raised. ``type`` is the name of its error, ``text`` what that says, ``place`` the
    file, line and function on the service's worker."""

    def __init__(self, message: str, *, type: str, text: str, place: str) -> None:
        super().__init__(message)
        self.type = type
        self.text = text
        self.place = place


class ServiceTimeout(ServiceError):
    """No result came by the deadline (``timeout``). The method may have run, or still run."""


class ServiceLost(ServiceError):
    """The service's worker has ended, or can't be reached; the text says whether the call was sent.

    A call that was sent may have run. Call again only if that does no harm; the next call makes a
    new connection.
    """


class GroupError(PotluckError, RuntimeError):
    """The group of this call is over; every later call on it raises the same error.

    ``rank`` is the member that the error is about, -1 for no particular member. ``certain``: the
    member's process has certainly ended, and is not only silent.
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
    """A member is lost. Nothing of the interrupted step was applied: repeat it in the next group.

    ``ElasticLoop`` does that itself. Without the loop call ``ctx.reform(error)`` if
    ``ctx.elastic``, else start the job again from its last checkpoint.
    """

    PHRASE = "Connection closed by peer"
    """A part of the text, equal to Gloo's text for a lost peer, for which other programs search."""


class OperationTimeout(GroupError):
    """A member did not take part before the deadline (``timeout``, ``POTLUCK_PEER_TIMEOUT_S``).

    Handle it as PeerLost. If the member is only slow, raise the deadline.
    """


class Desync(GroupError):
    """Ranks called different operations, or with different shapes, dtypes or options.

    A mistake in the script, such as a collective in a branch that only some ranks take: fix it.
    """


class RemoteError(GroupError):
    """The script of another rank raised; the text names that rank and its error. Stop, and fix that
    error."""


class Evicted(GroupError):
    """The other members formed a group without this worker, which may join again as a newcomer."""


class GroupClosed(GroupError):
    """The group was closed on this rank before or while the operation ran.

    Sub-groups and Works of an old group raise it after the context was closed or re-formed.
    """


class AgentLost(PotluckError):
    """The agent that started this worker has ended, or is not reachable. Stop: no other process
    watches this worker."""


class ForkedProcess(PotluckError, RuntimeError):
    """The object belongs to the process that this one was forked from, where it goes on unharmed.

    Call it there, or start this process by "spawn" or "forkserver" and make its own context.
    """


class FederationError(PotluckError):
    """A federated run ends: a round had too few clients or updates, and ``Patience.too_few`` is
    ``"stop"``. The text names the round, how many there were, and how many were asked for."""


class Diverged(PotluckError):
    """The parameters of replicas differ, by more than unlike machines round differently.

    Raised on every rank. Resume from the last checkpoint, and look for a difference between ranks:
    in seeds, data or versions, or an update that was applied outside of the step.
    """


class DataError(PotluckError):
    """A file of the training's data is missing, damaged, or does not fit the others. The text names
    the file."""


class CallbackError(PotluckError):
    """A callback or hook of the script raised; the text names it."""


class CheckpointError(PotluckError):
    """A checkpoint can't be written or read; earlier checkpoints are untouched."""
