"""A node's credentials from its files and settings."""

from __future__ import annotations

from potluck.cluster.identity import load_or_create_identity
from potluck.cluster.secret import load_secret
from potluck.settings import Settings
from potluck.transport.credentials import Credentials, make_credentials


def load_credentials(settings: Settings) -> Credentials:
    """What this node shows and trusts: its own key under the cluster's secret.

    Makes both files in ``settings.home`` where they are missing. IdentityError or
    ConfigurationError as for ``load_or_create_identity`` and ``load_secret``.
    """
    return make_credentials(load_secret(settings), load_or_create_identity(settings.home))
