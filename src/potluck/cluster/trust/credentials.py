"""A node's credentials from its files and settings."""

from __future__ import annotations

from potluck.cluster.trust.identity import load_or_create_identity
from potluck.cluster.trust.keyring import Keyring
from potluck.cluster.trust.secret import load_secret
from potluck.cluster.trust.store import TrustStore
from potluck.settings import Settings
from potluck.transport.credentials import Credentials, make_credentials, node_id_of


def load_credentials(settings: Settings) -> Credentials:
    """This node's credentials: its key certified with the cluster's secret, and the bans.

    Creates missing files in ``settings.home``, and reads changed files again at each connection.
    A secret from POTLUCK_PSK or POTLUCK_PASSPHRASE never changes.
    IdentityError or ConfigurationError as for ``load_or_create_identity`` and ``load_secret``.
    """
    key = load_or_create_identity(settings.home)
    trust = TrustStore(settings.home)
    if settings.psk is not None or settings.passphrase is not None:
        return make_credentials(load_secret(settings), key, trust.objects_to)
    keyring = Keyring(settings.home, key)
    return Credentials(node_id_of(key.public_key()), keyring.current, trust.objects_to)
