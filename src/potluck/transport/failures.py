"""Conversion of errors of sockets and of OpenSSL to potluck's, which name the peer and its
address."""

from __future__ import annotations

import errno
import ssl
import sys

from potluck.errors import LinkError, PotluckError, ProtocolError, WrongSecret

# Parts of OpenSSL's reason names that mean: one side did not accept the other's certificate.
_DISTRUST = (
    "ALERT_UNKNOWN_CA",
    "ALERT_BAD_CERTIFICATE",
    "ALERT_CERTIFICATE_UNKNOWN",
    "ALERT_UNSUPPORTED_CERTIFICATE",
    "ALERT_DECRYPT_ERROR",
    "ALERT_ACCESS_DENIED",
    "ALERT_CERTIFICATE_REQUIRED",
)


def translated(error: OSError, peer: str, doing: str) -> PotluckError:
    """The potluck error for ``error``, met while ``doing`` something with ``peer``.

    WrongSecret when a certificate was not accepted, by us or by the peer; ProtocolError when the
    peer's bytes are not TLS 1.3; LinkError for all that may pass or that ended the connection.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return WrongSecret(
            f"{peer} holds another cluster secret: its certificate was refused while {doing} "
            f"({error.verify_message})"
        )
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return LinkError(f"{peer} closed the connection while {doing}")
    if isinstance(error, ssl.SSLError):
        reason = error.reason or str(error)
        if any(part in reason for part in _DISTRUST):
            return WrongSecret(
                f"{peer} holds another cluster secret: it refused this node's certificate while "
                f"{doing} ({reason})"
            )
        if "DID_NOT_RETURN_A_CERTIFICATE" in reason:
            return WrongSecret(f"{peer} showed no certificate while {doing}")
        return ProtocolError(f"{peer} does not speak TLS 1.3 as potluck does ({reason}; {doing})")
    if isinstance(error, TimeoutError):
        return LinkError(f"{peer} did not answer in time while {doing}")
    cause = error.strerror or str(error) or type(error).__name__
    text = f"connection to {peer} failed while {doing}: {cause}"
    if error.errno == errno.EHOSTUNREACH and sys.platform == "darwin":
        text += (
            "; macOS answers this when the terminal may not use the local network: grant it in "
            "System Settings, Privacy & Security, Local Network"
        )
    return LinkError(text)
