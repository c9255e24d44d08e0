"""Conversion of errors of sockets and of OpenSSL to potluck's, which name the peer and its
address."""

from __future__ import annotations

import errno
import ssl
import sys

from potluck.errors import LinkError, PotluckError, ProtocolError, SecurityError

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


def hung_up_at_knock() -> str:
    """What it means that a server hung up before it answered a knock."""
    return (
        "it hung up without a word: it holds another cluster secret, or is no potluck, or has "
        "just ended. To bring a machine into the cluster: `potluck pair` on a machine of the "
        "cluster, `potluck join` on the other"
    )


def translated(error: OSError, peer: str, doing: str) -> PotluckError:
    """The potluck error for ``error``, met while ``doing`` something with ``peer``.

    SecurityError when a certificate was not accepted, by us or by the peer; ProtocolError when the
    peer's bytes are not TLS 1.3; LinkError for all that may pass or that ended the connection.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return SecurityError(
            f"{peer} showed a certificate that no potluck makes ({error.verify_message}; {doing})"
        )
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return LinkError(f"{peer} closed the connection while {doing}")
    if isinstance(error, ssl.SSLError):
        reason = error.reason or str(error)
        if any(part in reason for part in _DISTRUST):
            return SecurityError(
                f"{peer} refused this node's certificate: it is no potluck, or of another version "
                f"({reason}; {doing})"
            )
        if "DID_NOT_RETURN_A_CERTIFICATE" in reason:
            return SecurityError(f"{peer} showed no certificate while {doing}")
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
