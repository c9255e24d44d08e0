"""The credentials of this process from files and settings: a node's, or a worker's."""

from __future__ import annotations

from pathlib import Path

from potluck._core.cluster.trust.admission_file import ADMISSIONS_FILE, AdmissionFile
from potluck._core.cluster.trust.identity import load_or_create_identity
from potluck._core.cluster.trust.keyring import node_keyring
from potluck._core.cluster.trust.secret import is_secret_given, load_secret
from potluck._core.cluster.trust.worker_home import load_worker_credentials
from potluck._core.settings import Settings
from potluck._core.transport.credentials import Credentials, era_of, namespace_of


def load_credentials(settings: Settings) -> Credentials:
    """The credentials of a process that trains: those of its job, if an agent started it, else this
    node's. Errors as for ``load_node_credentials`` and ``load_worker_credentials``."""
    if settings.worker_home:
        return load_worker_credentials(Path(settings.worker_home))
    return load_node_credentials(settings)


def load_node_credentials(settings: Settings) -> Credentials:
    """This node's credentials: its key, the cluster's secret, and the list of admitted keys.

    Creates missing files in ``settings.home``, with this node as the founder of a cluster of its
    own, and reads changed files again at each connection. A secret from POTLUCK_PSK or
    POTLUCK_PASSPHRASE never changes. IdentityError or ConfigurationError as for
    ``load_or_create_identity`` and ``load_secret``.
    """
    key = load_or_create_identity(settings.home)
    admissions = load_admissions(settings)
    if is_secret_given(settings):
        eras = (era_of(load_secret(settings)),)
        return Credentials(key, lambda: eras, admissions.objects_to)
    keyring = node_keyring(settings.home)
    admissions.found(key)
    return Credentials(key, keyring.eras, admissions.objects_to)


def load_admissions(settings: Settings) -> AdmissionFile:
    """The list of admitted keys of the cluster that ``settings`` name. Makes no file."""
    if not is_secret_given(settings):
        return AdmissionFile(settings.home)
    # A home may take part in several clusters whose secrets come from variables.
    namespace = namespace_of(load_secret(settings))
    return AdmissionFile(settings.home, f"{ADMISSIONS_FILE}.{namespace[:16]}")
